"""How far ``sigmoid(margin)`` is the probability that people prefer the chosen reply."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from nemo_aligner.metrics.ranking import PairRewards

_BINS = 15
_PAIRS_PER_BIN = 10


@dataclass(frozen=True)
class ConfidenceBin:
    """Pairs of about the same ``sigmoid(|margin|)``: how many, its mean, and how many are right."""

    count: int
    confidence: float
    right: float


def reliability(pairs: PairRewards) -> list[ConfidenceBin]:
    """Pairs by ``sigmoid(|margin|)``, the confidence of the verdict, the least sure first.

    15 bins of equal numbers of pairs, or as many as get 10 pairs each (Nguyen and O'Connor 2015,
    "Posterior calibration and exploratory analysis for natural language processing models",
    sec. 3); of no pairs none.
    """
    confidence, order = torch.sigmoid(pairs.margins.abs()).sort(stable=True)
    right = pairs.right[order]
    number = min(_BINS, max(1, len(right) // _PAIRS_PER_BIN))
    bins = zip(confidence.tensor_split(number), right.tensor_split(number), strict=True)
    return [
        ConfidenceBin(len(sure), float(sure.mean()), float(true.sum()))
        for sure, true in bins
        if len(sure)
    ]


def expected_calibration_error(pairs: PairRewards) -> float:
    """The gap of the verdict's confidence and its being right, over the bins of ``reliability``."""
    gaps = [abs(each.count * each.confidence - each.right) for each in reliability(pairs)]
    return sum(gaps) / max(1, len(pairs.margins))


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
