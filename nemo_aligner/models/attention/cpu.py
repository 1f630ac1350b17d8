"""Attention over the segments of a pack on a CPU: no padding, no mask, no copy of a beginning.

Each segment attends causally to itself in one call of torch's flash attention; all the segments
that share a beginning attend to it together, in one more. What a token got from both is put
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

_forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


@dataclass(frozen=True)
class _Part:
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
        prefixes: the segment that a segment begins with, -1 for none.
        scale: of the scores; None is ``c ** -0.5``.
    """
    return _PackedAttention.apply(query, key, value, list(_parts(lengths, prefixes)), scale)


def _parts(lengths: Sequence[int], prefixes: Sequence[int]) -> Iterator[_Part]:
    """Every segment on itself, then every run of segments that share a beginning on that."""
    bounds = [0]
    for length in lengths:
        bounds.append(bounds[-1] + length)
        yield _Part(slice(*bounds[-2:]), slice(*bounds[-2:]), True)
    start = 0
    for own in range(1, len(prefixes) + 1):
        prefix = prefixes[start]
        if own < len(prefixes) and prefixes[own] == prefix:
            continue
        if prefix >= 0:
            keys = slice(bounds[prefix], bounds[prefix + 1])
            yield _Part(slice(bounds[start], bounds[own]), keys, False)
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
        parts: list[_Part],
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
        for part in parts:
            some, its_lse = _forward(
                q[:, :, part.queries],
                k[:, :, part.keys].expand(repeats, -1, -1, -1),
                v[:, :, part.keys].expand(repeats, -1, -1, -1),
                0.0,
                part.is_causal,
                attn_mask=None,
                scale=scale,
            )
            if part.is_causal:
                o[:, :, part.queries] = some
                lse[:, :, part.queries] = its_lse
            else:
                _put_together(o[:, :, part.queries], lse[:, :, part.queries], some, its_lse)
        ctx.save_for_backward(query, key, value, out, lse)
        ctx.parts, ctx.scale = parts, scale
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
        for part in ctx.parts:
            found = _backward(
                d[:, :, part.queries],
                q[:, :, part.queries],
                k[:, :, part.keys].expand(repeats, -1, -1, -1),
                v[:, :, part.keys].expand(repeats, -1, -1, -1),
                o[:, :, part.queries],
                lse[:, :, part.queries],
                0.0,
                part.is_causal,
                attn_mask=None,
                scale=ctx.scale,
            )
            for place, to, some in (
                (part.queries, dq, found[0]),
                (part.keys, dk, found[1].sum(0, keepdim=True)),
                (part.keys, dv, found[2].sum(0, keepdim=True)),
            ):
                if part.is_causal:
                    to[:, :, place] = some
                else:
                    to[:, :, place] += some
        return to_query, to_key, to_value, None, None


def _put_together(out: Tensor, lse: Tensor, more: Tensor, its_lse: Tensor) -> None:
    """Add to what queries have seen what else they saw; in place, ``[r, groups, n(, c)]``."""
    total = torch.logaddexp(lse, its_lse)
    share = torch.exp(its_lse - total).unsqueeze(-1)
    out += (more - out) * share.to(out.dtype)
    lse.copy_(total)
