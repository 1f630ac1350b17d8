"""A stand-in for flash-linear-attention (0.6): a call is checked and counted, and computes nothing.

It replaces the modules ``fla``, ``fla.ops`` and ``fla.ops.gated_delta_rule``.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tests.paths.gpu_rehearsal.fake_triton import count_launch


class _GatedDeltaRule(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *tensors: Tensor | None) -> Any:
        ctx.save_for_backward(*tensors)
        key, value, bounds = tensors[1], tensors[2], tensors[6]
        assert key is not None
        assert value is not None
        assert bounds is not None
        count_launch("gated_delta_rule_forward")
        sizes = (len(bounds) - 1, value.size(2), key.size(3), value.size(3))
        return torch.empty_like(value), value.new_empty(sizes, dtype=torch.float32)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        count_launch("gated_delta_rule_backward")
        needed = ctx.saved_tensors[:6]
        return (*(x if x is None else torch.empty_like(x) for x in needed), None, None)


def chunk_gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None,
    chunk_indices: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    assert cu_seqlens is not None
    assert chunk_indices is not None  # else it would read the bounds on the host
    heads = (q, k, v, g, beta)
    assert all(x.is_contiguous() and x.device.type == "cuda" for x in (*heads, chunk_indices))
    assert all(x.shape[:2] == (1, q.size(1)) for x in heads)
    assert q.shape == k.shape
    assert q.dtype is k.dtype is v.dtype is torch.bfloat16
    assert v.shape[:3] == g.shape == beta.shape
    assert v.size(2) % k.size(2) == 0
    assert cu_seqlens.dtype is chunk_indices.dtype is torch.int64
    if initial_state is not None:
        expected = (len(cu_seqlens) - 1, v.size(2), k.size(3), v.size(3))
        assert initial_state.shape == expected
    output, states = _GatedDeltaRule.apply(*heads, initial_state, cu_seqlens, chunk_indices)
    return output, states if output_final_state else None
