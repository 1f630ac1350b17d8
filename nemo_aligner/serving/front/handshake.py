"""TLS handshakes, which count as connections while they last.

By itself, uvicorn creates a connection only when its handshake is done. Until then, no limit would
apply, and asyncio would wait 60 seconds for the handshake.
"""

from __future__ import annotations

import asyncio
import math
import ssl
from typing import Any, ClassVar

from nemo_aligner.serving.front.connection import Connection
from nemo_aligner.serving.front.limits import FAILED_HANDSHAKE, NO_ROOM_FOR_HANDSHAKE


class TlsHandshake(asyncio.Protocol):
    """A connection during its handshake; ``behind_tls`` creates the class for a server.

    The handshake is in the server's set of connections. So it counts as a connection, the timer of
    all connections (``Sweep``) ends it in time, and a server that exits closes it.
    """

    connection_class: ClassVar[type[Connection]]
    context: ClassVar[ssl.SSLContext]

    def __init__(self, *arguments: Any, **settings: Any) -> None:
        """Take the arguments of the ``Connection`` that is created after the handshake."""
        self._connection = self.connection_class(*arguments, **settings)
        self._connections: set[Any] = self._connection.connections
        # Bytes that arrive before start_tls has set its own protocol, or before the connection
        # exists.
        self._early = b""
        self._has_ended = False
        self.deadline = math.inf

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Start the TLS handshake, or close the socket if there are too many connections."""
        self._transport = transport
        connection = self._connection
        self._connections.add(self)
        connection.sweep.start(self._connections)
        self.deadline = connection.sweep.now + connection.limits.handshake_secs
        if len(self._connections) > connection.limits.max_refused_connections:
            connection.aborted_connections[NO_ROOM_FOR_HANDSHAKE] += 1
            transport.abort()
            return
        self._task = connection.loop.create_task(self._shake_hands())

    def connection_lost(self, exc: Exception | None) -> None:
        self._connections.discard(self)

    def data_received(self, data: bytes) -> None:
        self._early += data

    def eof_received(self) -> None:
        self._has_ended = True

    async def _shake_hands(self) -> None:
        connection = self._connection
        if self._transport.is_closing():
            return
        # The client may have sent bytes before start_tls replaces this protocol by its own; a
        # callback passes them on afterwards.
        connection.loop.call_soon(self._begin_with_early_bytes)
        try:
            transport = await connection.loop.start_tls(
                self._transport,
                self,
                self.context,
                server_side=True,
                ssl_handshake_timeout=connection.limits.handshake_secs,
            )
        except OSError:  # includes ssl.SSLError; without TLS, no error answer can be sent
            connection.aborted_connections[FAILED_HANDSHAKE] += 1
            return
        finally:
            self._connections.discard(self)
        if transport is None or transport.is_closing():
            return
        transport.set_protocol(connection)
        connection.connection_made(transport)
        if self._early:
            connection.data_received(self._early)
        if self._has_ended:
            connection.eof_received()

    def _begin_with_early_bytes(self) -> None:
        """Pass early bytes to the protocol that start_tls has set, as the transport would do."""
        protocol: Any = self._transport.get_protocol()
        while self._early:
            buffer = protocol.get_buffer(len(self._early))
            size = min(len(buffer), len(self._early))
            buffer[:size] = self._early[:size]
            protocol.buffer_updated(size)
            self._early = self._early[size:]

    def expire(self) -> None:
        """Abort a handshake that takes too long; the server's ``Sweep`` calls this."""
        self._transport.abort()

    def shutdown(self) -> None:
        """Abort the handshake, because the server exits; called by uvicorn."""
        self._transport.abort()


def behind_tls(connection_class: type[Connection], context: ssl.SSLContext) -> type[TlsHandshake]:
    """Create the protocol class of a server with a certificate, for ``uvicorn.Config``."""
    fields = {"connection_class": connection_class, "context": context}
    return type("LimitedHandshake", (TlsHandshake,), fields)
