"""Correlations and ranks that several metrics need; NaN where there is no value."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor


def correlation(first: Tensor, second: Tensor) -> float:
    """Pearson's r of two ``[N]``; NaN where one of them does not vary."""
    if first.numel() < 2:
        return float("nan")
    first, second = first - first.mean(), second - second.mean()
    scale = first.norm() * second.norm()
    return float(first @ second / scale) if scale > 0 else float("nan")


def deviation(values: Tensor) -> float:
    """The deviation of ``[N]`` from their mean; NaN where there are none."""
    # Of none, torch has the same answer and a warning.
    return float(values.std(correction=0)) if values.numel() else float("nan")


def ranks(values: Tensor) -> Tensor:
    """``[N]`` float64 ranks from 0; equal values get the mean of their ranks."""
    _, inverse, counts = values.unique(sorted=True, return_inverse=True, return_counts=True)
    last = counts.cumsum(0).double()
    return (last - (counts + 1) / 2.0)[inverse]


def nanmean(values: Iterable[float]) -> float:
    """The mean of those that are not NaN."""
    return float(torch.tensor(list(values), dtype=torch.float64).nanmean())
