"""From the launcher's environment to a process group: torchrun, Slurm's srun, or plain python."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from nemo_aligner.errors import ConfigError
from nemo_aligner.parallel.cpu.malloc import keep_freed_memory, return_freed_memory

_DEFAULT_PORT = 29400


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


@dataclass(frozen=True)
class Process:
    """One of several that a launcher started; ``master`` is None for one without a launcher."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    master: tuple[str, int] | None


@contextmanager
def launch(timeout_seconds: float = 1800.0) -> Iterator[Launch]:
    """Initialise torch.distributed from the environment, and tear it down at the end.

    NCCL and one GPU per process where CUDA is available, else gloo on the CPU.

    Raises:
        ConfigError: the launcher's environment is incomplete, or a local rank has no GPU.
    """
    process = find_process(os.environ)
    # Sequence parallelism relies on kernels starting in the order in which they were launched.
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    use_cuda = torch.cuda.is_available()
    device = _select_device(process, use_cuda)
    if not use_cuda:
        _split_cores(process.local_world_size)
        keep_freed_memory()
    backend = "nccl" if use_cuda else "gloo"
    _init_process_group(process, backend, timedelta(seconds=timeout_seconds))
    try:
        yield Launch(process.rank, process.world_size, process.local_rank, device, backend)
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def is_launched() -> bool:
    """Whether torchrun or srun started this process as one of several."""
    return find_process(os.environ).master is not None


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
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


def find_process(env: Mapping[str, str]) -> Process:
    """This process as torchrun's or Slurm's variables have it; without them the only one.

    Raises:
        ConfigError: a variable is missing or no number.
    """
    if "RANK" in env and "WORLD_SIZE" in env:
        return _process_from_torchrun(env)
    if "SLURM_PROCID" in env and "SLURM_STEP_NUM_TASKS" in env and "SLURM_STEP_ID" in env:
        return _process_from_slurm(env)
    return Process(0, 1, 0, 1, None)


def _process_from_torchrun(env: Mapping[str, str]) -> Process:
    world_size = _read_int(env, "WORLD_SIZE")
    return Process(
        rank=_read_int(env, "RANK"),
        world_size=world_size,
        local_rank=_read_int(env, "LOCAL_RANK"),
        local_world_size=_read_int(env, "LOCAL_WORLD_SIZE", default=world_size),
        master=(_read(env, "MASTER_ADDR"), _read_int(env, "MASTER_PORT")),
    )


def _process_from_slurm(env: Mapping[str, str]) -> Process:
    world_size = _read_int(env, "SLURM_STEP_NUM_TASKS")
    # One port per job, so that jobs on one node do not meet.
    port = _DEFAULT_PORT + _read_int(env, "SLURM_JOB_ID", default=0) % 1000
    return Process(
        rank=_read_int(env, "SLURM_PROCID"),
        world_size=world_size,
        local_rank=_read_int(env, "SLURM_LOCALID"),
        local_world_size=_first_number(env.get("SLURM_STEP_TASKS_PER_NODE"), default=world_size),
        master=(
            env.get("MASTER_ADDR") or first_host(_read(env, "SLURM_STEP_NODELIST")),
            _read_int(env, "MASTER_PORT", default=port),
        ),
    )


def _first_number(text: str | None, default: int) -> int:
    match = re.match(r"\d+", text or "")
    return int(match.group()) if match else default


def first_host(nodelist: str) -> str:
    """The first host of a Slurm node list: ``gpu[003-005,9],cpu1`` -> ``gpu003``."""
    match = re.match(r"([^,\[]+)(?:\[(\d+)[^\]]*\])?([^,]*)", nodelist)
    if match is None:
        raise ConfigError(f"SLURM_STEP_NODELIST: got {nodelist!r}, wanted a list of hosts")
    prefix, number, suffix = match.groups()
    return prefix + (number or "") + suffix


def _read(env: Mapping[str, str], key: str) -> str:
    value = env.get(key)
    if value is None:
        raise ConfigError(f"environment variable {key}: it is missing, the launcher has to set it")
    return value


def _read_int(env: Mapping[str, str], key: str, default: int | None = None) -> int:
    if default is not None and key not in env:
        return default
    value = _read(env, key)
    try:
        return int(value)
    except ValueError:
        raise ConfigError(f"environment variable {key}: got {value!r}, wanted a number") from None


def _select_device(process: Process, use_cuda: bool) -> torch.device:
    if not use_cuda:
        return torch.device("cpu")
    if process.local_rank >= torch.cuda.device_count():
        raise ConfigError(
            f"local rank {process.local_rank} has no GPU of its own: this node shows "
            f"{torch.cuda.device_count()}; start at most one process per GPU"
        )
    torch.cuda.set_device(process.local_rank)
    return torch.device("cuda", process.local_rank)


def _split_cores(local_world_size: int) -> None:
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // local_world_size))


def _init_process_group(process: Process, backend: str, timeout: timedelta) -> None:
    if process.master is None:
        dist.init_process_group(
            backend, store=dist.HashStore(), rank=0, world_size=1, timeout=timeout
        )
        return
    host, port = process.master
    if backend == "gloo" and host in ("127.0.0.1", "localhost"):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    os.environ.update(MASTER_ADDR=host, MASTER_PORT=str(port))
    dist.init_process_group(
        backend,
        init_method="env://",
        rank=process.rank,
        world_size=process.world_size,
        timeout=timeout,
    )
