"""A run's folder, or what ``nemo-aligner evaluate`` wrote, as one thing to report on."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import yaml

from nemo_aligner.checkpoint.run_folder import (
    CONFIG_NAME,
    FACTS_NAME,
    HELDOUT_NAME,
    METRICS_NAME,
    ROBUSTNESS_NAME,
)
from nemo_aligner.config.load import flatten
from nemo_aligner.data.sources import BadLine, read_lines
from nemo_aligner.errors import DataError
from nemo_aligner.evaluation.compare import read_verdicts
from nemo_aligner.evaluation.html.judged import HeldoutSet, JudgedPairs, JudgedRatings
from nemo_aligner.evaluation.robustness import Robustness
from nemo_aligner.evaluation.robustness_report import read_robustness
from nemo_aligner.training.metrics_file import read_metrics

_WANTED = (
    "wanted the folder of a training run, or a file that evaluate's output or output_rewards wrote"
)
# Of a JSON file, what is no setting of an evaluation.
_RESULTS = ("metrics", "counts", "rows", "left_out", "robustness", "kind", "task")


@dataclass(frozen=True)
class Reported:
    """All that is known of a run or an evaluation; what is not is empty.

    Attributes:
        name: what legends call it.
        kind: what it is, for people.
        curves: of every logged metric the steps and the values.
        judged: what it made of held-out sets, by their names.
        metrics: of an evaluation.
        rows: of a benchmark.
        robustness: what changes of style did, if that was checked.
        facts: see ``training/facts.py``; of an evaluation what it says of itself.
        settings: flat, by key.
    """

    name: str
    kind: str
    curves: Mapping[str, tuple[list[int], list[float]]] = field(default_factory=dict)
    judged: Mapping[str, HeldoutSet] = field(default_factory=dict)
    metrics: Mapping[str, float | None] = field(default_factory=dict)
    rows: Sequence[Mapping[str, Any]] = ()
    robustness: Robustness | None = None
    facts: Mapping[str, Any] = field(default_factory=dict)
    settings: Mapping[str, Any] = field(default_factory=dict)


def read_reported(path: Path) -> Reported:
    """What lies there.

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
    found = Reported(name=path.stem, kind="evaluation")
    if pair[0].is_file():
        found = _with_results(found, pair[0])
    if pair[1].is_file():
        found = replace(found, judged={path.stem: read_judged(pair[1])})
    return found


def _read_run(folder: Path) -> Reported:
    config = folder / CONFIG_NAME
    if not config.is_file() or not (folder / METRICS_NAME).is_file():
        missing = METRICS_NAME if config.is_file() else CONFIG_NAME
        raise DataError(f"{folder}: got a folder without {missing}, {_WANTED}")
    judged = {
        path.stem: read_judged(path) for path in sorted((folder / HELDOUT_NAME).glob("*.jsonl"))
    }
    found = Reported(
        name=folder.resolve().name,
        kind="training run",
        curves=_curves(folder / METRICS_NAME),
        judged=judged,
        settings=flatten(_yaml(config)),
    )
    facts = folder / FACTS_NAME
    if facts.is_file():
        found = replace(found, facts=_object(facts))
    robustness = folder / ROBUSTNESS_NAME
    # Of what evaluate says beside it the run has its own.
    return replace(found, robustness=_robustness(robustness)) if robustness.is_file() else found


def _robustness(path: Path) -> Robustness | None:
    """What ``output`` of an evaluation with ``robustness_pairs`` has of it; None without."""
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


def _with_results(found: Reported, path: Path) -> Reported:
    content = _object(path)
    if not any(key in content for key in ("metrics", "rows")):
        raise DataError(f"{path}: got keys {', '.join(content)[:80] or 'none'}, {_WANTED}")
    about = {key: value for key, value in content.items() if key not in _RESULTS}
    is_benchmark = "task" in content
    return replace(
        found,
        kind=f"benchmark {content['task']}" if is_benchmark else found.kind,
        metrics={**found.metrics, **content.get("metrics", {})},
        rows=content.get("rows", ()) if is_benchmark else found.rows,
        robustness=_robustness(path),
        facts={**found.facts, **about, **_counts(content)},
    )


def _counts(content: Mapping[str, Any]) -> dict[str, Any]:
    counts = content.get("counts") or content.get("left_out")
    return {"counts": counts} if counts else {}


def read_judged(path: Path) -> HeldoutSet:
    """What a file of ``output_rewards`` holds.

    Raises:
        DataError: something else.
    """
    rows = _rows(path)
    first = next(rows, None)
    if first is None or "response" not in first.get("texts", {}):
        return JudgedPairs(list(read_verdicts(path)))
    try:
        return JudgedRatings.of([first, *rows])
    except (KeyError, TypeError, ValueError) as error:
        raise DataError(
            f"{path}: wanted ratings of evaluate's output_rewards ({type(error).__name__}: {error})"
        ) from error


def _rows(path: Path) -> Iterator[dict[str, Any]]:
    for line in read_lines(path):
        if isinstance(line, BadLine):
            raise DataError(f"{path}:{line.number}: {line.reason}")
        yield line.value


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


def name_apart(reported: Sequence[Reported]) -> list[Reported]:
    """The same, with names of which no two are equal."""
    names = [each.name for each in reported]
    return [
        replace(each, name=f"{each.name} ({number})") if names.count(each.name) > 1 else each
        for number, each in enumerate(reported, start=1)
    ]
