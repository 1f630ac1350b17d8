"""torch's variable-length flash attention, behind one signature."""

from __future__ import annotations

import inspect
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from nemo_aligner.models.attention.segments import Attend, PackedSegments, Scores


def fits_varlen_kernel(query: Tensor) -> bool:
    return (
        query.is_cuda and query.dtype in (torch.bfloat16, torch.float16) and query.size(-1) <= 256
    )


@lru_cache(maxsize=2)
def varlen_kernel(with_window: bool) -> Attend | None:
    """torch's variable-length flash attention (torch >= 2.10), behind one signature."""
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return None
    parameters = inspect.signature(varlen_attn).parameters
    # 2.10 has a flag for causal attention, later releases a window.
    has_flag = "is_causal" in parameters
    if has_flag and with_window:
        return None
    has_scale, has_groups = "scale" in parameters, "enable_gqa" in parameters

    def attend(
        query: Tensor, key: Tensor, value: Tensor, segments: PackedSegments, scores: Scores
    ) -> Tensor:
        # The kernel counts the keys before the query's own; -1 is all of them.
        before = -1 if scores.window is None else scores.window - 1
        arguments: dict[str, Any] = (
            {"is_causal": True} if has_flag else {"window_size": (before, 0)}
        )
        if has_groups:
            arguments["enable_gqa"] = query.size(1) != key.size(1)
        elif query.size(1) != key.size(1):
            repeats = query.size(1) // key.size(1)
            key, value = (x.repeat_interleave(repeats, dim=1) for x in (key, value))
        if has_scale:
            arguments["scale"] = scores.scale
        elif scores.scale is not None:
            query = query * (scores.scale * query.size(-1) ** 0.5)
        if segments.kv_index is not None:
            # The kernel's causal mask counts from the end of the keys, as it has to be here.
            key, value = key[segments.kv_index], value[segments.kv_index]
        return varlen_attn(  # type: ignore[return-value]
            query,
            key,
            value,
            segments.cu_seqlens,
            segments.kv_cu_seqlens,
            segments.max_length,
            segments.max_kv_length,
            **arguments,
        )

    return attend
