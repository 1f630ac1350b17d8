"""One dataclass per YAML section; a default lives here and nowhere else."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from nemo_aligner.errors import ConfigError


class RewardModelType(Enum):
    binary_ranking = "binary_ranking"
    regression = "regression"


class Overlong(Enum):
    drop = "drop"
    truncate_left = "truncate_left"
    error = "error"


class Precision(Enum):
    fp32 = "fp32"
    bf16 = "bf16"
    fp16 = "fp16"


class Recompute(Enum):
    none = "none"
    selective = "selective"
    full = "full"


class Schedule(Enum):
    cosine = "cosine"
    linear = "linear"
    constant = "constant"


class MonitorMode(Enum):
    min = "min"
    max = "max"


def _require(condition: bool, key: str, got: object, wanted: str) -> None:
    if not condition:
        raise ConfigError(f"{key}: got {got!r}, wanted {wanted}")


def _require_positive(section: str, owner: object, *names: str) -> None:
    for name in names:
        value = getattr(owner, name)
        _require(value is None or value > 0, f"{section}.{name}", value, "a number above 0")


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
        _require_positive(
            "trainer.rm", self, "max_epochs", "max_steps", "val_check_interval", "save_interval"
        )
        _require(
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
class SchedulerConfig:
    """Learning rate over optimizer steps; it decays until the last step of the run."""

    name: Schedule = Schedule.cosine
    warmup_steps: int = 10
    min_lr: float = 0.0

    def __post_init__(self) -> None:
        _require(
            self.warmup_steps >= 0, "model.optim.sched.warmup_steps", self.warmup_steps, "0 or more"
        )
        _require(self.min_lr >= 0, "model.optim.sched.min_lr", self.min_lr, "0 or more")


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
        _require_positive("model.optim", self, "lr", "eps")
        _require(self.weight_decay >= 0, "model.optim.weight_decay", self.weight_decay, "0 or more")
        _require(
            self.sched.min_lr <= self.lr,
            "model.optim.sched.min_lr",
            self.sched.min_lr,
            f"at most model.optim.lr ({self.lr})",
        )


@dataclass
class DataPrefixConfig:
    """Files per split; several validation files are several validation sets."""

    train: list[str] = field(default_factory=list)
    validation: list[str] = field(default_factory=list)


@dataclass
class DataConfig:
    """``format`` is ``auto`` or a name from ``data/formats.py``; the rest shapes the contract.

    ``template`` is ``tokenizer`` (the tokenizer's own), a name from ``data/templates.py``, or a
    file. Where it, ``add_bos`` or ``add_eos`` is null, the reward model that training starts from
    decides, and for a base model its tokenizer. ``allow_prompt_overlap`` lets a prompt stand in
    training and validation files both.
    """

    data_prefix: DataPrefixConfig = field(default_factory=DataPrefixConfig)
    format: str = "auto"
    seq_length: int = 1024
    overlong: Overlong = Overlong.drop
    template: str | None = None
    add_bos: bool | None = None
    add_eos: bool | None = None
    allow_prompt_overlap: bool = False

    def __post_init__(self) -> None:
        _require_positive("model.data", self, "seq_length")


@dataclass
class RegressionConfig:
    """``attributes`` names the label columns, in the order of ``label`` lists."""

    attributes: list[str] = field(default_factory=list)
    loss_mask_val: float = -100.0


@dataclass
class ModelConfig:
    """What is trained, how it is laid out over ranks, and on which data.

    ``activations_checkpoint_num_layers``: how many layers of every pipeline stage, the first ones,
    ``activations_checkpoint_granularity: full`` recomputes; null is all of them.
    """

    reward_model_type: RewardModelType = RewardModelType.binary_ranking
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
        _require_positive(
            "model",
            self,
            "tensor_model_parallel_size",
            "pipeline_model_parallel_size",
            "context_parallel_size",
            "activations_checkpoint_num_layers",
            "global_batch_size",
            "micro_batch_tokens",
        )
        _require(
            self.context_parallel_size == 1,
            "model.context_parallel_size",
            self.context_parallel_size,
            "1 (context parallelism is not supported)",
        )
        _require(
            self.activations_checkpoint_num_layers is None
            or self.activations_checkpoint_granularity is Recompute.full,
            "model.activations_checkpoint_num_layers",
            self.activations_checkpoint_num_layers,
            "null, or model.activations_checkpoint_granularity=full",
        )
        _require(self.freeze_layers >= 0, "model.freeze_layers", self.freeze_layers, "0 or more")
        _require(
            not self.sequence_parallel or self.tensor_model_parallel_size > 1,
            "model.sequence_parallel",
            self.sequence_parallel,
            "false, or model.tensor_model_parallel_size above 1",
        )
        if self.reward_model_type is RewardModelType.regression:
            names = self.regression.attributes
            _require(
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
        _require(
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


@dataclass
class ScorerModelConfig:
    """How a finished reward model is laid out to score."""

    tensor_model_parallel_size: int = 1
    pipeline_model_parallel_size: int = 1
    sequence_parallel: bool = False
    micro_batch_tokens: int = 8192

    def __post_init__(self) -> None:
        _require_positive(
            "model",
            self,
            "tensor_model_parallel_size",
            "pipeline_model_parallel_size",
            "micro_batch_tokens",
        )


@dataclass
class ServerConfig:
    """The PyTriton endpoint; delays are in microseconds, timeouts in seconds.

    While the server answers, ``ready_file`` holds its URL.
    """

    host: str = "127.0.0.1"
    port: int = 5555
    max_batch_size: int = 1024
    max_queue_delay_microseconds: int = 2000
    max_queue_size: int = 4096
    exit_timeout_secs: int = 20
    heartbeat_secs: float = 3.0
    worker_timeout_secs: float = 30.0
    ready_file: str | None = None

    def __post_init__(self) -> None:
        _require(0 <= self.port < 65536, "server.port", self.port, "0 (any free port) to 65535")
        _require_positive(
            "server",
            self,
            "max_batch_size",
            "exit_timeout_secs",
            "heartbeat_secs",
            "worker_timeout_secs",
        )


@dataclass
class ServeConfig:
    """The whole of ``examples/serve_reward_model.py``.

    ``rm_model_file`` is a ``.nemo`` or the folder it unpacks to. ``precision: null`` is
    the one the scoring contract names. A model whose contract does not have the hash
    ``expect_contract`` is refused.
    """

    rm_model_file: str | None = None
    expect_contract: str | None = None
    precision: Precision | None = None
    model: ScorerModelConfig = field(default_factory=ScorerModelConfig)
    server: ServerConfig = field(default_factory=ServerConfig)


@dataclass
class EvaluateDataConfig:
    """``path``: one file of pairs or ratings; the rest comes from the model's scoring contract."""

    path: str | None = None
    format: str = "auto"
    loss_mask_val: float = -100.0


@dataclass
class EvaluateConfig:
    """The whole of ``examples/evaluate_reward_model.py``.

    ``output`` is a JSON file for metrics and counts, ``output_rewards`` a JSONL file with one line
    per record. ``precision: null`` is the one the scoring contract names. A model whose contract
    does not have the hash ``expect_contract`` is refused.
    """

    rm_model_file: str | None = None
    expect_contract: str | None = None
    precision: Precision | None = None
    model: ScorerModelConfig = field(default_factory=ScorerModelConfig)
    data: EvaluateDataConfig = field(default_factory=EvaluateDataConfig)
    output: str | None = None
    output_rewards: str | None = None
