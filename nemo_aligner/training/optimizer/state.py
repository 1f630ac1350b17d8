"""Saving and loading of the distributed optimizer's state.

It is gathered into buffers that are allocated once. To load, each rank reads only the rows of each
tensor that its own shard lies in, so that no rank ever holds the whole state.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from torch import Tensor

from nemo_aligner.training.optimizer.offload import (
    MOMENTS,
    main_param_and_moments,
    put_main_param_and_moments,
)
from nemo_aligner.utils.host_transfer import copy_beside, host_zeros

# State of a parameter, in fp32.
_STATE = ("param", *MOMENTS)
# For each parameter and tensor the slices, in the rows that were read, that belong to the shard.
_Places = dict[tuple[int, str], list[slice]]


def gather_in_reused_memory(optimizer: Any) -> None:
    """Make ``optimizer`` gather its state for a save into buffers that are allocated once."""
    optimizer.get_parameter_state_dp_zero = partial(_gather_state, optimizer, [])


def load_own_shard(optimizer: Any) -> None:
    """Make ``optimizer`` load only its own shard, where Megatron loads the whole state.

    Call it after ``gather_in_reused_memory``.
    """
    places: _Places = {}
    ask = optimizer.sharded_param_state_fully_reshardable
    optimizer.sharded_param_state_fully_reshardable = partial(_ask, optimizer, ask, places)
    optimizer.load_parameter_state_from_fully_reshardable = partial(_put, optimizer, places)


def _gather_state(
    optimizer: Any, memory: list[dict[str, Tensor]], empty_data: bool = False, **options: bool
) -> dict[Any, Any] | None:
    """Replacement of Megatron's ``get_parameter_state_dp_zero``, which makes four fresh copies.

    Every tensor is copied once, into ``memory``, and gathered only if there are other ranks;
    otherwise the copy may still be in flight (``copy_beside``).

    The tensors are as long as the buffers. Megatron's leave out the padding of buckets, and are
    then read by offsets that count it (its issue 504). With ``empty_data`` they are meta tensors
    that only tell a load where the state lies in the buffers.
    """
    state: dict[Any, Any] = {"buckets_coalesced": True}
    buffers = list(zip(optimizer.gbuf_ranges, optimizer.buffers, strict=True))
    if empty_data:
        for index, (of_dtype, buffer) in enumerate(buffers):
            (dtype,) = of_dtype
            state[index] = {
                dtype: {key: torch.empty(buffer.numel, device="meta") for key in _STATE}
            }
        return state
    if not memory:
        memory += _host_memory(optimizer)
    group = optimizer.data_parallel_group_gloo
    copies: list[tuple[Tensor, Tensor]] = []
    for index, ((of_dtype, buffer), flat) in enumerate(zip(buffers, memory, strict=True)):
        ((dtype, ranges),) = of_dtype.items()
        for bucket, in_bucket in zip(buffer.buckets, ranges, strict=True):
            copies += _copies_of_bucket(optimizer, bucket, in_bucket["param_map"], flat)
        state[index] = {dtype: flat}
    arrived = copy_beside(copies)
    if group.size() > 1:
        arrived()
        for buffer, flat in zip(optimizer.buffers, memory, strict=True):
            for bucket in buffer.buckets:
                _gather_bucket(bucket, flat, group)
    return state if group.rank() == 0 else None


def _host_memory(optimizer: Any) -> list[dict[str, Tensor]]:
    """Allocate host buffers for the state: flat fp32 tensors for each gradient buffer.

    The first rank of the data parallel group holds the whole state, the others what they send it.
    """
    group = optimizer.data_parallel_group_gloo
    memory = []
    for buffer in optimizer.buffers:
        numel = buffer.numel if group.rank() == 0 else buffer.numel // group.size()
        wanted = torch.empty(numel, dtype=torch.float32, device="meta")
        memory.append(dict(zip(_STATE, host_zeros([wanted] * len(_STATE)), strict=True)))
    return memory


def _shards(bucket: Any, flat: dict[str, Tensor], group: Any) -> dict[str, Sequence[Tensor]]:
    """Split ``flat`` into the shards of a bucket, this rank's first.

    Only the first rank has all of them. As it gathers, its own shard comes first.
    """
    numel = bucket.grad_data.numel()
    if group.rank() == 0:
        return {k: t[bucket.offset :][:numel].chunk(group.size()) for k, t in flat.items()}
    start, length = bucket.offset // group.size(), numel // group.size()
    return {k: (t[start:][:length],) for k, t in flat.items()}


def _copies_of_bucket(
    optimizer: Any, bucket: Any, param_map: dict[Tensor, Any], flat: dict[str, Tensor]
) -> Iterator[tuple[Tensor, Tensor]]:
    """Pair the parts of ``flat`` with the tensors of this rank's shard that are copied there."""
    shards = _shards(bucket, flat, optimizer.data_parallel_group_gloo)
    for parameter, ranges in param_map.items():
        tensors = main_param_and_moments(optimizer, parameter)
        local = ranges["gbuf_local"]
        for key in _STATE:
            own = shards[key][0][local.start : local.end]
            yield own, tensors[key].detach()


def _gather_bucket(bucket: Any, flat: dict[str, Tensor], group: Any) -> None:
    """Gather the shards of a bucket into the first rank's ``flat``; collective."""
    for all_of_key in _shards(bucket, flat, group).values():
        gathered = list(all_of_key) if group.rank() == 0 else None
        torch.distributed.gather(all_of_key[0], gathered, group=group, group_dst=0)


def _own_ranges(optimizer: Any) -> Iterator[tuple[int, Tensor, Any]]:
    """Yield the ranges of parameters whose state this rank owns.

    Each comes with the parameter and its index among all, the key in Megatron's state.
    """
    number = 0
    for of_dtype, buffer in zip(optimizer.gbuf_ranges, optimizer.buffers, strict=True):
        (of_buckets,) = of_dtype.values()
        own = {
            parameter: ranges["param"]
            for in_bucket in of_buckets
            for parameter, ranges in in_bucket["param_map"].items()
        }
        for parameter in buffer.param_index_map:
            if parameter in own:
                yield number, parameter, own[parameter]
            number += 1


def _ask(
    optimizer: Any,
    ask: Any,
    places: _Places,
    model_state: dict[str, Any],
    is_loading: bool = False,
    metadata: dict[str, Any] | None = None,
) -> dict[int, Any] | None:
    """Megatron's ``sharded_param_state_fully_reshardable``, loading only the shard's rows."""
    state = ask(model_state, is_loading, metadata)
    if not is_loading:
        return state
    places.clear()
    wanted: dict[int, dict[str, list[ShardedTensor]]] = {}
    for number, _, own in _own_ranges(optimizer):
        wanted[number] = {}
        for key, entry in state[number].items():
            found = list(_rows_of(entry, own.start, own.end))
            wanted[number][key] = [rows for rows, _ in found]
            places[number, key] = [numbers for _, numbers in found]
    return wanted


def _rows_of(
    entry: ShardedTensor | ShardedTensorFactory, start: int, end: int
) -> Iterator[tuple[ShardedTensor, slice]]:
    """Narrow stored tensors to the rows with elements ``start`` to ``end`` of a parameter.

    A parameter is stored as one tensor or, for a factory, as several. Yields each with memory for
    its rows, and the slice of their elements that is wanted.
    """
    whole = entry.build() if isinstance(entry, ShardedTensorFactory) else [entry]
    for stored in whole:
        data = stored.data
        assert data.is_contiguous(), stored.key  # Megatron splits parameters along rows
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
                axis_fragmentations=None,  # arbitrary rows form no regular grid
            ),
            slice(first - above * row, last - above * row),
        )


@torch.no_grad()
def _put(optimizer: Any, places: _Places, state: dict[int, dict[str, list[Tensor]]]) -> None:
    """Megatron's ``load_parameter_state_from_fully_reshardable``, for what ``_ask`` requested."""
    for number, parameter, _ in _own_ranges(optimizer):
        found = state.pop(number)  # so that its memory is freed after the copy
        tensors = {
            key: torch.cat(
                [
                    rows.flatten()[numbers]
                    for rows, numbers in zip(found[key], places[number, key], strict=True)
                ]
            )
            for key in _STATE
        }
        put_main_param_and_moments(optimizer, parameter, tensors)
