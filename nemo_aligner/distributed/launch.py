"""Join a process group under torchrun, Slurm or plain Python, and start ranks on this machine.

If several ranks fail, only the first one reports its error, and the others exit without a message.
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
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import TCPStore

from nemo_aligner.cpu.matmuls import keep_freed_memory, return_freed_memory
from nemo_aligner.distributed.layout import destroy_layout
from nemo_aligner.distributed.one_rank import ONE_RANK
from nemo_aligner.utils.errors import ConfigError, LostRankError, PeerError, short
from nemo_aligner.utils.processes import (
    Process,
    describe_error,
    find_process,
    handled_signals,
    is_second_interrupt,
    is_slurm_task,
    settle,
    usable_cores,
)

# Joining the process group that the launcher's environment variables describe.

logger = logging.getLogger(__name__)

_LAUNCHES = itertools.count()
# The stores that this process has joined, by host and port, rank and number of ranks.
_STORES: dict[tuple[str, int, int, int], dist.Store] = {}
_LOOPBACK = ("127.0.0.1", "localhost")


@dataclass(frozen=True)
class Launch:
    """Rank and device of this process, the number of ranks, and the backend of their group."""

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
    """Initialise torch.distributed from the launcher's environment variables.

    At the end of the block, the process group and the parallel layout are destroyed. If CUDA is
    available, the backend is NCCL with one GPU per process; otherwise it is gloo on the CPU. A
    single process uses the backend of ``one_rank.py`` instead. If several ranks fail in the block,
    only one raises its error; see ``fail_once``.

    Raises:
        ConfigError: the launcher's environment is incomplete, a local rank has no GPU, or there is
            a process group already.
        PeerError: another rank failed first.
        LostRankError: another rank died without an error.
    """
    if dist.is_initialized():
        raise ConfigError(
            "torch.distributed: got a process group that was initialised elsewhere, wanted none; "
            "end it with torch.distributed.destroy_process_group()"
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
    store, hook = _create_store(process, timeout), sys.excepthook
    _init_process_group(process, backend, store, timeout)
    if process.world_size == 1:
        sys.excepthook = hook  # undo torch's hook, which puts the rank before each line of an error
    try:
        yield Launch(process.rank, process.world_size, process.local_rank, device, backend)
    except BaseException as error:
        if process.world_size > 1:
            # Do not destroy the group: this would wait for NCCL collectives that other ranks may
            # never join.
            fail_once(error, store, process)
        _tear_down(hook)
        raise
    _tear_down(hook)


@contextmanager
def single_process() -> Iterator[None]:
    """Create a process group of one rank, for code that converts checkpoints in a single process.

    The group is destroyed at the end of the block. An existing group of one rank is reused.

    Unlike ``launch``, it returns freed memory to the system, because a conversion reads a large
    checkpoint part by part and should never hold much of it.

    Raises:
        ConfigError: this process is one of several ranks.
    """
    is_there = dist.is_initialized()
    count = dist.get_world_size() if is_there else find_process(os.environ).world_size
    if count > 1:
        raise ConfigError(
            f"a conversion: got {count} processes, wanted one. Start it without torchrun or srun"
        )
    if is_there:
        yield
        return
    return_freed_memory()
    hook = sys.excepthook
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        _tear_down(hook)


def _select_device(process: Process, use_cuda: bool) -> torch.device:
    if not use_cuda:
        return torch.device("cpu")
    count = torch.cuda.device_count()
    # With Slurm's --gpus-per-task, each process sees only its own GPU, which has the index 0.
    index = 0 if count == 1 and "RANK" not in os.environ else process.local_rank
    if index >= count:
        raise ConfigError(
            f"local rank {process.local_rank} has no GPU of its own: this process sees {count} "
            "GPUs. Start at most one process per GPU"
        )
    torch.cuda.set_device(index)
    return torch.device("cuda", index)


def _keep_fp32(process: Process) -> None:
    """Switch off TF32 and other reduced precision of fp32 matmuls, even if the user enabled it.

    fp32 scores must be the same on every machine.
    """
    precision = _read_matmul_precision()
    if precision == "highest":
        return
    # Set the precision of each backend before the common one: while they differ, torch refuses to
    # say which one is common.
    for backend in _matmul_backends():
        backend.fp32_precision = "ieee"
    torch.set_float32_matmul_precision("highest")
    if process.rank == 0:
        logger.warning(
            "fp32 matmuls were set to reduced precision (%r, TF32 on a GPU). It is switched off, "
            "because fp32 scores must be the same everywhere. Use trainer.precision=bf16 for "
            "speed",
            precision,
        )


def _read_matmul_precision() -> str:
    """Return torch's precision of fp32 matmuls, such as ``highest`` or ``high``.

    If it was set for single backends, torch has no common name for it. Then it is the reduced
    precision of these backends, such as ``tf32``.
    """
    try:
        return torch.get_float32_matmul_precision()
    except RuntimeError:
        # torch 2.9 and later, after ``torch.backends.fp32_precision = "tf32"`` or the like
        precisions = {backend.fp32_precision for backend in _matmul_backends()}
        return " and ".join(sorted(precisions - {"none", "ieee"})) or "unknown"


def _matmul_backends() -> list[Any]:
    """List the settings of torch's matmuls by backend, if this version of torch has them."""
    modules = (torch.backends.cuda, torch.backends.mkldnn)
    backends = [getattr(module, "matmul", None) for module in modules]
    return [backend for backend in backends if hasattr(backend, "fp32_precision")]


def _split_cores(local_world_size: int) -> None:
    """Set the number of torch's threads to this rank's part of the cores, unless the user did.

    Slurm gives each rank cores of its own, which are not split again; otherwise all ranks of the
    machine may run on the same cores.
    """
    if "OMP_NUM_THREADS" not in os.environ:
        cores = usable_cores()
        is_bound = is_slurm_task(os.environ) and cores * local_world_size <= (os.cpu_count() or 1)
        torch.set_num_threads(cores if is_bound else max(1, cores // local_world_size))


def _tear_down(hook: Callable[..., Any]) -> None:
    """Destroy the layout and the process group, and restore ``hook`` as ``sys.excepthook``.

    torch replaces the excepthook when it initialises a process group.
    """
    destroy_layout()
    if dist.is_initialized():
        dist.destroy_process_group()
    sys.excepthook = hook


def _create_store(process: Process, timeout: timedelta) -> dist.Store:
    """Join the rendezvous of the ranks, and return the key-value store that all ranks share.

    The process group is built with this store, and ``fail_once`` exchanges errors through it.
    """
    if process.master is None:
        return dist.HashStore()
    host, port = process.master
    os.environ.update(MASTER_ADDR=host, MASTER_PORT=str(port))
    place = (host, port, process.rank, process.world_size)
    # A program may call ``launch`` several times, and keeps the store until it ends. If rank 0
    # hosted a new store for each call, a rank that is ahead would join the old one, and lose it.
    if place not in _STORES:
        joined = dist.rendezvous("env://", process.rank, process.world_size, timeout=timeout)
        _STORES[place], _, _ = next(joined)
    store = _STORES[place]
    store.set_timeout(timeout)  # ``fail_once`` shortens it
    # All calls share the store, so each prefixes its keys differently.
    return dist.PrefixStore(f"launch {next(_LAUNCHES)}", store)


def _init_process_group(
    process: Process, backend: str, store: dist.Store, timeout: timedelta
) -> None:
    if backend != "nccl" and process.master is not None and process.master[0] in _LOOPBACK:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    # Do not pass ``device_id``. With it, NCCL would at once create a communicator for each of
    # Megatron's thirty groups. Each communicator takes some 230 MiB of the GPU, even if unused.
    dist.init_process_group(
        backend,
        store=dist.PrefixStore("group", store),
        rank=process.rank,
        world_size=process.world_size,
        timeout=timeout,
    )


# Error reports: if several ranks fail, only the first one reports its error.

_STORE_WAIT = timedelta(seconds=5)
_SAME_WAIT_S = 1.0
_COUNT = "failed"
# Messages of errors that gloo or NCCL raises on this rank after another rank has died.
_LOST = re.compile(r"(Connection (closed|reset) by peer|Broken pipe|remote process exited).*")


def fail_once(error: BaseException, store: dist.Store, process: Process) -> None:
    """Raise the error with which this rank ends, so that only one rank reports a failure.

    The first rank that fails raises its own error. The message is prefixed with its rank, unless
    all ranks fail with the same error. Other ranks may have exited already, so no collective is
    used here.

    Raises:
        PeerError: another rank failed first and reports its error.
        LostRankError: another rank has died without an error, which made this rank fail.
        BaseException: ``error`` itself, if this rank failed first.
    """
    text = describe_error(error)
    is_first = is_shared = False
    # The store raises an error if it is gone, because rank 0, which hosts it, has ended.
    with suppress(Exception):
        store.set_timeout(_STORE_WAIT)
        store.set(f"{_COUNT}/{process.rank}", text)
        is_first = store.add(_COUNT, 1) == 1
        is_shared = is_first and _all_report(text, store, process.world_size)
    if not isinstance(error, Exception):  # KeyboardInterrupt or SystemExit
        raise error
    if not is_first:
        raise PeerError("another rank failed first and reports the reason") from error
    lost = _LOST.search(str(error))
    if lost is not None:
        error = LostRankError(
            f"another rank died without an error, e.g. because it was killed: {short(lost.group())}"
        )
    settle(error, "" if is_shared else f"rank {process.rank}: ")
    raise error


def _all_report(text: str, store: dist.Store, world_size: int) -> bool:
    """Return True if all ranks fail with the message ``text`` within a second.

    This happens, for example, if all ranks have checked the same settings. The message then needs
    no rank.
    """
    end = time.monotonic() + _SAME_WAIT_S
    while store.add(_COUNT, 0) < world_size:
        if time.monotonic() > end:
            return False
        time.sleep(_SAME_WAIT_S / 50)
    return all(store.get(f"{_COUNT}/{rank}") == text.encode() for rank in range(world_size))


# Starting several ranks on this machine without torchrun.

_HOST = "127.0.0.1"
_POLL_S = 0.1
# Seconds that the other ranks may take to end after one has failed: on its own, or after a signal,
# when the others may still be saving.
_GRACE_S = 30.0
_SAVING_GRACE_S = 600.0
_FORWARDED_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)

Rank = subprocess.Popen[bytes]


def run_ranks(
    arguments: Sequence[str], processes: int, environment: Mapping[str, str] | None = None
) -> int:
    """Run ``python *arguments`` as several ranks, like torchrun; call it from the main thread.

    If a rank fails, the others are ended. The first signal from a terminal or Slurm is forwarded to
    the ranks, which may take as long as they need to save, unless one of them fails: the others are
    then ended ten minutes later. A second Ctrl-C kills them (``is_second_interrupt``).

    Returns:
        The exit code of the rank that failed first; 0 if none failed.
    """
    # This process hosts the rendezvous on a free port, because it outlives all ranks.
    store = TCPStore(_HOST, 0, is_master=True, wait_for_workers=False)
    ranks: list[Rank] = []
    with _forwarding_signals(ranks) as signals:
        for rank in range(processes):
            variables = _rank_environment(environment or os.environ, rank, processes, store.port)
            ranks.append(_start_rank(arguments, variables))
        # A signal that arrived before all ranks were started was not forwarded to all of them.
        if signals:
            _send_signal(ranks, signals[0])
        failed = _first_failure(ranks, signals)
    if failed is None:
        return 0
    code = ranks[failed].returncode
    if code > 0:
        return code
    if not signals:
        name = signal.Signals(-code).name
        print(f"rank {failed}: it was ended by {name}", file=sys.stderr, flush=True)
    return 128 - code  # killed by signal -code, in the shell's convention


def _rank_environment(
    environment: Mapping[str, str], rank: int, processes: int, port: int
) -> dict[str, str]:
    """Return the environment of a rank, with the variables that torchrun would set.

    Variables of a torchrun that has started this process are removed.
    """
    return {
        **{key: value for key, value in environment.items() if not key.startswith("TORCHELASTIC_")},
        "RANK": str(rank),
        "WORLD_SIZE": str(processes),
        "LOCAL_RANK": str(rank),
        "LOCAL_WORLD_SIZE": str(processes),
        "MASTER_ADDR": _HOST,
        "MASTER_PORT": str(port),
        # All ranks join the store of this process. Otherwise rank 0 would start a second store at
        # the same port.
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }


def _start_rank(arguments: Sequence[str], environment: Mapping[str, str]) -> Rank:
    # Start each rank in its own session. Otherwise it would get Ctrl-C twice: from the terminal,
    # and forwarded by this process.
    return subprocess.Popen(
        [sys.executable, *arguments],
        env=environment,
        stdin=subprocess.DEVNULL,
        start_new_session=True,
    )


@contextmanager
def _forwarding_signals(ranks: Sequence[Rank]) -> Iterator[list[int]]:
    """Forward signals to the ranks during the block, and end all ranks after it.

    Yields:
        The signal that the ranks have got, in a list that is empty until it arrives.
    """
    signals: list[int] = []
    first_time = math.inf

    def on_signal(number: int, frame: FrameType | None) -> None:
        nonlocal first_time
        if not signals:
            first_time = time.monotonic()
            signals.append(number)
            _send_signal(ranks, number)
        elif is_second_interrupt(number, signals[0], time.monotonic() - first_time):
            _send_signal(ranks, signal.SIGKILL)

    # Ranks inherit that a signal is ignored, but not a handler.
    numbers = handled_signals(_FORWARDED_SIGNALS)
    previous = {number: signal.signal(number, on_signal) for number in numbers}
    try:
        yield signals
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
        _send_signal(ranks, signal.SIGKILL)
        for rank in ranks:
            rank.wait()


def _first_failure(ranks: Sequence[Rank], signals: Sequence[int]) -> int | None:
    """Wait until all ranks have ended; return the rank that failed first, or None.

    If a rank fails by itself, the others are ended, and may take half a minute for that. If it
    fails after a signal, the others have the signal already, and may take ten minutes to save. They
    may also wait for the failed rank in a collective, so this wait has a limit, too.
    """
    failed, end = None, math.inf
    while True:
        codes = [rank.poll() for rank in ranks]
        if failed is None and any(codes):
            failed = next(rank for rank, code in enumerate(codes) if code)
            if not signals:
                _send_signal(ranks, signal.SIGTERM)
            end = time.monotonic() + (_SAVING_GRACE_S if signals else _GRACE_S)
        if None not in codes or time.monotonic() > end:
            return failed
        time.sleep(_POLL_S)


def _send_signal(ranks: Sequence[Rank], number: int) -> None:
    for rank in ranks:
        rank.send_signal(number)
