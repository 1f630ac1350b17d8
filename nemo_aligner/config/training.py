"""Settings of a training run: the loop, its folder, its loggers, its checkpoints."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from nemo_aligner.config.common import Precision, require, require_positive
from nemo_aligner.config.model import ModelConfig


class MonitorMode(Enum):
    min = "min"
    max = "max"


@dataclass
class PretrainedCheckpointConfig:
    """``restore_from_path``: a ``.nemo`` file, or the folder it unpacks to.

    If it is a reward model, its scoring contract holds, unless ``allow_contract_change``.
    """

    restore_from_path: str | None = None
    allow_contract_change: bool = False


@dataclass
class RmLoopConfig:
    """How long to train, and how often to look and to save; intervals are in steps."""

    max_epochs: int = 1
    max_steps: int | None = None
    val_check_interval: int | None = 100
    val_before_training: bool = False
    save_interval: int | None = 100
    gradient_clip_val: float = 1.0

    def __post_init__(self) -> None:
        require_positive(
            "trainer.rm", self, "max_epochs", "max_steps", "val_check_interval", "save_interval"
        )
        require(
            self.gradient_clip_val >= 0,
            "trainer.rm.gradient_clip_val",
            self.gradient_clip_val,
            "0 (no clipping) or more",
        )


@dataclass
class TrainerConfig:
    """``max_time`` is DD:HH:MM:SS, the wall clock after which every rank saves and stops."""

    precision: Precision = Precision.fp32
    max_time: str | None = None
    rm: RmLoopConfig = field(default_factory=RmLoopConfig)


@dataclass
class CheckpointCallbackConfig:
    """Keep the ``save_top_k`` best checkpoints by ``monitor``, and always the newest.

    A validation among the best is saved at once, whatever ``trainer.rm.save_interval`` says.
    ``monitor: null`` is the first validation set's accuracy, or ``pearson_mean`` for regression;
    ``mode: null`` is what suits the metric.
    """

    monitor: str | None = None
    mode: MonitorMode | None = None
    save_top_k: int = 1

    def __post_init__(self) -> None:
        require(
            self.save_top_k >= 0,
            "exp_manager.checkpoint_callback_params.save_top_k",
            self.save_top_k,
            "0 or more",
        )


@dataclass
class ExpManagerConfig:
    """Where a run lives, and who is told about it; the run's name is the folder's."""

    explicit_log_dir: str = "results"
    resume_if_exists: bool = True
    create_tensorboard_logger: bool = True
    create_csv_logger: bool = True
    create_wandb_logger: bool = False
    wandb_logger_kwargs: dict[str, Any] = field(default_factory=dict)
    create_mlflow_logger: bool = False
    mlflow_logger_kwargs: dict[str, Any] = field(default_factory=dict)
    checkpoint_callback_params: CheckpointCallbackConfig = field(
        default_factory=CheckpointCallbackConfig
    )


@dataclass
class TrainConfig:
    """The whole of ``examples/train_reward_model.py``."""

    pretrained_checkpoint: PretrainedCheckpointConfig = field(
        default_factory=PretrainedCheckpointConfig
    )
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    exp_manager: ExpManagerConfig = field(default_factory=ExpManagerConfig)
