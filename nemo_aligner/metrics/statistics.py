"""Correlations and ranks that several metrics need."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor


def ordered_right(margins: Tensor) -> Tensor:
    """1 for a positive margin, one half for none, else 0."""
    return (margins.sign().double() + 1) / 2


def correlation(first: Tensor, second: Tensor) -> float:
    if first.numel() < 2:
        return float("nan")
    first, second = first - first.mean(), second - second.mean()
    scale = first.norm() * second.norm()
    return float(first @ second / scale) if scale > 0 else float("nan")


def ranks(values: Tensor) -> Tensor:
    """Ranks from 0; equal values share the mean of their ranks."""
    _, inverse, counts = values.unique(sorted=True, return_inverse=True, return_counts=True)
    last = counts.cumsum(0).double()
    return (last - (counts + 1) / 2.0)[inverse]


def nanmean(values: Iterable[float]) -> float:
    return float(torch.tensor(list(values), dtype=torch.float64).nanmean())
