"""Report sections on held-out records: accuracy, rewards, calibration, length, mistakes."""

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
    histogram,
    lengths_compared,
    mean_by_length,
    of_pairs,
    reliability_diagram,
    reward_by_label,
    reward_by_length,
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
from nemo_aligner.utils.console import show_number

_MOST_SOURCES = 30
MOST_MISTAKES = 10
_NO_PAIRS = "There are no pairs here."
_NO_RECORDS = "There are no held-out rewards here: nothing was validated, or evaluate wrote none."


def accuracy(sets: Sequence[Heldout], reported: Sequence[RunReport]) -> PageSection:
    """Build accuracy by source with intervals, and the tables of benchmarks."""
    shares = [(each.key, run_report.shares(each.predictions)) for each in of_pairs(sets)]
    is_one = len(shares) == 1
    rows = [
        [
            *([] if is_one else [key.name]),
            row.source,
            str(row.pairs),
            f"{row.accuracy:.3f}",
            _interval(row.low, row.high),
        ]
        for key, found in shares
        for row in found
    ]
    header = [*([] if is_one else [""]), "source", "pairs", "accuracy", "95% interval"]
    tables = [PageTable(header, rows)] if rows else []
    tables += [_benchmark(each) for each in reported if each.rows]
    drawings = [accuracy_by_source("sources", shares, _MOST_SOURCES)] if shares else []
    notes = ["95% intervals are Wilson's. A tied pair counts as half right."] if rows else []
    return PageSection("accuracy", "Accuracy by source", drawings, tables, (), notes, _NO_PAIRS)


def _benchmark(each: RunReport) -> PageTable:
    header = ["", "", "value", "95% interval", "items"]
    return PageTable(header, [_task_row(row) for row in each.rows], f"{each.name}: {each.kind}")


def _interval(low: float, high: float) -> str:
    return f"{low:.3f} to {high:.3f}"


def _task_row(row: TaskRow) -> list[str]:
    interval = "" if row.low is None or row.high is None else _interval(row.low, row.high)
    count = "" if row.count is None else str(row.count)
    return [row.level.value, row.name, f"{row.value:.4f}", interval, count]


def rewards(sets: Sequence[Heldout]) -> PageSection:
    """Build the histograms of margins and rewards; of ratings, rewards over labels."""
    pairs = of_pairs(sets)
    drawings: list[Drawing] = []
    if pairs:
        margins = [Histogram(each.key, -np.diff(each.predictions.rewards)[:, 0]) for each in pairs]
        drawings.append(
            histogram("margins", "Reward margin", "chosen minus rejected", margins, 0.0)
        )
    for number, each in enumerate(sets):
        if each.predictions.is_rated:
            drawings += _by_attribute(f"rewards-{number}", each)
        else:
            drawings.append(_both_sides(f"rewards-{number}", each))
    return PageSection("rewards", "Rewards and margins", drawings, nothing=_NO_RECORDS)


def _both_sides(name: str, each: Heldout) -> Drawing:
    sides = [
        Histogram(LegendKey(side, column), each.predictions.rewards[:, column])
        for column, side in enumerate(PAIR_COLUMNS)
    ]
    return histogram(name, f"Rewards: {each.key.name}", "reward", sides)


def _by_attribute(name: str, each: Heldout) -> Iterator[Drawing]:
    rated = each.predictions
    for column, attribute in enumerate(rated.attributes):
        own, labels = rated.rewards[:, column], rated.labels[:, column]
        present = ~np.isnan(labels) & ~np.isnan(own)
        if present.any():
            title = f"{attribute}: {each.key.name}"
            yield reward_by_label(
                f"{name}-{column}", title, each.key, labels[present], own[present]
            )


def reliability(sets: Sequence[Heldout]) -> PageSection:
    """Build the section on calibration: do larger margins mean right verdicts?"""
    pairs = [(each.key, each.predictions.as_metrics()) for each in of_pairs(sets)]
    rows = [
        [
            key.name,
            show_number(ranking.expected_calibration_error(each)),
            show_number(ranking.brier(each)),
            show_number(ranking.temperature(each)),
        ]
        for key, each in pairs
    ]
    bins = [(key, ranking.reliability(each)) for key, each in pairs]
    tables = [PageTable(["", "ECE", "Brier score", "temperature"], rows)] if rows else []
    tables += [table for each in sets for table in _of_steps(each)]
    return PageSection(
        "calibration",
        "Calibration",
        drawings=[reliability_diagram("reliability", bins)] if bins else [],
        tables=tables,
        nothing=_NO_PAIRS,
    )


_OF_STEPS = ("step_accuracy", "first_error_accuracy", "first_error_f1")


def _of_steps(each: Heldout) -> Iterator[PageTable]:
    """Yield how the steps of a set are judged, and how probable right is at each position."""
    found = [each.metric(name) for name in _OF_STEPS]
    if found[0] is None:
        return
    name = each.key.name
    shown = ["" if value is None else f"{value:.3f}" for value in found]
    yield PageTable(["", *_OF_STEPS], [["all steps", *shown]], f"Turns and steps: {name}")
    rows = [
        [str(place), f"{count:.0f}", *(f"{share:.3f}" for share in shares)]
        for place, (count, *shares) in by_position(each.metric)
    ]
    header = ["step", "labels", "mean label", "mean probability of right", "accuracy"]
    yield PageTable(header, rows, f"Calibration by the position of a step: {name}")


def reward_and_length(sets: Sequence[Heldout]) -> PageSection:
    """Build the section on length: do longer replies get higher rewards?"""
    drawings = []
    if len(sets) > 1:
        lines = [mean_by_length(each.key, *_standardised(each)) for each in sets]
        drawings.append(lengths_compared("lengths", lines))
    for number, each in enumerate(sets):
        drawings.append(reward_by_length(f"length-{number}", each.key, *_lengths_and_rewards(each)))
    rows = [_length_row(each) for each in of_pairs(sets)]
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
            "The figures measure replies in characters, which models with different tokenizers "
            "share. The table has what the run or the evaluation recorded, in tokens; without a "
            "record, and for a server, it has characters."
        ],
        nothing=_NO_RECORDS,
    )


def _lengths_and_rewards(each: Heldout) -> tuple[np.ndarray, np.ndarray]:
    """Characters and reward of every reply; the mean reward if there are several attributes."""
    lengths, rewards = each.predictions.lengths, each.predictions.rewards
    return lengths.ravel(), rewards.mean(axis=1) if each.predictions.is_rated else rewards.ravel()


def _standardised(each: Heldout) -> tuple[np.ndarray, np.ndarray]:
    lengths, found = _lengths_and_rewards(each)
    return lengths, (found - found.mean()) / (found.std() or 1.0)


def _length_row(each: Heldout) -> list[str]:
    pairs = each.predictions.as_metrics()
    is_recorded = each.metric("longer_reply_accuracy") is not None
    values = (
        each.metric(function.__name__) if is_recorded else function(pairs)
        for function in (
            ranking.length_correlation,
            ranking.accuracy_longer_chosen,
            ranking.accuracy_shorter_chosen,
            ranking.longer_reply_accuracy,
        )
    )
    shown = ("" if value is None else show_number(value) for value in values)
    return [each.key.name, *shown, each.length_unit()]


def longer_baseline(each: Heldout) -> str:
    """Render the accuracy that length alone would have, with its unit; empty without pairs."""
    found = each.longer_baseline()
    return "" if found is None else f"{found[0]:.3f} (by {found[1]})"


def mistakes(sets: Sequence[Heldout]) -> PageSection:
    """Build the list of the most confident mistakes of each model."""
    found = [(each.key.name, run_report.mistakes(each.predictions, MOST_MISTAKES)) for each in sets]
    return PageSection(
        "mistakes",
        "The most confident mistakes",
        mistakes=[(name, some) for name, some in found if some],
        notes=["Of pairs the most negative margins; of ratings the largest errors."],
        nothing="No record was got wrong." if sets else _NO_RECORDS,
    )


# Robustness to style.

_HEADER = (
    "change",
    "pairs",
    "verdicts that turn (95%)",
    "rewards move by",
    "in sd of margins",
    "absolute",
    "unchanged",
    "too long",
)


def robustness(reported: Sequence[RunReport]) -> PageSection:
    """Build the section on changes of style, of both replies and of the rejected one alone."""
    tables: list[PageTable] = []
    notes = []
    for each in reported:
        if each.robustness is not None:
            prefix = f"{each.name}: " * (len(reported) > 1)
            notes.append(prefix + robustness_note(each.robustness))
            tables += _tables(prefix, each.robustness)
    nothing = "It was not checked: evaluate's robustness_pairs does."
    return PageSection("robustness", "Robustness", (), tables, (), notes, nothing)


def _tables(prefix: str, found: Robustness) -> Iterator[PageTable]:
    for side, title in (
        (BOTH, "Both replies changed: no verdict should turn"),
        (REJECTED, "The rejected reply alone changed: verdicts that turn in its favour"),
    ):
        rows = [_cells(row) for row in found.rows if row.changed == side]
        yield PageTable(_HEADER, rows, prefix + title)
    best = [
        [f"best of {row.n}", show_number(row.reward), f"{row.characters:.1f}"]
        for row in found.best_of
    ]
    yield PageTable(["", "reward", "characters"], best, f"{prefix}The best by reward of a pair")


def _cells(row: RobustnessRow) -> list[str]:
    share = "" if row.share is None else f"{row.share:.3f} ({row.low:.3f} to {row.high:.3f})"
    shifts = (row.shift, row.shift_in_std, row.absolute_shift)
    shown = ["" if shift is None else show_number(shift) for shift in shifts]
    return [row.change, str(row.pairs), share, *shown, str(row.unchanged), str(row.too_long)]
