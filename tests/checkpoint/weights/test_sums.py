"""Sums of weights do not depend on the sharding, and change with every value."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from nemo_aligner.checkpoint.weights.sums import WeightSums, add_shard, merge_sums


def sum_of(tensor: Tensor, offsets: Sequence[int] | None = None) -> int:
    sums: WeightSums = {}
    add_shard(sums, "w", tensor, offsets or [0] * tensor.dim())
    return sums["w"][1]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn])
def test_shards_add_up_to_the_whole(dtype: torch.dtype) -> None:
    """Shards of rows, of columns within a word, and of stacked layers add up."""
    tensor = torch.randn(3, 7, 13).to(dtype)
    ranks: list[WeightSums] = []
    for layer in range(3):
        for first, rows in ((0, 2), (2, 5)):
            for start, columns in ((0, 1), (1, 5), (6, 7)):
                shard = tensor[layer : layer + 1, first : first + rows, start : start + columns]
                ranks.append({})
                add_shard(ranks[-1], "w", shard, (layer, first, start))
    name = str(dtype).removeprefix("torch.")
    assert merge_sums(ranks) == {"w": (name, sum_of(tensor))}


def test_blocks_of_a_large_shard_add_up() -> None:
    """A shard of several blocks has the same sum as small shards."""
    tensor = torch.randn(70, 5000)
    shards = [sum_of(row.view(1, -1), (number, 0)) for number, row in enumerate(tensor)]
    assert sum_of(tensor) == sum(shards) % 2**64


def test_every_change_of_values_changes_the_sum() -> None:
    """A flipped bit, two flipped signs, and swapped elements, rows or columns change the sum."""
    tensor = torch.randn(6, 8).bfloat16()
    bits = tensor.view(torch.int16)
    changed = []
    for row, column, bit in ((0, 0, 0), (5, 7, 14), (3, 1, 7)):
        other = bits.clone()
        other[row, column] ^= 1 << bit
        changed.append(other.view(torch.bfloat16))
    for places in ((0, 3), (1, 5), (2, 3)):
        other = tensor.clone()
        other[:, list(places)] *= -1
        changed.append(other)
    changed += [
        -tensor,
        tensor.flip(0),
        tensor.flip(1),
        tensor.roll(1, 1),
        tensor[:, [1, 0, *range(2, 8)]],
    ]
    sums = [sum_of(tensor), *map(sum_of, changed)]
    assert len(set(sums)) == len(sums)
    padded = torch.nn.functional.pad(tensor, (0, 0, 0, 2))
    assert sum_of(padded) == sum_of(tensor)


def test_small_and_empty_tensors_have_sums() -> None:
    """A scalar has the sum of a vector with one element; an empty tensor adds 0."""
    assert sum_of(torch.tensor(2.5)) == sum_of(torch.tensor([2.5])) != 0
    assert sum_of(torch.zeros(0, 4)) == 0
    # A view whose storage offset is no multiple of a word.
    values = torch.randn(9).bfloat16()
    assert sum_of(values[1:]) == sum_of(values[1:].clone())
