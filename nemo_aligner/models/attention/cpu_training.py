"""Trainable attention over the segments of a pack on a CPU: no padding, no mask, no prefix copies.

Each segment attends causally to itself in one call of torch's flash attention; of a segment that
context parallelism cuts, each part to itself and to those before it. All segments with a common
prefix, in the pack or cached, attend to it in one more. A token's partial results are merged
by their log-sum-exp, and the backward of each part follows from the merged output and log-sum-exp
(FlashAttention, Dao et al. 2022; RingAttention, Liu et al. 2023).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, groupby, pairwise
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from nemo_aligner.models.attention.segments import Queries, add_attended, chains_of, queries_of
from nemo_aligner.models.internals import cpu_flash_attention, cpu_flash_attention_backward


@dataclass(frozen=True)
class Block:
    """Rows of queries and of the keys they see; ``is_causal`` if these are the same tokens.

    Of n queries and m keys number i sees number j if ``j - i >= m - n - before``; all if None.
    """

    queries: slice
    keys: slice
    is_causal: bool
    before: int | None = None

    def mask(self, dtype: torch.dtype) -> Tensor | None:
        """``[n, m]`` that is added to the scores; None if it is causal, or all keys are seen."""
        if self.before is None:
            return None
        size = self.queries.stop - self.queries.start, self.keys.stop - self.keys.start
        hidden = torch.ones(size, dtype=torch.bool).tril(size[1] - size[0] - self.before - 1)
        return torch.zeros(size, dtype=dtype).masked_fill_(hidden, -torch.inf)


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    lengths: Sequence[int],
    prefixes: Sequence[int],
    scale: float | None,
    parts: Sequence[Queries] | None = None,
) -> Tensor:
    """Attend ``query [n, heads, c]`` to ``key``, ``value [C + T, groups, c]`` -> ``[n, heads, c]``.

    Args:
        lengths: tokens of every segment: the cached ones, C in all, then the pack's own.
        prefixes: for each of the pack's own segments the number of its prefix, -1 for none.
        scale: of the scores; None is ``c ** -0.5``.
        parts: of the segments that have the queries; None is all of the pack's own, whole.
    """
    cached = len(lengths) - len(prefixes)
    if parts is None:
        parts = queries_of(lengths[cached:], cached, None)
    blocks = _blocks(tuple(lengths), tuple(prefixes), tuple(parts))
    return _PackedAttention.apply(query, key, value, blocks, scale)


@lru_cache(maxsize=4)  # every layer asks for the same
def _blocks(
    lengths: tuple[int, ...], prefixes: tuple[int, ...], parts: tuple[Queries, ...]
) -> tuple[Block, ...]:
    """List the calls: every part on itself and on what precedes it in its segment, then every run
    with a common prefix on that.
    """
    cached = len(lengths) - len(prefixes)
    bounds = [0, *accumulate(lengths)]
    ends = [0, *accumulate(part.length for part in parts)]
    queries = [slice(*each) for each in pairwise(ends)]
    blocks, before = [], []
    for part, rows in zip(parts, queries, strict=True):
        first = bounds[part.segment]
        blocks.append(Block(rows, slice(first + part.start, first + part.end), True))
        if part.start:
            before.append(Block(rows, slice(first, first + part.start), False))
    blocks += before
    every = chains_of(prefixes, cached)
    chains = [every[part.segment - cached] for part in parts]
    for depth in range(max(map(len, chains))):
        own = 0
        for number, run in groupby(chain[depth] if len(chain) > depth else -1 for chain in chains):
            start, own = own, own + len(list(run))
            if number >= 0:
                keys = slice(bounds[number], bounds[number + 1])
                blocks.append(Block(slice(ends[start], ends[own]), keys, False))
    return tuple(blocks)


def as_heads(x: Tensor, groups: int) -> Tensor:
    """View ``[T, heads, c]`` as ``[heads / groups, groups, T, c]``: head ``g * r + i`` at [i, g].

    The query heads of a group lie along the batch dimension, over which keys are expanded for free.
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
        blocks: tuple[Block, ...],
        scale: float | None,
    ) -> Tensor:
        # Contiguous: a saved view would keep the projection's whole output alive.
        query, key, value = query.contiguous(), key.contiguous(), value.contiguous()
        groups = key.size(1)
        out = torch.empty_like(query)
        repeats = query.size(1) // groups
        precise = torch.promote_types(query.dtype, torch.float32)
        lse = torch.empty(repeats, groups, query.size(0), dtype=precise)
        q, k, v, o = (as_heads(x, groups) for x in (query, key, value, out))
        for block in blocks:
            add_block(block, (q, k, v), o, lse, scale)
        ctx.save_for_backward(query, key, value, out, lse)
        ctx.blocks, ctx.scale = blocks, scale
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None]:
        query, key, value, out, lse = ctx.saved_tensors
        grad = grads[0].contiguous()
        groups = key.size(1)
        to_query, to_key, to_value = (torch.empty_like(x) for x in (query, key, value))
        if len(key) > len(query):  # else each is first written by its own causal block
            to_key.zero_(), to_value.zero_()
        q, k, v, o, d = (as_heads(x, groups) for x in (query, key, value, out, grad))
        dq, dk, dv = (as_heads(x, groups) for x in (to_query, to_key, to_value))
        for block in ctx.blocks:
            add_gradients(block, (d, q, k, v, o), lse, (dq, dk, dv), ctx.scale)
        return to_query, to_key, to_value, None, None


def add_block(
    block: Block, heads: Sequence[Tensor], o: Tensor, lse: Tensor, scale: float | None
) -> None:
    """Add what a block's queries find in its keys to ``o`` and ``lse [repeats, groups, n]``.

    A causal block is the first to write its rows. ``heads`` are queries, keys and values; these and
    ``o`` are as ``as_heads`` gives them.
    """
    q, k, v = heads
    some, its_lse = cpu_flash_attention(
        q[:, :, block.queries],
        k[:, :, block.keys].expand(len(q), -1, -1, -1),
        v[:, :, block.keys].expand(len(q), -1, -1, -1),
        0.0,
        block.is_causal,
        attn_mask=block.mask(q.dtype),
        scale=scale,
    )
    if block.is_causal:
        o[:, :, block.queries] = some
        lse[:, :, block.queries] = its_lse
    else:
        add_attended(o[:, :, block.queries], lse[:, :, block.queries], some, its_lse)


def add_gradients(
    block: Block,
    saved: Sequence[Tensor],
    lse: Tensor,
    gradients: Sequence[Tensor],
    scale: float | None,
) -> None:
    """Add one call's gradients; all but what it adds to is freed before the next call.

    ``saved`` are the output's gradient, queries, keys, values and the output, ``gradients`` those
    of queries, keys and values, which a causal block is the first to write. 16 bits are computed in
    fp32: torch's backward in bf16 takes 1.1 to 5 times as long for segments of 20 to 400 tokens.
    """
    rows = (block.queries, block.queries, block.keys, block.keys, block.queries)
    d, q, k, v, o = (x[:, :, its].to(lse.dtype) for x, its in zip(saved, rows, strict=True))
    repeats = q.size(0)
    found = cpu_flash_attention_backward(
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
    for its, to, some in zip(rows[1:4], gradients, found, strict=True):
        if some.size(0) > to.size(0):
            some = some.sum(0, keepdim=True)
        if block.is_causal:
            to[:, :, its] = some
        else:
            to[:, :, its] += some
