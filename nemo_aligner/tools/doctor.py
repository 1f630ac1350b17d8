"""Examination of this machine: is it fit for training and serving, and what is missing?

Any import may fail here, so everything beyond the standard library is imported inside functions.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import os
import platform
import shutil
import socket
import subprocess
import tempfile
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from typing import Any

from nemo_aligner import __version__
from nemo_aligner.config.describe import DISTRIBUTION, find_conflict, install_command
from nemo_aligner.config.serving import ServerConfig
from nemo_aligner.utils.errors import short

_WIDTH = 80
_INDENT = 10


def examine() -> list[Finding]:
    """Examine packages, devices, memory, disk, port and compiler, the most basic first."""
    torch = import_torch()
    has_gpu = torch is not None and torch.cuda.is_available()
    return [
        *packages(),
        *gpus(torch),
        *gpu_packages(),
        *([flash_attention()] if has_gpu else []),
        *processor(has_gpu),
        *space(),
        port(),
        compiler(has_gpu),
    ]


def render(findings: Sequence[Finding]) -> str:
    """Render a line for each finding, with its advice below, and a count; at most 80 columns."""
    lines = []
    for each in findings:
        mark = "" if each.verdict is Verdict.ok else each.verdict.value.upper()
        lines += _wrapped(f"{each.name}: {each.value}", f"{mark:<{_INDENT}}")
        lines += _wrapped(f"-> {each.advice}", " " * _INDENT) if each.advice else []
    missing = sum(each.verdict is Verdict.missing for each in findings)
    notes = sum(each.verdict is Verdict.note for each in findings)
    return "\n".join([*lines, f"missing: {missing}, notes: {notes}"])


def _wrapped(text: str, beginning: str) -> list[str]:
    return textwrap.wrap(
        text,
        _WIDTH,
        initial_indent=beginning,
        subsequent_indent=" " * (_INDENT + 3),
        break_on_hyphens=False,
    )


# Installed packages, compared with the requirements.

_IMPORTED = "nemo_aligner"
_ALWAYS_SHOWN = ("torch", "megatron-core", "transformers", "omegaconf", "numpy")
# Extras for users, and what each is for.
_EXTRAS = {
    "serving": "the HTTP front of the servers and the gateway",
    "triton": "NVIDIA Triton next to the HTTP front",
    "gguf": "converting .gguf files",
    "zarr": "reading NeMo's older checkpoints, whose weights are zarr",
    "wandb": "logging to Weights & Biases",
    "mlflow": "logging to MLflow",
}
# Servers need this extra's packages; without a fit one of the others only its purpose is lost.
_EXTRA_OF_SERVERS = "serving"
_PYTRITON = "nvidia-pytriton"
_TORCH_OF_VARLEN = "2.10"


def packages() -> Iterator[Finding]:
    """Python, this package, what it requires and what it can use."""
    ours = _requirements()
    yield _python()
    yield _this_package()
    for requirement in ours.get("", []):
        found = _required(requirement)
        if requirement.name in _ALWAYS_SHOWN or found.verdict is not Verdict.ok:
            yield found
    if not ours:
        yield from _by_name_alone()
    yield from _imports()
    always = {requirement.name for requirement in ours.get("", [])}
    for extra, purpose in _EXTRAS.items():
        yield _optional(extra, purpose, ours.get(extra, []), always)
    pytriton = next(iter(importlib.metadata.distributions(name=_PYTRITON)), None)
    if pytriton is not None:
        yield _triton_binary(pytriton)


def gpu_packages() -> Iterator[Finding]:
    """Find packages that make a GPU faster; a CPU uses none of them."""
    for name, distribution in (("TransformerEngine", "transformer_engine"), ("Apex", "apex")):
        if importlib.util.find_spec(distribution) is None:
            advice = f"optional, on GPUs: without {name} megatron-core uses torch's own kernels"
            yield Finding(name, "not installed", Verdict.note, advice)
        else:
            yield Finding(name, version_of(distribution) or "installed")


def flash_attention() -> Finding:
    """Check that torch has the attention kernels that GPUs use."""
    if importlib.util.find_spec("torch.nn.attention.varlen") is None:
        return Finding(
            "flash attention",
            "torch has no kernel for packed sequences",
            Verdict.note,
            f"attention is slower than with torch {_TORCH_OF_VARLEN} or newer",
        )
    return Finding("flash attention", "torch's, for packed sequences")


def version_of(distribution: str) -> str | None:
    """The version of an installed package; None if it is not."""
    try:
        return importlib.metadata.version(distribution)
    except PackageNotFoundError:
        return None


def import_torch() -> Any:
    """torch; None where it is missing or broken."""
    try:
        return importlib.import_module("torch")
    except Exception:  # a library that does not fit raises anything
        return None


def _requirements() -> dict[str, list[Any]]:
    """List this package's requirements on this machine by extra; "" has those of no extra."""
    try:
        from packaging.requirements import Requirement

        lines = importlib.metadata.requires(DISTRIBUTION) or []
    except (ImportError, PackageNotFoundError):
        return {}
    found: dict[str, list[Any]] = {}
    for requirement in map(Requirement, lines):
        for extra in ("", *_EXTRAS):
            marker = requirement.marker
            fits = marker is None or marker.evaluate({"extra": extra})
            if fits and (not extra or marker is not None):
                found.setdefault(extra, []).append(requirement)
    return found


def _python() -> Finding:
    version = platform.python_version()
    try:
        from packaging.specifiers import SpecifierSet

        wanted = importlib.metadata.metadata(DISTRIBUTION)["Requires-Python"]
    except (ImportError, PackageNotFoundError):
        return Finding("python", version)
    if SpecifierSet(wanted).contains(version, prereleases=True):
        return Finding("python", version)
    return Finding("python", version, Verdict.missing, f"wanted {wanted}")


def _this_package() -> Finding:
    conflict = find_conflict()
    if conflict is not None:
        return Finding(_IMPORTED, __version__, Verdict.missing, conflict)
    if version_of(DISTRIBUTION) is None:
        advice = f"not installed, so its requirements are not checked: {install_command()}"
        return Finding(_IMPORTED, __version__, Verdict.note, advice)
    return Finding(_IMPORTED, f"{__version__}, of {DISTRIBUTION}")


def _by_name_alone() -> Iterator[Finding]:
    """Check the required packages by name, if the requirements or ``packaging`` are missing."""
    for name in _ALWAYS_SHOWN:
        version = version_of(name)
        if version is None:
            advice = f"install it: {install_command()}; or activate the environment that has it"
            yield Finding(name, "not installed", Verdict.missing, advice)
        else:
            yield Finding(name, version, Verdict.note, "the wanted version is unknown")


def _required(requirement: Any) -> Finding:
    version = version_of(requirement.name)
    wanted = f"pip install '{requirement.name}{requirement.specifier}'"
    if version is None:
        return Finding(requirement.name, "not installed", Verdict.missing, wanted)
    if not requirement.specifier.contains(version, prereleases=True):
        advice = f"wanted {requirement.specifier}: {wanted}"
        return Finding(requirement.name, version, Verdict.missing, advice)
    return Finding(requirement.name, version)


def _optional(extra: str, purpose: str, requirements: list[Any], always: set[str]) -> Finding:
    """Check an extra: installed as it should be, not installed, or installed and unfit.

    An unfit one is ``missing`` only if the servers cannot start with it.

    ``always`` names what is installed without any extra, too: it does not show that the extra is.
    """
    findings = [_required(requirement) for requirement in requirements]
    value = ", ".join(f"{each.name} {each.value}" for each in findings) or "unknown"
    if all(each.verdict is Verdict.ok for each in findings) and findings:
        return Finding(f"[{extra}]", value)
    is_used = any(version_of(each.name) for each in findings if each.name not in always)
    unfit = is_used and any(
        each.verdict is Verdict.missing and version_of(each.name) for each in findings
    )
    verdict = Verdict.missing if unfit and extra == _EXTRA_OF_SERVERS else Verdict.note
    return Finding(f"[{extra}]", value, verdict, f"for {purpose}: {install_command(extra)}")


def _imports() -> Iterator[Finding]:
    """Check that an installed package can be imported; the error says why not."""
    for name in ("torch", "transformers"):
        if importlib.util.find_spec(name) is None:
            continue
        try:
            importlib.import_module(name)
        except Exception as error:
            value = f"cannot be imported: {type(error).__name__}: {short(error)}"
            yield Finding(name, value, Verdict.missing, f"pip install --force-reinstall {name}")


def _triton_binary(pytriton: importlib.metadata.Distribution) -> Finding:
    """Check that the installed PyTriton can start its server."""
    binary = pytriton.locate_file("pytriton/tritonserver/bin/tritonserver")
    if os.access(str(binary), os.X_OK):
        return Finding("Triton", "installed, executable")
    return Finding(
        "Triton",
        "no executable server in PyTriton's folder",
        Verdict.note,
        "server.triton_port needs it, nothing else does: "
        f"pip install --force-reinstall {_PYTRITON}",
    )


# The machine: processors, memory, disk, port, compiler.

_GIB = 2**30
_SMALL_SHARED = 2**28
_SMALL_DISK = 10 * _GIB
_FLAGS = ("avx2", "avx512f", "avx512_bf16", "amx_bf16")
_SHARED_ADVICE = "Triton's processes and NCCL share memory there; in Docker: --shm-size=1g"
_TEMPORARY_ADVICE = "whole archives are unpacked there; set TMPDIR to use another folder"
_FOLDER_ADVICE = "a checkpoint of a run is several times as large as its model"
_MAKES_BF16 = {"avx512_bf16", "amx_bf16"}


def gpus(torch: Any) -> Iterator[Finding]:
    """List each CUDA device that torch sees; ``torch`` is None if it cannot be imported."""
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
        advice = "this CPU multiplies in fp32; 16 bits are many times slower"
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
    """Measure free memory within the container's limits."""
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
    """Check that the server's default port is free."""
    number = ServerConfig().port
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", number))
        except OSError as error:
            advice = "a server needs another: server.port=0 takes any free one"
            return Finding(f"port {number}", f"taken: {error.strerror}", Verdict.note, advice)
    return Finding(f"port {number}", "free on 127.0.0.1")


def compiler(has_gpu: bool) -> Finding:
    """Check for a C compiler: GPU kernels are compiled at first use; a CPU needs none."""
    names = (os.environ.get("CC"), "cc", "gcc", "clang")
    found = next(filter(None, (shutil.which(name) for name in names if name)), None)
    if found is not None:
        return Finding("C compiler", found)
    advice = (
        "on a GPU megatron-core's fused functions are compiled at the start: apt install gcc"
        if has_gpu
        else "a CPU needs none, except to install packages without a wheel for this machine"
    )
    return Finding("C compiler", "none", Verdict.missing if has_gpu else Verdict.note, advice)


def _read(path: str) -> str:
    try:
        return Path(path).read_text(errors="replace")
    except OSError:
        return ""


# Findings.


class Verdict(str, Enum):
    """Verdict on a finding: ``missing`` must be fixed before the package works."""

    ok = "ok"
    note = "note"
    missing = "missing"


@dataclass(frozen=True)
class Finding:
    """Finding ``name: value``, its verdict, and advice."""

    name: str
    value: str
    verdict: Verdict = Verdict.ok
    advice: str = ""
