"""A Triton server on rank 0, the loop of followers on the others: from the start to every end."""

from __future__ import annotations

import glob
import os
import shutil
import signal
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import torch

from nemo_aligner.config.serving import ServerConfig
from nemo_aligner.errors import AlignerError
from nemo_aligner.serving.ranks import ModelRanks
from nemo_aligner.serving.services.reward import RewardEndpoint, ServableScorer
from nemo_aligner.serving.transports.triton.internals import ended_early, workspace_of
from nemo_aligner.serving.transports.triton.model import build_triton
from nemo_aligner.serving.transports.triton.processes import (
    free_port,
    is_running,
    ready_file,
    triton_processes,
)
from nemo_aligner.serving.wire.kserve import MODEL_NAME

_WATCH_SECS = 0.2
_LAST_WORDS_SECS = 1.0  # for the requests at hand to get their error, when the server has to die


def serve(scorer: ServableScorer, config: ServerConfig, device: torch.device | str = "cpu") -> int:
    """Answer requests until SIGTERM or SIGINT; every rank calls it.

    Returns:
        The exit code, 0 after a drained stop. A server that cannot go on (a rank, Triton or its
        Python stub died) answers what it holds with an error and ends the process with 1.

    Raises:
        ServingError: it cannot start, on rank 0; the others are released.
    """
    ranks = ModelRanks(
        scorer.score_token_lists, device, config.heartbeat_secs, config.worker_timeout_secs
    )
    if ranks.rank != 0:
        # The launcher signals every rank; rank 0 decides, after it has drained.
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, signal.SIG_IGN)
        ranks.follow()
        ranks.stop()
        return 0
    try:
        return _lead(scorer, ranks, config)
    except AlignerError:
        if ranks.failure is None:  # the others have nothing to say to it
            ranks.stop()
        raise


def _lead(scorer: ServableScorer, ranks: ModelRanks, config: ServerConfig) -> int:
    stopping: list[int] = []
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda received, _: stopping.append(received))
    port = free_port(config.host, config.port)
    ranks.execute([[0]])  # the first forward pass is slow, and may show that the model cannot run
    triton = build_triton(RewardEndpoint(scorer, ranks.execute), scorer.contract, config, port)
    _start(triton)
    processes = triton_processes(os.getpid())
    url = f"http://{config.host}:{port}"
    with ready_file(config.ready_file, url):
        print(f"Serving {MODEL_NAME} at {url} (pid {os.getpid()})", flush=True)
        print(f"Scoring contract {scorer.contract.hash}", flush=True)
        failure = _watch(triton, processes, ranks, stopping)
        if failure is not None:
            _die(failure, triton, processes)
        print("Draining: in-flight requests are answered, new ones are refused", flush=True)
        triton.stop()
    if ranks.failure is not None:
        _die(ranks.failure, triton, processes)
    ranks.stop()
    print("Stopped", flush=True)
    return 0


def _start(triton: Any) -> None:
    """Run Triton until its model is ready; PyTriton would wait two minutes for one that is dead."""
    started = threading.Event()

    def watch() -> None:
        while not started.wait(_WATCH_SECS):
            if ended_early(triton):
                _die("Triton did not start, its own words are above", triton, {})

    threading.Thread(target=watch, name="start", daemon=True).start()
    triton.run()
    started.set()


def _watch(
    triton: Any, processes: Mapping[int, str], ranks: ModelRanks, stopping: Sequence[int]
) -> str | None:
    """Wait for a signal; or say what died."""
    while not stopping:
        dead = [f"{name} (pid {pid})" for pid, name in processes.items() if not is_running(pid)]
        failure = f"{', '.join(dead)} died" if dead else ranks.failure
        if failure is None and not triton.is_alive():
            failure = "Triton is not alive"
        if failure is not None:
            return failure
        time.sleep(_WATCH_SECS)
    return None


def _die(failure: str, triton: Any, processes: Mapping[int, str]) -> NoReturn:
    """Leave at once with exit code 1, and take Triton along; other ranks notice and do the same."""
    print(f"The server cannot go on: {failure}", file=sys.stderr, flush=True)
    time.sleep(_LAST_WORDS_SECS)
    for pid in processes:
        if is_running(pid):
            os.kill(pid, signal.SIGKILL)
    for segment in glob.glob(f"/dev/shm/pytrtion{os.getpid()}-*"):
        Path(segment).unlink(missing_ok=True)
    shutil.rmtree(workspace_of(triton), ignore_errors=True)
    os._exit(1)
