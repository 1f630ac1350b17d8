"""Settings of a training run: the loop, its folder, its loggers, its checkpoints."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from nemo_aligner.config.common import (
    Checks,
    IdleRule,
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
    min = "min"
    max = "max"


@dataclass
class PretrainedCheckpointConfig:
    """Start of training; a reward model keeps its scoring contract unless told otherwise.

    With ``new_head`` only a reward model's body is taken: the head, its attributes and their label
    means begin anew.
    """

    restore_from_path: str | None = setting(None, "a .nemo file, or the folder it unpacks to")
    allow_contract_change: bool = setting(
        False, "allow a change of a reward model's scoring contract"
    )
    new_head: bool = setting(False, "use only the body of a reward model, with a new head")
    load_rm_head_weights: str | None = setting(
        None, "a reward model whose head initializes the new one, by attribute"
    )
    rm_head_names: dict[str, str] = setting({}, "names of attributes there, where they differ")

    def __post_init__(self) -> None:
        with Checks("pretrained_checkpoint", self) as checks:
            fits = self.load_rm_head_weights is not None or not self.rm_head_names
            checks.require(fits, "rm_head_names", "{}, or load_rm_head_weights to be set")


@dataclass
class RmLoopConfig:
    """Length of training, and intervals of validation and saving in steps."""

    max_epochs: int = setting(1, "passes over the data")
    max_steps: int | None = setting(
        None, "stop after this many steps, if the epochs do not end before"
    )
    val_check_interval: int | None = setting(
        100, "steps between validations; null: only at the end"
    )
    val_before_training: bool = setting(False, "also validate before the first step")
    limit_val_records: int | None = setting(
        None, "records to validate on per set, drawn once; null: all"
    )
    save_interval: int | None = setting(100, "steps between checkpoints; null: only at the end")
    gradient_clip_val: float = setting(1.0, "largest gradient norm; 0: no clipping")

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


@dataclass
class TrainerConfig:
    """Precision and wall clock."""

    precision: Precision | None = setting(
        None, "null: bf16 on a GPU that has it, else fp32; a reward model keeps its own"
    )
    max_time: str | None = setting(
        None, "DD:HH:MM:SS of wall clock time, then the run saves and stops"
    )
    rm: RmLoopConfig = field(default_factory=RmLoopConfig)


@dataclass
class CheckpointCallbackConfig:
    """Keep the best checkpoints, and always the newest.

    A validation among the best is saved at once, whatever ``trainer.rm.save_interval`` says.
    Of equals the one with the lower loss on the same set is better, then the earlier.
    """

    monitor: str | None = setting(
        None, "set/metric, or metric of the first set; null: accuracy or pearson_mean"
    )
    mode: MonitorMode | None = setting(None, "null: the metric's own direction")
    save_top_k: int = setting(1, "how many of the best checkpoints to keep")
    average_best: int = setting(1, "average the weights of this many of the best")

    def __post_init__(self) -> None:
        with Checks("exp_manager.checkpoint_callback_params", self) as checks:
            checks.require_not_negative("save_top_k")
            wanted = f"1, or at most save_top_k ({self.save_top_k})"
            fits = self.average_best == 1 or 1 < self.average_best <= self.save_top_k
            checks.require(fits, "average_best", wanted)


@dataclass
class EarlyStoppingConfig:
    """End a run whose monitored metric, that of the best checkpoints, gets no better."""

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
    """Folder and loggers of a run; the folder's name is the run's."""

    explicit_log_dir: str = setting("results", "folder of the run")
    resume_if_exists: bool = setting(True, "resume from the newest checkpoint in it")
    create_tensorboard_logger: bool = setting(True, "log to TensorBoard")
    create_csv_logger: bool = setting(True, "log to a CSV file")
    create_wandb_logger: bool = setting(False, "log to Weights & Biases")
    wandb_logger_kwargs: dict[str, Any] = setting({}, "arguments of Lightning's WandbLogger")
    create_mlflow_logger: bool = setting(False, "log to MLflow")
    mlflow_logger_kwargs: dict[str, Any] = setting({}, "arguments of Lightning's MLFlowLogger")


LOGGER_KWARGS: tuple[IdleRule, ...] = (
    ({"exp_manager.create_wandb_logger": False}, ("exp_manager.wandb_logger_kwargs",)),
    ({"exp_manager.create_mlflow_logger": False}, ("exp_manager.mlflow_logger_kwargs",)),
)


@dataclass
class ExpManagerConfig(RunFolderConfig):
    """The folder of a training run, and which of its checkpoints are kept."""

    checkpoint_callback_params: CheckpointCallbackConfig = field(
        default_factory=CheckpointCallbackConfig
    )
    early_stopping_callback_params: EarlyStoppingConfig = field(default_factory=EarlyStoppingConfig)
    report: bool = setting(False, "write report.html into the run's folder when it ends or stops")


@dataclass
class TrainConfig:
    """The whole of ``nemo-aligner train``."""

    pretrained_checkpoint: PretrainedCheckpointConfig = field(
        default_factory=PretrainedCheckpointConfig
    )
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    exp_manager: ExpManagerConfig = field(default_factory=ExpManagerConfig)

    @property
    def precision(self) -> Precision:
        """``trainer.precision`` of settings whose null has been resolved (``prepare_run``)."""
        if self.trainer.precision is None:
            raise RuntimeError("trainer.precision is read before prepare_run resolved it")
        return self.trainer.precision


_CALLBACKS = "exp_manager.checkpoint_callback_params"
_EARLY = "exp_manager.early_stopping_callback_params"
_VALIDATION, _TEST = "model.data.data_prefix.validation", "model.data.data_prefix.test"
_OF_LORA = ("model.lora.alpha", "model.lora.dropout", "model.lora.targets")
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
IDLE_IN_TRAINING: tuple[IdleRule, ...] = (
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
