"""What this machine has: processors, memory, disk, a port and a compiler."""

from __future__ import annotations

import os
import platform
import shutil
import socket
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from nemo_aligner.config.serving import ServerConfig
from nemo_aligner.diagnostics.finding import Finding, Verdict

_GIB = 2**30
_SMALL_SHARED = 2**28
_SMALL_DISK = 10 * _GIB
_FLAGS = ("avx2", "avx512f", "avx512_bf16", "amx_bf16")
_SHARED_ADVICE = "Triton's processes and NCCL share memory there; in Docker: --shm-size=1g"
_TEMPORARY_ADVICE = "archives are unpacked there, whole; TMPDIR names another folder"
_FOLDER_ADVICE = "a checkpoint to go on from is several times as large as its model"
_MAKES_BF16 = {"avx512_bf16", "amx_bf16"}


def gpus(torch: Any) -> Iterator[Finding]:
    """Each CUDA device, by torch's eyes; ``torch`` is None where it cannot be imported."""
    driver = _nvidia_driver()
    if torch is None or not torch.cuda.is_available():
        if driver is None:
            yield Finding("GPU", "none", Verdict.note, "everything runs on the CPU")
        else:
            yield Finding(
                "GPU",
                f"torch sees none; the driver is {driver}",
                Verdict.missing,
                "install a build of torch for CUDA, see https://pytorch.org/get-started/locally",
            )
        return
    for index in range(torch.cuda.device_count()):
        yield _gpu(torch, index)
    yield Finding("CUDA", f"torch's {torch.version.cuda}, driver {driver or 'unknown'}")


def _gpu(torch: Any, index: int) -> Finding:
    device = torch.cuda.get_device_properties(index)
    value = f"{device.name}, {device.total_memory / _GIB:.0f} GiB"
    if device.major >= 8:
        return Finding(f"GPU {index}", f"{value}, bf16")
    return Finding(
        f"GPU {index}", f"{value}, no bf16", Verdict.note, "train with trainer.precision=fp16"
    )


def _nvidia_driver() -> str | None:
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return next(iter(done.stdout.split()), None)


def processor(has_gpu: bool) -> Iterator[Finding]:
    """The CPU, how much of it is ours, and what its instructions mean for precision."""
    fields = _cpu_fields()
    name = fields.get("model name") or platform.processor() or platform.machine()
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    threads = os.environ.get("OMP_NUM_THREADS")
    given = f", OMP_NUM_THREADS={threads}" if threads else ""
    yield Finding("CPU", f"{name}: {cores} of {os.cpu_count()} cores usable{given}")
    flags = set((fields.get("flags") or fields.get("Features") or "").split())
    found = [flag for flag in _FLAGS if flag in flags]
    value = ", ".join(found) or "none that matter"
    if _MAKES_BF16 & flags or has_gpu:
        yield Finding("CPU instructions", value)
    else:
        advice = "this CPU multiplies in fp32: in 16 bits it is many times slower"
        yield Finding("CPU instructions", value, Verdict.note, advice)


def _cpu_fields() -> dict[str, str]:
    """The first processor's in /proc/cpuinfo."""
    fields: dict[str, str] = {}
    for line in _read("/proc/cpuinfo").splitlines():
        key, colon, value = line.partition(":")
        if colon:
            fields.setdefault(key.strip(), value.strip())
    return fields


def space() -> Iterator[Finding]:
    """Free memory and disk, where the package needs them."""
    yield Finding("memory", _memory())
    temporary = Path(tempfile.gettempdir())
    for name, folder, wanted, advice in (
        ("/dev/shm", Path("/dev/shm"), _SMALL_SHARED, _SHARED_ADVICE),
        (str(temporary), temporary, _SMALL_DISK, _TEMPORARY_ADVICE),
        ("this folder", Path.cwd(), _SMALL_DISK, _FOLDER_ADVICE),
    ):
        yield _disk(name, folder, wanted, advice)


def _memory() -> str:
    """What is free, in the limits of the container."""
    fields = dict(line.split(":", 1) for line in _read("/proc/meminfo").splitlines() if ":" in line)
    if "MemAvailable" not in fields:
        return "unknown"
    free, total = (int(fields[key].split()[0]) * 1024 for key in ("MemAvailable", "MemTotal"))
    limit, used = (_read(f"/sys/fs/cgroup/memory.{name}").strip() for name in ("max", "current"))
    if limit.isdecimal() and used.isdecimal() and int(limit) < total:
        free, total = min(free, int(limit) - int(used)), int(limit)
    return f"{free / _GIB:.1f} of {total / _GIB:.1f} GiB free"


def _disk(name: str, folder: Path, wanted: int, advice: str) -> Finding:
    try:
        usage = shutil.disk_usage(folder)
    except OSError as error:
        return Finding(name, f"unknown: {error.strerror}", Verdict.note, advice)
    value = f"{usage.free / _GIB:.1f} of {usage.total / _GIB:.1f} GiB free"
    if not os.access(folder, os.W_OK):
        return Finding(name, f"{value}, not writable", Verdict.missing, advice)
    if usage.free < wanted:
        return Finding(name, value, Verdict.note, advice)
    return Finding(name, value)


def port() -> Finding:
    """Whether the server's default port is free."""
    number = ServerConfig().port
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", number))
        except OSError as error:
            advice = "a server needs another: server.port=0 takes any that is free"
            return Finding(f"port {number}", f"taken: {error.strerror}", Verdict.note, advice)
    return Finding(f"port {number}", "free on 127.0.0.1")


def compiler(has_gpu: bool) -> Finding:
    """A GPU's kernels are compiled as they are first used; a CPU needs none."""
    names = (os.environ.get("CC"), "cc", "gcc", "clang")
    found = next(filter(None, (shutil.which(name) for name in names if name)), None)
    if found is not None:
        return Finding("C compiler", found)
    advice = (
        "on a GPU megatron-core's fused functions are compiled at the start: apt install gcc"
        if has_gpu
        else "not needed on a CPU, but to install packages that have no wheel for this machine"
    )
    return Finding("C compiler", "none", Verdict.missing if has_gpu else Verdict.note, advice)


def _read(path: str) -> str:
    try:
        return Path(path).read_text(errors="replace")
    except OSError:
        return ""
