"""Causal attention over packed sequences: a varlen kernel on GPUs, flash attention on CPUs."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from nemo_aligner.batch import PackedBatch
from nemo_aligner.models import cpu_attention
from nemo_aligner.models.pointwise import rotate
from nemo_aligner.models.shape import ModelShape


@dataclass(frozen=True)
class PackedSegments:
    """The segments of a pack, where megatron-core carries ``PackedSeqParams``.

    ``qkv_format`` is not ``thd``, for which megatron-core would cut the pack apart to rotate it:
    the rotation comes along, one row per token, and is applied here.

    Attributes:
        cos: ``[T, 1, 1, r]`` in the model's dtype, for the token's place in its sequence.
        sin: the same of the sines.
        lengths: tokens of every segment.
        prefixes: the segment that a segment begins with, -1 for none.
        cu_seqlens: ``[G + 1]`` int32 bounds of the queries.
        kv_cu_seqlens: ``[G + 1]`` int32 bounds of the keys, beginnings included.
        kv_index: ``[K]`` int64 token of every key; None where the keys are the tokens.
        last_token: ``[R]`` int64 rows that the head reads.
    """

    cos: Tensor
    sin: Tensor
    lengths: tuple[int, ...]
    prefixes: tuple[int, ...]
    cu_seqlens: Tensor
    kv_cu_seqlens: Tensor
    kv_index: Tensor | None
    last_token: Tensor
    qkv_format: str = "packed"

    @classmethod
    def of(cls, batch: PackedBatch, cos: Tensor, sin: Tensor, last_token: Tensor) -> PackedSegments:
        """On the device of ``cos``."""
        device = cos.device
        bounds = batch.cu_seqlens.cpu()
        lengths = tuple((bounds[1:] - bounds[:-1]).tolist())
        prefixes = tuple(batch.prefixes.tolist())
        cu_seqlens = batch.cu_seqlens.to(device, torch.int32)
        if max(prefixes) < 0:
            bounds_of_both = cu_seqlens, cu_seqlens
            return cls(cos, sin, lengths, prefixes, *bounds_of_both, None, last_token)
        starts = bounds.tolist()
        keys = [
            torch.arange(starts[segment], starts[segment] + lengths[segment])
            for own, prefix in enumerate(prefixes)
            for segment in (prefix, own)
            if segment >= 0
        ]
        sizes = [
            length + (lengths[prefix] if prefix >= 0 else 0)
            for length, prefix in zip(lengths, prefixes, strict=True)
        ]
        return cls(
            cos,
            sin,
            lengths,
            prefixes,
            cu_seqlens,
            torch.tensor([0, *sizes]).cumsum(0).to(device, torch.int32),
            torch.cat(keys).to(device),
            last_token,
        )

    @property
    def max_length(self) -> int:
        """The longest segment's queries."""
        return max(self.lengths)

    @property
    def max_kv_length(self) -> int:
        """The longest segment's keys."""
        beginnings = (self.lengths[prefix] if prefix >= 0 else 0 for prefix in self.prefixes)
        return max(map(sum, zip(self.lengths, beginnings, strict=True)))


@dataclass(frozen=True)
class Scores:
    """What becomes of the product of a query and a key before the softmax.

    Attributes:
        scale: what it is multiplied by; None is ``c ** -0.5``.
        window: how many keys a query sees, its own and those before it; None is all of them.
        soft_cap: c of ``c * tanh(score / c)`` (Gemma 2, Gemma Team 2024).
    """

    scale: float | None = None
    window: int | None = None
    soft_cap: float | None = None


class PackedAttention(MegatronModule):
    """Core attention of ``query [T, 1, heads, c]`` on ``key`` and ``value [T, 1, groups, c]``.

    Query and key are rotated to their positions; then each segment attends causally to itself, and
    to all of the segment that it begins with. The output is ``[T, 1, heads * c]``.
    """

    def __init__(
        self, config: TransformerConfig, layer_number: int, *, shape: ModelShape, **unused: Any
    ) -> None:
        super().__init__(config)
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
        if scores.window is not None and scores.window >= segments.max_kv_length:
            scores = replace(scores, window=None)
        attend = _attention_for(query, scores)
        return attend(query, key, value.squeeze(1), segments, scores).flatten(1).unsqueeze(1)


_Attend = Callable[[Tensor, Tensor, Tensor, PackedSegments, Scores], Tensor]


def _attention_for(query: Tensor, scores: Scores) -> _Attend:
    """The fastest that can do it."""
    if scores.soft_cap is None and query.is_cpu and scores.window is None:
        return _attend_on_cpu
    kernel = None
    if scores.soft_cap is None and _fits_varlen_kernel(query):
        kernel = _varlen_kernel(scores.window is not None)
    return kernel or _attend_one_by_one


def _attend_on_cpu(
    query: Tensor, key: Tensor, value: Tensor, segments: PackedSegments, scores: Scores
) -> Tensor:
    return cpu_attention.attend(
        query, key, value, segments.lengths, segments.prefixes, scores.scale
    )


def _attend_one_by_one(
    query: Tensor, key: Tensor, value: Tensor, segments: PackedSegments, scores: Scores
) -> Tensor:
    """By one SDPA call per segment, where no kernel takes them all; or by the scores themselves."""
    grouped = query.size(1) != key.size(1)
    queries, keys, values = (
        [piece.transpose(0, 1).unsqueeze(0) for piece in packed.split(segments.lengths)]
        for packed in (query, key, value)
    )
    pieces = []
    for own, prefix in enumerate(segments.prefixes):
        q, k, v = queries[own], keys[own], values[own]
        if prefix >= 0:
            k, v = torch.cat([keys[prefix], k], dim=2), torch.cat([values[prefix], v], dim=2)
        mask = None
        if prefix >= 0 or scores.window is not None or scores.soft_cap is not None:
            mask = _sees(q.size(2), k.size(2), scores.window, q.device)
        if scores.soft_cap is None:
            piece = F.scaled_dot_product_attention(
                q, k, v, mask, is_causal=mask is None, scale=scores.scale, enable_gqa=grouped
            )
        else:
            piece = checkpoint(
                _attend_by_scores,
                *(q, k, v, mask, scores),
                use_reentrant=False,
                preserve_rng_state=False,
            )
        pieces.append(piece)
    return torch.cat(pieces, dim=2).squeeze(0).transpose(0, 1)


def _sees(queries: int, keys: int, window: int | None, device: torch.device) -> Tensor:
    """``[queries, keys]`` bool: each query's own place is counted from the end of the keys."""
    behind = keys - queries
    mask = torch.ones(queries, keys, dtype=torch.bool, device=device).tril(behind)
    return mask if window is None else mask.triu(behind - window + 1)


def _attend_by_scores(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scores: Scores
) -> Tensor:
    """``query [1, heads, n, c]`` on ``key`` and ``value [1, groups, m, c]``, by the definition.

    All ``heads * n * m`` scores are there at once, in fp32 or wider.
    """
    assert scores.soft_cap is not None
    scale = query.size(-1) ** -0.5 if scores.scale is None else scores.scale
    # The heads of one group stand beside each other, so that keys need no copy for each of them.
    grouped = query.unflatten(1, (key.size(1), -1))
    products = torch.matmul(grouped, key.unsqueeze(2).transpose(-1, -2))
    products = products.to(torch.promote_types(products.dtype, torch.float32)) * scale
    capped = scores.soft_cap * torch.tanh(products / scores.soft_cap)
    weights = capped.masked_fill(~mask, float("-inf")).softmax(-1)
    return torch.matmul(weights.to(value.dtype), value.unsqueeze(2)).flatten(1, 2)


def _fits_varlen_kernel(query: Tensor) -> bool:
    return (
        query.is_cuda and query.dtype in (torch.bfloat16, torch.float16) and query.size(-1) <= 256
    )


@lru_cache(maxsize=2)
def _varlen_kernel(with_window: bool) -> _Attend | None:
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
