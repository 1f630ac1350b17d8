"""``nemo-aligner doctor``: can this machine train and serve, and what is missing?

It checks packages, GPUs, the CPU, memory, disk, a port and a compiler. Every import may fail on a
machine that needs this command. So everything that is not in the standard library is imported
inside functions.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import os
import platform
import re
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
from nemo_aligner.utils.processes import usable_cores

_WIDTH = 80
_INDENT = 10
_COMMAND = re.compile(r"pip install(?: -\S+)*(?: '[^']*'| \S+)")


def examine() -> list[Finding]:
    """Run all checks, the most basic first: packages, devices, memory, disk, port, compiler."""
    torch = import_torch()
    has_gpu = torch is not None and torch.cuda.is_available()
    return [
        *check_packages(),
        *check_gpus(torch),
        *check_gpu_packages(),
        *([check_flash_attention()] if has_gpu else []),
        *check_processor(has_gpu),
        *check_space(),
        check_port(),
        check_compiler(has_gpu),
    ]


def render(findings: Sequence[Finding]) -> str:
    """Render each finding with its advice below it, then the number of each verdict.

    Lines have 80 columns at most, except those with a longer command.
    """
    lines = []
    for finding in findings:
        mark = "" if finding.verdict is Verdict.ok else finding.verdict.value.upper()
        lines += _wrap(f"{finding.name}: {finding.value}", f"{mark:<{_INDENT}}")
        lines += _wrap(f"-> {finding.advice}", " " * _INDENT) if finding.advice else []
    missing = sum(finding.verdict is Verdict.missing for finding in findings)
    notes = sum(finding.verdict is Verdict.note for finding in findings)
    return "\n".join([*lines, f"missing: {missing}, notes: {notes}"])


def _wrap(text: str, first_indent: str) -> list[str]:
    # A command stays on one line, so that it can be copied: NULs stand for its spaces.
    lines = textwrap.wrap(
        _COMMAND.sub(lambda command: command[0].replace(" ", "\0"), text),
        _WIDTH,
        initial_indent=first_indent,
        subsequent_indent=" " * (_INDENT + 3),
        break_long_words=False,
        break_on_hyphens=False,
    )
    return [line.replace("\0", " ") for line in lines]


# The first part compares the installed packages with the requirements.

_PACKAGE = "nemo_aligner"
_ALWAYS_SHOWN = ("torch", "megatron-core", "transformers", "omegaconf", "numpy")
# Optional extras of this package, and the purpose of each.
_EXTRAS = {
    "serving": "the HTTP front of the servers and the gateway",
    "triton": "NVIDIA Triton next to the HTTP front",
    "gguf": "converting .gguf files",
    "zarr": "reading NeMo's older checkpoints, whose weights are zarr",
    "wandb": "logging to Weights & Biases",
    "mlflow": "logging to MLflow",
}
# The servers cannot start without the packages of this extra. If packages of another extra are
# missing, only the purpose of that extra is disabled.
_SERVING_EXTRA = "serving"
_PYTRITON = "nvidia-pytriton"
_FIRST_TORCH_WITH_VARLEN = "2.10"


def check_packages() -> Iterator[Finding]:
    """Check Python, this package, the packages that it requires, and its optional extras."""
    requirements = _read_requirements()
    required = requirements.get("", [])
    yield _check_python()
    yield _check_this_package()
    for requirement in required:
        finding = _check_requirement(requirement)
        if requirement.name in _ALWAYS_SHOWN or finding.verdict is not Verdict.ok:
            yield finding
    if not requirements:
        yield from _check_by_name()
    yield from _check_imports()
    required_names = {requirement.name for requirement in required}
    for extra, purpose in _EXTRAS.items():
        yield _check_extra(extra, purpose, requirements.get(extra, []), required_names)
    pytriton = next(iter(importlib.metadata.distributions(name=_PYTRITON)), None)
    if pytriton is not None:
        yield _check_triton_binary(pytriton)


def check_gpu_packages() -> Iterator[Finding]:
    """Check for optional packages that make GPUs faster; a CPU does not use them."""
    for name, distribution in (("TransformerEngine", "transformer_engine"), ("Apex", "apex")):
        if importlib.util.find_spec(distribution) is None:
            advice = f"optional, on GPUs: without {name} megatron-core uses torch's own kernels"
            yield Finding(name, "not installed", Verdict.note, advice)
        else:
            yield Finding(name, version_of(distribution) or "installed")


def check_flash_attention() -> Finding:
    """Check that torch has the attention kernel for packed sequences, which GPUs use."""
    if importlib.util.find_spec("torch.nn.attention.varlen") is None:
        return Finding(
            "flash attention",
            "torch has no kernel for packed sequences",
            Verdict.note,
            f"attention is slower than with torch {_FIRST_TORCH_WITH_VARLEN} or newer",
        )
    return Finding("flash attention", "torch's, for packed sequences")


def version_of(distribution: str) -> str | None:
    """Return the version of an installed package; None if it is not installed."""
    try:
        return importlib.metadata.version(distribution)
    except PackageNotFoundError:
        return None


def import_torch() -> Any:
    """Import torch; None if it is missing or broken."""
    try:
        return importlib.import_module("torch")
    # Catch every exception: a library built for another machine may raise anything.
    except Exception:
        return None


def _read_requirements() -> dict[str, list[Any]]:
    """List this package's requirements by extra; the key "" has those without an extra.

    Requirements that do not apply to this machine, such as those of another platform, are skipped.
    """
    try:
        from packaging.requirements import Requirement

        lines = importlib.metadata.requires(DISTRIBUTION) or []
    except (ImportError, PackageNotFoundError):
        return {}
    requirements: dict[str, list[Any]] = {}
    for requirement in map(Requirement, lines):
        for extra in ("", *_EXTRAS):
            marker = requirement.marker
            applies = marker is None or marker.evaluate({"extra": extra})
            if applies and (not extra or marker is not None):
                requirements.setdefault(extra, []).append(requirement)
    return requirements


def _check_python() -> Finding:
    version = platform.python_version()
    try:
        from packaging.specifiers import SpecifierSet

        specifier = importlib.metadata.metadata(DISTRIBUTION)["Requires-Python"]
    except (ImportError, PackageNotFoundError):
        return Finding("python", version)
    if SpecifierSet(specifier).contains(version, prereleases=True):
        return Finding("python", version)
    return Finding("python", version, Verdict.missing, f"wanted {specifier}")


def _check_this_package() -> Finding:
    conflict = find_conflict()
    if conflict is not None:
        return Finding(_PACKAGE, __version__, Verdict.missing, conflict)
    if version_of(DISTRIBUTION) is None:
        advice = f"not installed, so its requirements are not checked: {install_command()}"
        return Finding(_PACKAGE, __version__, Verdict.note, advice)
    return Finding(_PACKAGE, f"{__version__}, of {DISTRIBUTION}")


def _check_by_name() -> Iterator[Finding]:
    """Check only that the main packages are installed, and not their versions.

    The required versions are in the metadata of this package, which an uninstalled copy lacks.
    """
    for name in _ALWAYS_SHOWN:
        version = version_of(name)
        if version is None:
            advice = f"install it: {install_command()}; or activate the environment that has it"
            yield Finding(name, "not installed", Verdict.missing, advice)
        else:
            yield Finding(name, version, Verdict.note, "the required version is unknown")


def _check_requirement(requirement: Any) -> Finding:
    version = version_of(requirement.name)
    command = f"pip install '{requirement.name}{requirement.specifier}'"
    if version is None:
        return Finding(requirement.name, "not installed", Verdict.missing, command)
    if not requirement.specifier.contains(version, prereleases=True):
        advice = f"wanted {requirement.specifier}: {command}"
        return Finding(requirement.name, version, Verdict.missing, advice)
    return Finding(requirement.name, version)


def _check_extra(
    extra: str, purpose: str, requirements: list[Any], required_names: set[str]
) -> Finding:
    """Check whether the packages of an extra are installed in versions that fit.

    The verdict is ``missing`` only if the servers cannot start with what is installed.

    Args:
        extra: name of the extra.
        purpose: what the extra is for.
        requirements: the packages of the extra.
        required_names: packages that are installed without any extra. They do not show that the
            user wants this extra.
    """
    findings = [_check_requirement(requirement) for requirement in requirements]
    value = ", ".join(f"{finding.name} {finding.value}" for finding in findings) or "unknown"
    if all(finding.verdict is Verdict.ok for finding in findings) and findings:
        return Finding(f"[{extra}]", value)
    is_used = any(
        version_of(finding.name) for finding in findings if finding.name not in required_names
    )
    is_unfit = is_used and any(
        finding.verdict is Verdict.missing and version_of(finding.name) for finding in findings
    )
    verdict = Verdict.missing if is_unfit and extra == _SERVING_EXTRA else Verdict.note
    return Finding(f"[{extra}]", value, verdict, f"for {purpose}: {install_command(extra)}")


def _check_imports() -> Iterator[Finding]:
    """Report packages that are installed but cannot be imported, with the error."""
    for name in ("torch", "transformers"):
        if importlib.util.find_spec(name) is None:
            continue
        try:
            importlib.import_module(name)
        except Exception as error:
            value = f"cannot be imported: {type(error).__name__}: {short(error)}"
            yield Finding(name, value, Verdict.missing, f"pip install --force-reinstall {name}")


def _check_triton_binary(pytriton: importlib.metadata.Distribution) -> Finding:
    """Check that the server binary of the installed PyTriton is executable."""
    binary = pytriton.locate_file("pytriton/tritonserver/bin/tritonserver")
    if os.access(str(binary), os.X_OK):
        return Finding("Triton", "installed, executable")
    return Finding(
        "Triton",
        "no executable server in PyTriton's folder",
        Verdict.note,
        f"only server.triton_port needs it: pip install --force-reinstall {_PYTRITON}",
    )


# The second part checks the machine: processors, memory, disk, port, compiler.

_GIB = 2**30
# Bytes that should be free; if there are fewer, the check gives a note.
_MIN_SHARED_MEMORY = 2**28
_MIN_DISK = 10 * _GIB
_RELEVANT_FLAGS = ("avx2", "avx512f", "avx512_bf16", "amx_bf16")
_BF16_FLAGS = {"avx512_bf16", "amx_bf16"}
_SHARED_ADVICE = "Triton's processes and NCCL share memory there; in Docker: --shm-size=1g"
_TEMPORARY_ADVICE = "archives are unpacked there; set TMPDIR to use another folder"
_FOLDER_ADVICE = "a checkpoint of a run is several times as large as its model"


def check_gpus(torch: Any) -> Iterator[Finding]:
    """List the CUDA devices that torch sees; ``torch`` is None if it cannot be imported."""
    driver = _find_nvidia_driver()
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
        yield _describe_gpu(torch, index)
    yield Finding("CUDA", f"torch's {torch.version.cuda}, driver {driver or 'unknown'}")


def _describe_gpu(torch: Any, index: int) -> Finding:
    device = torch.cuda.get_device_properties(index)
    value = f"{device.name}, {device.total_memory / _GIB:.0f} GiB"
    if device.major >= 8:
        return Finding(f"GPU {index}", f"{value}, bf16")
    return Finding(
        f"GPU {index}", f"{value}, no bf16", Verdict.note, "train with trainer.precision=fp16"
    )


def _find_nvidia_driver() -> str | None:
    """Return the version of the NVIDIA driver; None if ``nvidia-smi`` is missing or fails."""
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return next(iter(done.stdout.split()), None)


def check_processor(has_gpu: bool) -> Iterator[Finding]:
    """Check the CPU: its usable cores, and which precisions its instructions speed up."""
    fields = _read_cpu_fields()
    name = fields.get("model name") or platform.processor() or platform.machine()
    threads = os.environ.get("OMP_NUM_THREADS")
    threads_note = f", OMP_NUM_THREADS={threads}" if threads else ""
    yield Finding("CPU", f"{name}: {usable_cores()} of {os.cpu_count()} cores usable{threads_note}")
    flags = set((fields.get("flags") or fields.get("Features") or "").split())
    relevant = [flag for flag in _RELEVANT_FLAGS if flag in flags]
    value = ", ".join(relevant) or "none that matter"
    if _BF16_FLAGS & flags or has_gpu:
        yield Finding("CPU instructions", value)
    else:
        advice = "this CPU has no bf16 instructions: use fp32, as bf16 and fp16 are much slower"
        yield Finding("CPU instructions", value, Verdict.note, advice)


def _read_cpu_fields() -> dict[str, str]:
    """Read the fields of the first processor in /proc/cpuinfo."""
    fields: dict[str, str] = {}
    for line in _read_text("/proc/cpuinfo").splitlines():
        key, colon, value = line.partition(":")
        if colon:
            fields.setdefault(key.strip(), value.strip())
    return fields


def check_space() -> Iterator[Finding]:
    """Check free memory, and free disk in the folders that the package writes to."""
    yield Finding("memory", _measure_memory())
    temporary = Path(tempfile.gettempdir())
    for name, folder, minimum, advice in (
        ("/dev/shm", Path("/dev/shm"), _MIN_SHARED_MEMORY, _SHARED_ADVICE),
        (str(temporary), temporary, _MIN_DISK, _TEMPORARY_ADVICE),
        ("this folder", Path.cwd(), _MIN_DISK, _FOLDER_ADVICE),
    ):
        yield _check_disk(name, folder, minimum, advice)


def _measure_memory() -> str:
    """Measure free memory, within the limit of the container if there is one."""
    lines = _read_text("/proc/meminfo").splitlines()
    fields = dict(line.split(":", 1) for line in lines if ":" in line)
    if "MemAvailable" not in fields:
        return "unknown"
    free, total = (int(fields[key].split()[0]) * 1024 for key in ("MemAvailable", "MemTotal"))
    limit, used = (
        _read_text(f"/sys/fs/cgroup/memory.{name}").strip() for name in ("max", "current")
    )
    if limit.isdecimal() and used.isdecimal() and int(limit) < total:
        free, total = min(free, int(limit) - int(used)), int(limit)
    return f"{free / _GIB:.1f} of {total / _GIB:.1f} GiB free"


def _check_disk(name: str, folder: Path, minimum: int, advice: str) -> Finding:
    """Check that a folder is writable and has ``minimum`` bytes free."""
    try:
        usage = shutil.disk_usage(folder)
    except OSError as error:
        return Finding(name, f"unknown: {error.strerror}", Verdict.note, advice)
    value = f"{usage.free / _GIB:.1f} of {usage.total / _GIB:.1f} GiB free"
    if not os.access(folder, os.W_OK):
        return Finding(name, f"{value}, not writable", Verdict.missing, advice)
    if usage.free < minimum:
        return Finding(name, value, Verdict.note, advice)
    return Finding(name, value)


def check_port() -> Finding:
    """Check that the server's default port is free."""
    number = ServerConfig().port
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", number))
        except OSError as error:
            advice = "start the server with another port: server.port=0 takes any free one"
            return Finding(f"port {number}", f"taken: {error.strerror}", Verdict.note, advice)
    return Finding(f"port {number}", "free on 127.0.0.1")


def check_compiler(has_gpu: bool) -> Finding:
    """Check for a C compiler. GPU kernels are compiled at first use; on a CPU it is optional."""
    names = (os.environ.get("CC"), "cc", "gcc", "clang")
    path = next(filter(None, (shutil.which(name) for name in names if name)), None)
    if path is not None:
        return Finding("C compiler", path)
    advice = (
        "megatron-core compiles fused functions for the GPU at the start: apt install gcc"
        if has_gpu
        else "a CPU needs none, except to install packages without a wheel for this machine"
    )
    return Finding("C compiler", "none", Verdict.missing if has_gpu else Verdict.note, advice)


def _read_text(path: str) -> str:
    """Read a file; "" if it cannot be read."""
    try:
        return Path(path).read_text(errors="replace")
    except OSError:
        return ""


# The third part has the result of a check.


class Verdict(str, Enum):
    """Verdict on a finding.

    ``missing`` must be fixed before this machine can train or serve; ``note`` only informs.
    """

    ok = "ok"
    note = "note"
    missing = "missing"


@dataclass(frozen=True)
class Finding:
    """Result of one check, printed as ``name: value`` with the advice below it.

    Attributes:
        name: what was checked, such as a package.
        value: what was found, such as its version.
        verdict: whether the user has to act.
        advice: what to do; empty if the verdict is ``ok``.
    """

    name: str
    value: str
    verdict: Verdict = Verdict.ok
    advice: str = ""
