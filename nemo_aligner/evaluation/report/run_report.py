"""A run's folder, or what ``nemo-aligner evaluate`` wrote, as one thing to report on."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import torch
import yaml

from nemo_aligner.checkpoint.run_folder import (
    CONFIG_NAME,
    FACTS_NAME,
    HELDOUT_NAME,
    METRICS_NAME,
    ROBUSTNESS_NAME,
)
from nemo_aligner.config.common import RecordKind
from nemo_aligner.config.load import flatten
from nemo_aligner.contract.contract import ScoringContract
from nemo_aligner.contract.messages import Text, reply_of
from nemo_aligner.data.files import BadLine, read_lines
from nemo_aligner.data.records import row_text
from nemo_aligner.evaluation.compare import PairVerdict, read_verdicts, verdicts_of
from nemo_aligner.evaluation.evaluate import EvaluationReport, reward_rows
from nemo_aligner.evaluation.robustness import Robustness, read_robustness
from nemo_aligner.evaluation.run_task import TaskReport, task_rows, verdict_rows
from nemo_aligner.metrics.ranking import PairRewards, wilson_interval
from nemo_aligner.training.resume import describe_contract, find_versions
from nemo_aligner.training.tracking import read_metrics
from nemo_aligner.utils.errors import DataError

# Rewards of held-out records, as arrays for figures.


@dataclass(frozen=True)
class Mistake:
    """A record that the model got wrong: what it gave each of its texts, by what they are."""

    record: str
    source: str
    about: str
    texts: tuple[tuple[str, Text], ...]


@dataclass(frozen=True)
class SourceShare:
    """Share of a source's pairs that are right, with its 95% interval (Wilson 1927)."""

    source: str
    pairs: int
    accuracy: float
    low: float
    high: float


@dataclass(frozen=True)
class JudgedPairs:
    """N pairs, or items of a benchmark.

    Lengths are in characters: of models with different tokenizers they are the same.
    """

    verdicts: Sequence[PairVerdict]

    @cached_property
    def rewards(self) -> np.ndarray:
        """``[N, 2]`` float64, of the chosen reply and the rejected."""
        return np.array([each.rewards for each in self.verdicts], dtype=float).reshape(-1, 2)

    @cached_property
    def lengths(self) -> np.ndarray:
        """``[N, 2]`` int64 characters of these replies."""
        found = [[len(reply_of(text)) for text in each.judged] for each in self.verdicts]
        return np.array(found, dtype=np.int64).reshape(-1, 2)

    @cached_property
    def right(self) -> np.ndarray:
        """``[N]`` float64, see ``PairVerdict``."""
        return np.array([each.right for each in self.verdicts], dtype=float)

    def as_metrics(self) -> PairRewards:
        """Convert to the input of ``metrics/``, with lengths in characters."""
        return PairRewards.of(torch.from_numpy(self.rewards), torch.from_numpy(self.lengths))

    def shares(self) -> list[SourceShare]:
        """Compute accuracy on all pairs, and on every source if there are several."""
        sources = np.array([each.source for each in self.verdicts])
        names = sorted(set(sources.tolist()))
        shares = [_share("all", self.right)]
        if len(names) > 1:
            shares += [_share(name or "none", self.right[sources == name]) for name in names]
        return shares

    def mistakes(self, most: int) -> list[Mistake]:
        """The wrong verdicts with the largest margins, the largest first."""
        wrong = sorted((each for each in self.verdicts if each.right < 0.5), key=_margin)
        return [
            Mistake(
                each.record,
                each.source,
                f"margin {each.margin:+.3f}: chosen {each.rewards[0]:.3f}, "
                f"rejected {each.rewards[1]:.3f}",
                (("chosen", each.judged[0]), ("rejected", each.judged[1])),
            )
            for each in wrong[:most]
        ]


def _margin(verdict: PairVerdict) -> float:
    return verdict.margin


def _share(name: str, right: np.ndarray) -> SourceShare:
    low, high = wilson_interval(float(right.sum()), right.size)
    return SourceShare(name, right.size, float(right.mean()), low, high)


@dataclass(frozen=True)
class JudgedRatings:
    """N rated replies; lengths as of pairs.

    Attributes:
        attributes: A names.
        rewards, labels: ``[N, A]`` float64, NaN where one is missing.
        lengths: ``[N]`` int64 characters.
    """

    attributes: tuple[str, ...]
    rewards: np.ndarray
    labels: np.ndarray
    lengths: np.ndarray
    records: tuple[str, ...]
    sources: tuple[str, ...]
    texts: tuple[Text, ...]

    @classmethod
    def of(cls, rows: Iterable[Mapping[str, Any]]) -> JudgedRatings:
        """Build from the lines of ``output_rewards``.

        Raises:
            KeyError, TypeError, ValueError: they are none of ratings.
        """
        rows = list(rows)
        names = tuple(rows[0]["rewards"])
        texts = tuple(row_text(row["texts"]["response"]) for row in rows)
        return cls(
            attributes=names,
            rewards=_columns(rows, "rewards", names),
            labels=_columns(rows, "labels", names),
            lengths=np.array([len(reply_of(text)) for text in texts], dtype=np.int64),
            records=tuple(str(row["record"]) for row in rows),
            sources=tuple(str(row.get("source", "")) for row in rows),
            texts=texts,
        )

    def mistakes(self, most: int) -> list[Mistake]:
        """The records with an attribute that is farthest from its label, the farthest first."""
        errors = np.nan_to_num(np.abs(self.rewards - self.labels))
        farthest = np.argsort(-errors.max(axis=1), kind="stable")[:most]
        return [self._mistake(int(row), errors[row]) for row in farthest if errors[row].max() > 0]

    def _mistake(self, row: int, errors: np.ndarray) -> Mistake:
        column = int(errors.argmax())
        reward, label = self.rewards[row, column], self.labels[row, column]
        about = f"{self.attributes[column]}: reward {reward:.3f}, label {label:.3f}"
        texts = (("response", self.texts[row]),)
        return Mistake(self.records[row], self.sources[row], about, texts)


def _columns(rows: Sequence[Mapping[str, Any]], key: str, names: Sequence[str]) -> np.ndarray:
    return np.array([[row[key][name] for name in names] for row in rows], dtype=float)


HeldoutSet: TypeAlias = JudgedPairs | JudgedRatings


_WANTED = (
    "wanted the folder of a training run, or a file that evaluate's output or output_rewards wrote"
)
# Keys of a JSON file that are not settings of an evaluation.
_RESULTS = ("metrics", "counts", "rows", "left_out", "robustness", "kind", "task")


@dataclass(frozen=True)
class Reported:
    """Facts about a run or an evaluation; unknown ones are empty.

    Attributes:
        name: what legends call it.
        kind: what it is, for people.
        curves: of every logged metric the steps and the values.
        judged: what it made of held-out sets, by their names.
        metrics: of an evaluation.
        rows: of a benchmark.
        robustness: what changes of style did, if that was checked.
        facts: see ``training/resume.py``; of an evaluation what it says of itself.
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
    """Read a file of ``output_rewards``.

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
    """Number equal names, so that no two are the same."""
    names = [each.name for each in reported]
    return [
        replace(each, name=f"{each.name} ({number})") if names.count(each.name) > 1 else each
        for number, each in enumerate(reported, start=1)
    ]


# An evaluation in memory, as an entry of a report.


def of_report(
    name: str, report: EvaluationReport, about: Mapping[str, str], contract: ScoringContract | None
) -> Reported:
    """An evaluation on a file of pairs or ratings."""
    rows = list(reward_rows(report))
    is_rating = report.kind is RecordKind.rating
    judged: HeldoutSet = JudgedRatings.of(rows) if is_rating else JudgedPairs(verdicts_of(rows))
    return Reported(
        name=name,
        kind="evaluation",
        judged={name: judged},
        metrics=report.metrics,
        facts=_facts(about, report.counts, contract),
    )


def of_task(
    name: str, report: TaskReport, about: Mapping[str, str], contract: ScoringContract | None
) -> Reported:
    """A benchmark. One without right and wrong replies has its figures alone."""
    has_sides = all(0 < each.item.num_right < len(each.rewards) for each in report.judged)
    verdicts = verdicts_of(verdict_rows(report)) if has_sides else []
    return Reported(
        name=name,
        kind=f"benchmark {report.task}",
        judged={name: JudgedPairs(verdicts)} if verdicts else {},
        rows=task_rows(report),
        facts=_facts(about, report.left_out, contract),
    )


def _facts(
    about: Mapping[str, str], counts: Mapping[str, int], contract: ScoringContract | None
) -> dict[str, object]:
    return {
        **about,
        **({} if contract is None else describe_contract(contract)),
        "counts": dict(counts),
        "versions": find_versions(),
        "described": [f"checkpoint: {about['checkpoint']}"],
    }
