"""A front in a thread around a small application, and raw clients for it."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import json
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import uvicorn

from nemo_aligner.serving.front.connection import Connection, limited_protocol
from nemo_aligner.serving.front.handshake import behind_tls
from nemo_aligner.serving.front.limits import ConnectionLimits

LIMITS = ConnectionLimits(
    section="server",
    max_header_bytes=8192,
    max_request_bytes=2**20,
    max_buffered_bytes=12 * 2**20,
    max_chunks=1000,
    max_open_connections=2000,
    receive_timeout_secs=20.0,
    keep_alive_secs=20.0,
    max_connection_secs=60.0,
)
LARGE = 32 * 2**20
VISITOR: contextvars.ContextVar[str] = contextvars.ContextVar("VISITOR", default="nobody")


@dataclass
class Application:
    """An ASGI application that answers what it got, and records what happens to its tasks."""

    calls: list[str] = field(default_factory=list)
    cancelled: list[str] = field(default_factory=list)

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        path = scope["path"]
        self.calls.append(path)
        if path.startswith("/early"):
            await answer(send, 401, b'{"error": "no token"}')
            return
        if path.startswith("/raise"):
            raise ValueError("on purpose")
        if path.startswith("/nothing"):
            return
        if path.startswith("/pause"):
            await asyncio.sleep(1.5)
        body = bytearray()
        while True:
            message = await receive()
            body += message.get("body", b"")
            if not message.get("more_body"):
                break
        if path.startswith("/wait"):
            try:
                await asyncio.sleep(60)
            except asyncio.CancelledError:
                self.cancelled.append(path)
                raise
        if path.startswith("/large"):
            await answer(send, 200, bytes(LARGE))
            return
        visitor = VISITOR.get()
        VISITOR.set(path)
        shown = {
            "method": scope["method"],
            "path": path,
            "query": scope["query_string"].decode(),
            "version": scope["http_version"],
            "headers": [name.decode() for name, _ in scope["headers"]],
            "body": bytes(body[:100]).decode("latin-1"),
            "bytes": len(body),
            "visitor": visitor,
        }
        await answer(send, 200, json.dumps(shown).encode())


async def answer(send: Any, status: int, body: bytes) -> None:
    headers = [(b"content-length", b"%d" % len(body)), (b"content-type", b"application/json")]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


@dataclass
class Answer:
    status: int
    headers: dict[str, str]
    body: bytes

    def json(self) -> Any:
        return json.loads(self.body)


class Client:
    """A raw connection: it sends bytes unchanged, and reads answers."""

    def __init__(self, front: Front, timeout: float = 10.0) -> None:
        self.socket = socket.create_connection(("127.0.0.1", front.port), timeout=timeout)
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if front.trust is not None:
            self.socket = front.trust.wrap_socket(self.socket, server_hostname="127.0.0.1")
        self.file = self.socket.makefile("rb")

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self.file.close()
        self.socket.close()

    def send(self, *pieces: bytes) -> int:
        """Send until the server closes the connection; return the number of bytes sent."""
        size = 0
        with contextlib.suppress(ConnectionError):
            for piece in pieces:
                self.socket.sendall(piece)
                size += len(piece)
        return size

    def answer(self, *, of_head: bool = False) -> Answer:
        status = int(self.file.readline().split()[1])
        headers = {}
        while (line := self.file.readline()) not in (b"\r\n", b""):
            name, value = line.decode().split(":", 1)
            headers[name.lower()] = value.strip()
        size = 0 if of_head else int(headers.get("content-length", "0"))
        return Answer(status, headers, self.file.read(size))

    def remainder(self) -> bytes:
        """Read up to the end of the connection, which must not be a reset."""
        return self.file.read()

    def is_closed(self) -> bool:
        with contextlib.suppress(ConnectionError):
            return self.remainder() == b""
        return True


class Front:
    """A running uvicorn with limited connections."""

    def __init__(
        self,
        limits: ConnectionLimits,
        certificate: tuple[Path, Path] | None = None,
    ) -> None:
        self.application = Application()
        self.protocol: type[Connection] = limited_protocol(limits)
        self.trust: ssl.SSLContext | None = None
        listener = socket.create_server(("127.0.0.1", 0), backlog=2048)
        self.port = listener.getsockname()[1]
        http: type[asyncio.Protocol] = self.protocol
        if certificate is not None:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(*certificate)
            http = behind_tls(self.protocol, context)
            self.trust = ssl.create_default_context(cafile=str(certificate[0]))
        self.server = uvicorn.Server(
            uvicorn.Config(
                self.application,
                http=http,
                ws="none",
                loop="uvloop",
                lifespan="off",
                access_log=False,
                log_config=None,
                timeout_graceful_shutdown=1,
            )
        )
        run = self.server.run
        self.thread = threading.Thread(target=run, args=([listener],), daemon=True)
        self.thread.start()
        wait_until(lambda: self.server.started)

    def stop(self) -> None:
        self.server.should_exit = True
        self.thread.join(10)
        assert not self.thread.is_alive()

    @property
    def refused(self) -> dict[int, int]:
        return dict(self.protocol.refused_connections)

    @property
    def aborted(self) -> dict[str, int]:
        return dict(self.protocol.aborted_connections)

    @property
    def connections(self) -> set[Any]:
        return self.server.server_state.connections

    def request(self, *pieces: bytes) -> Answer:
        """Send a request over a new connection, and read its answer."""
        with Client(self) as client:
            client.send(*pieces)
            return client.answer()

    def assert_serves(self) -> None:
        """Assert that the next good request is answered."""
        good = self.request(post("/good", b"[1, 2, 3]"))
        assert (good.status, good.json()["body"]) == (200, "[1, 2, 3]")


@contextlib.contextmanager
def running(certificate: tuple[Path, Path] | None = None, **changes: Any) -> Iterator[Front]:
    """Run a front with these changes of LIMITS."""
    front = Front(replace(LIMITS, **changes), certificate)
    try:
        yield front
    finally:
        front.stop()


def post(path: str, body: bytes, *headers: str) -> bytes:
    lines = [f"POST {path} HTTP/1.1", "Host: front", *headers, f"Content-Length: {len(body)}"]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body


def chunked_head(path: str, *headers: str) -> bytes:
    lines = [f"POST {path} HTTP/1.1", "Host: front", *headers, "Transfer-Encoding: chunked"]
    return "\r\n".join(lines).encode() + b"\r\n\r\n"


def chunk(data: bytes, extension: bytes = b"") -> bytes:
    return b"%x%s\r\n%s\r\n" % (len(data), extension, data)


LAST_CHUNK = b"0\r\n\r\n"


def get(path: str, *headers: str) -> bytes:
    return "\r\n".join([f"GET {path} HTTP/1.1", "Host: front", *headers]).encode() + b"\r\n\r\n"


def wait_until(condition: Callable[[], bool], timeout: float = 10.0) -> None:
    end = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < end, "it did not come about"
        time.sleep(0.005)


def resident_bytes() -> int:
    """Memory of this process, which includes the front's thread."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096
