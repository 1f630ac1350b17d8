"""Figures of a report as SVG, and the sections of a page: figures, tables and texts."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from html import escape
from io import StringIO
from typing import Any, Literal

import matplotlib
import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, MaxNLocator, NullFormatter

from nemo_aligner.evaluation.predictions import Predictions
from nemo_aligner.evaluation.report.run_report import Mistake, RunReport, SourceShare
from nemo_aligner.metrics import ranking
from nemo_aligner.metrics.ranking import ConfidenceBin, wilson_interval
from nemo_aligner.utils.console import show_number

# Figures, from plain numbers.

_MOST_POINTS = 200
_MOST_TOLD = 60
_BINS = 40
_DOTS = 400
_LENGTH_BINS = 10
_LEAST_IN_BIN = 10
_DASHES: tuple[Literal["-", "--", ":", "-."], ...] = ("-", "--", ":", "-.")
_ROW = 0.24  # inches


@dataclass(frozen=True)
class LegendKey:
    """Legend entry of a line: name, colour and dashes."""

    name: str
    colour: int
    dashes: int = 0
    is_faint: bool = False

    @property
    def stroke(self) -> str:
        return COLOURS[self.colour % len(COLOURS)]

    @property
    def dash(self) -> Literal["-", "--", ":", "-."]:
        return _DASHES[self.dashes % len(_DASHES)]

    @property
    def dash_array(self) -> str:
        """Dash pattern in SVG."""
        return {"-": "none", "--": "5 3", ":": "1.5 2.5", "-.": "6 2 1.5 2"}[self.dash]


@dataclass(frozen=True)
class PlotLine:
    """Line of a figure; ``marked`` draws a dot on each of its few values."""

    key: LegendKey
    x: Sequence[float]
    y: Sequence[float]
    marked: bool = False


@dataclass(frozen=True)
class Drawing:
    """Figure with its legend and a note below it."""

    title: str
    svg: str
    keys: Sequence[LegendKey] = ()
    note: str = ""


@dataclass(frozen=True)
class Histogram:
    """Values to count."""

    key: LegendKey
    values: np.ndarray = field(repr=False)


def curve(
    name: str, title: str, unit: str, lines: Sequence[PlotLine], meaning: str = ""
) -> Drawing:
    """Draw values over training steps, with ``meaning`` as the note.

    Lines of more than 200 values are averaged down to 200 points, to keep the page small.
    """
    shown = [line if line.marked else _thinned(line) for line in lines]
    most = max((-(-len(line.x) // _MOST_POINTS) for line in lines if not line.marked), default=1)
    thinned = f" A point is the mean of up to {most} steps." if most > 1 else ""
    note = f"{meaning}{thinned}".strip()
    svg = draw(name, f"{title} over training steps", partial(_draw_curve, shown, unit))
    return Drawing(title, svg, [line.key for line in lines], note)


def _thinned(line: PlotLine) -> PlotLine:
    if len(line.x) <= _MOST_POINTS:
        return line
    x, y = (_means(np.array(values, dtype=float)) for values in (line.x, line.y))
    return PlotLine(line.key, x, y)


def _means(values: np.ndarray) -> list[float]:
    return [float(part.mean()) for part in np.array_split(values, _MOST_POINTS)]


def _draw_curve(lines: Sequence[PlotLine], unit: str, canvas: Canvas) -> None:
    for line in lines:
        key, faint = line.key, 0.45 if line.key.is_faint else 1.0
        canvas.axes.plot(line.x, line.y, key.dash, color=key.stroke, alpha=faint)
        if line.marked or len(line.x) == 1:
            _mark(canvas, line)
    canvas.axes.set_xlabel("step")
    canvas.axes.set_ylabel(unit)
    canvas.axes.xaxis.set_major_locator(MaxNLocator(nbins="auto", integer=True))


def _mark(canvas: Canvas, line: PlotLine) -> None:
    """Draw a dot on every value, with a tooltip if there are few."""
    if len(line.x) > _MOST_TOLD:
        canvas.axes.plot(line.x, line.y, ".", color=line.key.stroke)
        return
    for x, y in zip(line.x, line.y, strict=True):
        (dot,) = canvas.axes.plot([x], [y], "o", markersize=4.5, color=line.key.stroke)
        canvas.tell(dot, f"{line.key.name}, step {x:g}: {show_number(y)}")


def histogram(
    name: str, title: str, unit: str, sets: Sequence[Histogram], line_at: float | None = None
) -> Drawing:
    """Draw shares of each set's values over common bins."""
    values = np.concatenate([each.values for each in sets])
    edges = np.histogram_bin_edges(values, bins=min(_BINS, max(5, round(len(values) ** 0.5))))
    svg = draw(name, f"histogram of {title}", partial(_draw_histogram, sets, edges, unit, line_at))
    return Drawing(title, svg, [each.key for each in sets])


def _draw_histogram(
    sets: Sequence[Histogram],
    edges: np.ndarray,
    unit: str,
    line_at: float | None,
    canvas: Canvas,
) -> None:
    for each in sets:
        counts, _ = np.histogram(each.values, edges)
        shares = 100 * counts / max(1, len(each.values))
        patch = canvas.axes.stairs(
            shares, edges, fill=len(sets) <= 2, alpha=0.45, color=each.key.stroke
        )
        if len(sets) > 2:
            patch.set_alpha(1.0)
            patch.set_linestyle(each.key.dash)
        else:
            canvas.axes.stairs(shares, edges, color=each.key.stroke)
        canvas.tell(patch, f"{each.key.name}: mean {each.values.mean():.3g} of {len(each.values)}")
    if line_at is not None:
        canvas.axes.axvline(line_at, color="#444444", linewidth=0.9)
    canvas.axes.set_xlabel(unit)
    canvas.axes.set_ylabel("% of records")


def reliability_diagram(
    name: str, bins: Sequence[tuple[LegendKey, Sequence[ConfidenceBin]]]
) -> Drawing:
    """Draw the share of right verdicts over confidence, with 95% intervals (Wilson 1927)."""
    svg = draw(name, "reliability diagram", partial(_draw_reliability, bins))
    note = (
        "Each point is a bin of equally many pairs. On the diagonal the confidence equals the "
        "share that is right."
    )
    return Drawing("Reliability", svg, [key for key, _ in bins], note)


def _draw_reliability(
    sets: Sequence[tuple[LegendKey, Sequence[ConfidenceBin]]], canvas: Canvas
) -> None:
    canvas.axes.plot([0.5, 1], [0.5, 1], color="#888888", linewidth=0.9)
    for key, bins in sets:
        x = [each.confidence for each in bins]
        canvas.axes.plot(x, [each.right / each.count for each in bins], key.dash, color=key.stroke)
        for each in bins:
            share = each.right / each.count
            low, high = wilson_interval(each.right, each.count)
            canvas.axes.plot([each.confidence] * 2, [low, high], color=key.stroke, linewidth=0.8)
            (dot,) = canvas.axes.plot([each.confidence], [share], "o", ms=4.5, color=key.stroke)
            told = f"{share:.1%} right ({low:.1%} to {high:.1%})"
            canvas.tell(
                dot, f"{key.name}: {each.count} pairs, confidence {each.confidence:.3f}, {told}"
            )
    canvas.axes.set_xlabel("confidence, sigmoid(|margin|)")
    canvas.axes.set_ylabel("share that is right")
    canvas.axes.set_xlim(0.49, 1.01)


def accuracy_by_source(
    name: str, shares: Sequence[tuple[LegendKey, Sequence[SourceShare]]], most: int
) -> Drawing:
    """Draw the accuracy of every source with its interval; at most the ``most`` largest."""
    pairs: dict[str, int] = {}
    for _, rows in shares:
        for row in rows:
            pairs[row.source] = max(pairs.get(row.source, 0), row.pairs)
    names = sorted(pairs, key=lambda source: (source != "all", -pairs[source], source))
    note = ""
    if len(names) > most:
        note = f"The {most} with most pairs of {len(names)}; all are in the table."
    names = names[:most]
    height = max(1.5, 0.8 + _ROW * len(names) * max(1, 0.6 * len(shares)))
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
            told = f"{row.accuracy:.1%} ({row.low:.1%} to {row.high:.1%}) of {row.pairs} pairs"
            canvas.tell(dot, f"{key.name}, {row.source}: {told}")
    canvas.axes.axvline(0.5, color="#444444", linewidth=0.9)
    canvas.axes.set_yticks(range(len(names)), [_cut(each) for each in names])
    canvas.axes.set_ylim(len(names) - 0.5, -0.5)
    canvas.axes.set_xlabel("accuracy")


def _cut(name: str, most: int = 24) -> str:
    return name if len(name) <= most else f"{name[: most - 1]}…"


def reward_by_length(
    name: str, key: LegendKey, lengths: np.ndarray, rewards: np.ndarray
) -> Drawing:
    """Draw rewards over the lengths of replies as dots, and their means as a line.

    At most 400 replies have dots, evenly spaced in order of length.
    """
    svg = draw(name, "reward over length of the reply", partial(_draw_dots, key, lengths, rewards))
    note = "The line: means of equally many replies."
    if len(lengths) > _DOTS:
        note += f" Dots: {_DOTS} of {len(lengths)} replies."
    return Drawing(f"Reward against length: {key.name}", svg, (), note)


def _draw_dots(key: LegendKey, lengths: np.ndarray, rewards: np.ndarray, canvas: Canvas) -> None:
    lengths = lengths.clip(1)
    order = np.argsort(lengths, kind="stable")
    some = order[np.linspace(0, len(order) - 1, min(_DOTS, len(order))).astype(int)]
    canvas.axes.plot(lengths[some], rewards[some], "o", ms=2.4, mew=0, alpha=0.5, color=key.stroke)
    line = mean_by_length(key, lengths, rewards)
    canvas.axes.plot(line.x, line.y, color="#222222")
    _mark(canvas, PlotLine(LegendKey("mean", 6), line.x, line.y))
    _length_axes(canvas, "reward")


def lengths_compared(name: str, lines: Sequence[PlotLine]) -> Drawing:
    """Draw mean rewards of several models over length, each in its own standard deviations.

    Rewards of different models have no common unit.
    """
    title = "Reward against length"
    svg = draw(name, f"{title} of several models", partial(_draw_lengths, lines))
    note = "Rewards minus their mean, in standard deviations; means of equally many replies."
    return Drawing(title, svg, [line.key for line in lines], note)


def _draw_lengths(lines: Sequence[PlotLine], canvas: Canvas) -> None:
    for line in lines:
        canvas.axes.plot(line.x, line.y, line.key.dash, color=line.key.stroke, marker="o", ms=3.5)
    _length_axes(canvas, "reward (deviations)")


def _length_axes(canvas: Canvas, unit: str) -> None:
    canvas.axes.set_xscale("log")
    canvas.axes.set_xlabel("characters of the reply")
    canvas.axes.set_ylabel(unit)
    # By default a log axis has ticks only at powers of ten: none, if all lengths are in one decade.
    canvas.axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    canvas.axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
    canvas.axes.xaxis.set_minor_formatter(NullFormatter())


def mean_by_length(key: LegendKey, lengths: np.ndarray, rewards: np.ndarray) -> PlotLine:
    """Mean reward and mean length of up to ten bins by length, of ten replies or more each."""
    order = np.argsort(lengths, kind="stable")
    parts = np.array_split(order, min(_LENGTH_BINS, max(1, len(order) // _LEAST_IN_BIN)))
    x = [float(lengths[part].mean()) for part in parts]
    return PlotLine(key, x, [float(rewards[part].mean()) for part in parts])


def reward_by_label(
    name: str, title: str, key: LegendKey, labels: np.ndarray, rewards: np.ndarray
) -> Drawing:
    """Draw rewards over labels; on the diagonal the reward equals the label."""
    svg = draw(name, title, partial(_draw_labels, key, labels, rewards), HEIGHT)
    return Drawing(title, svg, (), "On the diagonal the reward equals the label.")


def _draw_labels(key: LegendKey, labels: np.ndarray, rewards: np.ndarray, canvas: Canvas) -> None:
    some = np.linspace(0, len(labels) - 1, min(_DOTS, len(labels))).astype(int)
    canvas.axes.plot(labels[some], rewards[some], "o", ms=3, mew=0, alpha=0.4, color=key.stroke)
    ends = [float(labels.min()), float(labels.max())]
    canvas.axes.plot(ends, ends, color="#888888", linewidth=0.9)
    canvas.axes.set_xlabel("label")
    canvas.axes.set_ylabel("reward")


# SVG to embed in a page: small, without scripts, text kept as text.

# Wong 2011, "Color blindness": colours that colour-blind people can tell apart, also in print.
# Eight are enough: a figure of more lines cannot be read.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#000000", "#999933")
# In inches. The page scales figures; at this size their text is readable from 360 pixels width on.
WIDTH, HEIGHT = 4.4, 2.9
_STYLE: dict[str, Any] = {
    "svg.fonttype": "none",
    "svg.hashsalt": "nemo_aligner",
    "text.parse_math": False,  # a name of the data may have dollar signs
    "font.family": "sans-serif",
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": "#666666",
    "axes.grid": True,
    "grid.color": "#e4e4e4",
    "grid.linewidth": 0.6,
    "axes.axisbelow": True,
    "lines.linewidth": 1.6,
    "xtick.color": "#444444",
    "ytick.color": "#444444",
}
_REMOVED = re.compile(
    r"<\?xml.*?\?>|<!DOCTYPE.*?>|<metadata>.*?</metadata>|<style.*?</style>", re.S
)
_POINTED_AT = re.compile(r'(?:href="#|url\(#)([^")]+)')
_SIZE = re.compile(r' (?:width|height)="[^"]*pt"')


class Canvas:
    """Axes to draw on, and tooltips of drawn artists."""

    def __init__(self, height: float) -> None:
        self.figure = Figure(figsize=(WIDTH, height), layout="constrained")
        self.axes = self.figure.add_subplot()
        self.told: dict[str, str] = {}

    def tell(self, artist: Any, text: str) -> None:
        """Show ``text`` while the pointer is over an artist."""
        name = f"told_{len(self.told)}"
        artist.set_gid(name)
        self.told[name] = text


def draw(name: str, alt: str, on: Callable[[Canvas], None], height: float = HEIGHT) -> str:
    """Render what ``on`` draws as SVG; equal numbers give equal bytes.

    ``name`` is unique on the page; ``alt`` is the text for those who cannot see the figure.
    """
    with matplotlib.rc_context(_STYLE):  # type: ignore[arg-type]
        canvas = Canvas(height)
        on(canvas)
        written = StringIO()
        canvas.figure.savefig(written, format="svg", metadata={"Date": None})
    return _for_page(written.getvalue(), name, alt, canvas.told)


def _for_page(svg: str, name: str, alt: str, told: dict[str, str]) -> str:
    svg = _REMOVED.sub("", svg).strip()
    svg = _SIZE.sub("", svg, count=2)
    svg = svg.replace("<svg ", f'<svg role="img" aria-label="{escape(alt)}" ', 1)
    for own, text in told.items():
        svg = svg.replace(f'<g id="{own}">', f"<g><title>{escape(text)}</title>", 1)
    # matplotlib gives every figure the same ids: prefix those in use, drop the rest.
    for kept in sorted(set(_POINTED_AT.findall(svg))):
        own = rf'(id="|href="#|url\(#){re.escape(kept)}(?=[")])'
        svg = re.sub(own, rf"\g<1>{name}-{kept}", svg)
    svg = re.sub(rf' id="(?!{re.escape(name)}-)[^"]*"', "", svg)
    return re.sub(r"\n\s*", "\n", svg)


# Contents of a page: sections with figures, tables and texts, as plain values.

_MOST_ROWS = 40


@dataclass(frozen=True)
class PageTable:
    """Cells as text."""

    header: Sequence[str]
    rows: Sequence[Sequence[str]]
    title: str = ""

    @property
    def is_folded(self) -> bool:
        """True if a screen shows it on demand; in print it is always shown."""
        return len(self.rows) > _MOST_ROWS


@dataclass(frozen=True)
class Headline:
    """The result of one model on one held-out set, at a glance.

    Attributes:
        name: of both, empty where the page has one.
        figures: numbers as text, each with what it is.
        verdict: the result in a sentence.
        mistakes: the worst of them, on a line each.
    """

    name: str
    figures: Sequence[tuple[str, str]]
    verdict: str
    mistakes: Sequence[str] = ()


@dataclass(frozen=True)
class PageSection:
    """Section of the page; ``nothing`` says why it is empty."""

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
        return not (self.headlines or self.drawings or self.tables or self.mistakes)


@dataclass(frozen=True)
class Heldout:
    """A held-out set of a run or an evaluation, and how figures show it."""

    key: LegendKey
    reported: RunReport
    name: str
    predictions: Predictions

    def metric(self, name: str) -> float | None:
        """Return a metric that the run or the evaluation recorded for this set; None if it did not.

        Of a run it is that of the last validation.
        """
        _, values = self.reported.curves.get(f"{self.name}/{name}", ((), ()))
        return values[-1] if values else self.reported.metrics.get(name)

    def longer_baseline(self) -> tuple[float, str] | None:
        """Return the accuracy of always taking the longer reply, and the unit of its lengths.

        That is tokens, as in logs and evaluations, where one recorded it; else characters.
        """
        if self.predictions.is_rated:
            return None
        recorded = self.metric("longer_reply_accuracy")
        if recorded is not None:
            return recorded, self.length_unit()
        return ranking.longer_reply_accuracy(self.predictions.as_metrics()), self.length_unit()

    def length_unit(self) -> str:
        """Return the unit of recorded lengths of pairs; a server's evaluation has no tokens."""
        is_server = str(self.reported.facts.get("checkpoint", "")).startswith("http")
        recorded = self.metric("longer_reply_accuracy")
        return "characters" if is_server or recorded is None else "tokens"


def heldout_sets(reported: Sequence[RunReport]) -> list[Heldout]:
    """List all held-out sets; those of one run differ in dashes, or in colour if it is alone."""
    found = []
    for number, each in enumerate(reported):
        for place, (name, predictions) in enumerate(each.predictions.items()):
            label = each.name if len(each.predictions) == 1 else f"{each.name}, {name}"
            colour, dashes = (number, place) if len(reported) > 1 else (place, 0)
            found.append(Heldout(LegendKey(label, colour, dashes), each, name, predictions))
    return found


def of_pairs(sets: Sequence[Heldout]) -> list[Heldout]:
    """Select the sets of pairs."""
    return [each for each in sets if not each.predictions.is_rated]
