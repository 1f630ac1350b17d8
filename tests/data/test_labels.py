"""Labels that are far out are found, and ordinary ones are not."""

from __future__ import annotations

import random

import pytest
import torch

from nemo_aligner.batch import LabelColumns
from nemo_aligner.data.labels import far_labels, label_range
from nemo_aligner.data.records import Origin

NAN = float("nan")
RNG = random.Random(0)


def far(values: list[float]) -> list[float]:
    labels = LabelColumns.of(["help"], torch.tensor(values)[:, None])
    found = far_labels(labels, [Origin("a.jsonl", n) for n in range(1, len(values) + 1)])
    assert all(values[label.origin.line - 1] == pytest.approx(label.value) for label in found)
    return [label.value for label in found]


@pytest.mark.parametrize(
    "values",
    [
        [4.0] * 999 + [0.0],
        [0.0] * 999 + [4.0],
        [1.0] * 999 + [10.0],
        [0.0] * 900 + [100.0] * 100,
        [RNG.gauss(0, 1) for _ in range(5000)],
        [RNG.expovariate(1) for _ in range(5000)],
        [RNG.random() for _ in range(1000)] + [2.0],
        [3.0, 1e38],
        [NAN] * 5,
        [],
    ],
    ids=["4", "0", "1to10", "many", "normal", "exponential", "unit", "two", "missing", "none"],
)
def test_no_wolf(values: list[float]) -> None:
    assert far(values) == []


@pytest.mark.parametrize(
    "values",
    [
        [1.0, 2.0, 0.0, 4.0, 3.0, 2.0, 1.0],
        [4.0] * 999,
        [0.0] * 50,
        [RNG.gauss(0, 1) for _ in range(1000)],
        [RNG.randint(0, 4) + 0.0 for _ in range(100)] + [NAN] * 50,
    ],
    ids=["eight", "4", "0", "normal", "with missing ones"],
)
def test_what_is_far_out_is_found_the_farthest_first(values: list[float]) -> None:
    assert far([*values, 1e38]) == pytest.approx([1e38])
    assert far([400.0, *values, 0.0, *values, -1e6]) == [-1e6, 400.0]


def test_ranges_leave_out_missing_labels() -> None:
    values = torch.tensor([[1.0, NAN, 5.0], [3.0, NAN, NAN]])
    low, high = label_range(LabelColumns.of(["a", "b", "c"], values))
    assert str((low, high)) == "([1.0, nan, 5.0], [3.0, nan, 5.0])"
