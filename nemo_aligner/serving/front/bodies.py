"""Request bodies, read within a limit of each and a common one of all connections."""

from __future__ import annotations

from collections.abc import Mapping

from starlette.types import Receive

from nemo_aligner.config.serving import FrontConfig
from nemo_aligner.serving.endpoints import call_by_size
from nemo_aligner.serving.failures import FailureKind, RequestError
from nemo_aligner.serving.protocols.base import is_packed, too_large, unpack_body

# Bytes of each body that do not count, so that short requests are read while large ones fill the
# memory. The number of connections limits their sum.
_FREE_BYTES = 64 * 2**10
_RETRY_AFTER_S = 1


class RequestBodies:
    """The memory of all requests' bodies; for one event loop."""

    def __init__(self, config: FrontConfig) -> None:
        self.most_of_one = config.max_request_bytes
        self.most_of_all = config.max_buffered_bytes
        self.section = config.section
        self.num_bytes = 0

    def hold(self) -> HeldBody:
        """A place for one body, which is given back when the block of the returned context ends."""
        return HeldBody(self)


class HeldBody:
    """One body, whose bytes count from their arrival until its request has been answered."""

    __slots__ = ("_bodies", "_counted")

    def __init__(self, bodies: RequestBodies) -> None:
        self._bodies = bodies
        self._counted = 0

    def __enter__(self) -> HeldBody:
        return self

    def __exit__(self, *unused: object) -> None:
        self._bodies.num_bytes -= self._counted

    async def read(self, receive: Receive, headers: Mapping[str, str]) -> bytes:
        """Read the body, unpacked, and no more of it than is allowed.

        Raises:
            RequestError: it has more bytes than allowed, those of all requests are too many, or its
                sender leaves before it is whole.
            ServingError: see ``unpack_body``.
        """
        most = self._bodies.most_of_one
        # The header spares reading a body that says its size; one in chunks has none.
        length = headers.get("content-length", "")
        if length.isdecimal() and int(length) > most:
            raise too_large(most)
        parts, size, has_more = [], 0, True
        while has_more:
            message = await receive()
            if message["type"] == "http.disconnect":
                raise RequestError("the body is not whole", FailureKind.bad_request)
            part, has_more = message.get("body", b""), message.get("more_body", False)
            size += len(part)
            if size > most:
                raise too_large(most)
            self._count(size)
            parts.append(part)
        body = b"".join(parts)
        encoding = headers.get("content-encoding", "")
        if not is_packed(body, encoding):
            return await call_by_size(size, unpack_body, body, encoding, most)
        # A small body that is packed may have as many bytes as are allowed.
        unpacked = await call_by_size(most, unpack_body, body, encoding, most)
        self._count(len(unpacked))
        return unpacked

    def _count(self, size: int) -> None:
        """Count the body as ``size`` bytes; a lone one always has room.

        Raises:
            RequestError: all bodies have too many.
        """
        bodies, added = self._bodies, size - _FREE_BYTES - self._counted
        if added <= 0:
            return
        if bodies.num_bytes > self._counted and bodies.num_bytes + added > bodies.most_of_all:
            raise RequestError(
                f"the bodies of all requests in flight have {bodies.num_bytes} bytes, and at most "
                f"{bodies.most_of_all} are read at once ({bodies.section}.max_buffered_bytes); "
                f"retry after {_RETRY_AFTER_S} s",
                FailureKind.busy,
                _RETRY_AFTER_S,
            )
        self._counted += added
        bodies.num_bytes += added
