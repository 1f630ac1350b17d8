"""Metrics of ratings in float64: correlations with labels, and verdicts on turns and steps."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from nemo_aligner.metrics.ranking import correlation, nanmean, ranks


@dataclass(frozen=True)
class RatedRewards:
    """Rewards of N rated replies, gathered from all ranks, each reply once.

    Attributes:
        rewards: ``[N, A]`` float64.
        labels: ``[N, A]`` float64, NaN where a label is missing.
        attributes: A names.
        reply_lengths: ``[N]`` integer tokens of the replies.
        spreads: ``[N, A]`` float64, the model's own uncertainty of a reward; None without one.
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
        """Convert tensors of any dtype and device."""
        if reply_lengths is None:
            reply_lengths = torch.zeros(len(rewards), dtype=torch.int64)
        spreads = None if spreads is None else spreads.double().cpu()
        rewards, labels = rewards.double().cpu(), labels.double().cpu()
        return cls(rewards, labels, attributes, reply_lengths.cpu(), spreads)


def pearson(rated: RatedRewards) -> dict[str, float]:
    """Pearson's r of reward and label by attribute; NaN if all labels or all rewards are equal."""
    return _by_attribute(rated, rated.rewards, correlation)


def spearman(rated: RatedRewards) -> dict[str, float]:
    """Spearman's rank correlation of reward and label by attribute."""
    return _by_attribute(
        rated, rated.rewards, lambda got, wanted: correlation(ranks(got), ranks(wanted))
    )


def pearson_mean(rated: RatedRewards) -> float:
    """Mean of ``pearson`` over the attributes that have one."""
    return nanmean(pearson(rated).values())


def spearman_mean(rated: RatedRewards) -> float:
    """Mean of ``spearman`` over the attributes that have one."""
    return nanmean(spearman(rated).values())


def length_correlation_by_attribute(rated: RatedRewards) -> dict[str, float]:
    """Pearson's r of reward and length of the reply by attribute."""
    lengths = rated.reply_lengths.double()
    return {
        name: correlation(rated.rewards[:, column], lengths)
        for column, name in enumerate(rated.attributes)
    }


def length_only_pearson_mean(rated: RatedRewards) -> float:
    """Mean over attributes of |r| of label and length: the score of a length-only model."""
    lengths = rated.reply_lengths.double()[:, None].expand_as(rated.rewards)
    return nanmean(abs(value) for value in _by_attribute(rated, lengths, correlation).values())


def spread(rated: RatedRewards) -> dict[str, float]:
    """Mean of the model's own uncertainty by attribute."""
    if rated.spreads is None:
        return {}
    return dict(zip(rated.attributes, rated.spreads.mean(dim=0).tolist(), strict=True))


def spread_error_correlation(rated: RatedRewards) -> dict[str, float]:
    """Rank correlation of spread and ``|reward - label|`` by attribute."""
    if rated.spreads is None:
        return {}
    found = {}
    errors = (rated.rewards - rated.labels).abs()
    for column, name in enumerate(rated.attributes):
        present = ~torch.isnan(errors[:, column])
        own = ranks(rated.spreads[present, column]), ranks(errors[present, column])
        found[name] = correlation(*own)
    return found


def _by_attribute(
    rated: RatedRewards, values: Tensor, compare: Callable[[Tensor, Tensor], float]
) -> dict[str, float]:
    """Compare ``values [N, A]`` with the labels that are present, attribute by attribute."""
    found = {}
    for column, name in enumerate(rated.attributes):
        present = ~torch.isnan(rated.labels[:, column])
        found[name] = compare(values[present, column], rated.labels[present, column])
    return found


# Turns and steps: how many are judged right, and the first wrong one.

# A label of this or more calls a step right.
_RIGHT = 0.5
# Steps from this one on are one position.
LAST_POSITION = 10


@dataclass(frozen=True)
class StepVerdicts:
    """Verdicts on the steps of N texts, S in all, from one attribute to the next.

    Attributes:
        judged: ``[S, A]`` bool, judged right.
        probability: ``[S, A]`` float64 of right: the reward, or its sigmoid if it is log-odds.
        labels: ``[S, A]`` float64, NaN where there is none.
        right: ``[S, A]`` bool, right by the labels.
        present: ``[S, A]`` bool, where there is a label.
        sizes: N steps of the texts.
        attributes: A names.
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
        """Judge rewards ``[S, A]``; None if labels ``[S, A]`` are not all from 0 to 1.

        Rewards that are right from 0 on are log-odds.
        """
        rewards, labels = rewards.double().cpu(), labels.double().cpu()
        present = ~torch.isnan(labels)
        if bool(((labels < 0) | (labels > 1)).any()):
            return None
        judged, right = rewards >= right_from, labels >= _RIGHT
        probability = rewards.sigmoid() if right_from == 0 else rewards
        return cls(judged, probability, labels, right, present, sizes, attributes)


def step_accuracy(verdicts: StepVerdicts) -> float:
    """Share of labelled steps that are judged as they are labelled, mean over the attributes."""
    agree = verdicts.judged == verdicts.right
    columns = zip(agree.unbind(1), verdicts.present.unbind(1), strict=True)
    return nanmean(float(found[known].double().mean()) for found, known in columns)


def first_error_accuracy(verdicts: StepVerdicts) -> float:
    """Share of texts in which the first step judged wrong is the first one labelled wrong.

    Or none is in both. Of the texts whose steps all have labels up to the first wrong one.
    """
    return nanmean(_share(_first_errors(verdicts, column)) for column in _columns(verdicts))


def first_error_f1(verdicts: StepVerdicts) -> float:
    """Harmonic mean of ``first_error_accuracy`` in texts with an error and in those without.

    As ProcessBench has it (Zheng et al. 2024, arXiv:2412.06559, section 4).
    """
    found = []
    for column in _columns(verdicts):
        pairs = _first_errors(verdicts, column)
        wrong = _share([pair for pair in pairs if pair[1] >= 0])
        right = _share([pair for pair in pairs if pair[1] < 0])
        found.append(harmonic_mean(wrong, right))
    return nanmean(found)


def calibration_by_position(verdicts: StepVerdicts) -> dict[str, float]:
    """Of the first step of all texts, the second and so on: how probable right is, and how often.

    ``<n>/labels`` counts its labels; ``<n>/label`` is their mean, ``<n>/probability`` that of the
    same steps, and ``<n>/accuracy`` the share judged as it is labelled. The last is from 10 on.
    """
    places = torch.cat([torch.arange(1, size + 1) for size in verdicts.sizes])
    agree = (verdicts.judged == verdicts.right).double()
    found: dict[str, float] = {}
    for place in range(1, LAST_POSITION + 1):
        at = places >= place if place == LAST_POSITION else places == place
        known = verdicts.present & at[:, None]
        if known.any():
            found |= {
                f"{place}/labels": float(known.sum()),
                f"{place}/label": float(verdicts.labels[known].mean()),
                f"{place}/probability": float(verdicts.probability[known].mean()),
                f"{place}/accuracy": float(agree[known].mean()),
            }
    return found


def harmonic_mean(first: float, second: float) -> float:
    """0 if both are; NaN if either is."""
    both = first + second
    return 2 * first * second / both if both else both


def _columns(verdicts: StepVerdicts) -> range:
    return range(len(verdicts.attributes))


def _share(pairs: Sequence[tuple[int, int]]) -> float:
    if not pairs:
        return float("nan")
    return sum(got == wanted for got, wanted in pairs) / len(pairs)


def _first_errors(verdicts: StepVerdicts, column: int) -> list[tuple[int, int]]:
    """First step judged wrong and first one labelled wrong, -1 for none, of each text."""
    found = []
    parts = (
        each[:, column].split(list(verdicts.sizes))
        for each in (verdicts.judged, verdicts.right, verdicts.present)
    )
    for judged, right, present in zip(*parts, strict=True):
        wanted = first_error((right | ~present).tolist())
        known = present if wanted < 0 else present[: wanted + 1]
        if bool(known.all()):
            found.append((first_error(judged.tolist()), wanted))
    return found


def first_error(right: Sequence[bool]) -> int:
    """The first step that is not right, from 0; -1 if all are."""
    return next((number for number, is_right in enumerate(right) if not is_right), -1)
