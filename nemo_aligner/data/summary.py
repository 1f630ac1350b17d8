"""What is to be told of a file's records, in so few numbers that a small JSON file holds them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch

from nemo_aligner.batch import LabelColumns
from nemo_aligner.config.common import RecordKind
from nemo_aligner.data.labels import FarLabel, label_range
from nemo_aligner.data.records import MalformedRecord, Origin

# Of malformed records, of which a file may have any number.
MOST_KEPT = 100
_PERCENT = np.array([0, 5, 50, 95, 100])


@dataclass(frozen=True)
class LengthSummary:
    """Of lengths the sum, and the smallest, those at 5, 50 and 95 percent, and the largest."""

    total: int
    quantiles: tuple[int, ...]

    @classmethod
    def of(cls, lengths: np.ndarray) -> LengthSummary:
        """Of ``[S]`` integers; no quantiles where there are none."""
        if not len(lengths):
            return cls(0, ())
        at = np.rint(_PERCENT / 100 * (len(lengths) - 1)).astype(np.int64)
        return cls(int(lengths.sum()), tuple(np.sort(lengths)[at].tolist()))

    def __str__(self) -> str:
        if not self.quantiles:
            return "none"
        low, p5, middle, p95, high = self.quantiles
        return f"{low} to {high}, median {middle}, 90% within {p5} to {p95}"


@dataclass(frozen=True)
class LabelSummary:
    """Of each label column how many are missing, and of the others the mean, and from what to what.

    The last three are NaN where there are none.
    """

    missing: tuple[int, ...] = ()
    means: tuple[float, ...] = ()
    lows: tuple[float, ...] = ()
    highs: tuple[float, ...] = ()

    @classmethod
    def of(cls, labels: LabelColumns) -> LabelSummary:
        if not labels.names:
            return cls()
        lows, highs = label_range(labels)
        missing = torch.isnan(labels.values).sum(0).tolist()
        return cls(tuple(missing), labels.measured_means(), tuple(lows), tuple(highs))


@dataclass(frozen=True)
class PrefixSummary:
    """What it saves that the common beginning of a record's texts is computed once.

    Attributes:
        saved: tokens that are not computed again.
        alone: records whose texts begin with nothing in common.
    """

    saved: int
    alone: int


@dataclass(frozen=True)
class FileSummary:
    """One file's records that were kept, and the others.

    Attributes:
        path, kind, format: the file, what it holds, and how it is written.
        counts: ``read``, ``kept``, and every reason that occurred.
        lengths: of every sequence.
        reply_lengths: of every reply.
        sources: records of every source; "" for those that name none.
        labels: of the records, in columns that may be none.
        longer_chosen: how often the better one of two completions is the longer; None where there
            are none.
        prefixes: None where nobody counted.
        malformed: the first that stand where a record should.
        far_labels: labels that are far out, the farthest first.
    """

    path: str
    kind: RecordKind
    format: str
    counts: Mapping[str, int]
    lengths: LengthSummary
    reply_lengths: LengthSummary
    sources: Mapping[str, int]
    labels: LabelSummary
    longer_chosen: float | None = None
    prefixes: PrefixSummary | None = None
    malformed: Sequence[MalformedRecord] = ()
    far_labels: Sequence[FarLabel] = ()

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values, without the path: a file may be moved with its index."""
        values = asdict(self)
        del values["path"]
        values["kind"] = self.kind.value
        values["malformed"] = [[bad.origin.line, bad.reason] for bad in self.malformed]
        values["far_labels"] = [
            [far.origin.line, far.name, far.value, far.median, far.times] for far in self.far_labels
        ]
        return values

    @classmethod
    def from_dict(cls, values: Mapping[str, Any], path: str) -> FileSummary:
        """The inverse of ``to_dict``, of the file at ``path``."""
        prefixes = values["prefixes"]
        parts: dict[str, Any] = {
            "path": path,
            "kind": RecordKind(values["kind"]),
            "lengths": _lengths(values["lengths"]),
            "reply_lengths": _lengths(values["reply_lengths"]),
            "labels": LabelSummary(*(tuple(values["labels"][name]) for name in _LABELS)),
            "prefixes": None if prefixes is None else PrefixSummary(**prefixes),
            "malformed": [
                MalformedRecord(Origin(path, line), reason) for line, reason in values["malformed"]
            ],
            "far_labels": [
                FarLabel(Origin(path, line), *rest) for line, *rest in values["far_labels"]
            ],
        }
        return cls(**{**values, **parts})


_LABELS = ("missing", "means", "lows", "highs")


def _lengths(values: Mapping[str, Any]) -> LengthSummary:
    return LengthSummary(values["total"], tuple(values["quantiles"]))
