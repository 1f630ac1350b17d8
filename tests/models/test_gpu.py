"""What only a GPU can show: the varlen kernel against SDPA, and bf16 training that learns."""

from __future__ import annotations

import pytest
import torch

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@pytest.mark.parametrize("groups", [2, 8])
def test_varlen_kernel_equals_sdpa_forward_and_backward(groups: int) -> None:
    from nemo_aligner.batch import PackedBatch
    from nemo_aligner.models.attention import (
        PackedSegments,
        _attend_one_by_one,
        _varlen_kernel,
    )

    kernel = _varlen_kernel()
    if kernel is None:
        pytest.skip("this torch has no varlen attention (2.10 and later have it)")
    batch = PackedBatch.pack([[1] * length for length in (3, 200, 77)], range(3), 1)
    segments = PackedSegments.of(batch, "cuda")
    torch.manual_seed(0)
    results = []
    inputs = [
        torch.randn(280, heads, 64, device="cuda", dtype=torch.bfloat16)
        for heads in (8, groups, groups)
    ]
    for attend in (kernel, _attend_one_by_one):
        leaves = [tensor.clone().requires_grad_() for tensor in inputs]
        out = attend(*leaves, segments, None)
        out.float().square().sum().backward()
        results.append([out, *(leaf.grad for leaf in leaves)])
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours.float(), theirs.float(), atol=5e-2, rtol=5e-2)
