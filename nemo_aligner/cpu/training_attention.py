"""Attention for training on a CPU: no padding, no mask, no copies of shared prefixes.

Each segment attends causally to itself in one call of torch's flash attention. Context parallelism
cuts a segment into parts: each then attends to itself and to the parts before it. All segments with
a shared prefix, in the pack or cached, attend to the prefix in one more call. A token's partial
results are merged by their log-sum-exp, and each part's backward pass needs only the merged output
and log-sum-exp (FlashAttention, Dao et al. 2022; RingAttention, Liu et al. 2023).

``plan_calls`` lists a pack's calls once, and ``attend_by_calls`` computes each layer with them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, groupby, pairwise
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from nemo_aligner.cpu.flash_attention import (
    add_attended,
    cpu_flash_attention,
    cpu_flash_attention_backward,
)
from nemo_aligner.utils.sinks import join_sinks, sink_gradients


@dataclass(frozen=True)
class Block:
    """One kernel call: the rows of its queries, and the rows of the keys that they see.

    Attributes:
        is_causal: queries and keys are the same tokens, under a causal mask.
        window_left: limit by a window: query i of n sees key j of m if
            ``j - i >= m - n - window_left``. None means no limit.
    """

    queries: slice
    keys: slice
    is_causal: bool
    window_left: int | None = None

    def mask(self, dtype: torch.dtype) -> Tensor | None:
        """Make the mask ``[n, m]`` to add to the scores; None if the kernel needs none."""
        if self.window_left is None:
            return None
        size = self.queries.stop - self.queries.start, self.keys.stop - self.keys.start
        hidden = torch.ones(size, dtype=torch.bool).tril(size[1] - size[0] - self.window_left - 1)
        return torch.zeros(size, dtype=dtype).masked_fill_(hidden, -torch.inf)


def attend_by_calls(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    sinks: Tensor | None,
    calls: Sequence[Block],
    scale: float | None,
) -> Tensor:
    """Attend ``query [n, heads, c]`` to ``key``, ``value [C + T, groups, c]`` -> ``[n, heads, c]``.

    C tokens are cached, the pack has T tokens, and this rank computes n of them.

    Args:
        sinks: logits ``[heads]`` of attention sinks; None if there are none.
        calls: the pack's calls from ``plan_calls``.
        scale: factor of the scores; None means ``c ** -0.5``.
    """
    return _PackedAttention.apply(query, key, value, sinks, tuple(calls), scale)


def plan_calls(
    lengths: Sequence[int],
    parts: Sequence[tuple[int, int, int]],
    chains: Sequence[Sequence[int]],
) -> tuple[Block, ...]:
    """List the kernel calls of a pack.

    First every part of a segment attends to itself, then to the tokens that precede it in its
    segment. Then successive parts with a shared prefix attend to that prefix together.

    Args:
        lengths: number of tokens of every segment: first the cached segments, then the pack's own.
        parts: the parts of segments whose queries this rank computes: for each the number of its
            segment, the index of its first token in the segment, and its number of tokens.
        chains: for each part the numbers of the segments that precede its segment in the sequence
            (shared or cached prefixes), from the start of the sequence.
    """
    bounds = [0, *accumulate(lengths)]
    ends = [0, *accumulate(length for _, _, length in parts)]
    queries = [slice(*span) for span in pairwise(ends)]
    blocks, earlier = [], []
    for (segment, start, length), rows in zip(parts, queries, strict=True):
        first = bounds[segment]
        blocks.append(Block(rows, slice(first + start, first + start + length), True))
        if start:
            earlier.append(Block(rows, slice(first, first + start), False))
    blocks += earlier
    for depth in range(max(map(len, chains))):
        end = 0
        for number, run in groupby(chain[depth] if len(chain) > depth else -1 for chain in chains):
            begin, end = end, end + len(list(run))
            if number >= 0:
                keys = slice(bounds[number], bounds[number + 1])
                blocks.append(Block(slice(ends[begin], ends[end]), keys, False))
    return tuple(blocks)


def as_heads(x: Tensor, groups: int) -> Tensor:
    """View ``[T, heads, c]`` as ``[r, groups, T, c]`` with head ``g * r + i`` at ``[i, g]``.

    The ``r = heads / groups`` query heads of a group then lie along the batch dimension, along
    which keys are expanded without a copy.
    """
    tokens, heads, channels = x.shape
    return x.view(tokens, groups, heads // groups, channels).permute(2, 1, 0, 3)


class _PackedAttention(Function):
    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        sinks: Tensor | None,
        blocks: tuple[Block, ...],
        scale: float | None,
    ) -> Tensor:
        # Copy to contiguous tensors: a saved view would keep the whole output of linear_qkv alive.
        query, key, value = query.contiguous(), key.contiguous(), value.contiguous()
        groups = key.size(1)
        out = torch.empty_like(query)
        repeats = query.size(1) // groups
        precise = torch.promote_types(query.dtype, torch.float32)
        lse = torch.empty(repeats, groups, query.size(0), dtype=precise)
        q, k, v, o = (as_heads(x, groups) for x in (query, key, value, out))
        for block in blocks:
            add_block(block, (q, k, v), o, lse, scale)
        if sinks is not None:
            join_sinks(o, lse, _by_group(sinks, groups))
        ctx.save_for_backward(query, key, value, sinks, out, lse)
        ctx.blocks, ctx.scale = blocks, scale
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, sinks, out, lse = ctx.saved_tensors
        grad = grads[0].contiguous()
        groups = key.size(1)
        to_query, to_key, to_value = (torch.empty_like(x) for x in (query, key, value))
        if len(key) > len(query):  # causal blocks set only the gradients of this rank's n keys
            to_key.zero_(), to_value.zero_()
        q, k, v, o, d = (as_heads(x, groups) for x in (query, key, value, out, grad))
        dq, dk, dv = (as_heads(x, groups) for x in (to_query, to_key, to_value))
        for block in ctx.blocks:
            add_gradients(block, (d, q, k, v, o), lse, (dq, dk, dv), ctx.scale)
        to_sinks = None
        if sinks is not None:
            by_query = sink_gradients(d, o, lse, _by_group(sinks, groups))
            to_sinks = by_query.sum(-1).t().flatten()
        return to_query, to_key, to_value, to_sinks, None, None


def _by_group(sinks: Tensor, groups: int) -> Tensor:
    """View ``sinks [heads]`` as ``[r, groups, 1]``, in the layout of ``as_heads``."""
    return sinks.view(groups, -1).t().unsqueeze(-1)


def add_block(
    block: Block, heads: Sequence[Tensor], o: Tensor, lse: Tensor, scale: float | None
) -> None:
    """Merge a block's attention into the output ``o`` and ``lse [repeats, groups, n]``, in place.

    A causal block overwrites its rows, because it is the first to write them.

    Args:
        heads: queries, keys and values. These tensors and ``o`` are views made by ``as_heads``.
    """
    q, k, v = heads
    added, added_lse = cpu_flash_attention(
        q[:, :, block.queries],
        k[:, :, block.keys].expand(len(q), -1, -1, -1),
        v[:, :, block.keys].expand(len(q), -1, -1, -1),
        0.0,
        block.is_causal,
        attn_mask=block.mask(q.dtype),
        scale=scale,
    )
    if block.is_causal:
        o[:, :, block.queries] = added
        lse[:, :, block.queries] = added_lse
    else:
        add_attended(o[:, :, block.queries], lse[:, :, block.queries], added, added_lse)


def add_gradients(
    block: Block,
    saved: Sequence[Tensor],
    lse: Tensor,
    gradients: Sequence[Tensor],
    scale: float | None,
) -> None:
    """Add one block's contribution to the gradients, in place.

    16-bit inputs are computed in fp32: torch's backward pass in bf16 takes 1.1 to 5 times as long
    for segments of 20 to 400 tokens.

    Args:
        saved: the output's gradient, queries, keys, values and the output.
        gradients: gradients of queries, keys and values. A causal block overwrites its rows,
            because it is the first to write them.
    """
    rows = (block.queries, block.queries, block.keys, block.keys, block.queries)
    d, q, k, v, o = (x[:, :, span].to(lse.dtype) for x, span in zip(saved, rows, strict=True))
    repeats = q.size(0)
    added_gradients = cpu_flash_attention_backward(
        d,
        q,
        k.expand(repeats, -1, -1, -1),
        v.expand(repeats, -1, -1, -1),
        o,
        lse[:, :, block.queries],
        0.0,
        block.is_causal,
        attn_mask=block.mask(q.dtype),
        scale=scale,
    )
    for span, gradient, added in zip(rows[1:4], gradients, added_gradients, strict=True):
        if added.size(0) > gradient.size(0):
            added = added.sum(0, keepdim=True)
        if block.is_causal:
            gradient[:, :, span] = added
        else:
            gradient[:, :, span] += added
