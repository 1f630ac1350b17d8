"""Causal attention over packed sequences: a varlen kernel on GPUs, flash attention on CPUs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from nemo_aligner.models.attention import blocks
from nemo_aligner.models.attention import cpu as cpu_attention
from nemo_aligner.models.attention.segments import (
    Attend,
    PackedSegments,
    Scores,
    attend_by_scores,
)
from nemo_aligner.models.attention.varlen import varlen_kernel, why_no_kernel
from nemo_aligner.models.pointwise import rotate
from nemo_aligner.models.shape import ModelShape


class PackedAttention(MegatronModule):
    """Core attention of ``query [T, 1, heads, c]`` on ``key`` and ``value [T, 1, groups, c]``.

    Query and key are rotated to their positions; then each segment attends causally to itself, and
    to all that it begins with. The output is ``[T, 1, heads * c]``.
    """

    def __init__(
        self, config: TransformerConfig, layer_number: int, *, shape: ModelShape, **unused: Any
    ) -> None:
        super().__init__(config)
        self.layer_number = layer_number
        self.scores = Scores(
            shape.softmax_scale, shape.window_of(layer_number), shape.attn_logit_softcapping
        )

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
        segments, scores = packed_seq_params, self.scores
        query = rotate(query, segments.cos, segments.sin).squeeze(1)
        key = rotate(key, segments.cos, segments.sin).squeeze(1)
        learns = self.training or torch.is_grad_enabled()
        # Else the kernel would depend on what else is in the pack.
        if learns and scores.window is not None and scores.window >= segments.max_kv_length:
            scores = replace(scores, window=None)
        attend = _attention_for(query, scores, learns)
        key, value = segments.with_cached(self.layer_number, key, value.squeeze(1))
        return attend(query, key, value, segments, scores).flatten(1).unsqueeze(1)


def _attention_for(query: Tensor, scores: Scores, learns: bool) -> Attend:
    """The fastest that can do it; and of those without a backward, the one whose bits stay."""
    if query.is_cpu and not learns:
        return blocks.attend
    if scores.soft_cap is None and query.is_cpu and scores.window is None:
        return _attend_on_cpu
    kernel = None
    if query.is_cuda and why_no_kernel(query.dtype, query.size(-1)) is None:
        kernel = varlen_kernel(scores.window is not None, scores.soft_cap is not None)
    return kernel or _attend_one_by_one


def slow_attention(shape: ModelShape, dtype: torch.dtype) -> str | None:
    """What a person should know of attention on this GPU; None where a kernel takes whole packs."""
    if not torch.cuda.is_available():
        return None
    why = why_no_kernel(dtype, shape.kv_channels)
    if why is None:
        has_cap = shape.attn_logit_softcapping is not None
        windows = {shape.window_of(number) is not None for number in range(1, shape.num_layers + 1)}
        if all(varlen_kernel(with_window, has_cap) is not None for with_window in windows):
            return None
        wanted = "logit soft-capping" if has_cap else "sliding windows"
        why = f"torch {torch.__version__} has no kernel for {wanted}: install flash-attn >= 2.6"
    return f"attention runs one segment at a time, which is slow: {why}"


def _attend_on_cpu(
    query: Tensor, key: Tensor, value: Tensor, segments: PackedSegments, scores: Scores
) -> Tensor:
    return cpu_attention.attend(
        query, key, value, segments.all_lengths, segments.prefixes, scores.scale
    )


def _attend_one_by_one(
    query: Tensor, key: Tensor, value: Tensor, segments: PackedSegments, scores: Scores
) -> Tensor:
    """By one SDPA call per segment, where no kernel takes them all; or by the scores themselves."""
    grouped = query.size(1) != key.size(1)
    lengths, all_lengths = segments.lengths, segments.all_lengths
    queries, keys, values = (
        [piece.transpose(0, 1).unsqueeze(0) for piece in packed.split(split)]
        for packed, split in ((query, lengths), (key, all_lengths), (value, all_lengths))
    )
    pieces = []
    for own, chain in enumerate(segments.chains, len(all_lengths) - len(lengths)):
        q, k, v = queries[own - len(all_lengths)], keys[own], values[own]
        if chain:
            k, v = (torch.cat([x[i] for i in (*chain, own)], dim=2) for x in (keys, values))
        mask = None
        if chain or scores.window is not None or scores.soft_cap is not None:
            mask = _sees(q.size(2), k.size(2), scores.window, q.device)
        if scores.soft_cap is None:
            piece = F.scaled_dot_product_attention(
                q, k, v, mask, is_causal=mask is None, scale=scores.scale, enable_gqa=grouped
            )
        else:
            piece = checkpoint(
                attend_by_scores,
                *(q, k, v, mask, scores),
                use_reentrant=False,
                preserve_rng_state=False,
            )
        pieces.append(piece)
    return torch.cat(pieces, dim=2).squeeze(0).transpose(0, 1)


def _sees(queries: int, keys: int, window: int | None, device: torch.device) -> Tensor:
    """``[queries, keys]`` bool: a query's own position is counted from the end of the keys."""
    behind = keys - queries
    mask = torch.ones(queries, keys, dtype=torch.bool, device=device).tril(behind)
    return mask if window is None else mask.triu(behind - window + 1)
