"""What a column of labels ranges over, and which labels are far out.

A label is far out if it is more than ten times as far from its column's median as

* all labels but the farthest hundredth (at least three of them, at most a quarter), and
* zero is from the median (1, if that leaves nothing to compare with).

The first makes it a matter of few: a long tail, or every fiftieth label at the scale's other end,
is none. The second keeps ratings quiet that are nearly all the same: of 0 to 4, mostly 4, no label
is far out, and 400 is.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from nemo_aligner.batch import LabelColumns
from nemo_aligner.data.records import Origin

_TIMES = 10
_FARTHEST = 0.01
_AT_LEAST = 3


@dataclass(frozen=True)
class FarLabel:
    """A label in the column ``name``, ``times`` as far from the median as others are."""

    origin: Origin
    name: str
    value: float
    median: float
    times: float

    def __str__(self) -> str:
        return f"{self.origin}: {self.name} is {self.value:g}, the median {self.median:g}"


def label_range(labels: LabelColumns) -> tuple[list[float], list[float]]:
    """The smallest and the largest label of every column; NaN where there is none."""
    columns = [_present(column) for column in labels.values.double().unbind(1)]
    none = torch.tensor([torch.nan])
    known = [column if column.numel() else none for column in columns]
    return [float(column.min()) for column in known], [float(column.max()) for column in known]


def far_labels(labels: LabelColumns, origins: Sequence[Origin]) -> list[FarLabel]:
    """The labels of N records that are far out, by the rule above, the farthest first."""
    columns = zip(labels.names, labels.values.double().unbind(1), strict=True)
    found = [label for name, column in columns for label in _far(name, column, origins)]
    return sorted(found, key=lambda label: -label.times)


def _far(name: str, column: Tensor, origins: Sequence[Origin]) -> Iterator[FarLabel]:
    known = _present(column)
    if not known.numel():
        return
    median = float(known.median())
    ordered = (known - median).abs().sort().values
    apart = min(max(_AT_LEAST, int(_FARTHEST * len(ordered))), len(ordered) // 4)
    reach = max(float(ordered[len(ordered) - 1 - apart]), abs(median)) or 1.0
    # NaN, a label that is missing, is not above anything.
    for index in torch.nonzero((column - median).abs() > _TIMES * reach).flatten().tolist():
        value = float(column[index])
        yield FarLabel(origins[index], name, value, median, abs(value - median) / reach)


def _present(column: Tensor) -> Tensor:
    return column[~torch.isnan(column)]
