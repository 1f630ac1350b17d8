"""Compile the C files when first needed, and call their functions to score parts of a layer.

``kernels.c`` computes attention and elementwise operations; ``gated_delta.c`` linear attention.

The functions are for inference on a CPU in fp32 and bf16. They need one pass over memory, where
torch needs several. torch's attention also uses MKL for its matmuls, and MKL uses AVX-512 only on
Intel's processors. Without a C compiler torch computes everything.
"""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
import platform
import re
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from nemo_aligner.utils.cache import cache_folder
from nemo_aligner.utils.errors import ConfigError, one_line
from nemo_aligner.utils.processes import is_main
from nemo_aligner.utils.writing import replacing

logger = logging.getLogger(__name__)

SWITCH = "NEMO_ALIGNER_COMPILE"
"""Environment variable: 0 switches the C files off."""
KERNELS, GATED_DELTA = "kernels.c", "gated_delta.c"

# These options are as fast as -O3, and compile in two thirds of the time.
_FAST = ("-O2", "-ftree-vectorize", "-fvect-cost-model=dynamic", "-march=native", "-fno-math-errno")
_OPTIONS = (*_FAST, "-fopenmp", "-fPIC")
# For each file the types of its functions' arguments, as letters of ``_TYPES``; the last argument
# is the number of threads.
_ARGUMENTS = {
    KERNELS: {
        "attend": "ipllpppiiifippipppii",
        "rms_norm": "ipplii",
        "add": "pipplii",
        "gated_silu": "ipplii",
        "rotate": "ipllppliiiii",
    },
    GATED_DELTA: {"advance": "plipppi"},
}
_TYPES = {"p": ctypes.c_void_p, "l": ctypes.c_int64, "i": ctypes.c_int, "f": ctypes.c_float}
# Lines of ``/proc/cpuinfo`` that tell which instructions a compiler may use, and which it prefers.
_PROCESSOR_FACTS = (
    "vendor_id", "cpu family", "model", "flags", "Features", "CPU implementer", "CPU part",
)  # fmt: skip
_LANES = 16  # fp32 lanes of the widest vector
FLOATS = (torch.float32, torch.bfloat16)


def supports(x: Tensor, multiple: int = _LANES) -> bool:
    """Tell if the compiled kernels can compute ``x [..., c]``: on a CPU and without gradients.

    Args:
        multiple: a number that must divide c.
    """
    return x.is_cpu and supports_width(x.dtype, x.size(-1), multiple)


def supports_width(
    dtype: torch.dtype, width: int, multiple: int = _LANES, source: str = KERNELS
) -> bool:
    """Tell if the compiled ``source`` can compute a CPU tensor ``[..., width]`` of this dtype."""
    fits = dtype in FLOATS and width % multiple == 0
    return fits and not torch.is_grad_enabled() and _library(source) is not None


def call(name: str, *arguments: Any, source: str = KERNELS) -> None:
    """Call a function of a C file; it runs in as many threads as torch uses."""
    getattr(_library(source), name)(*arguments, torch.get_num_threads())


def rms_norm(x: Tensor, weight: Tensor, eps: float, dtype: torch.dtype) -> Tensor:
    """Compute RMSNorm of ``x [..., c]`` with ``weight [c]``, returned in ``dtype``."""
    x = x.contiguous()
    norm, out = _norm(x, weight, eps, dtype)
    width = x.size(-1)
    call("rms_norm", x.dtype is torch.bfloat16, x.data_ptr(), norm, x.numel() // width, width)
    return out


def can_add(x: Tensor, added: Tensor) -> bool:
    """Tell if ``add`` supports these tensors: contiguous, ``x`` in fp32, and without gradients."""
    fits = x.dtype is torch.float32 and added.dtype in FLOATS
    return fits and x.is_contiguous() and added.is_contiguous() and supports(x)


def add(x: Tensor, added: Tensor, norm: Any = None) -> None:
    """Compute ``x += added`` in place, both ``[..., c]`` and contiguous, ``x`` in fp32.

    Args:
        norm: a reference to a ``_Norm``, which also norms the sum; None means no norm.
    """
    width, is_bf16 = x.size(-1), added.dtype is torch.bfloat16
    call("add", x.data_ptr(), is_bf16, added.data_ptr(), norm, x.numel() // width, width)


def add_and_norm(
    x: Tensor, added: Tensor, weight: Tensor, eps: float, dtype: torch.dtype
) -> Tensor:
    """Compute ``x += added`` in place, and return the ``rms_norm`` of the sum."""
    norm, out = _norm(x, weight, eps, dtype)
    add(x, added, norm)
    return out


class _Norm(ctypes.Structure):
    """The C struct ``Norm`` of kernels.c: weight, eps and output of the RMSNorm of a sum."""

    _fields_ = (
        ("is_bf16", ctypes.c_int),
        ("weight", ctypes.c_void_p),
        ("out_is_bf16", ctypes.c_int),
        ("out", ctypes.c_void_p),
        ("eps", ctypes.c_float),
    )


def _norm(x: Tensor, weight: Tensor, eps: float, dtype: torch.dtype) -> tuple[Any, Tensor]:
    out = torch.empty_like(x, dtype=dtype)
    weight_is_bf16, out_is_bf16 = (kind is torch.bfloat16 for kind in (weight.dtype, dtype))
    return ctypes.byref(
        _Norm(weight_is_bf16, weight.data_ptr(), out_is_bf16, out.data_ptr(), eps)
    ), out


def gated_silu(x: Tensor) -> Tensor:
    """Compute SwiGLU of ``x [..., 2 f]``, gate first, -> ``[..., f]``."""
    x = x.contiguous()
    out = x.new_empty(*x.shape[:-1], x.size(-1) // 2)
    width, is_bf16 = out.size(-1), x.dtype is torch.bfloat16
    call("gated_silu", is_bf16, x.data_ptr(), out.data_ptr(), out.numel() // width, width)
    return out


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Apply RoPE to ``x [T, groups, heads, c]`` in place, like ``rotary.rotate``.

    The channels of a head must be contiguous.
    """
    (rows, groups, heads, channels), half = x.shape, cos.size(-1)
    place = (x.dtype is torch.bfloat16, x.data_ptr(), *x.stride()[:2])
    call("rotate", *place, cos.data_ptr(), sin.data_ptr(), rows, groups, heads, channels, half)
    return x


# The C files that cannot be used on some rank, so that no rank uses them (``decide_together``).
_off: set[str] = set()


def decide_together(
    device: torch.device, gather: Callable[[Any], list[Any]], has_linear_attention: bool = False
) -> None:
    """Make all ranks use a C file, or none; every rank calls it before it scores.

    The kernels round differently from torch, and a reward must not depend on the rank that computes
    it.

    Args:
        device: this rank's device; on a GPU the function does nothing.
        gather: gathers an object of every rank on all ranks, see ``distributed/collectives.py``.
        has_linear_attention: decide on ``gated_delta.c``, too.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1 or device.type != "cpu":
        return
    for source in (KERNELS, GATED_DELTA) if has_linear_attention else (KERNELS,):
        library, problem = _load_once(source)
        problems = gather(problem if library is None else None)
        if any(reason is not None for reason in problems):
            _off.add(source)
        # Do not warn if the user has switched the C files off on every rank: that is no problem.
        described = [
            f"rank {rank}: {reason}" for rank, reason in enumerate(problems) if reason is not None
        ]
        if is_main() and set(problems) != {_SWITCHED_OFF} and described:
            _warn(source, "; ".join(described))


def _library(source: str) -> Any:
    """Return the compiled library, loaded at the first call; None if it is not available."""
    if source in _off:
        return None
    library, problem = _load_once(source)
    if library is None and problem != _SWITCHED_OFF:
        _warn(source, problem)
    return library


@cache
def _warn(source: str, problem: str) -> None:
    logger.warning(
        "the C kernels (nemo_aligner/cpu/%s) cannot be used, so scoring is slower: %s",
        source,
        problem,
    )


_SWITCHED_OFF = f"{SWITCH}=0"


@cache
def _load_once(source: str) -> tuple[Any, str]:
    """Return the compiled library and ``""``, or None and the reason why there is none."""
    if os.environ.get(SWITCH) == "0":
        return None, _SWITCHED_OFF
    try:
        library = _load(Path(__file__).with_name(source))
    except (OSError, subprocess.SubprocessError) as error:
        return None, one_line(getattr(error, "stderr", None) or error)
    for name, arguments in _ARGUMENTS[source].items():
        function = getattr(library, name)
        function.argtypes, function.restype = [_TYPES[letter] for letter in arguments], None
    return library, ""


def _load(source: Path) -> ctypes.CDLL:
    """Load a C file compiled for this processor, so that it uses torch's OpenMP threads.

    Compiling takes a second of CPU time, so the library stays in the cache (``utils/cache.py``).
    If the cache cannot be written, it is compiled by every process.
    """
    compiler = shlex.split(os.environ.get("CC") or "cc")
    program = shutil.which(compiler[0])
    if program is None:
        raise FileNotFoundError(f"the C compiler {compiler[0]} is not installed")
    ctypes.CDLL(_openmp_of_torch(), mode=ctypes.RTLD_GLOBAL)
    name = f"{source.stem}-{_build_key(program, source)}.so"
    with suppress(OSError, ConfigError):  # it is not there, or is damaged
        cached = cache_folder() / "kernels" / name
        if _only_user_writes(cached.parent) and _only_user_writes(cached):
            return ctypes.CDLL(str(cached))
    with tempfile.TemporaryDirectory(prefix="nemo_kernels_") as folder:
        library = _compile(compiler, source, Path(folder))
        with suppress(OSError, ConfigError):
            _store(library, cache_folder() / "kernels" / name)
        return ctypes.CDLL(str(library))


def _store(library: Path, cached: Path) -> None:
    """Copy a compiled library into the cache, where only this user may write.

    It is on the disk before it has its name: a library that is cut off could crash a process.
    """
    cached.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    with replacing(cached, sync=True) as partial:
        shutil.copyfile(library, partial)
        partial.chmod(0o600)


def _compile(compiler: Sequence[str], source: Path, folder: Path) -> Path:
    """Compile a C file to a shared library in ``folder``, and return its path."""
    compiled, library = folder / "kernels.o", folder / "kernels.so"
    # Link without OpenMP, because a second OpenMP library would start its own threads.
    for command in (
        [*compiler, *_OPTIONS, "-c", str(source), "-o", str(compiled)],
        [*compiler, "-shared", str(compiled), "-o", str(library), "-lm"],
    ):
        subprocess.run(command, check=True, capture_output=True, text=True, timeout=120)
    return library


def _build_key(program: str, source: Path) -> str:
    """Hash everything that a compiled library depends on: compiler, options, code and processor."""
    compiler = Path(program).resolve()
    status = compiler.stat()
    key = hashlib.sha256()
    for fact in (os.environ.get("CC"), compiler, status.st_size, status.st_mtime_ns, _OPTIONS):
        key.update(f"{fact}\n".encode())
    for file in (source, *sorted(source.parent.glob("*.h"))):
        key.update(file.read_bytes())
    # ``-march=native`` compiles for the processor's model and instructions; computers of a cluster
    # may differ in both, and share the cache.
    key.update(platform.machine().encode())
    with suppress(OSError):
        first_core, _, _ = Path("/proc/cpuinfo").read_text().partition("\n\n")
        for line in first_core.splitlines():
            if line.startswith(_PROCESSOR_FACTS):
                key.update(line.encode())
    return key.hexdigest()[:16]


def _only_user_writes(path: Path) -> bool:
    """Tell if nobody but this user could have written ``path``, as code that is loaded must be.

    Raises:
        OSError: it does not exist.
    """
    status = path.stat()
    return status.st_uid == os.getuid() and not status.st_mode & 0o022


def _openmp_of_torch() -> str:
    """Return the path of the OpenMP library that torch has loaded, which the C files use, too.

    Raises:
        FileNotFoundError: torch has loaded none.
    """
    loaded = Path("/proc/self/maps").read_text().splitlines()
    paths = {line.split()[-1] for line in loaded if re.search(r"/lib[gi]omp[^/]*$", line)}
    if not paths:
        raise FileNotFoundError("torch has loaded no OpenMP library (libgomp or libiomp)")
    return min(paths, key=lambda path: str(Path(torch.__file__).parent) not in path)
