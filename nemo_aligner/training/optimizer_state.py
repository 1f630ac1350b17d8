"""AdamW's state, sharded over data parallel ranks (ZeRO stage 1), in memory and in checkpoints.

Megatron's DDP keeps weights and fp32 gradients in flat buffers, which it cuts into buckets. Each
data parallel rank updates an equal part of every bucket, called its shard. The reduce-scatter
leaves the summed gradients in the shard. The all-gather sends the updated weights of the shard to
the other ranks.

For a save, the first rank of each group gathers the state in host memory, which is allocated once.
For a load, each rank reads only those rows of each saved tensor that overlap with its shards, so no
rank holds the whole state. The format is megatron-core's ``fully_reshardable``, which a run with
any parallel layout can read.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any, TypeAlias

import torch
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from megatron.core.dist_checkpointing.utils import extract_sharded_tensors_and_factories
from torch import Tensor

from nemo_aligner.utils.host_transfer import host_zeros, start_host_copies

MOMENTS = ("exp_avg", "exp_avg_sq")
_STATE = ("param", *MOMENTS)

_Entry: TypeAlias = ShardedTensor | ShardedTensorFactory
_Flat: TypeAlias = dict[str, Tensor]

# The first part holds the optimizer's state in memory.


@dataclass(frozen=True)
class Segment:
    """The part of a parameter that lies in a shard.

    Attributes:
        start, stop: range of the part's elements in the shard.
        offset: index of the part's first element in the flattened parameter.
    """

    parameter: torch.nn.Parameter
    start: int
    stop: int
    offset: int


@dataclass(frozen=True, eq=False)
class Shard:
    """The part of a bucket that this rank updates, as flat tensors of equal length.

    Megatron pads buckets, so there may be padding between segments. It is zero in all tensors.

    Attributes:
        weights: view of DDP's buffer, in the model's dtype.
        gradients: view of DDP's buffer, in fp32.
        state: ``param``, ``exp_avg`` and ``exp_avg_sq``, in fp32. If the weights are in fp32,
            ``param`` is ``weights`` itself.
        segments: the parts of parameters that lie in the shard, in order.
    """

    weights: Tensor
    gradients: Tensor
    state: Mapping[str, Tensor]
    segments: Sequence[Segment]


def build_shards(buffer: Any, moments_on_host: bool) -> list[Shard]:
    """Build this rank's shard of each bucket of a DDP buffer, with all moments set to zero."""
    rank, size = buffer.data_parallel_group.rank(), buffer.data_parallel_group.size()
    shards = []
    for bucket in buffer.buckets:
        weights, gradients = bucket.param_data.chunk(size)[rank], bucket.grad_data.chunk(size)[rank]
        begin = bucket.offset + rank * weights.numel()
        segments = []
        for parameter in bucket.params_list:
            start, stop, _ = buffer.param_index_map[parameter]
            first, last = max(start, begin), min(stop, begin + weights.numel())
            if first < last:
                segments.append(Segment(parameter, first - begin, last - begin, first - start))
        param = weights.float()
        like = [param] * len(MOMENTS)
        moments = host_zeros(like) if moments_on_host else map(torch.zeros_like, like)
        state = {"param": param, **dict(zip(MOMENTS, moments, strict=True))}
        shards.append(Shard(weights, gradients, state, segments))
    return shards


# The second part saves the optimizer's state to checkpoints, and loads it.


class ShardedState:
    """The optimizer state of all parameters in ``buffers``, and how it is saved and loaded.

    Args:
        buffers: buffers of Megatron's DDP; empty on a rank that trains no parameter.
        group: the gloo data parallel group over whose ranks the state is sharded.
        prefix: prefix of the tensors' names in a checkpoint.
        moments_on_host: keep the moments in page-locked host memory (``host_zeros``).
    """

    def __init__(
        self, buffers: Sequence[Any], group: Any, prefix: str, moments_on_host: bool
    ) -> None:
        self._buffers = buffers
        self._group = group
        self._prefix = prefix
        self._by_buffer = [build_shards(buffer, moments_on_host) for buffer in buffers]
        parameters = chain.from_iterable(buffer.param_index_map for buffer in buffers)
        # Megatron's optimizer state dict names each parameter by a number.
        self._numbers = {parameter: number for number, parameter in enumerate(parameters)}
        self._host: list[_Flat] = []
        # (number of a parameter, name of a state tensor) -> for each block of rows to read from a
        # checkpoint, the slice of its elements that lies in this rank's shard.
        self._slices: dict[tuple[int, str], list[slice]] = {}

    @property
    def shards(self) -> list[Shard]:
        """This rank's shards of all buckets, in the order of the buffers and buckets."""
        return list(chain.from_iterable(self._by_buffer))

    def to_save(self, model_state: dict[str, Any]) -> dict[int, dict[str, _Entry]]:
        """Gather the state in the host memory of the group's first rank for a save; collective.

        The copies may not be complete on return (see ``start_host_copies``). The next call reuses
        their memory.

        Returns:
            On the first rank of the group, a sharded tensor by the parameter's number and the
            tensor's name; on the others an empty dict.
        """
        size, is_first = self._group.size(), self._group.rank() == 0
        if not self._host:
            # The first rank needs host memory for the whole state of a buffer; each other rank only
            # for its shards, which it sends to the first.
            numels = [
                buffer.numel if is_first else buffer.numel // size for buffer in self._buffers
            ]
            self._host = [_host_memory(numel) for numel in numels]
        shards_and_targets = [
            (shard, self._split(bucket, flat))
            for buffer, shards, flat in zip(self._buffers, self._by_buffer, self._host, strict=True)
            for bucket, shard in zip(buffer.buckets, shards, strict=True)
        ]
        arrived = start_host_copies(
            (parts[key][0], shard.state[key])
            for shard, parts in shards_and_targets
            for key in _STATE
        )
        if size > 1:
            arrived()
            buckets = (targets.values() for _, targets in shards_and_targets)
            for parts in chain.from_iterable(buckets):
                gathered = list(parts) if is_first else None
                torch.distributed.gather(parts[0], gathered, group=self._group, group_dst=0)
        return self._describe(model_state, self._host) if is_first else {}

    def to_load(self, model_state: dict[str, Any]) -> dict[int, dict[str, list[ShardedTensor]]]:
        """Request the rows that overlap with this rank's shards, and allocate memory for them.

        megatron-core reads a checkpoint into the tensors of the result.
        """
        # Tensors on the meta device take no memory, but their offsets tell where a saved tensor
        # lies in the flat buffer and in the parameter.
        meta = [
            {key: torch.empty(buffer.numel, device="meta") for key in _STATE}
            for buffer in self._buffers
        ]
        entries = self._describe(model_state, meta)
        request: dict[int, dict[str, list[ShardedTensor]]] = {}
        for _, segment in self._segments():
            number = self._numbers[segment.parameter]
            end = segment.offset + segment.stop - segment.start
            request[number] = {}
            for key, entry in entries[number].items():
                parts = list(_select_rows(entry, segment.offset, end))
                request[number][key] = [rows for rows, _ in parts]
                self._slices[number, key] = [elements for _, elements in parts]
        return request

    @torch.no_grad()
    def copy_loaded(self, loaded: dict[int, dict[str, list[Tensor]]]) -> None:
        """Copy the rows that ``to_load`` requested into the shards; this empties ``loaded``."""
        for shard, segment in self._segments():
            number = self._numbers[segment.parameter]
            stored = loaded.pop(number)  # pop: its memory is freed after the copy
            for key in _STATE:
                parts = zip(stored[key], self._slices[number, key], strict=True)
                values = torch.cat([rows.flatten()[elements] for rows, elements in parts])
                shard.state[key][segment.start : segment.stop].copy_(values)

    def _segments(self) -> Iterator[tuple[Shard, Segment]]:
        for shard in self.shards:
            for segment in shard.segments:
                yield shard, segment

    def _describe(
        self, model_state: dict[str, Any], flats: Sequence[_Flat]
    ) -> dict[int, dict[str, _Entry]]:
        """Build a sharded tensor for every state tensor of every parameter.

        It is sharded over model parallel ranks like the parameter's weight in ``model_state``. Its
        data is a view of the buffer's tensor in ``flats``.
        """
        bases, _ = extract_sharded_tensors_and_factories(model_state)
        base_of = {base.data: base for base in nested_values(bases)}
        entries = {}
        for buffer, flat in zip(self._buffers, flats, strict=True):
            for parameter, (start, stop, _) in buffer.param_index_map.items():
                base = base_of[parameter]
                dtype = {"dtype": torch.float32} if isinstance(base, ShardedTensor) else {}
                entries[self._numbers[parameter]] = {
                    key: replace(
                        base,
                        key=f"{self._prefix}optimizer.state.{key}.{base.key}",
                        data=flat[key][start:stop].view(base.data.shape),
                        **dtype,
                    )
                    for key in _STATE
                }
        return entries

    def _split(self, bucket: Any, flat: _Flat) -> dict[str, Sequence[Tensor]]:
        """Split the memory of a bucket in the flat host tensors ``flat`` into shards of the ranks.

        The first rank gets views of all ranks' shards, its own first. Every other rank gets one
        view, of the shard that it sends.
        """
        size, numel = self._group.size(), bucket.grad_data.numel()
        if self._group.rank() == 0:
            return {k: t[bucket.offset :][:numel].chunk(size) for k, t in flat.items()}
        start, length = bucket.offset // size, numel // size
        return {k: (t[start:][:length],) for k, t in flat.items()}


def _host_memory(numel: int) -> _Flat:
    """Allocate host memory for ``numel`` elements of each state tensor: weight and two moments."""
    like = torch.empty(numel, dtype=torch.float32, device="meta")
    return dict(zip(_STATE, host_zeros([like] * len(_STATE)), strict=True))


def _select_rows(entry: _Entry, start: int, end: int) -> Iterator[tuple[ShardedTensor, slice]]:
    """Select the rows of saved tensors that hold elements ``start`` to ``end`` of a parameter.

    A parameter is saved as one tensor, or as several if megatron-core has a factory for it
    (SwiGLU).

    Yields:
        For each saved tensor with such rows: a sharded tensor with memory for the rows, and the
        slice of the rows' elements that lies between ``start`` and ``end``.
    """
    tensors = entry.build() if isinstance(entry, ShardedTensorFactory) else [entry]
    for stored in tensors:
        data = stored.data
        # A parameter is split by rows for tensor parallelism, so a rank's rows are contiguous.
        assert data.is_contiguous(), stored.key
        begin = data.storage_offset() - entry.data.storage_offset()
        first, last = max(start, begin) - begin, min(end, begin + data.numel()) - begin
        if first >= last:
            continue
        if data.dim() == 0:
            yield replace(stored, data=torch.empty_like(data, device="cpu")), slice(0, 1)
            continue
        row = data[0].numel()
        above, below = first // row, -(-last // row)
        rows = torch.empty_like(data[above:below], device="cpu")
        offset = list(stored.global_offset)
        offset[stored.prepend_axis_num] += above
        yield (
            replace(
                stored,
                data=rows,
                local_shape=tuple(rows.shape),
                global_offset=tuple(offset),
                axis_fragmentations=None,  # None: the rows form no regular grid
            ),
            slice(first - above * row, last - above * row),
        )
