"""Several ranks on this machine, without torchrun: what a failing rank says is all that is said."""

from __future__ import annotations

import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import FrameType

from torch.distributed import TCPStore

_HOST = "127.0.0.1"
_POLL_S = 0.1
_GRACE_S = 30.0
_PASSED_ON = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)

Rank = subprocess.Popen[bytes]


def run_ranks(
    arguments: Sequence[str], processes: int, environment: Mapping[str, str] | None = None
) -> int:
    """Run ``python *arguments`` as so many ranks; the exit code of the first that fails, or 0.

    The others of one that failed are ended. What a terminal or Slurm asks this process, it asks the
    ranks once, and waits for as long as they need to save; asked again, it ends them at once. Only
    the main thread may call it.
    """
    # The ranks' rendezvous is kept here: on a port that is free, and for as long as any rank lives.
    store = TCPStore(_HOST, 0, is_master=True, wait_for_workers=False)
    ranks: list[Rank] = []
    with _passing_on(ranks) as asked:
        for rank in range(processes):
            told = _environment(environment or os.environ, rank, processes, store.port)
            ranks.append(_start(arguments, told))
        if asked:  # while some were not there yet
            _send(ranks, asked[0])
        failed = _first_failure(ranks, asked)
    if failed is None:
        return 0
    code = ranks[failed].returncode
    if code > 0:
        return code
    if not asked:
        name = signal.Signals(-code).name
        print(f"rank {failed}: it was ended by {name}", file=sys.stderr, flush=True)
    return 128 - code  # as a shell has it


def _environment(
    environment: Mapping[str, str], rank: int, processes: int, port: int
) -> dict[str, str]:
    """What torchrun tells each rank; what is told to this process, if it is one, is not theirs."""
    return {
        **{key: value for key, value in environment.items() if not key.startswith("TORCHELASTIC_")},
        "RANK": str(rank),
        "WORLD_SIZE": str(processes),
        "LOCAL_RANK": str(rank),
        "LOCAL_WORLD_SIZE": str(processes),
        "MASTER_ADDR": _HOST,
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }


def _start(arguments: Sequence[str], environment: Mapping[str, str]) -> Rank:
    # In a session of its own: a terminal would ask it beside us, and once more than it should.
    return subprocess.Popen(
        [sys.executable, *arguments],
        env=environment,
        stdin=subprocess.DEVNULL,
        start_new_session=True,
    )


@contextmanager
def _passing_on(ranks: Sequence[Rank]) -> Iterator[list[int]]:
    """What this process was asked, which the ranks are asked, too; no rank outlives the block."""
    asked: list[int] = []

    def on_signal(number: int, frame: FrameType | None) -> None:
        asked.append(number)
        _send(ranks, number if len(asked) == 1 else signal.SIGKILL)

    previous = {number: signal.signal(number, on_signal) for number in _PASSED_ON}
    try:
        yield asked
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
        _send(ranks, signal.SIGKILL)
        for rank in ranks:
            rank.wait()


def _first_failure(ranks: Sequence[Rank], asked: Sequence[int]) -> int | None:
    """Which rank failed before all others, once all have ended; None where all have succeeded."""
    failed, end = None, math.inf
    while True:
        codes = [rank.poll() for rank in ranks]
        if failed is None and any(codes):
            failed = next(rank for rank, code in enumerate(codes) if code)
            if not asked:  # what is left cannot be whole; but whoever was asked may be saving
                _send(ranks, signal.SIGTERM)
                end = time.monotonic() + _GRACE_S
        if None not in codes or time.monotonic() > end:
            return failed
        time.sleep(_POLL_S)


def _send(ranks: Sequence[Rank], number: int) -> None:
    for rank in ranks:
        rank.send_signal(number)
