"""A Triton server on rank 0, the loop of followers on the others: from the start to every end."""

from __future__ import annotations

import os
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

import torch.distributed as dist

from nemo_aligner.config.serving import ServerConfig
from nemo_aligner.errors import AlignerError, ConfigError, ServingError
from nemo_aligner.serving.ranks import ModelRanks
from nemo_aligner.serving.service import Servable, Service, in_order
from nemo_aligner.serving.tokens import find_token, say_who_may_ask
from nemo_aligner.serving.transports.ready import ready_file
from nemo_aligner.serving.transports.triton.internals import (
    call_at_exit,
    hand_output_to,
    server_pid,
    workspace_of,
)
from nemo_aligner.serving.transports.triton.model import build_triton
from nemo_aligner.serving.transports.triton.processes import (
    Guard,
    TritonLog,
    free_port,
    is_running,
    triton_processes,
)

_WATCH_SECS = 0.2
_LAST_WORDS_SECS = 1.0  # for the requests at hand to get their error, when the server has to die


def check_front(config: ServerConfig) -> None:
    """Collective: refuse on all ranks a port that rank 0 cannot have, or a token.

    Raises:
        ServingError: the port is taken, the host is no address of rank 0's machine, or the token
            cannot be read there, or Triton's log not be written.
    """
    said: list[str | None] = [None]
    if dist.get_rank() == 0:
        try:
            free_port(config.host, config.port)
            _read_token(config)
            TritonLog(config.triton_log_file).close()
        except (ConfigError, ServingError) as error:
            said = [str(error)]
    dist.broadcast_object_list(said, src=0)
    if said[0] is not None:
        raise ServingError(said[0])


def _read_token(config: ServerConfig) -> str | None:
    return find_token(config.token_file, config.token_variable, "server.token")


def serve(servables: Sequence[Servable], config: ServerConfig) -> int:
    """Answer requests to all of ``servables`` until SIGTERM or SIGINT; every rank calls it.

    Returns:
        The exit code, 0 after a drained stop. A server that cannot go on (a rank, Triton or its
        Python stub died) answers what it holds with an error and ends the process with 1.

    Raises:
        ServingError: it cannot start, on rank 0; the others are released.
    """
    ranks = ModelRanks(
        {name: call for each in servables for name, call in each.operations.items()},
        lambda: _forget(servables),
        config.heartbeat_secs,
        config.worker_timeout_secs,
    )
    if ranks.rank != 0:
        # The launcher signals every rank; rank 0 decides, after it has drained.
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, signal.SIG_IGN)
        ranks.follow()
        ranks.stop()
        return 0
    try:
        return _lead(servables, ranks, config)
    except AlignerError:
        if ranks.failure is None:  # the others have nothing to say to it
            ranks.stop()
        raise


def _forget(servables: Sequence[Servable]) -> None:
    for each in servables:
        each.forget()


def _lead(servables: Sequence[Servable], ranks: ModelRanks, config: ServerConfig) -> int:
    stopping: list[int] = []
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda received, _: stopping.append(received))
    ranks.lead(lambda: _answer(servables, ranks, config, lambda: bool(stopping)))
    ranks.stop()
    print("Stopped", flush=True)
    return 0


def _answer(
    servables: Sequence[Servable],
    ranks: ModelRanks,
    config: ServerConfig,
    shall_stop: Callable[[], bool],
) -> None:
    """Have Triton hand requests over until it shall stop, while the model is at work beside."""
    port = free_port(config.host, config.port)
    services = [each.start(ranks) for each in servables]
    endpoints = in_order(services)
    token = _read_token(config)
    triton = build_triton(endpoints, config, port, token)
    log = TritonLog(config.triton_log_file)
    print(f"Starting Triton, whose log is {log.path}", flush=True)
    guard = _start(triton, log)
    processes = triton_processes(os.getpid())
    url = f"http://{config.host}:{port}"
    report = _Report(services, config.report_every_secs)
    watch = _Watch(triton, processes, ranks, report, log)
    with ready_file(config.ready_file, url):
        names = ", ".join(endpoint.name for endpoint in endpoints)
        print(f"Serving {names} at {url} (pid {os.getpid()})", flush=True)
        say_who_may_ask(config.host, token, "server.token")
        for line in (line for each in services for line in each.greeting):
            print(line, flush=True)
        watch.until(shall_stop)
        print("Draining: in-flight requests are answered, new ones are refused", flush=True)
        stop = threading.Thread(target=triton.stop, name="drain", daemon=True)
        stop.start()
        # Where a rank dies its launcher stops the others: what is in flight has no answer then.
        watch.until(lambda: not stop.is_alive(), triton_may_end=True)
    guard.dismiss()
    report.say()
    for each in services:
        each.close()
    log.close()


def _start(triton: Any, log: TritonLog) -> Guard:
    """Run Triton until its model is ready; PyTriton would wait two minutes for one that is dead.

    Raises:
        ServingError: it runs, and does not become ready.
    """
    from pytriton.client.exceptions import PyTritonClientError
    from pytriton.exceptions import PyTritonError

    hand_output_to(triton, log.write)
    started = threading.Event()

    def ended() -> None:
        if not started.is_set():
            shutil.rmtree(workspace_of(triton), ignore_errors=True)
            _die(f"Triton did not start; {log.ending()}")

    call_at_exit(triton, ended)
    try:
        triton.run()
    except (PyTritonError, PyTritonClientError, TimeoutError) as error:
        raise ServingError(f"Triton did not start: {error}; {log.ending()}") from error
    started.set()
    return Guard(server_pid(triton), workspace_of(triton))


class _Report:
    """Says every few seconds how busy the server is, while it has work."""

    def __init__(self, services: Sequence[Service], every_secs: float) -> None:
        self._services = services
        self._every_secs = every_secs
        self._said = time.monotonic()

    def when_due(self) -> None:
        if self._every_secs and time.monotonic() - self._said >= self._every_secs:
            self.say()

    def say(self) -> None:
        self._said = time.monotonic()
        for line in [service.report() for service in self._services]:
            if line is not None and self._every_secs:
                print(line, flush=True)


class _Watch:
    """Looks whether everything lives that the server needs, and ends it where one does not."""

    def __init__(
        self,
        triton: Any,
        processes: Mapping[int, str],
        ranks: ModelRanks,
        report: _Report,
        log: TritonLog,
    ) -> None:
        self._triton, self._log = triton, log
        self._processes = processes
        self._ranks = ranks
        self._report = report

    def until(self, is_over: Callable[[], bool], triton_may_end: bool = False) -> None:
        """Wait; or leave with exit code 1, and the reason."""
        while not is_over():
            failure = self._ranks.failure or (None if triton_may_end else self._dead_triton())
            if failure is not None:
                _die(failure)
            self._report.when_due()
            time.sleep(_WATCH_SECS)
        if self._ranks.failure is not None:
            _die(self._ranks.failure)

    def _dead_triton(self) -> str | None:
        for pid, name in self._processes.items():
            if not is_running(pid):
                return f"{name} (pid {pid}) died; {self._log.ending()}"
        if self._triton.is_alive():
            return None
        return f"Triton is not alive; {self._log.ending()}"


def _die(failure: str) -> NoReturn:
    """Leave at once with exit code 1; Triton's guard and other ranks notice and do the same."""
    print(f"The server cannot go on: {failure}", file=sys.stderr, flush=True)
    time.sleep(_LAST_WORDS_SECS)
    os._exit(1)
