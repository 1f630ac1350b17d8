"""Translation of NeMo-Aligner 0.7 settings: a rule for every key of three of its YAML files.

The files are training_rm.yaml, inference_rm.yaml and gpt_ppo_critic.yaml in NeMo-Aligner's folder
examples/nlp/gpt/conf; keys that only their earlier versions have are translated, too. ``load.py``
applies the rules to every settings file and command line, and docs/migration/nemo_aligner_keys.md
shows them. No key is dropped silently: each key is translated, rejected with a reason, or reported
in a note as ignored.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import cached_property
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
    """The translation of one key of NeMo-Aligner.

    Attributes:
        key: the full key in NeMo-Aligner; ``*`` is a wildcard. If it is a section, the rule is for
            all keys in it.
        reason: a note for the user: why the key is ignored, or what to set instead.
        target: the key of this package that gets the value; empty if there is none.
        values: our value for each of NeMo-Aligner's values (as YAML); others stay the same.
        accepted: the only accepted values, as YAML; empty accepts all.
        same_as: a key or property of our settings that must have the same value as ``key``; this is
            checked after loading.
        adds: True if the value is appended to the list of ``target``.
    """

    key: str
    reason: str = ""
    target: str = ""
    values: Mapping[str, Any] = field(default_factory=dict)
    accepted: tuple[str, ...] = ()
    same_as: str = ""
    adds: bool = False


@dataclass(frozen=True)
class SameValue:
    """A check after loading: NeMo-Aligner's ``value`` must equal our setting ``rule.same_as``.

    Attributes:
        rule: the rule of the NeMo-Aligner key that has ``value``.
        value: the value in NeMo-Aligner's settings.
        location: the file with the key, for the error message; empty for the command line.
    """

    rule: KeyRule
    value: Any
    location: str

    def find_problem(self, config: object) -> str | None:
        """Return an error message if our setting in ``config`` has another value, else None."""
        rule, expected = self.rule, attrgetter(self.rule.same_as)(config)
        translated = rule.values.get(as_yaml(self.value), self.value)
        if as_yaml(translated) == as_yaml(expected):
            return None
        prefix = f"{self.location}: " * bool(self.location)
        return (
            f"{prefix}{rule.key}: got {as_yaml(self.value)}, wanted the same as "
            f"{rule.same_as} ({as_yaml(expected)}): {rule.reason}"
        )


class Translation:
    """Translator from NeMo-Aligner's settings to ours, which also collects notes and problems.

    An update is a settings file or a ``key=value`` argument. First ``register`` all updates, then
    ``translate`` each of them.

    Attributes:
        problems: ``(file, message)`` for each rejected value.
        pending: comparisons with our settings, which ``load.py`` runs after it has loaded them.
        added: ``(key of a list, values, file)`` for each key whose values are appended to a list.
            ``load.py`` appends them after all updates, because an update may set the list.
    """

    def __init__(self, rules: Sequence[KeyRule]) -> None:
        self._rules = rules
        self._updates: list[DictConfig] = []
        # For each key the last update that sets it; only this one counts.
        self._last_update: dict[str, DictConfig] = {}
        # Notes by the key that gets the value; by NeMo-Aligner's key if the value is appended.
        self._translated: dict[str, str] = {}
        self._ignored: dict[str, list[str]] = {}
        self.problems: list[tuple[str, str]] = []
        self.pending: list[SameValue] = []
        self.added: list[tuple[str, list[Any], str]] = []

    def register(self, update: DictConfig) -> None:
        """Store an update, before any update is translated.

        ``translate`` needs to know all updates: an update may refer to a value of another update
        (``${model.seed}``), and if several updates set the same key, the last one wins.
        """
        tree: Any = OmegaConf.to_container(update, resolve=False)
        self._last_update |= dict.fromkeys((key for key, _ in _list_leaves(tree)), update)
        self._updates.append(update)

    @cached_property
    def _settings(self) -> DictConfig:
        """All registered updates merged, without those that cannot be: ``load.py`` reports them."""
        merged = OmegaConf.create({})
        for update in self._updates:
            with suppress(OmegaConfBaseException):
                merged = OmegaConf.merge(merged, update)  # type: ignore[assignment]
        return merged

    def translate(self, update: DictConfig, location: str) -> DictConfig:
        """Translate the keys of a settings file, or of a ``key=value`` argument, to our keys.

        A message about each rejected value is added to ``problems``. If a value must equal one of
        our own settings, the check is added to ``pending``, because those are not loaded yet.

        Args:
            update: the settings with NeMo-Aligner's keys or ours; ``register`` already has them.
            location: path of the settings file, for error messages; empty for the command line.

        Returns:
            A copy of ``update`` with our keys only. It lacks the keys of NeMo-Aligner that have no
            counterpart here, those whose values are ``added`` to a list, and those that a later
            update sets again.
        """
        tree: Any = OmegaConf.to_container(update, resolve=False)
        # Keys that are renamed come last, so that they win over our key, wherever the file has it.
        leaves = sorted(_list_leaves(tree), key=lambda leaf: self.target(leaf[0]) != leaf[0])
        for key, value in leaves:
            resolved = self._resolve_references(key, value)
            if resolved is not value:
                _set_key(tree, key, resolved)
            rule = self._find_rule(key)
            if rule is None:
                self._translated.pop(key, None)
            elif self._last_update[key] is not update:
                # A later update sets the same key and wins, so this value is dropped.
                _remove_key(tree, key)
            else:
                if not rule.target or self.target(key) != key:
                    _remove_key(tree, key)
                self._apply(rule, key, resolved, tree, location)
        return OmegaConf.create(tree)

    def notes(self) -> list[str]:
        """List each translated key with our key, and each ignored key with the reason."""
        translated = list(self._translated.values())
        ignored = [
            f"{', '.join(keys)}: ignored: {reason}" for reason, keys in self._ignored.items()
        ]
        return translated + ignored

    def target(self, key: str) -> str:
        """Return our key for a key of NeMo-Aligner; a key without a rule is returned unchanged."""
        rule = self._find_rule(key)
        if rule is None or not rule.target:
            return key
        is_below = key.startswith(f"{rule.key}.")
        return rule.target + key[len(rule.key) :] if is_below else rule.target

    def _find_rule(self, key: str) -> KeyRule | None:
        matching_rules = (
            rule
            for rule in self._rules
            if key == rule.key
            or key.startswith(f"{rule.key}.")
            or ("*" in rule.key and fnmatchcase(key, rule.key))
        )
        return next(matching_rules, None)

    def _resolve_references(self, key: str, value: Any) -> Any:
        """Return ``value`` with references ``${...}`` to registered settings replaced."""
        if not isinstance(value, str) or "${" not in value:
            return value
        try:
            resolved = OmegaConf.select(self._settings, key, default=_MISSING)
        except OmegaConfBaseException:
            return value
        if OmegaConf.is_config(resolved):
            return OmegaConf.to_container(resolved)
        return value if resolved is _MISSING else resolved

    def _apply(
        self, rule: KeyRule, key: str, value: Any, tree: dict[str, Any], location: str
    ) -> None:
        if rule.accepted and as_yaml(value) not in rule.accepted:
            expected = " | ".join(rule.accepted)
            problem = f"{key}: got {shown(value)}, wanted {expected}: {rule.reason}"
            self.problems.append((location, problem))
        elif rule.same_as:
            self.pending.append(SameValue(rule, value, location))
        elif rule.adds:
            self._append_to_target(rule, key, value, location)
        elif rule.target:
            self._set_target(rule, key, value, tree)
        elif not rule.accepted:  # an accepted value needs no note: it changes nothing
            keys = self._ignored.setdefault(rule.reason, [])
            keys += [rule.key] * (rule.key not in keys)

    def _set_target(self, rule: KeyRule, key: str, value: Any, tree: dict[str, Any]) -> None:
        target = self.target(key)
        value_yaml = as_yaml(value)
        if value is None and target != key and "null" not in rule.values:
            return  # null means "not set", so our default stays
        translated = rule.values.get(value_yaml, value)
        self._translated.pop(target, None)
        if target == key and translated is value:
            return  # it is in the tree already, where its name may contain dots
        _set_key(tree, target, translated)
        taken = f"{target}={as_yaml(translated)}"
        self._translated[target] = f"{key}={value_yaml} is taken as {taken}"

    def _append_to_target(self, rule: KeyRule, key: str, value: Any, location: str) -> None:
        if not value:
            return  # null or an empty list adds nothing
        values = list(value) if isinstance(value, list) else [value]
        self.added.append((rule.target, values, location))
        self._translated[key] = f"{key}={as_yaml(value)} is taken as another of {rule.target}"


def _list_leaves(tree: Mapping[Any, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield ``(full key, value)`` for every setting in nested sections, but not for sections."""
    for name, value in tree.items():
        if isinstance(value, Mapping) and value:
            yield from _list_leaves(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def _set_key(tree: dict[str, Any], key: str, value: Any) -> None:
    """Set a full key in nested sections; missing sections are created."""
    *sections, name = key.split(".")
    for section_name in sections:
        section = tree.get(section_name)
        if not isinstance(section, dict):
            section = tree[section_name] = {}
        tree = section
    tree[name] = value


def _remove_key(tree: dict[str, Any], key: str) -> None:
    """Remove a full key from nested sections, and each section that becomes empty."""
    name, _, subkey = key.partition(".")
    if not subkey:
        tree.pop(name, None)
    elif isinstance(tree.get(name), dict):
        _remove_key(tree[name], subkey)
        if not tree[name]:
            del tree[name]


# The rules. Each line has the form: keys | action | reason. The actions are
#
# same              the key has the same name in this package
# ignored           the key has no effect in this package
# KEY               the key is called KEY in this package
# added to KEY      the value is appended to the list KEY
# as KEY            the value must equal that of KEY
# only A or B       any other value is an error
#
# An action may end with a colon and pairs ``theirs=ours``, which translate values.

_LAUNCH = """
defaults | only [{optional tp_overlap@model.ub_tp_comm_overlap_cfg: null}] or [_self_] or [] | other files are not included; move their settings into this one
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
model.force_head_dtype | ignored | the head is always fp32
model.use_avg_pool | only false | it averages over the whole text; model.head.reads=reply_mean averages over the reply
model.micro_batch_size, model.forward_micro_batch_size | ignored | the size of a micro-batch is set in tokens, model.micro_batch_tokens; it changes no result
model.global_batch_size, model.seed | same
"""
_OPTIMIZER = """
model.optim.name | only distributed_fused_adam or fused_adam or adamw or mcore_distributed_optim | the optimizer is AdamW, sharded over the ranks
model.optim.bucket_cap_mb, model.optim.overlap_grad_sync, model.optim.overlap_param_sync, model.optim.contiguous_grad_buffer | ignored | affects speed only; communication always overlaps with computation
model.optim.lr, model.optim.weight_decay, model.optim.betas | same
model.optim.sched.name | same: CosineAnnealing=cosine
model.optim.sched.warmup_steps | same | the learning rate of the first step is small, not 0
model.optim.sched.constant_steps | same | it is an error if no step is left for the decay; NeMo then trains at min_lr
model.optim.sched.min_lr | same
"""
_TRAIN = """
trainer.rm.max_epochs | same
trainer.rm.max_steps | same: -1=null
trainer.rm.val_check_interval | same | in steps; a fraction of an epoch is an error
trainer.rm.save_interval, trainer.rm.gradient_clip_val | same
trainer.rm.train_random_sampler | only true | training data is shuffled in every epoch
trainer.rm.val_random_sampler, model.data.validation_drop_last | ignored | validation uses every record once, in any order
trainer.rm.limit_val_batches | only 1.0 | set trainer.rm.limit_val_records, a number of records per set
trainer.max_time | same
trainer.max_epochs | as trainer.rm.max_epochs | only trainer.rm.max_epochs has an effect
trainer.max_steps | as trainer.rm.max_steps: -1=null | did you mean trainer.rm.max_steps? Only that has an effect
exp_manager.max_time_per_run | trainer.max_time
exp_manager.resume_from_checkpoint | only null | a run resumes from the newest checkpoint in exp_manager.explicit_log_dir
exp_manager.checkpoint_callback_params.monitor | same: val_loss=loss, val_acc=accuracy | a name without a set refers to the first validation set
exp_manager.checkpoint_callback_params.save_top_k, exp_manager.checkpoint_callback_params.mode | same
exp_manager.checkpoint_callback_params.save_nemo_on_train_end | only true | the archive is always written at the end
pretrained_checkpoint.restore_from_path, model.reward_model_type | same
model.regression.num_attributes | as model.num_attributes | model.regression.attributes lists their names
model.regression.merge_attributes | only false | a model keeps its attributes; servers and clients combine them (shaping.attribute_weights)
model.regression.attribute_weights | same: null={} | weights by name ({helpfulness: 1}), not a list
model.regression.loss_mask_val | same
model.regression.loss_func | only regression | pairs are model.reward_model_type=binary_ranking; margin_bt and scaled_bt are then model.objective_kwargs.label_margin=subtract and =scale
model.regression.load_rm_head_weights | pretrained_checkpoint.new_head: false=true, true=false
model.output_sequence | only false | a sample has one reward, not one for each token
model.encoder_seq_length, model.max_position_embeddings | as model.data.seq_length | training, evaluation and serving use the same maximum length
trainer.gradient_clip_val, model.gradient_clip_val | as trainer.rm.gradient_clip_val | only trainer.rm.gradient_clip_val has an effect
model.activations_checkpoint_granularity | same: null=none | NeMo-Aligner's file omits it and uses the base model's
model.activations_checkpoint_method | only null or block | for uniform omit model.activations_checkpoint_num_layers: all layers are recomputed
model.data.data_impl | only jsonl | files are JSON lines or tables (docs/data.md)
model.data.dataloader_type | only single | training data is shuffled in every epoch
model.data.splits_string | only null | nemo-aligner data split writes files for training and validation
model.data.seq_length | same | a longer pair is dropped and counted; NeMo-Aligner replaces it by a later pair
model.data.skip_warmup, model.data.num_workers | ignored | data is tokenized once, before the first step
model.data.reset_position_ids, model.data.reset_attention_mask, model.data.eod_mask_loss | only false | every sample has separate positions and attention
model.data.index_mapping_dir | model.data.index_dir
model.data.append_eod | model.data.add_eos
model.data.apply_ftfy | only false | texts are not changed
model.data.data_prefix.train | same | files only; weights go into train_weights
model.data.data_prefix.validation | same
model.data.data_prefix.validation?* | added to model.data.data_prefix.validation | each file is a separate set, named after it
model.data.data_prefix.test | same | the finished model is measured on it, once, at the end
model.overwrite_base_config | ignored | only shape and scoring contract come from the base model
"""
_SERVE = """
trainer.precision | precision: 32=fp32, 32-true=fp32, 16=fp16, 16-mixed=fp16, bf16-mixed=bf16
model.precision | as precision: 32=fp32, 32-true=fp32, 16=fp16, 16-mixed=fp16, bf16-mixed=bf16 | there is one precision
inference.port | server.port
inference.model_name | only reward_model | the endpoint always has this name
inference.max_queue_delay_microseconds, inference.inference_micro_batch_size, inference.micro_batch_size, model.forward_micro_batch_size | ignored | waiting samples are batched into calls of up to model.micro_batch_tokens
inference.strip_sequence_length_to_multiple | ignored | nothing is padded
rm_model_file, model.sequence_parallel | same
model.activations_checkpoint_granularity, model.activations_checkpoint_method | ignored | it saves memory in a backward pass, and a server has none
model.reward_standardization.enable | shaping.standardize: false=none, true=given
model.reward_standardization.mean | shaping.mean | a number, or one for each attribute
model.reward_standardization.std | shaping.std | a number, or one for each attribute
model.regression.merge_attributes | only false | set shaping.attribute_weights instead; NeMo-Aligner's default is the mean
model.regression.attribute_weights | only null | set them by name in shaping.attribute_weights
model.global_batch_size | ignored | a server has no steps
"""
_CRITIC = """
trainer.ppo.port | server.port
trainer.ppo.combine_rm_and_critic_server, trainer.ppo.max_steps, trainer.ppo.gradient_clip_val | same
trainer.ppo.max_queue_delay_microseconds, trainer.ppo.inference_micro_batch_size | ignored | waiting samples are batched into calls of up to model.micro_batch_tokens
trainer.ppo.strip_sequence_length_to_multiple, trainer.ppo.pad_sequence_length_to_multiple | ignored | nothing is padded
trainer.max_epochs | ignored | the actor's trainer counts epochs
trainer.max_steps | as trainer.ppo.max_steps | only trainer.ppo.max_steps has an effect
pretrained_checkpoint.restore_from_path | same
exp_manager.checkpoint_callback_params.monitor, exp_manager.checkpoint_callback_params.save_top_k, exp_manager.checkpoint_callback_params.mode, exp_manager.checkpoint_callback_params.save_nemo_on_train_end | ignored | the actor decides when to save: critic_save writes a checkpoint and its archive, and keeps the newest
model.loss_clip_val, model.offload_adam_states | same
model.output_sequence | only true | a critic has a value for each token
model.reward_standardization.enable | only false | the critic server returns raw values and rewards; nemo-aligner serve can standardize
model.reward_standardization.mean, model.reward_standardization.std | ignored | the critic server standardizes nothing
model.encoder_seq_length, model.max_position_embeddings, model.reward_model_type, model.regression.merge_attributes | ignored | the archive defines the maximum length, the attributes and how they are combined
model.regression.num_attributes | only 1 | several attributes are combined by the archive's attribute_weights; omit this key
model.regression.attribute_weights | only null | they are in the archive's scoring contract
trainer.gradient_clip_val, model.gradient_clip_val | as trainer.ppo.gradient_clip_val | only trainer.ppo.gradient_clip_val has an effect
"""


def _parse_tables(*tables: str) -> tuple[KeyRule, ...]:
    lines = [line for table in tables for line in table.strip().splitlines()]
    return tuple(rule for line in lines for rule in _parse_line(*line.split(" | ")))


def _parse_line(keys: str, action: str, reason: str = "") -> Iterator[KeyRule]:
    """Yield a rule for each key of one line ``keys | action | reason`` of the tables above."""
    verb, _, argument = action.partition(" ")
    if verb == "only":
        accepted = tuple(argument.split(" or "))
        yield from (KeyRule(key, reason, accepted=accepted) for key in keys.split(", "))
        return
    action, _, translations = action.partition(": ")
    pairs = [pair.split("=") for pair in translations.split(", ") if pair]
    values = {theirs: yaml.safe_load(ours) for theirs, ours in pairs}
    for key in keys.split(", "):
        if action == "ignored":
            yield KeyRule(key, reason)
        elif verb == "as":
            yield KeyRule(key, reason, values=values, same_as=action.removeprefix("as "))
        elif verb == "added":
            yield KeyRule(key, reason, target=action.removeprefix("added to "), adds=True)
        else:
            yield KeyRule(key, reason, target=key if action == "same" else action, values=values)


RULES: Mapping[type, tuple[KeyRule, ...]] = {
    TrainConfig: _parse_tables(_LAUNCH, _PRECISION, _RUN_FOLDER, _MODEL, _OPTIMIZER, _TRAIN),
    ServeConfig: _parse_tables(_LAUNCH, _SERVE),
    ServeCriticConfig: _parse_tables(_LAUNCH, _PRECISION, _RUN_FOLDER, _MODEL, _OPTIMIZER, _CRITIC),
}
"""The rules for each class of settings that a file of NeMo-Aligner is read as."""
FILES = {
    "training_rm.yaml": TrainConfig,
    "inference_rm.yaml": ServeConfig,
    "gpt_ppo_critic.yaml": ServeCriticConfig,
}
