"""One HTTP connection, with its limits enforced between the socket and the ASGI application.

uvicorn's parser (llhttp) has no limits, and parses pipelined requests ahead. ``Connection``
therefore passes received bytes to the parser in pieces, each of which ends at the latest at the end
of a request's head or body. So sizes are checked before the parser stores anything, and the next
pipelined request is not parsed before the previous one is answered.
"""

from __future__ import annotations

import asyncio
import contextvars
import math
import socket
import urllib.parse
from collections import Counter
from contextlib import suppress
from http import HTTPStatus
from typing import Any, ClassVar
from weakref import WeakKeyDictionary

import httptools
from uvicorn.protocols.http.flow_control import HIGH_WATER_LIMIT
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol
from uvicorn.server import ServerState

from nemo_aligner.serving.front.exchange import AnswerTransport, Exchange
from nemo_aligner.serving.front.limits import (
    ANSWER_NOT_READ,
    CLIENT_LEFT,
    LINGER_BYTES,
    LINGER_SECS,
    ConnectionLimits,
    Refusal,
    error_body,
    malformed_request,
)
from nemo_aligner.serving.front.sweep import Sweep

# Phases of a connection. The order matters: from BUSY on, the parser gets no bytes.
HEAD, BODY, CHUNKED, BUSY, LINGERING, CLOSING = range(6)

# Bytes of a chunk in addition to its data: its size in hexadecimal and two line ends. Further bytes
# (extensions, leading zeros) count toward max_header_bytes.
CHUNK_FRAMING_BYTES = 16

# With these TCP settings, a peer that vanished without a FIN is noticed after about two minutes.
KEEP_ALIVE_PROBES = {"TCP_KEEPIDLE": 60, "TCP_KEEPINTVL": 15, "TCP_KEEPCNT": 4}

END_OF_HEAD = b"\r\n\r\n"
# Headers that decide the target, sender or end of a request: two of them could be contradictory.
SINGLE_HEADERS = (b"host", b"authorization", b"content-length", b"transfer-encoding", b"expect")


class IgnoredUpgrade(Exception):
    """Stops the parser if the head offers an upgrade, because it would then skip the body."""


class Connection(HttpToolsProtocol):
    """The asyncio protocol of one connection; ``limited_protocol`` makes a subclass per server."""

    limits_of_server: ClassVar[ConnectionLimits]
    refused_connections: ClassVar[dict[int, int]]
    aborted_connections: ClassVar[Counter[str]]
    sweeps: ClassVar[WeakKeyDictionary[ServerState, Sweep]]

    cycle: Exchange

    # In Python 3.11, attribute access is slow in objects with more than 30 attributes outside of
    # slots, and uvicorn's protocol already has 28.
    __slots__ = (
        "answers",
        "backlog",
        "backlog_start",
        "body_bytes",
        "chunked_bytes",
        "chunks",
        "content_length",
        "context",
        "deadline",
        "discarded_bytes",
        "empty_lines",
        "end_time",
        "head_bytes",
        "is_idle",
        "is_kept_alive",
        "is_parser_spent",
        "limits",
        "phase",
        "sweep",
        "tail",
        "task",
        "unsent_bytes",
    )

    def __init__(
        self,
        config: Any,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        self.limits = self.limits_of_server
        sweep = self.sweeps.get(server_state)
        if sweep is None:
            sweep = self.sweeps[server_state] = Sweep(self.loop, self.limits)
        self.sweep = sweep
        self.task: asyncio.Task[None] | None = None
        # Event loop time after which expire() ends the connection.
        self.deadline = math.inf
        # Event loop time after which the next answer ends the connection.
        self.end_time = math.inf
        # Received bytes of waiting pipelined requests; those before backlog_start are parsed.
        self.backlog = b""
        self.backlog_start = 0
        self.is_parser_spent = False
        self.is_kept_alive = True
        self.content_length = 0
        self.body_bytes = 0
        self.chunks = 0
        self.chunked_bytes = 0
        self.empty_lines = 0
        self.unsent_bytes = 0
        self.discarded_bytes = 0
        self._begin_head()

    def _begin_head(self) -> None:
        """Prepare to parse the head of the next request of this connection."""
        if self.is_parser_spent:
            self.is_parser_spent = False
            self.parser = httptools.HttpRequestParser(self)
        self.phase = HEAD
        self.is_idle = True
        self.head_bytes = 0
        # Last bytes of the previous piece, because an END_OF_HEAD may be split between two pieces.
        self.tail = b""

    # Events of the socket, which asyncio calls.

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.answers = AnswerTransport(transport, self.finish, self.has_aged)
        self.context = contextvars.copy_context()
        self.sweep.start(self.connections)
        self.deadline = self.sweep.now + self.limits.keep_alive_secs
        self.end_time = self.sweep.now + self.limits.draw_lifetime()
        if not self._find_room():
            return
        self.sweep.idle[self] = None
        peer = transport.get_extra_info("socket")
        with suppress(OSError):  # OSError: a Unix socket has no such options
            peer.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            for name, value in KEEP_ALIVE_PROBES.items():
                if hasattr(socket, name):
                    peer.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)

    def _find_room(self) -> bool:
        """Return whether this new connection may stay; if not, reject it.

        At the limit, the longest idle connection is closed: clients that keep idle connections must
        not lock out health checks. In a flood, reject this one: the closed ones may still be open.
        """
        count = len(self.connections)
        is_flood = count > self.limits.max_refused_connections
        if count <= self.limits.max_open_connections:
            return True
        if not is_flood and self.sweep.close_longest_idle():
            return True
        self.refuse(self.limits.too_many_connections())
        if is_flood:
            self.transport.abort()
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        self._count_departure()
        self._withdraw()
        super().connection_lost(exc)
        self.phase = CLOSING
        self.backlog = b""
        self.sweep.idle.pop(self, None)

    def eof_received(self) -> None:
        """Close the connection: a client that closes its sending side has most probably left."""
        self._count_departure()
        self._withdraw()
        self._close()

    def data_received(self, data: bytes) -> None:
        if self.phase < BUSY:
            if self.is_idle:
                self.is_idle = False
                self.sweep.idle.pop(self, None)
                self.deadline = self.sweep.now + self.limits.receive_timeout_secs
            self._parse(data, 0)
        elif self.phase == BUSY:
            self.backlog = self.backlog[self.backlog_start :] + data
            self.backlog_start = 0
            if len(self.backlog) > HIGH_WATER_LIMIT:
                # Not by self.flow, which resumes when the application checks for disconnects.
                self.transport.pause_reading()
        elif self.phase == LINGERING:
            self.discarded_bytes += len(data)
            if self.discarded_bytes > LINGER_BYTES:
                self._close()

    def pause_writing(self) -> None:
        super().pause_writing()
        if self.phase == BUSY:
            self._expect_unsent_bytes_to_shrink()

    def resume_writing(self) -> None:
        super().resume_writing()
        if self.phase == BUSY:
            self.deadline = math.inf

    def _expect_unsent_bytes_to_shrink(self) -> None:
        self.unsent_bytes = self.transport.get_write_buffer_size()
        self.deadline = self.sweep.now + self.limits.receive_timeout_secs

    def expire(self) -> None:
        """End a connection that has passed its deadline; the server's ``Sweep`` calls this."""
        if (self.phase == HEAD and self.is_idle) or self.phase == LINGERING:
            self._close()
        elif self.phase < BUSY:
            self.refuse(self.limits.too_slow())
        elif self.transport.get_write_buffer_size() < self.unsent_bytes:
            self._expect_unsent_bytes_to_shrink()
        else:
            # The client has not read a byte of its answer during the timeout.
            if self.phase == BUSY:  # otherwise counted before, or closing
                self.aborted_connections[ANSWER_NOT_READ] += 1
            self.phase = CLOSING
            self.transport.abort()

    # Passing received bytes to the parser.

    def _parse(self, data: bytes, start: int) -> None:
        """Pass ``data`` from ``start`` on to the parser, up to the end of the request."""
        size = len(data)
        end = start
        cause: BaseException | None
        try:
            while start < size:
                phase = self.phase
                if phase == HEAD:
                    end = self._end_of_head(data, start, size)
                elif phase == BODY:
                    end = start + self.content_length - self.body_bytes
                elif phase == CHUNKED:
                    end = self._end_of_chunked_piece(data, start, size)
                else:
                    if phase == BUSY:
                        self.backlog = data
                        self.backlog_start = start
                    return
                self.parser.feed_data(data[start:end])
                start = end
            return
        except Refusal as refusal:
            cause = refusal
        except httptools.HttpParserError as error:
            # If a callback raised, its exception is the context of the parser's own exception.
            cause = error.__context__ or malformed_request(str(error))
        if isinstance(cause, IgnoredUpgrade):
            self._use_parser_for_body()
            self._parse(data, end)
        else:
            self._refuse_for(cause)

    def _refuse_for(self, cause: BaseException) -> None:
        if isinstance(cause, Refusal):
            self.refuse(cause)
        else:
            self.logger.error("Exception in a callback of the parser\n", exc_info=cause)
            self.refuse(malformed_request("the server failed to read it"))

    def _end_of_head(self, data: bytes, start: int, size: int) -> int:
        end = data.find(END_OF_HEAD, start) + 4
        if end < 4 or self.tail:
            end = self._end_of_empty_line(data, start, size) or size
        self.head_bytes += end - start
        if self.head_bytes > self.limits.max_header_bytes:
            raise self.limits.headers_too_large()
        return end

    def _end_of_chunked_piece(self, data: bytes, start: int, size: int) -> int:
        """Return the end of the next empty line, at which a chunked body may end."""
        limits = self.limits
        framing_bytes = self.chunked_bytes - self.body_bytes
        if framing_bytes > limits.max_header_bytes + CHUNK_FRAMING_BYTES * self.chunks:
            raise limits.headers_too_large()
        end = self._end_of_empty_line(data, start, size)
        if not end:
            end = size
        else:
            # Also limit empty lines, because each costs as much as a chunk.
            self.empty_lines += 1
            if self.empty_lines > limits.max_chunks + 1:
                raise limits.too_many_chunks()
        self.chunked_bytes += end - start
        return end

    def _end_of_empty_line(self, data: bytes, start: int, size: int) -> int:
        """Return the end of the first empty line, which may begin in earlier data; 0 if none."""
        tail = self.tail
        self.tail = b""
        position = (tail + data[start : start + 3]).find(END_OF_HEAD)
        if position >= 0:
            return start + position + len(END_OF_HEAD) - len(tail)
        position = data.find(END_OF_HEAD, start)
        if position >= 0:
            return position + len(END_OF_HEAD)
        self.tail = (tail + data[max(start, size - 3) : size])[-3:]
        return 0

    def _use_parser_for_body(self) -> None:
        """Replace the parser, to read the body of a request that offers an upgrade.

        This server ignores the offer of another protocol, but llhttp would skip the body and stop.
        A new parser, which gets a head without the offer, parses it like any other body.
        """
        self.is_parser_spent = True
        self.parser = httptools.HttpRequestParser(BodyCallbacks(self))
        if self.phase == CHUNKED:
            framing = b"Transfer-Encoding: chunked"
        else:
            framing = b"Content-Length: %d" % (self.content_length if self.phase == BODY else 0)
        self.parser.feed_data(b"POST / HTTP/1.1\r\n%s\r\n\r\n" % framing)

    # Callbacks of the HTTP parser.

    def on_message_begin(self) -> None:
        self.url = b""
        self.headers = []

    def on_header(self, name: bytes, value: bytes) -> None:
        self.headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        parser = self.parser
        http_version = parser.get_http_version()
        method = parser.get_method().decode("ascii")
        headers = dict(self.headers)
        self._check_framing(headers, method, http_version)
        path, raw_path, query = self._parse_target()
        scope: Any = {
            "type": "http",
            "asgi": {"version": self.asgi_version, "spec_version": "2.3"},
            "http_version": http_version,
            "server": self.server,
            "client": self.client,
            "scheme": self.scheme,
            "method": method,
            "root_path": self.root_path,
            "path": path,
            "raw_path": raw_path,
            "query_string": query,
            "headers": self.headers,
            "state": self.app_state.copy(),
        }
        # A new list: trailers also arrive in on_header, and must not join the checked headers.
        self.headers = []
        self.is_kept_alive = http_version == "1.1" and parser.should_keep_alive()
        self.cycle = Exchange(
            scope=scope,
            transport=self.answers,  # type: ignore[arg-type]
            flow=self.flow,
            logger=self.logger,
            access_logger=self.access_logger,
            access_log=self.access_log,
            default_headers=self.server_state.default_headers,
            message_event=asyncio.Event(),
            expect_100_continue=http_version == "1.1"
            and headers.get(b"expect", b"").lower() == b"100-continue",
            # Set once the whole request is here: an answer that starts earlier ends the connection.
            keep_alive=False,
            on_response=self.on_response_complete,
        )
        self.task = task = self.loop.create_task(self.cycle.run_asgi(self.app))
        task.add_done_callback(self.tasks.discard)
        self.tasks.add(task)
        if parser.should_upgrade():
            raise IgnoredUpgrade

    def _check_framing(self, headers: dict[bytes, bytes], method: str, http_version: str) -> None:
        """Find where the request ends; reject it if two servers could disagree about its end.

        llhttp itself rejects two different lengths, a length with a transfer coding, and line ends
        other than CRLF.
        """
        if self.phase != HEAD:
            raise malformed_request("a second request begins before this one is complete")
        if http_version not in ("1.1", "1.0"):
            raise malformed_request(f"its version is {http_version}, wanted 1.1 or 1.0")
        if len(headers) != len(self.headers):
            self._check_repeated_headers()
        length = headers.get(b"content-length")
        coding = headers.get(b"transfer-encoding")
        if length is not None:
            self.content_length = int(length)
            if self.content_length > (limit := self.limits.max_body_bytes(self.url)):
                raise self.limits.body_too_large(str(self.content_length), limit)
            self.phase = BODY
            self.body_bytes = 0
        elif coding is not None:
            if coding.strip().lower() != b"chunked" or http_version == "1.0":
                raise malformed_request("Transfer-Encoding must be chunked, and needs HTTP/1.1")
            self.phase = CHUNKED
            self.body_bytes = self.chunks = self.chunked_bytes = self.empty_lines = 0
        if method == "CONNECT":
            raise malformed_request("CONNECT is only for proxies, which this server is not")

    def _check_repeated_headers(self) -> None:
        names = [name for name, _ in self.headers]
        for name in SINGLE_HEADERS:
            if names.count(name) > 1:
                raise malformed_request(f"it has two headers {name.decode()}")

    def _parse_target(self) -> tuple[str, bytes, bytes]:
        """Return the decoded path, the raw path and the query of the request."""
        try:
            url = httptools.parse_url(self.url)
            # An absolute URL without a path, e.g. http://host, has the path "/".
            raw_path = url.path or b"/"
            path = raw_path.decode("ascii")
        except (httptools.HttpParserInvalidURLError, UnicodeDecodeError):
            raise malformed_request("its target is not a URL or path") from None
        if "%" in path:
            path = urllib.parse.unquote(path)
        return self.root_path + path, self.root_path.encode("ascii") + raw_path, url.query or b""

    def on_chunk_header(self) -> None:
        self.chunks += 1
        # The last chunk, which is empty, is not counted.
        if self.chunks > self.limits.max_chunks + 1:
            raise self.limits.too_many_chunks()

    def on_body(self, body: bytes) -> None:
        self.body_bytes += len(body)
        if self.body_bytes > (limit := self.limits.max_body_bytes(self.url)):
            raise self.limits.body_too_large(f"at least {self.body_bytes}", limit)
        cycle = self.cycle
        if not cycle.body:
            # Stored without a copy: often it is the only piece, or is read before more arrive.
            cycle.body = body  # type: ignore[assignment]
        elif isinstance(cycle.body, bytearray):
            cycle.body += body
        else:
            cycle.body = bytearray().join((cycle.body, body))
        if len(cycle.body) > HIGH_WATER_LIMIT:
            self.flow.pause_reading()
        cycle.message_event.set()

    def on_message_complete(self) -> None:
        self.phase = BUSY
        self.deadline = math.inf
        if self.flow.write_paused:
            # The client has not read an earlier answer yet, so its deadline applies.
            self._expect_unsent_bytes_to_shrink()
        cycle = self.cycle
        cycle.more_body = False
        if not cycle.response_started:
            cycle.keep_alive = self.is_kept_alive
        cycle.message_event.set()

    # The end of an answer, and the end of the connection.

    def on_response_complete(self) -> None:
        self.server_state.total_requests += 1
        if self.phase != BUSY or self.transport.is_closing():
            return
        self.task = None
        self.flow.resume_reading()
        if self.backlog:
            # In a callback, so that the next request does not inherit the context of this task.
            self.loop.call_soon(self._continue, context=self.context)
        else:
            self._begin_head()
            self.sweep.idle[self] = None
            self.deadline = self.sweep.now + self.limits.keep_alive_secs

    def _continue(self) -> None:
        """Parse the next pipelined request from the bytes in ``backlog``."""
        if self.phase != BUSY or self.transport.is_closing():
            return
        data, start = self.backlog, self.backlog_start
        self.backlog = b""
        self.backlog_start = 0
        self._begin_head()
        self.is_idle = False
        self.deadline = self.sweep.now + self.limits.receive_timeout_secs
        self._parse(data, start)
        is_short = len(self.backlog) - self.backlog_start <= HIGH_WATER_LIMIT
        if is_short and not self.flow.read_paused:
            self.transport.resume_reading()

    def refuse(self, refusal: Refusal) -> None:
        """Send an error instead of the application's answer, and then end the connection."""
        status = refusal.status
        self.refused_connections[status] = self.refused_connections.get(status, 0) + 1
        is_started = self.task is not None and self.cycle.response_started
        self._withdraw()
        if not is_started:
            body = error_body(refusal.text)
            lines = [STATUS_LINE[status]]
            for name, value in self.server_state.default_headers:
                lines += [name, b": ", value, b"\r\n"]
            if status == HTTPStatus.SERVICE_UNAVAILABLE:
                lines.append(b"retry-after: 1\r\n")
            lines += [
                b"content-type: application/json\r\n",
                b"content-length: %d\r\n" % len(body),
                b"connection: close\r\n\r\n",
                body,
            ]
            self.transport.write(b"".join(lines))
        self._linger()

    def has_aged(self) -> bool:
        """Return whether the connection ends with the answer that begins now.

        A client that opens another connection may reach a server that was added to a Kubernetes
        Service, which balances connections, not requests. Waiting pipelined requests are answered
        first, because their client would have to send them again.
        """
        return self.sweep.now > self.end_time and not self.backlog

    def finish(self) -> None:
        """Close after the last answer, but first discard bytes that the client may still send."""
        if self.phase == BUSY and not self.backlog:
            self._close()
        else:
            self._linger()

    def shutdown(self) -> None:
        """End the connection because the server exits: now, or after a running request's answer."""
        if self.phase == LINGERING or self.task is None:
            self._close()
        else:
            self.is_kept_alive = self.cycle.keep_alive = False

    def _count_departure(self) -> None:
        """Count a client that leaves during its request, or before its answer is complete."""
        if self.phase < BUSY:
            has_left = not self.is_idle
        else:
            is_answered = self.task is None or self.cycle.response_complete
            has_left = self.phase == BUSY and not is_answered
        if has_left:
            self.aborted_connections[CLIENT_LEFT] += 1

    def _withdraw(self) -> None:
        """Cancel a request whose client is gone, so that its rows are not computed."""
        if self.task is not None and not self.cycle.response_complete:
            self.cycle.disconnected = True
            self.cycle.message_event.set()
            self.task.cancel()
        self.task = None

    def _linger(self) -> None:
        """Send a FIN, and discard further bytes of the client, so that it can read the answer."""
        if self.phase >= LINGERING:
            return
        self.phase = LINGERING
        self.deadline = self.sweep.now + LINGER_SECS
        self.backlog = b""
        if self.transport.is_closing():
            return
        if self.scheme == "http":  # FIN only without TLS, which cannot close one direction
            self.transport.write_eof()
        self.transport.resume_reading()

    def _close(self) -> None:
        """Close the transport as soon as the client has read all that was written to it."""
        self.phase = CLOSING
        self.sweep.idle.pop(self, None)
        self.backlog = b""
        self._expect_unsent_bytes_to_shrink()
        self.transport.close()


class BodyCallbacks:
    """Callbacks of a second parser, which reads a body for ``_use_parser_for_body``."""

    def __init__(self, connection: Connection) -> None:
        self.on_chunk_header = connection.on_chunk_header
        self.on_body = connection.on_body
        self.on_message_complete = connection.on_message_complete


def limited_protocol(limits: ConnectionLimits) -> type[Connection]:
    """Create a subclass of ``Connection`` with a server's limits, for ``uvicorn.Config``.

    Its ``refused_connections`` counts rejected requests by HTTP status; its ``aborted_connections``
    counts connections that ended without an answer, by cause.
    """
    counts = {"refused_connections": {}, "aborted_connections": Counter[str]()}
    fields = {"limits_of_server": limits, **counts, "sweeps": WeakKeyDictionary()}
    return type("LimitedConnection", (Connection,), fields)
