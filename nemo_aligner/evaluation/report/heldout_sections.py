"""Report sections on held-out records, one public function for each section.

They are accuracy by source, rewards and margins, calibration, reward against length, robustness,
and the most confident mistakes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from nemo_aligner.data.records import PAIR_COLUMNS
from nemo_aligner.evaluation.report import run_report
from nemo_aligner.evaluation.report.figures import (
    Drawing,
    Heldout,
    Histogram,
    LegendKey,
    PageSection,
    PageTable,
    accuracy_by_source,
    format_interval,
    format_metric,
    format_share,
    format_temperature,
    histogram,
    lengths_compared,
    mean_by_length,
    reliability_diagram,
    reward_by_label,
    reward_by_length,
    select_pairs,
)
from nemo_aligner.evaluation.report.run_report import RunReport
from nemo_aligner.evaluation.robustness import (
    BOTH,
    REJECTED,
    Robustness,
    RobustnessRow,
    robustness_note,
)
from nemo_aligner.evaluation.tasks.base import TaskRow
from nemo_aligner.metrics import ranking
from nemo_aligner.metrics.table import by_position

_MAX_SOURCES = 30
_MAX_MISTAKES = 10
_NO_PAIRS = "no pairs"
_NO_RECORDS = "no held-out rewards: nothing was validated, or evaluate ran without output_rewards"


def build_accuracy(sets: Sequence[Heldout], reports: Sequence[RunReport]) -> PageSection:
    """Build the section on accuracy by source with intervals, and the tables of benchmarks."""
    shares = [
        (heldout.key, run_report.compute_shares(heldout.predictions))
        for heldout in select_pairs(sets)
    ]
    is_one = len(shares) == 1
    rows = [
        [
            *([] if is_one else [key.name]),
            row.source,
            str(row.pairs),
            format_share(row.accuracy),
            format_interval(row.low, row.high),
        ]
        for key, source_rows in shares
        for row in source_rows
    ]
    header = [*([] if is_one else [""]), "source", "pairs", "accuracy", "95% interval"]
    tables = [PageTable(header, rows)] if rows else []
    tables += [_build_benchmark_table(report) for report in reports if report.rows]
    drawings = [accuracy_by_source("sources", shares, _MAX_SOURCES)] if shares else []
    notes = ["95% intervals are Wilson's. A tied pair counts as half right."] if rows else []
    return PageSection("accuracy", "Accuracy by source", drawings, tables, (), notes, _NO_PAIRS)


def _build_benchmark_table(report: RunReport) -> PageTable:
    header = ["", "", "value", "95% interval", "items"]
    rows = [_format_task_row(row) for row in report.rows]
    return PageTable(header, rows, f"{report.name}: {report.kind}")


def _format_task_row(row: TaskRow) -> list[str]:
    interval = ""
    if row.low is not None and row.high is not None:
        interval = f"{format_metric(row.low)} to {format_metric(row.high)}"
    count = "" if row.count is None else str(row.count)
    return [row.level.value, row.name, format_metric(row.value), interval, count]


def build_rewards(sets: Sequence[Heldout]) -> PageSection:
    """Build the section on rewards.

    For pairs it has histograms of margins and rewards; for ratings, plots of rewards over labels.
    """
    pair_sets = select_pairs(sets)
    drawings: list[Drawing] = []
    if pair_sets:
        margins = [
            Histogram(heldout.key, -np.diff(heldout.predictions.rewards)[:, 0])
            for heldout in pair_sets
        ]
        drawings.append(
            histogram("margins", "Reward margin", "chosen minus rejected", margins, 0.0)
        )
    for number, heldout in enumerate(sets):
        if heldout.predictions.is_rated:
            drawings += _draw_by_attribute(f"rewards-{number}", heldout)
        else:
            drawings.append(_draw_both_sides(f"rewards-{number}", heldout))
    return PageSection("rewards", "Rewards and margins", drawings, nothing=_NO_RECORDS)


def _draw_both_sides(name: str, heldout: Heldout) -> Drawing:
    sides = [
        Histogram(LegendKey(side, column), heldout.predictions.rewards[:, column])
        for column, side in enumerate(PAIR_COLUMNS)
    ]
    return histogram(name, f"Rewards: {heldout.key.name}", "reward", sides)


def _draw_by_attribute(name: str, heldout: Heldout) -> Iterator[Drawing]:
    rated = heldout.predictions
    for column, attribute in enumerate(rated.attributes):
        rewards, labels = rated.rewards[:, column], rated.labels[:, column]
        present = ~np.isnan(labels) & ~np.isnan(rewards)
        if present.any():
            title = f"{attribute}: {heldout.key.name}"
            yield reward_by_label(
                f"{name}-{column}", title, heldout.key, labels[present], rewards[present]
            )


def build_calibration(sets: Sequence[Heldout]) -> PageSection:
    """Build the section on calibration, with a reliability diagram of the sets of pairs.

    It answers whether verdicts with larger margins are right more often.
    """
    keyed_pairs = [
        (heldout.key, heldout.predictions.as_metrics()) for heldout in select_pairs(sets)
    ]
    rows = [
        [
            key.name,
            format_metric(ranking.expected_calibration_error(pairs)),
            format_metric(ranking.brier(pairs)),
            format_temperature(ranking.temperature(pairs), ranking.mean_margin(pairs)),
        ]
        for key, pairs in keyed_pairs
    ]
    bins = [(key, ranking.reliability(pairs)) for key, pairs in keyed_pairs]
    tables = [PageTable(["", "ECE", "Brier score", "temperature"], rows)] if rows else []
    tables += [table for heldout in sets for table in _build_step_tables(heldout)]
    return PageSection(
        "calibration",
        "Calibration",
        drawings=[reliability_diagram("reliability", bins)] if bins else [],
        tables=tables,
        nothing=_NO_PAIRS,
    )


_STEP_METRICS = ("step_accuracy", "first_error_accuracy", "first_error_f1")


def _build_step_tables(heldout: Heldout) -> Iterator[PageTable]:
    """Yield two tables on turns or steps: their metrics, and calibration by position of a step.

    Yields nothing if no metrics of steps were logged for the set.
    """
    values = [heldout.metric(name) for name in _STEP_METRICS]
    if values[0] is None:
        return
    name = heldout.key.name
    cells = map(format_metric, values)
    yield PageTable(["", *_STEP_METRICS], [["all steps", *cells]], f"Turns and steps: {name}")
    rows = [
        [str(position), f"{count:.0f}", *map(format_metric, shares)]
        for position, (count, *shares) in by_position(heldout.metric)
    ]
    header = ["step", "labels", "mean label", "mean probability of right", "accuracy"]
    yield PageTable(header, rows, f"Calibration by the position of a step: {name}")


def build_reward_and_length(sets: Sequence[Heldout]) -> PageSection:
    """Build the section on reward and length, for all held-out sets.

    It shows whether longer replies get higher rewards.
    """
    drawings = []
    if len(sets) > 1:
        lines = [
            mean_by_length(heldout.key, *_get_lengths_and_standardised_rewards(heldout))
            for heldout in sets
        ]
        drawings.append(lengths_compared("lengths", lines))
    for number, heldout in enumerate(sets):
        lengths, rewards = _get_lengths_and_rewards(heldout)
        drawings.append(reward_by_length(f"length-{number}", heldout.key, lengths, rewards))
    rows = [_build_length_row(heldout) for heldout in select_pairs(sets)]
    header = [
        "",
        "correlation of reward and length",
        "accuracy where the longer is chosen",
        "accuracy where the shorter is chosen",
        "accuracy of always the longer",
        "lengths in",
    ]
    return PageSection(
        "length",
        "Reward against length",
        drawings=drawings,
        tables=[PageTable(header, rows)] if rows else [],
        notes=[
            "Lengths in the figures are in characters, so that models with different tokenizers "
            "can be compared. The table has the values that the run or the evaluation logged, in "
            "tokens; for a server, and if nothing was logged, it is in characters, too."
        ],
        nothing=_NO_RECORDS,
    )


def _get_lengths_and_rewards(heldout: Heldout) -> tuple[np.ndarray, np.ndarray]:
    """Collect the length in characters ``[N]`` and the reward ``[N]`` of every reply of a set.

    A reply with several attributes gets the mean of its rewards.
    """
    predictions = heldout.predictions
    lengths, rewards = predictions.lengths, predictions.rewards
    return lengths.ravel(), rewards.mean(axis=1) if predictions.is_rated else rewards.ravel()


def _get_lengths_and_standardised_rewards(heldout: Heldout) -> tuple[np.ndarray, np.ndarray]:
    lengths, rewards = _get_lengths_and_rewards(heldout)
    return lengths, (rewards - rewards.mean()) / (rewards.std() or 1.0)


def _build_length_row(heldout: Heldout) -> list[str]:
    pairs = heldout.predictions.as_metrics()
    is_logged = heldout.metric("longer_reply_accuracy") is not None
    values = (
        heldout.metric(function.__name__) if is_logged else function(pairs)
        for function in (
            ranking.length_correlation,
            ranking.accuracy_longer_chosen,
            ranking.accuracy_shorter_chosen,
            ranking.longer_reply_accuracy,
        )
    )
    cells = map(format_metric, values)
    return [heldout.key.name, *cells, heldout.length_unit("longer_reply_accuracy")]


def render_longer_baseline(heldout: Heldout) -> str:
    """Render the accuracy of always preferring the longer reply, with the unit of lengths.

    Empty for a set without pairs.
    """
    baseline = heldout.longer_baseline()
    return "" if baseline is None else f"{format_share(baseline[0])} (by {baseline[1]})"


def build_mistakes(sets: Sequence[Heldout]) -> PageSection:
    """Build the section with the most confident mistakes on each held-out set."""
    mistakes_by_set = [
        (heldout.key.name, run_report.list_mistakes(heldout.predictions, _MAX_MISTAKES))
        for heldout in sets
    ]
    return PageSection(
        "mistakes",
        "The most confident mistakes",
        mistakes=[(name, mistakes) for name, mistakes in mistakes_by_set if mistakes],
        notes=["Pairs with the most negative margins, or ratings with the largest errors."],
        nothing="the model got no record wrong" if sets else _NO_RECORDS,
    )


# The section on robustness to changes of style.

_HEADER = (
    "change",
    "pairs",
    "flipped verdicts (95%)",
    "change of reward",
    "in sd of margins",
    "absolute",
    "unchanged",
    "too long",
)


def build_robustness(reports: Sequence[RunReport]) -> PageSection:
    """Build the section on robustness: the effect of changes of style on verdicts and rewards."""
    tables: list[PageTable] = []
    notes = []
    for report in reports:
        if report.robustness is not None:
            prefix = f"{report.name}: " * (len(reports) > 1)
            notes.append(prefix + robustness_note(report.robustness))
            tables += _build_robustness_tables(prefix, report.robustness)
    nothing = "not checked; evaluate with robustness_pairs to check it"
    return PageSection("robustness", "Robustness", (), tables, (), notes, nothing)


def _build_robustness_tables(prefix: str, robustness: Robustness) -> Iterator[PageTable]:
    for side, title in (
        (BOTH, "Both replies changed: no verdict should flip"),
        (REJECTED, "Only the rejected reply changed: verdicts that flip in its favour"),
    ):
        rows = [_format_robustness_row(row) for row in robustness.rows if row.changed == side]
        yield PageTable(_HEADER, rows, prefix + title)
    best_of = [
        [f"best of {row.n}", format_metric(row.reward), f"{row.characters:.1f}"]
        for row in robustness.best_of
    ]
    title = f"{prefix}The reply of a pair with the higher reward"
    yield PageTable(["", "reward", "characters"], best_of, title)


def _format_robustness_row(row: RobustnessRow) -> list[str]:
    share = ""
    if row.share is not None:
        share = f"{format_share(row.share)} ({format_interval(row.low, row.high)})"
    shifts = (row.shift, row.shift_in_std, row.absolute_shift)
    cells = map(format_metric, shifts)
    return [row.change, str(row.pairs), share, *cells, str(row.unchanged), str(row.too_long)]
