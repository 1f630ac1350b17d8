"""Settings of the gateway: other protocols in front of reward servers."""

from __future__ import annotations

from dataclasses import dataclass, field

from nemo_aligner.config.common import Checks, setting


@dataclass
class GatewayConfig:
    """Where it listens, whom it lets in, and how much it takes."""

    host: str = setting("127.0.0.1", "address to listen on; 0.0.0.0 is every network")
    port: int = setting(8000, "0: any free port")
    token_file: str | None = setting(None, "file with the bearer token that requests need")
    token_variable: str | None = setting(None, "environment variable with the bearer token")
    certificate_file: str | None = setting(None, "certificate chain (PEM), for https")
    key_file: str | None = setting(None, "private key of the certificate (PEM)")
    complete_turns: bool = setting(
        True, "raw texts and ids that end at an end of turn get what the template has behind it"
    )
    reward_threshold: float | None = setting(
        None, "/verify: reward 1 at or above this, else 0; null: the plain reward"
    )
    max_request_bytes: int = setting(
        16 * 2**20, "largest request body in bytes; larger ones get a 413"
    )
    max_queue_rows: int = setting(8192, "most rows in flight; more get a 503 to retry later")
    max_connections: int = setting(256, "most concurrent requests per backend")
    timeout_s: float = setting(600.0, "seconds until a request is answered with a 503")
    retry_s: float = setting(1.0, "seconds to wait for a backend before a 503")
    drift_rows: int = setting(1000, "number of latest rows for the metrics of rewards")
    exit_timeout_secs: int = setting(20, "seconds for requests in flight after SIGTERM")
    ready_file: str | None = setting(None, "file that contains the URL while the gateway is ready")

    def __post_init__(self) -> None:
        with Checks("gateway", self) as checks:
            checks.require(0 <= self.port < 65536, "port", "0 (any free port) to 65535")
            checks.positive(
                "max_request_bytes",
                "max_queue_rows",
                "max_connections",
                "timeout_s",
                "drift_rows",
                "exit_timeout_secs",
            )
            checks.not_negative("retry_s")
            both = (self.certificate_file is None) == (self.key_file is None)
            checks.require(both, "key_file", "a key_file with a certificate_file, or neither")
            checks.one_token("token")


@dataclass
class GatewayRunConfig:
    """The whole of ``nemo-aligner gateway``."""

    backends: list[str] = setting(["http://127.0.0.1:5555"], "URLs of servers of one model")
    expect_contract: str | None = setting(None, "refuse backends whose contract has another hash")
    backend_token_file: str | None = setting(None, "file with the bearer token of the backends")
    backend_token_variable: str | None = setting(
        None, "environment variable with the bearer token of the backends"
    )
    gateway: GatewayConfig = field(default_factory=GatewayConfig)

    def __post_init__(self) -> None:
        with Checks("", self) as checks:
            checks.require(bool(self.backends), "backends", "the URL of a server, or several")
            checks.one_token("backend_token")
