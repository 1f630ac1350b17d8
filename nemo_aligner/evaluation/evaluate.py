"""Evaluation of rewards on held-out records, by anything that scores texts.

``score`` may be a scorer in this process or a client's: the metrics are the trainer's own, over
every record once. Of a file, records that training would drop (see ``data/dataset.py``) are dropped
and counted here by the same rules.
"""

from __future__ import annotations

import csv
import json
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import compress
from pathlib import Path
from typing import Any

import numpy as np
import torch

from nemo_aligner.config.common import RecordKind
from nemo_aligner.contract.contract import EncodedText, NoTemplateError, OverlongError, one_reward
from nemo_aligner.contract.messages import Text, reply_of
from nemo_aligner.data.dataset import as_records, label_columns
from nemo_aligner.data.readers import (
    MalformedRule,
    Reading,
    RecordFile,
    check_malformed,
    list_malformed,
    read_records,
)
from nemo_aligner.data.records import (
    Comparison,
    MalformedRecord,
    Origin,
    Rating,
    reward_row,
    write_lines,
    write_rows,
)
from nemo_aligner.data.tokenize import are_same_tokens, refused_record
from nemo_aligner.evaluation.sources import Measure, RewardSource, Score
from nemo_aligner.losses import default_objective
from nemo_aligner.losses.base import measure_set
from nemo_aligner.metrics.ranking import wilson_interval
from nemo_aligner.metrics.regression import RatedRewards
from nemo_aligner.metrics.table import BY_SOURCE, Shown, all_metrics, find_metric, measure_spreads
from nemo_aligner.utils.console import fit_row
from nemo_aligner.utils.errors import DataError

_HOW = Reading(rule=MalformedRule(section="data."))


@dataclass(frozen=True)
class EvaluationReport:
    """Measurements on N records of one kind.

    Attributes:
        kind: what a record is.
        metrics: those of the trainer's validation.
        counts: ``read``, ``kept``, and every reason that occurred.
        columns: what the columns of ``rewards`` are: ``chosen`` and ``rejected``, or attributes.
        rewards: ``[N, columns]`` float32, of comparisons a row for every pair of completions.
        labels: ``[N, columns]`` float32 of ratings, NaN where missing; no column of comparisons.
        origins: file and line of every row.
        sources: where the record of every row says it is from; "" if it does not.
        texts: of every row, chosen and rejected of a pair, or the one that was rated.
        malformed: what stood in the file where a record should.
        spreads: ``[N, columns]`` float32 of ratings, how uncertain rewards are; None if unknown.
    """

    kind: RecordKind
    metrics: dict[str, float]
    counts: dict[str, int]
    columns: tuple[str, ...]
    rewards: np.ndarray
    labels: np.ndarray
    origins: list[Origin] = field(default_factory=list)
    sources: list[str] = field(default_factory=list)
    texts: list[tuple[Text, ...]] = field(default_factory=list)
    malformed: list[MalformedRecord] = field(default_factory=list)
    spreads: np.ndarray | None = None

    @property
    def accuracy_interval(self) -> tuple[float, float] | None:
        """Low and high end of the accuracy's 95% interval; None where nothing is ranked."""
        accuracy, count = self.metrics.get("accuracy"), len(self.origins)
        return None if accuracy is None else wilson_interval(accuracy * count, count)


def evaluate_comparisons(
    score: Score,
    comparisons: Sequence[Comparison],
    *,
    attribute_weights: Sequence[float] = (1.0,),
    measure: Measure | None = None,
) -> EvaluationReport:
    """Measure how often, and how clearly, ``chosen`` gets the higher reward.

    Args:
        attribute_weights: A weights that make one reward of a text's A.

    Raises:
        DataError: a text cannot be scored, or there is no comparison.
    """
    texts = [text for record in comparisons for text in record.texts]
    scores = _checked(score, texts, comparisons)
    if scores.shape[1] != len(attribute_weights):
        raise DataError(f"got {scores.shape[1]} rewards per text, wanted {len(attribute_weights)}")
    rewards = one_reward(scores, attribute_weights).astype(np.float32).reshape(-1, 1)
    pairs = as_records(comparisons, ()).pairs()
    chosen, rejected = pairs.of(torch.from_numpy(rewards[:, 0]))
    owners = pairs.of_records(torch.arange(len(comparisons))).tolist()
    sides = [side.tolist() for side in pairs.of(torch.arange(len(texts)))]
    return EvaluationReport(
        kind=RecordKind.comparison,
        metrics=_measure(RecordKind.comparison, ("reward",), rewards, comparisons, measure),
        counts={"read": len(comparisons), "kept": len(comparisons)},
        columns=("chosen", "rejected"),
        rewards=torch.stack([chosen, rejected], dim=1).numpy(),
        labels=np.zeros((len(owners), 0), dtype=np.float32),
        origins=[comparisons[owner].origin for owner in owners],
        sources=[comparisons[owner].source for owner in owners],
        texts=[(texts[better], texts[worse]) for better, worse in zip(*sides, strict=True)],
    )


def evaluate_ratings(
    score: Score,
    ratings: Sequence[Rating],
    attributes: Sequence[str],
    *,
    measure: Measure | None = None,
) -> EvaluationReport:
    """Measure how close rewards are to labels, and how well they correlate.

    Raises:
        DataError: a text cannot be scored, or there is no rating.
    """
    rewards = _checked(score, [record.response for record in ratings], ratings)
    rewards = rewards.astype(np.float32)
    if rewards.shape[1] != len(attributes):
        raise DataError(
            f"got {rewards.shape[1]} rewards per text, wanted {len(attributes)}: {attributes}"
        )
    return EvaluationReport(
        kind=RecordKind.rating,
        metrics=_measure(RecordKind.rating, attributes, rewards, ratings, measure),
        counts={"read": len(ratings), "kept": len(ratings)},
        columns=tuple(attributes),
        rewards=rewards,
        labels=label_columns(ratings, attributes).values.numpy(),
        origins=[record.origin for record in ratings],
        sources=[record.source for record in ratings],
        texts=[record.texts for record in ratings],
    )


def _measure(
    kind: RecordKind,
    attributes: Sequence[str],
    rewards: np.ndarray,
    kept: Sequence[Comparison] | Sequence[Rating],
    measure: Measure | None,
) -> dict[str, float]:
    """The metrics of the trainer's validation, of ``[S, A]`` rewards."""
    return measure_set(
        default_objective(kind, attributes),
        torch.from_numpy(rewards),
        as_records(kept, attributes if kind is RecordKind.rating else ()),
        _reply_lengths(kept, measure),
        [record.source for record in kept],
    )


def evaluate_file(
    source: RewardSource,
    path: str | Path,
    how: Reading = _HOW,
) -> EvaluationReport:
    """Evaluate what a source makes of a file, by the rules of its contract where it has one.

    A ranking model takes comparisons; a regression model takes ratings, and comparisons by its
    weighted sum, as does what has no contract; ``how.kind`` may ask it for one of the two. With
    several ranks every rank calls it. The names of labels are the source's.

    Raises:
        DataError: the file cannot be read, or is of the wrong kind; more of its records are
            malformed than ``how.rule`` allows, or nothing of it can be used.
    """
    how = replace(
        how,
        kind=how.kind if source.takes_ratings else RecordKind.comparison,
        attributes=source.attributes if source.takes_ratings else (),
    )
    file = keep_scorable(read_records(path, how), source, how.rule)
    if source.encode is None:
        file, source = drop_refused(file, source)
    if file.kind is RecordKind.rating:
        report = _evaluate_rated(source, file.records)
    else:
        report = evaluate_comparisons(
            source.score,
            file.records,
            attribute_weights=source.attribute_weights,
            measure=source.measure,
        )
    return replace(report, counts=file.counts, malformed=file.malformed)


def _evaluate_rated(source: RewardSource, ratings: Sequence[Rating]) -> EvaluationReport:
    """``evaluate_ratings``, with the spread of the rewards where it costs nothing more."""
    attributes, measure = source.attributes, source.measure
    if source.score_and_spread is None:
        return evaluate_ratings(source.score, ratings, attributes, measure=measure)
    rewards, spreads = source.score_and_spread([record.response for record in ratings])
    report = evaluate_ratings(lambda _: rewards, ratings, attributes, measure=measure)
    known = None if spreads is None else torch.from_numpy(spreads)
    found, labels = torch.from_numpy(report.rewards), torch.from_numpy(report.labels)
    metrics = measure_spreads(RatedRewards.of(found, labels, attributes, spreads=known))
    return replace(report, metrics={**report.metrics, **metrics}, spreads=spreads)


def drop_refused(file: RecordFile, source: RewardSource) -> tuple[RecordFile, RewardSource]:
    """Drop records with a text that the source refuses, and count them as ``refused``.

    The source that comes with them has the rewards of their texts already.

    Raises:
        DataError: it refuses a text of every record.
    """
    rewards = np.asarray(source.score([text for record in file.records for text in record.texts]))
    bounds = np.cumsum([len(record.texts) for record in file.records])[:-1]
    of_records = np.split(rewards, bounds)
    taken = [not np.isnan(some).all(axis=1).any() for some in of_records]
    kept = list(compress(file.records, taken))
    counts = {**file.counts, "refused": taken.count(False), "kept": len(kept)}
    shown = {name: count for name, count in counts.items() if count or name == "kept"}
    if not kept:
        raise DataError(f"{file.path}: no record to evaluate on: {shown}")
    known = np.concatenate(list(compress(of_records, taken)))
    return replace(file, records=kept, counts=shown), replace(source, score=lambda _: known)


def keep_scorable(file: RecordFile, source: RewardSource, rule: MalformedRule) -> RecordFile:
    """The records that can be judged, and in ``counts`` what became of the others.

    As far as it is known without asking: of a source without ``encode`` all are kept.

    Raises:
        DataError: see ``evaluate_file``.
    """
    counts: Counter[str] = Counter(file.counts)
    kept: list[Comparison | Rating] = []
    malformed = list(file.malformed)
    for record in file.records:
        encoded = _encode(record, source)
        if isinstance(encoded, MalformedRecord):
            malformed.append(encoded)
            counts["malformed"] += 1
        elif encoded is None:
            counts["overlong"] += 1
        elif encoded and are_same_tokens(encoded):
            counts["same_tokens"] += 1
        else:
            counts["truncated"] += any(text.truncated for text in encoded)
            kept.append(record)
    counts["kept"] = len(kept)
    shown = {name: count for name, count in counts.items() if count or name == "kept"}
    malformed.sort(key=lambda record: record.origin.line)
    scorable = replace(file, records=kept, counts=shown, malformed=malformed)
    check_malformed([scorable], rule)
    if not kept:
        raise DataError(f"{file.path}: no record to evaluate on: {shown}")
    return scorable


def _encode(
    record: Comparison | Rating, source: RewardSource
) -> list[EncodedText] | MalformedRecord | None:
    """Its texts encoded, none where the source cannot; None for a record that is too long."""
    if source.encode is None:
        return []
    try:
        return [source.encode(text) for text in record.texts]
    except OverlongError as error:
        if source.stops_at_overlong:
            raise DataError(f"{record.origin}: {error}") from error
        return None
    except NoTemplateError as error:
        # It is no fault of this record.
        raise DataError(f"{record.origin}: {error}") from error
    except DataError as error:
        return refused_record(record, source.encode, error)


def _checked(
    score: Score, texts: Sequence[Text], records: Sequence[Comparison] | Sequence[Rating]
) -> np.ndarray:
    """``[len(texts), A]`` finite rewards."""
    if not records:
        raise DataError("no record to evaluate on")
    scores = np.asarray(score(texts))
    if scores.ndim != 2 or len(scores) != len(texts):
        raise DataError(
            f"got scores of shape {scores.shape}, wanted {len(texts)} rows of attributes"
        )
    bad = np.flatnonzero(~np.isfinite(scores).all(axis=1))
    if bad.size:
        owners = [record for record in records for _ in record.texts]
        origin = owners[bad[0]].origin
        raise DataError(f"{origin}: got a reward that is not finite, and {bad.size - 1} more")
    return scores


def _reply_lengths(
    records: Sequence[Comparison] | Sequence[Rating], measure: Measure | None
) -> torch.Tensor:
    texts = [text for record in records for text in record.texts]
    lengths = [len(reply_of(text)) for text in texts] if measure is None else measure(texts)
    return torch.tensor(list(lengths), dtype=torch.int64)


# Output: a table for people, JSON for programs.

_MALFORMED_SHOWN = 3


def render_report(report: EvaluationReport, about: Mapping[str, str]) -> str:
    """The report as a table; ``about`` says what was evaluated, with what."""
    counts = ", ".join(f"{count} {name}" for name, count in report.counts.items())
    lines = [fit_row(name, text, 14) for name, text in {**about, "records": counts}.items()]
    if report.malformed:
        lines += ["left out as malformed:", *list_malformed(report.malformed, _MALFORMED_SHOWN)]
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
    """Yield the rows that ``write_rewards`` writes."""
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


# Gain of a training: held-out metrics before it, and an evaluation after.


def render_gain(run_folder: Path, evaluation: Path) -> str:
    """The main metric of a run's first validation, and of the report of its reward model.

    Raises:
        DataError: the run has not one metrics.csv, or no validation of that metric in it.
    """
    after = json.loads(evaluation.read_text())
    name = "accuracy" if "accuracy" in after["metrics"] else "pearson_mean"
    before = _first_validation(run_folder, name)
    text = (
        f"held-out {name}, {after['counts']['kept']} records: {before:.3f} before training, "
        f"{after['metrics'][name]:.3f} after"
    )
    if name == "accuracy":
        longer = after["metrics"]["longer_reply_accuracy"]
        text += f"\n(always taking the longer reply: {longer:.3f})"
    return text


def _first_validation(run_folder: Path, name: str) -> float:
    paths = sorted(run_folder.rglob("metrics.csv"))
    if len(paths) != 1:
        raise DataError(f"{run_folder}: got {len(paths)} files metrics.csv, wanted one")
    with paths[0].open(newline="") as lines:
        rows = list(csv.DictReader(lines))
    # "validation-<file>/accuracy", and not "validation-<file>/by_source/<source>/accuracy"
    for key in rows[0] if rows else ():
        if key.startswith("validation-") and key.count("/") == 1 and key.endswith(f"/{name}"):
            values = [row[key] for row in rows if row[key]]
            if values:
                return float(values[0])
    raise DataError(f"{paths[0]}: got no validation, wanted one with {name}")
