"""Input of a report: a run's folder, or the files that ``nemo-aligner evaluate`` wrote.

``read_report`` reads either as a ``RunReport``. The module also computes what several sections need
from held-out predictions: accuracy by source, and the list of mistakes.
"""

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
from nemo_aligner.training.metric_files import read_metrics
from nemo_aligner.utils.errors import DataError
from nemo_aligner.utils.missing import describe_unreadable

_EXPECTED = (
    "wanted the folder of a training run, or a file that evaluate's output or output_rewards wrote"
)
# Keys of an evaluation's JSON file, of which it has at least one: metrics, or rows of a benchmark.
_MAIN_KEYS = ("metrics", "rows")
# Its keys that hold results; all other keys describe the evaluation.
_RESULT_KEYS = (*_MAIN_KEYS, "counts", "left_out", "robustness", "kind", "task")


@dataclass(frozen=True)
class RunReport:
    """Everything that a report uses about a training run, an evaluation or a benchmark.

    Fields that do not apply to it are empty.

    Attributes:
        name: its name in legends and tables.
        kind: what it is, for people, such as ``training run``.
        curves: steps and values of every logged metric, by the metric's name.
        predictions: predictions on held-out sets, by the set's name.
        metrics: metrics of an evaluation, by name; None for a metric without a value.
        rows: figures of a benchmark.
        robustness: results of the robustness check; None if it was not run.
        facts: other facts, such as data files, versions and the scoring contract. Those of a run
            are written by ``training/run_facts.py``.
        settings: all settings by their dotted keys.
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

    @property
    def exported(self) -> Mapping[str, Any]:
        """The steps and the metrics of the model that a run has exported; empty without one."""
        return self.facts.get("exported", {})


def read_report(path: Path) -> RunReport:
    """Read a run's folder, or the files of an evaluation.

    The files of ``output`` (``NAME.json``) and ``output_rewards`` (``NAME.jsonl``) belong together
    if they are in the same folder and have the same ``NAME``; naming one of them reads both. Any
    other file of that name, such as the evaluation's data, is ignored. The predictions of a
    benchmark without right and wrong replies, such as best of n, are left out.

    Raises:
        DataError: ``path`` does not exist, is neither, or has only such predictions.
    """
    if path.is_dir():
        return _read_run(path)
    if not path.is_file():
        raise DataError(f"{path}: there is no such file; {_EXPECTED}")
    results_path, rewards_path = path.with_suffix(".json"), path.with_suffix(".jsonl")
    if path not in (results_path, rewards_path):
        raise DataError(
            f"{path}: got a file {path.suffix or path.name}; {_EXPECTED} (.json, .jsonl)"
        )
    name = path.stem
    report = RunReport(name, "evaluation")
    has_results = path == results_path or _holds_results(results_path)
    if has_results:
        report = _read_results(results_path)
    if path == rewards_path or _holds_rewards(rewards_path):
        predictions = read_predictions(rewards_path)
        if predictions.is_rated or predictions.has_sides:
            report = replace(report, predictions={name: predictions})
        elif not has_results:
            raise DataError(
                f"{rewards_path}: got only items without right and wrong replies, of which a "
                f"report has the benchmark's figures. Set output={results_path} in the evaluation, "
                "too"
            )
    return report


def _holds_results(path: Path) -> bool:
    """True if ``path`` is a file that evaluate's ``output`` may have written."""
    try:
        content = _read_json_object(path)
    except DataError:
        return False
    return any(key in content for key in _MAIN_KEYS)


def _holds_rewards(path: Path) -> bool:
    """True if ``path`` is a file that evaluate's ``output_rewards`` may have written."""
    try:
        with path.open(encoding="utf-8") as lines:
            first = json.loads(lines.readline())
    except (OSError, ValueError):
        return False
    return isinstance(first, dict) and isinstance(first.get("rewards"), dict)


def _read_run(folder: Path) -> RunReport:
    config = folder / CONFIG_NAME
    if not config.is_file() or not (folder / METRICS_NAME).is_file():
        missing = METRICS_NAME if config.is_file() else CONFIG_NAME
        raise DataError(f"{folder}: the folder has no {missing}; {_EXPECTED}")
    files = sorted((folder / HELDOUT_NAME).glob("*.jsonl"))
    report = RunReport(
        name=folder.resolve().name,
        kind="training run",
        curves=_read_curves(folder / METRICS_NAME),
        predictions={path.stem: read_predictions(path) for path in files},
        settings=flatten(_read_yaml(config)),
    )
    facts = folder / FACTS_NAME
    if facts.is_file():
        report = replace(report, facts=_read_json_object(facts))
    evaluation = folder / ROBUSTNESS_NAME
    # Take only the robustness results from the evaluation, because the run has its own metrics.
    if evaluation.is_file():
        report = replace(report, robustness=_read_robustness(evaluation))
    return report


def _read_robustness(path: Path) -> Robustness | None:
    """Read the robustness results in the ``output`` of an evaluation; None if it has none."""
    content = _read_json_object(path)
    if "robustness" not in content:
        return None
    try:
        return read_robustness(content["robustness"])
    except (KeyError, TypeError, ValueError) as error:
        raise DataError(
            f"{path}: robustness: it is not in the form that evaluate's robustness_pairs writes "
            f"({type(error).__name__}: {error})"
        ) from error


def _read_results(path: Path) -> RunReport:
    content = _read_json_object(path)
    if not any(key in content for key in _MAIN_KEYS):
        raise DataError(f"{path}: got the keys {', '.join(content)[:80] or 'none'}; {_EXPECTED}")
    facts = {key: value for key, value in content.items() if key not in _RESULT_KEYS}
    if counts := content.get("counts") or content.get("left_out"):
        facts["counts"] = counts
    is_benchmark = "task" in content
    return RunReport(
        name=path.stem,
        kind=f"benchmark {content['task']}" if is_benchmark else "evaluation",
        metrics=content.get("metrics", {}),
        rows=_build_task_rows(path, content.get("rows", ())) if is_benchmark else (),
        robustness=_read_robustness(path),
        facts=facts,
    )


def _build_task_rows(path: Path, rows: Sequence[Mapping[str, Any]]) -> list[TaskRow]:
    try:
        return [TaskRow(**{**row, "level": Level(row["level"])}) for row in rows]
    except (KeyError, TypeError, ValueError) as error:
        raise DataError(
            f"{path}: rows: they are not in the form that evaluate writes for a benchmark "
            f"({type(error).__name__}: {error})"
        ) from error


def _read_curves(path: Path) -> dict[str, tuple[list[int], list[float]]]:
    curves: dict[str, tuple[list[int], list[float]]] = {}
    for row in read_metrics(path):
        for name, value in row.items():
            if name != "step" and isinstance(value, int | float):
                steps, values = curves.setdefault(name, ([], []))
                steps.append(row["step"])
                values.append(float(value))
    return curves


def _read_json_object(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise DataError(describe_unreadable(path, error)) from error
    if not isinstance(content, dict):
        raise DataError(f"{path}: got {type(content).__name__}, wanted a JSON object")
    return content


def _read_yaml(path: Path) -> Mapping[str, Any]:
    try:
        return yaml.safe_load(path.read_text(encoding="utf-8")) or {}
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise DataError(describe_unreadable(path, error)) from error


def number_equal_names(reports: Sequence[RunReport]) -> list[RunReport]:
    """Append a number to each report's name that occurs more than once.

    Legends and tables can then tell the reports apart.
    """
    names = [report.name for report in reports]
    return [
        replace(report, name=f"{report.name} ({number})")
        if names.count(report.name) > 1
        else report
        for number, report in enumerate(reports, start=1)
    ]


# Held-out predictions: accuracy by source, and mistakes.


@dataclass(frozen=True)
class SourceShare:
    """Accuracy on the pairs of one source, or on all pairs.

    Attributes:
        source: name of the source, or ``all``.
        pairs: number of its pairs.
        accuracy: mean over the pairs of 1 if the model is right, 0.5 for a tie, and 0 if it is
            wrong.
        low, high: 95% interval of the accuracy (Wilson 1927).
    """

    source: str
    pairs: int
    accuracy: float
    low: float
    high: float


@dataclass(frozen=True)
class Mistake:
    """A record that the model got wrong.

    Attributes:
        record: its file and line.
        source: its source; "" if it names none.
        numbers: rewards and margin, or reward and label, as text.
        texts: (side, sample) for each sample; the side is ``chosen``, ``rejected`` or ``response``.
    """

    record: str
    source: str
    numbers: str
    texts: tuple[tuple[str, Text], ...]


def compute_shares(pairs: Predictions) -> list[SourceShare]:
    """Compute the accuracy on all pairs, and on each source if there are several."""
    rows = []
    for source, indices in pairs.by_source():
        right = pairs.right[indices]
        low, high = wilson_interval(float(right.sum()), right.size)
        rows.append(SourceShare(source, right.size, float(right.mean()), low, high))
    return rows


def list_mistakes(predictions: Predictions, count: int) -> list[Mistake]:
    """List the ``count`` worst mistakes on one held-out set.

    They are the pairs with the most negative margins, or the ratings with the largest errors.
    """
    if predictions.is_rated:
        return list(_list_rating_errors(predictions, count))
    named_rows = zip(predictions.names, predictions.rows, strict=True)
    wrong = [(name, row) for name, row in named_rows if row.right < 0.5]
    wrong.sort(key=lambda named_row: named_row[1].margin)
    return [_describe_wrong_pair(name, row) for name, row in wrong[:count]]


def _describe_wrong_pair(name: str, row: Prediction) -> Mistake:
    (chosen, rejected), texts = row.closest, row.item.texts
    numbers = (
        f"margin {row.margin:+.3f}: chosen {row.rewards[chosen]:.3f}, "
        f"rejected {row.rewards[rejected]:.3f}"
    )
    sides = ("chosen", texts[chosen]), ("rejected", texts[rejected])
    return Mistake(name, row.item.source, numbers, sides)


def _list_rating_errors(rated: Predictions, count: int) -> Iterator[Mistake]:
    """Yield the ``count`` ratings with the largest errors.

    An error is |reward - label| of the attribute where this difference is largest. Ratings whose
    rewards equal their labels are not mistakes, so they are left out.
    """
    errors = np.nan_to_num(np.abs(rated.rewards - rated.labels))
    for index in np.argsort(-errors.max(axis=1), kind="stable")[:count]:
        column, row = int(errors[index].argmax()), rated.rows[index]
        if errors[index, column] > 0:
            reward, label = rated.rewards[index, column], rated.labels[index, column]
            numbers = f"{rated.attributes[column]}: reward {reward:.3f}, label {label:.3f}"
            texts = (("response", row.item.texts[0]),)
            yield Mistake(row.record, row.item.source, numbers, texts)
