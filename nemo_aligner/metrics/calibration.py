"""How far the margin of two rewards is a probability."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from nemo_aligner.metrics.statistics import ordered_right

_BINS = 15


_PAIRS_PER_BIN = 10


def calibration_metrics(margins: Tensor) -> dict[str, float]:
    """How far ``sigmoid(margin)`` is the probability that people prefer ``chosen``.

    Args:
        margins: ``[N]`` float64, reward of chosen minus reward of rejected.

    Returns:
        ``ece``, the expected calibration error of ``sigmoid(|margin|)`` as the confidence of the
        verdict, over 15 bins of equal numbers of pairs, or as many as get 10 pairs each (Nguyen and
        O'Connor 2015, "Posterior calibration and exploratory analysis for natural language
        processing models", sec. 3); ``brier``, the mean of
        ``(1 - sigmoid(margin)) ** 2`` (Brier 1950); ``temperature``, see ``fit_temperature``.
    """
    confidence, order = torch.sigmoid(margins.abs()).sort(stable=True)
    right = ordered_right(margins)[order]
    number = min(_BINS, max(1, len(margins) // _PAIRS_PER_BIN))
    bins = zip(confidence.tensor_split(number), right.tensor_split(number), strict=True)
    gaps = [abs(float((sure - true).sum())) for sure, true in bins]
    return {
        "ece": sum(gaps) / max(1, len(margins)),
        "brier": float(torch.sigmoid(-margins).square().mean()),
        "temperature": fit_temperature(margins),
    }


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
