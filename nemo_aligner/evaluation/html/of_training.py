"""What a report says of how training went: learning curves, throughput, memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from nemo_aligner.console import show_bytes, show_number
from nemo_aligner.evaluation.html.figures import Drawing, LegendKey, PlotLine, curve
from nemo_aligner.evaluation.html.reported import Reported
from nemo_aligner.evaluation.html.sections import PageSection, PageTable
from nemo_aligner.metrics.table import find_metric

VALIDATION = "validation-"
# What a model is judged by: the first that it has.
MAIN_METRICS = ("accuracy", "pearson_mean", "loss")
_CURVES = ("loss", "accuracy", "pearson_mean", "reward_margin", "ece", "spearman_mean")
_OF_STEPS = ("lr", "grad_norm", "loss_scale")
_SPEED = ("train/tokens_per_second", "timing/train_step")
_ALSO = ("memory", "power", "mfu")


def learning_curves(reported: Sequence[Reported]) -> PageSection:
    """Training and validation in one figure for each metric; below, what every validation found."""
    drawings = [_of_metric(name, reported) for name in (*_CURVES, *_OF_STEPS)]
    return PageSection(
        "curves",
        "Learning curves",
        drawings=[each for each in drawings if each is not None],
        tables=list(_validations(reported)),
        notes=["Faint lines are of training batches, before each update; dots are validations."],
        nothing="There is no training run here.",
    )


def main_curve(reported: Sequence[Reported]) -> Drawing | None:
    """Draw the metric that a run is judged by, over training steps; None without one."""
    found = (_of_metric(name, reported, "main") for name in MAIN_METRICS)
    return next((each for each in found if each is not None), None)


def _of_metric(metric: str, reported: Sequence[Reported], prefix: str = "curve") -> Drawing | None:
    is_one = len(reported) == 1
    lines = [
        line
        for number, each in enumerate(reported)
        for line in (_of_one(metric, each) if is_one else _of_several(metric, each, number))
    ]
    if not lines:
        return None
    row = find_metric(metric)
    note = f"{row.meaning[0].upper()}{row.meaning[1:]}." if row and row.meaning else ""
    return curve(f"{prefix}-{metric}", metric, metric, lines, note)


def _of_one(metric: str, run: Reported) -> Iterator[PlotLine]:
    """A colour for training, and for each set of validation."""
    if f"train/{metric}" in run.curves:
        key = LegendKey("train", 0, is_faint=metric in _CURVES)
        yield PlotLine(key, *run.curves[f"train/{metric}"])
    for place, name in enumerate(_sets_with(metric, run), start=1):
        yield PlotLine(LegendKey(name, place), *run.curves[f"{name}/{metric}"], marked=True)


def _of_several(metric: str, run: Reported, number: int) -> Iterator[PlotLine]:
    """A colour for the run, and dashes for each set of validation."""
    if f"train/{metric}" in run.curves:
        key = LegendKey(f"{run.name}, train", number, is_faint=metric in _CURVES)
        yield PlotLine(key, *run.curves[f"train/{metric}"])
    for place, name in enumerate(_sets_with(metric, run)):
        key = LegendKey(f"{run.name}, {name}", number, place)
        yield PlotLine(key, *run.curves[f"{name}/{metric}"], marked=True)


def _sets_with(metric: str, run: Reported) -> list[str]:
    return [name for name in validation_sets(run) if f"{name}/{metric}" in run.curves]


def validation_sets(run: Reported) -> list[str]:
    """Names of the sets that a run was validated on."""
    names = [name.partition("/")[0] for name in run.curves if name.startswith(VALIDATION)]
    return list(dict.fromkeys(names))


def _validations(reported: Sequence[Reported]) -> Iterator[PageTable]:
    for run in reported:
        for name in validation_sets(run):
            metrics = [each for each in _CURVES if f"{name}/{each}" in run.curves]
            steps = sorted({step for each in metrics for step in run.curves[f"{name}/{each}"][0]})
            found = [dict(zip(*run.curves[f"{name}/{each}"], strict=True)) for each in metrics]
            rows = [[str(step), *(_shown(each.get(step)) for each in found)] for step in steps]
            title = f"Validations of {run.name} on {name.removeprefix(VALIDATION)}"
            yield PageTable(["step", *metrics], rows, title)


def _shown(value: float | None) -> str:
    return "" if value is None else show_number(value)


def throughput(reported: Sequence[Reported]) -> PageSection:
    """How fast it went, and what memory it took."""
    names = list(dict.fromkeys(name for run in reported for name in run.curves))
    of_machine = [name for name in names if any(word in name.lower() for word in _ALSO)]
    drawings = [_of_speed(name, reported) for name in (*_SPEED, *of_machine)]
    rows = list(_speed_rows(reported))
    header = ["", *(run.name for run in reported)]
    return PageSection(
        "throughput",
        "Throughput and memory",
        drawings=[each for each in drawings if each is not None],
        tables=[PageTable(header, rows)] if rows else [],
        notes=["Memory is the peak of rank 0's process."] if rows else [],
        nothing="Evaluations do not measure it.",
    )


def _of_speed(name: str, reported: Sequence[Reported]) -> Drawing | None:
    lines = [
        PlotLine(LegendKey(run.name, number), *run.curves[name])
        for number, run in enumerate(reported)
        if name in run.curves
    ]
    if not lines:
        return None
    short = name.rpartition("/")[2]
    unit = "seconds" if name.startswith("timing/") else short
    own = "".join(letter if letter.isalnum() else "-" for letter in name)
    return curve(f"speed-{own}", short.replace("_", " "), unit, lines)


def _speed_rows(reported: Sequence[Reported]) -> Iterator[list[str]]:
    """Medians, as the first step of a run and those beside a save are longer."""
    for what, name in (
        ("tokens per second, median", "train/tokens_per_second"),
        ("seconds per step, median", "timing/train_step"),
        ("seconds per validation, median", "timing/validation/total_validation_time"),
        ("seconds that a save holds training up, median", "timing/save"),
    ):
        values = [run.curves.get(name, ([], []))[1] for run in reported]
        if any(values):
            yield [what, *(show_number(float(np.median(own))) if own else "" for own in values)]
    for where in ("host", "GPU"):
        peaks = [run.facts.get("peak_memory", {}).get(where) for run in reported]
        if any(peaks):
            yield [f"{where} memory", *(show_bytes(peak) if peak else "" for peak in peaks)]
