"""How good the rewards of held-out records are, by anything that scores texts.

``score`` may be a scorer in this process or a client's: the metrics are the trainer's own, over
every record once. Of a file, records that training would drop (see ``data/dataset.py``) are dropped
and counted here by the same rules.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import compress
from pathlib import Path

import numpy as np
import torch

from nemo_aligner.config.common import RecordKind
from nemo_aligner.data.dataset import as_records, label_columns
from nemo_aligner.data.malformed import MalformedRule, check_malformed
from nemo_aligner.data.reading import Reading, RecordFile, read_records
from nemo_aligner.data.records import Comparison, MalformedRecord, Origin, Rating
from nemo_aligner.data.store.tokenize import are_same_tokens
from nemo_aligner.errors import DataError
from nemo_aligner.evaluation.sources.base import Measure, RewardSource, Score
from nemo_aligner.metrics.paired import wilson_interval
from nemo_aligner.metrics.regression import RatedRewards
from nemo_aligner.metrics.table import measure_spreads
from nemo_aligner.objectives import default_objective
from nemo_aligner.objectives.measure import measure_set
from nemo_aligner.text.contract import EncodedText, NoTemplateError, OverlongError
from nemo_aligner.text.messages import Text, reply_of
from nemo_aligner.text.one_reward import one_reward

_HOW = Reading(rule=MalformedRule(section="data."))


@dataclass(frozen=True)
class EvaluationReport:
    """What was measured on N records of one kind.

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
    """How often, and how clearly, ``chosen`` gets the higher reward.

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
    """How near the rewards are to the labels, and how well they follow them.

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
    """Without the records that have a text which the source refuses, counted as ``refused``.

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
        return MalformedRecord(record.origin, str(error))


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
