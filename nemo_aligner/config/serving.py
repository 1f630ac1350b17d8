"""Settings of the server."""

from __future__ import annotations

from dataclasses import dataclass, field

from nemo_aligner.config.common import Precision, require, require_positive
from nemo_aligner.config.scoring import ScorerModelConfig


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
        require(0 <= self.port < 65536, "server.port", self.port, "0 (any free port) to 65535")
        require_positive(
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
