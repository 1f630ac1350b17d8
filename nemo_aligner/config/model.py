"""Settings of what is trained: its layout, its optimizer, its data."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from nemo_aligner.config.common import RewardModelType, require, require_positive
from nemo_aligner.config.data import DataConfig, RegressionConfig


class Recompute(Enum):
    none = "none"
    selective = "selective"
    full = "full"


class Schedule(Enum):
    cosine = "cosine"
    linear = "linear"
    constant = "constant"


@dataclass
class SchedulerConfig:
    """Learning rate over optimizer steps; it decays until the last step of the run."""

    name: Schedule = Schedule.cosine
    warmup_steps: int = 10
    min_lr: float = 0.0

    def __post_init__(self) -> None:
        require(
            self.warmup_steps >= 0, "model.optim.sched.warmup_steps", self.warmup_steps, "0 or more"
        )
        require(self.min_lr >= 0, "model.optim.sched.min_lr", self.min_lr, "0 or more")


@dataclass
class OptimConfig:
    """AdamW through megatron-core's distributed optimizer.

    ``cpu_offload`` keeps Adam's moments (8 bytes of 16 to 18 for every parameter) in host memory.
    """

    lr: float = 2e-5
    weight_decay: float = 0.01
    betas: tuple[float, float] = (0.9, 0.98)
    eps: float = 1e-8
    cpu_offload: bool = False
    sched: SchedulerConfig = field(default_factory=SchedulerConfig)

    def __post_init__(self) -> None:
        require_positive("model.optim", self, "lr", "eps")
        require(self.weight_decay >= 0, "model.optim.weight_decay", self.weight_decay, "0 or more")
        require(
            self.sched.min_lr <= self.lr,
            "model.optim.sched.min_lr",
            self.sched.min_lr,
            f"at most model.optim.lr ({self.lr})",
        )


@dataclass
class ModelConfig:
    """What is trained, how it is laid out over ranks, and on which data.

    ``objective`` is a name from ``nemo_aligner/objectives/`` or ``package.module:Name``, and
    ``objective_kwargs`` its settings; null is what ``reward_model_type`` is usually trained by.
    ``activations_checkpoint_num_layers``: how many layers of every pipeline stage, the first ones,
    ``activations_checkpoint_granularity: full`` recomputes; null is all of them.
    """

    reward_model_type: RewardModelType = RewardModelType.binary_ranking
    objective: str | None = None
    objective_kwargs: dict[str, Any] = field(default_factory=dict)
    regression: RegressionConfig = field(default_factory=RegressionConfig)
    tensor_model_parallel_size: int = 1
    pipeline_model_parallel_size: int = 1
    context_parallel_size: int = 1
    sequence_parallel: bool = False
    activations_checkpoint_granularity: Recompute = Recompute.none
    activations_checkpoint_num_layers: int | None = None
    freeze_layers: int = 0
    global_batch_size: int = 64
    micro_batch_tokens: int = 4096
    seed: int = 1234
    optim: OptimConfig = field(default_factory=OptimConfig)
    data: DataConfig = field(default_factory=DataConfig)

    def __post_init__(self) -> None:
        require_positive(
            "model",
            self,
            "tensor_model_parallel_size",
            "pipeline_model_parallel_size",
            "context_parallel_size",
            "activations_checkpoint_num_layers",
            "global_batch_size",
            "micro_batch_tokens",
        )
        require(
            self.context_parallel_size == 1,
            "model.context_parallel_size",
            self.context_parallel_size,
            "1 (context parallelism is not supported)",
        )
        require(
            self.activations_checkpoint_num_layers is None
            or self.activations_checkpoint_granularity is Recompute.full,
            "model.activations_checkpoint_num_layers",
            self.activations_checkpoint_num_layers,
            "null, or model.activations_checkpoint_granularity=full",
        )
        require(self.freeze_layers >= 0, "model.freeze_layers", self.freeze_layers, "0 or more")
        require(
            not self.sequence_parallel or self.tensor_model_parallel_size > 1,
            "model.sequence_parallel",
            self.sequence_parallel,
            "false, or model.tensor_model_parallel_size above 1",
        )
        if self.reward_model_type is RewardModelType.regression:
            names = self.regression.attributes
            require(
                bool(names) and len(set(names)) == len(names),
                "model.regression.attributes",
                names,
                "at least one attribute name, each once",
            )

    @property
    def num_attributes(self) -> int:
        """The width of the reward head."""
        if self.reward_model_type is RewardModelType.regression:
            return len(self.regression.attributes)
        return 1
