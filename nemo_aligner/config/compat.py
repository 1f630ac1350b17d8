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


# The table of keys.

_PRECISIONS = {
    "32": "fp32",
    "32-true": "fp32",
    "16": "fp16",
    "16-mixed": "fp16",
    "bf16-mixed": "bf16",
}
_NO_STEPS = {"-1": None}


def _same(*keys: str, why: str = "", values: Mapping[str, Any] | None = None) -> list[KeyRule]:
    return [KeyRule(key, why, to=key, values=values or {}) for key in keys]


def _ignored(why: str, *keys: str) -> list[KeyRule]:
    return [KeyRule(key, why) for key in keys]


def _only(value: str, why: str, *keys: str) -> list[KeyRule]:
    return [KeyRule(key, why, only=(value,)) for key in keys]


def _clipping(counts: str) -> list[KeyRule]:
    keys = ("trainer.gradient_clip_val", "model.gradient_clip_val")
    return [KeyRule(key, "it is the one that counts", same_as=counts) for key in keys]


_LAUNCH = [
    KeyRule(
        "defaults",
        "other files are not read; move their settings into this one",
        only=("[{optional tp_overlap@model.ub_tp_comm_overlap_cfg: null}]", "[_self_]", "[]"),
    ),
    *_ignored(
        "the launcher says how many processes there are: --processes, torchrun or srun",
        "trainer.num_nodes",
        "trainer.devices",
    ),
    *_ignored("GPUs are used if there are any", "trainer.accelerator"),
    *_ignored("Lightning's trainer is not used", "trainer.logger", "trainer.enable_checkpointing"),
    *_ignored("Lightning's trainer is not used", "trainer.use_distributed_sampler"),
]
_PRECISION = [
    *_same("trainer.precision", values=_PRECISIONS),
    KeyRule(
        "model.precision",
        "there is one precision",
        same_as="trainer.precision",
        values=_PRECISIONS,
    ),
]
_RUN_FOLDER = [
    *_same("exp_manager.explicit_log_dir"),
    *_only("null", "set exp_manager.explicit_log_dir, the run's folder", "exp_manager.exp_dir"),
    *_ignored(
        "a run is named after its folder; its model is megatron_gpt.nemo", "exp_manager.name"
    ),
    *_same("exp_manager.create_wandb_logger", "exp_manager.wandb_logger_kwargs"),
    *_same("exp_manager.resume_if_exists"),
    *_only(
        "true",
        "a run without a checkpoint starts fresh",
        "exp_manager.resume_ignore_no_checkpoint",
    ),
    *_only("true", "checkpoints are always written", "exp_manager.create_checkpoint_callback"),
    *_ignored(
        "checkpoints are folders step_N, complete for any layout",
        "exp_manager.checkpoint_callback_params.filename",
        "exp_manager.checkpoint_callback_params.model_parallel_size",
    ),
    *_only(
        "false",
        "the archive is written once, at the end of the run or by critic_save",
        "exp_manager.checkpoint_callback_params.always_save_nemo",
    ),
]
_OPTIMIZER = [
    KeyRule(
        "model.optim.name",
        "the optimizer is AdamW, sharded over the ranks",
        only=("distributed_fused_adam", "fused_adam", "adamw", "mcore_distributed_optim"),
    ),
    *_ignored(
        "affects speed only; communication always overlaps with computation",
        "model.optim.bucket_cap_mb",
        "model.optim.overlap_grad_sync",
        "model.optim.overlap_param_sync",
        "model.optim.contiguous_grad_buffer",
    ),
    *_same("model.optim.lr", "model.optim.weight_decay", "model.optim.betas"),
    *_same("model.optim.sched.name", values={"CosineAnnealing": "cosine"}),
    *_same(
        "model.optim.sched.warmup_steps",
        why="the first step has a small rate, not 0",
    ),
    *_same(
        "model.optim.sched.constant_steps",
        why="a run is refused if they leave no step for the decay; NeMo trains it at min_lr",
    ),
    *_same("model.optim.sched.min_lr"),
]
_MODEL = [
    *_only("true", "models are megatron-core's", "model.mcore_gpt"),
    *_ignored("a reward model has no output layer", "model.share_embeddings_and_output_weights"),
    *_ignored("optimizers keep fp32 weights in any case", "model.megatron_amp_O2"),
    *_ignored("the head is fp32", "model.force_head_dtype"),
    *_only(
        "false",
        "its mean is over the whole text; model.head.reads=reply_mean is over the reply",
        "model.use_avg_pool",
    ),
    *_ignored(
        "packs have a size in tokens, model.micro_batch_tokens, which changes no result",
        "model.micro_batch_size",
        "model.forward_micro_batch_size",
    ),
    *_same("model.global_batch_size", "model.seed"),
]
_TRAIN = [
    *_LAUNCH,
    *_PRECISION,
    *_same("trainer.rm.max_epochs"),
    *_same("trainer.rm.max_steps", values=_NO_STEPS),
    *_same(
        "trainer.rm.val_check_interval",
        why="in steps; a fraction of an epoch is refused",
    ),
    *_same("trainer.rm.save_interval", "trainer.rm.gradient_clip_val"),
    *_only("true", "every epoch has its own order", "trainer.rm.train_random_sampler"),
    *_ignored(
        "validation takes every record once, in any order",
        "trainer.rm.val_random_sampler",
        "model.data.validation_drop_last",
    ),
    *_only(
        "1.0",
        "trainer.rm.limit_val_records says how many records of each set",
        "trainer.rm.limit_val_batches",
    ),
    *_same("trainer.max_time"),
    KeyRule("trainer.max_epochs", "it is the one that counts", same_as="trainer.rm.max_epochs"),
    KeyRule(
        "trainer.max_steps",
        "did you mean trainer.rm.max_steps? It is the one that counts",
        same_as="trainer.rm.max_steps",
        values=_NO_STEPS,
    ),
    KeyRule("exp_manager.max_time_per_run", to="trainer.max_time"),
    *_only(
        "null",
        "a run resumes from the newest checkpoint in exp_manager.explicit_log_dir",
        "exp_manager.resume_from_checkpoint",
    ),
    *_RUN_FOLDER,
    *_same(
        "exp_manager.checkpoint_callback_params.monitor",
        why="a name without a set refers to the first validation set",
        values={"val_loss": "loss", "val_acc": "accuracy"},
    ),
    *_same(
        "exp_manager.checkpoint_callback_params.save_top_k",
        "exp_manager.checkpoint_callback_params.mode",
    ),
    *_only(
        "true",
        "the archive is always written at the end",
        "exp_manager.checkpoint_callback_params.save_nemo_on_train_end",
    ),
    *_same("pretrained_checkpoint.restore_from_path"),
    *_MODEL,
    *_same("model.reward_model_type"),
    KeyRule(
        "model.regression.num_attributes",
        "model.regression.attributes names each of them",
        same_as="model.num_attributes",
    ),
    *_only(
        "false",
        "a model keeps its attributes; servers and clients merge them (shaping.attribute_weights)",
        "model.regression.merge_attributes",
    ),
    *_same(
        "model.regression.attribute_weights",
        why="weights by name ({helpfulness: 1}), not a list",
        values={"null": {}},
    ),
    *_same("model.regression.loss_mask_val"),
    *_only(
        "regression",
        "pairs are model.reward_model_type=binary_ranking; margin_bt and scaled_bt are then "
        "model.objective_kwargs.label_margin=subtract and =scale",
        "model.regression.loss_func",
    ),
    KeyRule(
        "model.regression.load_rm_head_weights",
        to="pretrained_checkpoint.new_head",
        values={"false": True, "true": False},
    ),
    *_only("false", "a text has one reward", "model.output_sequence"),
    *(
        KeyRule(
            key,
            "one length holds in training, evaluation and serving",
            same_as="model.data.seq_length",
        )
        for key in ("model.encoder_seq_length", "model.max_position_embeddings")
    ),
    *_clipping("trainer.rm.gradient_clip_val"),
    *_OPTIMIZER,
    *_same(
        "model.activations_checkpoint_granularity",
        why="NeMo-Aligner's file leaves it out and uses the base model's",
        values={"null": "none"},
    ),
    KeyRule(
        "model.activations_checkpoint_method",
        "for uniform omit model.activations_checkpoint_num_layers: all layers are recomputed",
        only=("null", "block"),
    ),
    *_only("jsonl", "files are JSON lines or tables (docs/data.md)", "model.data.data_impl"),
    *_only(
        "null",
        "nemo-aligner data split writes files for training and validation",
        "model.data.splits_string",
    ),
    *_same(
        "model.data.seq_length",
        why="a longer pair is dropped and counted; NeMo-Aligner uses a later one instead",
    ),
    *_ignored(
        "data is tokenized once, before the first step",
        "model.data.skip_warmup",
        "model.data.num_workers",
    ),
    *_only(
        "false",
        "every text has its own positions and attention",
        "model.data.reset_position_ids",
        "model.data.reset_attention_mask",
        "model.data.eod_mask_loss",
    ),
    KeyRule("model.data.index_mapping_dir", to="model.data.index_dir"),
    KeyRule("model.data.append_eod", to="model.data.add_eos"),
    *_only("false", "texts are read as they are", "model.data.apply_ftfy"),
    *_same("model.data.data_prefix.train", why="files only; weights go into train_weights"),
    *_same("model.data.data_prefix.validation"),
    KeyRule(
        "model.data.data_prefix.validation?*",
        "each is a set of its own, named after its file",
        to="model.data.data_prefix.validation",
        adds=True,
    ),
    *_same("model.data.data_prefix.test", why="measured once, at the end, on the finished model"),
    *_ignored(
        "only shape and scoring contract are taken from the base model",
        "model.overwrite_base_config",
    ),
]
_SERVE = [
    *_LAUNCH,
    KeyRule("trainer.precision", to="precision", values=_PRECISIONS),
    KeyRule("model.precision", "there is one precision", same_as="precision", values=_PRECISIONS),
    KeyRule("inference.port", to="server.port"),
    *_only("reward_model", "the endpoint always has this name", "inference.model_name"),
    *_ignored(
        "waiting rows form calls of up to model.micro_batch_tokens",
        "inference.max_queue_delay_microseconds",
        "inference.inference_micro_batch_size",
        "model.forward_micro_batch_size",
    ),
    *_ignored("nothing is padded", "inference.strip_sequence_length_to_multiple"),
    *_same("rm_model_file", "model.sequence_parallel"),
    *_ignored(
        "it saves memory in the backward pass, and there is none",
        "model.activations_checkpoint_granularity",
        "model.activations_checkpoint_method",
    ),
    KeyRule(
        "model.reward_standardization.enable",
        to="shaping.standardize",
        values={"false": "none", "true": "given"},
    ),
    KeyRule(
        "model.reward_standardization.mean", "a number, or one for each attribute", "shaping.mean"
    ),
    KeyRule(
        "model.reward_standardization.std", "a number, or one for each attribute", "shaping.std"
    ),
    *_only(
        "false",
        "name what is merged in shaping.attribute_weights; NeMo-Aligner's default is the mean",
        "model.regression.merge_attributes",
    ),
    *_only(
        "null",
        "set them by name in shaping.attribute_weights",
        "model.regression.attribute_weights",
    ),
    *_ignored("a server has no steps", "model.global_batch_size"),
]
_CRITIC = [
    *_LAUNCH,
    *_PRECISION,
    KeyRule("trainer.ppo.port", to="server.port"),
    *_same(
        "trainer.ppo.combine_rm_and_critic_server",
        "trainer.ppo.max_steps",
        "trainer.ppo.gradient_clip_val",
    ),
    *_ignored(
        "waiting rows form calls of up to model.micro_batch_tokens",
        "trainer.ppo.max_queue_delay_microseconds",
        "trainer.ppo.inference_micro_batch_size",
    ),
    *_ignored(
        "nothing is padded",
        "trainer.ppo.strip_sequence_length_to_multiple",
        "trainer.ppo.pad_sequence_length_to_multiple",
    ),
    *_ignored("the actor's trainer counts epochs", "trainer.max_epochs"),
    KeyRule("trainer.max_steps", "it is the one that counts", same_as="trainer.ppo.max_steps"),
    *_same("pretrained_checkpoint.restore_from_path"),
    *_RUN_FOLDER,
    *_ignored(
        "critic_save keeps the newest and writes its archive whenever the actor asks",
        "exp_manager.checkpoint_callback_params.monitor",
        "exp_manager.checkpoint_callback_params.save_top_k",
        "exp_manager.checkpoint_callback_params.mode",
        "exp_manager.checkpoint_callback_params.save_nemo_on_train_end",
    ),
    *_same("model.loss_clip_val", "model.offload_adam_states"),
    *_only("true", "a critic has a value for each token", "model.output_sequence"),
    *_only(
        "false",
        "values and rewards are the models' own; nemo-aligner serve can standardize",
        "model.reward_standardization.enable",
    ),
    *_ignored(
        "nothing is standardized here",
        "model.reward_standardization.mean",
        "model.reward_standardization.std",
    ),
    *_MODEL,
    *_ignored(
        "the archive has the length of texts, the attributes and how to merge them",
        "model.encoder_seq_length",
        "model.max_position_embeddings",
        "model.reward_model_type",
        "model.regression.merge_attributes",
    ),
    *_only(
        "1",
        "several are merged by the archive's attribute_weights; omit this key",
        "model.regression.num_attributes",
    ),
    *_only(
        "null",
        "the archive's scoring contract has them",
        "model.regression.attribute_weights",
    ),
    *_clipping("trainer.ppo.gradient_clip_val"),
    *_OPTIMIZER,
]
RULES: Mapping[type, tuple[KeyRule, ...]] = {
    TrainConfig: tuple(_TRAIN),
    ServeConfig: tuple(_SERVE),
    ServeCriticConfig: tuple(_CRITIC),
}
"""By the settings that a file of NeMo-Aligner is read as."""
FILES = {
    "training_rm.yaml": TrainConfig,
    "inference_rm.yaml": ServeConfig,
    "gpt_ppo_critic.yaml": ServeCriticConfig,
}
