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
        False, "also give rewards, in critic_infer and as reward_model"
    )
    offload_idle_model: bool | None = setting(
        None, "with combine: move the idle model to host memory; null: on a GPU"
    )
    infer_while_training: WhileTraining = setting(
        WhileTraining.wait, "what to do with requests for values during training"
    )
    max_steps: int = setting(10000, "steps until the learning rate reaches its minimum")
    gradient_clip_val: float = setting(1.0, "largest gradient norm; 0: no clipping")

    def __post_init__(self) -> None:
        with Checks("trainer.ppo", self) as checks:
            checks.positive("max_steps")
            checks.not_negative("gradient_clip_val")


@dataclass
class CriticTrainerConfig:
    """Precision, and what is PPO's."""

    precision: Precision | None = setting(
        None, "precision of the critic; null: that of the scoring contract"
    )
    ppo: PpoConfig = field(default_factory=PpoConfig)


@dataclass
class CriticSchedulerConfig(SchedulerConfig):
    """As in training; the rate ends at a tenth of what it begins with."""

    min_lr: float = setting(9e-7, "final learning rate")


@dataclass
class CriticOptimConfig(OptimConfig):
    """As in training, with the rates of NeMo-Aligner's critic."""

    lr: float = setting(9e-6, "learning rate after warm-up")
    weight_decay: float = setting(0.1, "applies to matrices, not to norms and biases")
    sched: CriticSchedulerConfig = field(default_factory=CriticSchedulerConfig)


@dataclass
class CriticModelConfig(InvarianceConfig):
    """How the critic is laid out over ranks, and how it learns."""

    tensor_model_parallel_size: int = setting(1, "number of ranks that share each layer")
    pipeline_model_parallel_size: int = setting(1, "number of pipeline stages")
    sequence_parallel: bool = setting(
        False, "also split norms along the tokens; needs tensor parallelism"
    )
    activations_checkpoint_granularity: Recompute = setting(
        Recompute.none, "which activations to recompute in the backward pass"
    )
    freeze_layers: int = setting(0, "number of lowest layers to freeze, with the embeddings")
    global_batch_size: int = setting(64, "sequences per step; larger calls make several steps")
    micro_batch_tokens: int = setting(4096, "tokens per forward and backward pass")
    loss_clip_val: float = setting(0.2, "clip range of values around prev_values; 0: no clipping")
    offload_adam_states: bool = setting(
        False, "move optimizer and gradients off the GPU for inference"
    )
    seed: int = setting(1234, "random seed; a critic that loads weights needs none")
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

    explicit_log_dir: str = setting("results/critic", "folder of the run")


@dataclass
class CriticServerConfig(ServerConfig):
    """The PyTriton endpoint, at the port of NeMo-Aligner's critic."""

    port: int = setting(5556, "0: any free port")
    max_request_bytes: int = setting(256 * 2**20, "largest request in bytes; a rollout needs many")
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
