"""Attention for scoring on a CPU with ``kernels.c``, in one pass over a sequence's keys.

A token's output is bit-identical in every batch. Where there is no C compiler,
``block_attention.py`` is used, which is slower: it pads queries to blocks, and merges the results
for several ranges of keys.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from nemo_aligner.cpu import kernels
from nemo_aligner.cpu.block_attention import SegmentKeys

# Constants of kernels.c: the most query rows of a work item, the most channels of a head, and the
# number that must divide the channels.
_ROWS, _MOST_CHANNELS, _CHANNELS = 96, 256, 4
_NO_WINDOW = 2**30


def can_attend(dtype: torch.dtype, channels: int, repeats: int) -> bool:
    """Tell if the kernel is compiled and supports ``repeats`` query heads for each key head."""
    fits = channels <= _MOST_CHANNELS and repeats <= _ROWS
    return fits and kernels.supports_width(dtype, channels, _CHANNELS)


@dataclass(frozen=True)
class PooledTokens:
    """A layer's prefix cache (a pool of keys and values), and the pack's tokens to store in it.

    Attributes:
        layer: ``[2, slots, groups, c]``, the keys and the values.
        stored: ``[M]`` int64 indices of the tokens to store, in the pack.
        slots: ``[M]`` int64 slots of the pool for these tokens.
    """

    layer: Tensor
    stored: Tensor
    slots: Tensor


def attend_by_kernel(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    pooled: PooledTokens | None,
    plan: KernelPlan,
    scale: float | None,
    window: int | None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Attend each token of a pack causally to its own sequence, and store keys in the pool.

    Args:
        query: ``[T, groups, repeats, c]`` in any strides of tokens and groups: for each group its
            query heads, after RoPE.
        key, value: ``[T, groups, c]`` of the pack's tokens, in any strides.
        pooled: the cached tokens; None if the pack neither reads nor stores any.
        scale: factor of the scores; None means ``c ** -0.5``.
        window: keys that a query sees, its own included; None is all before it.
        sinks: logits ``[heads]`` of attention sinks in fp32; None if there are none.

    Returns:
        ``[T, heads, c]`` in the dtype of ``query``.
    """
    tokens, groups, repeats, channels = query.shape
    pools: Tensor | tuple[None, None] = (None, None)
    stored: tuple[int | None, int | None, int] = (None, None, 0)
    if pooled is not None:
        pools = pooled.layer
        stored = (pooled.stored.data_ptr(), pooled.slots.data_ptr(), len(pooled.stored))
    keys, values = (_Source.of(*pair) for pair in zip(pools, (key, value), strict=True))
    if sinks is not None:
        sinks = sinks.contiguous()
    out = query.new_empty(tokens, groups * repeats, channels)
    kernels.call(
        "attend",
        query.dtype is torch.bfloat16,
        query.data_ptr(),
        *query.stride()[:2],
        ctypes.byref(keys),
        ctypes.byref(values),
        out.data_ptr(),
        groups,
        repeats,
        channels,
        channels**-0.5 if scale is None else scale,
        window or _NO_WINDOW,
        None if sinks is None else sinks.data_ptr(),
        plan.items.data_ptr(),
        len(plan.items),
        plan.rows.data_ptr(),
        *stored,
    )
    return out


class _Source(ctypes.Structure):
    """The C struct ``Source`` of kernels.c: where a layer's keys or values lie in pool and pack."""

    _fields_ = (
        ("pool", ctypes.c_void_p),
        ("own", ctypes.c_void_p),
        ("pool_token", ctypes.c_int64),
        ("pool_group", ctypes.c_int64),
        ("own_token", ctypes.c_int64),
        ("own_group", ctypes.c_int64),
    )

    @classmethod
    def of(cls, pool: Tensor | None, local: Tensor) -> _Source:
        """Describe the layer's ``pool [slots, groups, c]`` and the pack's ``local [T, groups, c]``.

        Both are keys, or both are values. ``pool`` is None if the pack reads no cached tokens.
        """
        address, strides = (None, (0, 0)) if pool is None else (pool.data_ptr(), pool.stride()[:2])
        return cls(address, local.data_ptr(), *strides, *local.stride()[:2])


@dataclass(frozen=True)
class KernelPlan:
    """Work items for ``kernels.c``, the most expensive first.

    A work item is a few successive tokens of a sequence whose attention one thread computes.

    Attributes:
        items: ``[n, 4]`` int32. For each item: the row of its first token in the pack, its number
            of tokens, the position of the first token, and where its sequence's keys begin in
            ``rows``.
        rows: ``[K]`` int32 places of the keys of all sequences: a row of the pack, or
            ``-1 - slot`` for a slot of the prefix cache.
    """

    items: Tensor
    rows: Tensor


def plan_items(
    segments: Sequence[SegmentKeys], num_tokens: int, cached_slots: Tensor | None, repeats: int
) -> KernelPlan:
    """Split a pack into work items, for layers with ``repeats`` query heads for each key head.

    Args:
        segments: the pack's segments from ``list_segment_keys``.
        num_tokens: number of tokens of the whole pack, even if this rank computes only a part.
        cached_slots: ``[C]`` int64 slots of the cached tokens; ``SegmentKeys.keys`` counts these C
            tokens first. None if ``num_tokens`` includes the cached tokens.
    """
    row_of = np.arange(num_tokens)
    if cached_slots is not None:
        row_of = np.concatenate([-1 - cached_slots.numpy(), row_of])
    rows, items, begin, max_tokens = [], [], 0, _ROWS // repeats
    for segment in segments:
        rows.append(row_of[segment.keys])
        length = segment.end - segment.start
        size = -(
            -length // -(-length // max_tokens)
        )  # tokens per item: as few items as possible, of about equal size
        for position in range(segment.start, segment.end, size):
            count = min(size, segment.end - position)
            items.append((segment.row + position - segment.start, count, position, begin))
        begin += len(segment.keys)
    items.sort(key=lambda item: -item[2])
    return KernelPlan(
        torch.tensor(items, dtype=torch.int32),
        torch.from_numpy(np.concatenate(rows).astype(np.int32)),
    )
