"""Report sections on training runs: learning curves, throughput and memory, and the inputs.

The inputs are the data files, the settings, the scoring contract and the versions. Each public
function builds one section of the page, from all reported runs and evaluations.
"""

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
    format_interval,
    format_metric,
    format_share,
    format_temperature,
    select_pairs,
)
from nemo_aligner.evaluation.report.heldout_sections import render_longer_baseline
from nemo_aligner.evaluation.report.run_report import RunReport, compute_shares
from nemo_aligner.metrics.table import (
    BY_PRINCIPLE,
    OF_PARTS,
    POSITION,
    Better,
    better_values,
    find_metric,
    split_name,
)
from nemo_aligner.training.heldout import MOST_RECORDS
from nemo_aligner.utils.console import show_bytes, show_number

VALIDATION = "validation-"
# Metrics that a model is judged by; the first one that was logged is used.
MAIN_METRICS = ("accuracy", "pearson_mean", "loss")
_QUALITY_METRICS = (
    "loss", "accuracy", "pearson_mean", "reward_margin", "ece", "spearman_mean", "step_accuracy",
    "first_error_accuracy", "first_error_f1",
)  # fmt: skip
# Metrics that figures and texts write as percentages.
_FRACTIONS = ("accuracy", "step_accuracy", "first_error_accuracy")
_OPTIMIZER_METRICS = ("lr", "grad_norm", "loss_scale")
_SPEED_METRICS = ("train/tokens_per_second", "timing/train_step")
# Metrics whose names contain one of these words are also drawn in the section on throughput.
_MACHINE_WORDS = ("memory", "power", "mfu")


def build_learning_curves(reports: Sequence[RunReport]) -> PageSection:
    """Build the section of curves of training and validation, with tables of all validations."""
    drawings = [_draw_metric(name, reports) for name in (*_QUALITY_METRICS, *_OPTIMIZER_METRICS)]
    return PageSection(
        "curves",
        "Learning curves",
        drawings=[drawing for drawing in drawings if drawing is not None],
        tables=list(_build_validation_tables(reports)),
        notes=["Faint lines are training batches, before each update; dots are validations."],
        nothing="no training run has logged two steps yet"
        if any(run.curves for run in reports)
        else "no training run",
    )


def draw_main_curve(reports: Sequence[RunReport]) -> Drawing | None:
    """Draw the first of ``MAIN_METRICS`` that was logged over training steps; None without any."""
    drawings = (_draw_metric(name, reports, "main") for name in MAIN_METRICS)
    return next((drawing for drawing in drawings if drawing is not None), None)


def _draw_metric(
    metric: str, reports: Sequence[RunReport], prefix: str = "curve"
) -> Drawing | None:
    is_one = len(reports) == 1
    lines = [
        line
        for number, run in enumerate(reports)
        for line in (_plot_one(metric, run) if is_one else _plot_several(metric, run, number))
    ]
    # A curve of one step would be a single dot; the tables have its value.
    if len({step for line in lines for step in line.x}) < 2:
        return None
    row = find_metric(metric)
    note = f"{row.meaning[0].upper()}{row.meaning[1:]}." if row and row.meaning else ""
    return curve(
        f"{prefix}-{metric}", metric, metric, lines, note, is_fraction=metric in _FRACTIONS
    )


def _plot_one(metric: str, run: RunReport) -> Iterator[PlotLine]:
    """Yield the lines of ``metric`` in a figure that has only one run.

    Training has one colour, and each validation set has another.
    """
    if f"train/{metric}" in run.curves:
        key = LegendKey("train", 0, is_faint=metric in _QUALITY_METRICS)
        yield PlotLine(key, *run.curves[f"train/{metric}"])
    for colour, name in enumerate(_find_sets_with(metric, run), start=1):
        yield PlotLine(LegendKey(name, colour), *run.curves[f"{name}/{metric}"], marked=True)


def _plot_several(metric: str, run: RunReport, number: int) -> Iterator[PlotLine]:
    """Yield the lines of ``metric`` for the run ``number`` of several runs in a figure.

    All lines of a run have its colour; its validation sets differ in their dashes.
    """
    if f"train/{metric}" in run.curves:
        key = LegendKey(f"{run.name}, train", number, is_faint=metric in _QUALITY_METRICS)
        yield PlotLine(key, *run.curves[f"train/{metric}"])
    for dashes, name in enumerate(_find_sets_with(metric, run)):
        key = LegendKey(f"{run.name}, {name}", number, dashes)
        yield PlotLine(key, *run.curves[f"{name}/{metric}"], marked=True)


def _find_sets_with(metric: str, run: RunReport) -> list[str]:
    return [name for name in list_validation_sets(run) if f"{name}/{metric}" in run.curves]


def list_validation_sets(run: RunReport) -> list[str]:
    """List the names of the sets that a run was validated on, such as ``validation-heldout``."""
    names = [split_name(name).set_name for name in run.curves if name.startswith(VALIDATION)]
    return list(dict.fromkeys(names))


def _build_validation_tables(reports: Sequence[RunReport]) -> Iterator[PageTable]:
    for run in reports:
        for name in list_validation_sets(run):
            metrics = [metric for metric in _QUALITY_METRICS if f"{name}/{metric}" in run.curves]
            curves = [run.curves[f"{name}/{metric}"] for metric in metrics]
            steps = sorted({step for curve_steps, _ in curves for step in curve_steps})
            columns = [dict(zip(*steps_and_values, strict=True)) for steps_and_values in curves]
            rows = [
                [str(step), *(format_metric(column.get(step)) for column in columns)]
                for step in steps
            ]
            title = f"Validations of {run.name} on {name.removeprefix(VALIDATION)}"
            yield PageTable(["step", *metrics], rows, title)


def build_throughput(reports: Sequence[RunReport]) -> PageSection:
    """Build the section on speed and memory."""
    names = list(dict.fromkeys(name for run in reports for name in run.curves))
    machine_metrics = [
        name for name in names if any(word in name.lower() for word in _MACHINE_WORDS)
    ]
    drawings = [_draw_speed(name, reports) for name in (*_SPEED_METRICS, *machine_metrics)]
    rows = list(_build_speed_rows(reports))
    header = ["", *(run.name for run in reports)]
    return PageSection(
        "throughput",
        "Throughput and memory",
        drawings=[drawing for drawing in drawings if drawing is not None],
        tables=[PageTable(header, rows)] if rows else [],
        notes=["Memory is the peak of rank 0's process."] if rows else [],
        nothing="no training run, and only training measures it",
    )


def _draw_speed(name: str, reports: Sequence[RunReport]) -> Drawing | None:
    lines = [
        PlotLine(LegendKey(run.name, number), *run.curves[name])
        for number, run in enumerate(reports)
        if name in run.curves
    ]
    if not lines:
        return None
    short_name = name.rpartition("/")[2]
    unit = "seconds" if name.startswith("timing/") else short_name
    identifier = "".join(letter if letter.isalnum() else "-" for letter in name)
    return curve(f"speed-{identifier}", short_name.replace("_", " "), unit, lines)


def _build_speed_rows(reports: Sequence[RunReport]) -> Iterator[list[str]]:
    """Yield the rows of the table of speed and memory, with a column for each run.

    Times are medians, because a run's first step, and steps during a save, take longer.
    """
    for title, name in (
        ("tokens per second, median", "train/tokens_per_second"),
        ("seconds per step, median", "timing/train_step"),
        ("seconds per validation, median", "timing/validation/total_validation_time"),
        ("seconds that a save pauses training, median", "timing/save"),
    ):
        columns = [run.curves.get(name, ([], []))[1] for run in reports]
        if any(columns):
            medians = (float(np.median(values)) if values else None for values in columns)
            yield [title, *map(format_metric, medians)]
    for device in ("host", "GPU"):
        peaks = [run.facts.get("peak_memory", {}).get(device) for run in reports]
        if any(peaks):
            yield [f"{device} memory", *(show_bytes(peak) if peak else "" for peak in peaks)]


# Sections on the summary, and on the inputs: data, scoring contract and settings.


def build_summary(reports: Sequence[RunReport], sets: Sequence[Heldout]) -> PageSection:
    """Build the summary: the best validation, held-out accuracy, and the last metrics."""
    rows = [
        ["what it is", *(report.kind for report in reports)],
        *_build_row("base model", [_get_base_model(report) for report in reports]),
        *_align_columns([_describe_data(report) for report in reports]),
        *_build_row("steps", [_count_steps(report) for report in reports]),
        *_build_row("best validation", [_describe_best(report) for report in reports]),
        *_build_row("held-out accuracy", [_describe_accuracy(report, sets) for report in reports]),
        *_build_row(
            "always the longer reply", [_describe_baseline(report, sets) for report in reports]
        ),
        *_align_columns([dict(_split_descriptions(report)) for report in reports]),
    ]
    notes = [line for report in reports for line in _list_drawn_sets(report, len(reports) > 1)]
    header = ["", *(report.name for report in reports)]
    tables = [PageTable(header, rows), *_build_versions(reports)]
    tables += _build_metrics_tables(reports)
    return PageSection("summary", "Summary", tables=tables, notes=notes)


def _build_row(name: str, values: Sequence[str]) -> Iterator[list[str]]:
    """Yield the row ``name`` with one value for each run, or nothing if all values are empty.

    So the table has no row for a fact that no run has.
    """
    if any(values):
        yield [name, *values]


def _get_base_model(report: RunReport) -> str:
    return str(report.settings.get("pretrained_checkpoint.restore_from_path") or "")


def _describe_data(report: RunReport) -> dict[str, str]:
    """Describe each data file of a run in a line: its path, its format and its records."""
    files = report.facts.get("data", [])
    lines = {}
    for file in files if isinstance(files, list) else []:
        counts = dict(file["rows"])
        records = f"{counts.get('kept', '?')} of {counts.get('records', '?')} records used"
        lines[file["name"]] = f"{file['path']} ({file['format']}), {records}"
    return lines


def _count_steps(run: RunReport) -> str:
    steps = [steps[-1] for steps, _ in run.curves.values()]
    return str(max(steps)) if steps else ""


def _describe_best(run: RunReport) -> str:
    """Describe the best validation on each set: its step and the value of the main metric.

    Of validations with equal values, the one with the lower loss is taken.
    """
    descriptions = []
    for name in list_validation_sets(run):
        main = next((metric for metric in MAIN_METRICS if f"{name}/{metric}" in run.curves), None)
        if main is not None:
            steps, values = run.curves[f"{name}/{main}"]
            losses = dict(zip(*run.curves.get(f"{name}/loss", ((), ())), strict=True))
            sign = 1 if better_values(main) is Better.lower else -1
            _, _, best_step, best_value = min(
                (sign * value, losses.get(step, 0.0), step, value)
                for step, value in zip(steps, values, strict=True)
            )
            number = (format_share if main in _FRACTIONS else format_metric)(best_value)
            descriptions.append(f"{main} {number} at step {best_step} ({name})")
    return "; ".join(descriptions)


def _describe_accuracy(report: RunReport, sets: Sequence[Heldout]) -> str:
    descriptions = []
    for heldout in select_pairs([heldout for heldout in sets if heldout.report is report]):
        share = compute_shares(heldout.predictions)[0]
        interval = format_interval(share.low, share.high)
        accuracy = format_share(share.accuracy)
        weights = report.exported.get("weights")
        model = f", {weights}" if weights else ""
        descriptions.append(f"{accuracy} (95%: {interval}) on {share.pairs} pairs{model}")
    return "; ".join(descriptions)


def _describe_baseline(report: RunReport, sets: Sequence[Heldout]) -> str:
    baselines = (render_longer_baseline(heldout) for heldout in sets if heldout.report is report)
    return "; ".join(filter(None, baselines))


def _split_descriptions(report: RunReport) -> Iterator[tuple[str, str]]:
    """Split each line that a run printed at its start into its subject and its description.

    ``model: 143.4M parameters`` becomes ``model`` and ``143.4M parameters``.
    """
    for line in report.facts.get("described", []):
        subject, _, description = line.partition(": ")
        yield (subject, description) if description else ("note", subject)


def _list_drawn_sets(report: RunReport, is_one_of_many: bool) -> list[str]:
    """Write a note for each held-out set of which the run did not keep all records, and why.

    ``is_one_of_many`` is True if the page has several runs; the note then names the run.
    """
    prefix, lines = f"{report.name}: " * is_one_of_many, []
    totals = report.facts.get("validation_records", {})
    for name, predictions in report.predictions.items():
        total, count = totals.get(name, 0), _count_records(predictions)
        num_drawn, reasons = min(total, MOST_RECORDS), []
        if total > num_drawn:
            reasons.append(f"{num_drawn} were drawn at random")
        if num_drawn > count:
            reasons.append("tied ones, and those whose text is unknown, are left out")
        if reasons:
            of_all = f"figures are over {count} of {total} records"
            lines.append(f"{prefix}{name}: {of_all}: {'; '.join(reasons)}")
    return lines


def _count_records(predictions: Predictions) -> int:
    """Count the records behind the rows of ``predictions``.

    A record with ranked completions has several rows, one for each pair.
    """
    records = [row.record for row in predictions.rows]
    return len(records if predictions.is_rated else set(records))


def _build_metrics_tables(reports: Sequence[RunReport]) -> Iterator[PageTable]:
    """Yield tables of the metrics of whole data sets, and of each principle or position."""
    columns: dict[str, dict[str, str]] = {}
    for report in reports:
        for name in list_validation_sets(report):
            title = f"{report.name}, {name.removeprefix(VALIDATION)}"
            columns[title] = _format_metrics(_get_last_metrics(report, f"{name}/"))
        if report.metrics:
            columns[report.name] = _format_metrics(report.metrics)
    names = dict.fromkeys(name for column in columns.values() for name in column)
    # Sources are in a chart, and positions next to held-out rewards, if there are any.
    has_rewards = any(report.predictions for report in reports)
    parts = (BY_PRINCIPLE,) if has_rewards else (BY_PRINCIPLE, POSITION)
    for title, chosen in (
        (
            "Metrics of the last validation, or of the evaluation",
            [name for name in names if not name.startswith(OF_PARTS)],
        ),
        (
            "Metrics of each principle, and of each position of a step",
            [name for name in names if name.startswith(parts)],
        ),
    ):
        rows = [
            [name, *(column.get(name, "") for column in columns.values()), _find_meaning(name)]
            for name in chosen
        ]
        if rows:
            yield PageTable(["", *columns, "meaning"], rows, title)


def _get_last_metrics(report: RunReport, prefix: str) -> dict[str, float | None]:
    """Return the metrics of the last validation whose names begin with ``prefix``.

    The value is None for a metric that only earlier validations have.
    """
    curves = {
        name.removeprefix(prefix): points
        for name, points in report.curves.items()
        if name.startswith(prefix)
    }
    last_step = max(steps[-1] for steps, _ in curves.values())
    return {
        name: values[-1] if steps[-1] == last_step else None
        for name, (steps, values) in curves.items()
    }


def _format_metrics(metrics: Mapping[str, float | None]) -> dict[str, str]:
    cells = {name: format_metric(value) for name, value in metrics.items()}
    margin = metrics.get("reward_margin")
    if "temperature" in metrics and margin is not None:
        cells["temperature"] = format_temperature(metrics["temperature"], margin)
    return cells


def _find_meaning(name: str) -> str:
    row = find_metric(name)
    return row.meaning if row else ""


def _format_cell(value: Any) -> str:
    if isinstance(value, float):
        return show_number(value)
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def build_data(reports: Sequence[RunReport]) -> PageSection:
    """Build the section on the data files: their formats, and how many records were used."""
    tables = []
    for report in reports:
        # ``data`` has a list of descriptions of files for a run, and the name of one file for an
        # evaluation.
        files = report.facts.get("data", [])
        for file in files if isinstance(files, list) else []:
            rows = [*file["rows"], *(["malformed", line] for line in file["malformed"])]
            title = f"{report.name}, {file['name']}: {file['path']} ({file['format']})"
            tables.append(PageTable(["", ""], rows, title))
        if isinstance(files, str):
            counts = [[key, str(value)] for key, value in report.facts.get("counts", {}).items()]
            tables.append(PageTable(["", ""], counts, f"{report.name}: {files}"))
    return PageSection("data", "Data", tables=tables, nothing="the data files were not recorded")


def build_contract(reports: Sequence[RunReport]) -> PageSection:
    """Build the section on the scoring contracts."""
    hashes = [_get_contract_hash(report) for report in reports]
    tables = []
    if any(hashes):
        header = ["", *(report.name for report in reports)]
        # The contract of a run has its hash as a field, which is the first row already.
        fields = [
            {key: value for key, value in contract.items() if key != "hash"}
            for contract in (_as_mapping(report.facts.get("contract")) for report in reports)
        ]
        tables = [PageTable(header, [["hash", *hashes], *_align_columns(fields)])]
    notes = []
    if len({contract_hash for contract_hash in hashes if contract_hash}) > 1:
        notes = [
            "The contracts differ, so these rewards cannot be compared: the models score different "
            "token sequences, or scale rewards differently."
        ]
    nothing = "it was not recorded"
    return PageSection("contract", "Scoring contract", (), tables, (), notes, nothing)


def _get_contract_hash(report: RunReport) -> str:
    contract_hash = report.facts.get("contract_hash", report.facts.get("contract", ""))
    return contract_hash if isinstance(contract_hash, str) else ""


def _as_mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def build_settings(reports: Sequence[RunReport]) -> PageSection:
    """Build the section of settings; with several runs, settings that differ come first."""
    with_settings = [report for report in reports if report.settings]
    tables = []
    header = ["", *(report.name for report in with_settings)]
    rows = list(_align_columns([report.settings for report in with_settings]))
    if len(with_settings) > 1:
        differing = [row for row in rows if len(set(row[1:])) > 1]
        tables.append(PageTable(header, differing, f"{len(differing)} settings differ"))
    if with_settings:
        tables.append(PageTable(header, rows, "All settings"))
    nothing = "they were not recorded"
    return PageSection("settings", "Settings", tables=tables, nothing=nothing)


def _build_versions(reports: Sequence[RunReport]) -> Iterator[PageTable]:
    """Yield the table of the versions of packages, and the number of ranks, if they are known."""
    with_versions = [report for report in reports if report.facts.get("versions")]
    rows = list(_align_columns([report.facts["versions"] for report in with_versions]))
    ranks = [str(report.facts.get("ranks", "")) for report in with_versions]
    if any(ranks):
        rows.append(["ranks", *ranks])
    if rows:
        yield PageTable(["", *(report.name for report in with_versions)], rows, "Versions")


def _align_columns(columns: Sequence[Mapping[str, Any]]) -> Iterator[list[str]]:
    """Yield the rows of a table that has a mapping as each of its columns.

    There is a row for each key of any column; a column without the key gets an empty cell.
    """
    for key in dict.fromkeys(key for column in columns for key in column):
        yield [key, *(_format_cell(column[key]) if key in column else "" for column in columns)]
