"""Attention over the segments of a pack on a CPU: no padding, no mask, no copy of a prefix.

Each segment attends causally to itself in one call of torch's flash attention; all the segments
that have a prefix in common attend to it together, in one more. What a token got from both is put
together by the log-sum-exp of its scores, and the backward of each part follows from the whole's
output and log-sum-exp (FlashAttention, Dao et al. 2022; RingAttention, Liu et al. 2023).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from nemo_aligner.models.internals import cpu_flash_attention, cpu_flash_attention_backward


@dataclass(frozen=True)
class _Block:
    """Which queries see which keys; ``is_causal`` where they are the same tokens."""

    queries: slice
    keys: slice
    is_causal: bool


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    lengths: Sequence[int],
    prefixes: Sequence[int],
    scale: float | None,
) -> Tensor:
    """``query [T, heads, c]`` on ``key`` and ``value [T, groups, c]`` -> ``[T, heads, c]``.

    Args:
        lengths: tokens of every segment, T in all.
        prefixes: the segment that is a segment's prefix, -1 for none.
        scale: of the scores; None is ``c ** -0.5``.
    """
    return _PackedAttention.apply(query, key, value, list(_blocks(lengths, prefixes)), scale)


def _blocks(lengths: Sequence[int], prefixes: Sequence[int]) -> Iterator[_Block]:
    """Every segment on itself, then every run of segments with one prefix on that."""
    bounds = [0]
    for length in lengths:
        bounds.append(bounds[-1] + length)
        yield _Block(slice(*bounds[-2:]), slice(*bounds[-2:]), True)
    start = 0
    for own in range(1, len(prefixes) + 1):
        prefix = prefixes[start]
        if own < len(prefixes) and prefixes[own] == prefix:
            continue
        if prefix >= 0:
            keys = slice(bounds[prefix], bounds[prefix + 1])
            yield _Block(slice(bounds[start], bounds[own]), keys, False)
        start = own


def _as_heads(x: Tensor, groups: int) -> Tensor:
    """``[T, heads, c]`` -> a view ``[heads / groups, groups, T, c]``: head ``g * r + i`` at [i, g].

    Query heads of one group stand in the batch, so that keys need no copy for each of them.
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
        blocks: list[_Block],
        scale: float | None,
    ) -> Tensor:
        # Contiguous, or the views below would keep the whole of the projection's output alive.
        query, key, value = query.contiguous(), key.contiguous(), value.contiguous()
        groups = key.size(1)
        out = torch.empty_like(query)
        repeats = query.size(1) // groups
        precise = torch.promote_types(query.dtype, torch.float32)
        lse = torch.empty(repeats, groups, query.size(0), dtype=precise)
        q, k, v, o = (_as_heads(x, groups) for x in (query, key, value, out))
        for block in blocks:
            some, its_lse = cpu_flash_attention(
                q[:, :, block.queries],
                k[:, :, block.keys].expand(repeats, -1, -1, -1),
                v[:, :, block.keys].expand(repeats, -1, -1, -1),
                0.0,
                block.is_causal,
                attn_mask=None,
                scale=scale,
            )
            if block.is_causal:
                o[:, :, block.queries] = some
                lse[:, :, block.queries] = its_lse
            else:
                _merge(o[:, :, block.queries], lse[:, :, block.queries], some, its_lse)
        ctx.save_for_backward(query, key, value, out, lse)
        ctx.blocks, ctx.scale = blocks, scale
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None]:
        query, key, value, out, lse = ctx.saved_tensors
        grad = grads[0].contiguous()
        groups = key.size(1)
        repeats = query.size(1) // groups
        to_query, to_key, to_value = (torch.empty_like(x) for x in (query, key, value))
        q, k, v, o, d = (_as_heads(x, groups) for x in (query, key, value, out, grad))
        dq, dk, dv = (_as_heads(x, groups) for x in (to_query, to_key, to_value))
        for block in ctx.blocks:
            found = cpu_flash_attention_backward(
                d[:, :, block.queries],
                q[:, :, block.queries],
                k[:, :, block.keys].expand(repeats, -1, -1, -1),
                v[:, :, block.keys].expand(repeats, -1, -1, -1),
                o[:, :, block.queries],
                lse[:, :, block.queries],
                0.0,
                block.is_causal,
                attn_mask=None,
                scale=ctx.scale,
            )
            for rows, to, some in (
                (block.queries, dq, found[0]),
                (block.keys, dk, found[1].sum(0, keepdim=True)),
                (block.keys, dv, found[2].sum(0, keepdim=True)),
            ):
                if block.is_causal:
                    to[:, :, rows] = some
                else:
                    to[:, :, rows] += some
        return to_query, to_key, to_value, None, None


def _merge(out: Tensor, lse: Tensor, more: Tensor, its_lse: Tensor) -> None:
    """Add to what queries have seen what else they saw; in place, ``[r, groups, n(, c)]``."""
    total = torch.logaddexp(lse, its_lse)
    weight = torch.exp(its_lse - total).unsqueeze(-1)
    out += (more - out) * weight.to(out.dtype)
    lse.copy_(total)
