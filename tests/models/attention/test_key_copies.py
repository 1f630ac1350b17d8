"""Gradients of keys that are copied for several segments: sums of those of the copies."""

from __future__ import annotations

import pytest
import torch

from nemo_aligner.models.attention.key_copies import Copies, copy_rows


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_gradients_of_copies_are_summed_and_rounded_once(dtype: torch.dtype) -> None:
    """Also those of a row with many copies, and of one without."""
    generator = torch.Generator().manual_seed(0)
    index = torch.randint(1, 40, (300,), generator=generator)
    rows = torch.randn(40, 2, 8, generator=generator).to(dtype).requires_grad_()
    gradients = torch.randn(300, 2, 8, generator=generator).to(dtype)
    copied = copy_rows(rows, index, Copies.of(index, len(rows)))
    assert torch.equal(copied, rows[index])
    (found,) = torch.autograd.grad(copied, rows, gradients)
    expected = torch.zeros(rows.shape, dtype=torch.float64)
    expected.index_add_(0, index, gradients.double())
    assert not found[0].any()
    error = (found.double() - expected).abs()
    rounding = 0.51 * torch.finfo(dtype).eps * expected.abs()
    assert (error <= rounding + 2e-6).all()


def test_without_copies_torch_indexes() -> None:
    rows, index = torch.randn(4, 3), torch.tensor([2, 0, 2])
    assert torch.equal(copy_rows(rows, index, None), rows[index])
