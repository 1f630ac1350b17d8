"""Report sections on training: learning curves, throughput, memory, and its inputs."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from nemo_aligner.evaluation.predictions import Predictions
from nemo_aligner.evaluation.report.figures import (
    Drawing,
    Heldout,
    LegendKey,
    PageSection,
    PageTable,
    PlotLine,
    curve,
    of_pairs,
)
from nemo_aligner.evaluation.report.of_heldout import longer_baseline
from nemo_aligner.evaluation.report.run_report import RunReport, shares
from nemo_aligner.metrics.table import BY_SOURCE, Better, better_values, find_metric
from nemo_aligner.utils.console import show_bytes, show_number

VALIDATION = "validation-"
# Metrics to judge a model by; the first available counts.
MAIN_METRICS = ("accuracy", "pearson_mean", "loss")
_CURVES = (
    "loss", "accuracy", "pearson_mean", "reward_margin", "ece", "spearman_mean", "step_accuracy",
    "first_error_accuracy", "first_error_f1",
)  # fmt: skip
_OF_STEPS = ("lr", "grad_norm", "loss_scale")
_SPEED = ("train/tokens_per_second", "timing/train_step")
_ALSO = ("memory", "power", "mfu")


def learning_curves(reported: Sequence[RunReport]) -> PageSection:
    """Build a figure of training and validation for each metric, and tables of all validations."""
    drawings = [_of_metric(name, reported) for name in (*_CURVES, *_OF_STEPS)]
    return PageSection(
        "curves",
        "Learning curves",
        drawings=[each for each in drawings if each is not None],
        tables=list(_validations(reported)),
        notes=["Faint lines are training batches, before each update; dots are validations."],
        nothing="No training run here has logged two steps yet."
        if any(run.curves for run in reported)
        else "There is no training run here.",
    )


def main_curve(reported: Sequence[RunReport]) -> Drawing | None:
    """Draw the metric that a run is judged by, over training steps; None without one."""
    found = (_of_metric(name, reported, "main") for name in MAIN_METRICS)
    return next((each for each in found if each is not None), None)


def _of_metric(metric: str, reported: Sequence[RunReport], prefix: str = "curve") -> Drawing | None:
    is_one = len(reported) == 1
    lines = [
        line
        for number, each in enumerate(reported)
        for line in (_of_one(metric, each) if is_one else _of_several(metric, each, number))
    ]
    # A figure of one step is a dot; the tables have its number.
    if len({step for line in lines for step in line.x}) < 2:
        return None
    row = find_metric(metric)
    note = f"{row.meaning[0].upper()}{row.meaning[1:]}." if row and row.meaning else ""
    return curve(f"{prefix}-{metric}", metric, metric, lines, note)


def _of_one(metric: str, run: RunReport) -> Iterator[PlotLine]:
    """Yield lines: a colour for training, and one for each validation set."""
    if f"train/{metric}" in run.curves:
        key = LegendKey("train", 0, is_faint=metric in _CURVES)
        yield PlotLine(key, *run.curves[f"train/{metric}"])
    for place, name in enumerate(_sets_with(metric, run), start=1):
        yield PlotLine(LegendKey(name, place), *run.curves[f"{name}/{metric}"], marked=True)


def _of_several(metric: str, run: RunReport, number: int) -> Iterator[PlotLine]:
    """Yield lines: a colour for the run, and dashes for each validation set."""
    if f"train/{metric}" in run.curves:
        key = LegendKey(f"{run.name}, train", number, is_faint=metric in _CURVES)
        yield PlotLine(key, *run.curves[f"train/{metric}"])
    for place, name in enumerate(_sets_with(metric, run)):
        key = LegendKey(f"{run.name}, {name}", number, place)
        yield PlotLine(key, *run.curves[f"{name}/{metric}"], marked=True)


def _sets_with(metric: str, run: RunReport) -> list[str]:
    return [name for name in validation_sets(run) if f"{name}/{metric}" in run.curves]


def validation_sets(run: RunReport) -> list[str]:
    """Names of the sets that a run was validated on."""
    names = [name.partition("/")[0] for name in run.curves if name.startswith(VALIDATION)]
    return list(dict.fromkeys(names))


def _validations(reported: Sequence[RunReport]) -> Iterator[PageTable]:
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


def throughput(reported: Sequence[RunReport]) -> PageSection:
    """Build the section on speed and memory."""
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


def _of_speed(name: str, reported: Sequence[RunReport]) -> Drawing | None:
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


def _speed_rows(reported: Sequence[RunReport]) -> Iterator[list[str]]:
    """Yield medians: the first step of a run, and steps during a save, take longer."""
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


# Summary, data, contract, settings, versions.


def summary(reported: Sequence[RunReport], sets: Sequence[Heldout]) -> PageSection:
    """Build the summary: best validation, and the last value of every metric."""
    rows = [
        ["what it is", *(each.kind for each in reported)],
        *_rows("steps", [_steps(each) for each in reported]),
        *_rows("best validation", [_best(each) for each in reported]),
        *_rows("held-out accuracy", [_accuracy(each, sets) for each in reported]),
        *_rows("always the longer reply", [_longer(each, sets) for each in reported]),
        *_side_by_side([dict(_described(each)) for each in reported]),
    ]
    told = [line for each in reported for line in _drawn(each, len(reported) > 1)]
    header = ["", *(each.name for each in reported)]
    tables = [PageTable(header, rows)]
    metrics = _metrics(reported)
    if metrics.rows:
        tables.append(metrics)
    return PageSection("summary", "Summary", tables=tables, notes=told)


def _rows(name: str, values: Sequence[str]) -> Iterator[list[str]]:
    if any(values):
        yield [name, *values]


def _steps(run: RunReport) -> str:
    steps = [steps[-1] for steps, _ in run.curves.values()]
    return str(max(steps)) if steps else ""


def _best(run: RunReport) -> str:
    """Best value of each set's main metric; ties go to the lower loss, as for checkpoints."""
    found = []
    for name in validation_sets(run):
        main = next((each for each in MAIN_METRICS if f"{name}/{each}" in run.curves), None)
        if main is not None:
            steps, values = run.curves[f"{name}/{main}"]
            losses = dict(zip(*run.curves.get(f"{name}/loss", ((), ())), strict=True))
            sign = 1 if better_values(main) is Better.lower else -1
            _, _, at, best = min(
                (sign * value, losses.get(step, 0.0), step, value)
                for step, value in zip(steps, values, strict=True)
            )
            found.append(f"{main} {show_number(best)} at step {at} ({name})")
    return "; ".join(found)


def _accuracy(each: RunReport, sets: Sequence[Heldout]) -> str:
    found = []
    for own in of_pairs([one for one in sets if one.reported is each]):
        share = shares(own.predictions)[0]
        interval = f"{share.low:.3f} to {share.high:.3f}"
        found.append(f"{share.accuracy:.3f} ({interval}), {share.pairs} pairs")
    return "; ".join(found)


def _longer(each: RunReport, sets: Sequence[Heldout]) -> str:
    own = (longer_baseline(one) for one in sets if one.reported is each)
    return "; ".join(filter(None, own))


def _described(each: RunReport) -> Iterator[tuple[str, str]]:
    """Yield what the run printed at its start, as ``model: 143.4M parameters``."""
    for line in each.facts.get("described", []):
        what, _, said = line.partition(": ")
        yield (what, said) if said else ("note", what)


def _drawn(each: RunReport, is_one_of_many: bool) -> list[str]:
    prefix, lines = f"{each.name}: " * is_one_of_many, []
    for name, predictions in each.predictions.items():
        total, kept = each.facts.get("validation_records", {}).get(name, 0), _count(predictions)
        if total > kept:
            lines.append(f"{prefix}{name}: figures are of {kept} of {total} records, drawn once")
    return lines


def _count(predictions: Predictions) -> int:
    """Records, of which some may have several pairs."""
    records = [row.record for row in predictions.rows]
    return len(records if predictions.is_rated else set(records))


def _metrics(reported: Sequence[RunReport]) -> PageTable:
    columns: dict[str, dict[str, str]] = {}
    for each in reported:
        for name in validation_sets(each):
            title = f"{each.name}, {name.removeprefix('validation-')}"
            columns[title] = {
                key.removeprefix(f"{name}/"): show_number(values[-1])
                for key, (_, values) in each.curves.items()
                if key.startswith(f"{name}/")
            }
        if each.metrics:
            columns[each.name] = {
                key: "" if value is None else show_number(value)
                for key, value in each.metrics.items()
            }
    names = [
        name
        for name in dict.fromkeys(name for column in columns.values() for name in column)
        if not name.startswith(BY_SOURCE)
    ]
    rows = [
        [name, *(column.get(name, "") for column in columns.values()), _meaning(name)]
        for name in names
    ]
    header = ["", *columns, "meaning"]
    return PageTable(header, rows, "Metrics of the last validation, or of the evaluation")


def _meaning(name: str) -> str:
    row = find_metric(name)
    return row.meaning if row else ""


def _cell(value: Any) -> str:
    if isinstance(value, float):
        return show_number(value)
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def data(reported: Sequence[RunReport]) -> PageSection:
    """Build the tables of the data files."""
    tables = []
    for each in reported:
        for file in each.facts.get("data", []) if isinstance(each.facts.get("data"), list) else []:
            rows = [*file["rows"], *(["malformed", line] for line in file["malformed"])]
            title = f"{each.name}, {file['name']}: {file['path']} ({file['format']})"
            tables.append(PageTable(["", ""], rows, title))
        if isinstance(each.facts.get("data"), str):
            counts = [[key, str(value)] for key, value in each.facts.get("counts", {}).items()]
            tables.append(PageTable(["", ""], counts, f"{each.name}: {each.facts['data']}"))
    return PageSection("data", "Data", tables=tables, nothing="Nothing is known of it here.")


def contract(reported: Sequence[RunReport]) -> PageSection:
    """Build the section on the scoring contracts."""
    hashes = [_hash(each) for each in reported]
    tables = []
    if any(hashes):
        header = ["", *(each.name for each in reported)]
        fields = [_as_mapping(each.facts.get("contract")) for each in reported]
        tables = [PageTable(header, [["hash", *hashes], *_side_by_side(fields)])]
    notes = []
    if len({each for each in hashes if each}) > 1:
        notes = ["The contracts differ: these rewards are not of the same texts by the same rules."]
    nothing = "It is not known here."
    return PageSection("contract", "Scoring contract", (), tables, (), notes, nothing)


def _hash(each: RunReport) -> str:
    found = each.facts.get("contract_hash", each.facts.get("contract", ""))
    return found if isinstance(found, str) else ""


def _as_mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def settings(reported: Sequence[RunReport]) -> PageSection:
    """Build the tables of settings; of several runs, those that differ come first."""
    having = [each for each in reported if each.settings]
    tables = []
    header = ["", *(each.name for each in having)]
    rows = list(_side_by_side([each.settings for each in having]))
    if len(having) > 1:
        differing = [row for row in rows if len(set(row[1:])) > 1]
        tables.append(PageTable(header, differing, f"{len(differing)} settings differ"))
    if having:
        tables.append(PageTable(header, rows, "All settings"))
    nothing = "There are none here."
    return PageSection("settings", "Settings", tables=tables, nothing=nothing)


def versions(reported: Sequence[RunReport]) -> PageSection:
    """Build the table of versions."""
    having = [each for each in reported if each.facts.get("versions")]
    rows = list(_side_by_side([each.facts["versions"] for each in having]))
    ranks = [str(each.facts.get("ranks", "")) for each in having]
    if any(ranks):
        rows.append(["ranks", *ranks])
    header = ["", *(each.name for each in having)]
    tables = [PageTable(header, rows)] if rows else []
    return PageSection("versions", "Versions", tables=tables, nothing="They are not known here.")


def _side_by_side(columns: Sequence[Mapping[str, Any]]) -> Iterator[list[str]]:
    for key in dict.fromkeys(key for column in columns for key in column):
        yield [key, *(_cell(column[key]) if key in column else "" for column in columns)]
