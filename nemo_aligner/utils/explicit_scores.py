"""Attention with explicit scores, and with soft caps or sinks, in plain torch on any device."""

from __future__ import annotations

import torch
from torch import Tensor


def explicit_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor,
    scale: float | None,
    soft_cap: float | None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Compute attention of ``query [1, heads, n, c]`` to ``key`` and ``value [1, groups, m, c]``.

    It needs memory for all ``heads * n * m`` scores, in fp32 or a wider dtype.

    Args:
        mask: ``[n, m]`` bool, True where a query may attend to a key.
        scale: factor of the scores; None means ``c ** -0.5``.
        soft_cap: the scores become ``soft_cap * tanh(score / soft_cap)`` (Gemma Team 2024, "Gemma
            2"); None means no cap.
        sinks: logits that join the softmax, in a shape that broadcasts to
            ``[1, groups, heads / groups, n, 1]``; see ``utils/sinks.py``. None means no sinks.

    Returns:
        ``[1, heads, n, c]`` in the dtype of ``value``.
    """
    scale = query.size(-1) ** -0.5 if scale is None else scale
    # The query heads of a group are adjacent, so the group's keys broadcast over them without a
    # copy.
    grouped = query.unflatten(1, (key.size(1), -1))
    scores = torch.matmul(grouped, key.unsqueeze(2).transpose(-1, -2))
    scores = scores.to(torch.promote_types(scores.dtype, torch.float32)) * scale
    if soft_cap is not None:
        scores = soft_cap * torch.tanh(scores / soft_cap)
    scores = scores.masked_fill(~mask, float("-inf"))
    if sinks is None:
        weights = scores.softmax(-1)
    else:
        ends = sinks.to(scores.dtype).expand(*scores.shape[:-1], 1)
        weights = torch.cat([scores, ends], dim=-1).softmax(-1)[..., :-1]
    return torch.matmul(weights.to(value.dtype), value.unsqueeze(2)).flatten(1, 2)
