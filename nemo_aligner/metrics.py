"""Metrics of whole sets of rewards, in float64: the same numbers at any layout and batch size."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from nemo_aligner.losses import bradley_terry, masked_mse


def ranking_metrics(rewards: Tensor) -> dict[str, float]:
    """How well comparisons are ordered; a tie counts one half and is also reported apart.

    Args:
        rewards: ``[N, 2]``, chosen then rejected, of every comparison once.
    """
    rewards = rewards.double().cpu()
    chosen, rejected = rewards.unbind(dim=1)
    margins = chosen - rejected
    ties = (margins == 0).double()
    loss, count = bradley_terry(rewards)
    return {
        "loss": float(loss / count),
        "accuracy": float(((margins > 0).double() + 0.5 * ties).mean()),
        "ties": float(ties.mean()),
        "reward_margin": float(margins.mean()),
        "reward_chosen_mean": float(chosen.mean()),
        "reward_chosen_std": float(chosen.std(correction=0)),
        "reward_rejected_mean": float(rejected.mean()),
        "reward_rejected_std": float(rejected.std(correction=0)),
    }


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
        pearson[name] = _correlation(got, wanted)
        spearman[name] = _correlation(_ranks(got), _ranks(wanted))
    return {
        "loss": float(loss / count.clamp(min=1)),
        **{f"pearson/{name}": value for name, value in pearson.items()},
        **{f"spearman/{name}": value for name, value in spearman.items()},
        "pearson_mean": _nanmean(pearson.values()),
        "spearman_mean": _nanmean(spearman.values()),
    }


def _correlation(first: Tensor, second: Tensor) -> float:
    if first.numel() < 2:
        return float("nan")
    first, second = first - first.mean(), second - second.mean()
    scale = first.norm() * second.norm()
    return float(first @ second / scale) if scale > 0 else float("nan")


def _ranks(values: Tensor) -> Tensor:
    """Ranks from 0; equal values share the mean of their ranks."""
    _, inverse, counts = values.unique(sorted=True, return_inverse=True, return_counts=True)
    last = counts.cumsum(0).double()
    return (last - (counts + 1) / 2.0)[inverse]


def _nanmean(values: object) -> float:
    return float(torch.tensor(list(values), dtype=torch.float64).nanmean())  # type: ignore[call-overload]
