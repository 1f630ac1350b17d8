"""Settings of ``serve`` and ``serve-critic``, of reward shaping, and of every HTTP front."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from enum import Enum
from math import isfinite
from typing import ClassVar

from nemo_aligner.config.common import (
    ANY,
    PREFIX_CACHE_STATES,
    RANKS,
    Checks,
    IneffectiveRule,
    Precision,
    setting,
)
from nemo_aligner.config.kernels import DeltaChoice
from nemo_aligner.config.model import (
    ANY_ROWS,
    IN_CONSTANT_SCHEDULES,
    WHOLE_TEXTS,
    LayoutConfig,
    OptimConfig,
    Recompute,
    Schedule,
    SchedulerConfig,
    ScorerModelConfig,
)
from nemo_aligner.config.training import LOGGER_KWARGS, RunFolderConfig

# Settings of the HTTP front end, which all servers share.


@dataclass
class FrontConfig:
    """Address, access and limits of an HTTP server.

    ``ServerConfig`` (reward server) and ``GatewayConfig`` (``gateway.py``) extend this section.
    """

    # Key of this section of the settings; error messages begin with it.
    section: ClassVar[str] = "server"

    host: str = setting("127.0.0.1", "address to listen on; 0.0.0.0: all network interfaces")
    port: int = setting(5555, "TCP port; 0: any free port")
    token_file: str | None = setting(None, "file with the bearer token that requests need")
    token_variable: str | None = setting(
        None, "instead of token_file: environment variable with the bearer token"
    )
    certificate_file: str | None = setting(None, "certificate chain (PEM), for https")
    key_file: str | None = setting(None, "private key of the certificate (PEM)")
    complete_turns: bool = setting(
        True, "complete the end of turn of raw texts, except in KServe, /v1/rewards"
    )
    reject_foreign_templates: bool = setting(
        False, "reject raw texts in another chat template, except in KServe"
    )
    reward_threshold: float | None = setting(
        None, "/verify: return 1 for rewards of at least this, else 0; null: the reward"
    )
    max_request_bytes: int = setting(
        16 * 2**20, "largest body in bytes, unpacked (NeMo Gym: 16 times); more get a 413"
    )
    max_buffered_bytes: int = setting(
        2**30, "bytes of all request bodies in memory; further requests get a 503"
    )
    max_queue_rows: int = setting(
        8192, "maximum samples in flight; more get a 503, or a 413 if in one request"
    )
    max_header_bytes: int = setting(
        64 * 2**10, "largest request line and headers in bytes; larger ones get a 431"
    )
    max_chunks: int = setting(2**16, "maximum chunks of a request body; more get a 413")
    max_open_connections: int = setting(
        4096, "maximum open connections; more close the longest idle one, or get a 503"
    )
    receive_timeout_secs: float = setting(
        60.0, "seconds to receive a complete request; slower ones get a 408"
    )
    keep_alive_secs: int = setting(75, "seconds until an idle connection of a client is closed")
    max_connection_secs: float = setting(
        60.0, "seconds (+-20%) after which an answer ends its connection; 0: no limit"
    )
    drift_rows: int = setting(1000, "number of latest rewards that the distribution metrics cover")
    exit_timeout_secs: int = setting(20, "seconds to finish requests in flight after SIGTERM")
    ready_file: str | None = setting(None, "file to write the URL to while the server is ready")
    top_rewards_file: str | None = setting(
        None, "file to log the highest-rewarded samples to, as JSON lines; null: no log"
    )
    top_rewards_kept: int = setting(20, "number of samples in a log of the highest rewards")
    top_rewards_window: int = setting(
        10000, "number of rewards after which a new log begins; the last gets suffix .1"
    )
    top_rewards_files: int = setting(10, "number of earlier logs of the highest rewards to keep")
    refused_reward: float | None = setting(
        None, "/get_reward, /remote_rm, /compare: rejected samples; null: a 400"
    )

    def __post_init__(self) -> None:
        with Checks(self.section, self) as checks:
            self.check(checks)

    def check(self, checks: Checks) -> None:
        """Check the values of the section; subclasses extend it for their settings."""
        checks.require_port("port")
        checks.require_positive(
            "max_request_bytes",
            "max_buffered_bytes",
            "max_queue_rows",
            "max_header_bytes",
            "max_chunks",
            "max_open_connections",
            "receive_timeout_secs",
            "keep_alive_secs",
            "drift_rows",
            "exit_timeout_secs",
            "top_rewards_kept",
            "top_rewards_window",
        )
        checks.require_not_negative("top_rewards_files", "max_connection_secs")
        is_number = self.refused_reward is None or isfinite(self.refused_reward)
        checks.require(is_number, "refused_reward", "a finite number, or null")
        both_or_neither = (self.certificate_file is None) == (self.key_file is None)
        expected = "a key_file with a certificate_file, or neither"
        checks.require(both_or_neither, "key_file", expected)
        checks.require_one_token("token")


def without_log(section: str) -> IneffectiveRule:
    """Build the rule that settings of the top-rewards log have no effect without its file."""
    names = ("top_rewards_kept", "top_rewards_window", "top_rewards_files")
    return {f"{section}.top_rewards_file": None}, tuple(f"{section}.{name}" for name in names)


# Reward shaping.


class Standardize(Enum):
    """The source of the mean and standard deviation that standardize the rewards.

    ``contract``: the scoring contract; ``running``: all rewards so far; ``given``: the settings
    ``mean`` and ``std``.
    """

    none = "none"
    contract = "contract"
    running = "running"
    given = "given"


class Combine(Enum):
    """The rule by which an ensemble combines the rewards of its models.

    ``lower_bound`` is their mean minus ``k`` standard deviations.
    """

    mean = "mean"
    min = "min"
    lower_bound = "lower_bound"


@dataclass
class EnsembleConfig:
    """Further reward models in addition to ``rm_model_file``, and how they are combined."""

    files: list[str] = setting([], "further reward models that score the same samples")
    combine: Combine = setting(
        Combine.mean, "how to combine the models; lower_bound: mean minus k deviations"
    )
    k: float = setting(1.0, "with lower_bound: number of standard deviations")

    def __post_init__(self) -> None:
        with Checks("ensemble", self) as checks:
            checks.require_not_negative("k")


@dataclass
class ShapingConfig:
    """Reward shaping: changes of the model's rewards, applied in the order of these settings.

    All of them are off by default. The server also returns the raw rewards.
    """

    standardize: Standardize = setting(
        Standardize.none,
        "by statistics of the contract, of all rewards so far, or given ones",
    )
    mean: list[float] = setting([], "means for standardize=given, one per attribute")
    std: list[float] = setting([], "standard deviations for standardize=given, one per attribute")
    statistics_file: str | None = setting(
        None, "file that keeps the statistics of standardize=running"
    )
    attribute_weights: dict[str, float] = setting(
        {}, "weights of the attributes in the combined reward"
    )
    spread_penalty: float = setting(
        0.0, "subtract this multiple of a reward's uncertainty, if there is one"
    )
    length_penalty: float = setting(
        0.0, "penalty per token of the reply beyond length_penalty_from"
    )
    length_penalty_from: int = setting(0, "number of reply tokens without penalty")
    clip: list[float] = setting([], "[low, high]: clip rewards to this range")
    sigmoid: bool = setting(False, "map rewards to the range from 0 to 1 by the logistic function")
    threshold: float | None = setting(None, "also report whether each reward reaches this value")

    def __post_init__(self) -> None:
        with Checks("shaping", self) as checks:
            checks.require_not_negative("spread_penalty", "length_penalty", "length_penalty_from")
            checks.require(
                self.length_penalty > 0 or not self.length_penalty_from,
                "length_penalty_from",
                "0, or shaping.length_penalty to be set, too",
            )
            is_range = not self.clip or (len(self.clip) == 2 and self.clip[0] < self.clip[1])
            checks.require(is_range, "clip", "[low, high], low below high")
            is_given = self.standardize is Standardize.given
            checks.require(is_given or not self.mean, "mean", "none, or shaping.standardize=given")
            fits_mean = len(self.std) == len(self.mean) and all(value > 0 for value in self.std)
            expected = "as many numbers above 0 as shaping.mean has"
            checks.require(fits_mean and is_given == bool(self.std), "std", expected)
            is_running = self.standardize is Standardize.running
            checks.require(
                self.statistics_file is None or is_running,
                "statistics_file",
                "null, or shaping.standardize=running",
            )


# The reward server.


@dataclass
class ServerConfig(FrontConfig):
    """Address, access and limits of the reward server."""

    max_request_tokens: int = setting(2**22, "maximum tokens in a request; more get a 413")
    max_batch_size: int = setting(1024, "maximum samples in a KServe v2 request")
    max_call_secs: float = setting(
        1.0, "longest model call in seconds, estimated from past calls; 0: no limit"
    )
    encode_timeout_secs: float = setting(
        10.0, "seconds to tokenize a sample; slower ones get a 503"
    )
    prefix_cache_tokens: int = setting(16384, "size of the prefix cache in tokens; 0: none")
    prefix_cache_states: int = setting(
        PREFIX_CACHE_STATES,
        "with linear attention: prefixes whose states it keeps; 0: no cache",
    )
    report_every_secs: float = setting(10.0, "seconds between log lines with the load; 0: never")
    heartbeat_secs: float = setting(3.0, "seconds between heartbeats of rank 0")
    worker_timeout_secs: float = setting(
        30.0, "seconds without a heartbeat until a rank counts as lost"
    )
    max_stuck_secs: float = setting(
        300.0, "seconds until a model call counts as hung and the server ends; 0: never"
    )
    triton_port: int | None = setting(
        None, "HTTP port of Triton (extra triton); next: gRPC, metrics; null: off"
    )
    triton_host: str = setting("127.0.0.1", "address that Triton listens on")
    triton_log_file: str | None = setting(None, "file for Triton's log; null: a temporary file")

    def check(self, checks: Checks) -> None:
        super().check(checks)
        checks.require_port("triton_port")
        checks.require_positive(
            "max_request_tokens",
            "max_batch_size",
            "encode_timeout_secs",
            "heartbeat_secs",
            "worker_timeout_secs",
        )
        checks.require_not_negative("report_every_secs", "max_call_secs", "prefix_cache_states")
        can_end = not self.max_stuck_secs or self.max_stuck_secs > self.max_call_secs
        expected = "0 (never), or more than server.max_call_secs"
        checks.require(can_end, "max_stuck_secs", expected)
        checks.require_prefix_cache("prefix_cache_tokens")


@dataclass
class ServeConfig:
    """All settings of ``nemo-aligner serve``."""

    rm_model_file: str | None = setting(
        None, "reward model: a .nemo file, or a Hugging Face folder or name"
    )
    models: dict[str, str] = setting(
        {}, "more reward models, by name; LoRA adapters of one base share its weights"
    )
    expect_contract: str | None = setting(
        None, "reject a model whose scoring contract has another hash"
    )
    expect_fingerprint: str | None = setting(
        None, "reject a model whose weights have another fingerprint"
    )
    precision: Precision | None = setting(
        None, "precision of the model; null: that of the scoring contract"
    )
    model: ScorerModelConfig = field(default_factory=ScorerModelConfig)
    server: ServerConfig = field(default_factory=ServerConfig)
    shaping: ShapingConfig = field(default_factory=ShapingConfig)
    ensemble: EnsembleConfig = field(default_factory=EnsembleConfig)

    def __post_init__(self) -> None:
        _check_ring(self)
        with Checks("", self) as checks:
            are_names = all(map(_MODEL_NAME.fullmatch, self.models))
            checks.require(
                are_names and self.models.keys().isdisjoint(_TAKEN_NAMES),
                "models",
                "names of letters, digits and -_. that begin with a letter or digit, and none of "
                + ", ".join([*_TAKEN_NAMES, "NAME.contract"]),
            )
            # Its rules name attributes and keep statistics, which are those of one model.
            is_plain = not self.ensemble.files and self.shaping == ShapingConfig()
            checks.require(
                is_plain or not self.models,
                "models",
                "none with shaping or ensemble.files, which are for a server of one model",
            )


# Names of models on a server, which are parts of a URL's path.
_MODEL_NAME = re.compile(r"(?!.*\.contract$)[A-Za-z0-9][A-Za-z0-9._-]*")
# The main model, its contract's endpoint, a path of KServe v2, and the main model in metrics.
_TAKEN_NAMES = ("reward_model", "contract", "stats", "local")


def _check_ring(config: ServeConfig | ServeCriticConfig) -> None:
    with Checks("", config) as checks:
        checks.require(
            not (config.model.is_ring and config.server.prefix_cache_tokens),
            "server.prefix_cache_tokens",
            "0 with model.cp_comm_type=p2p: each rank of a cache needs the keys of whole samples",
        )


_OF_SEVERAL: IneffectiveRule = ({RANKS: 1}, ("server.heartbeat_secs", "server.worker_timeout_secs"))
INEFFECTIVE_IN_SERVING: tuple[IneffectiveRule, ...] = (
    ANY_ROWS,
    WHOLE_TEXTS,
    _OF_SEVERAL,
    ({"ensemble.files": []}, ("ensemble.combine", "ensemble.k")),
    ({"ensemble.combine": Combine.mean}, ("ensemble.k",)),
    ({"ensemble.combine": Combine.min}, ("ensemble.k",)),
    ({"server.prefix_cache_tokens": 0}, ("server.prefix_cache_states",)),
    without_log("server"),
)


# The server of PPO's critic. A setting that NeMo-Aligner's critic has, too, has the same key here.


class WhileTraining(Enum):
    """What happens to requests for values while the critic trains: they wait, or are rejected."""

    wait = "wait"
    refuse = "refuse"


@dataclass
class CriticCheckpointConfig:
    """The checkpoint that the critic starts from."""

    restore_from_path: str | None = setting(
        None, "reward model or critic: a .nemo file, or a Hugging Face folder or name"
    )


@dataclass
class PpoConfig:
    """Settings of the critic server for PPO: rewards, offloading, training."""

    combine_rm_and_critic_server: bool = setting(
        False, "also return rewards, in critic_infer and in the endpoint reward_model"
    )
    offload_idle_model: bool | None = setting(
        None, "with combine: keep the idle model in host memory; null: if on a GPU"
    )
    infer_while_training: WhileTraining = setting(
        WhileTraining.wait, "requests for values during training: let them wait, or reject them"
    )
    max_steps: int = setting(10000, "steps until the learning rate reaches its minimum")
    gradient_clip_val: float = setting(1.0, "maximum gradient norm; 0: no clipping")

    def __post_init__(self) -> None:
        with Checks("trainer.ppo", self) as checks:
            checks.require_positive("max_steps")
            checks.require_not_negative("gradient_clip_val")


@dataclass
class CriticTrainerConfig:
    """Precision of the critic, and its PPO settings."""

    precision: Precision | None = setting(
        None, "precision of the critic; null: that of the scoring contract"
    )
    ppo: PpoConfig = field(default_factory=PpoConfig)


@dataclass
class CriticSchedulerConfig(SchedulerConfig):
    """Schedule of the learning rate, as in training; by default it ends at a tenth of the peak."""

    min_lr: float = setting(9e-7, "final learning rate")


@dataclass
class CriticOptimConfig(OptimConfig):
    """Optimizer as in training, with the defaults of NeMo-Aligner's critic."""

    lr: float = setting(9e-6, "learning rate after warm-up")
    weight_decay: float = setting(0.1, "weight decay of matrices; norms and biases have none")
    sched: CriticSchedulerConfig = field(default_factory=CriticSchedulerConfig)


@dataclass
class CriticModelConfig(LayoutConfig):
    """Parallel layout and training of the critic."""

    activations_checkpoint_granularity: Recompute = setting(
        Recompute.none, "which activations to recompute in the backward pass"
    )
    freeze_layers: int = setting(0, "number of first layers to freeze, with the embeddings")
    global_batch_size: int = setting(
        64, "sequences per optimizer step; larger calls make several steps"
    )
    micro_batch_tokens: int = setting(
        4096, "maximum number of tokens per forward and backward pass"
    )
    loss_clip_val: float = setting(0.2, "clip range of values around prev_values; 0: no clipping")
    offload_adam_states: bool = setting(
        False, "move optimizer and gradients off the GPU for inference"
    )
    seed: int = setting(1234, "random seed; a critic that loads weights needs none")
    optim: CriticOptimConfig = field(default_factory=CriticOptimConfig)
    linear_attention_kernels: DeltaChoice = setting(
        DeltaChoice.torch, "kernels of Gated DeltaNet in training; values always use torch"
    )

    def check(self, checks: Checks) -> None:
        super().check(checks)
        checks.require_positive("global_batch_size", "micro_batch_tokens")
        checks.require_not_negative("freeze_layers", "loss_clip_val")
        checks.require_seed("seed")


@dataclass
class CriticRunConfig(RunFolderConfig):
    """The run folder: ``critic_save`` writes to it, and a restarted server resumes from it."""

    explicit_log_dir: str = setting("results/critic", "folder of the run")


@dataclass
class CriticServerConfig(ServerConfig):
    """The HTTP server of the critic; the default port is that of NeMo-Aligner's critic."""

    port: int = setting(5556, "TCP port; 0: any free port")
    max_request_bytes: int = setting(
        256 * 2**20, "largest request body in bytes; rollouts are large"
    )
    max_request_tokens: int = setting(2**25, "maximum tokens in a request; more get a 413")
    prefix_cache_tokens: int = setting(
        0, "with combine: size of the reward model's prefix cache in tokens; 0: none"
    )


@dataclass
class ServeCriticConfig:
    """All settings of ``nemo-aligner serve-critic``."""

    rm_model_file: str | None = setting(
        None, "with combine: the reward model; null: the one of pretrained_checkpoint"
    )
    expect_contract: str | None = setting(
        None, "reject a model whose scoring contract has another hash"
    )
    expect_fingerprint: str | None = setting(
        None, "reject a model whose weights have another fingerprint"
    )
    pretrained_checkpoint: CriticCheckpointConfig = field(default_factory=CriticCheckpointConfig)
    trainer: CriticTrainerConfig = field(default_factory=CriticTrainerConfig)
    model: CriticModelConfig = field(default_factory=CriticModelConfig)
    exp_manager: CriticRunConfig = field(default_factory=CriticRunConfig)
    server: CriticServerConfig = field(default_factory=CriticServerConfig)

    def __post_init__(self) -> None:
        _check_ring(self)


_OF_REWARDS = (
    "rm_model_file",
    "trainer.ppo.offload_idle_model",
    "server.prefix_cache_tokens",
    "server.prefix_cache_states",
    "server.top_rewards_file",
)
INEFFECTIVE_IN_CRITICS: tuple[IneffectiveRule, ...] = (
    ANY_ROWS,
    WHOLE_TEXTS,
    _OF_SEVERAL,
    *LOGGER_KWARGS,
    (
        {"model.optim.sched.name": Schedule.constant},
        (*IN_CONSTANT_SCHEDULES, "trainer.ppo.max_steps"),
    ),
    ({"trainer.ppo.combine_rm_and_critic_server": False}, _OF_REWARDS),
    ({"server.prefix_cache_tokens": 0}, ("server.prefix_cache_states",)),
    without_log("server"),
    # A loaded checkpoint has all weights, also the head's, so nothing is initialized at random.
    ({"pretrained_checkpoint.restore_from_path": ANY}, ("model.seed",)),
)
