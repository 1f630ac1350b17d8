"""Run a server from start to end: the ranks, the HTTP front, Triton, and the drain at the end.

On rank 0, the main thread computes, the HTTP front answers in another thread, and a third thread
(``_Leader``) starts both, watches them and ends them. The other ranks run the operations that rank
0 sends them.
"""

from __future__ import annotations

import gc
import logging
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from threading import Thread
from typing import NoReturn

from nemo_aligner.config.serving import ServerConfig
from nemo_aligner.distributed.collectives import on_main
from nemo_aligner.serving.endpoints import Endpoint
from nemo_aligner.serving.engine.executor import ModelRanks, RanksLostError
from nemo_aligner.serving.front.app import Front
from nemo_aligner.serving.front.listen import FrontServer, ReadyFile, open_socket, url_of
from nemo_aligner.serving.front.models import HostedModel
from nemo_aligner.serving.protocols.kserve import (
    CONTRACT_MODEL_NAME,
    MODEL_NAME,
    contract_name,
)
from nemo_aligner.serving.service import Backend, Service
from nemo_aligner.serving.tokens import find_token, warn_of_open_server
from nemo_aligner.serving.triton import TritonFront, check_triton
from nemo_aligner.utils.errors import AlignerError, one_line

logger = logging.getLogger(__name__)

_WATCH_SECS = 0.2  # seconds after which a dead rank or Triton is noticed
_LAST_WORDS_SECS = 1.0  # seconds before the process exits, in which requests get their error
# Seconds after exit_timeout_secs in which the services must end. Training and saving may take any
# amount of time.
_STOP_SECS = 5.0
_STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)


class ServerSocket:
    """The port of a server, bound on rank 0 before the model is loaded.

    It is a context manager, which frees the port if the server does not start.
    """

    def __init__(self, config: ServerConfig) -> None:
        """Bind the port. Collective: if rank 0 cannot serve, all ranks raise.

        Raises:
            ConfigError: the token cannot be read on rank 0's machine.
            ServingError: the port is taken, the host is not an address of that machine, the ready
                file cannot be written there, or Triton cannot be started.
        """
        self.listener: socket.socket | None = None
        on_main(lambda: self._bind(config))

    def _bind(self, config: ServerConfig) -> None:
        _read_token(config)
        check_triton(config)
        self.listener = open_socket(config)

    def __enter__(self) -> ServerSocket:
        return self

    def __exit__(self, *unused: object) -> None:
        if self.listener is not None:
            self.listener.close()


def _read_token(config: ServerConfig) -> str | None:
    return find_token(config.token_file, config.token_variable, f"{config.section}.token")


def serve(backends: Sequence[Backend], config: ServerConfig, port: ServerSocket) -> int:
    """Answer requests to all ``backends`` until SIGTERM or SIGINT; every rank calls this.

    Returns:
        The exit code: 0 after requests in flight were answered. If a rank or Triton dies, or the
        model hangs, the server answers the requests in flight with an error, and the process exits
        with 1.

    Raises:
        ServingError: the server cannot start. Only rank 0 raises; the other ranks return.
    """
    ranks = ModelRanks(
        {name: call for backend in backends for name, call in backend.operations.items()},
        lambda: _reset_caches(backends),
        config.heartbeat_secs,
        config.worker_timeout_secs,
        config.max_stuck_secs,
    )
    if ranks.rank != 0:
        # torchrun passes a signal on to every rank, but workers must keep computing while rank 0
        # drains.
        for number in _STOP_SIGNALS:
            signal.signal(number, signal.SIG_IGN)
        ranks.run_worker()
        ranks.stop()
        return 0
    assert port.listener is not None
    with _StopSignals() as signals:
        leader = _Leader(backends, ranks, config, port.listener, signals)
        # If the start fails, e.g. because the model cannot run, rank 0 must still stop the workers.
        try:
            ranks.run_leader(leader.run)
        except AlignerError:
            if ranks.failure is None:  # None: no rank is lost, so the workers still answer
                ranks.stop()
            raise
    ranks.stop()
    print("Stopped", flush=True)
    return 0


def _reset_caches(backends: Iterable[Backend]) -> None:
    for backend in backends:
        backend.reset_cache()


class _StopSignals:
    """Notes SIGTERM and SIGINT, even while the main thread is in a kernel that never returns.

    Python calls signal handlers only between two instructions of the main thread, so the signals
    are read from Python's wakeup descriptor instead, to which they are written at once.
    """

    def __init__(self) -> None:
        self._reader, self._writer = socket.socketpair()
        for end in (self._reader, self._writer):
            end.setblocking(False)
        self._have_arrived = False

    def __enter__(self) -> _StopSignals:
        """Install the handlers, which Python allows only in the main thread."""
        # Only signals with a handler in Python are written to the descriptor.
        for number in _STOP_SIGNALS:
            signal.signal(number, lambda *_: None)
        self._previous = signal.set_wakeup_fd(self._writer.fileno(), warn_on_full_buffer=False)
        return self

    def __exit__(self, *unused: object) -> None:
        signal.set_wakeup_fd(self._previous)
        self._reader.close()
        self._writer.close()

    def have_arrived(self) -> bool:
        """True if one of the signals has arrived."""
        with suppress(BlockingIOError):
            self._have_arrived |= not set(_STOP_SIGNALS).isdisjoint(self._reader.recv(1024))
        return self._have_arrived


class _Leader:
    """Starts, watches and ends all parts of the server on rank 0 except the model itself."""

    def __init__(
        self,
        backends: Sequence[Backend],
        ranks: ModelRanks,
        config: ServerConfig,
        listener: socket.socket,
        signals: _StopSignals,
    ) -> None:
        self._backends, self._ranks, self._config = backends, ranks, config
        self._listener, self._signals = listener, signals
        self._ready = ReadyFile(config)
        self._reported = time.monotonic()

    def run(self) -> None:
        """Serve until a signal arrives; exit the process with code 1 if a part of it dies."""
        services = self._start_services()
        models = [
            HostedModel(service.scoring, service.endpoints)
            for service in services
            if service.scoring is not None
        ]
        endpoints = [endpoint for service in services for endpoint in _name_endpoints(service)]
        token = _read_token(self._config)

        async def statistics() -> dict[str, Mapping[str, float] | None]:
            counts = [await service.statistics() for service in services]
            return {name: count for by_name in counts for name, count in by_name.items()}

        probes = [service.probe for service in services]
        front = Front(models, endpoints, self._config, token, statistics, probes)
        server = FrontServer(front, self._config)
        url = url_of(self._listener, self._config)
        server.start(self._listener)
        triton = self._open_triton(endpoints, token, server)
        # Exclude all objects that exist now from garbage collection, so that collections during
        # large requests do not scan them.
        gc.collect()
        gc.freeze()
        self._ready.write(url)
        try:
            self._print_start(url, services, endpoints, token, triton)
            parts = [server.failure, *([triton.failure] if triton is not None else [])]
            self._watch(self._signals.have_arrived, services, parts)
        finally:
            self._ready.remove()
        front.is_ready = False
        self._drain(server, triton, services)

    def _start_services(self) -> Sequence[Service]:
        try:
            return [backend.start(self._ranks) for backend in self._backends]
        except RanksLostError as error:
            # The main thread may wait forever for the lost rank or in the call that hangs, so an
            # exception would not end the process.
            self._die(f"The server cannot start: {one_line(error)}")

    def _open_triton(
        self, endpoints: Sequence[Endpoint], token: str | None, server: FrontServer
    ) -> TritonFront | None:
        if self._config.triton_port is None:
            return None
        return TritonFront.start(endpoints, self._config, token, server.loop)

    def _print_start(
        self,
        url: str,
        services: Sequence[Service],
        endpoints: Sequence[Endpoint],
        token: str | None,
        triton: TritonFront | None,
    ) -> None:
        names = ", ".join(endpoint.name for endpoint in endpoints)
        print(f"Serving at {url} (pid {os.getpid()}); KServe models: {names}", flush=True)
        page = (
            "docs/protocols.md" if token is not None else f"{url}/docs"
        )  # the page is open because a browser sends no token
        if any(service.scoring is not None for service in services):
            print(f"All protocols are at this port; {page} lists their paths", flush=True)
        if token is not None:
            print(
                "Requests need the bearer token of server.token_file or token_variable", flush=True
            )
        warn_of_open_server(self._config.host, token, f"{self._config.section}.token")
        lines = [line for service in services for line in service.startup_log]
        for line in [*lines, *(triton.startup_log if triton is not None else [])]:
            print(line, flush=True)

    def _drain(
        self, server: FrontServer, triton: TritonFront | None, services: Sequence[Service]
    ) -> None:
        end = time.monotonic() + self._config.exit_timeout_secs
        # Triton is stopped first, because the event loop of the front answers its requests.
        stops = [*([triton.stop] if triton is not None else []), server.stop]
        drain = Thread(target=_call_all, args=[stops], name="drain", daemon=True)
        drain.start()
        # If a rank dies during the drain, requests in flight fail, because the launcher stops all
        # ranks.
        self._watch(lambda: not drain.is_alive(), services, [])
        if triton is not None:
            triton.close()
        self._report(services)
        self._stop_services(services, end)

    def _stop_services(self, services: Sequence[Service], end: float) -> None:
        """End the services, which wait for the running call; end the process if that hangs.

        No request waits any more, so only training and saving are worth more than ``_STOP_SECS``
        after ``end``, the time at which ``exit_timeout_secs`` are over.
        """
        stops = [service.stop for service in services]
        stopping = Thread(target=_call_all, args=[stops], name="stop", daemon=True)
        stopping.start()
        announced, end = None, max(end, time.monotonic()) + _STOP_SECS
        while stopping.is_alive():
            stopping.join(_WATCH_SECS)
            self._check_ranks()
            call = self._ranks.running.first
            if call is not None and call.is_long:
                end = max(end, time.monotonic() + _STOP_SECS)
                if call != announced:
                    announced = call
                    print(f"The server ends after a call ({call.describe()})", flush=True)
            elif stopping.is_alive() and time.monotonic() >= end:
                running = "a part of it" if call is None else f"a call ({call.describe()})"
                self._die(
                    f"The server exits at once: {running} has not ended {_STOP_SECS:g} s after the "
                    f"time for requests in flight ({self._config.section}.exit_timeout_secs)"
                )

    def _watch(
        self,
        is_over: Callable[[], bool],
        services: Sequence[Service],
        failures: Sequence[Callable[[], str | None]],
    ) -> None:
        """Wait until ``is_over()``, and log the load.

        If a part of the server dies, exit with code 1.
        """
        while not is_over():
            self._check_ranks()
            for reason in filter(None, [failure() for failure in failures]):
                self._die(f"The server cannot continue: {reason}")
            elapsed = time.monotonic() - self._reported
            if self._config.report_every_secs and elapsed >= self._config.report_every_secs:
                self._report(services)
            time.sleep(_WATCH_SECS)
        self._check_ranks()

    def _check_ranks(self) -> None:
        """Exit with code 1 if a rank is lost, or the model hangs."""
        if self._ranks.failure is not None:
            self._die(f"The server cannot continue: {self._ranks.failure}")

    def _report(self, services: Sequence[Service]) -> None:
        """Log the load of each service since its last report.

        A service without requests logs nothing.
        """
        self._reported = time.monotonic()
        for line in [service.report() for service in services]:
            if line is not None and self._config.report_every_secs:
                print(line, flush=True)

    def _die(self, line: str) -> NoReturn:
        """Log ``line``, and exit at once with code 1; the other ranks notice it and also exit."""
        # No ``finally`` runs, and a script may take the file for that of a server that answers.
        self._ready.remove()
        with suppress(OSError):
            print(line, file=sys.stderr, flush=True)
        time.sleep(_LAST_WORDS_SECS)
        os._exit(1)


def _name_endpoints(service: Service) -> Sequence[Endpoint]:
    """Return a service's endpoints, with the names that they have outside ``/models/NAME``."""
    if service.scoring is None or service.scoring.model_name == MODEL_NAME:
        return service.endpoints
    name = service.scoring.model_name
    names = {MODEL_NAME: name, CONTRACT_MODEL_NAME: contract_name(name)}
    return [replace(endpoint, name=names[endpoint.name]) for endpoint in service.endpoints]


def _call_all(stops: Sequence[Callable[[], None]]) -> None:
    """Call all functions, even if one of them raises; exceptions are logged."""
    for stop in stops:
        try:
            stop()
        except Exception:  # go on: the other parts still have requests in flight
            logger.exception("a part of the server could not be stopped")
