"""Table of all metrics: meaning, better direction, and where each is shown.

A metric is a function and a row here. Rows of ``PAIRS`` and ``RATINGS`` are computed at every
validation and evaluation, in this order; those with ``in_step`` at every training step, too.
``RUN`` holds metrics of the training loop, and ``loss`` is the objective's own.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, Flag, auto
from typing import Any

from nemo_aligner.metrics import ranking, regression
from nemo_aligner.metrics.ranking import PairRewards
from nemo_aligner.metrics.regression import RatedRewards, StepVerdicts


class Shown(Flag):
    """Places that show a metric, beside the logs and the evaluation's table, which have all."""

    nowhere = 0
    step = auto()
    validation = auto()
    source = auto()  # per source


class Better(Enum):
    """Direction in which a metric improves."""

    lower = auto()
    higher = auto()
    neither = auto()


@dataclass(frozen=True)
class Metric:
    """A number logged as ``name``, or one per attribute as ``name/<attribute>``.

    Attributes:
        meaning: one line for people.
        function: computes a number, or one by attribute, from ``PairRewards`` or ``RatedRewards``;
            None if it needs more than rewards.
        better: direction in which it improves.
        in_step: meaningful for a single batch.
    """

    name: str
    meaning: str
    function: Callable[[Any], float | Mapping[str, float]] | None = None
    better: Better = Better.neither
    shown: Shown = Shown.nowhere
    in_step: bool = False


_EVERYWHERE = Shown.step | Shown.validation

LOSS = Metric("loss", "the value that training minimizes", None, Better.lower, _EVERYWHERE, True)

PAIRS: list[Metric] = [
    Metric(
        "accuracy",
        "chosen above rejected; a tie counts one half",
        ranking.accuracy,
        Better.higher,
        shown=_EVERYWHERE | Shown.source,
        in_step=True,
    ),
    Metric(
        "ties",
        "share of pairs with equal rewards",
        ranking.ties,
        Better.lower,
        Shown.validation,
        in_step=True,
    ),
    Metric(
        "reward_margin",
        "mean of chosen minus rejected",
        ranking.mean_margin,
        Better.higher,
        shown=Shown.validation,
        in_step=True,
    ),
    Metric("reward_chosen_mean", "mean of the chosen replies", ranking.chosen_mean, in_step=True),
    Metric("reward_chosen_std", "their standard deviation", ranking.chosen_std, in_step=True),
    Metric(
        "reward_rejected_mean", "mean of the rejected replies", ranking.rejected_mean, in_step=True
    ),
    Metric("reward_rejected_std", "their standard deviation", ranking.rejected_std, in_step=True),
    *(
        Metric(
            f"reward_margin_p{percent:02d}",
            f"{percent}% of the margins are below",
            ranking.margin_quantile(percent),
        )
        for percent in (5, 25, 50, 75, 95)
    ),
    Metric(
        "ece",
        "mean gap of sigmoid(|margin|) and the share of right verdicts",
        ranking.expected_calibration_error,
        Better.lower,
        Shown.validation,
    ),
    Metric("brier", "mean squared error of sigmoid(margin)", ranking.brier, Better.lower),
    Metric("temperature", "T for which sigmoid(margin / T) is most likely", ranking.temperature),
    Metric(
        "length_correlation",
        "Pearson r of reward and tokens of the reply (characters with server=)",
        ranking.length_correlation,
    ),
    Metric(
        "accuracy_longer_chosen",
        "accuracy where people chose the longer reply",
        ranking.accuracy_longer_chosen,
        Better.higher,
        shown=Shown.validation,
    ),
    Metric(
        "accuracy_shorter_chosen",
        "accuracy where people chose the shorter reply",
        ranking.accuracy_shorter_chosen,
        Better.higher,
        shown=Shown.validation,
    ),
    Metric(
        "longer_reply_accuracy",
        "accuracy of always taking the longer reply",
        ranking.longer_reply_accuracy,
    ),
]

# For models that state how uncertain a reward is.
SPREADS: list[Metric] = [
    Metric("spread", "mean of what the model says of its uncertainty", regression.spread),
    Metric(
        "spread_error_correlation",
        "rank correlation of that and of |reward - label|",
        regression.spread_error_correlation,
    ),
]

RATINGS: list[Metric] = [
    Metric(
        "pearson",
        "correlation of reward and label",
        regression.pearson,
        Better.higher,
        Shown.validation,
    ),
    Metric("spearman", "correlation of their ranks", regression.spearman, Better.higher),
    Metric(
        "pearson_mean",
        "mean over the attributes",
        regression.pearson_mean,
        Better.higher,
        shown=Shown.validation | Shown.source,
    ),
    Metric(
        "spearman_mean",
        "mean over the attributes",
        regression.spearman_mean,
        Better.higher,
        shown=Shown.validation,
    ),
    Metric(
        "length_correlation",
        "Pearson r of reward and tokens of the reply (characters with server=)",
        regression.length_correlation_by_attribute,
    ),
    Metric(
        "length_only_pearson_mean",
        "mean |r| of label and tokens of the reply (characters with server=)",
        regression.length_only_pearson_mean,
    ),
    *SPREADS,
]

# Names of the figures of the first, second, ... step of texts begin so.
POSITION = "step_position/"
POSITION_FIGURES = ("labels", "label", "probability", "accuracy")

# Where turns or steps are scored, and labels are from 0 (wrong) to 1 (right).
STEPS: list[Metric] = [
    Metric(
        "step_accuracy",
        "steps judged as they are labelled",
        regression.step_accuracy,
        Better.higher,
        shown=_EVERYWHERE | Shown.source,
        in_step=True,
    ),
    Metric(
        "first_error_accuracy",
        "texts whose first wrong step, or none, is found",
        regression.first_error_accuracy,
        Better.higher,
        shown=Shown.validation,
    ),
    Metric(
        "first_error_f1",
        "harmonic mean of that in texts with and without an error",
        regression.first_error_f1,
        Better.higher,
        shown=Shown.validation | Shown.source,
    ),
    Metric(
        POSITION.rstrip("/"),
        "labels, their mean, mean probability and accuracy of the first step, the second, ...",
        regression.calibration_by_position,
    ),
]

# For each attribute, over all texts of a set; the scoring contract stores those of the first
# validation set.
REWARDS = [
    Metric("reward_mean", "mean reward of all texts"),
    Metric("reward_std", "standard deviation of the rewards of all texts"),
]

RUN: list[Metric] = [
    Metric("tokens_per_second", "of all ranks together", None, shown=Shown.step),
    Metric("mfu", "share of the GPUs' peak, where it is known", None, shown=Shown.step),
    Metric("grad_norm", "before clipping", None, shown=Shown.step),
    Metric("lr", "learning rate", None, shown=Shown.step),
    Metric("loss_scale", "of fp16", None, shown=Shown.step),
    Metric("skipped_steps", "steps that overflowed fp16", None, Better.lower, Shown.step),
    Metric("tie_parameter", "where it is learned", None, shown=_EVERYWHERE),
    Metric("length_bias", "where it is learned", None, shown=_EVERYWHERE),
    Metric("gpu_memory_gb", "in use on the first rank's GPU", None, Better.lower, Shown.step),
    Metric("gpu_power_watts", "of the first rank's GPU", None, shown=Shown.step),
]


def by_position(metric: Callable[[str], float | None]) -> list[tuple[int, list[float]]]:
    """Numbers of steps that have figures, with those of ``POSITION_FIGURES``, out of a metric's."""
    found = []
    for place in range(1, regression.LAST_POSITION + 1):
        row = [metric(f"{POSITION}{place}/{name}") for name in POSITION_FIGURES]
        if row[0] is not None:
            found.append((place, [math.nan if value is None else value for value in row]))
    return found


def measure_pairs(pairs: PairRewards, *, in_step: bool = False) -> dict[str, float]:
    """Compute every metric of ``PAIRS``, or only those for a single batch."""
    return _measure(PAIRS, pairs, in_step)


def measure_ratings(rated: RatedRewards, *, in_step: bool = False) -> dict[str, float]:
    """Compute every metric of ``RATINGS``, or only those for a single batch."""
    return _measure(RATINGS, rated, in_step)


def measure_steps(verdicts: StepVerdicts | None, *, in_step: bool = False) -> dict[str, float]:
    """Compute every metric of ``STEPS``, or only those for a single batch; nothing for None."""
    return {} if verdicts is None else _measure(STEPS, verdicts, in_step)


def measure_spreads(rated: RatedRewards) -> dict[str, float]:
    """Compute every metric of ``SPREADS``."""
    return _measure(SPREADS, rated, in_step=False)


def _measure(rows: Sequence[Metric], data: object, in_step: bool) -> dict[str, float]:
    measured: dict[str, float] = {}
    for row in rows:
        if row.function is None or (in_step and not row.in_step):
            continue
        value = row.function(data)
        if isinstance(value, Mapping):
            measured |= {f"{row.name}/{attribute}": number for attribute, number in value.items()}
        else:
            measured[row.name] = value
    return measured


def all_metrics() -> list[Metric]:
    """List the whole table in display order."""
    return [LOSS, *PAIRS, *RATINGS, *STEPS, *REWARDS, *RUN]


def find_metric(name: str) -> Metric | None:
    """Find the row of a logged name, which may have a set, a source and an attribute around it."""
    # Skip the source, which may be called like a metric.
    before, by, behind = name.partition(BY_SOURCE)
    path = f"/{before}{behind.partition('/')[2]}/" if by else f"/{name}/"
    found = [(path.find(f"/{row.name}/"), row) for row in all_metrics()]
    # An attribute may be called like a metric; the first match is the metric.
    named = [(index, row) for index, row in found if index >= 0]
    return min(named, key=lambda pair: pair[0])[1] if named else None


def better_values(name: str) -> Better:
    """Direction in which a logged metric improves; neither if it is unknown."""
    row = find_metric(name)
    return Better.neither if row is None else row.better


def is_shown(name: str, where: Shown) -> bool:
    """Tell if a logged metric, given without set and source, is shown in a place."""
    return any(
        where in row.shown and (name == row.name or name.startswith(f"{row.name}/"))
        for row in all_metrics()
    )


# Metrics per source of the records.

MAX_SOURCES = 50
BY_SOURCE = "by_source/"


def by_source(
    sources: Sequence[str], metrics: Callable[[Sequence[int]], dict[str, float]]
) -> dict[str, float]:
    """Compute ``by_source/<source>/<metric>`` for each of 2 to 50 sources; else nothing.

    Args:
        sources: of every record, "" if it names none.
        metrics: computes those of the records with the given indices.
    """
    groups: dict[str, list[int]] = {}
    for record, source in enumerate(sources):
        groups.setdefault(source, []).append(record)
    if not 2 <= len(groups) <= MAX_SOURCES:
        return {}
    unnamed = "(none)" if "none" in groups else "none"
    return {
        f"{BY_SOURCE}{source or unnamed}/{name}": value
        for source, records in sorted(groups.items())
        for name, value in metrics(records).items()
    }
