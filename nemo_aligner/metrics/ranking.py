"""Metrics of preference pairs, and the statistics that several metrics share.

Accuracy, reward statistics, calibration, length bias, confidence intervals and paired tests, all in
float64. Each metric is computed once, from all pairs of a data set on all ranks, so its value does
not depend on the parallel layout or on the batch size.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

# Metrics of pairs: accuracy, and statistics of rewards and margins.


@dataclass(frozen=True)
class PairRewards:
    """Rewards of N pairs, gathered from all ranks; each pair occurs once.

    Attributes:
        chosen, rejected: rewards of the two replies, ``[N]`` float64 on the CPU.
        reply_lengths: lengths of the chosen and the rejected reply in tokens, ``[N, 2]`` integer.
        teacher_margins: a teacher's reward of the chosen reply minus that of the rejected one,
            ``[N]`` float64, NaN for a pair without soft labels; None if there are none at all.
    """

    chosen: Tensor
    rejected: Tensor
    reply_lengths: Tensor
    teacher_margins: Tensor | None = None

    @classmethod
    def of(
        cls,
        rewards: Tensor,
        reply_lengths: Tensor | None = None,
        teacher_rewards: Tensor | None = None,
    ) -> PairRewards:
        """Build the pairs from ``rewards [N, 2]`` (chosen, rejected) of any dtype and device.

        Without ``reply_lengths [N, 2]`` all lengths are 0. ``teacher_rewards`` are ``[N, 2]``.
        """
        chosen, rejected = rewards.double().cpu().unbind(dim=1)
        if reply_lengths is None:
            reply_lengths = torch.zeros(rewards.shape, dtype=torch.int64)
        margins = None
        if teacher_rewards is not None:
            better, worse = teacher_rewards.double().cpu().unbind(dim=1)
            margins = better - worse
        return cls(chosen, rejected, reply_lengths.cpu(), margins)

    @property
    def margins(self) -> Tensor:
        """Reward of the chosen reply minus that of the rejected one, ``[N]`` float64."""
        return self.chosen - self.rejected

    @property
    def right(self) -> Tensor:
        """Contribution of each pair to the number of correct ones, ``[N]`` float64.

        It is 1 if the chosen reply has the higher reward, 0.5 for a tie, else 0.
        """
        return share_right(self.margins)


def share_right(margins: Tensor) -> Tensor:
    """Compute each pair's contribution to the number of correct ones, from ``margins [N]``.

    Returns:
        ``[N]`` float64: 1 if the margin is positive, 0.5 if it is 0 (a tie), else 0.
    """
    return (margins.sign().double() + 1) / 2


def accuracy(pairs: PairRewards) -> float:
    """Fraction of pairs whose chosen reply has the higher reward; a tie counts one half."""
    return float(pairs.right.mean())


def ties(pairs: PairRewards) -> float:
    """Fraction of pairs whose two rewards are equal."""
    return float((pairs.margins == 0).double().mean())


def mean_margin(pairs: PairRewards) -> float:
    """Mean margin: the reward of the chosen reply minus that of the rejected one."""
    return float(pairs.margins.mean())


def chosen_mean(pairs: PairRewards) -> float:
    """Mean reward of the chosen replies."""
    return float(pairs.chosen.mean())


def chosen_std(pairs: PairRewards) -> float:
    """Population standard deviation of the chosen replies' rewards."""
    return deviation(pairs.chosen)


def rejected_mean(pairs: PairRewards) -> float:
    """Mean reward of the rejected replies."""
    return float(pairs.rejected.mean())


def rejected_std(pairs: PairRewards) -> float:
    """Population standard deviation of the rejected replies' rewards."""
    return deviation(pairs.rejected)


def margin_quantile(percent: int) -> Callable[[PairRewards], float]:
    """Build the metric that computes the ``percent``-th percentile of the margins."""

    def quantile(pairs: PairRewards) -> float:
        if len(pairs.margins) == 0:
            return math.nan
        # Use numpy, because torch.quantile raises for more than 2^24 elements.
        return float(np.quantile(pairs.margins.detach().numpy(), percent / 100))

    return quantile


# Calibration: ``sigmoid(margin)`` is read as the probability that people prefer the chosen reply.
#
# This is the Bradley-Terry model, which the default loss trains, so such a model needs no fitted
# scale. The margins of a model with another objective may have any scale: look at its
# ``temperature`` before its calibration error.

_BINS = 15
_PAIRS_PER_BIN = 10


@dataclass(frozen=True)
class ConfidenceBin:
    """A bin of pairs with similar confidence, for a reliability diagram.

    Attributes:
        count: number of pairs in the bin.
        confidence: mean ``sigmoid(|margin|)`` of these pairs.
        right: sum over the pairs of 1 if the model is right, 0.5 for a tie, and 0 if it is wrong;
            ``right / count`` is the accuracy of the bin.
    """

    count: int
    confidence: float
    right: float


def reliability(pairs: PairRewards) -> list[ConfidenceBin]:
    """Bin pairs by confidence, ``sigmoid(|margin|)``; the bins are in ascending order.

    There are 15 bins of equal counts, or fewer, so that each has at least 10 pairs (Nguyen and
    O'Connor 2015, "Posterior calibration and exploratory analysis for natural language processing
    models", sec. 3). Without pairs the list is empty. Bins of equal width would be almost empty
    where margins are large, and the error of such a bin is mostly noise.
    """
    # The confidence in the model's verdict is the sigmoid of |margin|: from 0.5 for a tie up to 1.
    confidence, order = torch.sigmoid(pairs.margins.abs()).sort(stable=True)
    right = pairs.right[order]
    number = min(_BINS, max(1, len(right) // _PAIRS_PER_BIN))
    bins = zip(confidence.tensor_split(number), right.tensor_split(number), strict=True)
    return [
        ConfidenceBin(len(confidences), float(confidences.mean()), float(credits.sum()))
        for confidences, credits in bins
        if len(confidences)
    ]


def expected_calibration_error(pairs: PairRewards) -> float:
    """Mean gap between confidence and accuracy over the bins of ``reliability``; 0 if no pairs."""
    gaps = [abs(bin.count * bin.confidence - bin.right) for bin in reliability(pairs)]
    return sum(gaps) / max(1, len(pairs.margins))


def brier(pairs: PairRewards) -> float:
    """Mean of ``(1 - sigmoid(margin)) ** 2`` (Brier 1950); random guessing gives 0.25.

    The outcome in Brier's formula is always 1, because the chosen reply comes first in a pair.
    Unlike the calibration error, this score also improves if the model separates pairs better.
    """
    return float(torch.sigmoid(-pairs.margins).square().mean())


def temperature(pairs: PairRewards) -> float:
    """Temperature that fits the margins best; above 1 if the model is overconfident.

    Margins divided by it give the best probabilities (``fit_temperature``).
    """
    return fit_temperature(pairs.margins)


def fit_temperature(margins: Tensor) -> float:
    """Find the T that maximises the likelihood of ``sigmoid(margin / T)``; NaN if no T does.

    The model is overconfident if T is above 1.

    This is temperature scaling (Guo et al. 2017, "On calibration of modern neural networks", sec.
    4.2) for pairs. The likelihood has no maximum if no margin is negative, or if the mean margin is
    not positive.

    Args:
        margins: ``[N]`` float64, reward of the chosen reply minus that of the rejected one.
    """
    if not bool((margins < 0).any()) or float(margins.mean()) <= 0:
        return math.nan
    # The log-likelihood is concave in b = 1/T, and its slope falls from mean(margin)/2 > 0 at b = 0
    # to a negative value, so bisection of the slope finds the maximum.
    scale = float(margins.abs().max())
    low, high = 1e-9 / scale, 1e9 / scale
    # Bisect in log b: 120 halvings of 18 decades reach the precision of a double.
    for _ in range(120):
        middle = math.sqrt(low * high)
        slope = float((margins * torch.sigmoid(-middle * margins)).sum())
        low, high = (middle, high) if slope > 0 else (low, middle)
    return 1 / math.sqrt(low * high)


# Metrics of length bias: how much rewards and people's choices depend on the length of a reply.


def length_correlation(pairs: PairRewards) -> float:
    """Pearson's r between reward and length, over all replies, chosen and rejected."""
    rewards = torch.stack([pairs.chosen, pairs.rejected], dim=1)
    return correlation(rewards.flatten(), pairs.reply_lengths.double().flatten())


def accuracy_longer_chosen(pairs: PairRewards) -> float:
    """Accuracy on the pairs in which people chose the longer reply; NaN if there are none."""
    return float(pairs.right[_length_differences(pairs) > 0].mean())


def accuracy_shorter_chosen(pairs: PairRewards) -> float:
    """Accuracy on the pairs in which people chose the shorter reply; NaN if there are none."""
    return float(pairs.right[_length_differences(pairs) < 0].mean())


def longer_reply_accuracy(pairs: PairRewards) -> float:
    """Accuracy of a baseline that always prefers the longer reply; equal lengths count one half."""
    return float(share_right(_length_differences(pairs)).mean())


def _length_differences(pairs: PairRewards) -> Tensor:
    """Length of the chosen reply minus that of the rejected one in tokens, ``[N]`` integer."""
    return pairs.reply_lengths[:, 0] - pairs.reply_lengths[:, 1]


# Metrics of students: how much the model agrees with the teacher whose rewards are soft labels.


def teacher_agreement(pairs: PairRewards) -> float:
    """Fraction of pairs where model and teacher prefer the same reply; NaN without soft labels.

    A pair counts one half if only one of them gives both replies the same reward.
    """
    margins, teacher_margins = _margins_with_teacher(pairs)
    return float((1 - (margins.sign() - teacher_margins.sign()).abs() / 2).mean())


def teacher_probability_gap(pairs: PairRewards) -> float:
    """Mean distance of the model's ``sigmoid(margin)`` to the teacher's; NaN without soft labels.

    The sigmoid of the teacher's margin is its probability that the chosen reply is better.
    """
    margins, teacher_margins = _margins_with_teacher(pairs)
    return float((torch.sigmoid(margins) - torch.sigmoid(teacher_margins)).abs().mean())


def _margins_with_teacher(pairs: PairRewards) -> tuple[Tensor, Tensor]:
    """Select the margins of the model and of the teacher where there are soft labels."""
    teacher_margins = pairs.teacher_margins
    if teacher_margins is None:
        teacher_margins = torch.full_like(pairs.chosen, math.nan)
    is_soft = ~teacher_margins.isnan()
    return pairs.margins[is_soft], teacher_margins[is_soft]


# Uncertainty of a fraction, and the comparison of two models on the same pairs.
#
# The intervals treat pairs as independent draws. They do not cover the variation between training
# seeds, and they are too narrow if many pairs share a prompt.

# The 97.5% quantile of the standard normal distribution, for a two-sided 95% interval.
_NORMAL_QUANTILE = 1.959963984540054
_BOOTSTRAP_DRAWS = 10_000
# The most random numbers that a bootstrap holds at once, and the most distinct values for which it
# draws counts.
_NUMBERS_AT_ONCE = 2**20
_MOST_COUNTED = 1000


def wilson_interval(right: float, count: int) -> tuple[float, float]:
    """Compute Wilson's 95% interval (Wilson 1927) of the fraction ``right / count``: (low, high).

    Unlike the normal approximation it stays inside [0, 1], and it has a positive width at 0 and 1.
    ``right`` need not be an integer, because ties count one half. If ``count`` is 0, the interval
    is [0, 1].
    """
    if count == 0:
        return 0.0, 1.0
    share, weight = right / count, _NORMAL_QUANTILE * _NORMAL_QUANTILE / count
    center = (share + weight / 2) / (1 + weight)
    half_width = math.sqrt(weight * (share * (1 - share) + weight / 4)) / (1 + weight)
    return max(0.0, center - half_width), min(1.0, center + half_width)


def mcnemar(lost: int, gained: int) -> float:
    """Compute McNemar's exact two-sided p-value (McNemar 1947) for the verdicts of two models.

    Under the null hypothesis each of the ``lost + gained`` differing verdicts is a fair coin flip;
    equal verdicts carry no information. The binomial tail is exact, not a chi-square approximation,
    because there are often few differing verdicts.

    Args:
        lost: pairs that only the first model orders correctly.
        gained: pairs that only the second model orders correctly.
    """
    count, fewer = lost + gained, min(lost, gained)
    if count == 0:
        return 1.0
    log_binomials = [
        math.lgamma(count + 1) - math.lgamma(k + 1) - math.lgamma(count - k + 1)
        for k in range(fewer + 1)
    ]
    tail = float(np.exp(np.array(log_binomials) - count * math.log(2)).sum())
    return min(1.0, 2 * tail)


def bootstrap_interval(differences: np.ndarray, seed: int = 0) -> tuple[float, float]:
    """Compute the bootstrap 95% interval of a mean (Efron 1979, percentile method): (low, high).

    It takes 10,000 resamples, which are the same for the same seed. The interval is NaN if N is 0.

    Args:
        differences: the values whose mean is wanted, ``[N]`` float64, such as paired differences.
    """
    if differences.size == 0:
        return math.nan, math.nan
    # The differences between the verdicts of two models (0, 0.5 or 1) have few distinct values, and
    # the mean of a resample depends only on how often each value occurs. Draw these counts, which
    # are multinomial: this is much cheaper than drawing N pairs 10,000 times, unless there are many
    # distinct values.
    size, random = differences.size, np.random.RandomState(seed)
    values, counts = np.unique(differences, return_counts=True)
    are_counted = values.size <= _MOST_COUNTED

    def draw_means(draws: int) -> np.ndarray:
        if are_counted:
            return random.multinomial(size, counts / size, size=draws) @ values / size
        rows = random.randint(size, size=(draws, size), dtype=np.int32)
        return differences[rows].mean(axis=1)

    # Draw in blocks, so that memory is bounded. The result equals that of a single block.
    at_once = max(1, _NUMBERS_AT_ONCE // (values.size if are_counted else size))
    starts = range(0, _BOOTSTRAP_DRAWS, at_once)
    means = [draw_means(min(at_once, _BOOTSTRAP_DRAWS - start)) for start in starts]
    low, high = np.percentile(np.concatenate(means), (2.5, 97.5))
    return float(low), float(high)


def paired_interval(differences: np.ndarray) -> tuple[float, float]:
    """Compute the 95% interval of the mean difference between two models' verdicts: (low, high).

    It is the adjusted Wald interval of Bonett and Price (2012, Statistics in Medicine 31(22)): one
    difference of +1 and one of -1 are added. Unlike that of a bootstrap, its width is not zero if
    there is one pair, or if the verdicts are equal on all pairs. The interval is NaN if N is 0.

    Args:
        differences: for each pair the second verdict minus the first, ``[N]`` float64 from -1 to 1.
    """
    if differences.size == 0:
        return math.nan, math.nan
    adjusted = np.append(differences, (1.0, -1.0))
    margin = _NORMAL_QUANTILE * adjusted.std() / math.sqrt(adjusted.size)
    return max(-1.0, adjusted.mean() - margin), min(1.0, adjusted.mean() + margin)


# Statistics that several metrics share. They are NaN where they are undefined.


def correlation(first: Tensor, second: Tensor) -> float:
    """Compute Pearson's r of two tensors ``[N]``; NaN if one is constant, or if N is below 2."""
    # Compare the values: the mean of equal values may be rounded, so that none of them equals it.
    if first.numel() < 2 or any(bool((values == values[0]).all()) for values in (first, second)):
        return float("nan")
    first, second = first - first.mean(), second - second.mean()
    scale = first.norm() * second.norm()
    return float(first @ second / scale) if scale > 0 else float("nan")


def deviation(values: Tensor) -> float:
    """Compute the population standard deviation of ``values [N]``; NaN if N is 0."""
    # Return NaN without calling torch if N is 0, because torch would warn.
    return float(values.std(correction=0)) if values.numel() else float("nan")


def ranks(values: Tensor) -> Tensor:
    """Compute the ranks of ``values [N]``, from 0, as ``[N]`` float64; ties get their mean rank."""
    _, inverse, counts = values.unique(sorted=True, return_inverse=True, return_counts=True)
    last = counts.cumsum(0).double()
    return (last - (counts + 1) / 2.0)[inverse]


def nanmean(values: Iterable[float]) -> float:
    """Compute the mean of the values that are not NaN; NaN if there are none."""
    return float(torch.tensor(list(values), dtype=torch.float64).nanmean())
