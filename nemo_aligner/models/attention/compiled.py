"""Attention for inference on a CPU by kernels.c, in fp32; see blocks.py for all else."""

from __future__ import annotations

import ctypes

import numpy as np
import torch
from torch import Tensor

from nemo_aligner.models import kernels
from nemo_aligner.models.attention.blocks import own_segments
from nemo_aligner.models.attention.segments import PackedSegments, Scores

# As in kernels.c: rows that are computed together, channels at most, and in steps.
_ROWS, _MOST_CHANNELS, _CHANNELS = 96, 256, 4
_NO_WINDOW = 2**30


def can_attend(turned: Tensor, scores: Scores) -> bool:
    """Tell if the kernel computes ``turned [T, groups, repeats + 1, c]``, and can be had."""
    channels, repeats = turned.size(-1), turned.size(2) - 1
    fits = channels <= _MOST_CHANNELS and repeats <= _ROWS and scores.soft_cap is None
    return fits and kernels.take(turned, _CHANNELS, (torch.float32, torch.bfloat16))


def attend(
    turned: Tensor, value: Tensor, layer_number: int, segments: PackedSegments, scores: Scores
) -> Tensor:
    """Attend each token to its own sequence up to itself; as ``blocks.attend``."""
    repeats, dtype = turned.size(2) - 1, turned.dtype
    key, value = segments.gathered(turned[:, :, -1], value)
    if dtype is torch.float32:
        kept = segments.store(layer_number, key, value) or (None, None)
    else:
        key, value = (x.float() for x in segments.with_cached(layer_number, key, value))
        kept, turned = (None, None), turned.float()
    reads_pool = kept[0] is not None
    items, rows = segments.remembered(
        ("items", repeats, reads_pool), lambda: _plan(segments, repeats, reads_pool)
    )
    keys, values = (_Source.of(*each) for each in zip(kept, (key, value), strict=True))
    tokens, groups, width, channels = turned.shape
    out = torch.empty(tokens, groups * repeats, channels)
    kernels.call(
        "attend",
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
    )
    return out.to(dtype)


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


def _plan(
    segments: PackedSegments, repeats: int, reads_pool: bool
) -> tuple[np.ndarray, np.ndarray]:
    """Plan what is computed together, the most expensive first.

    Returns:
        ``[n, 4]`` int32: an item's first row in the pack, its tokens, the position of the first,
        and where its sequence's keys begin in the second array: ``[K]`` int32 rows of keys. They
        are of the pack, or of the pool as ``-1 - slot`` if it ``reads_pool``; if not, the cached
        tokens precede the pack's.
    """
    use = segments.cached
    row_of = np.arange(sum(segments.all_lengths))
    if use is not None and reads_pool:
        row_of = np.concatenate([-1 - use.taken.numpy(), np.arange(sum(segments.lengths))])
    rows, items, begin, most = [], [], 0, _ROWS // repeats
    for each in own_segments(segments):
        rows.append(row_of[each.keys])
        for position in range(each.start, each.end, most):
            count = min(most, each.end - position)
            items.append((each.row + position - each.start, count, position, begin))
        begin += len(each.keys)
    items.sort(key=lambda item: -item[2])
    return np.array(items, np.int32), np.concatenate(rows).astype(np.int32)
