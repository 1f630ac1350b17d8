"""A pack as attention sees it: its segments, the pool of cached keys, and context parallelism.

A segment is a run of tokens that several sequences share, or the rest of a single sequence. A
segment attends to itself and to its prefix segments, some of which may be cached from earlier
packs.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar, cast

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor
from torch.autograd import Function
from torch.multiprocessing.reductions import StorageWeakRef

from nemo_aligner.batch.cache_use import CacheUse
from nemo_aligner.batch.context import ContextShare
from nemo_aligner.batch.packed import FixedSizes, PackedBatch
from nemo_aligner.models.attention.key_copies import Copies
from nemo_aligner.models.internals import saved_tensor_hooks
from nemo_aligner.models.state_pool import StatePool
from nemo_aligner.utils.host_transfer import all_to_device, to_device

if TYPE_CHECKING:
    from nemo_aligner.models.attention.backends import Backend, Case

Plan = TypeVar("Plan")
"""What a backend prepares once for each pack."""


def chains_of(prefixes: Sequence[int], cached: int) -> list[tuple[int, ...]]:
    """List the prefixes of each segment as segment numbers, from the start of the sequence.

    Args:
        prefixes: number of each segment's prefix, -1 for none.
        cached: number of cached segments. They are numbered first, from 0, and have no prefix.
    """
    chains: list[tuple[int, ...]] = []
    for prefix in prefixes:
        # A prefix is listed before the segments that follow it, so ``chains`` has its entry
        # already.
        earlier = chains[prefix - cached] if prefix >= cached else ()
        chains.append((*earlier, prefix) if prefix >= 0 else ())
    return chains


class Queries(NamedTuple):
    """A part of a segment whose queries this rank computes.

    Attributes:
        segment: number of the segment; cached segments are counted first.
        start: index of the part's first token in the segment.
        length: number of tokens.
    """

    segment: int
    start: int
    length: int

    @property
    def end(self) -> int:
        return self.start + self.length


def rotations_of(batch: PackedBatch, by_length: Callable[[int], int]) -> list[int]:
    """List which RoPE each segment uses, for models whose RoPE depends on the sequence's length.

    Args:
        by_length: maps a sequence's length to the number of its RoPE
            (``ModelShape.length_dependent_rope``).

    Raises:
        ValueError: sequences with different RoPE share a segment, cached or not.
    """
    cached = () if batch.cached is None else batch.cached.lengths
    lengths = [*cached, *batch.cu_seqlens.diff().tolist()]
    prefixes = batch.prefixes.tolist()
    rotations: dict[int, int] = {}
    shared = set(prefixes)
    for number, chain in enumerate(chains_of(prefixes, len(cached)), len(cached)):
        if number in shared:
            continue  # several sequences share this segment, so none ends with it
        sequence = (*chain, number)
        rotation = by_length(sum(lengths[part] for part in sequence))
        if any(rotations.setdefault(part, rotation) != rotation for part in sequence):
            raise ValueError(
                "sequences with different RoPE share a prefix in a pack. Build the pack with "
                "pack_sequences, which keeps them apart."
            )
    return [rotations[number] for number in range(len(cached), len(lengths))]


@dataclass(frozen=True, eq=False)
class PackedSegments:
    """The segments of a pack, in the form that attention kernels need.

    Values that all layers share are computed once, as cached properties or as a backend's ``plan``.

    Attributes:
        lengths: tokens of every segment.
        prefixes: number of each segment's prefix, -1 for none. Cached segments are numbered first.
        cu_seqlens: ``[G + 1]`` int32 offsets of the G segments in the queries.
        kv_cu_seqlens: ``[G + 1]`` int32 offsets of the G segments' keys, prefixes included.
        kv_index: ``[K]`` int64 index of every key into the C cached tokens followed by the T tokens
            of the pack; None if the keys are just the pack's tokens in their order.
        cached: which tokens the pack reads from ``pool``, and which of its own it stores there.
        share: under context parallelism, the tokens whose queries this rank computes.
            ``cu_seqlens`` then counts only these; keys and T are still those of the whole pack.
        sizes: fixed sizes to which the bounds and ``kv_index`` are padded for CUDA graphs;
            ``sizes.length`` then stands for ``max_length`` and ``max_kv_length``. None means no
            padding.
        copies: the copies of each of the T tokens that ``kv_index`` makes, to sum their gradients;
            None if there are none, without gradients, on a CPU, and under context parallelism.
    """

    lengths: tuple[int, ...]
    prefixes: tuple[int, ...]
    cu_seqlens: Tensor
    kv_cu_seqlens: Tensor
    kv_index: Tensor | None
    cached: CacheUse | None = None
    pool: KeyValuePool | None = None
    share: ContextShare | None = None
    sizes: FixedSizes | None = None
    copies: Copies | None = None

    @classmethod
    def of(
        cls, batch: PackedBatch, device: torch.device | str, pool: KeyValuePool | None = None
    ) -> PackedSegments:
        """Build the segments of ``batch`` on ``device``.

        Raises:
            ValueError: the batch uses cached keys, and there is no ``pool``.
        """
        if batch.cached is not None and pool is None:
            raise ValueError(
                "a pack uses cached keys, but got no pool to read them from. Pass a KeyValuePool."
            )
        lengths = tuple(batch.cu_seqlens.diff().tolist())
        prefixes = tuple(batch.prefixes.tolist())
        queries = keys = batch.cu_seqlens
        index = None
        if max(prefixes) >= 0 or batch.share is not None:
            cached = batch.cached.lengths if batch.cached is not None else ()
            parts = queries_of(lengths, len(cached), batch.share)
            sizes, index = _index_keys(parts, prefixes, (*cached, *lengths))
            queries, keys = _bounds_of([part.length for part in parts]), _bounds_of(sizes)
        if batch.sizes is not None:
            queries, keys, index = _pad_bounds(queries, keys, index, batch.sizes)
        if index is None:
            queries = keys = to_device(queries, device)
        else:
            queries, keys = all_to_device([queries, keys], device)
            # Copy the index to the device separately from the bounds. Autograd keeps the bounds for
            # the backward pass, and in a common buffer it would keep the index with them.
            index = to_device(index, device)
        copies = None
        if index is not None and index.is_cuda and torch.is_grad_enabled() and batch.share is None:
            copies = Copies.of(index, batch.num_tokens)
        return cls(
            lengths,
            prefixes,
            queries,
            keys,
            index,
            batch.cached,
            pool,
            batch.share,
            batch.sizes,
            copies,
        )

    def plan(self, backend: Backend[Plan], case: Case) -> Plan:
        """Return the backend's plan of this pack, made once for all layers of this ``case``."""
        key = backend, case
        if key not in self._plans:
            self._plans[key] = backend.plan(self, case)
        return cast(Plan, self._plans[key])

    @cached_property
    def _plans(self) -> dict[tuple[Backend[Any], Case], Any]:
        return {}

    def with_cached(self, layer_number: int, *tensors: Tensor) -> tuple[Tensor, ...]:
        """Prepend a layer's cached tokens to the pack's: ``[C + T, groups, c]`` for each tensor.

        Also store in the pool those of the pack's tokens that ``cached`` selects.

        Args:
            tensors: ``[T, groups, c]`` each, of all tokens of the pack: keys and values, or the
                latents alone if the pool has latents.
        """
        if tensors[0].is_cuda and self.cached is not None and self.pool is not None:
            return self.pool.exchange(layer_number, tensors, self.cached).unbind()
        pooled = self.store(layer_number, *tensors)
        if pooled is None or self.cached is None or not self.cached.lengths:
            return tensors
        read_slots = self.cached.read_slots
        return tuple(
            torch.cat([layer.index_select(0, read_slots), local])
            for layer, local in zip(pooled, tensors, strict=True)
        )

    def store(self, layer_number: int, *tensors: Tensor) -> Tensor | None:
        """Store in the pool those of the pack's tokens that ``cached`` selects.

        Args:
            tensors: as in ``with_cached``.

        Returns:
            The layer's part of the pool, ``[n, slots, groups, c]`` for n tensors; None if the pack
            uses no cache.
        """
        if self.cached is None or self.pool is None:
            return None
        use = self.cached
        layer = self.pool.layer(layer_number)
        if use.stored.numel():
            stored, slots = self._stored_places
            for pooled, local in zip(layer, tensors, strict=True):
                pooled[slots] = local[stored]
        return layer

    @cached_property
    def _stored_places(self) -> tuple[Tensor | slice, Tensor | slice]:
        """Return the pack's rows to store, and their pool slots; as slices if consecutive."""
        assert self.cached is not None
        return _as_slice(self.cached.stored), _as_slice(self.cached.slots)

    @cached_property
    def all_lengths(self) -> tuple[int, ...]:
        """Number of tokens of every segment: first the cached segments, then the pack's own."""
        return self.lengths if self.cached is None else self.cached.lengths + self.lengths

    @cached_property
    def chains(self) -> list[tuple[int, ...]]:
        """For each of the pack's own segments its prefixes: segment numbers in sequence order."""
        return chains_of(self.prefixes, len(self.all_lengths) - len(self.lengths))

    @cached_property
    def queries(self) -> list[Queries]:
        """The parts of the pack's own segments whose queries this rank computes, in pack order."""
        return queries_of(self.lengths, len(self.all_lengths) - len(self.lengths), self.share)

    def chain(self, part: Queries) -> tuple[int, ...]:
        """Return the prefixes, as segment numbers, of the segment that ``part`` belongs to."""
        return self.chains[part.segment - len(self.all_lengths) + len(self.lengths)]

    @cached_property
    def max_length(self) -> int:
        """The most queries of a segment on this rank; it determines GPU kernels and grids."""
        if self.sizes is not None:
            return self.sizes.length
        return max(part.length for part in self.queries)

    @cached_property
    def max_kv_length(self) -> int:
        """The most keys that a query sees; the same on all ranks, as kernels are chosen by it."""
        if self.sizes is not None:
            return self.sizes.length
        return max(
            length + sum(self.all_lengths[number] for number in chain)
            for length, chain in zip(self.lengths, self.chains, strict=True)
        )

    def gather(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        """Gather a pack's keys and values, ``[T, groups, c]`` each, from the ranks that split it.

        Without context parallelism, this rank has them all, and they are returned unchanged. The
        latents of latent attention are gathered in the same way, as a single tensor.
        """
        if self.share is None:
            return tensors
        return _gather(torch.stack(tensors, dim=1), self.share.gathered)

    @cached_property
    def gathered_layout(self) -> tuple[PackedSegments, Tensor, Copies | None]:
        """Describe these segments for keys that are gathered from all ranks in ``kv_index`` order.

        Returns:
            Segments without a ``kv_index``, which these keys do not need; ``[K]`` int64: the index
            of each of these keys among the tokens of all ranks, rank by rank; and, on a GPU, the
            copies that this index makes.
        """
        assert self.share is not None
        assert self.kv_index is not None
        index = self.share.gathered[self.kv_index]
        copies = Copies.of(index, len(self.share.gathered)) if index.is_cuda else None
        return replace(self, kv_index=None), index, copies


def _as_slice(rows: Tensor) -> Tensor | slice:
    """Return ``rows [n]`` as a slice if they are consecutive and on the host, else unchanged."""
    if rows.is_cpu and rows.numel() and bool((rows.diff() == 1).all()):
        return slice(int(rows[0]), int(rows[-1]) + 1)
    return rows


def queries_of(lengths: Sequence[int], cached: int, share: ContextShare | None) -> list[Queries]:
    """List the parts of a pack's segments whose queries this rank computes.

    Args:
        lengths: tokens of the pack's own segments.
        cached: number of cached segments, which are numbered first.
        share: the tokens that this rank computes under context parallelism; None is all of them.
    """
    if share is None:
        return [Queries(number, 0, length) for number, length in enumerate(lengths, cached)]
    bounds = [0, *accumulate(lengths)]
    parts = []
    for start, end in share.chunks[share.rank]:
        segment = bisect_right(bounds, start) - 1
        parts.append(Queries(cached + segment, start - bounds[segment], end - start))
    return parts


def _index_keys(
    parts: Sequence[Queries], prefixes: Sequence[int], lengths: Sequence[int]
) -> tuple[list[int], Tensor]:
    """Count the keys that each part sees, and list their indices in order of position.

    Args:
        parts: parts of segments whose queries this rank computes.
        prefixes: number of each segment's prefix, -1 for none.
        lengths: lengths of all segments, the cached ones first.

    Returns:
        The number of keys of every part, and the index ``[K]`` int64 of the keys of all parts.
    """
    cached = len(lengths) - len(prefixes)
    chains = chains_of(prefixes, cached)
    bounds = [0, *accumulate(lengths)]
    sizes, index = [], []
    for part in parts:
        first = bounds[part.segment]
        key_rows = [
            torch.arange(*bounds[number : number + 2]) for number in chains[part.segment - cached]
        ]
        key_rows.append(torch.arange(first, first + part.end))
        sizes.append(sum(map(len, key_rows)))
        index += key_rows
    return sizes, torch.cat(index)


def _pad_bounds(
    queries: Tensor, keys: Tensor, index: Tensor | None, sizes: FixedSizes
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Pad bounds ``[G + 1]`` and the key ``index [K]`` to fixed sizes, by segments without queries.

    Returns:
        Bounds ``[sizes.segments + 1]`` int32 of queries and of keys, and the index
        ``[sizes.keys]``. The added keys belong to the added segments, at most ``sizes.length`` keys
        to each.
    """
    spare = sizes.segments + 1 - len(queries)
    padded = torch.cat([queries, queries[-1:].expand(spare)])
    if index is None or sizes.keys is None:
        return padded, padded, index
    missing = sizes.keys - len(index)
    ends = (torch.arange(1, spare + 1) * sizes.length).clamp(max=missing)
    bounds = torch.cat([keys, keys[-1] + ends.to(keys.dtype)])
    # Copy different tokens: the copies of a token are summed one after the other.
    added = torch.arange(missing) % (int(index.max()) + 1)
    return padded, bounds, torch.cat([index, added])


def _bounds_of(lengths: Sequence[int]) -> Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).int()


@dataclass(frozen=True)
class Scores:
    """How a layer computes attention scores from query-key products.

    Attributes:
        scale: factor; None means ``c ** -0.5``, with c channels of a head.
        window: number of latest keys that a query sees, its own included; None is all of them.
        soft_cap: cap of ``cap * tanh(score / cap)`` (Gemma 2, Gemma Team 2024); None means no cap.
        has_sinks: a learned logit of each query head joins the softmax, and its probability is
            dropped (gpt-oss, OpenAI 2025; see ``utils/sinks.py``).
    """

    scale: float | None = None
    window: int | None = None
    soft_cap: float | None = None
    has_sinks: bool = False


# The pool of keys and values that outlive their pack, for prefixes of later packs.


class KeyValuePool:
    """Keys and values of ``slots`` tokens, ``[groups, c]`` each, for every layer of this rank.

    It is allocated once. Keys are stored after RoPE. The prefix cache keeps track of which slot
    holds which token. Layers may differ in groups and channels.

    Args:
        sizes: for each layer's number its key heads on this rank, and the channels of a head.
        tensors: 2 for a key and a value of each token, or 1 for its latent in a model with latent
            attention, which then has one key head of the size of the latent.

    Attributes:
        states: the pool of the layers with linear attention; None for a model without.
    """

    states: StatePool | None = None

    def __init__(
        self,
        sizes: Mapping[int, tuple[int, int]],
        slots: int,
        dtype: torch.dtype,
        device: torch.device | str,
        tensors: int = 2,
    ) -> None:
        self._layers = {
            number: torch.empty((tensors, slots, *size), dtype=dtype, device=device)
            for number, size in sizes.items()
        }

    @property
    def num_bytes(self) -> int:
        of_states = 0 if self.states is None else self.states.num_bytes
        return of_states + sum(layer.nbytes for layer in self._layers.values())

    def touch(self) -> None:
        """Write to the whole pool once, because Linux allocates host memory at the first write."""
        for layer in self._layers.values():
            layer.zero_()
        if self.states is not None:
            self.states.touch()

    def layer(self, number: int) -> Tensor:
        """Return a layer's keys and values in all slots, ``[2, slots, groups, c]``.

        A pool of latents returns ``[1, slots, 1, c]``.
        """
        return self._layers[number]

    def exchange(self, number: int, tensors: tuple[Tensor, ...], use: CacheUse) -> Tensor:
        """Store a pack's keys and values in the pool, and return them after the cached ones.

        This launches only two kernels, one that stores and one that reads. It is used on GPUs,
        where a small pack takes as long as its kernels take to launch.

        Args:
            number: number of the layer.
            tensors: keys and values ``[T, groups, c]`` of the pack, or its latents alone.
            use: which tokens to read and to store.

        Returns:
            ``[2, C + T, groups, c]``: keys and values of the C cached tokens, then of the pack.
            ``[1, C + T, 1, c]`` from a pool of latents.
        """
        layer, local = self.layer(number), torch.stack(tensors)
        if use.stored.numel():
            layer.index_copy_(1, use.slots, local.index_select(1, use.stored))
        return (
            torch.cat([layer.index_select(1, use.read_slots), local], dim=1)
            if use.lengths
            else local
        )


# Context parallelism: collectives of the ranks that split a pack.


@contextmanager
def gathering_again(
    key: Tensor, value: Tensor, index: Tensor, copies: Copies | None = None
) -> Iterator[tuple[Tensor, ...]]:
    """Gather the keys and values of all ranks, but let autograd save only this rank's part.

    The backward pass gathers them once more, so a rank keeps only ``1 / ranks`` of them in each
    layer.

    Args:
        key, value: ``[n, groups, c]`` of this rank's tokens.
        index, copies: see ``_gather``.

    Yields:
        Keys and values ``[K, groups, c]``. Save them for autograd only inside the block.
    """
    local = torch.stack([key, value], dim=1)
    gathered = _gather(local, index, copies)
    # 0 for the gathered keys, 1 for the gathered values.
    positions = {_storage(tensor): position for position, tensor in enumerate(gathered)}
    shape, gathered_again = gathered[0].shape, dict[int, Tensor]()
    pack, unpack = saved_tensor_hooks()
    packed_local = pack(local.detach())

    def save(tensor: Tensor) -> Any:
        position = positions.get(_storage(tensor)) if tensor.shape == shape else None
        return pack(tensor) if position is None else position

    def restore(saved: Any) -> Tensor:
        if not isinstance(saved, int):
            return unpack(saved)
        if saved not in gathered_again:
            gathered_again.update(enumerate(_gather(unpack(packed_local), index)))
        return gathered_again.pop(saved)

    with torch.autograd.graph.saved_tensors_hooks(save, restore):
        yield gathered


def _storage(tensor: Tensor) -> StorageWeakRef:
    """Return the identity of a tensor's storage, which autograd's hooks compare."""
    return StorageWeakRef(tensor.untyped_storage())


def _gather(local: Tensor, index: Tensor, copies: Copies | None = None) -> tuple[Tensor, ...]:
    """Gather a layer's keys and values, ``local [n, 2, groups, c]`` on each rank.

    ``index [K]`` counts the tokens of all ranks, rank by rank. Returns keys and values ``[K,
    groups, c]`` at these indices; of ``local [n, 1, 1, c]``, the latents, a single tensor. In the
    backward pass the gradients are summed over the ranks, because each rank has different queries,
    and over the copies of a token that ``index`` makes: by ``copies``, unless it is None.
    """
    gathered: tuple[Tensor, ...] = _Gather.apply(local, index, *(copies or ()))
    return gathered


class _Gather(Function):
    """Autograd function behind ``_gather``."""

    @staticmethod
    def forward(ctx: Any, local: Tensor, index: Tensor, *copies: Tensor) -> tuple[Tensor, ...]:
        group = parallel_state.get_context_parallel_group()
        ctx.save_for_backward(index, *copies)
        gathered = local.new_empty(group.size() * local.size(0), *local.shape[1:])
        ctx.shape = gathered.shape
        dist.all_gather_into_tensor(gathered, local, group=group)
        return tuple(tensor[index] for tensor in gathered.unbind(dim=1))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        index, *copies = ctx.saved_tensors
        group = parallel_state.get_context_parallel_group()
        if copies:
            gathered = torch.stack([Copies(*copies).sum(grad) for grad in grads], dim=1)
        else:
            has_each_once = index.numel() == ctx.shape[0]
            gathered = (torch.empty if has_each_once else torch.zeros)(
                ctx.shape, dtype=grads[0].dtype, device=index.device
            )
            for part, grad in zip(gathered.unbind(dim=1), grads, strict=True):
                part.index_put_((index,), grad, accumulate=not has_each_once)
        local = gathered.new_empty(gathered.size(0) // group.size(), *gathered.shape[1:])
        dist.reduce_scatter_tensor(local, gathered, group=group)
        return local, None, *(None for _ in copies)  # index and copies have no gradients


def sum_of_group(local: Tensor, rows: Tensor, count: int) -> Tensor:
    """Combine a head's outputs from all context parallel ranks into ``[count, A]``; collective.

    A rank has the rows ``local [r, A]``, A values for each of r tokens that a head reads. They
    belong at the indices ``rows [r]`` of the result.

    All ranks get the result, and compute the same loss from it. So the gradient of ``local`` is the
    result's gradient at this rank's rows, without a sum over the ranks.
    """
    laid = local.new_zeros(count, local.size(1)).index_copy(0, rows, local)
    total: Tensor = _Sum.apply(laid)
    return total


class _Sum(Function):
    @staticmethod
    def forward(ctx: Any, laid: Tensor) -> Tensor:
        total = laid.clone()
        dist.all_reduce(total, group=parallel_state.get_context_parallel_group())
        return total

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return grads[0]
