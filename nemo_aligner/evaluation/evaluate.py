"""Evaluation of a scorer on a file of held-out pairs or ratings.

The scorer is a model in this process or the client of a server. The metrics are those of the
trainer's validation, over each record once. Records that training would drop are also dropped here,
and counted by the same rules. Benchmarks are in ``run_task``.
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
    describe_step_counts,
    encode_record,
    keep_usable,
    list_malformed,
)
from nemo_aligner.data.dataset import as_records, label_columns
from nemo_aligner.data.formats.base import OtherKindError
from nemo_aligner.data.formats.prompts import count_records
from nemo_aligner.data.readers import ReaderConfig, RecordFile, read_records
from nemo_aligner.data.records import (
    Comparison,
    MalformedRecord,
    Rating,
    label_rows,
    lengths_of_rewards,
    record_principle,
)
from nemo_aligner.evaluation.predictions import Prediction, Predictions
from nemo_aligner.evaluation.robustness import check_replies_marked
from nemo_aligner.evaluation.sources import RewardSource, check_finite
from nemo_aligner.losses import default_objective, default_step_objective
from nemo_aligner.losses.base import RIGHT_FROM, measure_set
from nemo_aligner.metrics.ranking import wilson_interval
from nemo_aligner.metrics.table import (
    BY_PRINCIPLE,
    BY_SOURCE,
    OF_PARTS,
    Shown,
    all_metrics,
    by_position,
    find_metric,
)
from nemo_aligner.utils.console import fit_row
from nemo_aligner.utils.errors import ConfigError, DataError, short
from nemo_aligner.utils.finite import finite_or_none
from nemo_aligner.utils.writing import write_lines

_MALFORMED_SHOWN = 3
_DEFAULT_READER = ReaderConfig(rule=MalformedRule(section="data."))


@dataclass(frozen=True)
class EvalResult:
    """Metrics and predictions on the records of a file, all comparisons or all ratings.

    Attributes:
        predictions: one row for each rating, or for each pair of completions of a comparison.
        metrics: the metrics of the trainer's validation, by name.
        counts: number of records ``read`` and ``kept``, and of those dropped, by reason.
        malformed: the lines that hold no usable record.
    """

    predictions: Predictions
    metrics: dict[str, float]
    counts: dict[str, int]
    malformed: list[MalformedRecord] = field(default_factory=list)

    @property
    def kind(self) -> RecordKind:
        """Whether the records are comparisons or ratings, found from the predictions."""
        return RecordKind.rating if self.predictions.is_rated else RecordKind.comparison

    @property
    def accuracy(self) -> float | None:
        """Accuracy on pairs; None for ratings."""
        return self.metrics.get("accuracy")

    @property
    def interval(self) -> tuple[float, float] | None:
        """The 95% Wilson interval of the accuracy as (low, high); None for ratings."""
        count = len(self.predictions.rows)
        return None if self.accuracy is None else wilson_interval(self.accuracy * count, count)

    def render(self, description: Mapping[str, str]) -> str:
        """Render the tables for people, below ``description``: model, contract and data."""
        counts = ", ".join(f"{count} {name}" for name, count in count_records(self.counts).items())
        lines = [
            fit_row(name, text, 14) for name, text in {**description, "records": counts}.items()
        ]
        if self.malformed:
            lines += ["left out as malformed:", *list_malformed(self.malformed, _MALFORMED_SHOWN)]
        overall = {k: v for k, v in self.metrics.items() if not k.startswith(OF_PARTS)}
        width = max(map(len, overall)) + 2
        lines.append("")
        for name, value in overall.items():
            row = find_metric(name)
            number, meaning = f"{name:<{width}}{value:>10.4f}   ", row.meaning if row else ""
            if name == "accuracy" and self.interval is not None:
                low, high = self.interval
                meaning = f"95%: {low:.4f} to {high:.4f}; {meaning}"
            lines.append(fit_row(number, meaning, len(number)).rstrip())
        lines += _render_positions(self.metrics)
        lines += _render_groups(self.metrics, BY_SOURCE, "source")
        lines += _render_groups(self.metrics, BY_PRINCIPLE, "principle")
        return "\n".join(lines)

    def write(self, path: Path, description: Mapping[str, Any]) -> str:
        """Write metrics and counts as one JSON object; a metric without a value is null.

        Returns:
            The path, and whether another file was replaced, for a message.
        """
        results = {"kind": self.kind.value, "metrics": self.metrics, "counts": self.counts}
        content = finite_or_none({**description, **results})
        line = json.dumps(content, indent=2, ensure_ascii=False, allow_nan=False)
        return write_lines(path, [line])


def _render_positions(metrics: Mapping[str, float]) -> list[str]:
    rows = by_position(metrics.get)
    if not rows:
        return []
    header = ["labels", "mean label", "probability", "accuracy"]
    lines = ["", "step" + "".join(f"{name:>13}" for name in header)]
    for position, (count, *shares) in rows:
        cells = "".join(f"{share:>13.4f}" for share in shares)
        lines.append(f"{position:>4}{count:>13.0f}{cells}")
    return lines


def _render_groups(metrics: Mapping[str, float], group: str, kind: str) -> list[str]:
    """Render a table of each metric by source or by principle; ``group`` begins their names."""
    lines: list[str] = []
    for metric in all_metrics():
        if Shown.source not in metric.shown:
            continue
        by_name = {
            short(name.removeprefix(group).removesuffix(f"/{metric.name}")): value
            for name, value in metrics.items()
            if name.startswith(group) and name.endswith(f"/{metric.name}")
        }
        if by_name:
            width = max(map(len, by_name)) + 2
            rows = [f"  {name:<{width}}{value:>10.4f}" for name, value in by_name.items()]
            lines += ["", f"{metric.name} by {kind}", *rows]
    return lines


def evaluate_comparisons(
    source: RewardSource, comparisons: Sequence[Comparison], scored: ScoredRows
) -> EvalResult:
    """Compute the metrics of pairs, such as accuracy and calibration.

    Args:
        source: the scorer that computed the rewards.
        comparisons: the records.
        scored: the rewards of all their samples, in order, none of them rejected.

    Raises:
        DataError: a reward is not finite, or there is no comparison.
    """
    scores, texts = source.rewards_of(scored), _list_samples(comparisons)
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
    metrics = _compute_metrics(source, rewards.reshape(-1, 1), comparisons)
    counts = {"read": len(comparisons), "kept": len(comparisons)}
    return EvalResult(Predictions(rows), metrics, counts)


def evaluate_ratings(
    source: RewardSource, ratings: Sequence[Rating], scored: ScoredRows
) -> EvalResult:
    """Compute the metrics of ratings, such as the correlation between rewards and labels.

    Args:
        source: the scorer that computed the rewards.
        ratings: the records.
        scored: the rewards of all their samples, in order, none of them rejected.

    Raises:
        DataError: a reward is not finite, there is no rating, or a rating has labels of steps.
    """
    _check_finite(scored.rewards, ratings)
    attributes, spreads = source.attributes, scored.spread
    rewards = scored.rewards.astype(np.float32)
    labels = label_columns(ratings, attributes).values
    if len(labels) != len(ratings):
        raise DataError(
            f"got {len(labels)} rows of labels for {len(ratings)} ratings, wanted one for each: "
            "labels of turns or steps cannot be compared with one reward for each sample"
        )
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
    metrics = _compute_metrics(source, rewards, ratings, spreads)
    counts = {"read": len(ratings), "kept": len(ratings)}
    return EvalResult(Predictions(rows, attributes), metrics, counts)


def _evaluate_steps(
    source: RewardSource, ratings: Sequence[Rating], scored: Sequence[StepRewards]
) -> EvalResult:
    """Compute the metrics over the rewards of all turns or steps.

    The rows of ``predictions`` have the reward and the labels of the last turn or step.

    Raises:
        DataError: a reward is not finite, or there is no rating.
    """
    assert source.contract is not None
    names = source.attributes
    rewards = np.concatenate([steps.rewards for steps in scored])
    sizes = [len(steps.rewards) for steps in scored]
    _check_finite(rewards, ratings, sizes)
    labels = [
        _collect_last_labels(record, size, len(names))
        for record, size in zip(ratings, sizes, strict=True)
    ]
    lengths = _measure_step_lengths(source, ratings, scored)
    values = torch.tensor(
        [row for step_labels in labels for row in step_labels], dtype=torch.float32
    )
    columns = LabelColumns.of(names, values.view(len(rewards), len(names)))
    spreads = [steps.spread for steps in scored if steps.spread is not None]
    metrics = measure_set(
        default_step_objective(source.contract.readout, source.contract.label_means, names),
        torch.from_numpy(rewards),
        Records.of(range(len(ratings)), [1] * len(ratings), columns, reward_counts=sizes),
        torch.tensor(lengths),
        [record.source for record in ratings],
        [record_principle(record) for record in ratings],
        torch.from_numpy(np.concatenate(spreads)) if spreads else None,
    )
    rows = [
        Prediction.of_rating(
            record=str(record.origin),
            source=record.source,
            text=record.response,
            rewards=steps.rewards[-1],
            labels=np.array(step_labels[-1]),
            spread=None if steps.spread is None else steps.spread[-1],
        )
        for record, steps, step_labels in zip(ratings, scored, labels, strict=True)
    ]
    counts = {"read": len(ratings), "kept": len(ratings)}
    return EvalResult(Predictions(rows, names), metrics, counts)


def _measure_step_lengths(
    source: RewardSource, ratings: Sequence[Rating], scored: Sequence[StepRewards]
) -> list[int]:
    """Measure the length of the text that each reward covers, counted as in training.

    Returns:
        One length for each of the rewards of all records, one record after another.
    """
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


def default_threshold(source: RewardSource) -> float:
    """Return the lowest reward with which a step counts as right, if no threshold is set.

    It depends on the kind of reward: 0.5 for probabilities, 0 for log-odds
    (``default_step_objective``).
    """
    if source.contract is None:
        return RIGHT_FROM
    contract = source.contract
    objective = default_step_objective(contract.readout, contract.label_means, source.attributes)
    return objective.right_from


def _collect_last_labels(record: Rating, steps: int, columns: int) -> list[list[float]]:
    """Collect the labels of a record's last ``steps`` steps, ``[steps, columns]``.

    A missing label is NaN, and so are all labels of a step without labels.
    """
    unlabelled: list[tuple[float | None, ...]] = [(None,) * columns] * steps
    labelled = [row or unlabelled[0] for row in label_rows(record)]
    rows = [*unlabelled, *labelled][-steps:]
    return [[math.nan if label is None else label for label in row] for row in rows]


def _compute_metrics(
    source: RewardSource,
    rewards: np.ndarray,
    records: Sequence[Comparison] | Sequence[Rating],
    spreads: np.ndarray | None = None,
) -> dict[str, float]:
    """Compute the metrics of the trainer's validation from one reward per sample.

    ``rewards [N, A]`` are those of all samples of ``records``, in order, and ``spreads [N, A]``
    their uncertainties; None if the model reports none.
    """
    is_rated = isinstance(records[0], Rating)
    kind = RecordKind.rating if is_rated else RecordKind.comparison
    attributes = source.attributes if is_rated else ("reward",)
    return measure_set(
        default_objective(kind, attributes),
        torch.from_numpy(rewards),
        as_records(records, attributes if is_rated else ()),
        torch.tensor(response_lengths(source.scorer, _list_samples(records)), dtype=torch.int64),
        [record.source for record in records],
        [record_principle(record) for record in records],
        None if spreads is None else torch.from_numpy(spreads),
    )


def evaluate_file(
    source: RewardSource,
    path: str | Path,
    reader: ReaderConfig = _DEFAULT_READER,
    *,
    swapped: bool = False,
    needs_marked_replies: bool = False,
) -> EvalResult:
    """Evaluate a source on a file, by the rules of its scoring contract; every rank calls this.

    A ranking model takes comparisons. A regression model, or one without a contract, takes ratings,
    and also comparisons, which it orders by its weighted sum. The attributes of the source name the
    label columns of ratings.

    Args:
        source: the scorer to evaluate.
        path: the file of records.
        reader: how to read the file; its ``kind`` may demand comparisons or ratings.
        swapped: True to exchange chosen and rejected in every comparison before anything reads it.
            Accuracy must then become 1 - accuracy, otherwise the scores depend on the order of the
            replies, which is a leak.
        needs_marked_replies: True to raise an error if no sample marks where its reply begins.

    Raises:
        DataError: the file cannot be read or has the wrong kind of records, more of them are
            malformed than ``reader.rule`` allows, or none can be used or changed in style.
        ConfigError: the file has ratings, but ``aggregate``, which is for pairs, is set; or it has
            labels of steps, but the server shapes the rewards of whole replies.
    """
    reader = replace(
        reader,
        kind=reader.kind if source.takes_ratings else RecordKind.comparison,
        attributes=source.attributes if source.takes_ratings else (),
    )
    try:
        file = read_records(path, reader)
    except OtherKindError as error:
        raise _wrong_kind(error, source) from error
    if swapped:
        pairs = (record for record in file.records if isinstance(record, Comparison))
        file = replace(file, records=[pair.swapped() for pair in pairs])
    file = keep_scorable(file, source, reader.rule)
    _check_steps(file, source)
    if needs_marked_replies:
        check_replies_marked(_list_samples(file.records))
    scored = source.scorer.score_rows(_list_samples(file.records))
    if source.encoder is None:
        file, scored = _drop_without_reward(file, scored)
    if file.kind is not RecordKind.rating:
        result = evaluate_comparisons(source, file.records, scored)
    elif scored.steps is None:
        _check_no_step_labels(file, source)
        result = evaluate_ratings(source, file.records, scored)
    else:
        if source.encoder is None:
            file, scored = _drop_misfitting(file, scored, reader.rule)
        assert scored.steps is not None
        result = _evaluate_steps(source, file.records, scored.steps.tolist())
    return replace(result, counts=file.counts, malformed=file.malformed)


def _wrong_kind(error: OtherKindError, source: RewardSource) -> DataError:
    """Build the error about a file of ratings where only pairs can be evaluated."""
    if source.takes_ratings:
        return DataError(
            f"{error.summary}, but swapped and robustness_pairs need pairs. "
            "Leave them out, or pass a file of pairs."
        )
    needed = "model.reward_model_type=regression"
    model = "this model was trained on pairs, and predicts no labels"
    if error.reads is not None:
        needed += f" and model.head.reads={error.reads}"
        if not source.has_steps:
            model = "this model gives one reward for each sample, and the labels are of steps"
            model = model.replace("steps", "turns") if error.reads == "turns" else model
    return DataError(
        f"{error.summary}, but {model}. Pass a file of pairs, or a model that was trained with "
        f"{needed}."
    )


def _check_steps(file: RecordFile, source: RewardSource) -> None:
    """Check that records with labels of steps are not given to a model that scores none.

    Raises:
        DataError: the file has labels of steps, but the model scores no steps.
        ConfigError: the file has ratings, but a custom ``aggregate`` is set.
    """
    if _has_step_labels(file) and not source.has_steps:
        raise DataError(
            f"{file.path}: its records have labels of turns or steps, but this model gives one "
            "reward for each sample. Evaluate a model that was trained with model.head.reads=turns "
            "or step_ends."
        )
    if file.kind is RecordKind.rating and source.aggregate is not None:
        raise ConfigError(
            f"aggregate: got {source.aggregate.value}, but {file.path} has ratings, which are "
            "compared with the reward of each turn or step. Leave it out, or evaluate pairs or a "
            "benchmark of whole replies."
        )


def _check_no_step_labels(file: RecordFile, source: RewardSource) -> None:
    """Raise ConfigError if a file has labels of steps, whose rewards the server did not return."""
    if _has_step_labels(file):
        raise ConfigError(
            f"{file.path}: its records have labels of turns or steps, but {source.name} returned "
            "no rewards of these, as a server that shapes the rewards of whole replies "
            "(shaping.length_penalty, shaping.standardize=running). Evaluate the model itself "
            "(rm_model_file), or a server without this shaping."
        )


def _has_step_labels(file: RecordFile) -> bool:
    return any(isinstance(record, Rating) and record.steps for record in file.records)


def _drop_without_reward(file: RecordFile, scored: ScoredRows) -> tuple[RecordFile, ScoredRows]:
    """Drop records with a sample that got no reward from the server.

    They are counted as ``refused`` if the server rejected a sample, otherwise as ``unscored``. A
    server rejects samples only when they are scored, so ``scored`` has all samples of the file. The
    rewards of the remaining records are returned, so that no sample is scored twice.

    Raises:
        DataError: no record is left.
    """
    bounds = [*accumulate((len(record.texts) for record in file.records), initial=0)]
    is_scored = [scored.errors.keys().isdisjoint(range(*span)) for span in pairwise(bounds)]
    rejected = scored.rejected.keys()
    refused = sum(not rejected.isdisjoint(range(*span)) for span in pairwise(bounds))
    rows = [row for span in compress(pairwise(bounds), is_scored) for row in range(*span)]
    records = list(compress(file.records, is_scored))
    unscored = is_scored.count(False) - refused
    counts = {**file.counts, "refused": refused, "unscored": unscored}
    return _replace_records(file, records, counts), scored.take(rows)


def _drop_misfitting(
    file: RecordFile, scored: ScoredRows, rule: MalformedRule
) -> tuple[RecordFile, ScoredRows]:
    """Drop ratings with labels of other steps than a server scored, and count them as malformed.

    Of a sample that the server truncated, only the last steps have rewards.

    Raises:
        DataError: more records are malformed than ``rule`` allows, or none is left.
    """
    assert scored.steps is not None
    kept_rows, malformed = [], list(file.malformed)
    for row, (record, steps) in enumerate(zip(file.records, scored.steps, strict=True)):
        num_scored = len(steps.rewards)
        num_labelled = num_scored if record.steps is None else len(record.steps)
        if num_scored == num_labelled or (scored.exceeded[row] and num_scored < num_labelled):
            kept_rows.append(row)
        else:
            reason = describe_step_counts(num_labelled, num_scored)
            malformed.append(MalformedRecord(record.origin, reason))
    misfits = len(file.records) - len(kept_rows)
    counts = {**file.counts, "malformed": file.counts.get("malformed", 0) + misfits}
    malformed.sort(key=lambda record: record.origin.line)
    file = replace(file, counts=counts, malformed=malformed)
    check_malformed([file], rule)
    records = [file.records[row] for row in kept_rows]
    return _replace_records(file, records, counts), scored.take(kept_rows)


def keep_scorable(file: RecordFile, source: RewardSource, rule: MalformedRule) -> RecordFile:
    """Keep the records that the source can score, and count the others by reason.

    If the source is a server, only the server knows which samples it rejects, so all records are
    kept.

    Raises:
        DataError: more records are malformed than ``rule`` allows, or none can be scored.
    """
    counts: Counter[str] = Counter(file.counts)
    scorable, malformed = file.records, list(file.malformed)
    if source.encoder is not None:
        encoder = source.encoder
        encoded = (_encode_record(record, encoder) for record in file.records)
        error = "" if source.stops_at_overlong else None
        usable = keep_usable(encoded, counts, malformed, error)
        scorable = [encoded_record.record for encoded_record, _ in usable]
    malformed.sort(key=lambda record: record.origin.line)
    check_malformed([replace(file, counts=counts, malformed=malformed)], rule)
    return _replace_records(replace(file, malformed=malformed), scorable, counts)


def _replace_records(
    file: RecordFile, records: Sequence[Comparison | Rating], counts: Mapping[str, int]
) -> RecordFile:
    counts = {**counts, "kept": len(records)}
    reported = {name: count for name, count in counts.items() if count or name == "kept"}
    if not records:
        raise DataError(f"{file.path}: no record is left to evaluate: {reported}")
    return replace(file, records=list(records), counts=reported)


def _encode_record(
    record: Comparison | Rating, encoder: SampleEncoder
) -> EncodedRecord | MalformedRecord:
    def fit(text: Text) -> EncodedText | OverlongError:
        try:
            return encoder.encode(text)
        except OverlongError as error:
            return error

    texts = encode_record(record, lambda texts: [fit(text) for text in texts])
    return texts if isinstance(texts, MalformedRecord) else EncodedRecord(record, texts)


def _list_samples(records: Sequence[Comparison] | Sequence[Rating]) -> list[Text]:
    return [text for record in records for text in record.texts]


def _check_finite(
    scores: np.ndarray,
    records: Sequence[Comparison] | Sequence[Rating],
    counts: Sequence[int] | None = None,
) -> None:
    """Raise DataError if there is no record, or a reward is NaN or infinite.

    Args:
        scores: rewards of all records, one after another, ``[S, A]``.
        counts: number of rewards of each record; None if every sample has one reward.
    """
    if not records:
        raise DataError("there is no record to evaluate")
    sizes = counts or [len(record.texts) for record in records]
    check_finite(scores, [records[n].origin for n in np.repeat(range(len(records)), sizes)])
