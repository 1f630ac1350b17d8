"""Attention for inference on a CPU by attention.c, which is compiled when it is first needed.

torch's kernel multiplies by MKL, which does not use AVX-512 on processors of other makers than
Intel. Without a C compiler, in other dtypes than fp32 and with a soft cap, blocks.py is used.
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
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from nemo_aligner.models.attention.blocks import own_segments
from nemo_aligner.models.attention.segments import PackedSegments, Scores

logger = logging.getLogger(__name__)

SWITCH = "NEMO_ALIGNER_COMPILE"
"""Environment variable: 0 leaves the kernel out."""

# As in attention.c: rows that are computed together, channels at most, and in steps.
_ROWS, _MOST_CHANNELS, _CHANNELS = 96, 256, 4
_NO_WINDOW = 2**30
_OPTIONS = ("-O3", "-march=native", "-fopenmp", "-fno-math-errno", "-fPIC")


def can_attend(turned: Tensor, scores: Scores) -> bool:
    """Tell if the kernel computes ``turned [T, groups, repeats + 1, c]``, and can be had."""
    channels, repeats = turned.size(-1), turned.size(2) - 1
    fits = channels <= _MOST_CHANNELS and channels % _CHANNELS == 0 and repeats <= _ROWS
    takes = fits and turned.dtype is torch.float32 and scores.soft_cap is None
    return takes and _kernel() is not None


def attend(
    turned: Tensor, value: Tensor, layer_number: int, segments: PackedSegments, scores: Scores
) -> Tensor:
    """Attend each token to its own sequence up to itself; as ``blocks.attend``, in fp32."""
    kernel, repeats = _kernel(), turned.size(2) - 1
    assert kernel is not None
    items, rows = segments.remembered(("items", repeats), lambda: _plan(segments, repeats))
    key = turned[:, :, -1]
    kept = segments.store(layer_number, key, value) or (None, None)
    keys, values = (_Source.of(*each) for each in zip(kept, (key, value), strict=True))
    tokens, groups, width, channels = turned.shape
    out = torch.empty(tokens, groups * repeats, channels)
    kernel(
        turned.data_ptr(),
        turned.stride(0),
        width,
        ctypes.byref(keys),
        ctypes.byref(values),
        out.data_ptr(),
        groups,
        repeats,
        channels,
        channels**-0.5 if scores.scale is None else scores.scale,
        scores.window or _NO_WINDOW,
        items.ctypes.data,
        len(items),
        rows.ctypes.data,
        torch.get_num_threads(),
    )
    return out


class _Source(ctypes.Structure):
    """Addresses and strides of a layer's keys, or values: the pool's, and the pack's own."""

    _fields_ = (
        ("pool", ctypes.c_void_p),
        ("own", ctypes.c_void_p),
        ("pool_token", ctypes.c_int64),
        ("pool_group", ctypes.c_int64),
        ("own_token", ctypes.c_int64),
        ("own_group", ctypes.c_int64),
    )

    @classmethod
    def of(cls, pool: Tensor | None, own: Tensor) -> _Source:
        """Of ``[slots, groups, c]``, and of ``[T, groups, c]``."""
        address, strides = (None, (0, 0)) if pool is None else (pool.data_ptr(), pool.stride()[:2])
        return cls(address, own.data_ptr(), *strides, *own.stride()[:2])


def _plan(segments: PackedSegments, repeats: int) -> tuple[np.ndarray, np.ndarray]:
    """Plan what is computed together, the most expensive first.

    Returns:
        ``[n, 4]`` int32: an item's first row in the pack, its tokens, the position of the first,
        and where its sequence's keys begin in the second array: ``[K]`` int32 rows of keys, of the
        pack, or of the pool as ``-1 - slot``.
    """
    use = segments.cached
    taken = np.zeros(0, np.int64) if use is None else use.taken.numpy()
    rows, items, begin, most = [], [], 0, _ROWS // repeats
    for each in own_segments(segments):
        is_cached = each.keys < len(taken)
        slots = taken[np.where(is_cached, each.keys, 0)] if len(taken) else each.keys
        rows.append(np.where(is_cached, -1 - slots, each.keys - len(taken)))
        for position in range(each.start, each.end, most):
            count = min(most, each.end - position)
            items.append((each.row + position - each.start, count, position, begin))
        begin += len(each.keys)
    items.sort(key=lambda item: -item[2])
    return np.array(items, np.int32), np.concatenate(rows).astype(np.int32)


@cache
def _kernel() -> Any:
    """The compiled function, once it has been tried; None if it cannot be had."""
    if os.environ.get(SWITCH) == "0":
        return None
    try:
        kernel = _load()
    except (OSError, subprocess.SubprocessError) as error:
        why = getattr(error, "stderr", None) or error
        logger.info("attention is not compiled, and slower on this CPU: %s", why)
        return None
    return kernel


def _load() -> Any:
    """Compile attention.c for this processor; its threads are those of torch."""
    compiler = shlex.split(os.environ.get("CC", "cc"))
    if shutil.which(compiler[0]) is None:
        raise FileNotFoundError(f"found no C compiler {compiler[0]}")
    ctypes.CDLL(_openmp_of_torch(), mode=ctypes.RTLD_GLOBAL)
    source = Path(__file__).with_name("attention.c")
    with tempfile.TemporaryDirectory(prefix="nemo_kernel_") as folder:
        compiled, library = Path(folder, "attention.o"), Path(folder, "attention.so")
        # Linked without OpenMP: a second one would have threads of its own.
        for command in (
            [*compiler, *_OPTIONS, "-c", str(source), "-o", str(compiled)],
            [*compiler, "-shared", str(compiled), "-o", str(library), "-lm"],
        ):
            subprocess.run(command, check=True, capture_output=True, text=True, timeout=120)
        kernel = ctypes.CDLL(str(library)).attend
    pointer, number, stride = ctypes.c_void_p, ctypes.c_int, ctypes.c_int64
    kernel.argtypes = [pointer, stride, number, *[pointer] * 3, *[number] * 3, ctypes.c_float]
    kernel.argtypes += [number, pointer, number, pointer, number]
    kernel.restype = None
    return kernel


def _openmp_of_torch() -> str:
    """Path of the OpenMP library whose threads compute torch's operations."""
    loaded = Path("/proc/self/maps").read_text().splitlines()
    found = {line.split()[-1] for line in loaded if re.search(r"/lib[gi]omp[^/]*$", line)}
    if not found:
        raise FileNotFoundError("found no OpenMP that torch has loaded")
    return min(found, key=lambda path: str(Path(torch.__file__).parent) not in path)
