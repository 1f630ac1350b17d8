"""Settings that do nothing where they stand: which, and because of which others."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from operator import attrgetter
from typing import Any, TypeAlias

from nemo_aligner.config.common import Malformed, RewardModelType, as_yaml
from nemo_aligner.config.evaluation import EvaluateConfig
from nemo_aligner.config.model import Schedule
from nemo_aligner.config.serving import Combine, ServeConfig, ServeCriticConfig
from nemo_aligner.config.training import TrainConfig

Rule: TypeAlias = tuple[Mapping[str, Any], tuple[str, ...]]
"""Where all settings of the first have these values, those of the second do nothing."""

_ANY = object()
"""Any value but null."""
_RANKS = "processes"
"""Not a setting, but how many ranks there are."""

_CALLBACKS = "exp_manager.checkpoint_callback_params"
_EARLY = "exp_manager.early_stopping_callback_params"
_VALIDATION, _TEST = "model.data.data_prefix.validation", "model.data.data_prefix.test"
_SCHEDULE = ("model.optim.sched.constant_steps", "model.optim.sched.min_lr")
_LAYOUT = (
    "model.tensor_model_parallel_size",
    "model.pipeline_model_parallel_size",
    "model.context_parallel_size",
    "model.expert_model_parallel_size",
    "model.sequence_parallel",
    "model.batch_invariant",
    "model.batch_invariant_rows",
)

_ANY_ROWS: Rule = ({"model.batch_invariant": False}, ("model.batch_invariant_rows",))
_OF_SEVERAL: Rule = ({_RANKS: 1}, ("server.heartbeat_secs", "server.worker_timeout_secs"))
_LOGGERS: tuple[Rule, ...] = (
    ({"exp_manager.create_wandb_logger": False}, ("exp_manager.wandb_logger_kwargs",)),
    ({"exp_manager.create_mlflow_logger": False}, ("exp_manager.mlflow_logger_kwargs",)),
)

_RULES: Mapping[type, tuple[Rule, ...]] = {
    TrainConfig: (
        _ANY_ROWS,
        *_LOGGERS,
        ({"model.optim.sched.name": Schedule.constant}, _SCHEDULE),
        (
            {"model.lora.rank": 0},
            ("model.lora.alpha", "model.lora.dropout", "model.lora.targets"),
        ),
        (
            {"model.reward_model_type": RewardModelType.binary_ranking},
            (
                "model.regression.attributes",
                "model.regression.attribute_weights",
                "model.regression.loss_mask_val",
            ),
        ),
        ({"model.data.malformed": Malformed.error}, ("model.data.max_malformed",)),
        (
            {_VALIDATION: []},
            (
                "trainer.rm.val_check_interval",
                "trainer.rm.val_before_training",
                "trainer.rm.limit_val_records",
                f"{_CALLBACKS}.mode",
                f"{_CALLBACKS}.save_top_k",
                f"{_CALLBACKS}.average_best",
            ),
        ),
        ({_VALIDATION: [], _TEST: []}, ("model.data.allow_prompt_overlap",)),
        ({f"{_EARLY}.patience": None}, (f"{_EARLY}.min_delta",)),
    ),
    ServeCriticConfig: (
        _ANY_ROWS,
        _OF_SEVERAL,
        *_LOGGERS,
        (
            {"model.optim.sched.name": Schedule.constant},
            (*_SCHEDULE, "trainer.ppo.max_steps"),
        ),
        (
            {"trainer.ppo.combine_rm_and_critic_server": False},
            ("rm_model_file", "trainer.ppo.offload_idle_model", "server.prefix_cache_tokens"),
        ),
        # All weights are loaded, the head's among them, and nothing is drawn.
        ({"pretrained_checkpoint.restore_from_path": _ANY}, ("model.seed",)),
    ),
    ServeConfig: (
        _ANY_ROWS,
        _OF_SEVERAL,
        ({"ensemble.files": []}, ("ensemble.combine", "ensemble.k")),
        ({"ensemble.combine": Combine.mean}, ("ensemble.k",)),
        ({"ensemble.combine": Combine.min}, ("ensemble.k",)),
    ),
    EvaluateConfig: (
        ({"server": _ANY}, (*_LAYOUT, "model.micro_batch_tokens")),
        ({"hf_model": _ANY}, _LAYOUT),
        _ANY_ROWS,
        ({"data.malformed": Malformed.error}, ("data.max_malformed",)),
        ({"robustness_pairs": _ANY}, ("data.loss_mask_val",)),
        ({"swapped": True}, ("data.loss_mask_val",)),
    ),
}


def idle_settings(config: object, ranks: int | None = None) -> dict[str, str]:
    """Settings other than their defaults that do nothing here, with those that have it so.

    Of ``model.lora.alpha`` at rank 0 that is ``model.lora.rank=0``. ``ranks`` says on how many the
    verb runs, None where no setting depends on it.
    """
    usual, found = type(config)(), dict[str, str]()
    for causes, keys in _RULES.get(type(config), ()):
        held = {key: ranks if key == _RANKS else attrgetter(key)(config) for key in causes}
        if all(_fits(held[key], value) for key, value in causes.items()):
            why = " and ".join(f"{key}={as_yaml(value)}" for key, value in held.items())
            for key in keys:
                if _differs(key, config, usual):
                    found.setdefault(key, why)
    return found


def idle_notes(
    config: object, ranks: int | None = None, said: Collection[str] = ()
) -> Iterator[str]:
    """Yield a note for each of ``idle_settings`` not yet ``said``, as a verb prints it."""
    for idle, cause in idle_settings(config, ranks).items():
        if idle not in said:
            yield f"note: {idle} does nothing\n  with {cause}"


def _fits(held: object, value: object) -> bool:
    return held is not None if value is _ANY else held == value


def _differs(key: str, config: object, usual: object) -> bool:
    value_of = attrgetter(key)
    return bool(value_of(config) != value_of(usual))
