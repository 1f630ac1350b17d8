"""Settings of the server of PPO's critic; keys are NeMo-Aligner's where it has them."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from nemo_aligner.config.common import Checks, Precision, setting
from nemo_aligner.config.model import OptimConfig, Recompute, SchedulerConfig
from nemo_aligner.config.scoring import InvarianceConfig
from nemo_aligner.config.serving import ServerConfig
from nemo_aligner.config.training import RunFolderConfig


class WhileTraining(Enum):
    wait = "wait"
    refuse = "refuse"


@dataclass
class CriticCheckpointConfig:
    """What the critic starts from."""

    restore_from_path: str | None = setting(
        None, "a reward model or a critic: .nemo, or the folder it unpacks to"
    )


@dataclass
class PpoConfig:
    """What the server does for PPO."""

    combine_rm_and_critic_server: bool = setting(
        False, "rewards, too: in each answer of critic_infer, and as reward_model"
    )
    offload_idle_model: bool | None = setting(
        None, "with combine: host memory for the idle model; null: where there is a GPU"
    )
    infer_while_training: WhileTraining = setting(
        WhileTraining.wait, "what becomes of requests for values that come while it trains"
    )
    max_steps: int = setting(10000, "steps until the learning rate is at its end")
    gradient_clip_val: float = setting(1.0, "the largest norm of a gradient; 0: no clipping")

    def __post_init__(self) -> None:
        with Checks("trainer.ppo", self) as checks:
            checks.positive("max_steps")
            checks.not_negative("gradient_clip_val")


@dataclass
class CriticTrainerConfig:
    """Precision, and what is PPO's."""

    precision: Precision | None = setting(
        None, "of the critic; null: the one that the scoring contract names"
    )
    ppo: PpoConfig = field(default_factory=PpoConfig)


@dataclass
class CriticSchedulerConfig(SchedulerConfig):
    """As in training; the rate ends at a tenth of what it begins with."""

    min_lr: float = setting(9e-7, "where it ends")


@dataclass
class CriticOptimConfig(OptimConfig):
    """As in training, with the rates of NeMo-Aligner's critic."""

    lr: float = setting(9e-6, "the learning rate after warm-up")
    weight_decay: float = setting(0.1, "of matrices; norms have none")
    sched: CriticSchedulerConfig = field(default_factory=CriticSchedulerConfig)


@dataclass
class CriticModelConfig(InvarianceConfig):
    """How the critic is laid out over ranks, and how it learns."""

    tensor_model_parallel_size: int = setting(1, "processes that share every layer")
    pipeline_model_parallel_size: int = setting(1, "stages that the layers are dealt out to")
    sequence_parallel: bool = setting(False, "share norms, too, along the tokens; needs tensor > 1")
    activations_checkpoint_granularity: Recompute = setting(
        Recompute.none, "what the backward computes again, to save memory"
    )
    freeze_layers: int = setting(0, "lowest layers that stay as they are, and the embeddings")
    global_batch_size: int = setting(64, "sequences of a step; a call of more makes several")
    micro_batch_tokens: int = setting(4096, "tokens in one forward and backward pass")
    loss_clip_val: float = setting(0.2, "how far a value may move from prev_values; 0: no clip")
    offload_adam_states: bool = setting(
        False, "optimizer and gradients leave the GPU while values are asked for"
    )
    seed: int = setting(1234, "of random numbers; a critic that starts needs none")
    optim: CriticOptimConfig = field(default_factory=CriticOptimConfig)

    def __post_init__(self) -> None:
        with Checks("model", self) as checks:
            checks.positive(
                "tensor_model_parallel_size",
                "pipeline_model_parallel_size",
                "global_batch_size",
                "micro_batch_tokens",
                "batch_invariant_rows",
            )
            checks.not_negative("freeze_layers", "loss_clip_val")
            checks.seed("seed")


@dataclass
class CriticRunConfig(RunFolderConfig):
    """Where critic_save writes, and a server that is started again goes on from."""

    explicit_log_dir: str = setting("results/critic", "the run's folder")


@dataclass
class CriticServerConfig(ServerConfig):
    """The PyTriton endpoint, at the port of NeMo-Aligner's critic."""

    port: int = setting(5556, "0: any free port")
    max_request_bytes: int = setting(256 * 2**20, "bytes of a request; a rollout has many")
    prefix_cache_tokens: int = setting(
        0, "with combine: tokens of text beginnings that the reward model keeps; 0 keeps none"
    )


@dataclass
class ServeCriticConfig:
    """The whole of ``nemo-aligner serve-critic``."""

    rm_model_file: str | None = setting(
        None, "with combine: the reward model; null: pretrained_checkpoint.restore_from_path"
    )
    expect_contract: str | None = setting(None, "refuse a model whose contract has another hash")
    pretrained_checkpoint: CriticCheckpointConfig = field(default_factory=CriticCheckpointConfig)
    trainer: CriticTrainerConfig = field(default_factory=CriticTrainerConfig)
    model: CriticModelConfig = field(default_factory=CriticModelConfig)
    exp_manager: CriticRunConfig = field(default_factory=CriticRunConfig)
    server: CriticServerConfig = field(default_factory=CriticServerConfig)
