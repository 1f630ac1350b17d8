"""A stand-in on a CPU for the GPU's variable-length kernel, behind each signature that it has."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from nemo_aligner.models.attention import varlen


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
) -> Tensor:
    """Attend sequence by sequence as FlashAttention 2 does: the last query is at the last key.

    ``window`` counts the visible keys before a query's own position, -1 for all, and after it.
    """
    assert window[1] == 0
    key, value = (x.repeat_interleave(query.size(1) // x.size(1), dim=1) for x in (key, value))
    outputs = []
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
        weights = products.masked_fill(hidden, -torch.inf).softmax(-1)
        outputs.append(torch.einsum("hqk,khc->qhc", weights, value[first:last]))
    return torch.cat(outputs)


def _operator(
    *arguments: Any,
    dropout_p: float,
    is_causal: bool,
    return_debug_mask: bool,
    scale: float | None,
    window_size_left: int = -1,
    window_size_right: int | None = None,
) -> tuple[Tensor]:
    # A window's right side is what makes it causal.
    assert is_causal == (window_size_right is None)
    return (attend_by_bounds(*arguments, scale=scale, window=(window_size_left, 0)),)


def _varlen_attn(
    *arguments: Any, scale: float | None, window_size: tuple[int, int], enable_gqa: bool
) -> Tensor:
    assert enable_gqa == (arguments[0].size(1) != arguments[1].size(1))
    return attend_by_bounds(*arguments, scale=scale, window=window_size)


def flash_attn_varlen_func(
    *arguments: Any,
    softmax_scale: float | None,
    causal: bool,
    window_size: tuple[int, int],
    softcap: float,
) -> Tensor:
    assert causal
    return attend_by_bounds(*arguments, scale=softmax_scale, window=window_size, soft_cap=softcap)


def use_stand_ins(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the three varlen backends call the stand-in."""
    monkeypatch.setattr(varlen, "gpu_flash_attention", _operator)
    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", _varlen_attn)
    monkeypatch.setattr(varlen, "_flash_attn", lambda: flash_attn_varlen_func)
