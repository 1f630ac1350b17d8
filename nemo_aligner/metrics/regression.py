"""Metrics of rated replies in float64: correlation of rewards with labels."""

from __future__ import annotations

from collections.abc import Callable
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
