"""Sockets and uvicorn: the front listens, answers in the main thread or beside it, and drains."""

from __future__ import annotations

import asyncio
import errno
import os
import signal
import socket
import ssl
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import uvicorn

from nemo_aligner.config.serving import FrontConfig
from nemo_aligner.serving.front.app import Front
from nemo_aligner.serving.front.connection import limited_protocol
from nemo_aligner.serving.front.handshake import behind_tls
from nemo_aligner.serving.front.limits import ConnectionLimits
from nemo_aligner.serving.scoring import ScoringService
from nemo_aligner.utils.errors import ServingError

_BACKLOG = 2048  # connections that the kernel holds until they are accepted; uvicorn's own default


def open_socket(config: FrontConfig) -> socket.socket:
    """Bind the socket of the front; nobody is accepted before it listens.

    A server does so before it loads a model, so that nobody takes the port meanwhile.

    Raises:
        ServingError: the port is taken, the host is no address of this machine, or the certificate
            or its key cannot be used.
    """
    tls_context(config)
    family = socket.AF_INET6 if ":" in config.host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((config.host, config.port))
        # Of two sockets that do not listen yet, the kernel lets both have the port otherwise.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 0)
    except OSError as error:
        listener.close()
        raise _bind_error(config, error) from error
    # Of an earlier server that was killed: a script that waits for it would go on at once.
    ReadyFile(config.ready_file).remove()
    return listener


def _bind_error(config: FrontConfig, error: OSError) -> ServingError:
    section, host, port = config.section, config.host, config.port
    if isinstance(error, socket.gaierror) or error.errno == errno.EADDRNOTAVAIL:
        return ServingError(
            f"{section}.host: got {host}, which is no address of this machine. 127.0.0.1 is for "
            "this machine alone, 0.0.0.0 for every network"
        )
    if error.errno == errno.EADDRINUSE:
        return ServingError(
            f"{section}.port: {host}:{port} is not free: another process has it. Choose another "
            "port, or 0 for any free one"
        )
    if error.errno == errno.EACCES:
        return ServingError(f"{section}.port: got {port}, but ports below 1024 need root")
    return ServingError(f"{section}.port: {host}:{port}: {error.strerror}")


def tls_context(config: FrontConfig) -> ssl.SSLContext | None:
    """The certificate and its key; None for a server without.

    Raises:
        ServingError: they do not fit each other, or the key needs a password.
    """
    if config.certificate_file is None:
        return None

    def refuse_password() -> str:
        raise ServingError("the key is encrypted; write it without a password")

    for name in ("certificate_file", "key_file"):
        path = getattr(config, name)
        if not Path(path).is_file():
            raise ServingError(f"{config.section}.{name}: {path}: there is no such file")
    try:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(config.certificate_file, config.key_file, refuse_password)
    except (OSError, ServingError) as error:  # ssl's errors are among them
        files = f"{config.certificate_file}, {config.key_file}"
        raise ServingError(
            f"{config.section}.certificate_file, key_file: {files}: {error}"
        ) from error
    return context


def url_of(listener: socket.socket, config: FrontConfig) -> str:
    """The URL that clients ask."""
    host = f"[{config.host}]" if ":" in config.host else config.host
    scheme = "http" if config.certificate_file is None else "https"
    return f"{scheme}://{host}:{listener.getsockname()[1]}"


def _listen(listener: socket.socket) -> socket.socket:
    """Have the socket accept connections; uvloop would not say that it cannot."""
    # Again, as connections of an earlier server may still linger.
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.listen(_BACKLOG)
    except OSError as error:
        host, port = listener.getsockname()[:2]
        raise ServingError(f"{host}:{port} cannot be listened on: {error.strerror}") from error
    return listener


class FrontServer:
    """uvicorn around a front: in the calling thread by ``run``, in one of its own by ``start``."""

    def __init__(
        self,
        front: Front,
        config: FrontConfig,
        on_ready: Callable[[], None] = lambda: None,
        on_drain: Callable[[], None] = lambda: None,
    ) -> None:
        """``on_ready`` is called once requests are accepted, ``on_drain`` when they are no more."""
        connections = limited_protocol(ConnectionLimits.of(config))
        front.metrics.refused_connections = connections.refused_connections
        front.metrics.aborted_connections = connections.aborted_connections
        context = tls_context(config)
        settings = uvicorn.Config(
            front,
            http=connections if context is None else behind_tls(connections, context),
            ws="none",
            lifespan="off",
            backlog=_BACKLOG,
            log_config=None,
            access_log=False,
            timeout_graceful_shutdown=config.exit_timeout_secs,
            server_header=False,
        )
        self._server = _Server(settings, front.scoring, on_ready, on_drain)
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        """The event loop that answers; it exists once requests are accepted."""
        assert self._server.loop is not None
        return self._server.loop

    def run(self, listener: socket.socket) -> None:
        """Answer until SIGTERM or SIGINT, and then what is in flight."""
        with closing(_listen(listener)), _ignore_signals_after_drain():
            self._server.run(sockets=[listener])

    def start(self, listener: socket.socket) -> None:
        """Answer in another thread, until ``stop``; return once requests are accepted.

        Raises:
            ServingError: it cannot listen.
        """
        self._thread = threading.Thread(
            target=self._run, args=[listener], name="front", daemon=True
        )
        self._thread.start()
        self._server.has_begun.wait()
        if self._error is not None:
            raise ServingError(f"the HTTP front cannot start: {self._error}") from self._error

    def stop(self) -> None:
        """Refuse new connections, answer what is in flight, and end."""
        self._server.should_exit = True
        if self._thread is not None:
            self._thread.join()

    def failure(self) -> str | None:
        """Why it does not answer any more; None while it does."""
        if self._thread is None or self._thread.is_alive():
            return None
        return f"the HTTP front ended: {self._error}"

    def _run(self, listener: socket.socket) -> None:
        try:
            with closing(_listen(listener)):
                self._server.run(sockets=[listener])
        except BaseException as error:
            self._error = error
        finally:
            self._server.has_begun.set()


class _Server(uvicorn.Server):
    """uvicorn's server, which begins and ends what a scoring service runs in its event loop."""

    def __init__(
        self,
        settings: uvicorn.Config,
        scoring: ScoringService | None,
        on_ready: Callable[[], None],
        on_drain: Callable[[], None],
    ) -> None:
        super().__init__(settings)
        self.loop: asyncio.AbstractEventLoop | None = None
        self.has_begun = threading.Event()
        self._scoring = scoring
        self._on_ready, self._on_drain = on_ready, on_drain

    async def main_loop(self) -> None:
        """Until it shall stop."""
        self.loop = asyncio.get_running_loop()
        if self._scoring is not None:
            await self._scoring.start()
        self._on_ready()
        self.has_begun.set()
        await super().main_loop()
        self._on_drain()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Answer what is in flight, then end the scoring service."""
        print("Draining: in-flight requests are answered, new ones are refused", flush=True)
        await super().shutdown(sockets)
        if self._scoring is not None:
            await self._scoring.close()


@contextmanager
def _ignore_signals_after_drain() -> Iterator[None]:
    """Ignore the signal that uvicorn raises again once it has drained; the exit code is 0."""
    numbers = (signal.SIGTERM, signal.SIGINT)
    handlers = {number: signal.signal(number, lambda *_: None) for number in numbers}
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


class ReadyFile:
    """A file that holds the URL of a server while it answers; None is no file."""

    def __init__(self, path: str | None) -> None:
        self._path = None if path is None else Path(path)

    def write(self, url: str) -> None:
        """The server answers.

        Raises:
            ServingError: it cannot be written.
        """
        if self._path is None:
            return
        # Renamed once it is whole: who waits for the file reads it as soon as it is there.
        partial = self._path.with_name(f".{self._path.name}.{os.getpid()}")
        try:
            partial.write_text(url + "\n")
            partial.replace(self._path)
        except OSError as error:
            raise ServingError(f"ready_file: {self._path}: {error.strerror}") from error

    def remove(self) -> None:
        """The server does not answer any more."""
        if self._path is not None:
            self._path.unlink(missing_ok=True)
