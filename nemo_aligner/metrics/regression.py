"""How well rewards follow the labels of rated replies, in float64."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from nemo_aligner.metrics.ranking import correlation, nanmean, ranks


@dataclass(frozen=True)
class RatedRewards:
    """Rewards of N rated replies, each there once.

    Attributes:
        rewards: ``[N, A]`` float64.
        labels: ``[N, A]`` float64, NaN where a label is missing.
        attributes: A names.
        reply_lengths: ``[N]`` integer tokens of the replies.
        spreads: ``[N, A]`` float64, how uncertain the model says a reward is; None if it does not.
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
        """Of tensors in any dtype and on any device."""
        if reply_lengths is None:
            reply_lengths = torch.zeros(len(rewards), dtype=torch.int64)
        spreads = None if spreads is None else spreads.double().cpu()
        rewards, labels = rewards.double().cpu(), labels.double().cpu()
        return cls(rewards, labels, attributes, reply_lengths.cpu(), spreads)


def pearson(rated: RatedRewards) -> dict[str, float]:
    """Of every attribute Pearson's r of reward and label; NaN where no two labels differ."""
    return _by_attribute(rated, rated.rewards, correlation)


def spearman(rated: RatedRewards) -> dict[str, float]:
    """Of every attribute the correlation of the ranks of reward and label."""
    return _by_attribute(
        rated, rated.rewards, lambda got, wanted: correlation(ranks(got), ranks(wanted))
    )


def pearson_mean(rated: RatedRewards) -> float:
    """The mean of ``pearson`` over the attributes that have one."""
    return nanmean(pearson(rated).values())


def spearman_mean(rated: RatedRewards) -> float:
    """The mean of ``spearman`` over the attributes that have one."""
    return nanmean(spearman(rated).values())


def length_correlation_by_attribute(rated: RatedRewards) -> dict[str, float]:
    """Of every attribute Pearson's r of reward and length of the reply."""
    lengths = rated.reply_lengths.double()
    return {
        name: correlation(rated.rewards[:, column], lengths)
        for column, name in enumerate(rated.attributes)
    }


def length_only_pearson_mean(rated: RatedRewards) -> float:
    """The mean over attributes of |r| of label and length: what length alone would give."""
    lengths = rated.reply_lengths.double()[:, None].expand_as(rated.rewards)
    return nanmean(abs(value) for value in _by_attribute(rated, lengths, correlation).values())


def spread(rated: RatedRewards) -> dict[str, float]:
    """Of every attribute the mean of what the model says of its own uncertainty."""
    if rated.spreads is None:
        return {}
    return dict(zip(rated.attributes, rated.spreads.mean(dim=0).tolist(), strict=True))


def spread_error_correlation(rated: RatedRewards) -> dict[str, float]:
    """Of every attribute the correlation of the ranks of spread and ``|reward - label|``."""
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
    """``compare`` of ``values [N, A]`` with the labels that are there."""
    found = {}
    for column, name in enumerate(rated.attributes):
        present = ~torch.isnan(rated.labels[:, column])
        found[name] = compare(values[present, column], rated.labels[present, column])
    return found
