"""Read request bodies, with a limit for each body and a limit for all bodies in memory."""

from __future__ import annotations

from collections.abc import Mapping

from starlette.types import Receive

from nemo_aligner.config.serving import FrontConfig
from nemo_aligner.serving.endpoints import call_by_size
from nemo_aligner.serving.failures import FailureKind, RequestError
from nemo_aligner.serving.front.limits import limit_of_path
from nemo_aligner.serving.protocols.base import is_packed, too_large, unpack_body

# The first 64 KiB of each body are not counted, so that short requests are still read while large
# ones use up the limit of all bodies. The limit of connections bounds the sum of these uncounted
# bytes.
_FREE_BYTES = 64 * 2**10
_RETRY_AFTER_S = 1


class RequestBodies:
    """Counts the bytes of all request bodies in memory; must be used in a single event loop."""

    def __init__(self, config: FrontConfig) -> None:
        self.max_request_bytes = config.max_request_bytes
        self.max_total_bytes = config.max_buffered_bytes
        self.section = config.section
        self.num_bytes = 0

    def reserve(self, path: str) -> BodyReader:
        """Return a context for reading the body of a request for ``path``.

        At its end, the body's bytes no longer count.
        """
        return BodyReader(self, limit_of_path(self.max_request_bytes, self.max_total_bytes, path))


class BodyReader:
    """Reads one body; its bytes count toward the limit of all bodies until it is answered."""

    __slots__ = ("_bodies", "_counted", "_max_bytes")

    def __init__(self, bodies: RequestBodies, max_bytes: int) -> None:
        self._bodies, self._max_bytes = bodies, max_bytes
        self._counted = 0

    def __enter__(self) -> BodyReader:
        return self

    def __exit__(self, *unused: object) -> None:
        self._bodies.num_bytes -= self._counted

    async def read(self, receive: Receive, headers: Mapping[str, str]) -> bytes:
        """Read and decompress the body; stop as soon as it exceeds a limit.

        Raises:
            RequestError: the body is too large, all bodies together are too large, or the client
                leaves before the body is complete.
            ServingError: the body's encoding is not supported, or its data is damaged.
        """
        max_bytes = self._max_bytes
        # A body with a too large Content-Length is not read. A chunked body has no such header.
        length = headers.get("content-length", "")
        if length.isdecimal() and int(length) > max_bytes:
            raise too_large(max_bytes)
        parts, size, has_more = [], 0, True
        while has_more:
            message = await receive()
            if message["type"] == "http.disconnect":
                raise RequestError(
                    "the client left before it had sent the whole body", FailureKind.bad_request
                )
            part, has_more = message.get("body", b""), message.get("more_body", False)
            size += len(part)
            if size > max_bytes:
                raise too_large(max_bytes)
            self._count(size)
            parts.append(part)
        body = b"".join(parts)
        encoding = headers.get("content-encoding", "")
        if not is_packed(body, encoding):
            return await call_by_size(size, unpack_body, body, encoding, max_bytes)
        # Choose the thread by the largest possible size: even a small body may unpack to max_bytes.
        unpacked = await call_by_size(max_bytes, unpack_body, body, encoding, max_bytes)
        self._count(len(unpacked))
        return unpacked

    def _count(self, size: int) -> None:
        """Count the body as ``size`` bytes; a body that is the only one is always accepted.

        Raises:
            RequestError: all bodies together are too large.
        """
        bodies, added = self._bodies, size - _FREE_BYTES - self._counted
        if added <= 0:
            return
        if bodies.num_bytes > self._counted and bodies.num_bytes + added > bodies.max_total_bytes:
            raise RequestError(
                f"the bodies of all requests in flight have {bodies.num_bytes} bytes, and at most "
                f"{bodies.max_total_bytes} are read at once ({bodies.section}.max_buffered_bytes); "
                f"retry after {_RETRY_AFTER_S} s",
                FailureKind.busy,
                _RETRY_AFTER_S,
            )
        self._counted += added
        bodies.num_bytes += added
