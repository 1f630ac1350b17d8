"""Figures of a report as SVG, and the parts that a page consists of.

The functions of the first part draw figures from plain numbers with matplotlib. The second part
defines sections, tables, headlines and held-out sets as plain values, which the template renders.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Literal

import numpy as np
from matplotlib.ticker import LogLocator, MaxNLocator, NullFormatter, PercentFormatter

from nemo_aligner.evaluation.predictions import Predictions
from nemo_aligner.evaluation.report.run_report import Mistake, RunReport, SourceShare
from nemo_aligner.evaluation.report.svg import (
    COLOURS,
    FAINT,
    HEIGHT,
    INK,
    REFERENCE,
    TICKS,
    Canvas,
    css_colour,
    draw,
)
from nemo_aligner.metrics import ranking
from nemo_aligner.metrics.ranking import ConfidenceBin, wilson_interval
from nemo_aligner.utils.console import show_number

# How the page writes numbers: percentages for accuracies, and four digits for all other metrics.


def format_share(share: float) -> str:
    """Format a fraction between 0 and 1 as a percentage, such as ``79.6%``."""
    return f"{share:.1%}"


def format_interval(low: float, high: float) -> str:
    """Format an interval of fractions as percentages, such as ``74.0% to 84.2%``."""
    return f"{format_share(low)} to {format_share(high)}"


def format_metric(value: float | None) -> str:
    """Format a metric with exactly four significant digits, such as ``0.7958`` or ``1.000``.

    Digits before the point are never dropped. None and NaN give an empty text.
    """
    if value is None or math.isnan(value):
        return ""
    return show_number(value) if abs(value) >= 1e4 else f"{value:#.4g}".rstrip(".")


def format_temperature(value: float | None, mean_margin: float) -> str:
    """Format a fitted temperature; if there is none, say why (see ``ranking.fit_temperature``)."""
    if value is not None and not math.isnan(value):
        return format_metric(value)
    if mean_margin <= 0:
        return "none: no T fits, because the mean margin is not positive"
    return "none: no T fits best, because no pair is ordered wrongly"


# Functions that draw figures from plain numbers.

_MAX_POINTS = 200
_MAX_TOOLTIPS = 60
_MAX_BINS = 40
_MAX_DOTS = 400
_MAX_LENGTH_BINS = 10
_MIN_IN_LENGTH_BIN = 10
_DASHES: tuple[Literal["-", "--", ":", "-."], ...] = ("-", "--", ":", "-.")
_ROW_HEIGHT = 0.24  # inches


@dataclass(frozen=True)
class LegendKey:
    """Entry of a legend: a name, and how its line is drawn.

    Attributes:
        name: text of the legend.
        colour, dashes: indices of a colour and a dash pattern; they wrap around.
        is_faint: True to draw the line half transparent.
    """

    name: str
    colour: int
    dashes: int = 0
    is_faint: bool = False

    @property
    def stroke(self) -> str:
        """Colour of the line, as ``#rrggbb``."""
        return COLOURS[self.colour % len(COLOURS)]

    @property
    def css_stroke(self) -> str:
        """Colour of the line as a CSS variable, which differs on a dark screen."""
        return css_colour(self.stroke)

    @property
    def dash(self) -> Literal["-", "--", ":", "-."]:
        """Dash pattern of the line, for matplotlib."""
        return _DASHES[self.dashes % len(_DASHES)]

    @property
    def dash_array(self) -> str:
        """Dash pattern of the line, for SVG."""
        return {"-": "none", "--": "5 3", ":": "1.5 2.5", "-.": "6 2 1.5 2"}[self.dash]


@dataclass(frozen=True)
class PlotLine:
    """Line of a figure.

    Attributes:
        key: entry of the legend, with the line's colour and dashes.
        x, y: coordinates of the points, of equal length.
        marked: True to draw a dot on each point.
    """

    key: LegendKey
    x: Sequence[float]
    y: Sequence[float]
    marked: bool = False


@dataclass(frozen=True)
class Drawing:
    """A figure as SVG, with its title, the entries of its legend, and a note below it."""

    title: str
    svg: str
    keys: Sequence[LegendKey] = ()
    note: str = ""


@dataclass(frozen=True)
class Histogram:
    """One of the sets of values in a histogram, ``[N]``, and its entry in the legend."""

    key: LegendKey
    values: np.ndarray = field(repr=False)


def curve(
    name: str,
    title: str,
    unit: str,
    lines: Sequence[PlotLine],
    meaning: str = "",
    *,
    is_fraction: bool = False,
) -> Drawing:
    """Draw values over training steps, with ``meaning`` as the note.

    Lines without marks are averaged down to 200 points at most, to keep the page small.

    Args:
        name: identifier of the figure, unique on the page.
        title: heading of the figure.
        unit: label of the vertical axis.
        lines: what to draw.
        meaning: what the figure shows, in a sentence.
        is_fraction: True to write the values as percentages.
    """
    averaged = [line if line.marked else _average_line(line) for line in lines]
    steps_per_point = max(
        (-(-len(line.x) // _MAX_POINTS) for line in lines if not line.marked), default=1
    )
    averaging = f" A point is the mean of up to {steps_per_point} steps."
    note = f"{meaning}{averaging if steps_per_point > 1 else ''}".strip()
    svg = draw(
        name, f"{title} over training steps", partial(_draw_curve, averaged, unit, is_fraction)
    )
    return Drawing(title, svg, [line.key for line in lines], note)


def _average_line(line: PlotLine) -> PlotLine:
    if len(line.x) <= _MAX_POINTS:
        return line
    x, y = (_average_chunks(np.array(values, dtype=float)) for values in (line.x, line.y))
    return PlotLine(line.key, x, y)


def _average_chunks(values: np.ndarray) -> list[float]:
    return [float(part.mean()) for part in np.array_split(values, _MAX_POINTS)]


def _draw_curve(lines: Sequence[PlotLine], unit: str, is_fraction: bool, canvas: Canvas) -> None:
    for line in lines:
        key, opacity = line.key, FAINT if line.key.is_faint else 1.0
        canvas.axes.plot(line.x, line.y, key.dash, color=key.stroke, alpha=opacity)
        if line.marked or len(line.x) == 1:
            _draw_marks(canvas, line, is_fraction)
    if is_fraction:
        canvas.axes.yaxis.set_major_formatter(PercentFormatter(1.0))
    canvas.axes.set_xlabel("step")
    canvas.axes.set_ylabel(unit)
    canvas.axes.xaxis.set_major_locator(MaxNLocator(nbins="auto", integer=True))


def _draw_marks(
    canvas: Canvas, line: PlotLine, is_fraction: bool = False, axis: str = "step"
) -> None:
    """Draw a dot on every point; each dot has a tooltip unless there are many."""
    if len(line.x) > _MAX_TOOLTIPS:
        canvas.axes.plot(line.x, line.y, ".", color=line.key.stroke)
        return
    for x, y in zip(line.x, line.y, strict=True):
        (dot,) = canvas.axes.plot([x], [y], "o", markersize=4.5, color=line.key.stroke)
        height = format_share(y) if is_fraction else format_metric(y)
        canvas.add_tooltip(dot, f"{line.key.name}, {axis} {x:g}: {height}")


def histogram(
    name: str, title: str, unit: str, sets: Sequence[Histogram], line_at: float | None = None
) -> Drawing:
    """Draw histograms of several sets over common bins, as fractions of each set.

    Args:
        name: identifier of the figure.
        title: heading of the figure.
        unit: label of the horizontal axis.
        sets: the values to count.
        line_at: where to draw a vertical line; None for no line.
    """
    values = np.concatenate([histogram.values for histogram in sets])
    edges = np.histogram_bin_edges(values, bins=min(_MAX_BINS, max(5, round(len(values) ** 0.5))))
    svg = draw(name, f"histogram of {title}", partial(_draw_histogram, sets, edges, unit, line_at))
    return Drawing(title, svg, [histogram.key for histogram in sets])


def _draw_histogram(
    sets: Sequence[Histogram],
    edges: np.ndarray,
    unit: str,
    line_at: float | None,
    canvas: Canvas,
) -> None:
    for histogram in sets:
        counts, _ = np.histogram(histogram.values, edges)
        shares = 100 * counts / max(1, len(histogram.values))
        patch = canvas.axes.stairs(
            shares, edges, fill=len(sets) <= 2, alpha=0.45, color=histogram.key.stroke
        )
        if len(sets) > 2:
            patch.set_alpha(1.0)
            patch.set_linestyle(histogram.key.dash)
        else:
            canvas.axes.stairs(shares, edges, color=histogram.key.stroke)
        mean, count = histogram.values.mean(), len(histogram.values)
        canvas.add_tooltip(patch, f"{histogram.key.name}: mean {mean:.3g} of {count}")
    if line_at is not None:
        canvas.axes.axvline(line_at, color=TICKS, linewidth=0.9)
    canvas.axes.set_xlabel(unit)
    canvas.axes.set_ylabel("% of records")


def reliability_diagram(
    name: str, bins: Sequence[tuple[LegendKey, Sequence[ConfidenceBin]]]
) -> Drawing:
    """Draw accuracy over confidence, a point with its 95% interval (Wilson 1927) for each bin."""
    svg = draw(name, "reliability diagram", partial(_draw_reliability, bins))
    note = (
        "Each point is a bin; all bins have about the same number of pairs. On the diagonal the "
        "confidence equals the accuracy."
    )
    return Drawing("Reliability", svg, [key for key, _ in bins], note)


def _draw_reliability(
    sets: Sequence[tuple[LegendKey, Sequence[ConfidenceBin]]], canvas: Canvas
) -> None:
    canvas.axes.plot([0.5, 1], [0.5, 1], color=REFERENCE, linewidth=0.9)
    for key, bins in sets:
        x = [bin.confidence for bin in bins]
        canvas.axes.plot(x, [bin.right / bin.count for bin in bins], key.dash, color=key.stroke)
        for bin in bins:
            share = bin.right / bin.count
            low, high = wilson_interval(bin.right, bin.count)
            canvas.axes.plot([bin.confidence] * 2, [low, high], color=key.stroke, linewidth=0.8)
            (dot,) = canvas.axes.plot([bin.confidence], [share], "o", ms=4.5, color=key.stroke)
            accuracy = f"{format_share(share)} right ({format_interval(low, high)})"
            confidence = format_share(bin.confidence)
            canvas.add_tooltip(
                dot, f"{key.name}: {bin.count} pairs, confidence {confidence}, {accuracy}"
            )
    canvas.axes.set_xlabel("confidence, sigmoid(|margin|)")
    canvas.axes.set_ylabel("accuracy")
    canvas.axes.xaxis.set_major_formatter(PercentFormatter(1.0))
    canvas.axes.yaxis.set_major_formatter(PercentFormatter(1.0))
    canvas.axes.set_xlim(0.49, 1.01)


def accuracy_by_source(
    name: str, shares: Sequence[tuple[LegendKey, Sequence[SourceShare]]], max_sources: int
) -> Drawing:
    """Draw the accuracy on each source with its interval, for the sources with most pairs."""
    pairs: dict[str, int] = {}
    for _, rows in shares:
        for row in rows:
            pairs[row.source] = max(pairs.get(row.source, 0), row.pairs)
    names = sorted(pairs, key=lambda source: (source != "all", -pairs[source], source))
    note = ""
    if len(names) > max_sources:
        note = (
            f"The figure has the {max_sources} sources with most pairs; the table has all "
            f"{len(names)}."
        )
    names = names[:max_sources]
    height = max(1.5, 0.8 + _ROW_HEIGHT * len(names) * max(1, 0.6 * len(shares)))
    svg = draw(name, "accuracy by source", partial(_draw_sources, shares, names), height)
    return Drawing("Accuracy by source", svg, [key for key, _ in shares], note)


def _draw_sources(
    shares: Sequence[tuple[LegendKey, Sequence[SourceShare]]], names: Sequence[str], canvas: Canvas
) -> None:
    for number, (key, rows) in enumerate(shares):
        offset = 0.6 * ((number + 0.5) / len(shares) - 0.5)
        for row in rows:
            if row.source not in names:
                continue
            y = names.index(row.source) + offset
            canvas.axes.plot([row.low, row.high], [y, y], color=key.stroke, linewidth=1.2)
            (dot,) = canvas.axes.plot([row.accuracy], [y], "o", markersize=5, color=key.stroke)
            interval = format_interval(row.low, row.high)
            accuracy = f"{format_share(row.accuracy)} ({interval}) of {row.pairs} pairs"
            canvas.add_tooltip(dot, f"{key.name}, {row.source}: {accuracy}")
    canvas.axes.axvline(0.5, color=TICKS, linewidth=0.9)
    canvas.axes.set_yticks(range(len(names)), [_truncate(name) for name in names])
    canvas.axes.set_ylim(len(names) - 0.5, -0.5)
    canvas.axes.set_xlabel("accuracy")
    canvas.axes.xaxis.set_major_formatter(PercentFormatter(1.0))


def _truncate(name: str, max_length: int = 24) -> str:
    return name if len(name) <= max_length else f"{name[: max_length - 1]}…"


def reward_by_length(
    name: str, key: LegendKey, lengths: np.ndarray, rewards: np.ndarray
) -> Drawing:
    """Draw rewards over the lengths of N replies as dots, and their means as a line.

    At most 400 replies have dots, evenly spaced in order of length.

    Args:
        name: identifier of the figure.
        key: legend entry of the model.
        lengths: characters of the replies, ``[N]``.
        rewards: their rewards, ``[N]``.
    """
    svg = draw(name, "reward over length of the reply", partial(_draw_dots, key, lengths, rewards))
    note = "The line shows the means of bins with about the same number of replies."
    if len(lengths) > _MAX_DOTS:
        note += f" The dots are {_MAX_DOTS} of {len(lengths)} replies."
    return Drawing(f"Reward against length: {key.name}", svg, (), note)


def _draw_dots(key: LegendKey, lengths: np.ndarray, rewards: np.ndarray, canvas: Canvas) -> None:
    lengths = lengths.clip(1)
    order = np.argsort(lengths, kind="stable")
    drawn = order[np.linspace(0, len(order) - 1, min(_MAX_DOTS, len(order))).astype(int)]
    canvas.axes.plot(
        lengths[drawn], rewards[drawn], "o", ms=2.4, mew=0, alpha=0.5, color=key.stroke
    )
    line = mean_by_length(key, lengths, rewards)
    canvas.axes.plot(line.x, line.y, color=INK)
    _draw_marks(canvas, PlotLine(LegendKey("mean", 6), line.x, line.y), axis="length")
    _set_length_axes(canvas, "reward")


def lengths_compared(name: str, lines: Sequence[PlotLine]) -> Drawing:
    """Draw standardised mean rewards of several models over length.

    Rewards of different models have no common unit, so the rewards of each model are in its own
    standard deviations.
    """
    title = "Reward against length"
    svg = draw(name, f"{title} of several models", partial(_draw_lengths, lines))
    note = (
        "Rewards minus their mean, in standard deviations. Each point is the mean of a bin; all "
        "bins have about the same number of replies."
    )
    return Drawing(title, svg, [line.key for line in lines], note)


def _draw_lengths(lines: Sequence[PlotLine], canvas: Canvas) -> None:
    for line in lines:
        canvas.axes.plot(line.x, line.y, line.key.dash, color=line.key.stroke, marker="o", ms=3.5)
    _set_length_axes(canvas, "reward (deviations)")


def _set_length_axes(canvas: Canvas, unit: str) -> None:
    canvas.axes.set_xscale("log")
    canvas.axes.set_xlabel("characters of the reply")
    canvas.axes.set_ylabel(unit)
    # By default a log axis has ticks only at powers of ten, so none if all lengths are between two.
    canvas.axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    canvas.axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
    canvas.axes.xaxis.set_minor_formatter(NullFormatter())


def mean_by_length(key: LegendKey, lengths: np.ndarray, rewards: np.ndarray) -> PlotLine:
    """Compute mean length and mean reward by bin of length; both arrays are ``[N]``.

    There are up to ten bins of about the same number of replies, with at least ten replies each.
    """
    order = np.argsort(lengths, kind="stable")
    parts = np.array_split(order, min(_MAX_LENGTH_BINS, max(1, len(order) // _MIN_IN_LENGTH_BIN)))
    x = [float(lengths[part].mean()) for part in parts]
    return PlotLine(key, x, [float(rewards[part].mean()) for part in parts])


def reward_by_label(
    name: str, title: str, key: LegendKey, labels: np.ndarray, rewards: np.ndarray
) -> Drawing:
    """Draw the rewards of N replies over their labels, both ``[N]``, as dots."""
    svg = draw(name, title, partial(_draw_labels, key, labels, rewards), HEIGHT)
    return Drawing(title, svg, (), "On the diagonal the reward equals the label.")


def _draw_labels(key: LegendKey, labels: np.ndarray, rewards: np.ndarray, canvas: Canvas) -> None:
    drawn = np.linspace(0, len(labels) - 1, min(_MAX_DOTS, len(labels))).astype(int)
    canvas.axes.plot(labels[drawn], rewards[drawn], "o", ms=3, mew=0, alpha=0.4, color=key.stroke)
    ends = [float(labels.min()), float(labels.max())]
    canvas.axes.plot(ends, ends, color=REFERENCE, linewidth=0.9)
    canvas.axes.set_xlabel("label")
    canvas.axes.set_ylabel("reward")


# Parts of a page, as plain values: sections with headlines, figures, tables and mistakes.

_MAX_OPEN_ROWS = 40


@dataclass(frozen=True)
class PageTable:
    """A table of the page.

    Attributes:
        header: names of the columns.
        rows: cells of each row, as text.
        title: heading above the table; "" for none.
    """

    header: Sequence[str]
    rows: Sequence[Sequence[str]]
    title: str = ""

    @property
    def is_folded(self) -> bool:
        """True if the table is so long that the page folds it; in print it is always shown."""
        return len(self.rows) > _MAX_OPEN_ROWS


@dataclass(frozen=True)
class Headline:
    """The result of one model on one held-out set, at a glance.

    Attributes:
        name: name of the model and the set; empty if the page has only one headline.
        figures: (number as text, what it is) for the large numbers.
        verdict: the result in a sentence.
        mistakes: the worst mistakes, each as one line of text.
    """

    name: str
    figures: Sequence[tuple[str, str]]
    verdict: str
    mistakes: Sequence[str] = ()


@dataclass(frozen=True)
class PageSection:
    """A section of the page.

    Attributes:
        id: anchor of the section in links.
        title: its heading.
        drawings, tables: its figures and tables.
        mistakes: (heading, mistakes) for each list of mistakes.
        notes: paragraphs of text.
        nothing: why the page leaves the section out if it is empty.
        headlines: results at a glance, on the first screen only.
    """

    id: str
    title: str
    drawings: Sequence[Drawing] = ()
    tables: Sequence[PageTable] = ()
    mistakes: Sequence[tuple[str, Sequence[Mistake]]] = ()
    notes: Sequence[str] = ()
    nothing: str = ""
    headlines: Sequence[Headline] = ()

    @property
    def is_empty(self) -> bool:
        """True if the section has nothing but notes; the page then leaves it out."""
        return not (self.headlines or self.drawings or self.tables or self.mistakes)


@dataclass(frozen=True)
class Heldout:
    """A held-out set of a run or an evaluation.

    Attributes:
        key: its entry in legends.
        report: the run or the evaluation.
        name: name of the set.
        predictions: the model's predictions on it.
    """

    key: LegendKey
    report: RunReport
    name: str
    predictions: Predictions

    def metric(self, name: str) -> float | None:
        """Look up a metric of the model whose ``predictions`` these are; None if it is unknown.

        The predictions are those of the evaluation, of the model that the run has exported, or, if
        it has not finished, of its last validation.
        """
        exported = self.report.exported.get("metrics", {})
        if f"{self.name}/{name}" in exported:
            return exported[f"{self.name}/{name}"]
        _, values = self.report.curves.get(f"{self.name}/{name}", ((), ()))
        return values[-1] if values else self.report.metrics.get(name)

    def longer_baseline(self) -> tuple[float, str] | None:
        """Return the accuracy of always preferring the longer reply, and the unit of lengths.

        If the accuracy was logged, it is returned; the logged one usually compares tokens.
        Otherwise it is computed from lengths in characters. None for rated replies.
        """
        if self.predictions.is_rated:
            return None
        recorded = self.metric("longer_reply_accuracy")
        if recorded is None:
            recorded = ranking.longer_reply_accuracy(self.predictions.as_metrics())
        return recorded, self.length_unit("longer_reply_accuracy")

    def length_unit(self, baseline: str) -> str:
        """Return the unit of lengths in a metric named ``baseline``: tokens or characters.

        An evaluation of a server has no tokenizer, so it counts characters. They are also counted
        if the metric was not logged, and the report computes it.
        """
        is_server = str(self.report.facts.get("checkpoint", "")).startswith("http")
        return "characters" if is_server or self.metric(baseline) is None else "tokens"


def heldout_sets(reports: Sequence[RunReport]) -> list[Heldout]:
    """List all held-out sets of some runs, with their colours.

    Every run has a colour, and its sets differ in their dashes. If there is one run, its sets
    differ in colour.
    """
    sets = []
    for run_index, report in enumerate(reports):
        for set_index, (name, predictions) in enumerate(report.predictions.items()):
            label = report.name if len(report.predictions) == 1 else f"{report.name}, {name}"
            colour, dashes = (run_index, set_index) if len(reports) > 1 else (set_index, 0)
            sets.append(Heldout(LegendKey(label, colour, dashes), report, name, predictions))
    return sets


def select_pairs(sets: Sequence[Heldout]) -> list[Heldout]:
    """Select the held-out sets of pairs or benchmark items, which have verdicts."""
    return [heldout for heldout in sets if not heldout.predictions.is_rated]
