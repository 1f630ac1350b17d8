"""Launch ranks and join a process group: torchrun, Slurm's srun, or plain Python; the first
failure speaks.
"""

from __future__ import annotations

import itertools
import logging
import math
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import TCPStore

from nemo_aligner.distributed.cpu_products import keep_freed_memory, return_freed_memory
from nemo_aligner.distributed.layout import destroy_layout
from nemo_aligner.utils.errors import ConfigError, LostRankError, PeerError, short
from nemo_aligner.utils.processes import Process, find_process, settle

# From the launcher's environment to a process group: torchrun, Slurm's srun, or plain python.

logger = logging.getLogger(__name__)

_LAUNCHES = itertools.count()
_LOOPBACK = ("127.0.0.1", "localhost")


@dataclass(frozen=True)
class Launch:
    """This process among all: ``rank`` of ``world_size``, local rank, and device."""

    rank: int
    world_size: int
    local_rank: int
    device: torch.device
    backend: str

    @property
    def is_main(self) -> bool:
        return self.rank == 0


@contextmanager
def launch(timeout_seconds: float = 1800.0) -> Iterator[Launch]:
    """Initialise torch.distributed from the environment; at the end tear it and the layout down.

    NCCL and one GPU per process where CUDA is available, else gloo on the CPU.

    Of several ranks that fail in the block one raises its error, see ``failure.fail_once``.

    Raises:
        ConfigError: the launcher's environment is incomplete, a local rank has no GPU, or there is
            a process group already.
        PeerError, LostRankError: another rank failed first, or is gone.
    """
    if dist.is_initialized():
        raise ConfigError(
            "torch.distributed: got a process group in this process that something else has made, "
            "wanted none; torch.distributed.destroy_process_group() ends it"
        )
    process = find_process(os.environ)
    _keep_fp32(process)
    use_cuda = torch.cuda.is_available()
    device = _select_device(process, use_cuda)
    if not use_cuda:
        _split_cores(process.local_world_size)
        keep_freed_memory()
    backend = "nccl" if use_cuda else "gloo"
    timeout = timedelta(seconds=timeout_seconds)
    store, hook = _meet(process, timeout), sys.excepthook
    _init_process_group(process, device, backend, store, timeout)
    if process.world_size == 1:
        sys.excepthook = hook  # torch puts the rank before every line of an error
    try:
        yield Launch(process.rank, process.world_size, process.local_rank, device, backend)
    except BaseException as error:
        if process.world_size > 1:
            # The group stays as it is: NCCL would wait in it for what others never join.
            fail_once(error, store, process)
        _leave(hook)
        raise
    _leave(hook)


@contextmanager
def single_process() -> Iterator[None]:
    """A process group of one where there is none yet, for a conversion: see ``launch`` for work.

    What is freed goes back to the system: a conversion reads much, and is to hold little.

    Raises:
        ConfigError: this is one process of several.
    """
    is_there = dist.is_initialized()
    count = dist.get_world_size() if is_there else find_process(os.environ).world_size
    if count > 1:
        raise ConfigError(f"got {count} processes, wanted one for a conversion")
    if is_there:
        yield
        return
    return_freed_memory()
    hook = sys.excepthook
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        _leave(hook)


def _select_device(process: Process, use_cuda: bool) -> torch.device:
    if not use_cuda:
        return torch.device("cpu")
    count = torch.cuda.device_count()
    # Slurm's --gpus-per-task shows each process its own GPU alone.
    index = 0 if count == 1 and "RANK" not in os.environ else process.local_rank
    if index >= count:
        raise ConfigError(
            f"local rank {process.local_rank} has no GPU of its own: this node shows {count}; "
            "start at most one process per GPU"
        )
    torch.cuda.set_device(index)
    return torch.device("cuda", index)


def _keep_fp32(process: Process) -> None:
    """Have products of fp32 numbers not be rounded, whatever the environment asks for."""
    found = torch.get_float32_matmul_precision()
    if found == "highest":
        return
    torch.set_float32_matmul_precision("highest")
    if process.rank == 0:
        logger.warning(
            "fp32 matrix products were set to be rounded (precision %r, TF32 on a GPU): this is "
            "switched off, as a score in fp32 is to be the same everywhere; for speed use "
            "trainer.precision=bf16",
            found,
        )


def _split_cores(local_world_size: int) -> None:
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // local_world_size))


def _leave(hook: Callable[..., Any]) -> None:
    """Tear down what there is; ``hook`` is what showed errors before torch put the rank there."""
    destroy_layout()
    if dist.is_initialized():
        dist.destroy_process_group()
    sys.excepthook = hook


def _meet(process: Process, timeout: timedelta) -> dist.Store:
    """What all ranks read and write, and by which they find each other."""
    if process.master is None:
        return dist.HashStore()
    host, port = process.master
    os.environ.update(MASTER_ADDR=host, MASTER_PORT=str(port))
    store, _, _ = next(dist.rendezvous("env://", process.rank, process.world_size, timeout=timeout))
    # A program may launch again, in the store that its launcher keeps.
    return dist.PrefixStore(f"launch {next(_LAUNCHES)}", store)


def _init_process_group(
    process: Process, device: torch.device, backend: str, store: dist.Store, timeout: timedelta
) -> None:
    if backend == "gloo" and process.master is not None and process.master[0] in _LOOPBACK:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group(
        backend,
        store=dist.PrefixStore("group", store),
        rank=process.rank,
        world_size=process.world_size,
        timeout=timeout,
        # With it the ranks of a pipeline need no collective of all before their first message.
        device_id=device if backend == "nccl" else None,
    )


# Several ranks fail, and one of them says why: the first.

_STORE_WAIT = timedelta(seconds=5)
_SAME_WAIT_S = 1.0
_COUNT = "failed"
# What gloo and NCCL raise where a rank has gone away.
_LOST = re.compile(r"(Connection (closed|reset) by peer|Broken pipe|remote process exited).*")


def fail_once(error: BaseException, store: dist.Store, process: Process) -> None:
    """Raise what this rank ends with, for ``error``; the ranks' process group may be half gone.

    The first rank of all says its own, and whether the others have met the same.

    Raises:
        PeerError: another rank failed first.
        LostRankError: none did, but one is gone.
        BaseException: ``error``, which is the first.
    """
    text = f"{type(error).__name__}: {error}"
    try:
        store.set_timeout(_STORE_WAIT)
        store.set(f"{_COUNT}/{process.rank}", text)
        is_first = store.add(_COUNT, 1) == 1
        met_by_all = is_first and _all_say(text, store, process.world_size)
    except Exception:  # where rank 0 keeps the store, they have ended together
        is_first = met_by_all = False
    if not isinstance(error, Exception):  # an interruption, or an exit
        raise error
    if not is_first:
        raise PeerError("another rank failed first, and says why") from error
    lost = _LOST.search(str(error))
    if lost is not None:
        error = LostRankError(
            f"another rank ended without a word, as if it was killed: {short(lost.group())}"
        )
    settle(error, "" if met_by_all else f"rank {process.rank}: ")
    raise error


def _all_say(text: str, store: dist.Store, world_size: int) -> bool:
    """Whether all ranks fail, and in the same words: those that agreed on it do so at once."""
    end = time.monotonic() + _SAME_WAIT_S
    while store.add(_COUNT, 0) < world_size:
        if time.monotonic() > end:
            return False
        time.sleep(_SAME_WAIT_S / 50)
    return all(store.get(f"{_COUNT}/{rank}") == text.encode() for rank in range(world_size))


# Several ranks on this machine, without torchrun: what a failing rank says is all that is said.

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
