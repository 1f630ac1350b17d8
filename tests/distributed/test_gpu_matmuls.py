"""Matmuls by cuBLAS's rules: the trial of chunk sizes, and chunks of identical sizes."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from nemo_aligner.distributed import gpu_matmuls
from nemo_aligner.distributed.gpu_matmuls import (
    chunk_sizes,
    invariant_linear_on_gpu,
    row_multiple,
    split_rows,
)


def test_rows_are_cut_into_few_chunks() -> None:
    sizes = gpu_matmuls._SIZES
    for count in (1, 40, 100, 1000, 2000, 5000, 7000, 7900, 20_000):
        padded = count + -count % row_multiple(count, 64)
        assert sum(split_rows(padded, sizes)) == padded <= max(64 + count, 1.07 * count)
        assert len(split_rows(padded, sizes)) <= 2 + padded // 8192
    # Few rows cost as much as 256, and padding costs as much as other rows.
    assert split_rows(100, (64, 1024)) == (64, 64)
    assert split_rows(700, (64, 1024)) == (1024,)
    assert split_rows(3100, (64, 1024)) == (1024, 1024, 1024, 64)
    assert row_multiple(5000, 1024) == 1024


def test_trial_takes_sizes_whose_sums_have_one_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few rows are summed in two parts, and 1,024 in an order that depends on the position."""

    def by_parts(rows: Tensor, weight: Tensor, parts: list[int]) -> Tensor:
        """Multiply in chunks of one shape, because a CPU sums in another order for others."""
        pairs = zip(rows.float().split(parts, 1), weight.float().split(parts, 1), strict=True)
        terms = [torch.cat([F.linear(few, its) for few in some.split(64)]) for some, its in pairs]
        return torch.stack(terms).sum(0)

    def by_rows(rows: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor) -> None:
        parts = [rows.size(1)] if rows.size(0) >= 512 else [50, rows.size(1) - 50]
        total = by_parts(rows, weight, parts)
        if rows.size(0) == 1024:
            total[512:] = by_parts(rows[512:], weight, [9, rows.size(1) - 9])
        out.copy_(total if bias is None else total + bias)

    monkeypatch.setattr(gpu_matmuls, "_multiply", by_rows)
    monkeypatch.setattr(gpu_matmuls, "_TRIED", {})
    torch.manual_seed(0)
    x, weight = torch.randn(2000, 1, 96).bfloat16(), torch.randn(80, 96).bfloat16()
    for bias in (None, torch.randn(80).bfloat16()):
        sizes = chunk_sizes(weight, bias, 1024)
        assert sizes == tuple(size for size in gpu_matmuls._SIZES if size >= 512 and size != 1024)
        every = invariant_linear_on_gpu(x, weight, bias, 1024)
        for rows in (slice(0, 1), slice(3, 700), slice(1999, 2000), slice(100, 2000)):
            assert torch.equal(invariant_linear_on_gpu(x[rows], weight, bias, 1024), every[rows])
        wanted = F.linear(x.double(), weight.double(), None if bias is None else bias.double())
        torch.testing.assert_close(every.double(), wanted, atol=2e-1, rtol=0)


def test_trial_without_any_agreement_leaves_one_size(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def by_place(rows: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor) -> None:
        out.copy_(F.linear(rows, weight) + torch.arange(rows.size(0))[:, None])

    monkeypatch.setattr(gpu_matmuls, "_multiply", by_place)
    monkeypatch.setattr(gpu_matmuls, "_TRIED", {})
    assert chunk_sizes(torch.randn(8, 16), None, 200) == (256,)
    assert "model.batch_invariant may not hold" in caplog.text
