"""Settings of ``train``, except those of the section ``model``.

They are the checkpoint to start from, the training loop, the run folder, loggers and checkpoints.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from nemo_aligner.config.common import (
    Checks,
    IneffectiveRule,
    Malformed,
    Precision,
    RewardModelType,
    setting,
)
from nemo_aligner.config.model import (
    ANY_ROWS,
    IN_CONSTANT_SCHEDULES,
    WHOLE_TEXTS,
    ModelConfig,
    Schedule,
)


class MonitorMode(Enum):
    """Whether a lower (min) or higher (max) value of the monitored metric is better."""

    min = "min"
    max = "max"


@dataclass
class PretrainedCheckpointConfig:
    """The model that training starts from.

    A reward model keeps its scoring contract, unless ``allow_contract_change`` is true. With
    ``new_head`` only its backbone is used: head, attributes and label means are new.
    """

    restore_from_path: str | None = setting(
        None, "base or reward model: a .nemo file, or a Hugging Face folder or name"
    )
    allow_contract_change: bool = setting(
        False, "allow a change of a reward model's scoring contract"
    )
    new_head: bool = setting(False, "use only the backbone of a reward model, with a new head")
    load_rm_head_weights: str | None = setting(
        None, "reward model whose head initializes the new head, by attribute name"
    )
    rm_head_names: dict[str, str] = setting(
        {}, "our attribute names -> those of load_rm_head_weights, if they differ"
    )

    def __post_init__(self) -> None:
        with Checks("pretrained_checkpoint", self) as checks:
            has_source = self.load_rm_head_weights is not None or not self.rm_head_names
            checks.require(has_source, "rm_head_names", "{}, or load_rm_head_weights to be set")


@dataclass
class RmLoopConfig:
    """Length of training, and the intervals between validations and checkpoints, in steps."""

    max_epochs: int = setting(1, "passes over the data")
    max_steps: int | None = setting(
        None, "stop after this many steps, if max_epochs is not reached before"
    )
    val_check_interval: int | None = setting(
        100, "steps between validations; null: only at the end"
    )
    val_before_training: bool = setting(False, "also validate before the first step")
    limit_val_records: int | None = setting(
        None, "records per validation set, drawn once at random; null: all"
    )
    save_interval: int | None = setting(100, "steps between checkpoints; null: only at the end")
    gradient_clip_val: float = setting(1.0, "maximum gradient norm; 0: no clipping")

    def __post_init__(self) -> None:
        with Checks("trainer.rm", self) as checks:
            checks.require_positive(
                "max_epochs",
                "max_steps",
                "val_check_interval",
                "limit_val_records",
                "save_interval",
            )
            checks.require(
                self.gradient_clip_val >= 0, "gradient_clip_val", "0 (no clipping) or more"
            )


_MAX_TIME = re.compile(r"(\d+):([01]?\d|2[0-3]):([0-5]?\d):([0-5]?\d)")


def parse_max_time(text: str) -> float | None:
    """Convert a time limit ``DD:HH:MM:SS`` to seconds; None if the text does not have this form."""
    match = _MAX_TIME.fullmatch(text.strip())
    if match is None:
        return None
    days, hours, minutes, seconds = (int(part) for part in match.groups())
    return ((days * 24 + hours) * 60 + minutes) * 60.0 + seconds


@dataclass
class TrainerConfig:
    """Precision, time limit, and the training loop."""

    precision: Precision | None = setting(
        None, "null: as the initial reward model; else bf16 if the GPU has it, or fp32"
    )
    max_time: str | None = setting(
        None, "wall-clock limit as DD:HH:MM:SS; then the run saves and stops"
    )
    rm: RmLoopConfig = field(default_factory=RmLoopConfig)

    def __post_init__(self) -> None:
        with Checks("trainer", self) as checks:
            is_readable = self.max_time is None or parse_max_time(self.max_time) is not None
            checks.require(is_readable, "max_time", "DD:HH:MM:SS, as in 00:03:45:00")


@dataclass
class CheckpointCallbackConfig:
    """The checkpoints to keep: the best ones, and always the newest.

    A checkpoint that is among the best is saved right after its validation, independent of
    ``trainer.rm.save_interval``. If two checkpoints have the same metric, the one with the lower
    loss on the same data is better; if the losses are equal, too, the earlier one is better.
    """

    monitor: str | None = setting(
        None, "metric of the first set, or validation-NAME/metric; null: by objective"
    )
    mode: MonitorMode | None = setting(
        None, "whether lower or higher is better; null: decided by the metric"
    )
    save_top_k: int = setting(1, "number of best checkpoints to keep")
    average_best: int = setting(1, "average the weights of this many best checkpoints")

    def __post_init__(self) -> None:
        with Checks("exp_manager.checkpoint_callback_params", self) as checks:
            checks.require_not_negative("save_top_k")
            expected = f"1, or at most save_top_k ({self.save_top_k})"
            is_kept = self.average_best == 1 or 1 < self.average_best <= self.save_top_k
            checks.require(is_kept, "average_best", expected)


@dataclass
class EarlyStoppingConfig:
    """When to end training early: the monitored metric no longer improves."""

    patience: int | None = setting(
        None, "stop after this many validations without improvement; null: never"
    )
    min_delta: float = setting(0.0, "smallest change that counts as an improvement")

    def __post_init__(self) -> None:
        with Checks("exp_manager.early_stopping_callback_params", self) as checks:
            checks.require_positive("patience")
            checks.require_not_negative("min_delta")


@dataclass
class RunFolderConfig:
    """Folder and loggers of a run; the name of the folder is the name of the run."""

    explicit_log_dir: str = setting("results", "folder of the run")
    resume_if_exists: bool = setting(True, "resume from the newest checkpoint in the run's folder")
    create_tensorboard_logger: bool = setting(True, "log to TensorBoard")
    create_csv_logger: bool = setting(True, "log to a CSV file")
    create_wandb_logger: bool = setting(False, "log to Weights & Biases")
    wandb_logger_kwargs: dict[str, Any] = setting({}, "arguments of Lightning's WandbLogger")
    create_mlflow_logger: bool = setting(False, "log to MLflow")
    mlflow_logger_kwargs: dict[str, Any] = setting({}, "arguments of Lightning's MLFlowLogger")


LOGGER_KWARGS: tuple[IneffectiveRule, ...] = (
    ({"exp_manager.create_wandb_logger": False}, ("exp_manager.wandb_logger_kwargs",)),
    ({"exp_manager.create_mlflow_logger": False}, ("exp_manager.mlflow_logger_kwargs",)),
)


@dataclass
class ExpManagerConfig(RunFolderConfig):
    """Folder, loggers and report of a training run, and which checkpoints it keeps."""

    checkpoint_callback_params: CheckpointCallbackConfig = field(
        default_factory=CheckpointCallbackConfig
    )
    early_stopping_callback_params: EarlyStoppingConfig = field(default_factory=EarlyStoppingConfig)
    report: bool = setting(False, "write report.html into the run's folder when it ends or stops")


@dataclass
class TrainConfig:
    """All settings of ``nemo-aligner train``."""

    pretrained_checkpoint: PretrainedCheckpointConfig = field(
        default_factory=PretrainedCheckpointConfig
    )
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    exp_manager: ExpManagerConfig = field(default_factory=ExpManagerConfig)

    @property
    def precision(self) -> Precision:
        """``trainer.precision``, after ``prepare_run`` has replaced null by a precision.

        Raises:
            RuntimeError: it is still null.
        """
        if self.trainer.precision is None:
            raise RuntimeError("trainer.precision is still null; call prepare_run, which sets it")
        return self.trainer.precision


_CALLBACKS = "exp_manager.checkpoint_callback_params"
_EARLY = "exp_manager.early_stopping_callback_params"
_VALIDATION, _TEST = "model.data.data_prefix.validation", "model.data.data_prefix.test"
_OF_LORA = (
    "model.lora.alpha",
    "model.lora.dropout",
    "model.lora.targets",
    "model.lora.base_precision",
)
_OF_RATINGS = (
    "model.regression.attributes",
    "model.regression.attribute_weights",
    "model.regression.loss_mask_val",
)
_OF_VALIDATION = (
    "trainer.rm.val_check_interval",
    "trainer.rm.val_before_training",
    "trainer.rm.limit_val_records",
    f"{_CALLBACKS}.mode",
    f"{_CALLBACKS}.save_top_k",
    f"{_CALLBACKS}.average_best",
)
INEFFECTIVE_IN_TRAINING: tuple[IneffectiveRule, ...] = (
    ANY_ROWS,
    WHOLE_TEXTS,
    *LOGGER_KWARGS,
    ({"model.optim.sched.name": Schedule.constant}, IN_CONSTANT_SCHEDULES),
    ({"model.lora.rank": 0}, _OF_LORA),
    ({"model.reward_model_type": RewardModelType.binary_ranking}, _OF_RATINGS),
    ({"model.data.malformed": Malformed.error}, ("model.data.max_malformed",)),
    ({_VALIDATION: []}, _OF_VALIDATION),
    ({_VALIDATION: [], _TEST: []}, ("model.data.allow_prompt_overlap",)),
    ({f"{_EARLY}.patience": None}, (f"{_EARLY}.min_delta",)),
)
