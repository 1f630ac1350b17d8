"""Evaluation on held-out pairs and ratings, with any scorer.

It may be a model in this process or a client of a server. The metrics are those of the trainer's
validation, over each record once. Records that training would drop are dropped and
counted by the same rules.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, compress, islice, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch

from nemo_aligner.batch.packed import LabelColumns, Records
from nemo_aligner.config.common import RecordKind
from nemo_aligner.contract.contract import EncodedText, OverlongError
from nemo_aligner.contract.messages import Text
from nemo_aligner.contract.readout import one_reward
from nemo_aligner.contract.scorer import (
    SampleEncoder,
    ScoredRows,
    StepRewards,
    response_lengths,
)
from nemo_aligner.contract.steps import step_texts
from nemo_aligner.data.clean import (
    EncodedRecord,
    MalformedRule,
    check_malformed,
    encode_record,
    keep_usable,
    list_malformed,
)
from nemo_aligner.data.dataset import as_records, label_columns
from nemo_aligner.data.formats.prompts import count_records
from nemo_aligner.data.readers import ReaderConfig, RecordFile, read_records
from nemo_aligner.data.records import (
    Comparison,
    MalformedRecord,
    Rating,
    label_rows,
    lengths_of_rewards,
    write_lines,
)
from nemo_aligner.evaluation.predictions import Prediction, Predictions
from nemo_aligner.evaluation.sources import RewardSource
from nemo_aligner.losses import default_objective, default_step_objective
from nemo_aligner.losses.base import RIGHT_FROM, measure_set
from nemo_aligner.metrics.ranking import wilson_interval
from nemo_aligner.metrics.regression import RatedRewards
from nemo_aligner.metrics.table import (
    BY_SOURCE,
    POSITION,
    Shown,
    all_metrics,
    by_position,
    find_metric,
    measure_spreads,
)
from nemo_aligner.utils.console import fit_row
from nemo_aligner.utils.errors import ConfigError, DataError

_MALFORMED_SHOWN = 3
_HOW = ReaderConfig(rule=MalformedRule(section="data."))


@dataclass(frozen=True)
class EvalResult:
    """Measurements on N records of one kind.

    Attributes:
        predictions: a row for every rating, and for every pair of a comparison's completions.
        metrics: those of the trainer's validation.
        counts: ``read``, ``kept``, and every reason that occurred.
        malformed: places in the file that hold no usable record.
    """

    predictions: Predictions
    metrics: dict[str, float]
    counts: dict[str, int]
    malformed: list[MalformedRecord] = field(default_factory=list)

    @property
    def kind(self) -> RecordKind:
        return RecordKind.rating if self.predictions.is_rated else RecordKind.comparison

    @property
    def accuracy(self) -> float | None:
        """Share of pairs in order; None of ratings."""
        return self.metrics.get("accuracy")

    @property
    def interval(self) -> tuple[float, float] | None:
        """Ends of the accuracy's 95% Wilson interval; None for ratings."""
        count = len(self.predictions.rows)
        return None if self.accuracy is None else wilson_interval(self.accuracy * count, count)

    def render(self, about: Mapping[str, str]) -> str:
        """Render the tables for people; ``about`` names the model, its contract and the data."""
        counts = ", ".join(f"{count} {name}" for name, count in count_records(self.counts).items())
        lines = [fit_row(name, text, 14) for name, text in {**about, "records": counts}.items()]
        if self.malformed:
            lines += ["left out as malformed:", *list_malformed(self.malformed, _MALFORMED_SHOWN)]
        apart = (BY_SOURCE, POSITION)
        overall = {k: v for k, v in self.metrics.items() if not k.startswith(apart)}
        width = max(map(len, overall)) + 2
        lines.append("")
        for name, value in overall.items():
            row = find_metric(name)
            number, meaning = f"{name:<{width}}{value:>10.4f}   ", row.meaning if row else ""
            if name == "accuracy" and self.interval is not None:
                low, high = self.interval
                meaning = f"{low:.4f} to {high:.4f} with 95%; {meaning}"
            lines.append(fit_row(number, meaning, len(number)).rstrip())
        return "\n".join([*lines, *_position_lines(self.metrics), *_source_lines(self.metrics)])

    def write(self, path: Path, about: Mapping[str, Any]) -> None:
        """Write metrics and counts as one JSON object; a metric without a value is null."""
        metrics = {
            name: value if math.isfinite(value) else None for name, value in self.metrics.items()
        }
        content = {**about, "kind": self.kind.value, "metrics": metrics, "counts": self.counts}
        write_lines(path, [json.dumps(content, indent=2, ensure_ascii=False, allow_nan=False)])


def _position_lines(metrics: Mapping[str, float]) -> list[str]:
    rows = by_position(metrics.get)
    if not rows:
        return []
    header = ["labels", "mean label", "probability", "accuracy"]
    lines = ["", "step" + "".join(f"{name:>13}" for name in header)]
    for place, (count, *shares) in rows:
        lines.append(f"{place:>4}{count:>13.0f}" + "".join(f"{each:>13.4f}" for each in shares))
    return lines


def _source_lines(metrics: Mapping[str, float]) -> list[str]:
    lines: list[str] = []
    for metric in all_metrics():
        if Shown.source not in metric.shown:
            continue
        found = {
            name.removeprefix(BY_SOURCE).removesuffix(f"/{metric.name}"): value
            for name, value in metrics.items()
            if name.startswith(BY_SOURCE) and name.endswith(f"/{metric.name}")
        }
        if found:
            width = max(map(len, found)) + 2
            rows = [f"  {name:<{width}}{value:>10.4f}" for name, value in found.items()]
            lines += ["", f"{metric.name} by source", *rows]
    return lines


def evaluate_comparisons(
    source: RewardSource, comparisons: Sequence[Comparison], scored: ScoredRows
) -> EvalResult:
    """Measure how often, and how clearly, ``chosen`` gets the higher reward.

    ``scored`` has all texts of the comparisons, here and below, none of them rejected.

    Raises:
        DataError: a reward is not finite, or there is no comparison.
    """
    scores, texts = source.rewards_of(scored), _texts(comparisons)
    _check_finite(scores, comparisons)
    rewards = one_reward(scores, source.weights).astype(np.float32)
    pairs = as_records(comparisons, ()).pairs()
    owners = pairs.of_records(torch.arange(len(comparisons))).tolist()
    sides = torch.stack(pairs.of(torch.arange(len(texts))), dim=1).tolist()
    rows = [
        Prediction.of_pair(
            record=str(comparisons[owner].origin),
            source=comparisons[owner].source,
            texts=(texts[chosen], texts[rejected]),
            rewards=rewards[[chosen, rejected]],
        )
        for owner, (chosen, rejected) in zip(owners, sides, strict=True)
    ]
    metrics = _measure(source, rewards.reshape(-1, 1), comparisons)
    counts = {"read": len(comparisons), "kept": len(comparisons)}
    return EvalResult(Predictions(rows), metrics, counts)


def evaluate_ratings(
    source: RewardSource, ratings: Sequence[Rating], scored: ScoredRows
) -> EvalResult:
    """Measure how close rewards are to labels, and how well they correlate.

    Raises:
        DataError: a reward is not finite, or there is no rating.
    """
    _check_finite(scored.rewards, ratings)
    attributes, spreads = source.attributes, scored.spread
    rewards = scored.rewards.astype(np.float32)
    labels = label_columns(ratings, attributes).values
    rows = [
        Prediction.of_rating(
            record=str(record.origin),
            source=record.source,
            text=record.response,
            rewards=rewards[row],
            labels=labels[row].numpy(),
            spread=None if spreads is None else spreads[row],
        )
        for row, record in enumerate(ratings)
    ]
    metrics = _measure(source, rewards, ratings)
    if spreads is not None:
        rated = RatedRewards.of(
            torch.from_numpy(rewards), labels, attributes, spreads=torch.from_numpy(spreads)
        )
        metrics |= measure_spreads(rated)
    counts = {"read": len(ratings), "kept": len(ratings)}
    return EvalResult(Predictions(rows, attributes), metrics, counts)


def _evaluate_steps(
    source: RewardSource, ratings: Sequence[Rating], scored: Sequence[StepRewards]
) -> EvalResult:
    """Measure the rewards of all turns or steps; the predictions are those of the last ones.

    Raises:
        DataError: there is no rating, or a reward is not finite.
    """
    assert source.contract is not None
    names = source.attributes
    rewards = np.concatenate([steps.rewards for steps in scored])
    sizes = [len(steps.rewards) for steps in scored]
    _check_finite(rewards, ratings, sizes)
    labels = [
        _last_labels(record, size, len(names)) for record, size in zip(ratings, sizes, strict=True)
    ]
    lengths = _measure_steps(source, ratings, scored)
    values = torch.tensor(
        [row for step_labels in labels for row in step_labels], dtype=torch.float32
    )
    columns = LabelColumns.of(names, values.view(len(rewards), len(names)))
    metrics = measure_set(
        default_step_objective(source.contract.readout, source.contract.label_means, names),
        torch.from_numpy(rewards),
        Records.of(range(len(ratings)), [1] * len(ratings), columns, reward_counts=sizes),
        torch.tensor(lengths),
        [record.source for record in ratings],
    )
    rows = [
        Prediction.of_rating(
            record=str(record.origin),
            source=record.source,
            text=record.response,
            rewards=steps.rewards[-1],
            labels=np.array(step_labels[-1]),
        )
        for record, steps, step_labels in zip(ratings, scored, labels, strict=True)
    ]
    counts = {"read": len(ratings), "kept": len(ratings)}
    return EvalResult(Predictions(rows, names), metrics, counts)


def _measure_steps(
    source: RewardSource, ratings: Sequence[Rating], scored: Sequence[StepRewards]
) -> list[int]:
    """``[S]`` lengths of what each reward is of, as training counts them."""
    assert source.contract is not None
    separator = source.contract.step_separator
    steps = [
        step_texts(record.response, rewards.spans, separator)
        for record, rewards in zip(ratings, scored, strict=True)
    ]
    replies = response_lengths(source.scorer, [record.response for record in ratings])
    counts = iter(response_lengths(source.scorer, [text for texts in steps for text in texts]))
    return [
        length
        for record, reply_length, texts in zip(ratings, replies, steps, strict=True)
        for length in lengths_of_rewards(record, reply_length, [*islice(counts, len(texts))])
    ]


def right_from(source: RewardSource) -> float:
    """The reward from which on a step counts as right."""
    if source.contract is None:
        return RIGHT_FROM
    contract = source.contract
    objective = default_step_objective(contract.readout, contract.label_means, source.attributes)
    return objective.right_from


def _last_labels(record: Rating, steps: int, columns: int) -> list[list[float]]:
    """Labels of the last ``steps`` of a record, NaN where one is missing."""
    none: list[tuple[float | None, ...]] = [(None,) * columns] * steps
    known = [own or none[0] for own in label_rows(record)]
    rows = [*none, *known][-steps:]
    return [[math.nan if label is None else label for label in own] for own in rows]


def _measure(
    source: RewardSource, rewards: np.ndarray, records: Sequence[Comparison] | Sequence[Rating]
) -> dict[str, float]:
    """The metrics of the trainer's validation, of ``[S, A]`` rewards."""
    is_rated = isinstance(records[0], Rating)
    kind = RecordKind.rating if is_rated else RecordKind.comparison
    attributes = source.attributes if is_rated else ("reward",)
    return measure_set(
        default_objective(kind, attributes),
        torch.from_numpy(rewards),
        as_records(records, attributes if is_rated else ()),
        torch.tensor(response_lengths(source.scorer, _texts(records)), dtype=torch.int64),
        [record.source for record in records],
    )


def evaluate_file(
    source: RewardSource,
    path: str | Path,
    how: ReaderConfig = _HOW,
    *,
    swapped: bool = False,
) -> EvalResult:
    """Evaluate a source on a file, by the rules of its contract if it has one.

    A ranking model takes comparisons. A regression model, or one without a contract, takes ratings
    and also comparisons, by its weighted sum; ``how.kind`` may ask for one of the two. The source's
    attributes name the label columns. ``swapped`` turns every comparison round before anything
    reads it, which has to turn every verdict. Every rank calls it.

    Raises:
        DataError: the file cannot be read, or is of the wrong kind; more of its records are
            malformed than ``how.rule`` allows, or nothing of it can be used.
        ConfigError: it has ratings, and the source a rule of its own for pairs (``aggregate``).
    """
    how = replace(
        how,
        kind=how.kind if source.takes_ratings else RecordKind.comparison,
        attributes=source.attributes if source.takes_ratings else (),
    )
    file = read_records(path, how)
    if swapped:
        turned = [each.swapped() for each in file.records if isinstance(each, Comparison)]
        file = replace(file, records=turned)
    file = keep_scorable(file, source, how.rule)
    _check_steps(file, source)
    scored = source.scorer.score_rows(_texts(file.records))
    if source.encoder is None:
        file, scored = drop_refused(file, scored)
    if file.kind is not RecordKind.rating:
        result = evaluate_comparisons(source, file.records, scored)
    elif scored.steps is None:
        result = evaluate_ratings(source, file.records, scored)
    else:
        result = _evaluate_steps(source, file.records, scored.steps.tolist())
    return replace(result, counts=file.counts, malformed=file.malformed)


def _check_steps(file: RecordFile, source: RewardSource) -> None:
    """Refuse labels of steps for a source without them, and ratings for a rule for pairs."""
    has_labels = any(isinstance(record, Rating) and record.steps for record in file.records)
    if has_labels and not source.has_steps:
        raise DataError(
            f"{file.path}: got labels of turns or steps, wanted a model in this process that has a "
            "reward for each (rm_model_file)"
        )
    if file.kind is RecordKind.rating and source.aggregate is not None:
        raise ConfigError(
            f"aggregate: got {source.aggregate.value}, but the ratings of {file.path} are compared "
            "with the reward of each turn or step. Leave it out, or evaluate pairs or a task of "
            "texts"
        )


def drop_refused(file: RecordFile, scored: ScoredRows) -> tuple[RecordFile, ScoredRows]:
    """Drop records with a text that was rejected, and count them as ``refused``.

    A server rejects texts only when it is to score them, so ``scored`` has all texts of the file.
    Those of the remaining records are returned, so that none is scored twice.

    Raises:
        DataError: no record is left.
    """
    bounds = [*accumulate((len(record.texts) for record in file.records), initial=0)]
    is_scored = [scored.errors.keys().isdisjoint(range(*both)) for both in pairwise(bounds)]
    rows = [row for both in compress(pairwise(bounds), is_scored) for row in range(*both)]
    records = list(compress(file.records, is_scored))
    counts = {**file.counts, "refused": is_scored.count(False)}
    return _with_kept(file, records, counts), scored.take(rows)


def keep_scorable(file: RecordFile, source: RewardSource, rule: MalformedRule) -> RecordFile:
    """Keep the records that the source can score, and count the others by reason.

    Without a tokenizer at hand nothing is known before scoring, and all are kept.

    Raises:
        DataError: see ``evaluate_file``.
    """
    counts: Counter[str] = Counter(file.counts)
    kept, malformed = file.records, list(file.malformed)
    if source.encoder is not None:
        encoder = source.encoder
        encoded = (_encode(record, encoder) for record in file.records)
        error = "" if source.stops_at_overlong else None
        kept = [each.record for each, _ in keep_usable(encoded, counts, malformed, error)]
    malformed.sort(key=lambda record: record.origin.line)
    check_malformed([replace(file, counts=counts, malformed=malformed)], rule)
    return _with_kept(replace(file, malformed=malformed), kept, counts)


def _with_kept(
    file: RecordFile, kept: Sequence[Comparison | Rating], counts: Mapping[str, int]
) -> RecordFile:
    counts = {**counts, "kept": len(kept)}
    shown = {name: count for name, count in counts.items() if count or name == "kept"}
    if not kept:
        raise DataError(f"{file.path}: no record to evaluate on: {shown}")
    return replace(file, records=list(kept), counts=shown)


def _encode(record: Comparison | Rating, encoder: SampleEncoder) -> EncodedRecord | MalformedRecord:
    def fit(text: Text) -> EncodedText | OverlongError:
        try:
            return encoder.encode(text)
        except OverlongError as error:
            return error

    texts = encode_record(record, lambda texts: [fit(text) for text in texts])
    return texts if isinstance(texts, MalformedRecord) else EncodedRecord(record, texts)


def _texts(records: Sequence[Comparison] | Sequence[Rating]) -> list[Text]:
    return [text for record in records for text in record.texts]


def _check_finite(
    scores: np.ndarray,
    records: Sequence[Comparison] | Sequence[Rating],
    counts: Sequence[int] | None = None,
) -> None:
    """Raise DataError unless each record has finite ``scores``, so many as ``counts``, or texts."""
    if not records:
        raise DataError("no record to evaluate on")
    bad = np.flatnonzero(~np.isfinite(scores).all(axis=1))
    if bad.size:
        sizes = counts or [len(record.texts) for record in records]
        origin = records[int(np.searchsorted(np.cumsum(sizes), bad[0], side="right"))].origin
        raise DataError(f"{origin}: got a reward that is not finite, and {bad.size - 1} more")
