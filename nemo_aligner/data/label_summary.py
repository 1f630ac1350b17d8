"""Summaries of labels in the report on a file: label columns, and a teacher's soft labels."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from nemo_aligner.batch.packed import LabelColumns
from nemo_aligner.batch.pairs import pair_rows
from nemo_aligner.data.formats.teacher import teacher_rewards
from nemo_aligner.data.records import Record

# Bounds of the bins of the probabilities that a report counts.
_BINS = (0.0, 0.2, 0.4, 0.6, 0.8, 1.0)


def label_range(labels: LabelColumns) -> tuple[list[float], list[float]]:
    """Return the smallest and the largest label of each column; NaN if a column has none."""
    missing = torch.tensor([torch.nan])
    columns = [select_present(column) for column in labels.values.double().unbind(1)]
    columns = [column if column.numel() else missing for column in columns]
    return [float(column.min()) for column in columns], [float(column.max()) for column in columns]


def select_present(column: Tensor) -> Tensor:
    return column[~torch.isnan(column)]


@dataclass(frozen=True)
class LabelSummary:
    """Summary of each label column: number of missing labels, mean, minimum and maximum.

    Mean, minimum and maximum are NaN if all labels of the column are missing.
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

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> LabelSummary:
        """Restore a summary from its fields, of which JSON has made lists."""
        return cls(**{name: tuple(items) for name, items in values.items()})


@dataclass(frozen=True)
class SoftLabelSummary:
    """Summary of the probabilities p that a teacher's rewards give the better replies of pairs.

    p is the sigmoid of the better reply's reward minus the worse one's.

    Attributes:
        records: number of records with rewards of a teacher.
        pairs: number of their pairs of replies of which one is better.
        distance: mean of ``|p - 1/2|``; NaN without a pair.
        opposed: fraction of pairs with p below 1/2: the teacher prefers the reply that the record
            ranks lower.
        bins: fraction of pairs with p in each of five bins of equal width from 0 to 1.
    """

    records: int
    pairs: int
    distance: float
    opposed: float
    bins: tuple[float, ...]

    @classmethod
    def of_records(cls, records: Sequence[Record]) -> SoftLabelSummary | None:
        """Summarize the teacher's rewards of records; None if no record has any."""
        return cls.of(
            np.cumsum([0, *(len(record.texts) for record in records)]),
            np.array([rank for record in records for rank in record.ranks]),
            teacher_rewards(records),
        )

    @classmethod
    def of(
        cls, sample_bounds: np.ndarray, ranks: np.ndarray, rewards: np.ndarray
    ) -> SoftLabelSummary | None:
        """Summarize a teacher's ``rewards [Q]``; None if they are empty or all NaN.

        ``sample_bounds [N + 1]`` and ``ranks [Q]`` are those of ``Records``.
        """
        has_reward = ~np.isnan(rewards)
        if not has_reward.any():
            return None
        pairs = pair_rows(torch.from_numpy(sample_bounds), torch.from_numpy(ranks))
        better, worse = pairs.of(torch.from_numpy(rewards).double())
        chances = torch.sigmoid(better - worse).numpy()
        chances = chances[~np.isnan(chances)]
        count = len(chances)
        counts = np.histogram(chances, _BINS)[0]
        return cls(
            int(has_reward[sample_bounds[:-1]].sum()),
            count,
            float(np.abs(chances - 0.5).mean()) if count else float("nan"),
            float((chances < 0.5).mean()) if count else float("nan"),
            tuple((counts / max(count, 1)).tolist()),
        )

    @classmethod
    def from_dict(cls, values: Mapping[str, Any] | None) -> SoftLabelSummary | None:
        """Restore a summary from its fields, of which JSON has made a dict; None stays None."""
        return None if values is None else cls(**{**values, "bins": tuple(values["bins"])})

    def render_rows(self) -> Iterable[tuple[str, object]]:
        """Yield the name and the value of each row of the report."""
        if not self.pairs:
            yield "soft labels", f"{self.records} records, without a pair of unequal rank"
            return
        softness = f"mean |p - 0.5| {self.distance:.3f}, {self.opposed:.1%} with p below 0.5"
        yield "soft labels", f"{self.records} records, {self.pairs} pairs; {softness}"
        parts = [
            f"to {high:g} {share:.1%}" for high, share in zip(_BINS[1:], self.bins, strict=True)
        ]
        yield "p of the better reply", f"from 0 {', '.join(parts)}"
