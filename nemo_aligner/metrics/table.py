"""Table of all metrics: what each means, which direction is better, and where it is shown.

A metric is a function and one row here. The rows of ``PAIRS``, ``RATINGS`` and ``STEPS`` are
computed at every validation and evaluation, in this order; rows with ``in_step`` are also computed
at every training step. ``RUN`` lists the metrics that the training loop computes itself, and
``LOSS`` is computed by the objective.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, Flag, auto
from itertools import accumulate
from typing import Any, NamedTuple

from nemo_aligner.metrics import ranking, regression
from nemo_aligner.metrics.ranking import PairRewards
from nemo_aligner.metrics.regression import RatedRewards, StepVerdicts


class Shown(Flag):
    """Places on the console that show a metric.

    The log files and the table of an evaluation have every metric, so they are not listed here.
    """

    nowhere = 0
    step = auto()  # the line of a training step
    validation = auto()  # the lines of a validation
    source = auto()  # the table of metrics for each source of the records


class Better(Enum):
    """Whether lower or higher values of a metric are better; neither if it only describes."""

    lower = auto()
    higher = auto()
    neither = auto()


@dataclass(frozen=True)
class Metric:
    """A metric, logged as ``name``, or as ``name/<attribute>`` if there is a value by attribute.

    Attributes:
        name: key in logs and files; part of the public interface, so it never changes.
        meaning: explanation in one line, shown in tables and reports.
        function: computes the value, or the values by attribute, from ``PairRewards``,
            ``RatedRewards`` or ``StepVerdicts``; None if the metric needs more than rewards.
        better: direction in which it improves.
        shown: places on the console that show it.
        has_parts: True if it has several values, such as one by attribute, so that it is logged as
            ``name/<part>``.
        in_step: True if the metric is meaningful for a single batch, and is computed at every
            training step.
    """

    name: str
    meaning: str
    function: Callable[[Any], float | Mapping[str, float]] | None = None
    better: Better = Better.neither
    shown: Shown = Shown.nowhere
    in_step: bool = False
    has_parts: bool = False


_EVERYWHERE = Shown.step | Shown.validation

LOSS = Metric(
    "loss",
    "the objective, which training minimizes; evaluate has the default one of its records",
    None,
    Better.lower,
    _EVERYWHERE,
    True,
)

PAIRS: list[Metric] = [
    Metric(
        "accuracy",
        "share of pairs ordered correctly; a tie counts one half",
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
        "mean of the chosen reward minus the rejected one",
        ranking.mean_margin,
        Better.higher,
        shown=Shown.validation,
        in_step=True,
    ),
    Metric(
        "reward_chosen_mean",
        "mean reward of the chosen replies",
        ranking.chosen_mean,
        in_step=True,
    ),
    Metric(
        "reward_chosen_std",
        "standard deviation of the chosen rewards",
        ranking.chosen_std,
        in_step=True,
    ),
    Metric(
        "reward_rejected_mean",
        "mean reward of the rejected replies",
        ranking.rejected_mean,
        in_step=True,
    ),
    Metric(
        "reward_rejected_std",
        "standard deviation of the rejected rewards",
        ranking.rejected_std,
        in_step=True,
    ),
    *(
        Metric(
            f"reward_margin_p{percent:02d}",
            f"{percent}% of the margins are below this",
            ranking.margin_quantile(percent),
        )
        for percent in (5, 25, 50, 75, 95)
    ),
    Metric(
        "ece",
        "mean gap between sigmoid(|margin|) and the share ordered correctly",
        ranking.expected_calibration_error,
        Better.lower,
        Shown.validation,
    ),
    Metric("brier", "mean squared error of sigmoid(margin)", ranking.brier, Better.lower),
    Metric(
        "temperature",
        "T for which sigmoid(margin / T) fits best; above 1: overconfident",
        ranking.temperature,
    ),
    Metric(
        "length_correlation",
        "Pearson's r of reward and reply length in tokens (characters with server=)",
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
        "accuracy of a baseline that always prefers the longer reply",
        ranking.longer_reply_accuracy,
    ),
]

# Further metrics of pairs, for data with soft labels.
TEACHER: list[Metric] = [
    Metric(
        "teacher_agreement",
        "share of pairs of which model and teacher prefer the same reply",
        ranking.teacher_agreement,
        Better.higher,
        shown=Shown.validation,
    ),
    Metric(
        "teacher_probability_gap",
        "mean distance of sigmoid(margin) to that of the teacher",
        ranking.teacher_probability_gap,
        Better.lower,
        shown=Shown.validation,
    ),
]

# Further metrics for models that report how uncertain each reward is.
SPREADS: list[Metric] = [
    Metric("spread", "mean uncertainty that the model reports", regression.spread, has_parts=True),
    Metric(
        "spread_error_correlation",
        "rank correlation of that uncertainty and |reward - label|",
        regression.spread_error_correlation,
        has_parts=True,
    ),
]

RATINGS: list[Metric] = [
    Metric(
        "pearson",
        "Pearson's r of reward and label",
        regression.pearson,
        Better.higher,
        Shown.validation,
        has_parts=True,
    ),
    Metric(
        "spearman",
        "rank correlation of reward and label",
        regression.spearman,
        Better.higher,
        has_parts=True,
    ),
    Metric(
        "pearson_mean",
        "mean of pearson over the attributes",
        regression.pearson_mean,
        Better.higher,
        shown=Shown.validation | Shown.source,
    ),
    Metric(
        "spearman_mean",
        "mean of spearman over the attributes",
        regression.spearman_mean,
        Better.higher,
        shown=Shown.validation,
    ),
    Metric(
        "length_correlation",
        "Pearson's r of reward and reply length in tokens (characters with server=)",
        regression.length_correlation_by_attribute,
        has_parts=True,
    ),
    Metric(
        "length_only_pearson_mean",
        "mean |r| of label and reply length in tokens (characters with server=)",
        regression.length_only_pearson_mean,
    ),
    *SPREADS,
]

# Prefix of the names of metrics by position: ``step_position/<n>/<figure>`` is over all n-th steps.
POSITION = "step_position/"
POSITION_FIGURES = ("labels", "label", "probability", "accuracy")

# Metrics for models that score every turn or step, with labels from 0 (wrong) to 1 (right).
STEPS: list[Metric] = [
    Metric(
        "step_accuracy",
        "share of labelled steps whose verdict agrees with the label",
        regression.step_accuracy,
        Better.higher,
        shown=_EVERYWHERE | Shown.source,
        in_step=True,
    ),
    Metric(
        "first_error_accuracy",
        "share of samples whose first wrong step is found (or rightly none)",
        regression.first_error_accuracy,
        Better.higher,
        shown=Shown.validation,
    ),
    Metric(
        "first_error_f1",
        "harmonic mean of that share on samples with and without an error",
        regression.first_error_f1,
        Better.higher,
        shown=Shown.validation | Shown.source,
    ),
    Metric(
        POSITION.rstrip("/"),
        "by number of the step: count of labels, mean label and probability, accuracy",
        regression.calibration_by_position,
        has_parts=True,
    ),
]

# Statistics of rewards, by attribute, over all samples of a data set. The scoring contract stores
# their values on the first validation set.
REWARDS = [
    Metric("reward_mean", "mean reward of all samples", has_parts=True),
    Metric("reward_std", "standard deviation of the rewards of all samples", has_parts=True),
]

RUN: list[Metric] = [
    Metric("tokens_per_second", "tokens per second of all ranks together", None, shown=Shown.step),
    Metric("mfu", "share of the GPUs' peak FLOPs, if the peak is known", None, shown=Shown.step),
    Metric("grad_norm", "norm of the gradient before clipping", None, shown=Shown.step),
    Metric("lr", "learning rate", None, shown=Shown.step),
    Metric("loss_scale", "loss scale of fp16 training", None, shown=Shown.step),
    Metric("skipped_steps", "steps that overflowed fp16", None, Better.lower, Shown.step),
    Metric("tie_parameter", "learned tie parameter of the objective", None, shown=_EVERYWHERE),
    Metric("length_bias", "learned length bias of the objective", None, shown=_EVERYWHERE),
    Metric(
        "gpu_memory_gb", "memory in use on the first rank's GPU", None, Better.lower, Shown.step
    ),
    Metric("gpu_power_watts", "power of the first rank's GPU", None, shown=Shown.step),
]


def by_position(metric: Callable[[str], float | None]) -> list[tuple[int, list[float]]]:
    """Collect the metrics of steps by their position in the sample, for a table or a plot.

    The result has a pair for each position: its number, from 1, and the values of the
    ``POSITION_FIGURES`` in their order, NaN for a missing value. Positions without labels are left
    out.

    Args:
        metric: returns the value of a metric by its name, or None if there is none.
    """
    rows = []
    for position in range(1, regression.LAST_POSITION + 1):
        values = [metric(f"{POSITION}{position}/{name}") for name in POSITION_FIGURES]
        if values[0] is not None:
            rows.append((position, [math.nan if value is None else value for value in values]))
    return rows


def measure_pairs(pairs: PairRewards, *, in_step: bool = False) -> dict[str, float]:
    """Compute every metric of ``PAIRS``; with ``in_step`` only those for a single batch.

    If there are soft labels, those of ``TEACHER`` are computed, too.
    """
    rows = PAIRS if pairs.teacher_margins is None else [*PAIRS, *TEACHER]
    return _compute_rows(rows, pairs, in_step)


def measure_ratings(rated: RatedRewards, *, in_step: bool = False) -> dict[str, float]:
    """Compute every metric of ``RATINGS``; with ``in_step`` only those for a single batch."""
    return _compute_rows(RATINGS, rated, in_step)


def measure_steps(verdicts: StepVerdicts | None, *, in_step: bool = False) -> dict[str, float]:
    """Compute every metric of ``STEPS``; with ``in_step`` only those for a single batch.

    The result is empty if there are no verdicts, because the labels are not from 0 to 1.
    """
    return {} if verdicts is None else _compute_rows(STEPS, verdicts, in_step)


def measure_spreads(rated: RatedRewards) -> dict[str, float]:
    """Compute every metric of ``SPREADS``; empty if the model reports no uncertainty."""
    return _compute_rows(SPREADS, rated, in_step=False)


def _compute_rows(rows: Sequence[Metric], data: object, in_step: bool) -> dict[str, float]:
    values: dict[str, float] = {}
    for row in rows:
        if row.function is None or (in_step and not row.in_step):
            continue
        value = row.function(data)
        if isinstance(value, Mapping):
            values |= {f"{row.name}/{attribute}": number for attribute, number in value.items()}
        else:
            values[row.name] = value
    return values


def all_metrics() -> list[Metric]:
    """List all rows of the table in display order."""
    return [LOSS, *PAIRS, *TEACHER, *RATINGS, *STEPS, *REWARDS, *RUN]


class MetricName(NamedTuple):
    """The two parts of the full name of a metric, ``set/metric``.

    Attributes:
        set_name: data set that it was measured on, such as ``train`` or ``validation-heldout``.
        metric: what was measured, such as ``loss`` or ``by_source/chat/accuracy``.
    """

    set_name: str
    metric: str


def split_name(full_name: str) -> MetricName:
    """Split the full name of a metric at its first slash; without one, ``metric`` is empty."""
    set_name, _, metric = full_name.partition("/")
    return MetricName(set_name, metric)


def find_metric(name: str) -> Metric | None:
    """Find the row of a logged name such as ``validation-x/by_source/y/pearson/helpfulness``.

    The name of the data set, the source and the attribute are optional. None if no row matches.
    """
    group = BY_PRINCIPLE if BY_PRINCIPLE in name else BY_SOURCE
    prefix, group_mark, suffix = name.partition(group)
    if group_mark:
        # Remove the source or principle, which may have the name of a metric, also before or after
        # a slash. It ends where a complete name of a metric begins.
        starts = accumulate(len(part) + 1 for part in suffix.split("/"))
        for start in starts:
            row = _find_row(suffix[start:])
            if row is not None:
                return row
    path = f"/{prefix}{suffix.partition('/')[2]}/" if group_mark else f"/{name}/"
    positions = [(path.find(f"/{row.name}/"), row) for row in all_metrics()]
    # Take the first match: an attribute may have the name of a metric, but comes after the metric.
    matches = [(index, row) for index, row in positions if index >= 0]
    return min(matches, key=lambda match: match[0])[1] if matches else None


def _find_row(name: str) -> Metric | None:
    """Find the row of a name without data set and source, such as ``pearson/helpfulness``."""
    for row in all_metrics():
        if name == row.name or (row.has_parts and name.startswith(f"{row.name}/")):
            return row
    return None


def better_values(name: str) -> Better:
    """Look up in which direction the logged metric ``name`` improves; neither for unknown names."""
    row = find_metric(name)
    return Better.neither if row is None else row.better


def is_shown(name: str, place: Shown) -> bool:
    """True if the console shows a metric at ``place``, such as the line of a training step.

    ``name`` is without data set and source; it may end with an attribute (``pearson/helpfulness``).
    """
    return any(
        place in row.shown and (name == row.name or name.startswith(f"{row.name}/"))
        for row in all_metrics()
    )


# Computing metrics for each source of the records, and for each of their principles.

MAX_SOURCES = 50
BY_SOURCE = "by_source/"
BY_PRINCIPLE = "by_principle/"
# Beginnings of the names of metrics of parts of a data set, which a table of the whole leaves out.
OF_PARTS = (BY_SOURCE, BY_PRINCIPLE, POSITION)


def by_source(
    sources: Sequence[str],
    metrics: Callable[[Sequence[int]], dict[str, float]],
    group: str = BY_SOURCE,
) -> dict[str, float]:
    """Compute ``by_source/<source>/<metric>`` for every source of the records.

    The result is empty unless there are 2 to 50 sources.

    Args:
        sources: source of every record, "" for a record that names none.
        metrics: function that computes the metrics of the records at the given indices.
        group: beginning of the names; ``BY_PRINCIPLE`` if ``sources`` has principles instead.
    """
    groups: dict[str, list[int]] = {}
    for record, source in enumerate(sources):
        groups.setdefault(source, []).append(record)
    if not 2 <= len(groups) <= MAX_SOURCES:
        return {}
    unnamed = "(none)" if "none" in groups else "none"
    return {
        f"{group}{source or unnamed}/{name}": value
        for source, records in sorted(groups.items())
        for name, value in metrics(records).items()
    }
