"""Joining a process group under torchrun, Slurm or plain Python, and launching ranks locally.

If several ranks fail, the first one reports its error and the others stay silent.
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

from nemo_aligner.cpu.products import keep_freed_memory, return_freed_memory
from nemo_aligner.distributed.layout import destroy_layout
from nemo_aligner.distributed.one_rank import ONE_RANK
from nemo_aligner.utils.errors import ConfigError, LostRankError, PeerError, short
from nemo_aligner.utils.processes import Process, find_process, settle

# Joining the process group that the launcher's environment describes.

logger = logging.getLogger(__name__)

_LAUNCHES = itertools.count()
_LOOPBACK = ("127.0.0.1", "localhost")


@dataclass(frozen=True)
class Launch:
    """This process: ``rank`` of ``world_size``, local rank, device and backend."""

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
    """Initialise torch.distributed from the environment; tear it and the layout down at the end.

    NCCL and one GPU per process where CUDA is available, else gloo on the CPU; one process alone
    has neither. If several ranks fail in the block, one raises its error, see ``fail_once``.

    Raises:
        ConfigError: the launcher's environment is incomplete, a local rank has no GPU, or there is
            a process group already.
        PeerError, LostRankError: another rank failed first, or is gone.
    """
    if dist.is_initialized():
        raise ConfigError(
            "torch.distributed: got a process group that something else has initialised, "
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
    if process.world_size == 1:
        backend = ONE_RANK
    timeout = timedelta(seconds=timeout_seconds)
    store, hook = _meet(process, timeout), sys.excepthook
    _init_process_group(process, backend, store, timeout)
    if process.world_size == 1:
        sys.excepthook = hook  # torch's prefixes every line of an error with the rank
    try:
        yield Launch(process.rank, process.world_size, process.local_rank, device, backend)
    except BaseException as error:
        if process.world_size > 1:
            # Keep the group: destroying it, NCCL would wait for collectives that others never join.
            fail_once(error, store, process)
        _leave(hook)
        raise
    _leave(hook)


@contextmanager
def single_process() -> Iterator[None]:
    """Process group of one for a conversion, unless there is one; ``launch`` is for real work.

    Freed memory goes back to the system: a conversion reads much, and should hold little.

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
    # With Slurm's --gpus-per-task each process sees only its own GPU.
    index = 0 if count == 1 and "RANK" not in os.environ else process.local_rank
    if index >= count:
        raise ConfigError(
            f"local rank {process.local_rank} has no GPU of its own: this node shows {count}; "
            "start at most one process per GPU"
        )
    torch.cuda.set_device(index)
    return torch.device("cuda", index)


def _keep_fp32(process: Process) -> None:
    """Switch off TF32 and other rounding of fp32 products, whatever the environment asks for."""
    found = torch.get_float32_matmul_precision()
    if found == "highest":
        return
    torch.set_float32_matmul_precision("highest")
    if process.rank == 0:
        logger.warning(
            "fp32 matrix products were set to reduced precision (%r, TF32 on a GPU): this is "
            "switched off, because fp32 scores must be the same everywhere; for speed use "
            "trainer.precision=bf16",
            found,
        )


def _split_cores(local_world_size: int) -> None:
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // local_world_size))


def _leave(hook: Callable[..., Any]) -> None:
    """Tear everything down; ``hook`` is the excepthook from before torch replaced it."""
    destroy_layout()
    if dist.is_initialized():
        dist.destroy_process_group()
    sys.excepthook = hook


def _meet(process: Process, timeout: timedelta) -> dist.Store:
    """Rendezvous, and the store that all ranks share."""
    if process.master is None:
        return dist.HashStore()
    host, port = process.master
    os.environ.update(MASTER_ADDR=host, MASTER_PORT=str(port))
    store, _, _ = next(dist.rendezvous("env://", process.rank, process.world_size, timeout=timeout))
    # A program may launch several times, in one store of its launcher.
    return dist.PrefixStore(f"launch {next(_LAUNCHES)}", store)


def _init_process_group(
    process: Process, backend: str, store: dist.Store, timeout: timedelta
) -> None:
    if backend != "nccl" and process.master is not None and process.master[0] in _LOOPBACK:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    # Not bound to the device (``device_id``): NCCL would make a communicator for each of Megatron's
    # thirty groups at once, and each takes some 230 MiB of a GPU, used or not.
    dist.init_process_group(
        backend,
        store=dist.PrefixStore("group", store),
        rank=process.rank,
        world_size=process.world_size,
        timeout=timeout,
    )


# Failures of several ranks: the first one is reported.

_STORE_WAIT = timedelta(seconds=5)
_SAME_WAIT_S = 1.0
_COUNT = "failed"
# Messages of gloo and NCCL when a rank has gone away.
_LOST = re.compile(r"(Connection (closed|reset) by peer|Broken pipe|remote process exited).*")


def fail_once(error: BaseException, store: dist.Store, process: Process) -> None:
    """Raise the error that this rank ends with; the process group may be half gone.

    The first rank to fail raises its own error, prefixed with its rank unless all met the same.

    Raises:
        PeerError: another rank failed first.
        LostRankError: none did, but one is gone.
        BaseException: ``error``, if it was the first.
    """
    text = f"{type(error).__name__}: {error}"
    try:
        store.set_timeout(_STORE_WAIT)
        store.set(f"{_COUNT}/{process.rank}", text)
        is_first = store.add(_COUNT, 1) == 1
        met_by_all = is_first and _all_say(text, store, process.world_size)
    except Exception:  # rank 0 hosts the store: both have ended
        is_first = met_by_all = False
    if not isinstance(error, Exception):  # KeyboardInterrupt or SystemExit
        raise error
    if not is_first:
        raise PeerError("another rank failed first, and reports why") from error
    lost = _LOST.search(str(error))
    if lost is not None:
        error = LostRankError(
            f"another rank died without an error, as if killed: {short(lost.group())}"
        )
    settle(error, "" if met_by_all else f"rank {process.rank}: ")
    raise error


def _all_say(text: str, store: dist.Store, world_size: int) -> bool:
    """Tell if all ranks fail with the same words, as after an error they agreed on."""
    end = time.monotonic() + _SAME_WAIT_S
    while store.add(_COUNT, 0) < world_size:
        if time.monotonic() > end:
            return False
        time.sleep(_SAME_WAIT_S / 50)
    return all(store.get(f"{_COUNT}/{rank}") == text.encode() for rank in range(world_size))


# Launching several ranks on this machine without torchrun.

_HOST = "127.0.0.1"
_POLL_S = 0.1
_GRACE_S = 30.0
_PASSED_ON = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)

Rank = subprocess.Popen[bytes]


def run_ranks(
    arguments: Sequence[str], processes: int, environment: Mapping[str, str] | None = None
) -> int:
    """Run ``python *arguments`` as several ranks; returns the exit code of the first to fail, or 0.

    When one fails the others are ended. A signal from a terminal or Slurm is passed on to the ranks
    once, and they may take as long as they need to save; a second one kills them. Must be called
    from the main thread.
    """
    # This process hosts the rendezvous: on a free port, for as long as any rank lives.
    store = TCPStore(_HOST, 0, is_master=True, wait_for_workers=False)
    ranks: list[Rank] = []
    with _passing_on(ranks) as asked:
        for rank in range(processes):
            told = _environment(environment or os.environ, rank, processes, store.port)
            ranks.append(_start(arguments, told))
        if asked:  # a signal came before all ranks were started
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
    return 128 - code  # killed by signal -code, in the shell's convention


def _environment(
    environment: Mapping[str, str], rank: int, processes: int, port: int
) -> dict[str, str]:
    """Environment of a rank as torchrun sets it, without this process's own torchrun variables."""
    return {
        **{key: value for key, value in environment.items() if not key.startswith("TORCHELASTIC_")},
        "RANK": str(rank),
        "WORLD_SIZE": str(processes),
        "LOCAL_RANK": str(rank),
        "LOCAL_WORLD_SIZE": str(processes),
        "MASTER_ADDR": _HOST,
        "MASTER_PORT": str(port),
        # All ranks join the store that runs here; else rank 0 would open one at the same port.
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }


def _start(arguments: Sequence[str], environment: Mapping[str, str]) -> Rank:
    # In a session of its own, or a terminal's Ctrl-C would reach it twice.
    return subprocess.Popen(
        [sys.executable, *arguments],
        env=environment,
        stdin=subprocess.DEVNULL,
        start_new_session=True,
    )


@contextmanager
def _passing_on(ranks: Sequence[Rank]) -> Iterator[list[int]]:
    """Collect signals and pass them on to the ranks; no rank outlives the block."""
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
    """Wait for all ranks; returns the first that failed, or None."""
    failed, end = None, math.inf
    while True:
        codes = [rank.poll() for rank in ranks]
        if failed is None and any(codes):
            failed = next(rank for rank, code in enumerate(codes) if code)
            if not asked:  # after a signal the others may still be saving
                _send(ranks, signal.SIGTERM)
                end = time.monotonic() + _GRACE_S
        if None not in codes or time.monotonic() > end:
            return failed
        time.sleep(_POLL_S)


def _send(ranks: Sequence[Rank], number: int) -> None:
    for rank in ranks:
        rank.send_signal(number)
