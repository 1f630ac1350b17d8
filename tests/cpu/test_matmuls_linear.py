"""Products of a fixed number of rows, and sums in a fixed order."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from nemo_aligner.cpu import matmuls
from nemo_aligner.models.layers import in_chunks, invariant_linear


def test_product_in_pieces_that_are_filled_up_and_cut_off() -> None:
    seen = []

    def double(piece: Tensor) -> Tensor:
        seen.append(tuple(piece.shape))
        return 2 * piece

    x = torch.randn(70, 1, 3)
    assert torch.equal(in_chunks(double, x, 32), 2 * x)
    assert seen == [(32, 1, 3)] * 3


TOLERANCES = {torch.float32: 1e-4, torch.bfloat16: 2e-1, torch.float16: 3e-2}


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
def test_product_has_the_same_bits_for_a_row_wherever_it_stands(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(700, 1, 96, generator=generator).to(dtype)
    weight = torch.randn(160, 96, generator=generator).to(dtype)
    for bias in (None, torch.randn(160, generator=generator).to(dtype)):
        every = invariant_linear(x, weight, bias, 256)
        wanted = F.linear(x.double(), weight.double(), None if bias is None else bias.double())
        torch.testing.assert_close(every.double(), wanted, atol=TOLERANCES[dtype], rtol=0)
        reordered = matmuls.reordered_for_matmuls(weight)
        for rows in (slice(0, 1), slice(1, 2), slice(5, 45), slice(100, 700), slice(699, 700)):
            for each in (weight, reordered):
                assert torch.equal(invariant_linear(x[rows], each, bias, 256), every[rows])
        assert torch.equal(reordered.to_dense(), weight)


def test_trial_tells_another_order_of_sums_in_bf16(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the sums of one output; of plain random numbers rounding to bf16 hides nearly all."""

    def by_company(rows: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        parts = [rows.size(1)] if rows.size(0) % 64 == 0 else [50, rows.size(1) - 50]
        terms = zip(rows.float().split(parts, 1), weight.float().split(parts, 1), strict=True)
        found = sum(F.linear(some, its) for some, its in terms)
        return torch.as_tensor(found if bias is None else found + bias).bfloat16()

    monkeypatch.setattr(matmuls, "_any_matmul", by_company)
    weight = torch.randn(1, 577).bfloat16()
    for bias in (None, torch.randn(1).bfloat16()):
        trials = matmuls.Trials(weight, bias)
        same = [trials.has_same_bits(size, 64) for size in (16, 64, 96, 128)]
        assert same == [False, True, False, True]


def test_product_takes_other_numbers_of_rows_where_a_trial_finds_the_same_bits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of this product, those that divide by 64 have the same."""
    product, seen = matmuls._any_matmul, []

    def by_company(rows: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        seen.append(rows.size(0))
        return product(rows, weight, bias) + (rows.size(0) % 64)

    monkeypatch.setattr(matmuls, "_any_matmul", by_company)
    monkeypatch.setattr(matmuls, "_TRIED", {})
    x, weight = torch.randn(600, 8), torch.randn(4, 8)
    matmuls.invariant_linear_on_cpu(x, weight, None, 256)  # with the trials
    seen.clear()
    matmuls.invariant_linear_on_cpu(x, weight, None, 256)
    assert seen == [512, 128]  # of which 88 are the rest
    seen.clear()
    matmuls.invariant_linear_on_cpu(x[:120], weight, None, 256)
    matmuls.invariant_linear_on_cpu(x[:120], weight, None, 256)
    assert seen[-1] == 128
