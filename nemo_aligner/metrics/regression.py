"""How near rewards are to labels, and how well they follow them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from nemo_aligner.losses import masked_mse
from nemo_aligner.metrics.statistics import correlation, nanmean, ranks


def regression_metrics(
    rewards: Tensor, labels: Tensor, attributes: Sequence[str]
) -> dict[str, float]:
    """Loss and correlation with the labels that are there, per attribute and averaged over them.

    Args:
        rewards: ``[N, A]`` of every rated reply once.
        labels: ``[N, A]``, NaN where a label is missing.
        attributes: A names.

    Returns:
        ``pearson/<attribute>`` and ``spearman/<attribute>`` are NaN where no two labels differ;
        such an attribute is left out of ``pearson_mean`` and ``spearman_mean``.
    """
    rewards, labels = rewards.double().cpu(), labels.double().cpu()
    loss, count = masked_mse(rewards, labels)
    pearson, spearman = {}, {}
    for column, name in enumerate(attributes):
        present = ~torch.isnan(labels[:, column])
        got, wanted = rewards[present, column], labels[present, column]
        pearson[name] = correlation(got, wanted)
        spearman[name] = correlation(ranks(got), ranks(wanted))
    return {
        "loss": float(loss / count.clamp(min=1)),
        **{f"pearson/{name}": value for name, value in pearson.items()},
        **{f"spearman/{name}": value for name, value in spearman.items()},
        "pearson_mean": nanmean(pearson.values()),
        "spearman_mean": nanmean(spearman.values()),
    }


def regression_report(
    rewards: Tensor, labels: Tensor, attributes: Sequence[str], reply_lengths: Tensor
) -> dict[str, float]:
    """``regression_metrics``, and how much rewards and labels go with the length of the replies.

    Args:
        rewards: ``[N, A]`` of every rated reply once.
        labels: ``[N, A]``, NaN where a label is missing.
        attributes: A names.
        reply_lengths: ``[N, 1]``.

    Returns:
        Also ``length_correlation/<attribute>``, Pearson's r of reward and length, and
        ``length_only_pearson_mean``, the mean over attributes of |r| of label and length.
    """
    lengths = reply_lengths.double().cpu().expand(-1, len(attributes))
    alone = regression_metrics(lengths, labels, attributes)
    return {
        **regression_metrics(rewards, labels, attributes),
        **{
            f"length_correlation/{name}": correlation(
                rewards[:, column].double().cpu(), lengths[:, column]
            )
            for column, name in enumerate(attributes)
        },
        "length_only_pearson_mean": nanmean(abs(alone[f"pearson/{name}"]) for name in attributes),
    }
