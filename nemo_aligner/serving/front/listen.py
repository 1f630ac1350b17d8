"""Run uvicorn on the front's socket, in the main thread or another one, until it is stopped."""

from __future__ import annotations

import asyncio
import errno
import logging
import resource
import signal
import socket
import ssl
import threading
from collections.abc import Callable, Iterator, Sequence
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
from nemo_aligner.utils.writing import replacing, temporary_beside

logger = logging.getLogger(__name__)
_BACKLOG = 2048  # connections that wait in the kernel to be accepted; uvicorn's default
# Open files besides the clients' connections: the process's own, and a gateway's connections.
_OTHER_FILES = 512


def open_socket(config: FrontConfig) -> socket.socket:
    """Bind the socket of the front; it accepts no connection yet.

    A server binds it before loading a model, so that no other process takes the port meanwhile.
    The process's limit of open files is raised to what ``max_open_connections`` needs.

    Raises:
        ServingError: the port is taken, the host is not an address of this machine, the
            certificate or its key cannot be used, or the ready file cannot be written.
    """
    tls_context(config)
    _raise_file_limit(config)
    family = socket.AF_INET6 if ":" in config.host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((config.host, config.port))
        # Reset SO_REUSEADDR after binding: until a socket listens, the kernel would otherwise give
        # the same port to a second socket with this option.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 0)
    except OSError as error:
        listener.close()
        raise _describe_bind_error(config, error) from error
    try:
        ReadyFile(config).prepare()
    except ServingError:
        listener.close()
        raise
    return listener


def _raise_file_limit(config: FrontConfig) -> None:
    """Raise the limit of open files to what the connections need; print a warning if it is lower.

    Beyond that limit, the kernel cannot accept a connection, and its client gets a reset instead of
    an answer. Shells, systemd and container runtimes often set the soft limit to 1024.
    """
    needed = ConnectionLimits.of(config).max_refused_connections + _OTHER_FILES
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return
    limit = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
    except (OSError, ValueError):  # macOS has a lower limit than it reports
        limit = soft
    if limit < needed:
        fitting = max(1, (limit - _OTHER_FILES) * 8 // 9 - 8)
        print(
            f"Warning: {config.section}.max_open_connections: {config.max_open_connections} "
            f"connections need {needed} open files, but this process may have only {limit}. "
            "Clients beyond that get no answer. Raise the hard limit (ulimit -Hn, LimitNOFILE= of "
            f"systemd, --ulimit nofile= of docker), or set at most {fitting} connections",
            flush=True,
        )


def _describe_bind_error(config: FrontConfig, error: OSError) -> ServingError:
    section, host, port = config.section, config.host, config.port
    if isinstance(error, socket.gaierror) or error.errno == errno.EADDRNOTAVAIL:
        return ServingError(
            f"{section}.host: got {host}, which is not an address of this machine. Use 127.0.0.1 "
            "for this machine only, or 0.0.0.0 for every network"
        )
    if error.errno == errno.EADDRINUSE:
        return ServingError(
            f"{section}.port: {host}:{port} is not free: another process uses it. Choose another "
            "port, or 0 for any free one"
        )
    if error.errno == errno.EACCES:
        return ServingError(f"{section}.port: got {port}, but ports below 1024 need root")
    return ServingError(f"{section}.port: {host}:{port}: {error.strerror}")


def tls_context(config: FrontConfig) -> ssl.SSLContext | None:
    """Load the server's certificate and its key; None if no certificate is configured.

    Raises:
        ServingError: a file is missing, the key does not belong to the certificate, or the key has
            a password.
    """
    if config.certificate_file is None:
        return None

    def refuse_password() -> str:
        raise ServingError(f"{config.key_file}: the key is encrypted. Save it without a password")

    for name in ("certificate_file", "key_file"):
        path = getattr(config, name)
        if not Path(path).is_file():
            raise ServingError(f"{config.section}.{name}: {path}: the file does not exist")
    try:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(config.certificate_file, config.key_file, refuse_password)
    except (OSError, ServingError) as error:  # OSError includes ssl.SSLError
        files = f"{config.certificate_file}, {config.key_file}"
        raise ServingError(
            f"{config.section}.certificate_file, key_file: {files}: {error}"
        ) from error
    return context


def url_of(listener: socket.socket, config: FrontConfig) -> str:
    """Return the URL for clients: ``config.host``, and the port that the socket is bound to."""
    host = f"[{config.host}]" if ":" in config.host else config.host
    scheme = "http" if config.certificate_file is None else "https"
    return f"{scheme}://{host}:{listener.getsockname()[1]}"


def _listen(listener: socket.socket) -> socket.socket:
    """Make the socket listen; raise ServingError here, because uvloop would hide the failure."""
    # Set SO_REUSEADDR again: connections of an earlier server on this port may still be closing.
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.listen(_BACKLOG)
    except OSError as error:
        host, port = listener.getsockname()[:2]
        raise ServingError(f"{host}:{port}: cannot listen: {error.strerror}") from error
    return listener


class FrontServer:
    """Runs a front with uvicorn: ``run`` blocks the calling thread, ``start`` uses another one."""

    def __init__(
        self,
        front: Front,
        config: FrontConfig,
        on_ready: Callable[[], None] = lambda: None,
        on_drain: Callable[[], None] = lambda: None,
    ) -> None:
        """Prepare uvicorn.

        Args:
            front: the application.
            config: settings of the server or gateway.
            on_ready: called once requests are accepted.
            on_drain: called once no more requests are accepted.
        """
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
        scoring = [model.scoring for model in front.models]
        self._server = _Server(settings, scoring, on_ready, on_drain)
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        """The event loop of the front; read it only after the front has started."""
        assert self._server.loop is not None
        return self._server.loop

    def run(self, listener: socket.socket) -> None:
        """Answer requests until SIGTERM or SIGINT, then finish the ones in flight."""
        with closing(_listen(listener)), _ignore_signals_after_drain():
            self._server.run(sockets=[listener])

    def start(self, listener: socket.socket) -> None:
        """Answer requests in another thread until ``stop``; return once requests are accepted.

        Raises:
            ServingError: the socket cannot listen.
        """
        self._thread = threading.Thread(
            target=self._run, args=[listener], name="front", daemon=True
        )
        self._thread.start()
        self._server.has_begun.wait()
        if self._error is not None:
            raise ServingError(f"the HTTP front cannot start: {self._error}") from self._error

    def stop(self) -> None:
        """Reject new connections, finish requests in flight, and end the thread."""
        self._server.should_exit = True
        if self._thread is not None:
            self._thread.join()

    def failure(self) -> str | None:
        """Return why the front no longer answers; None while it answers."""
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
    """uvicorn's server, which also starts and closes the scoring services in its event loop."""

    def __init__(
        self,
        settings: uvicorn.Config,
        scoring: Sequence[ScoringService],
        on_ready: Callable[[], None],
        on_drain: Callable[[], None],
    ) -> None:
        super().__init__(settings)
        self.loop: asyncio.AbstractEventLoop | None = None
        self.has_begun = threading.Event()
        self._scoring = scoring
        self._on_ready, self._on_drain = on_ready, on_drain

    async def main_loop(self) -> None:
        """Start the scoring services, and answer requests until the server is told to stop."""
        self.loop = asyncio.get_running_loop()
        for service in self._scoring:
            await service.start()
        self._on_ready()
        self.has_begun.set()
        await super().main_loop()
        self._on_drain()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Finish requests in flight, then close the scoring services."""
        print("Draining: in-flight requests are answered, new ones are rejected", flush=True)
        await super().shutdown(sockets)
        for service in self._scoring:
            await service.close()


@contextmanager
def _ignore_signals_after_drain() -> Iterator[None]:
    """Ignore the signal that uvicorn raises again after draining, so that the exit code is 0."""
    numbers = (signal.SIGTERM, signal.SIGINT)
    handlers = {number: signal.signal(number, lambda *_: None) for number in numbers}
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


class ReadyFile:
    """A file that has the URL of a server while it answers.

    Nothing is written if ``config.ready_file`` is None.
    """

    def __init__(self, config: FrontConfig) -> None:
        self._key = f"{config.section}.ready_file"
        self._path = None if config.ready_file is None else Path(config.ready_file)

    def prepare(self) -> None:
        """Check that the file can be written, and remove one that a killed server left behind.

        A script that waits for the file would otherwise continue before this server is ready.

        Raises:
            ServingError: the path is a folder, or no file can be written there.
        """
        if self._path is None:
            return
        with self._explaining():
            self._path.unlink(missing_ok=True)
            # Write once now, so that a wrong path is reported before the model is loaded.
            with temporary_beside(self._path) as partial:
                partial.touch()

    def write(self, url: str) -> None:
        """Write the URL, when the server starts to answer.

        Raises:
            ServingError: the file cannot be written.
        """
        if self._path is None:
            return
        # A script reads the file as soon as it exists.
        with self._explaining(), replacing(self._path) as partial:
            partial.write_text(url + "\n")

    def remove(self) -> None:
        """Remove the file, when the server no longer answers.

        If that fails, this is only logged, because requests in flight still need their answers.
        """
        if self._path is None:
            return
        try:
            self._path.unlink(missing_ok=True)
        except OSError as error:
            logger.warning("%s: %s: cannot be removed: %s", self._key, self._path, error.strerror)

    @contextmanager
    def _explaining(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise ServingError(
                f"{self._key}: {self._path}: cannot be written: {error.strerror}. Name a file in "
                "a folder that exists and that you may write to"
            ) from error
