"""Metrics of whole sets of rewards, in float64: the same numbers at any layout and batch size.

Whoever calls these has gathered every record once; nothing here is a mean of means.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor

from nemo_aligner.losses import bradley_terry, masked_mse

MAX_SOURCES = 50
_QUANTILES = (5, 25, 50, 75, 95)
_BINS = 15
_PAIRS_PER_BIN = 10
_LOWER_IS_BETTER = ("loss", "ties", "brier", "ece")


def lower_is_better(metric: str) -> bool:
    """Whether a smaller value of a metric (the last part of its name) is a better one."""
    return metric.rpartition("/")[2] in _LOWER_IS_BETTER


def ranking_metrics(rewards: Tensor) -> dict[str, float]:
    """How well comparisons are ordered; a tie counts one half and is also reported apart.

    Args:
        rewards: ``[N, 2]``, chosen then rejected, of every comparison once.
    """
    rewards = rewards.double().cpu()
    chosen, rejected = rewards.unbind(dim=1)
    margins = chosen - rejected
    loss, count = bradley_terry(rewards)
    return {
        "loss": float(loss / count),
        "accuracy": float(_right(margins).mean()),
        "ties": float((margins == 0).double().mean()),
        "reward_margin": float(margins.mean()),
        "reward_chosen_mean": float(chosen.mean()),
        "reward_chosen_std": float(chosen.std(correction=0)),
        "reward_rejected_mean": float(rejected.mean()),
        "reward_rejected_std": float(rejected.std(correction=0)),
    }


def ranking_report(rewards: Tensor, reply_lengths: Tensor) -> dict[str, float]:
    """``ranking_metrics``, and what a whole set can tell about margins, calibration and length.

    Args:
        rewards: ``[N, 2]``, chosen then rejected, of every comparison once.
        reply_lengths: ``[N, 2]`` lengths of the replies.

    Returns:
        Also ``reward_margin_p05`` to ``_p95``, quantiles of the margin; ``calibration_metrics`` and
        ``length_metrics``.
    """
    margins = (rewards[:, 0].double() - rewards[:, 1].double()).cpu()
    places = torch.tensor(_QUANTILES, dtype=torch.float64) / 100
    quantiles = torch.quantile(margins, places).tolist() if len(margins) else [math.nan] * 5
    return {
        **ranking_metrics(rewards),
        **{
            f"reward_margin_p{percent:02d}": value
            for percent, value in zip(_QUANTILES, quantiles, strict=True)
        },
        **calibration_metrics(margins),
        **length_metrics(rewards, reply_lengths),
    }


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
    right = _right(margins)[order]
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


def length_metrics(rewards: Tensor, reply_lengths: Tensor) -> dict[str, float]:
    """How much the rewards of comparisons go with the length of the replies.

    Args:
        rewards: ``[N, 2]``, chosen then rejected.
        reply_lengths: ``[N, 2]``.

    Returns:
        ``length_correlation``, Pearson's r over all replies; ``accuracy_longer_chosen`` and
        ``accuracy_shorter_chosen``, on the pairs where people chose the longer and the shorter
        reply (NaN where there are none); ``longer_reply_accuracy``, of taking the longer reply.
    """
    rewards, lengths = rewards.double().cpu(), reply_lengths.double().cpu()
    right = _right(rewards[:, 0] - rewards[:, 1])
    longer_by = lengths[:, 0] - lengths[:, 1]
    return {
        "length_correlation": _correlation(rewards.flatten(), lengths.flatten()),
        "accuracy_longer_chosen": float(right[longer_by > 0].mean()),
        "accuracy_shorter_chosen": float(right[longer_by < 0].mean()),
        "longer_reply_accuracy": float(_right(longer_by).mean()),
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
            f"length_correlation/{name}": _correlation(
                rewards[:, column].double().cpu(), lengths[:, column]
            )
            for column, name in enumerate(attributes)
        },
        "length_only_pearson_mean": _nanmean(abs(alone[f"pearson/{name}"]) for name in attributes),
    }


def by_source(
    sources: Sequence[str], metrics: Callable[[Sequence[int]], dict[str, float]]
) -> dict[str, float]:
    """``by_source/<source>/<metric>`` for each of at least 2 and at most 50 sources.

    ``metrics`` gives those of the records with the given numbers; a record without a source has "".
    """
    groups: dict[str, list[int]] = {}
    for record, source in enumerate(sources):
        groups.setdefault(source, []).append(record)
    if not 2 <= len(groups) <= MAX_SOURCES:
        return {}
    return {
        f"by_source/{source or 'none'}/{name}": value
        for source, records in sorted(groups.items())
        for name, value in metrics(records).items()
    }


def _right(margins: Tensor) -> Tensor:
    """1 for a positive margin, one half for none, else 0."""
    return (margins.sign().double() + 1) / 2


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


def _nanmean(values: Iterable[float]) -> float:
    return float(torch.tensor(list(values), dtype=torch.float64).nanmean())
