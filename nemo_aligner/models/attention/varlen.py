"""Attention of a whole pack by one call of variable-length FlashAttention 2 on a GPU.

torch has had the kernel as an operator since 2.8, and as a public function since 2.10. Both support
windows since 2.11, and the function supports grouped heads since 2.12. Only the operator supports
attention sinks.
"""

from __future__ import annotations

import inspect
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from nemo_aligner.models.attention.key_copies import copy_rows
from nemo_aligner.models.attention.segments import PackedSegments, Scores
from nemo_aligner.models.internals import gpu_flash_attention, gpu_flash_attention_backward
from nemo_aligner.models.shapes.layer import why_no_flash_attention
from nemo_aligner.utils.sinks import join_sinks, sink_gradients

Tensors = tuple[Tensor, Tensor, Tensor, Tensor | None]
"""Queries, keys and values, and the logits ``[heads]`` of attention sinks or None."""

_AMPERE = (8, 0)


def why_no_kernel(dtype: torch.dtype, channels: int) -> str | None:
    """Return why this GPU cannot run FlashAttention 2 on such heads; None if it can.

    Args:
        channels: number of channels of a head.
    """
    if torch.cuda.get_device_capability() < _AMPERE:
        return "the GPU is older than Ampere"
    if dtype not in (torch.bfloat16, torch.float16):
        return f"{str(dtype).removeprefix('torch.')} is not bf16 or fp16"
    return why_no_flash_attention(channels)


def has_public_function(with_window: bool) -> bool:
    """Tell if torch's public function takes grouped heads, and also windows if ``with_window``.

    Without its argument ``enable_gqa`` the function would need a copy of the keys for each query
    head.
    """
    return "enable_gqa" in _varlen_parameters() and has_operator(with_window)


def has_operator(with_window: bool) -> bool:
    """Tell if torch's private operator can be used; with ``with_window``, if it has windows."""
    return not with_window or "window_size" in _varlen_parameters()


@cache
def _varlen_parameters() -> frozenset[str]:
    """Return the parameter names of torch's public function, which tell what it supports.

    The result is empty before torch 2.10, which has no such function.
    """
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return frozenset()
    return frozenset(inspect.signature(varlen_attn).parameters)


def by_public_function(tensors: Tensors, segments: PackedSegments, scores: Scores) -> Tensor:
    """Attend with torch's public function, which supports grouped heads from torch 2.12 on.

    In ``tensors``, ``query [n, heads, c]`` attends to ``key`` and ``value``, ``[C + T, groups, c]``
    each, with the C cached tokens first; sinks must be None. The result is ``[n, heads, c]``.
    """
    from torch.nn.attention.varlen import varlen_attn

    query, key, value, _ = tensors

    return varlen_attn(  # type: ignore[return-value]
        *packed_arguments(query, key, value, segments, scores),
        scale=scores.scale,
        window_size=window_of(scores),
        enable_gqa=query.size(1) != key.size(1),
    )


def by_operator(tensors: Tensors, segments: PackedSegments, scores: Scores) -> Tensor:
    """Attend with torch's private operator, which torch 2.8 to 2.11 need for grouped heads.

    It is also used for attention sinks: the backward pass then needs a log-sum-exp that includes
    the sinks, which torch's public function does not accept. Arguments and result are those of
    ``by_public_function``.
    """
    query, key, value, sinks = tensors
    arguments = packed_arguments(query, key, value, segments, scores)
    options: dict[str, Any] = {"scale": scores.scale}
    if scores.window is not None:
        keys_before, keys_after = window_of(scores)
        options |= {"window_size_left": keys_before, "window_size_right": keys_after}
    is_causal = scores.window is None
    if sinks is not None:
        return _WithSinks.apply(*arguments[:3], sinks, arguments[3:], is_causal, options)
    return _call_operator(arguments, is_causal, options)[0]


def _call_operator(
    arguments: tuple[Any, ...], is_causal: bool, options: dict[str, Any]
) -> tuple[Tensor, ...]:
    """Return the operator's outputs, of which the first two are output and log-sum-exp."""
    return gpu_flash_attention(
        *arguments, dropout_p=0.0, is_causal=is_causal, return_debug_mask=False, **options
    )


class _WithSinks(Function):
    """``by_operator`` with attention sinks; ``utils/sinks.py`` derives the backward pass."""

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        sinks: Tensor,
        bounds: tuple[Any, ...],
        is_causal: bool,
        options: dict[str, Any],
    ) -> Tensor:
        out, lse, *_ = _call_operator((query, key, value, *bounds), is_causal, options)
        # The kernel's log-sum-exp is [heads, n], and its backward pass wants it contiguous.
        lse = lse.contiguous()
        out = out.contiguous()
        join_sinks(out.transpose(0, 1), lse, sinks[:, None])
        ctx.save_for_backward(query, key, value, sinks, out, lse)
        ctx.call = bounds, is_causal, options
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        query, key, value, sinks, out, lse = ctx.saved_tensors
        (bounds, is_causal, options), grad = ctx.call, grads[0].contiguous()
        # seed of the kernel's dropout, which is off
        no_seed = torch.empty(2, dtype=torch.uint64, device=query.device)
        gradients = gpu_flash_attention_backward(
            grad, query, key, value, out, lse, *bounds, 0.0, is_causal, no_seed, no_seed, **options
        )
        by_head = grad.transpose(0, 1), out.transpose(0, 1)
        to_sinks = sink_gradients(*by_head, lse, sinks[:, None]).sum(1)
        return *gradients, to_sinks, None, None, None


def packed_arguments(
    query: Tensor, key: Tensor, value: Tensor, segments: PackedSegments, scores: Scores
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, int, int]:
    """Return the arguments that torch's function and operator and other packages have in common.

    All of them align the causal mask to the end of the keys, as shared and cached prefixes require.

    Returns:
        The queries, the keys and the values, prefixes included; the segments' bounds among queries
        and among keys; and upper bounds of the number of queries and of keys in a segment.
    """
    if segments.kv_index is None:
        if torch.is_grad_enabled():
            # Autograd saves this tensor. If it were a view, the whole output of linear_qkv would
            # stay in memory until the backward pass.
            value = value.contiguous()
    else:
        index, copies = segments.kv_index, segments.copies
        key, value = (copy_rows(rows, index, copies) for rows in (key, value))
    bounds = segments.cu_seqlens, segments.kv_cu_seqlens
    # Raise both upper bounds, because exact ones would let the pack select the kernel's algorithm:
    # with one query per sequence it splits the keys, and it drops a window as long as the keys.
    max_keys = max(segments.max_kv_length, 1 + (scores.window or 0))
    return query, key, value, *bounds, max(2, segments.max_length), max_keys


def window_of(scores: Scores) -> tuple[int, int]:
    """Return how many keys a query sees before its own position (-1 for all) and after it."""
    return (-1 if scores.window is None else scores.window - 1), 0
