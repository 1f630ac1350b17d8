"""A Triton server on rank 0, the loop of followers on the others: from the start to every end."""

from __future__ import annotations

import os
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

import torch.distributed as dist

from nemo_aligner.config.serving import ServerConfig
from nemo_aligner.errors import AlignerError, ServingError
from nemo_aligner.scoring.shaping import RewardShaper
from nemo_aligner.serving.batcher import Batcher
from nemo_aligner.serving.meter import Meter
from nemo_aligner.serving.ranks import ModelRanks
from nemo_aligner.serving.services.reward import RewardService, ServableScorer
from nemo_aligner.serving.transports.ready import ready_file
from nemo_aligner.serving.transports.triton.internals import call_at_exit, server_pid, workspace_of
from nemo_aligner.serving.transports.triton.model import build_triton
from nemo_aligner.serving.transports.triton.processes import (
    Guard,
    free_port,
    is_running,
    triton_processes,
)
from nemo_aligner.serving.wire.kserve import MODEL_NAME

_WATCH_SECS = 0.2
_LAST_WORDS_SECS = 1.0  # for the requests at hand to get their error, when the server has to die


def check_port(config: ServerConfig) -> None:
    """Collective: refuse on all ranks a port that rank 0 cannot have.

    Raises:
        ServingError: it is taken, or the host is no address of rank 0's machine.
    """
    said: list[str | None] = [None]
    if dist.get_rank() == 0:
        try:
            free_port(config.host, config.port)
        except ServingError as error:
            said = [str(error)]
    dist.broadcast_object_list(said, src=0)
    if said[0] is not None:
        raise ServingError(said[0])


def serve(scorer: ServableScorer, config: ServerConfig, shaper: RewardShaper | None = None) -> int:
    """Answer requests until SIGTERM or SIGINT; every rank calls it.

    Returns:
        The exit code, 0 after a drained stop. A server that cannot go on (a rank, Triton or its
        Python stub died) answers what it holds with an error and ends the process with 1.

    Raises:
        ServingError: it cannot start, on rank 0; the others are released.
    """
    ranks = ModelRanks(
        scorer.score_token_lists,
        scorer.forget,
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
        return _lead(scorer, ranks, config, shaper)
    except AlignerError:
        if ranks.failure is None:  # the others have nothing to say to it
            ranks.stop()
        raise


def _lead(
    scorer: ServableScorer, ranks: ModelRanks, config: ServerConfig, shaper: RewardShaper | None
) -> int:
    stopping: list[int] = []
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda received, _: stopping.append(received))
    ranks.lead(lambda: _answer(scorer, ranks, config, shaper, lambda: bool(stopping)))
    ranks.stop()
    print("Stopped", flush=True)
    return 0


def _answer(
    scorer: ServableScorer,
    ranks: ModelRanks,
    config: ServerConfig,
    shaper: RewardShaper | None,
    shall_stop: Callable[[], bool],
) -> None:
    """Have Triton hand requests over until it shall stop, while the model is at work beside."""
    port = free_port(config.host, config.port)
    ranks.execute([[0]])  # the first forward pass is slow, and may show that the model cannot run
    meter = Meter()
    batcher = Batcher(ranks.submit, scorer.tokens_per_call, meter)
    service = RewardService(scorer, batcher, config, meter, shaper)
    triton = build_triton(service, config, port)
    guard = _start(triton)
    processes = triton_processes(os.getpid())
    url = f"http://{config.host}:{port}"
    report = _Report(meter, batcher, scorer, config.report_every_secs)
    watch = _Watch(triton, processes, ranks, report)
    with ready_file(config.ready_file, url):
        print(f"Serving {MODEL_NAME} at {url} (pid {os.getpid()})", flush=True)
        print(f"Scoring contract {service.contract.hash}", flush=True)
        if service.contract.shaping is not None:
            print(f"Shaped rewards: {service.contract.shaping}", flush=True)
        if scorer.prefix_cache_bytes:
            kept, size = config.prefix_cache_tokens, scorer.prefix_cache_bytes / 2**20
            print(f"Prefix cache: {kept:,} tokens, {size:,.0f} MiB on each rank", flush=True)
        watch.until(shall_stop)
        print("Draining: in-flight requests are answered, new ones are refused", flush=True)
        stop = threading.Thread(target=triton.stop, name="drain", daemon=True)
        stop.start()
        # Where a rank dies its launcher stops the others: what is in flight has no answer then.
        watch.until(lambda: not stop.is_alive(), triton_may_end=True)
    guard.dismiss()
    report.say()
    service.close()
    batcher.close()


def _start(triton: Any) -> Guard:
    """Run Triton until its model is ready; PyTriton would wait two minutes for one that is dead."""
    started = threading.Event()

    def ended() -> None:
        if not started.is_set():
            shutil.rmtree(workspace_of(triton), ignore_errors=True)
            _die("Triton did not start, its own words are above")

    call_at_exit(triton, ended)
    triton.run()
    started.set()
    return Guard(server_pid(triton), workspace_of(triton))


class _Report:
    """Says every few seconds how busy the server is, while it has work."""

    def __init__(
        self, meter: Meter, batcher: Batcher, scorer: ServableScorer, every_secs: float
    ) -> None:
        self._meter = meter
        self._batcher = batcher
        self._scorer = scorer
        self._cached = 0
        self._every_secs = every_secs
        self._said = time.monotonic()

    def when_due(self) -> None:
        if self._every_secs and time.monotonic() - self._said >= self._every_secs:
            self.say()

    def say(self) -> None:
        self._said = time.monotonic()
        cached = self._scorer.counts.cached
        line = self._meter.take_line(self._batcher.waiting_rows, cached - self._cached)
        self._cached = cached
        if line is not None and self._every_secs:
            print(line, flush=True)


class _Watch:
    """Looks whether everything lives that the server needs, and ends it where one does not."""

    def __init__(
        self, triton: Any, processes: Mapping[int, str], ranks: ModelRanks, report: _Report
    ) -> None:
        self._triton = triton
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
                return f"{name} (pid {pid}) died"
        return None if self._triton.is_alive() else "Triton is not alive"


def _die(failure: str) -> NoReturn:
    """Leave at once with exit code 1; Triton's guard and other ranks notice and do the same."""
    print(f"The server cannot go on: {failure}", file=sys.stderr, flush=True)
    time.sleep(_LAST_WORDS_SECS)
    os._exit(1)
