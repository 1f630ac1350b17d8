"""Products by oneDNN: the same numbers, in pieces of a few sizes."""

from __future__ import annotations

import pytest
import torch

from nemo_aligner.parallel.cpu.products import _pieces, linear_by_pieces


@pytest.mark.parametrize("rows", [1, 63, 64, 65, 511, 512, 513, 1100])
@pytest.mark.parametrize("with_bias", [False, True])
def test_a_product_is_that_of_torch(rows, with_bias):
    generator = torch.Generator().manual_seed(rows)
    x = torch.randn(rows, 1, 96, generator=generator)
    weight = torch.randn(40, 96, generator=generator)
    bias = torch.randn(40, generator=generator) if with_bias else None
    found = linear_by_pieces(x, weight, bias)
    assert found.shape == (rows, 1, 40)
    torch.testing.assert_close(
        found, torch.nn.functional.linear(x, weight, bias), atol=1e-4, rtol=1e-5
    )


def test_pieces_cover_all_rows_once_and_are_of_few_sizes():
    sizes = set()
    for rows in range(1, 3000):
        pieces = list(_pieces(rows))
        assert [start for start, _ in pieces] == [0, *(stop for _, stop in pieces[:-1])]
        assert pieces[-1][1] == rows
        sizes |= {stop - start for start, stop in pieces}
    assert sorted(size for size in sizes if size >= 64) == [64 * n for n in range(1, 9)]
