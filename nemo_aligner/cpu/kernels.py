"""Parts of a layer for inference on a CPU, in fp32 and bf16: kernels.c, compiled when first needed.

torch makes several passes over memory for what one can do, and its attention multiplies by MKL,
which does not use AVX-512 on processors of other makers than Intel. Without a C compiler torch
computes all of it.
"""

from __future__ import annotations

import ctypes
import logging
import os
import re
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from nemo_aligner.utils.errors import one_line
from nemo_aligner.utils.processes import is_main

logger = logging.getLogger(__name__)

SWITCH = "NEMO_ALIGNER_COMPILE"
"""Environment variable: 0 leaves all to torch."""

# As fast as by -O3, and compiled in two thirds of its time.
_FAST = ("-O2", "-ftree-vectorize", "-fvect-cost-model=dynamic", "-march=native", "-fno-math-errno")
_OPTIONS = (*_FAST, "-fopenmp", "-fPIC")
# The arguments of each function: pointers, int64, int32 and floats; the number of threads is last.
_ARGUMENTS = {
    "attend": "ipllpppiiifipipppii",
    "rms_norm": "ipplii",
    "add": "pipplii",
    "gated_silu": "ipplii",
    "rotate": "ipllppliiiii",
}
_TYPES = {"p": ctypes.c_void_p, "l": ctypes.c_int64, "i": ctypes.c_int, "f": ctypes.c_float}
_LANES = 16  # of the widest vector
FLOATS = (torch.float32, torch.bfloat16)


def take(x: Tensor, multiple: int = _LANES) -> bool:
    """Tell if the kernels compute ``x [..., c]``: without gradients, and if they can be had.

    Args:
        multiple: of which c has to be one.
    """
    return x.is_cpu and can_take(x.dtype, x.size(-1), multiple)


def can_take(dtype: torch.dtype, width: int, multiple: int = _LANES) -> bool:
    """Tell what ``take`` does of a CPU's ``[..., width]``."""
    fits = dtype in FLOATS and width % multiple == 0
    return fits and not torch.is_grad_enabled() and _library() is not None


def call(name: str, *arguments: Any) -> None:
    """Call a function of kernels.c with torch's number of threads."""
    getattr(_library(), name)(*arguments, torch.get_num_threads())


def rms_norm(x: Tensor, weight: Tensor, eps: float, dtype: torch.dtype) -> Tensor:
    """Compute ``layers.rms_norm`` of ``x [..., c]`` and ``weight [c]``."""
    x = x.contiguous()
    norm, out = _norm(x, weight, eps, dtype)
    width = x.size(-1)
    call("rms_norm", x.dtype is torch.bfloat16, x.data_ptr(), norm, x.numel() // width, width)
    return out


def can_add(x: Tensor, added: Tensor) -> bool:
    """Tell if ``add`` computes ``x += added``."""
    fits = x.dtype is torch.float32 and added.dtype in FLOATS
    return fits and x.is_contiguous() and added.is_contiguous() and take(x)


def add(x: Tensor, added: Tensor, norm: Any = None) -> None:
    """Compute ``x += added``, both ``[..., c]`` and contiguous, ``x`` in fp32, and a ``_norm``."""
    width, is_bf16 = x.size(-1), added.dtype is torch.bfloat16
    call("add", x.data_ptr(), is_bf16, added.data_ptr(), norm, x.numel() // width, width)


def add_and_norm(
    x: Tensor, added: Tensor, weight: Tensor, eps: float, dtype: torch.dtype
) -> Tensor:
    """Compute ``add``, and then ``rms_norm`` of ``x``."""
    norm, out = _norm(x, weight, eps, dtype)
    add(x, added, norm)
    return out


class _Norm(ctypes.Structure):
    """As in kernels.c."""

    _fields_ = (
        ("is_bf16", ctypes.c_int),
        ("weight", ctypes.c_void_p),
        ("out_is_bf16", ctypes.c_int),
        ("out", ctypes.c_void_p),
        ("eps", ctypes.c_float),
    )


def _norm(x: Tensor, weight: Tensor, eps: float, dtype: torch.dtype) -> tuple[Any, Tensor]:
    out = torch.empty_like(x, dtype=dtype)
    of, wanted = (each is torch.bfloat16 for each in (weight.dtype, dtype))
    return ctypes.byref(_Norm(of, weight.data_ptr(), wanted, out.data_ptr(), eps)), out


def gated_silu(x: Tensor) -> Tensor:
    """Compute ``layers.gated_silu`` of ``x [..., 2 f]`` -> ``[..., f]``."""
    x = x.contiguous()
    out = x.new_empty(*x.shape[:-1], x.size(-1) // 2)
    width, is_bf16 = out.size(-1), x.dtype is torch.bfloat16
    call("gated_silu", is_bf16, x.data_ptr(), out.data_ptr(), out.numel() // width, width)
    return out


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Compute ``rotary.rotate`` of ``x [T, groups, heads, c]`` in place; heads are contiguous."""
    (rows, groups, heads, channels), half = x.shape, cos.size(-1)
    where = (x.dtype is torch.bfloat16, x.data_ptr(), *x.stride()[:2])
    call("rotate", *where, cos.data_ptr(), sin.data_ptr(), rows, groups, heads, channels, half)
    return x


# True if another rank cannot use them.
_is_off = False


def decide_together(device: torch.device, gather: Callable[[Any], list[Any]]) -> None:
    """Have all ranks use kernels.c, or none; every rank calls it before it scores a text.

    The kernels round otherwise than torch does: a text's reward must not depend on the rank that
    computes it.

    Args:
        device: on which this rank computes; nothing is decided on a GPU.
        gather: gives every rank the objects of all ranks, see ``distributed/collectives.py``.
    """
    global _is_off
    if not dist.is_initialized() or dist.get_world_size() == 1 or device.type != "cpu":
        return
    library, problem = _compiled()
    problems = gather(problem if library is None else None)
    _is_off = any(each is not None for each in problems)
    # Those who switched them off know.
    shown = [f"rank {rank}: {each}" for rank, each in enumerate(problems) if each is not None]
    if is_main() and set(problems) != {_SWITCHED_OFF} and shown:
        _warn("; ".join(shown))


def _library() -> Any:
    """The compiled file, once that has been tried; None if it cannot be had."""
    if _is_off:
        return None
    library, problem = _compiled()
    if library is None and problem != _SWITCHED_OFF:
        _warn(problem)
    return library


@cache
def _warn(problem: str) -> None:
    logger.warning("kernels.c is not used, so scoring is slower on this CPU: %s", problem)


_SWITCHED_OFF = f"{SWITCH}=0"


@cache
def _compiled() -> tuple[Any, str]:
    """The compiled file, or None and why it cannot be had."""
    if os.environ.get(SWITCH) == "0":
        return None, _SWITCHED_OFF
    try:
        library = _compile()
    except (OSError, subprocess.SubprocessError) as error:
        return None, one_line(getattr(error, "stderr", None) or error)
    for name, arguments in _ARGUMENTS.items():
        function = getattr(library, name)
        function.argtypes, function.restype = [_TYPES[each] for each in arguments], None
    return library, ""


def _compile() -> ctypes.CDLL:
    """Compile kernels.c for this processor and load it; its threads are those of torch."""
    compiler = shlex.split(os.environ.get("CC", "cc"))
    if shutil.which(compiler[0]) is None:
        raise FileNotFoundError(f"found no C compiler {compiler[0]}")
    ctypes.CDLL(_openmp_of_torch(), mode=ctypes.RTLD_GLOBAL)
    source = Path(__file__).with_suffix(".c")
    with tempfile.TemporaryDirectory(prefix="nemo_kernels_") as folder:
        compiled, library = Path(folder, "kernels.o"), Path(folder, "kernels.so")
        # Linked without OpenMP: a second one would have threads of its own.
        for command in (
            [*compiler, *_OPTIONS, "-c", str(source), "-o", str(compiled)],
            [*compiler, "-shared", str(compiled), "-o", str(library), "-lm"],
        ):
            subprocess.run(command, check=True, capture_output=True, text=True, timeout=120)
        return ctypes.CDLL(str(library))


def _openmp_of_torch() -> str:
    """Path of the OpenMP library whose threads compute torch's operations."""
    loaded = Path("/proc/self/maps").read_text().splitlines()
    found = {line.split()[-1] for line in loaded if re.search(r"/lib[gi]omp[^/]*$", line)}
    if not found:
        raise FileNotFoundError("found no OpenMP that torch has loaded")
    return min(found, key=lambda path: str(Path(torch.__file__).parent) not in path)
