"""Input of a report: a run's folder, or the files that ``nemo-aligner evaluate`` wrote."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from nemo_aligner.checkpoint.run_folder import (
    CONFIG_NAME,
    FACTS_NAME,
    HELDOUT_NAME,
    METRICS_NAME,
    ROBUSTNESS_NAME,
)
from nemo_aligner.config.load import flatten
from nemo_aligner.contract.messages import Text
from nemo_aligner.evaluation.predictions import Prediction, Predictions, read_predictions
from nemo_aligner.evaluation.robustness import Robustness, read_robustness
from nemo_aligner.evaluation.tasks.base import Level, TaskRow
from nemo_aligner.metrics.ranking import wilson_interval
from nemo_aligner.training.tracking import read_metrics
from nemo_aligner.utils.errors import DataError

_WANTED = (
    "wanted the folder of a training run, or a file that evaluate's output or output_rewards wrote"
)
# Keys of a JSON file that are not settings of an evaluation.
_RESULTS = ("metrics", "counts", "rows", "left_out", "robustness", "kind", "task")


@dataclass(frozen=True)
class RunReport:
    """Facts about a run or an evaluation; unknown ones are empty.

    Attributes:
        name: what legends call it.
        kind: what it is, for people.
        curves: of every logged metric the steps and the values.
        predictions: of held-out sets, by their names.
        metrics: of an evaluation.
        rows: of a benchmark.
        robustness: what changes of style did, if that was checked.
        facts: see ``training/resume.py``; of an evaluation what it says of itself.
        settings: flat, by key.
    """

    name: str
    kind: str
    curves: Mapping[str, tuple[list[int], list[float]]] = field(default_factory=dict)
    predictions: Mapping[str, Predictions] = field(default_factory=dict)
    metrics: Mapping[str, float | None] = field(default_factory=dict)
    rows: Sequence[TaskRow] = ()
    robustness: Robustness | None = None
    facts: Mapping[str, Any] = field(default_factory=dict)
    settings: Mapping[str, Any] = field(default_factory=dict)


def read_report(path: Path) -> RunReport:
    """Read a run's folder, or the files of an evaluation.

    A file of ``output_rewards`` and one of ``output`` belong together where they stand beside each
    other and differ in their endings alone.

    Raises:
        DataError: it is neither.
    """
    if path.is_dir():
        return _read_run(path)
    if not path.is_file():
        raise DataError(f"{path}: it is not there, {_WANTED}")
    pair = [path.with_suffix(".json"), path.with_suffix(".jsonl")]
    if path not in pair:
        raise DataError(f"{path}: got a file {path.suffix or path.name}, {_WANTED} (.json, .jsonl)")
    name = path.stem
    found = _read_results(pair[0]) if pair[0].is_file() else RunReport(name, "evaluation")
    if pair[1].is_file():
        found = replace(found, predictions={name: read_predictions(pair[1])})
    return found


def _read_run(folder: Path) -> RunReport:
    config = folder / CONFIG_NAME
    if not config.is_file() or not (folder / METRICS_NAME).is_file():
        missing = METRICS_NAME if config.is_file() else CONFIG_NAME
        raise DataError(f"{folder}: got a folder without {missing}, {_WANTED}")
    files = sorted((folder / HELDOUT_NAME).glob("*.jsonl"))
    found = RunReport(
        name=folder.resolve().name,
        kind="training run",
        curves=_curves(folder / METRICS_NAME),
        predictions={path.stem: read_predictions(path) for path in files},
        settings=flatten(_yaml(config)),
    )
    facts = folder / FACTS_NAME
    if facts.is_file():
        found = replace(found, facts=_object(facts))
    robustness = folder / ROBUSTNESS_NAME
    # Only its robustness: for everything else the run has figures of its own.
    return replace(found, robustness=_robustness(robustness)) if robustness.is_file() else found


def _robustness(path: Path) -> Robustness | None:
    """Read robustness from an evaluation's ``output``; None without ``robustness_pairs``."""
    content = _object(path)
    if "robustness" not in content:
        return None
    try:
        return read_robustness(content["robustness"])
    except (KeyError, TypeError, ValueError) as error:
        raise DataError(
            f"{path}: robustness: wanted what evaluate's robustness_pairs writes "
            f"({type(error).__name__}: {error})"
        ) from error


def _read_results(path: Path) -> RunReport:
    content = _object(path)
    if not any(key in content for key in ("metrics", "rows")):
        raise DataError(f"{path}: got keys {', '.join(content)[:80] or 'none'}, {_WANTED}")
    facts = {key: value for key, value in content.items() if key not in _RESULTS}
    if counts := content.get("counts") or content.get("left_out"):
        facts["counts"] = counts
    is_benchmark = "task" in content
    return RunReport(
        name=path.stem,
        kind=f"benchmark {content['task']}" if is_benchmark else "evaluation",
        metrics=content.get("metrics", {}),
        rows=_task_rows(path, content.get("rows", ())) if is_benchmark else (),
        robustness=_robustness(path),
        facts=facts,
    )


def _task_rows(path: Path, rows: Sequence[Mapping[str, Any]]) -> list[TaskRow]:
    try:
        return [TaskRow(**{**row, "level": Level(row["level"])}) for row in rows]
    except (KeyError, TypeError, ValueError) as error:
        raise DataError(
            f"{path}: rows: wanted the figures of a benchmark, as evaluate writes them "
            f"({type(error).__name__}: {error})"
        ) from error


def _curves(path: Path) -> dict[str, tuple[list[int], list[float]]]:
    curves: dict[str, tuple[list[int], list[float]]] = {}
    for row in read_metrics(path):
        for name, value in row.items():
            if name != "step" and isinstance(value, int | float):
                steps, values = curves.setdefault(name, ([], []))
                steps.append(row["step"])
                values.append(float(value))
    return curves


def _object(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise DataError(f"{path}: cannot be read: {error}") from error
    if not isinstance(content, dict):
        raise DataError(f"{path}: got {type(content).__name__}, wanted a JSON object")
    return content


def _yaml(path: Path) -> Mapping[str, Any]:
    try:
        return yaml.safe_load(path.read_text(encoding="utf-8")) or {}
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise DataError(f"{path}: cannot be read: {error}") from error


def name_apart(reported: Sequence[RunReport]) -> list[RunReport]:
    """Number equal names, so that no two are the same."""
    names = [each.name for each in reported]
    return [
        replace(each, name=f"{each.name} ({number})") if names.count(each.name) > 1 else each
        for number, each in enumerate(reported, start=1)
    ]


# Held-out predictions: accuracy by source, and mistakes.


@dataclass(frozen=True)
class SourceShare:
    """Share of a source's pairs that are right, with its 95% interval (Wilson 1927)."""

    source: str
    pairs: int
    accuracy: float
    low: float
    high: float


@dataclass(frozen=True)
class Mistake:
    """Record that the model got wrong: its rewards in words, and its texts by side."""

    record: str
    source: str
    about: str
    texts: tuple[tuple[str, Text], ...]


def shares(pairs: Predictions) -> list[SourceShare]:
    """Compute accuracy on all pairs, and on every source if there are several."""
    found = []
    for source, indices in pairs.by_source():
        right = pairs.right[indices]
        low, high = wilson_interval(float(right.sum()), right.size)
        found.append(SourceShare(source, right.size, float(right.mean()), low, high))
    return found


def mistakes(predictions: Predictions, most: int) -> list[Mistake]:
    """List the worst: of pairs the most negative margins, of ratings the largest errors."""
    if predictions.is_rated:
        return list(_far_ratings(predictions, most))
    named = zip(predictions.names, predictions.rows, strict=True)
    wrong = [(name, row) for name, row in named if row.right < 0.5]
    wrong.sort(key=lambda pair: pair[1].margin)
    return [_wrong_pair(name, row) for name, row in wrong[:most]]


def _wrong_pair(name: str, row: Prediction) -> Mistake:
    (chosen, rejected), texts = row.closest, row.item.texts
    about = (
        f"margin {row.margin:+.3f}: chosen {row.rewards[chosen]:.3f}, "
        f"rejected {row.rewards[rejected]:.3f}"
    )
    sides = ("chosen", texts[chosen]), ("rejected", texts[rejected])
    return Mistake(name, row.item.source, about, sides)


def _far_ratings(rated: Predictions, most: int) -> Iterator[Mistake]:
    """Yield ratings by the largest error among their attributes."""
    errors = np.nan_to_num(np.abs(rated.rewards - rated.labels))
    for index in np.argsort(-errors.max(axis=1), kind="stable")[:most]:
        column, row = int(errors[index].argmax()), rated.rows[index]
        if errors[index, column] > 0:
            reward, label = rated.rewards[index, column], rated.labels[index, column]
            about = f"{rated.attributes[column]}: reward {reward:.3f}, label {label:.3f}"
            texts = (("response", row.item.texts[0]),)
            yield Mistake(row.record, row.item.source, about, texts)
