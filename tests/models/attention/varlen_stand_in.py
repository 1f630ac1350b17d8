"""A stand-in on a CPU for the GPU's variable-length kernel, behind each signature that it has."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from nemo_aligner.config.kernels import AttentionChoice
from nemo_aligner.models.attention import flash_packages, varlen


def attend_by_bounds(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    query_bounds: Tensor,
    key_bounds: Tensor,
    max_queries: int,
    max_keys: int,
    *,
    scale: float | None,
    window: tuple[int, int],
    soft_cap: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """Attend sequence by sequence as FlashAttention 2 does: the last query is at the last key.

    ``window`` counts the visible keys before a query's own position, -1 for all, and after it. The
    second result is the log-sum-exp ``[heads, n]``.
    """
    assert window[1] == 0
    key, value = (x.repeat_interleave(query.size(1) // x.size(1), dim=1) for x in (key, value))
    outputs, sums = [], []
    bounds = zip(pairwise(query_bounds.tolist()), pairwise(key_bounds.tolist()), strict=True)
    for (start, end), (first, last) in bounds:
        queries, keys = end - start, last - first
        assert queries <= max_queries
        assert keys <= max_keys
        products = torch.einsum("qhc,khc->hqk", query[start:end], key[first:last])
        products = products * (scale or query.size(-1) ** -0.5)
        if soft_cap:
            products = soft_cap * torch.tanh(products / soft_cap)
        behind = torch.arange(keys - queries, keys)[:, None] - torch.arange(keys)
        hidden = (behind < 0) | ((behind > window[0]) & (window[0] >= 0))
        products = products.masked_fill(hidden, -torch.inf)
        weights = products.softmax(-1)
        sums.append(products.logsumexp(-1))
        outputs.append(torch.einsum("hqk,khc->qhc", weights, value[first:last]))
    return torch.cat(outputs), torch.cat(sums, dim=1)


def _operator(
    *arguments: Any,
    dropout_p: float,
    is_causal: bool,
    return_debug_mask: bool,
    scale: float | None,
    window_size_left: int = -1,
    window_size_right: int | None = None,
) -> tuple[Tensor, Tensor]:
    # A window's right side is what makes it causal.
    assert is_causal == (window_size_right is None)
    return attend_by_bounds(*arguments, scale=scale, window=(window_size_left, 0))


def _operator_backward(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    query_bounds: Tensor,
    key_bounds: Tensor,
    max_queries: int,
    max_keys: int,
    dropout_p: float,
    is_causal: bool,
    *seeds: Tensor,
    scale: float | None,
    window_size_left: int = -1,
    window_size_right: int | None = None,
) -> list[Tensor]:
    """Compute gradients by the ``lse [heads, n]`` that it gets, like the kernel."""
    assert is_causal == (window_size_right is None)
    assert lse.is_contiguous()
    leaves = [x.detach().clone().requires_grad_() for x in (query, key, value)]
    with torch.enable_grad():
        arguments = *leaves, query_bounds, key_bounds, max_queries, max_keys
        plain, sums = attend_by_bounds(*arguments, scale=scale, window=(window_size_left, 0))
        # The kernel computes P = exp(score - lse) and dscore = P * (dP - grad . out). Here the
        # plain weights are P / factor, and their own dscore subtracts grad . plain instead.
        factor = torch.exp(sums.detach() - lse)
        delta = (grad * out).sum(-1).t()
        surplus = ((grad * plain).sum(-1).t() - delta) * factor
        to_plain = grad * factor.t()[..., None]
        loss = (plain * to_plain).sum() + (sums * surplus.detach()).sum()
        return list(torch.autograd.grad(loss, leaves))


def _varlen_attn(
    *arguments: Any, scale: float | None, window_size: tuple[int, int], enable_gqa: bool
) -> Tensor:
    assert enable_gqa == (arguments[0].size(1) != arguments[1].size(1))
    return attend_by_bounds(*arguments, scale=scale, window=window_size)[0]


def flash_attn_varlen_func(
    *arguments: Any,
    softmax_scale: float | None,
    causal: bool,
    window_size: tuple[int, int],
    softcap: float,
) -> Tensor:
    assert causal
    options = {"scale": softmax_scale, "window": window_size, "soft_cap": softcap}
    return attend_by_bounds(*arguments, **options)[0]


def flash_attn_3_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    num_splits: int = 1,
) -> Tensor:
    """Compute with the signature that FlashAttention 3 has since it no longer returns sums."""
    assert causal
    assert num_splits == 1
    bounds = cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k
    options = {"scale": softmax_scale, "window": (window_size[0], 0), "soft_cap": softcap}
    return attend_by_bounds(q, k, v, *bounds, **options)[0]


def flash_attn_4_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    qv: Tensor | None = None,
    *,
    window_size: tuple[int | None, int | None] = (None, None),
    learnable_sink: Tensor | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Compute with the signature of flash-attn-4, whose fourth tensor is another than in others."""
    assert qv is None
    assert window_size == (None, None) or (window_size[0] or 0) >= 0
    before = -1 if window_size[0] is None else window_size[0]
    attended = flash_attn_3_varlen_func(q, k, v, window_size=(before, 0), **options)
    if learnable_sink is not None:
        named = {name: options[name] for name in ("cu_seqlens_q", "cu_seqlens_k")}
        bounds = *named.values(), options["max_seqlen_q"], options["max_seqlen_k"]
        scoring = {"scale": options["softmax_scale"], "window": (before, 0)}
        sums = attend_by_bounds(q, k, v, *bounds, soft_cap=options["softcap"], **scoring)[1]
        attended = attended * torch.sigmoid(sums - learnable_sink[:, None]).t()[..., None]
    return attended, None


def use_stand_ins(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have all varlen backends call the stand-in."""
    monkeypatch.setattr(varlen, "gpu_flash_attention", _operator)
    monkeypatch.setattr(varlen, "gpu_flash_attention_backward", _operator_backward)
    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", _varlen_attn)
    monkeypatch.setattr(flash_packages, "_flash_attn", lambda: flash_attn_varlen_func)
    newer = {
        AttentionChoice.flash_attn_3: flash_attn_3_varlen_func,
        AttentionChoice.flash_attn_4: flash_attn_4_varlen_func,
    }
    monkeypatch.setattr(flash_packages, "load_function", newer.__getitem__)
