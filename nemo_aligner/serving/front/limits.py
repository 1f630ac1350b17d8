"""Limits of a server's connections, and the answers to requests that exceed them."""

from __future__ import annotations

import json
import math
import random
from dataclasses import dataclass

from nemo_aligner.config.serving import FrontConfig

# Longest time of a TLS handshake in seconds; a client sends only a few hundred bytes for it.
_HANDSHAKE_SECS = 10.0

# A client may still be sending when it is rejected. Closing the socket at once would send a TCP
# reset, and the client would not see the answer. So its bytes are discarded up to these limits.
LINGER_SECS = 1.0
LINGER_BYTES = 32 * 2**20

# Largest deviation of a connection's lifetime from ``max_connection_secs``, as a fraction of it.
# Without it, clients that connected at the same time would also connect again at the same time.
_LIFETIME_JITTER = 0.2

# NeMo Gym's bodies may have this many times ``max_request_bytes``: each turn of a response repeats
# the token ids of the whole dialogue before it, and the metrics of a run are of all its rollouts.
_TIMES_OF_GYM = 16
_PATHS_OF_GYM = ("/verify", "/compare", "/aggregate_metrics")

# Causes of connections that end without an answer, as labels in the metrics.
CLIENT_LEFT, ANSWER_NOT_READ = "client_left", "answer_not_read"
FAILED_HANDSHAKE, NO_ROOM_FOR_HANDSHAKE = "failed_handshake", "no_room_for_handshake"


@dataclass(frozen=True)
class ConnectionLimits:
    """Limits of each connection, read from the settings of the same names.

    ``section`` is the name of the settings' section, ``server`` or ``gateway``, which messages
    show.
    """

    section: str
    max_header_bytes: int
    max_request_bytes: int
    max_buffered_bytes: int
    max_chunks: int
    max_open_connections: int
    receive_timeout_secs: float
    keep_alive_secs: float
    max_connection_secs: float

    @classmethod
    def of(cls, config: FrontConfig) -> ConnectionLimits:
        """Read the limits from a server's settings."""
        return cls(
            section=config.section,
            max_header_bytes=config.max_header_bytes,
            max_request_bytes=config.max_request_bytes,
            max_buffered_bytes=config.max_buffered_bytes,
            max_chunks=config.max_chunks,
            max_open_connections=config.max_open_connections,
            receive_timeout_secs=config.receive_timeout_secs,
            keep_alive_secs=config.keep_alive_secs,
            max_connection_secs=config.max_connection_secs,
        )

    @property
    def handshake_secs(self) -> float:
        """Seconds after which an unfinished TLS handshake is aborted."""
        return min(_HANDSHAKE_SECS, self.receive_timeout_secs)

    @property
    def max_refused_connections(self) -> int:
        """Most open connections, including rejected ones.

        Further ones are closed without an answer. A rejected connection stays open for a moment,
        until its client has read the error.
        """
        return self.max_open_connections + self.max_open_connections // 8 + 8

    def draw_lifetime(self) -> float:
        """Draw the seconds after which the next answer ends a connection; infinity without a limit.

        They differ from ``max_connection_secs`` at random by up to a fifth.
        """
        if self.max_connection_secs == 0:
            return math.inf
        factor = random.uniform(1 - _LIFETIME_JITTER, 1 + _LIFETIME_JITTER)
        return factor * self.max_connection_secs

    def max_body_bytes(self, target: bytes) -> int:
        """Return the largest body of a request with the URL or path ``target``, in bytes."""
        path = target.partition(b"?")[0].decode("latin-1")
        return limit_of_path(self.max_request_bytes, self.max_buffered_bytes, path)

    def headers_too_large(self) -> Refusal:
        return Refusal(
            431,
            f"The request line and headers (or chunk extensions and trailers) are larger than "
            f"{self.max_header_bytes} bytes. Send smaller headers, or raise "
            f"{self.section}.max_header_bytes.",
        )

    def body_too_large(self, size: str, limit: int) -> Refusal:
        return Refusal(
            413,
            f"The request body has {size} bytes and the limit is {limit}. "
            f"Send fewer rows per request, or raise {self.section}.max_request_bytes.",
        )

    def too_many_chunks(self) -> Refusal:
        return Refusal(
            413,
            f"The request body has more than {self.max_chunks} chunks (or empty lines in its "
            f"chunks). Send larger chunks, or raise {self.section}.max_chunks.",
        )

    def too_slow(self) -> Refusal:
        return Refusal(
            408,
            f"The request was not complete within {self.receive_timeout_secs:g} seconds. "
            f"Send it faster, or raise {self.section}.receive_timeout_secs.",
        )

    def too_many_connections(self) -> Refusal:
        return Refusal(
            503,
            f"The server already has {self.max_open_connections} open connections, its limit. "
            f"Retry in a second, or raise {self.section}.max_open_connections.",
        )


def limit_of_path(max_request_bytes: int, max_buffered_bytes: int, path: str) -> int:
    """Return the largest body in bytes of a request for ``path``, which may have prefixes."""
    if not path.endswith(_PATHS_OF_GYM):
        return max_request_bytes
    return max(max_request_bytes, min(_TIMES_OF_GYM * max_request_bytes, max_buffered_bytes))


class Refusal(Exception):
    """An error answer that ends a connection.

    Raised in a parser callback, it also stops the parser.
    """

    def __init__(self, status: int, text: str) -> None:
        super().__init__(text)
        self.status = status
        self.text = text


def malformed_request(reason: str) -> Refusal:
    return Refusal(400, f"The request is not valid HTTP/1.1: {reason}. Fix the client.")


def error_body(text: str) -> bytes:
    return json.dumps({"error": text}).encode()
