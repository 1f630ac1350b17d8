"""Metrics of rated replies, turns and steps in float64, by attribute.

The metrics of ratings are correlations between rewards and labels. Where every turn or reasoning
step has a reward, further metrics compare the model's verdicts on steps with the labels.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from nemo_aligner.metrics.ranking import correlation, nanmean, ranks


@dataclass(frozen=True)
class RatedRewards:
    """Rewards and labels of N rated replies, gathered from all ranks; each reply occurs once.

    Attributes:
        rewards: ``[N, A]`` float64 on the CPU.
        labels: ``[N, A]`` float64, NaN where a label is missing.
        attributes: names of the A attributes, such as ``helpfulness``.
        reply_lengths: lengths of the replies in tokens, ``[N]`` integer.
        spreads: uncertainty of each reward as the model reports it, ``[N, A]`` float64; None if the
            model reports none.
    """

    rewards: Tensor
    labels: Tensor
    attributes: tuple[str, ...]
    reply_lengths: Tensor
    spreads: Tensor | None = None

    @classmethod
    def of(
        cls,
        rewards: Tensor,
        labels: Tensor,
        attributes: tuple[str, ...],
        reply_lengths: Tensor | None = None,
        spreads: Tensor | None = None,
    ) -> RatedRewards:
        """Build the table from tensors of any dtype and device.

        Without ``reply_lengths [N]`` all lengths are 0.
        """
        if reply_lengths is None:
            reply_lengths = torch.zeros(len(rewards), dtype=torch.int64)
        spreads = None if spreads is None else spreads.double().cpu()
        rewards, labels = rewards.double().cpu(), labels.double().cpu()
        return cls(rewards, labels, attributes, reply_lengths.cpu(), spreads)


def pearson(rated: RatedRewards) -> dict[str, float]:
    """Pearson's r between reward and label by attribute; NaN if one of the two is constant."""
    return _compare_with_labels(rated, rated.rewards, correlation)


def spearman(rated: RatedRewards) -> dict[str, float]:
    """Spearman's rank correlation between reward and label by attribute."""
    return _compare_with_labels(
        rated, rated.rewards, lambda rewards, labels: correlation(ranks(rewards), ranks(labels))
    )


def pearson_mean(rated: RatedRewards) -> float:
    """Mean of ``pearson`` over the attributes for which it is defined."""
    return nanmean(pearson(rated).values())


def spearman_mean(rated: RatedRewards) -> float:
    """Mean of ``spearman`` over the attributes for which it is defined."""
    return nanmean(spearman(rated).values())


def length_correlation_by_attribute(rated: RatedRewards) -> dict[str, float]:
    """Pearson's r between reward and length of the reply by attribute."""
    lengths = rated.reply_lengths.double()
    return {
        name: correlation(rated.rewards[:, column], lengths)
        for column, name in enumerate(rated.attributes)
    }


def length_only_pearson_mean(rated: RatedRewards) -> float:
    """Mean over attributes of |r|, where r is Pearson's r between label and reply length.

    This is the best ``pearson_mean`` of a model whose rewards are linear in the length of the
    reply: a baseline for length bias.
    """
    lengths = rated.reply_lengths.double()[:, None].expand_as(rated.rewards)
    correlations = _compare_with_labels(rated, lengths, correlation)
    return nanmean(abs(value) for value in correlations.values())


def spread(rated: RatedRewards) -> dict[str, float]:
    """Mean of the uncertainties that the model reports, by attribute; empty if it reports none."""
    if rated.spreads is None:
        return {}
    return dict(zip(rated.attributes, rated.spreads.mean(dim=0).tolist(), strict=True))


def spread_error_correlation(rated: RatedRewards) -> dict[str, float]:
    """Rank correlation between the reported uncertainty and ``|reward - label|`` by attribute.

    The correlation is high if the model is least certain where its rewards are most wrong.
    """
    if rated.spreads is None:
        return {}
    correlations = {}
    errors = (rated.rewards - rated.labels).abs()
    for column, name in enumerate(rated.attributes):
        present = ~torch.isnan(errors[:, column])
        spread_ranks = ranks(rated.spreads[present, column])
        correlations[name] = correlation(spread_ranks, ranks(errors[present, column]))
    return correlations


def _compare_with_labels(
    rated: RatedRewards, values: Tensor, compare: Callable[[Tensor, Tensor], float]
) -> dict[str, float]:
    """Compute ``compare(values, labels)`` for each attribute, over the labels that are present.

    ``values`` are ``[N, A]``. The result maps names of attributes to values.
    """
    results = {}
    for column, name in enumerate(rated.attributes):
        present = ~torch.isnan(rated.labels[:, column])
        results[name] = compare(values[present, column], rated.labels[present, column])
    return results


# Metrics of turns and steps: how many the model judges correctly, and where it sees the first
# error.

# A step is right if its label, from 0 to 1, is at least this.
_RIGHT_FROM_LABEL = 0.5
# ``calibration_by_position`` treats all steps from this number on as one position.
LAST_POSITION = 10


@dataclass(frozen=True)
class StepVerdicts:
    """The model's verdicts on all S steps of N samples, and the labels of these steps.

    Attributes:
        judged: ``[S, A]`` bool, True where the model judges the step right.
        probability: ``[S, A]`` float64, the model's probability that the step is right: the reward,
            or its sigmoid if rewards are log-odds.
        labels: ``[S, A]`` float64 from 0 (wrong) to 1 (right), NaN where a label is missing.
        right: ``[S, A]`` bool, True where the label says that the step is right.
        present: ``[S, A]`` bool, True where the step has a label.
        sizes: number of steps of each of the N samples; they add up to S.
        attributes: names of the A attributes.
    """

    judged: Tensor
    probability: Tensor
    labels: Tensor
    right: Tensor
    present: Tensor
    sizes: Sequence[int]
    attributes: tuple[str, ...]

    @classmethod
    def of(
        cls,
        rewards: Tensor,
        labels: Tensor,
        sizes: Sequence[int],
        attributes: tuple[str, ...],
        right_from: float,
    ) -> StepVerdicts | None:
        """Judge every step by its reward; None if the labels are not verdicts from 0 to 1.

        Args:
            rewards: ``[S, A]``, any dtype and device.
            labels: ``[S, A]``, NaN where a label is missing.
            right_from: a step with this reward or a higher one is judged right. If it is 0, rewards
                are taken as log-odds.
        """
        rewards, labels = rewards.double().cpu(), labels.double().cpu()
        present = ~torch.isnan(labels)
        if bool(((labels < 0) | (labels > 1)).any()):
            return None
        judged = rewards >= right_from
        right = labels >= _RIGHT_FROM_LABEL
        probability = rewards.sigmoid() if right_from == 0 else rewards
        return cls(judged, probability, labels, right, present, sizes, attributes)


def step_accuracy(verdicts: StepVerdicts) -> float:
    """Fraction of labelled steps whose verdict agrees with the label, averaged over attributes."""
    agree = verdicts.judged == verdicts.right
    columns = zip(agree.unbind(1), verdicts.present.unbind(1), strict=True)
    return nanmean(float(column[present].double().mean()) for column, present in columns)


def first_error_accuracy(verdicts: StepVerdicts) -> float:
    """Fraction of samples in which the model finds the first wrong step, averaged over attributes.

    The model finds it if the first step that it judges wrong is the first step labelled wrong, or
    if it judges no step wrong and none is labelled wrong. A sample counts only if all its steps up
    to the first one labelled wrong have labels.
    """
    return nanmean(
        _share_equal(_find_first_errors(verdicts, column)) for column in _columns(verdicts)
    )


def first_error_f1(verdicts: StepVerdicts) -> float:
    """Harmonic mean of ``first_error_accuracy`` on samples with an error and on those without.

    This is the F1 of ProcessBench (Zheng et al. 2024, arXiv:2412.06559, section 4), averaged over
    attributes.
    """
    scores = []
    for column in _columns(verdicts):
        pairs = _find_first_errors(verdicts, column)
        with_error = _share_equal([pair for pair in pairs if pair[1] >= 0])
        without_error = _share_equal([pair for pair in pairs if pair[1] < 0])
        scores.append(harmonic_mean(with_error, without_error))
    return nanmean(scores)


def calibration_by_position(verdicts: StepVerdicts) -> dict[str, float]:
    """Compare probabilities with labels at each position: first step, second step, and so on.

    The figures of position ``<n>`` are over all samples: ``<n>/labels`` is the number of labelled
    steps, ``<n>/label`` the mean label, ``<n>/probability`` the mean probability of "right", and
    ``<n>/accuracy`` the fraction whose verdict agrees with the label. A calibrated model has equal
    means of label and probability. Position 10 has all steps from the tenth on.
    """
    positions = torch.cat([torch.arange(1, size + 1) for size in verdicts.sizes])
    agree = (verdicts.judged == verdicts.right).double()
    figures: dict[str, float] = {}
    for position in range(1, LAST_POSITION + 1):
        is_here = positions >= position if position == LAST_POSITION else positions == position
        labelled = verdicts.present & is_here[:, None]
        if labelled.any():
            figures |= {
                f"{position}/labels": float(labelled.sum()),
                f"{position}/label": float(verdicts.labels[labelled].mean()),
                f"{position}/probability": float(verdicts.probability[labelled].mean()),
                f"{position}/accuracy": float(agree[labelled].mean()),
            }
    return figures


def harmonic_mean(first: float, second: float) -> float:
    """Compute the harmonic mean; 0 if both values are 0, NaN if either is NaN."""
    total = first + second
    return 2 * first * second / total if total else total


def _columns(verdicts: StepVerdicts) -> range:
    return range(len(verdicts.attributes))


def _share_equal(pairs: Sequence[tuple[int, int]]) -> float:
    if not pairs:
        return float("nan")
    return sum(predicted == labelled for predicted, labelled in pairs) / len(pairs)


def _find_first_errors(verdicts: StepVerdicts, column: int) -> list[tuple[int, int]]:
    """Find, for each sample, the first step judged wrong and the first step labelled wrong.

    Steps are numbered from 0, and -1 means that no step is wrong. Samples with a missing label
    before the first step labelled wrong are left out.
    """
    pairs = []
    columns = (
        tensor[:, column].split(list(verdicts.sizes))
        for tensor in (verdicts.judged, verdicts.right, verdicts.present)
    )
    for judged, right, present in zip(*columns, strict=True):
        labelled_error = first_error((right | ~present).tolist())
        decisive = present if labelled_error < 0 else present[: labelled_error + 1]
        if bool(decisive.all()):
            pairs.append((first_error(judged.tolist()), labelled_error))
    return pairs


def first_error(right: Sequence[bool]) -> int:
    """Find the first step that is not right, counted from 0; -1 if all steps are right."""
    return next((number for number, is_right in enumerate(right) if not is_right), -1)
