"""The segments of a pack, and what becomes of scores before the softmax."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from nemo_aligner.batch import PackedBatch


@dataclass(frozen=True)
class PackedSegments:
    """The segments of a pack, where megatron-core carries ``PackedSeqParams``.

    ``qkv_format`` is not ``thd``, for which megatron-core would cut the pack apart to rotate it:
    the rotation comes along, one row per token, and is applied here.

    Attributes:
        cos: ``[T, 1, 1, r]`` in the model's dtype, for the token's position in its sequence.
        sin: the same of the sines.
        lengths: tokens of every segment.
        prefixes: the segment that is a segment's prefix, -1 for none.
        cu_seqlens: ``[G + 1]`` int32 bounds of the queries.
        kv_cu_seqlens: ``[G + 1]`` int32 bounds of the keys, prefixes included.
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
        prefixes = (self.lengths[prefix] if prefix >= 0 else 0 for prefix in self.prefixes)
        return max(map(sum, zip(self.lengths, prefixes, strict=True)))


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


Attend = Callable[[Tensor, Tensor, Tensor, PackedSegments, Scores], Tensor]
"""``query [T, heads, c]``, ``key`` and ``value [T, groups, c]`` -> ``[T, heads, c]``."""
