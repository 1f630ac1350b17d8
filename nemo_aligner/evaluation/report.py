"""An evaluation for people (a table) and for programs (JSON)."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from nemo_aligner.evaluation.evaluate import EvaluationReport

_BY_SOURCE = "by_source/"
_EXPLAINED = {
    "accuracy": "chosen above rejected; a tie counts one half",
    "accuracy_longer_chosen": "where people chose the longer reply",
    "accuracy_shorter_chosen": "where people chose the shorter reply",
    "longer_reply_accuracy": "what taking the longer reply would give",
    "ties": "share of pairs with equal rewards",
    "reward_margin": "mean of chosen minus rejected",
    "ece": "mean gap of sigmoid(|margin|) and the share of right verdicts",
    "brier": "mean squared error of sigmoid(margin)",
    "temperature": "T for which sigmoid(margin / T) is most likely",
    "length_correlation": "Pearson r of reward and length of the reply",
    "pearson_mean": "mean over the attributes",
    "length_only_pearson_mean": "mean |r| of the labels with the length of the reply",
}


def render_report(report: EvaluationReport, about: Mapping[str, str]) -> str:
    """The report as a table; ``about`` says what was evaluated, with what."""
    counts = ", ".join(f"{count} {name}" for name, count in report.counts.items())
    lines = [f"{name:<14}{text}" for name, text in {**about, "records": counts}.items()]
    overall = {k: v for k, v in report.metrics.items() if not k.startswith(_BY_SOURCE)}
    width = max(map(len, overall)) + 2
    lines.append("")
    for name, value in overall.items():
        note = _EXPLAINED.get(name)
        lines.append(f"{name:<{width}}{value:>10.4f}" + (f"   {note}" if note else ""))
    return "\n".join([*lines, *_source_lines(report)])


def _source_lines(report: EvaluationReport) -> list[str]:
    main = "/accuracy" if report.kind == "comparison" else "/pearson_mean"
    found = {
        name.removeprefix(_BY_SOURCE).removesuffix(main): value
        for name, value in report.metrics.items()
        if name.startswith(_BY_SOURCE) and name.endswith(main)
    }
    if not found:
        return []
    width = max(map(len, found)) + 2
    rows = [f"  {name:<{width}}{value:>10.4f}" for name, value in found.items()]
    return ["", f"{main[1:]} by source", *rows]


def write_report(path: str | Path, report: EvaluationReport, about: Mapping[str, str]) -> None:
    """Metrics and counts as one JSON object; a metric without a value is null."""
    metrics = {name: _number(value) for name, value in report.metrics.items()}
    content = {**about, "kind": report.kind, "metrics": metrics, "counts": report.counts}
    _write(Path(path), json.dumps(content, indent=2, ensure_ascii=False) + "\n")


def write_rewards(path: str | Path, report: EvaluationReport) -> None:
    """One line per record: where it came from, its rewards and, for ratings, its labels."""
    lines = []
    for place, origin in enumerate(report.origins):
        row: dict[str, Any] = {
            "record": str(origin),
            "rewards": _named(report, report.rewards[place]),
        }
        if report.labels is not None:
            row["labels"] = _named(report, report.labels[place])
        lines.append(json.dumps(row, ensure_ascii=False) + "\n")
    _write(Path(path), "".join(lines))


def _named(report: EvaluationReport, row: np.ndarray) -> dict[str, float | None]:
    values = map(_number, row.tolist())
    return dict(zip(report.columns, values, strict=True))


def _number(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
