"""A stand-in for FlashAttention 3 and for flash-attn-4, computed by torch's kernel.

Its arguments are those that the two have in common, and the sinks of flash-attn-4.
"""

from __future__ import annotations

import torch
from torch import Tensor


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int | None, int | None] = (None, None),
    softcap: float = 0.0,
    num_splits: int = 1,
    learnable_sink: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    bounds = (cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    assert all(x.dtype is torch.int32 and x.is_contiguous() for x in bounds[:2])
    assert all(x.stride(-1) == 1 and x.dtype is torch.bfloat16 for x in (q, k, v))
    output, sums, *_ = torch.ops.aten._flash_attention_forward(
        q, k, v, *bounds, 0.0, causal, False, scale=softmax_scale
    )
    if learnable_sink is not None:
        assert learnable_sink.dtype is torch.float32
        output = output * learnable_sink.to(output.dtype)[:, None]
    return output, sums
