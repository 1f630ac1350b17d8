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
    token_file: str | None = setting(None, "file with the bearer token that requests must have")
    token_variable: str | None = setting(None, "environment variable with the bearer token")
    max_batch_size: int = setting(1024, "rows of a request")
    max_request_bytes: int = setting(16 * 2**20, "bytes of a request")
    max_queue_rows: int = setting(8192, "rows that may wait; more are refused, to be sent later")
    prefix_cache_tokens: int = setting(16384, "tokens of text beginnings to keep; 0 keeps none")
    report_every_secs: float = setting(10.0, "a line on how busy it is, this often; 0 is never")
    exit_timeout_secs: int = setting(20, "seconds to answer what is in flight after SIGTERM")
    heartbeat_secs: float = setting(3.0, "how often rank 0 makes itself heard by the others")
    worker_timeout_secs: float = setting(30.0, "silence after which a rank counts as gone")
    triton_log_file: str | None = setting(
        None, "file for what Triton prints; null: a temporary one, gone when the server is"
    )
    ready_file: str | None = setting(None, "file that holds the URL while the server answers")

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
    precision: Precision | None = setting(None, "null: the one that the scoring contract names")
    model: ScorerModelConfig = field(default_factory=ScorerModelConfig)
    server: ServerConfig = field(default_factory=ServerConfig)
    shaping: ShapingConfig = field(default_factory=ShapingConfig)
    ensemble: EnsembleConfig = field(default_factory=EnsembleConfig)
