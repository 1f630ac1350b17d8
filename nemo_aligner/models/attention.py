"""Causal attention over packed sequences: a varlen kernel on GPUs, else SDPA one by one."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from nemo_aligner.batch import PackedBatch


@dataclass(frozen=True)
class PackedSegments:
    """The bounds of a pack's sequences, where megatron-core carries ``PackedSeqParams``.

    ``qkv_format`` is not ``thd``: rotary frequencies come one per token, already at the right
    position, so megatron-core need not cut the pack apart to apply them.
    """

    cu_seqlens: Tensor
    lengths: tuple[int, ...]
    qkv_format: str = "packed"

    @classmethod
    def of(cls, batch: PackedBatch, device: torch.device | str) -> PackedSegments:
        bounds = batch.cu_seqlens.cpu()
        lengths = tuple((bounds[1:] - bounds[:-1]).tolist())
        return cls(batch.cu_seqlens.to(device, torch.int32), lengths)

    @property
    def max_length(self) -> int:
        return max(self.lengths)


class PackedAttention(MegatronModule):
    """Core attention of ``query [T, 1, heads, c]`` on ``key`` and ``value [T, 1, groups, c]``.

    Each sequence attends causally to itself alone. The output is ``[T, 1, heads * c]``.
    """

    def __init__(
        self, config: TransformerConfig, softmax_scale: float | None = None, **unused: Any
    ) -> None:
        super().__init__(config)
        self.scale = softmax_scale

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None = None,
        packed_seq_params: PackedSegments | None = None,
        **unused: Any,
    ) -> Tensor:
        if packed_seq_params is None:
            raise ValueError("attention needs the bounds of the packed sequences")
        packed = query.squeeze(1), key.squeeze(1), value.squeeze(1)
        kernel = _varlen_kernel() if _fits_varlen_kernel(query) else None
        if kernel is not None:
            out = kernel(*packed, packed_seq_params, self.scale)
        else:
            out = _attend_one_by_one(*packed, packed_seq_params, self.scale)
        return out.reshape(query.size(0), 1, -1)


def _attend_one_by_one(
    query: Tensor, key: Tensor, value: Tensor, segments: PackedSegments, scale: float | None
) -> Tensor:
    """``[T, heads, channels]`` -> the same, by one SDPA call per sequence."""
    grouped = query.size(1) != key.size(1)
    pieces = [
        F.scaled_dot_product_attention(
            q.transpose(0, 1).unsqueeze(0),
            k.transpose(0, 1).unsqueeze(0),
            v.transpose(0, 1).unsqueeze(0),
            is_causal=True,
            scale=scale,
            enable_gqa=grouped,
        )
        for q, k, v in zip(
            query.split(segments.lengths),
            key.split(segments.lengths),
            value.split(segments.lengths),
            strict=True,
        )
    ]
    return torch.cat(pieces, dim=2).squeeze(0).transpose(0, 1)


def _fits_varlen_kernel(query: Tensor) -> bool:
    return (
        query.is_cuda and query.dtype in (torch.bfloat16, torch.float16) and query.size(-1) <= 256
    )


@lru_cache(maxsize=1)
def _varlen_kernel() -> Callable[..., Tensor] | None:
    """torch's variable-length flash attention (torch >= 2.10), behind one signature."""
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return None
    parameters = inspect.signature(varlen_attn).parameters
    # 2.10 has a flag for causal attention, later releases a window.
    options: dict[str, Any] = (
        {"is_causal": True} if "is_causal" in parameters else {"window_size": (-1, 0)}
    )
    has_scale, has_groups = "scale" in parameters, "enable_gqa" in parameters

    def attend(
        query: Tensor, key: Tensor, value: Tensor, segments: PackedSegments, scale: float | None
    ) -> Tensor:
        arguments = dict(options)
        if has_groups:
            arguments["enable_gqa"] = query.size(1) != key.size(1)
        elif query.size(1) != key.size(1):
            repeats = query.size(1) // key.size(1)
            key, value = (x.repeat_interleave(repeats, dim=1) for x in (key, value))
        if has_scale:
            arguments["scale"] = scale
        elif scale is not None:
            query = query * (scale * query.size(-1) ** 0.5)
        bounds, longest = segments.cu_seqlens, segments.max_length
        return varlen_attn(  # type: ignore[return-value]
            query, key, value, bounds, bounds, longest, longest, **arguments
        )

    return attend
