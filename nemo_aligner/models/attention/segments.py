"""The segments of a pack, and what becomes of scores before the softmax."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, TypeVar

import torch
from torch import Tensor

from nemo_aligner.batch.packed import CacheUse, PackedBatch
from nemo_aligner.utils.host_transfer import to_device

# A pool of keys and values that outlive their pack, so that others may begin with its tokens.


class KeyValuePool:
    """For each layer of this rank, ``slots`` keys and values of one token, ``[groups, c]`` each.

    Taken once. Keys are rotated to their positions. What a slot has means something only to whoever
    had it stored.
    """

    def __init__(
        self,
        layer_numbers: Sequence[int],
        slots: int,
        groups: int,
        channels: int,
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> None:
        shape = (slots, groups, channels)
        self._layers = {
            number: tuple(torch.empty(shape, dtype=dtype, device=device) for _ in range(2))
            for number in layer_numbers
        }

    @property
    def num_bytes(self) -> int:
        return sum(each.nbytes for layer in self._layers.values() for each in layer)

    def exchange(
        self, layer_number: int, key: Tensor, value: Tensor, use: CacheUse
    ) -> tuple[Tensor, Tensor]:
        """Store what ``use`` says of ``[T, groups, c]``; ``[C + T, groups, c]``, cached first."""
        keys, values = self._layers[layer_number]
        return _exchange(keys, key, use), _exchange(values, value, use)


def _exchange(kept: Tensor, fresh: Tensor, use: CacheUse) -> Tensor:
    if use.stored.numel():
        kept.index_copy_(0, use.slots, fresh.detach()[use.stored])
    if not use.lengths:
        return fresh
    return torch.cat([kept.index_select(0, use.taken), fresh])


Thing = TypeVar("Thing")


def chains_of(prefixes: Sequence[int], cached: int) -> list[tuple[int, ...]]:
    """What every segment begins with, as numbers of segments, the sequence's beginning first.

    The first ``cached`` numbers are of cached segments, which begin with nothing.
    """
    chains: list[tuple[int, ...]] = []
    for prefix in prefixes:
        # A prefix stands before all that begin with it.
        before = chains[prefix - cached] if prefix >= cached else ()
        chains.append((*before, prefix) if prefix >= 0 else ())
    return chains


@dataclass(frozen=True)
class PackedSegments:
    """The segments of a pack, where megatron-core carries ``PackedSeqParams``.

    ``qkv_format`` is not ``thd``, for which megatron-core would cut the pack apart to rotate it:
    the rotation comes along, one row per token, and is applied here.

    Attributes:
        cos: ``[T, 1, 1, r]`` in the model's dtype, for the token's position in its sequence.
        sin: the same of the sines.
        lengths: tokens of every segment.
        prefixes: the segment that is a segment's prefix, -1 for none; cached ones count first.
        cu_seqlens: ``[G + 1]`` int32 bounds of the queries.
        kv_cu_seqlens: ``[G + 1]`` int32 bounds of the keys, prefixes included.
        kv_index: ``[K]`` int64 which of the C cached tokens and, counted on, the T of the pack
            every key is of; None where the keys are the tokens.
        last_token: ``[R]`` int64 rows that the head reads.
        cached: what the pack takes from ``pool``, and stores there.
    """

    cos: Tensor
    sin: Tensor
    lengths: tuple[int, ...]
    prefixes: tuple[int, ...]
    cu_seqlens: Tensor
    kv_cu_seqlens: Tensor
    kv_index: Tensor | None
    last_token: Tensor
    cached: CacheUse | None = None
    pool: KeyValuePool | None = None
    qkv_format: str = "packed"
    _memory: dict[Hashable, Any] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        batch: PackedBatch,
        cos: Tensor,
        sin: Tensor,
        last_token: Tensor,
        pool: KeyValuePool | None = None,
    ) -> PackedSegments:
        """On the device of ``cos``."""
        if batch.cached is not None and pool is None:
            raise ValueError("a pack uses cached keys, but its model has no pool of them")
        device = cos.device
        lengths = tuple(batch.cu_seqlens.diff().tolist())
        prefixes = tuple(batch.prefixes.tolist())
        queries = keys = to_device(batch.cu_seqlens, device)
        index = None
        if max(prefixes) >= 0:
            cached_lengths = batch.cached.lengths if batch.cached is not None else ()
            sizes, index = _keys_of(lengths, prefixes, cached_lengths)
            keys = to_device(torch.tensor([0, *sizes]).cumsum(0).int(), device)
            index = to_device(index, device)
        rows = last_token
        return cls(cos, sin, lengths, prefixes, queries, keys, index, rows, batch.cached, pool)

    def remembered(self, name: Hashable, make: Callable[[], Thing]) -> Thing:
        """What ``make`` finds, made by the first layer that asks for ``name``."""
        if name not in self._memory:
            self._memory[name] = make()
        return self._memory[name]

    def with_cached(self, layer_number: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """``[T, groups, c]`` of this layer as ``[C + T, groups, c]``, what is cached first.

        What the pack is to leave in the pool is stored.
        """
        if self.cached is None or self.pool is None:
            return key, value
        return self.pool.exchange(layer_number, key, value, self.cached)

    @cached_property
    def all_lengths(self) -> tuple[int, ...]:
        """Tokens of every segment, by its number: the cached ones, then the pack's own."""
        return self.lengths if self.cached is None else self.cached.lengths + self.lengths

    @cached_property
    def chains(self) -> list[tuple[int, ...]]:
        """What every segment of the pack begins with, the sequence's beginning first."""
        return chains_of(self.prefixes, len(self.all_lengths) - len(self.lengths))

    @cached_property
    def max_length(self) -> int:
        """The longest segment's queries."""
        return max(self.lengths)

    @cached_property
    def max_kv_length(self) -> int:
        """The longest segment's keys."""
        return max(
            length + sum(self.all_lengths[number] for number in chain)
            for length, chain in zip(self.lengths, self.chains, strict=True)
        )


def _keys_of(
    lengths: Sequence[int], prefixes: Sequence[int], cached: Sequence[int]
) -> tuple[list[int], Tensor]:
    """How many keys every segment sees, and which, in the order of their positions."""
    chains = chains_of(prefixes, len(cached))
    starts = torch.tensor([0, *cached, *lengths]).cumsum(0).tolist()
    seen = [(*chain, len(cached) + own) for own, chain in enumerate(chains)]
    keys = [[torch.arange(starts[number], starts[number + 1]) for number in own] for own in seen]
    return [sum(map(len, own)) for own in keys], torch.cat([key for own in keys for key in own])


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


def attend_by_scores(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scores: Scores
) -> Tensor:
    """``query [1, heads, n, c]`` on ``key`` and ``value [1, groups, m, c]``, by the definition.

    All ``heads * n * m`` scores are there at once, in fp32 or wider.
    """
    assert scores.soft_cap is not None
    assert mask is not None
    scale = query.size(-1) ** -0.5 if scores.scale is None else scores.scale
    # The heads of one group stand beside each other, so that keys need no copy for each of them.
    grouped = query.unflatten(1, (key.size(1), -1))
    products = torch.matmul(grouped, key.unsqueeze(2).transpose(-1, -2))
    products = products.to(torch.promote_types(products.dtype, torch.float32)) * scale
    capped = scores.soft_cap * torch.tanh(products / scores.soft_cap)
    weights = capped.masked_fill(~mask, float("-inf")).softmax(-1)
    return torch.matmul(weights.to(value.dtype), value.unsqueeze(2)).flatten(1, 2)


def add_attended(out: Tensor, lse: Tensor, more: Tensor, its_lse: Tensor) -> None:
    """Add to what queries have seen what else they saw, by the log-sum-exp of the scores; in place.

    ``out`` and ``more [..., c]``, ``lse`` and ``its_lse [...]``.
    """
    total = torch.logaddexp(lse, its_lse)
    weight = torch.exp(its_lse - total).unsqueeze(-1)
    out += (more - out) * weight.to(out.dtype)
    lse.copy_(total)


Attend = Callable[[Tensor, Tensor, Tensor, PackedSegments, Scores], Tensor]
"""``query [T, heads, c]``, ``key`` and ``value [C + T, groups, c]`` -> ``[T, heads, c]``."""
