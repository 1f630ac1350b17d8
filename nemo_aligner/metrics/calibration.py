"""How far ``sigmoid(margin)`` is the probability that people prefer the chosen reply."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from nemo_aligner.metrics.ranking import PairRewards

_BINS = 15
_PAIRS_PER_BIN = 10


def expected_calibration_error(pairs: PairRewards) -> float:
    """The gap of ``sigmoid(|margin|)``, as the confidence of the verdict, and its being right.

    Over 15 bins of equal numbers of pairs, or as many as get 10 pairs each (Nguyen and O'Connor
    2015, "Posterior calibration and exploratory analysis for natural language processing models",
    sec. 3).
    """
    confidence, order = torch.sigmoid(pairs.margins.abs()).sort(stable=True)
    right = pairs.right[order]
    number = min(_BINS, max(1, len(right) // _PAIRS_PER_BIN))
    bins = zip(confidence.tensor_split(number), right.tensor_split(number), strict=True)
    gaps = [abs(float((sure - true).sum())) for sure, true in bins]
    return sum(gaps) / max(1, len(right))


def brier(pairs: PairRewards) -> float:
    """The mean of ``(1 - sigmoid(margin)) ** 2`` (Brier 1950)."""
    return float(torch.sigmoid(-pairs.margins).square().mean())


def temperature(pairs: PairRewards) -> float:
    """``fit_temperature`` of the margins."""
    return fit_temperature(pairs.margins)


def fit_temperature(margins: Tensor) -> float:
    """The T for which ``sigmoid(margin / T)`` has the highest likelihood; NaN where none has.

    Temperature scaling (Guo et al. 2017, "On calibration of modern neural networks", sec. 4.2) for
    pairs. There is none when every pair is in order, or when the mean margin is not positive.

    Args:
        margins: ``[N]`` float64, reward of chosen minus reward of rejected.
    """
    if not bool((margins < 0).any()) or float(margins.mean()) <= 0:
        return math.nan
    # The slope of the likelihood in b = 1/T falls steadily from mean(margin)/2 > 0 to below 0.
    scale = float(margins.abs().max())
    low, high = 1e-9 / scale, 1e9 / scale
    for _ in range(120):
        middle = math.sqrt(low * high)
        slope = float((margins * torch.sigmoid(-middle * margins)).sum())
        low, high = (middle, high) if slope > 0 else (low, middle)
    return 1 / math.sqrt(low * high)
