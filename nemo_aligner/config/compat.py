"""Settings of NeMo-Aligner 0.7: translation of its keys by rules, and the table of every key.

The table is of three files: training_rm.yaml, inference_rm.yaml and gpt_ppo_critic.yaml, in
examples/nlp/gpt/conf there. ``docs/migration/nemo_aligner_keys.md`` shows it. Nothing is dropped
silently: a key is taken, refused with a reason, or named in a note as ignored.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from operator import attrgetter
from typing import Any

import yaml
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from nemo_aligner.config.common import as_yaml
from nemo_aligner.config.serving import ServeConfig, ServeCriticConfig
from nemo_aligner.config.training import TrainConfig
from nemo_aligner.utils.errors import shown

_MISSING = object()


@dataclass(frozen=True)
class KeyRule:
    """Translation of one key of another program.

    Attributes:
        key: with its sections, and with ``*`` where it stands for several. All that lies below it
            is meant, too.
        why: what a person should know: why it is ignored, what to set instead of a refused value.
        to: the key here; empty for one that has no meaning here.
        values: values there, as YAML writes them, and what they are here; others stay the same.
        only: the only values that are taken, as YAML writes them; none: all are.
        same_as: the key, or property, that must have the same value in the end.
        adds: its list is added to that of ``to``.
    """

    key: str
    why: str = ""
    to: str = ""
    values: Mapping[str, Any] = field(default_factory=dict)
    only: tuple[str, ...] = ()
    same_as: str = ""
    adds: bool = False


@dataclass(frozen=True)
class SameValue:
    """A value that must be that of another key once all settings are known."""

    rule: KeyRule
    value: Any
    where: str

    def problem(self, config: object) -> str | None:
        """Return the problem, or None if the values agree."""
        rule, wanted = self.rule, attrgetter(self.rule.same_as)(config)
        got = rule.values.get(as_yaml(self.value), self.value)
        if as_yaml(got) == as_yaml(wanted):
            return None
        before = f"{self.where}: " * bool(self.where)
        return (
            f"{before}{rule.key}: got {as_yaml(self.value)}, wanted the same as "
            f"{rule.same_as} ({as_yaml(wanted)}): {rule.why}"
        )


class Translation:
    """Settings on their way from another program's keys, and what became of each.

    Attributes:
        problems: the file and a line, for each value that is refused.
        pending: values that are compared once all settings are known.
    """

    def __init__(self, rules: Sequence[KeyRule]) -> None:
        self._rules = rules
        self._given = OmegaConf.create({})
        self._last: dict[str, DictConfig] = {}
        self._taken: dict[str, str] = {}
        self._ignored: dict[str, list[str]] = {}
        self._added: dict[str, list[Any]] = {}
        self.problems: list[tuple[str, str]] = []
        self.pending: list[SameValue] = []

    def note(self, update: DictConfig) -> None:
        """Know of these settings: others may refer to them, and the last of a key counts."""
        tree: Any = OmegaConf.to_container(update, resolve=False)
        self._last |= dict.fromkeys((key for key, _ in _leaves(tree)), update)
        try:
            self._given = OmegaConf.merge(self._given, update)  # type: ignore[assignment]
        except OmegaConfBaseException:
            return  # whoever takes this setting says what is wrong with it

    def translate(self, update: DictConfig, where: str) -> DictConfig:
        """Translate settings into our keys; ``where`` names their file in errors."""
        tree: Any = OmegaConf.to_container(update, resolve=False)
        leaves = dict(_leaves(tree))
        for key, value in leaves.items():
            resolved = self._resolve(key, value)
            rule = self._rule_of(key)
            if rule is None:
                if resolved is not value:
                    _put(tree, key, resolved)
            elif self._last[key] is not update:
                # A later setting of this key counts: a file's, or one of the command line.
                _remove(tree, key)
            else:
                if rule.to != key:
                    _remove(tree, key)
                self._apply(rule, key, resolved, tree, where)
        return OmegaConf.create(tree)

    def notes(self) -> list[str]:
        """List each key that was translated, and each that was ignored with the reason."""
        taken = [f"{key} is taken as {to}" for key, to in self._taken.items()]
        ignored = [f"{', '.join(keys)}: ignored: {why}" for why, keys in self._ignored.items()]
        return taken + ignored

    def target(self, key: str) -> str:
        """The key here that takes the value of ``key``, which may be here already."""
        rule = self._rule_of(key)
        if rule is None or not rule.to:
            return key
        return rule.to + key[len(rule.key) :] if key.startswith(f"{rule.key}.") else rule.to

    def _rule_of(self, key: str) -> KeyRule | None:
        fits = (
            rule
            for rule in self._rules
            if fnmatchcase(key, rule.key) or key.startswith(f"{rule.key}.")
        )
        return next(fits, None)

    def _resolve(self, key: str, value: Any) -> Any:
        """A value without its references, where they can be followed among the settings given."""
        if not isinstance(value, str) or "${" not in value:
            return value
        try:
            found = OmegaConf.select(self._given, key, default=_MISSING)
        except OmegaConfBaseException:
            return value
        if OmegaConf.is_config(found):
            return OmegaConf.to_container(found)
        return value if found is _MISSING else found

    def _apply(self, rule: KeyRule, key: str, value: Any, tree: dict[str, Any], where: str) -> None:
        if rule.only and as_yaml(value) not in rule.only:
            wanted = " | ".join(rule.only)
            self.problems.append((where, f"{key}: got {shown(value)}, wanted {wanted}: {rule.why}"))
        elif rule.same_as:
            self.pending.append(SameValue(rule, value, where))
        elif rule.adds:
            self._add(rule, key, value, tree)
        elif rule.to:
            self._take(rule, key, value, tree)
        elif not rule.only:  # which says what is always so here
            keys = self._ignored.setdefault(rule.why, [])
            keys += [rule.key] * (rule.key not in keys)

    def _take(self, rule: KeyRule, key: str, value: Any, tree: dict[str, Any]) -> None:
        to = self.target(key)
        text = as_yaml(value)
        if value is None and to != key and "null" not in rule.values:
            return  # not set there, and so not here
        ours = rule.values.get(text, value)
        _put(tree, to, ours)
        if to != key or as_yaml(ours) != text:
            self._taken[f"{key}={text}"] = f"{to}={as_yaml(ours)}"

    def _add(self, rule: KeyRule, key: str, value: Any, tree: dict[str, Any]) -> None:
        added = self._added.setdefault(rule.to, [])
        added += _as_list(value)
        own = OmegaConf.select(self._given, rule.to, default=[])
        _put(tree, rule.to, [*_as_list(own), *added])
        self._taken[f"{key}={as_yaml(value)}"] = f"another of {rule.to}"


def _as_list(value: Any) -> list[Any]:
    if not value:
        return []
    return list(value) if isinstance(value, Iterable) and not isinstance(value, str) else [value]


def _leaves(tree: Mapping[Any, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield every full key that has no keys under it, with its value."""
    for name, value in tree.items():
        if isinstance(value, Mapping) and value:
            yield from _leaves(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def _put(tree: dict[str, Any], key: str, value: Any) -> None:
    *sections, name = key.split(".")
    for section in sections:
        below = tree.get(section)
        if not isinstance(below, dict):
            below = tree[section] = {}
        tree = below
    tree[name] = value


def _remove(tree: dict[str, Any], key: str) -> None:
    """Take a key out, and the sections that are empty without it."""
    name, _, rest = key.partition(".")
    if not rest:
        tree.pop(name, None)
    elif isinstance(tree.get(name), dict):
        _remove(tree[name], rest)
        if not tree[name]:
            del tree[name]


# The tables of keys: keys | what becomes of them | why.
#
# ``same`` keeps the key, another key takes its value (``added to``: its list gets one more), ``as``
# another key must agree with it in the end, ``only`` lists the values that are taken. Behind a
# colon is what values are called here.

_LAUNCH = """
defaults | only [{optional tp_overlap@model.ub_tp_comm_overlap_cfg: null}] or [_self_] or [] | other files are not read; move their settings into this one
trainer.num_nodes, trainer.devices | ignored | the launcher says how many processes there are: --processes, torchrun or srun
trainer.accelerator | ignored | GPUs are used if there are any
trainer.logger, trainer.enable_checkpointing, trainer.use_distributed_sampler | ignored | Lightning's trainer is not used
"""
_PRECISION = """
trainer.precision | same: 32=fp32, 32-true=fp32, 16=fp16, 16-mixed=fp16, bf16-mixed=bf16
model.precision | as trainer.precision: 32=fp32, 32-true=fp32, 16=fp16, 16-mixed=fp16, bf16-mixed=bf16 | there is one precision
"""
_RUN_FOLDER = """
exp_manager.explicit_log_dir | same
exp_manager.exp_dir | only null | set exp_manager.explicit_log_dir, the run's folder
exp_manager.name | ignored | a run is named after its folder; its model is megatron_gpt.nemo
exp_manager.create_wandb_logger, exp_manager.wandb_logger_kwargs, exp_manager.resume_if_exists | same
exp_manager.resume_ignore_no_checkpoint | only true | a run without a checkpoint starts fresh
exp_manager.create_checkpoint_callback | only true | checkpoints are always written
exp_manager.checkpoint_callback_params.filename, exp_manager.checkpoint_callback_params.model_parallel_size | ignored | checkpoints are folders step_N, complete for any layout
exp_manager.checkpoint_callback_params.always_save_nemo | only false | the archive is written once, at the end of the run or by critic_save
"""
_MODEL = """
model.mcore_gpt | only true | models are megatron-core's
model.share_embeddings_and_output_weights | ignored | a reward model has no output layer
model.megatron_amp_O2 | ignored | optimizers keep fp32 weights in any case
model.force_head_dtype | ignored | the head is fp32
model.use_avg_pool | only false | its mean is over the whole text; model.head.reads=reply_mean is over the reply
model.micro_batch_size, model.forward_micro_batch_size | ignored | packs have a size in tokens, model.micro_batch_tokens, which changes no result
model.global_batch_size, model.seed | same
"""
_OPTIMIZER = """
model.optim.name | only distributed_fused_adam or fused_adam or adamw or mcore_distributed_optim | the optimizer is AdamW, sharded over the ranks
model.optim.bucket_cap_mb, model.optim.overlap_grad_sync, model.optim.overlap_param_sync, model.optim.contiguous_grad_buffer | ignored | affects speed only; communication always overlaps with computation
model.optim.lr, model.optim.weight_decay, model.optim.betas | same
model.optim.sched.name | same: CosineAnnealing=cosine
model.optim.sched.warmup_steps | same | the first step has a small rate, not 0
model.optim.sched.constant_steps | same | a run is refused if they leave no step for the decay; NeMo trains it at min_lr
model.optim.sched.min_lr | same
"""
_TRAIN = """
trainer.rm.max_epochs | same
trainer.rm.max_steps | same: -1=null
trainer.rm.val_check_interval | same | in steps; a fraction of an epoch is refused
trainer.rm.save_interval, trainer.rm.gradient_clip_val | same
trainer.rm.train_random_sampler | only true | every epoch has its own order
trainer.rm.val_random_sampler, model.data.validation_drop_last | ignored | validation takes every record once, in any order
trainer.rm.limit_val_batches | only 1.0 | trainer.rm.limit_val_records says how many records of each set
trainer.max_time | same
trainer.max_epochs | as trainer.rm.max_epochs | it is the one that counts
trainer.max_steps | as trainer.rm.max_steps: -1=null | did you mean trainer.rm.max_steps? It is the one that counts
exp_manager.max_time_per_run | trainer.max_time
exp_manager.resume_from_checkpoint | only null | a run resumes from the newest checkpoint in exp_manager.explicit_log_dir
exp_manager.checkpoint_callback_params.monitor | same: val_loss=loss, val_acc=accuracy | a name without a set refers to the first validation set
exp_manager.checkpoint_callback_params.save_top_k, exp_manager.checkpoint_callback_params.mode | same
exp_manager.checkpoint_callback_params.save_nemo_on_train_end | only true | the archive is always written at the end
pretrained_checkpoint.restore_from_path, model.reward_model_type | same
model.regression.num_attributes | as model.num_attributes | model.regression.attributes names each of them
model.regression.merge_attributes | only false | a model keeps its attributes; servers and clients merge them (shaping.attribute_weights)
model.regression.attribute_weights | same: null={} | weights by name ({helpfulness: 1}), not a list
model.regression.loss_mask_val | same
model.regression.loss_func | only regression | pairs are model.reward_model_type=binary_ranking; margin_bt and scaled_bt are then model.objective_kwargs.label_margin=subtract and =scale
model.regression.load_rm_head_weights | pretrained_checkpoint.new_head: false=true, true=false
model.output_sequence | only false | a text has one reward
model.encoder_seq_length, model.max_position_embeddings | as model.data.seq_length | one length holds in training, evaluation and serving
trainer.gradient_clip_val, model.gradient_clip_val | as trainer.rm.gradient_clip_val | it is the one that counts
model.activations_checkpoint_granularity | same: null=none | NeMo-Aligner's file leaves it out and uses the base model's
model.activations_checkpoint_method | only null or block | for uniform omit model.activations_checkpoint_num_layers: all layers are recomputed
model.data.data_impl | only jsonl | files are JSON lines or tables (docs/data.md)
model.data.splits_string | only null | nemo-aligner data split writes files for training and validation
model.data.seq_length | same | a longer pair is dropped and counted; NeMo-Aligner uses a later one instead
model.data.skip_warmup, model.data.num_workers | ignored | data is tokenized once, before the first step
model.data.reset_position_ids, model.data.reset_attention_mask, model.data.eod_mask_loss | only false | every text has its own positions and attention
model.data.index_mapping_dir | model.data.index_dir
model.data.append_eod | model.data.add_eos
model.data.apply_ftfy | only false | texts are read as they are
model.data.data_prefix.train | same | files only; weights go into train_weights
model.data.data_prefix.validation | same
model.data.data_prefix.validation?* | added to model.data.data_prefix.validation | each is a set of its own, named after its file
model.data.data_prefix.test | same | measured once, at the end, on the finished model
model.overwrite_base_config | ignored | only shape and scoring contract are taken from the base model
"""
_SERVE = """
trainer.precision | precision: 32=fp32, 32-true=fp32, 16=fp16, 16-mixed=fp16, bf16-mixed=bf16
model.precision | as precision: 32=fp32, 32-true=fp32, 16=fp16, 16-mixed=fp16, bf16-mixed=bf16 | there is one precision
inference.port | server.port
inference.model_name | only reward_model | the endpoint always has this name
inference.max_queue_delay_microseconds, inference.inference_micro_batch_size, model.forward_micro_batch_size | ignored | waiting rows form calls of up to model.micro_batch_tokens
inference.strip_sequence_length_to_multiple | ignored | nothing is padded
rm_model_file, model.sequence_parallel | same
model.activations_checkpoint_granularity, model.activations_checkpoint_method | ignored | it saves memory in the backward pass, and there is none
model.reward_standardization.enable | shaping.standardize: false=none, true=given
model.reward_standardization.mean | shaping.mean | a number, or one for each attribute
model.reward_standardization.std | shaping.std | a number, or one for each attribute
model.regression.merge_attributes | only false | name what is merged in shaping.attribute_weights; NeMo-Aligner's default is the mean
model.regression.attribute_weights | only null | set them by name in shaping.attribute_weights
model.global_batch_size | ignored | a server has no steps
"""
_CRITIC = """
trainer.ppo.port | server.port
trainer.ppo.combine_rm_and_critic_server, trainer.ppo.max_steps, trainer.ppo.gradient_clip_val | same
trainer.ppo.max_queue_delay_microseconds, trainer.ppo.inference_micro_batch_size | ignored | waiting rows form calls of up to model.micro_batch_tokens
trainer.ppo.strip_sequence_length_to_multiple, trainer.ppo.pad_sequence_length_to_multiple | ignored | nothing is padded
trainer.max_epochs | ignored | the actor's trainer counts epochs
trainer.max_steps | as trainer.ppo.max_steps | it is the one that counts
pretrained_checkpoint.restore_from_path | same
exp_manager.checkpoint_callback_params.monitor, exp_manager.checkpoint_callback_params.save_top_k, exp_manager.checkpoint_callback_params.mode, exp_manager.checkpoint_callback_params.save_nemo_on_train_end | ignored | critic_save keeps the newest and writes its archive whenever the actor asks
model.loss_clip_val, model.offload_adam_states | same
model.output_sequence | only true | a critic has a value for each token
model.reward_standardization.enable | only false | values and rewards are the models' own; nemo-aligner serve can standardize
model.reward_standardization.mean, model.reward_standardization.std | ignored | nothing is standardized here
model.encoder_seq_length, model.max_position_embeddings, model.reward_model_type, model.regression.merge_attributes | ignored | the archive has the length of texts, the attributes and how to merge them
model.regression.num_attributes | only 1 | several are merged by the archive's attribute_weights; omit this key
model.regression.attribute_weights | only null | the archive's scoring contract has them
trainer.gradient_clip_val, model.gradient_clip_val | as trainer.ppo.gradient_clip_val | it is the one that counts
"""


def _read_tables(*tables: str) -> tuple[KeyRule, ...]:
    lines = [line for table in tables for line in table.strip().splitlines()]
    return tuple(rule for line in lines for rule in _read_row(*line.split(" | ")))


def _read_row(keys: str, what: str, why: str = "") -> Iterator[KeyRule]:
    """The rules of a row, one for each of its keys."""
    verb, _, rest = what.partition(" ")
    if verb == "only":
        yield from (KeyRule(key, why, only=tuple(rest.split(" or "))) for key in keys.split(", "))
        return
    action, _, renamed = what.partition(": ")
    pairs = [each.split("=") for each in renamed.split(", ") if each]
    values = {theirs: yaml.safe_load(ours) for theirs, ours in pairs}
    for key in keys.split(", "):
        if action == "ignored":
            yield KeyRule(key, why)
        elif verb == "as":
            yield KeyRule(key, why, values=values, same_as=action.removeprefix("as "))
        elif verb == "added":
            yield KeyRule(key, why, to=action.removeprefix("added to "), adds=True)
        else:
            yield KeyRule(key, why, to=key if action == "same" else action, values=values)


RULES: Mapping[type, tuple[KeyRule, ...]] = {
    TrainConfig: _read_tables(_LAUNCH, _PRECISION, _RUN_FOLDER, _MODEL, _OPTIMIZER, _TRAIN),
    ServeConfig: _read_tables(_LAUNCH, _SERVE),
    ServeCriticConfig: _read_tables(_LAUNCH, _PRECISION, _RUN_FOLDER, _MODEL, _OPTIMIZER, _CRITIC),
}
"""By the settings that a file of NeMo-Aligner is read as."""
FILES = {
    "training_rm.yaml": TrainConfig,
    "inference_rm.yaml": ServeConfig,
    "gpt_ppo_critic.yaml": ServeCriticConfig,
}
