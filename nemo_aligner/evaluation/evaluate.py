"""How good the rewards of held-out records are, by anything that scores texts.

``score`` may be a scorer in this process or a client's: the metrics are the trainer's own, over
every record once. ``encode`` is the scorer's, too, where there is one: with it, records that
training would drop (see ``data/dataset.py``) are dropped and counted here by the same rule.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Protocol, TypeAlias, TypeVar

import numpy as np
import torch

from nemo_aligner.batch import Records
from nemo_aligner.config.common import RecordKind
from nemo_aligner.data.dataset import label_columns
from nemo_aligner.data.reading import read_records
from nemo_aligner.data.records import Comparison, Origin, Rating
from nemo_aligner.errors import DataError
from nemo_aligner.objectives import default_objective
from nemo_aligner.objectives.measure import measure_set
from nemo_aligner.text.contract import EncodedText, OverlongError, ScoringContract
from nemo_aligner.text.messages import Text, reply_of

# N texts -> [N, A] float32.
Score: TypeAlias = Callable[[Sequence[Text]], np.ndarray]
Encode: TypeAlias = Callable[[Text], EncodedText]
# N texts -> the lengths of their N replies.
Measure: TypeAlias = Callable[[Sequence[Text]], Sequence[int]]
RecordT = TypeVar("RecordT", Comparison, Rating)


class EvaluableScorer(Protocol):
    """A reward model that knows its contract."""

    contract: ScoringContract

    def score(self, texts: Sequence[Text]) -> np.ndarray: ...

    def encode(self, text: Text) -> EncodedText: ...

    def count_reply_tokens(self, texts: Sequence[Text]) -> Sequence[int]: ...


@dataclass(frozen=True)
class EvaluationReport:
    """What was measured on N records of one kind.

    Attributes:
        kind: what a record is.
        metrics: those of the trainer's validation.
        counts: ``read``, ``kept``, and every reason that occurred.
        columns: what the columns of ``rewards`` are: ``chosen`` and ``rejected``, or attributes.
        rewards: ``[N, columns]`` float32.
        labels: ``[N, columns]`` float32 of ratings, NaN where missing; no column of comparisons.
        origins: file and line of every record.
    """

    kind: RecordKind
    metrics: dict[str, float]
    counts: dict[str, int]
    columns: tuple[str, ...]
    rewards: np.ndarray
    labels: np.ndarray
    origins: list[Origin] = field(default_factory=list)


def evaluate_comparisons(
    score: Score,
    comparisons: Sequence[Comparison],
    *,
    attribute_weights: Sequence[float] = (1.0,),
    encode: Encode | None = None,
    measure: Measure | None = None,
    overlong: str = "error",
) -> EvaluationReport:
    """How often, and how clearly, ``chosen`` gets the higher reward.

    Args:
        attribute_weights: A weights that make one reward of a text's A.
        overlong: what happens to a record that ``encode`` finds too long: ``drop``, or ``error``.

    Raises:
        DataError: a text cannot be scored, or no comparison is left.
    """
    kept, counts = _keep(comparisons, encode, overlong)
    scores = _checked(score([text for record in kept for text in record.texts]), kept, 2)
    weights = np.asarray(attribute_weights, dtype=np.float64)
    if scores.shape[1] != len(weights):
        raise DataError(f"got {scores.shape[1]} rewards per text, wanted {len(weights)}")
    merged = scores[:, 0] if len(weights) == 1 else scores @ weights
    rewards = np.asarray(merged, dtype=np.float32).reshape(-1, 2)
    return EvaluationReport(
        kind=RecordKind.comparison,
        metrics=_measure(RecordKind.comparison, ("reward",), rewards.reshape(-1, 1), kept, measure),
        counts=counts,
        columns=("chosen", "rejected"),
        rewards=rewards,
        labels=np.zeros((len(kept), 0), dtype=np.float32),
        origins=[record.origin for record in kept],
    )


def evaluate_ratings(
    score: Score,
    ratings: Sequence[Rating],
    attributes: Sequence[str],
    *,
    encode: Encode | None = None,
    measure: Measure | None = None,
    overlong: str = "error",
) -> EvaluationReport:
    """How near the rewards are to the labels, and how well they follow them.

    Raises:
        DataError: a text cannot be scored, or no rating is left.
    """
    kept, counts = _keep(ratings, encode, overlong)
    rewards = _checked(score([record.response for record in kept]), kept, 1)
    rewards = rewards.astype(np.float32)
    if rewards.shape[1] != len(attributes):
        raise DataError(
            f"got {rewards.shape[1]} rewards per text, wanted {len(attributes)}: {attributes}"
        )
    return EvaluationReport(
        kind=RecordKind.rating,
        metrics=_measure(RecordKind.rating, attributes, rewards, kept, measure),
        counts=counts,
        columns=tuple(attributes),
        rewards=rewards,
        labels=label_columns(kept, attributes).values.numpy(),
        origins=[record.origin for record in kept],
    )


def _measure(
    kind: RecordKind,
    attributes: Sequence[str],
    rewards: np.ndarray,
    kept: Sequence[Comparison] | Sequence[Rating],
    measure: Measure | None,
) -> dict[str, float]:
    """The metrics of the trainer's validation, of ``[S, A]`` rewards."""
    columns = attributes if kind is RecordKind.rating else ()
    records = Records.of(
        range(len(kept)), [len(record.texts) for record in kept], label_columns(kept, columns)
    )
    return measure_set(
        default_objective(kind, attributes),
        torch.from_numpy(rewards),
        records,
        _reply_lengths(kept, measure),
        [record.source for record in kept],
    )


def evaluate_file(
    scorer: EvaluableScorer, path: str | Path, fmt: str = "auto", loss_mask_val: float | None = None
) -> EvaluationReport:
    """Evaluate a reward model on a file, by the rules of its contract.

    A ranking model takes comparisons; a regression model takes ratings, and comparisons by its
    weighted sum. With several ranks every rank calls it. ``loss_mask_val`` is the number that, like
    null, stands for a missing label.

    Raises:
        DataError: the file is malformed, of the wrong kind, or nothing of it can be used.
    """
    contract = scorer.contract
    is_regression = contract.record_kind is RecordKind.rating
    file = read_records(
        path,
        None if is_regression else RecordKind.comparison,
        fmt,
        contract.attributes if is_regression else (),
        loss_mask_val,
    )
    overlong = "error" if contract.overlong == "error" else "drop"
    if file.kind is RecordKind.rating:
        report = evaluate_ratings(
            scorer.score,
            file.records,
            contract.attributes,
            encode=scorer.encode,
            measure=scorer.count_reply_tokens,
            overlong=overlong,
        )
    else:
        report = evaluate_comparisons(
            scorer.score,
            file.records,
            attribute_weights=contract.attribute_weights,
            encode=scorer.encode,
            measure=scorer.count_reply_tokens,
            overlong=overlong,
        )
    return replace(report, counts={**file.counts, **report.counts, "read": file.counts["read"]})


def _keep(
    records: Sequence[RecordT], encode: Encode | None, overlong: str
) -> tuple[list[RecordT], dict[str, int]]:
    """The records that can be judged, and what became of the others."""
    counts: Counter[str] = Counter(read=len(records))
    kept: list[RecordT] = []
    for record in records:
        try:
            encoded = [] if encode is None else [encode(text) for text in record.texts]
        except OverlongError as error:
            if overlong == "error":
                raise DataError(f"{record.origin}: {error}") from error
            counts["overlong"] += 1
            continue
        except DataError as error:
            raise DataError(f"{record.origin}: {error}") from error
        if len(encoded) == 2 and encoded[0].token_ids == encoded[1].token_ids:
            counts["same_tokens"] += 1
            continue
        counts["truncated"] += any(text.truncated for text in encoded)
        kept.append(record)
    counts["kept"] = len(kept)
    shown = {name: count for name, count in counts.items() if count or name == "kept"}
    if not kept:
        raise DataError(f"no record to evaluate on: {shown}")
    return kept, shown


def _checked(
    scores: np.ndarray, records: Sequence[Comparison] | Sequence[Rating], texts_per_record: int
) -> np.ndarray:
    scores, wanted = np.asarray(scores), len(records) * texts_per_record
    if scores.ndim != 2 or len(scores) != wanted:
        raise DataError(f"got scores of shape {scores.shape}, wanted {wanted} rows of attributes")
    bad = np.flatnonzero(~np.isfinite(scores).all(axis=1))
    if bad.size:
        origin = records[bad[0] // texts_per_record].origin
        raise DataError(f"{origin}: got a reward that is not finite, and {bad.size - 1} more")
    return scores


def _reply_lengths(
    records: Sequence[Comparison] | Sequence[Rating], measure: Measure | None
) -> torch.Tensor:
    texts = [text for record in records for text in record.texts]
    lengths = [len(reply_of(text)) for text in texts] if measure is None else measure(texts)
    return torch.tensor(list(lengths), dtype=torch.int64)
