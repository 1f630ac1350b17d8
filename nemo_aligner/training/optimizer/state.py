"""The optimizer's state on its way to be saved: gathered once, in memory that is taken once."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from nemo_aligner.parallel.host_copies import copy_beside
from nemo_aligner.parallel.host_memory import host_zeros
from nemo_aligner.training.optimizer.host_moments import MOMENTS
from nemo_aligner.training.optimizer.megatron_internals import main_param_and_moments

# What the optimizer has for each parameter, in fp32.
_STATE = ("param", *MOMENTS)


def gather_in_reused_memory(optimizer: Any) -> None:
    """Have ``optimizer`` gather its state to be saved in memory that is taken once."""
    optimizer.get_parameter_state_dp_zero = partial(_gather_state, optimizer, [])


def _gather_state(
    optimizer: Any, memory: list[dict[str, Tensor]], empty_data: bool = False, **options: bool
) -> dict[Any, Any] | None:
    """Megatron's ``get_parameter_state_dp_zero``, which copies four times into new memory.

    Here every tensor is copied once, into ``memory``, and only gathered where there are others;
    where there are none, it may still be on its way (``copy_beside``).
    The tensors are as long as the buffers: Megatron's leave out what pads the buckets, and are then
    read by offsets that count it (its issue 504). With ``empty_data`` they are to be loaded into.
    """
    state: dict[Any, Any] = {"buckets_coalesced": True}
    buffers = list(zip(optimizer.gbuf_ranges, optimizer.buffers, strict=True))
    if empty_data:
        for index, (of_dtype, buffer) in enumerate(buffers):
            (dtype,) = of_dtype
            state[index] = {dtype: {key: torch.empty(buffer.numel) for key in _STATE}}
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
    """Where the state is copied to be saved: for each buffer, flat fp32 tensors.

    The first rank of the data parallel group has all of the state, the others what they send it.
    """
    group = optimizer.data_parallel_group_gloo
    memory = []
    for buffer in optimizer.buffers:
        numel = buffer.numel if group.rank() == 0 else buffer.numel // group.size()
        wanted = torch.empty(numel, dtype=torch.float32, device="meta")
        memory.append(dict(zip(_STATE, host_zeros([wanted] * len(_STATE)), strict=True)))
    return memory


def _shards(bucket: Any, flat: dict[str, Tensor], group: Any) -> dict[str, Sequence[Tensor]]:
    """Where in ``flat`` the shards of a bucket belong, this rank's first; only the first has all.

    The first rank gathers, so that its own shard is the first of all.
    """
    numel = bucket.grad_data.numel()
    if group.rank() == 0:
        return {k: t[bucket.offset :][:numel].chunk(group.size()) for k, t in flat.items()}
    start, length = bucket.offset // group.size(), numel // group.size()
    return {k: (t[start:][:length],) for k, t in flat.items()}


def _copies_of_bucket(
    optimizer: Any, bucket: Any, param_map: dict[Tensor, Any], flat: dict[str, Tensor]
) -> Iterator[tuple[Tensor, Tensor]]:
    """Where in ``flat`` this rank's shard of a bucket is to be copied, tensor by tensor."""
    shards = _shards(bucket, flat, optimizer.data_parallel_group_gloo)
    for parameter, ranges in param_map.items():
        tensors = main_param_and_moments(optimizer, parameter)
        local = ranges["gbuf_local"]
        for key in _STATE:
            own = shards[key][0][local.start : local.end]
            yield own, tensors[key].detach()


def _gather_bucket(bucket: Any, flat: dict[str, Tensor], group: Any) -> None:
    """Have the first rank's ``flat`` hold the shards of all."""
    for all_of_key in _shards(bucket, flat, group).values():
        gathered = list(all_of_key) if group.rank() == 0 else None
        torch.distributed.gather(all_of_key[0], gathered, group=group, group_dst=0)
