"""Metrics of pairs in float64: accuracy, calibration, length bias, intervals and paired tests.

They are computed once, from all pairs of a set, so they do not depend on layout or batch size.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

# Accuracy and reward statistics.


@dataclass(frozen=True)
class PairRewards:
    """Rewards of N pairs, gathered from all ranks, each pair once.

    Attributes:
        chosen, rejected: ``[N]`` float64.
        reply_lengths: ``[N, 2]`` integer tokens of the replies, chosen then rejected.
    """

    chosen: Tensor
    rejected: Tensor
    reply_lengths: Tensor

    @classmethod
    def of(cls, rewards: Tensor, reply_lengths: Tensor | None = None) -> PairRewards:
        """Convert ``[N, 2]`` rewards, chosen then rejected, of any dtype and device."""
        chosen, rejected = rewards.double().cpu().unbind(dim=1)
        if reply_lengths is None:
            reply_lengths = torch.zeros(rewards.shape, dtype=torch.int64)
        return cls(chosen, rejected, reply_lengths.cpu())

    @property
    def margins(self) -> Tensor:
        """Chosen minus rejected, ``[N]`` float64."""
        return self.chosen - self.rejected

    @property
    def right(self) -> Tensor:
        """Credit of each pair, ``[N]`` float64: 1 in order, one half for a tie, else 0."""
        return share_right(self.margins)


def share_right(margins: Tensor) -> Tensor:
    """Credit of each margin, ``[N]`` float64: 1 if positive, one half if 0, else 0."""
    return (margins.sign().double() + 1) / 2


def accuracy(pairs: PairRewards) -> float:
    """Share of pairs in order; a tie counts one half."""
    return float(pairs.right.mean())


def ties(pairs: PairRewards) -> float:
    """Share of pairs with equal rewards."""
    return float((pairs.margins == 0).double().mean())


def mean_margin(pairs: PairRewards) -> float:
    """Mean of chosen minus rejected."""
    return float(pairs.margins.mean())


def chosen_mean(pairs: PairRewards) -> float:
    """Mean reward of the chosen replies."""
    return float(pairs.chosen.mean())


def chosen_std(pairs: PairRewards) -> float:
    """Standard deviation of the chosen replies' rewards."""
    return deviation(pairs.chosen)


def rejected_mean(pairs: PairRewards) -> float:
    """Mean reward of the rejected replies."""
    return float(pairs.rejected.mean())


def rejected_std(pairs: PairRewards) -> float:
    """Standard deviation of the rejected replies' rewards."""
    return deviation(pairs.rejected)


def margin_quantile(percent: int) -> Callable[[PairRewards], float]:
    """Make the metric of a percentile of the margins."""

    def quantile(pairs: PairRewards) -> float:
        if len(pairs.margins) == 0:
            return math.nan
        # torch.quantile refuses more than 2^24 elements.
        return float(np.quantile(pairs.margins.detach().numpy(), percent / 100))

    return quantile


# Calibration: ``sigmoid(margin)`` as the probability that people prefer the chosen reply.
#
# That is the Bradley-Terry model that the default loss trains, so it needs no fitting. A model
# trained with another objective may have margins of any scale: see its ``temperature`` first.

_BINS = 15
_PAIRS_PER_BIN = 10


@dataclass(frozen=True)
class ConfidenceBin:
    """Pairs of similar ``sigmoid(|margin|)``: their count, its mean, and the share in order."""

    count: int
    confidence: float
    right: float


def reliability(pairs: PairRewards) -> list[ConfidenceBin]:
    """Bin pairs by ``sigmoid(|margin|)``, the confidence of the verdict, in ascending order.

    15 bins of equal counts, or as many as get 10 pairs each (Nguyen and O'Connor 2015, "Posterior
    calibration and exploratory analysis for natural language processing models", sec. 3); none for
    no pairs. Bins of equal width would be almost empty where margins are large, and the error of
    such a bin is mostly noise.
    """
    # Confidence of the verdict, hence |margin|: from 0.5 (a tie) to 1, never below.
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
    """Mean gap between confidence and accuracy, over the bins of ``reliability``."""
    gaps = [abs(each.count * each.confidence - each.right) for each in reliability(pairs)]
    return sum(gaps) / max(1, len(pairs.margins))


def brier(pairs: PairRewards) -> float:
    """Mean of ``(1 - sigmoid(margin)) ** 2`` (Brier 1950); a coin has 0.25.

    The outcome is always 1, as the pair is written with its chosen reply first. Unlike the
    calibration error it also rewards discrimination.
    """
    return float(torch.sigmoid(-pairs.margins).square().mean())


def temperature(pairs: PairRewards) -> float:
    """Temperature fitted to the margins, see ``fit_temperature``."""
    return fit_temperature(pairs.margins)


def fit_temperature(margins: Tensor) -> float:
    """Find T that maximises the likelihood of ``sigmoid(margin / T)``; NaN if there is none.

    Above 1 the model is overconfident.

    Temperature scaling (Guo et al. 2017, "On calibration of modern neural networks", sec. 4.2) for
    pairs. There is no maximum if every pair is in order, or if the mean margin is not positive.

    Args:
        margins: ``[N]`` float64, reward of chosen minus reward of rejected.
    """
    if not bool((margins < 0).any()) or float(margins.mean()) <= 0:
        return math.nan
    # The likelihood is concave in b = 1/T: its slope falls from mean(margin)/2 > 0 to below 0.
    scale = float(margins.abs().max())
    low, high = 1e-9 / scale, 1e9 / scale
    # Bisection in log b: 120 halvings of 18 decades leave nothing to double precision.
    for _ in range(120):
        middle = math.sqrt(low * high)
        slope = float((margins * torch.sigmoid(-middle * margins)).sum())
        low, high = (middle, high) if slope > 0 else (low, middle)
    return 1 / math.sqrt(low * high)


# Length bias.


def length_correlation(pairs: PairRewards) -> float:
    """Pearson's r of reward and length, over all replies."""
    rewards = torch.stack([pairs.chosen, pairs.rejected], dim=1)
    return correlation(rewards.flatten(), pairs.reply_lengths.double().flatten())


def accuracy_longer_chosen(pairs: PairRewards) -> float:
    """Accuracy on pairs whose longer reply was chosen; NaN if there are none."""
    return float(pairs.right[_longer_by(pairs) > 0].mean())


def accuracy_shorter_chosen(pairs: PairRewards) -> float:
    """Accuracy on pairs whose shorter reply was chosen; NaN if there are none."""
    return float(pairs.right[_longer_by(pairs) < 0].mean())


def longer_reply_accuracy(pairs: PairRewards) -> float:
    """Accuracy of always preferring the longer reply."""
    return float(share_right(_longer_by(pairs)).mean())


def _longer_by(pairs: PairRewards) -> Tensor:
    """Length of the chosen reply minus the rejected one's, ``[N]`` tokens."""
    return pairs.reply_lengths[:, 0] - pairs.reply_lengths[:, 1]


# Uncertainty of a share, and comparison of two models on the same pairs.
#
# Intervals are over pairs, as independent draws: they say nothing of another training seed, and are
# too narrow if many pairs share a prompt.

# Quantile of the standard normal distribution for a 95% interval.
_Z = 1.959963984540054
_DRAWS = 10_000


def wilson_interval(right: float, count: int) -> tuple[float, float]:
    """Wilson's 95% interval (Wilson 1927) of a share, with ``right`` of ``count`` observed.

    Unlike the normal approximation it stays inside [0, 1] and is not empty at 0 or 1. ``right`` may
    have halves. For a count of 0 the interval is [0, 1].
    """
    if count == 0:
        return 0.0, 1.0
    share, weight = right / count, _Z * _Z / count
    middle = (share + weight / 2) / (1 + weight)
    reach = math.sqrt(weight * (share * (1 - share) + weight / 4)) / (1 + weight)
    return max(0.0, middle - reach), min(1.0, middle + reach)


def mcnemar(lost: int, gained: int) -> float:
    """McNemar's exact two-sided p-value (McNemar 1947) for two models' verdicts.

    Under the null hypothesis each of the ``lost + gained`` changed verdicts is a fair coin flip;
    verdicts that did not change say nothing. The binomial is exact because there are often few.
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
    """Bootstrap 95% interval of the mean of ``[N]`` paired differences (Efron 1979, percentiles).

    10,000 draws of N pairs, the same for the same seed. NaN if N is 0.
    """
    if differences.size == 0:
        return math.nan, math.nan
    # Differences of credits take few distinct values, and a resample's mean depends only on how
    # often each occurs: draw those counts, which are multinomial, not 10,000 times N pairs.
    values, counts = np.unique(differences, return_counts=True)
    random = np.random.RandomState(seed)
    drawn = random.multinomial(differences.size, counts / differences.size, size=_DRAWS)
    low, high = np.percentile(drawn @ values / differences.size, (2.5, 97.5))
    return float(low), float(high)


# Statistics shared by several metrics; NaN where they are undefined.


def correlation(first: Tensor, second: Tensor) -> float:
    """Pearson's r of two ``[N]``; NaN if one of them is constant."""
    if first.numel() < 2:
        return float("nan")
    first, second = first - first.mean(), second - second.mean()
    scale = first.norm() * second.norm()
    return float(first @ second / scale) if scale > 0 else float("nan")


def deviation(values: Tensor) -> float:
    """Population standard deviation of ``[N]``; NaN if N is 0."""
    # For N = 0 torch also gives NaN, but warns.
    return float(values.std(correction=0)) if values.numel() else float("nan")


def ranks(values: Tensor) -> Tensor:
    """Ranks ``[N]`` float64 from 0; equal values share the mean of their ranks."""
    _, inverse, counts = values.unique(sorted=True, return_inverse=True, return_counts=True)
    last = counts.cumsum(0).double()
    return (last - (counts + 1) / 2.0)[inverse]


def nanmean(values: Iterable[float]) -> float:
    """Mean of the values that are not NaN."""
    return float(torch.tensor(list(values), dtype=torch.float64).nanmean())
