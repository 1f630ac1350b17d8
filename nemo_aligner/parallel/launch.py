"""From the launcher's environment to a process group: torchrun, Slurm's srun, or plain python."""

from __future__ import annotations

import itertools
import logging
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from nemo_aligner.errors import ConfigError
from nemo_aligner.parallel.cpu.malloc import keep_freed_memory, return_freed_memory
from nemo_aligner.parallel.failure import fail_once
from nemo_aligner.parallel.layout import destroy_layout
from nemo_aligner.processes import Process, find_process

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
