"""An evaluation for people (a table) and for programs (JSON)."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from nemo_aligner.console import fit_row
from nemo_aligner.data.malformed import list_first
from nemo_aligner.data.reward_rows import reward_row, write_rows
from nemo_aligner.data.write import write_lines
from nemo_aligner.evaluation.evaluate import EvaluationReport
from nemo_aligner.metrics.by_source import BY_SOURCE
from nemo_aligner.metrics.table import Shown, all_metrics, find_metric

_MALFORMED_SHOWN = 3


def render_report(report: EvaluationReport, about: Mapping[str, str]) -> str:
    """The report as a table; ``about`` says what was evaluated, with what."""
    counts = ", ".join(f"{count} {name}" for name, count in report.counts.items())
    lines = [fit_row(name, text, 14) for name, text in {**about, "records": counts}.items()]
    if report.malformed:
        lines += ["left out as malformed:", *list_first(report.malformed, _MALFORMED_SHOWN)]
    overall = {k: v for k, v in report.metrics.items() if not k.startswith(BY_SOURCE)}
    width = max(map(len, overall)) + 2
    lines.append("")
    for name, value in overall.items():
        row = find_metric(name)
        number, meaning = f"{name:<{width}}{value:>10.4f}   ", row.meaning if row else ""
        if name == "accuracy" and report.accuracy_interval is not None:
            low, high = report.accuracy_interval
            meaning = f"{low:.4f} to {high:.4f} with 95%; {meaning}"
        lines.append(fit_row(number, meaning, len(number)).rstrip())
    return "\n".join([*lines, *_source_lines(report)])


def _source_lines(report: EvaluationReport) -> list[str]:
    lines: list[str] = []
    for metric in all_metrics():
        if Shown.source not in metric.shown:
            continue
        found = {
            name.removeprefix(BY_SOURCE).removesuffix(f"/{metric.name}"): value
            for name, value in report.metrics.items()
            if name.startswith(BY_SOURCE) and name.endswith(f"/{metric.name}")
        }
        if found:
            width = max(map(len, found)) + 2
            rows = [f"  {name:<{width}}{value:>10.4f}" for name, value in found.items()]
            lines += ["", f"{metric.name} by source", *rows]
    return lines


def write_report(path: str | Path, report: EvaluationReport, about: Mapping[str, Any]) -> None:
    """Metrics and counts as one JSON object; a metric without a value is null."""
    metrics = {name: _number(value) for name, value in report.metrics.items()}
    content = {**about, "kind": report.kind.value, "metrics": metrics, "counts": report.counts}
    write_lines(Path(path), [json.dumps(content, indent=2, ensure_ascii=False, allow_nan=False)])


def write_rewards(path: str | Path, report: EvaluationReport) -> None:
    """One line per row: where it came from, rewards, texts; of ratings labels and spread, too."""
    write_rows(Path(path), list(reward_rows(report)))


def reward_rows(report: EvaluationReport) -> Iterator[dict[str, Any]]:
    """What ``write_rewards`` writes of every row."""
    for index, origin in enumerate(report.origins):
        more = {}
        if report.labels.shape[1]:
            more["labels"] = _named(report, report.labels[index])
        if report.spreads is not None:
            more["spread"] = _named(report, report.spreads[index])
        rewards, source = _named(report, report.rewards[index]), report.sources[index]
        yield reward_row(report.kind, origin, source, rewards, report.texts[index], **more)


def _named(report: EvaluationReport, row: np.ndarray) -> dict[str, float]:
    return dict(zip(report.columns, row.tolist(), strict=True))


def _number(value: float) -> float | None:
    return value if math.isfinite(value) else None
