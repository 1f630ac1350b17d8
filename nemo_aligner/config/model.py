"""Settings of what is trained: its layout, its optimizer, its data."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from nemo_aligner.config.common import Checks, RewardModelType, setting
from nemo_aligner.config.data import DataConfig, RegressionConfig
from nemo_aligner.config.lora import LoraConfig
from nemo_aligner.config.scoring import InvarianceConfig
from nemo_aligner.errors import ConfigError


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

    name: Schedule = setting(Schedule.cosine, "learning rate schedule after warm-up")
    warmup_steps: int = setting(10, "steps of linear warm-up from 0")
    constant_steps: int = setting(0, "number of final steps at min_lr")
    min_lr: float = setting(0.0, "final learning rate")

    def __post_init__(self) -> None:
        with Checks("model.optim.sched", self) as checks:
            checks.not_negative("warmup_steps", "constant_steps", "min_lr")

    def last_decay_step(self, total_steps: int) -> int:
        """The step of a run of ``total_steps`` at which the rate comes to its end.

        Raises:
            ConfigError: the constant steps leave none to go down in.
        """
        most = max(0, total_steps - self.warmup_steps - 1)
        if self.constant_steps > most:
            raise ConfigError(
                f"model.optim.sched.constant_steps: got {self.constant_steps}, wanted at most "
                f"{most}, as the run has {total_steps} steps, {self.warmup_steps} of them warm-up, "
                "and the rate needs one to go down in; 0 lets it go down until the end"
            )
        # A run shorter than its warm-up stays in it; Megatron wants a step beyond.
        return max(total_steps - self.constant_steps, self.warmup_steps + 1)


@dataclass
class OptimConfig:
    """AdamW through megatron-core's distributed optimizer."""

    lr: float = setting(2e-5, "learning rate after warm-up")
    weight_decay: float = setting(0.01, "applies to matrices, not to norms and biases")
    betas: tuple[float, float] = setting((0.9, 0.98), "Adam's")
    eps: float = setting(1e-8, "Adam's")
    cpu_offload: bool = setting(False, "Adam's moments (8 bytes a parameter) in host memory")
    sched: SchedulerConfig = field(default_factory=SchedulerConfig)

    def __post_init__(self) -> None:
        with Checks("model.optim", self) as checks:
            checks.positive("lr", "eps")
            checks.not_negative("weight_decay")
            checks.finite("lr", "eps", "weight_decay")
            fits = len(self.betas) == 2 and all(0 <= beta < 1 for beta in self.betas)
            checks.require(fits, "betas", "two numbers, each 0 or more and less than 1")
            wanted = f"at most model.optim.lr ({self.lr})"
            checks.require(self.sched.min_lr <= self.lr, "sched.min_lr", wanted)


class ScoredPosition(Enum):
    last_token = "last_token"
    reply_mean = "reply_mean"


@dataclass
class HeadConfig:
    """What makes rewards of the hidden states, in fp32."""

    reads: ScoredPosition = setting(
        ScoredPosition.last_token, "read the last token, or the mean over the reply"
    )
    bias: bool = setting(False, "add a bias to each layer of the head")
    mlp_size: int | None = setting(None, "width of a hidden layer with ReLU; null: none")

    def __post_init__(self) -> None:
        with Checks("model.head", self) as checks:
            checks.positive("mlp_size")


@dataclass
class ModelConfig(InvarianceConfig):
    """What is trained, how it is laid out over ranks, and on which data."""

    reward_model_type: RewardModelType = setting(
        RewardModelType.binary_ranking, "learn from pairs, or from labels of single replies"
    )
    objective: str | None = setting(
        None, "an objective (docs/training.md), or module:Name; null: the default"
    )
    objective_kwargs: dict[str, Any] = setting({}, "settings of the objective")
    regression: RegressionConfig = field(default_factory=RegressionConfig)
    head: HeadConfig = field(default_factory=HeadConfig)
    tensor_model_parallel_size: int = setting(1, "number of ranks that share each layer")
    pipeline_model_parallel_size: int = setting(1, "number of pipeline stages")
    context_parallel_size: int = setting(1, "not supported: 1")
    sequence_parallel: bool = setting(
        False, "also split norms along the tokens; needs tensor parallelism"
    )
    activations_checkpoint_granularity: Recompute = setting(
        Recompute.none, "which activations to recompute in the backward pass"
    )
    activations_checkpoint_num_layers: int | None = setting(
        None, "with full: recompute the first N layers of a stage; null: all"
    )
    freeze_layers: int = setting(0, "number of lowest layers to freeze, with the embeddings")
    lora: LoraConfig = field(default_factory=LoraConfig)
    global_batch_size: int = setting(64, "records (pairs or rated replies) per step")
    micro_batch_tokens: int = setting(4096, "tokens per forward and backward pass")
    seed: int = setting(1234, "random seed of the head and of the order of the data")
    optim: OptimConfig = field(default_factory=OptimConfig)
    data: DataConfig = field(default_factory=DataConfig)

    def __post_init__(self) -> None:
        with Checks("model", self) as checks:
            checks.positive(
                "tensor_model_parallel_size",
                "pipeline_model_parallel_size",
                "context_parallel_size",
                "activations_checkpoint_num_layers",
                "global_batch_size",
                "micro_batch_tokens",
                "batch_invariant_rows",
            )
            checks.not_negative("freeze_layers")
            checks.seed("seed")
            checks.require(
                self.lora.rank == 0 or self.freeze_layers == 0,
                "freeze_layers",
                f"0, as model.lora.rank={self.lora.rank} freezes all weights of the backbone",
            )
            self._check_layout(checks)
            self._check_weights(checks)
            if self.reward_model_type is RewardModelType.regression:
                names = self.regression.attributes
                fits = bool(names) and len(set(names)) == len(names)
                checks.require(
                    fits, "regression.attributes", "at least one attribute name, each once"
                )

    def _check_weights(self, checks: Checks) -> None:
        given, known = self.regression.attribute_weights, self.regression.attributes
        fits = not given or (set(given) <= set(known) and any(given.values()))
        wanted = f"weights of {', '.join(known) or 'no attribute'}, one of them not 0"
        checks.require(fits, "regression.attribute_weights", wanted)

    def _check_layout(self, checks: Checks) -> None:
        checks.require(
            self.context_parallel_size <= 1,
            "context_parallel_size",
            "1 (context parallelism is not supported)",
        )
        checks.require(
            self.activations_checkpoint_num_layers is None
            or self.activations_checkpoint_granularity is Recompute.full,
            "activations_checkpoint_num_layers",
            "null, or model.activations_checkpoint_granularity=full",
        )
        checks.require(
            not self.sequence_parallel or self.tensor_model_parallel_size > 1,
            "sequence_parallel",
            "false, or model.tensor_model_parallel_size above 1",
        )

    @property
    def num_attributes(self) -> int:
        """The width of the reward head."""
        if self.reward_model_type is RewardModelType.regression:
            return len(self.regression.attributes)
        return 1
