"""Settings of the server."""

from __future__ import annotations

from dataclasses import dataclass, field

from nemo_aligner.config.common import Checks, Precision, setting
from nemo_aligner.config.scoring import ScorerModelConfig
from nemo_aligner.config.shaping import EnsembleConfig, ShapingConfig


@dataclass
class ServerConfig:
    """The PyTriton endpoint."""

    host: str = setting("127.0.0.1", "address to listen on; 0.0.0.0 is every network")
    port: int = setting(5555, "0: any free port")
    token_file: str | None = setting(None, "file with the bearer token that requests need")
    token_variable: str | None = setting(None, "environment variable with the bearer token")
    max_batch_size: int = setting(1024, "most rows in a request")
    max_request_bytes: int = setting(16 * 2**20, "largest request in bytes")
    max_queue_rows: int = setting(8192, "most rows in the queue; more are refused, to be retried")
    prefix_cache_tokens: int = setting(16384, "size of the prefix cache in tokens; 0: none")
    report_every_secs: float = setting(10.0, "seconds between lines that show the load; 0: never")
    exit_timeout_secs: int = setting(20, "seconds for requests in flight after SIGTERM")
    heartbeat_secs: float = setting(3.0, "seconds between heartbeats of rank 0")
    worker_timeout_secs: float = setting(
        30.0, "seconds without a heartbeat until a rank counts as lost"
    )
    triton_log_file: str | None = setting(
        None, "file for Triton's log; null: a temporary one, removed at the end"
    )
    ready_file: str | None = setting(None, "file that contains the URL while the server is ready")

    def __post_init__(self) -> None:
        with Checks("server", self) as checks:
            checks.require(0 <= self.port < 65536, "port", "0 (any free port) to 65535")
            checks.positive(
                "max_batch_size",
                "max_request_bytes",
                "max_queue_rows",
                "exit_timeout_secs",
                "heartbeat_secs",
                "worker_timeout_secs",
            )
            checks.not_negative("prefix_cache_tokens", "report_every_secs")
            checks.one_token("token")


@dataclass
class ServeConfig:
    """The whole of ``nemo-aligner serve``."""

    rm_model_file: str | None = setting(None, "a reward model: .nemo, or the folder it unpacks to")
    expect_contract: str | None = setting(None, "refuse a model whose contract has another hash")
    precision: Precision | None = setting(None, "null: that of the scoring contract")
    model: ScorerModelConfig = field(default_factory=ScorerModelConfig)
    server: ServerConfig = field(default_factory=ServerConfig)
    shaping: ShapingConfig = field(default_factory=ShapingConfig)
    ensemble: EnsembleConfig = field(default_factory=EnsembleConfig)
