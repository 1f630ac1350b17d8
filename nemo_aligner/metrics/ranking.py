"""Metrics of pairs in float64: accuracy, calibration, correlation with length, intervals and
paired tests.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

# How well rewards order pairs, in float64: the same numbers at any layout and batch size.


@dataclass(frozen=True)
class PairRewards:
    """Rewards of N pairs, each there once; who calls metrics has gathered them all.

    Attributes:
        chosen, rejected: ``[N]`` float64.
        reply_lengths: ``[N, 2]`` integer tokens of the replies, chosen then rejected.
    """

    chosen: Tensor
    rejected: Tensor
    reply_lengths: Tensor

    @classmethod
    def of(cls, rewards: Tensor, reply_lengths: Tensor | None = None) -> PairRewards:
        """Of ``[N, 2]`` rewards, chosen then rejected, in any dtype and on any device."""
        chosen, rejected = rewards.double().cpu().unbind(dim=1)
        if reply_lengths is None:
            reply_lengths = torch.zeros(rewards.shape, dtype=torch.int64)
        return cls(chosen, rejected, reply_lengths.cpu())

    @property
    def margins(self) -> Tensor:
        """``[N]`` float64, chosen minus rejected."""
        return self.chosen - self.rejected

    @property
    def right(self) -> Tensor:
        """``[N]`` float64: 1 for a pair in order, one half for a tie, else 0."""
        return share_right(self.margins)


def share_right(margins: Tensor) -> Tensor:
    """``[N]`` float64: 1 for a positive margin, one half for none, else 0."""
    return (margins.sign().double() + 1) / 2


def accuracy(pairs: PairRewards) -> float:
    """The share of pairs in order; a tie counts one half."""
    return float(pairs.right.mean())


def ties(pairs: PairRewards) -> float:
    """The share of pairs with equal rewards."""
    return float((pairs.margins == 0).double().mean())


def mean_margin(pairs: PairRewards) -> float:
    """The mean of chosen minus rejected."""
    return float(pairs.margins.mean())


def chosen_mean(pairs: PairRewards) -> float:
    """The mean reward of the chosen replies."""
    return float(pairs.chosen.mean())


def chosen_std(pairs: PairRewards) -> float:
    """The deviation of the chosen replies' rewards."""
    return deviation(pairs.chosen)


def rejected_mean(pairs: PairRewards) -> float:
    """The mean reward of the rejected replies."""
    return float(pairs.rejected.mean())


def rejected_std(pairs: PairRewards) -> float:
    """The deviation of the rejected replies' rewards."""
    return deviation(pairs.rejected)


def margin_quantile(percent: int) -> Callable[[PairRewards], float]:
    """The metric that is the margin which ``percent`` of the pairs stay below."""

    def quantile(pairs: PairRewards) -> float:
        if len(pairs.margins) == 0:
            return math.nan
        # torch.quantile takes no more than 2^24.
        return float(np.quantile(pairs.margins.detach().numpy(), percent / 100))

    return quantile


# How far ``sigmoid(margin)`` is the probability that people prefer the chosen reply.

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


# How much the rewards of pairs go with the length of the replies.


def length_correlation(pairs: PairRewards) -> float:
    """Pearson's r of reward and length, over all replies."""
    rewards = torch.stack([pairs.chosen, pairs.rejected], dim=1)
    return correlation(rewards.flatten(), pairs.reply_lengths.double().flatten())


def accuracy_longer_chosen(pairs: PairRewards) -> float:
    """The accuracy where people chose the longer reply; NaN where they never did."""
    return float(pairs.right[_longer_by(pairs) > 0].mean())


def accuracy_shorter_chosen(pairs: PairRewards) -> float:
    """The accuracy where people chose the shorter reply; NaN where they never did."""
    return float(pairs.right[_longer_by(pairs) < 0].mean())


def longer_reply_accuracy(pairs: PairRewards) -> float:
    """The accuracy that taking the longer reply would have."""
    return float(share_right(_longer_by(pairs)).mean())


def _longer_by(pairs: PairRewards) -> Tensor:
    """``[N]`` tokens that the chosen reply has more."""
    return pairs.reply_lengths[:, 0] - pairs.reply_lengths[:, 1]


# How sure a share is, and whether two models differ on the same pairs.

# Of the standard normal distribution, for an interval of 95%.
_Z = 1.959963984540054
_DRAWS = 10_000


def wilson_interval(right: float, count: int) -> tuple[float, float]:
    """The 95% interval of a share of which ``right`` of ``count`` were seen (Wilson 1927).

    ``right`` may have halves. Of nothing it is from 0 to 1.
    """
    if count == 0:
        return 0.0, 1.0
    share, weight = right / count, _Z * _Z / count
    middle = (share + weight / 2) / (1 + weight)
    reach = math.sqrt(weight * (share * (1 - share) + weight / 4)) / (1 + weight)
    return max(0.0, middle - reach), min(1.0, middle + reach)


def mcnemar(lost: int, gained: int) -> float:
    """How likely verdicts turn at least so unevenly if neither model is better (McNemar 1947).

    Exact and two-sided: of ``lost + gained`` verdicts that turned, each way is as likely.
    """
    count, fewer = lost + gained, min(lost, gained)
    if count == 0:
        return 1.0
    chances = [
        math.lgamma(count + 1) - math.lgamma(k + 1) - math.lgamma(count - k + 1)
        for k in range(fewer + 1)
    ]
    tail = float(np.exp(np.array(chances) - count * math.log(2)).sum())
    return min(1.0, 2 * tail)


def bootstrap_interval(differences: np.ndarray, seed: int = 0) -> tuple[float, float]:
    """The 95% interval of the mean of ``[N]`` paired differences (Efron 1979, percentiles).

    10,000 draws of N pairs, the same ones for the same seed. Of nothing it is NaN.
    """
    if differences.size == 0:
        return math.nan, math.nan
    # As few values occur, their counts are drawn and not the pairs.
    values, counts = np.unique(differences, return_counts=True)
    random = np.random.RandomState(seed)
    drawn = random.multinomial(differences.size, counts / differences.size, size=_DRAWS)
    low, high = np.percentile(drawn @ values / differences.size, (2.5, 97.5))
    return float(low), float(high)


# Correlations and ranks that several metrics need; NaN where there is no value.


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
