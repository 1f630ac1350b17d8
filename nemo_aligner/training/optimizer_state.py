"""Adam's states in host memory: offloaded during a run, gathered for a save, loaded by shards.

For a save the state of the distributed optimizer is gathered into buffers that are allocated once.
To load, each rank reads only the rows of each tensor that its own shard lies in, so that no rank
ever holds the whole state.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from torch import Tensor

from nemo_aligner.utils.host_transfer import copy_beside, host_zeros, pieces_of, room_for

MOMENTS = ("exp_avg", "exp_avg_sq")

# Saving and loading.

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
        tensors = _main_param_and_moments(optimizer, parameter)
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
        optimizer._set_main_param_and_optimizer_states(parameter, tensors)


def _main_param_and_moments(optimizer: Any, parameter: Tensor) -> dict[str, Tensor]:
    """This rank's shards of a parameter: ``param`` in fp32, and the moments by name.

    Their place depends on precision and inner optimizer; only this private method knows it.
    """
    return optimizer._get_main_param_and_optimizer_states(parameter)


# Offloading: moments are on the GPU only while their parameters step.

_COUNT = "step"
# Two chunks are on the device at a time: one arrives while the other steps.
_CHUNK_BYTES = 2**28


class OffloadedStates:
    """Offloads Adam's moments, and makes ``optimizer`` step chunk by chunk.

    A chunk's moments are copied to the parameters' device, updated by the optimizer itself and
    copied back. 8 bytes of every parameter lie in host memory instead of the GPU's, and cross the
    bus twice a step.

    Args:
        optimizer: torch's AdamW, or Apex's or TransformerEngine's, with both moments of every
            parameter in its state, allocated by ``host_zeros``.
        chunk_bytes: of the moments in a chunk, which has at least one parameter.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, chunk_bytes: int = _CHUNK_BYTES) -> None:
        self._optimizer = optimizer
        self._step_all = optimizer.step
        self._chunk_bytes = chunk_bytes
        devices = {each.device for group in optimizer.param_groups for each in group["params"]}
        gpu = next((device for device in devices if device.type == "cuda"), None)
        self._ferry = None if gpu is None else _Ferry(gpu)
        optimizer.step = self._step  # type: ignore[method-assign, assignment]
        optimizer.load_state_dict = self._load_settings  # type: ignore[method-assign]

    def wait(self) -> None:
        """Wait until the host may read the moments."""
        if self._ferry is not None:
            self._ferry.wait()

    def _load_settings(self, state_dict: dict[str, Any]) -> None:
        """Load groups and step counts; megatron-core then copies the moments into ours.

        torch's own method would first put all moments on the device.
        """
        self.wait()
        for group, loaded in zip(
            self._optimizer.param_groups, state_dict["param_groups"], strict=True
        ):
            group.update({key: value for key, value in loaded.items() if key != "params"})
            for parameter, index in zip(group["params"], loaded["params"], strict=True):
                count = state_dict["state"].get(index, {}).get(_COUNT)
                if count is not None:
                    own = count.to(parameter.device, torch.float32, copy=True)
                    self._optimizer.state[parameter][_COUNT] = own

    def _step(self) -> None:
        groups = self._optimizer.param_groups
        whole = [group["params"] for group in groups]
        # Apex and TransformerEngine count steps per group, torch per parameter.
        before = [group.get(_COUNT) for group in groups]
        after = list(before)
        for chunk in self._on_device(list(self._chunks(whole))):
            for group, parameters, count in zip(groups, chunk, before, strict=True):
                _set(group, parameters, count)
            self._step_all()
            for index, (group, parameters) in enumerate(zip(groups, chunk, strict=True)):
                after[index] = group.get(_COUNT) if parameters else after[index]
        for group, parameters, count in zip(groups, whole, after, strict=True):
            _set(group, parameters, count)

    def _chunks(self, whole: list[list[Tensor]]) -> Iterator[list[list[Tensor]]]:
        """Split the parameters of all groups into chunks, in order."""
        chunk: list[list[Tensor]] = [[] for _ in whole]
        held = 0
        for index, parameters in enumerate(whole):
            for parameter in parameters:
                size = sum(self._optimizer.state[parameter][key].nbytes for key in MOMENTS)
                if held and held + size > self._chunk_bytes:
                    yield chunk
                    chunk, held = [[] for _ in whole], 0
                chunk[index].append(parameter)
                held += size
        if held:
            yield chunk

    def _on_device(self, chunks: list[list[list[Tensor]]]) -> Iterator[list[list[Tensor]]]:
        """Yield each of ``chunks`` with its moments on the parameters' device."""
        if self._ferry is None:
            yield from chunks
            return
        places = [self._places(chunk) for chunk in chunks]
        host = [[state[key] for state, key in of_chunk] for of_chunk in places]
        for index, moments in enumerate(self._ferry.carry(host)):
            _place(places[index], moments)
            yield chunks[index]
            _place(places[index], host[index])

    def _places(self, chunk: list[list[Tensor]]) -> list[tuple[dict[str, Tensor], str]]:
        parameters = [parameter for of_group in chunk for parameter in of_group]
        return [(self._optimizer.state[each], key) for each in parameters for key in MOMENTS]


class _Ferry:
    """Copies tensors to the GPU and back on two streams, overlapping with compute."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._up, self._down = torch.cuda.Stream(), torch.cuda.Stream()
        self._all_back: torch.cuda.Event | None = None

    def carry(self, loads: Sequence[list[Tensor]]) -> Iterator[list[Tensor]]:
        """Yield each of ``loads`` on the device; its contents then return to the host."""
        if not loads:
            return
        compute = torch.cuda.current_stream()
        room = max(map(room_for, loads))
        buffers = [torch.empty(room, dtype=torch.uint8, device=self._device) for _ in range(2)]
        for buffer in buffers:
            buffer.record_stream(self._up)
            buffer.record_stream(self._down)
        # Wait for the buffers' memory, and for what the last step sent to the host.
        self._up.wait_stream(compute)
        self._up.wait_stream(self._down)
        near, arrived = self._bring(buffers[0], loads[0])
        for index, load in enumerate(loads):
            compute.wait_event(arrived)
            following = loads[index + 1 : index + 2]
            if following:
                self._up.wait_stream(self._down)  # the previous load has left this buffer
                coming = self._bring(buffers[(index + 1) % 2], following[0])
            yield near
            self._down.wait_stream(compute)
            with torch.cuda.stream(self._down):
                for kept, stepped in zip(load, near, strict=True):
                    kept.copy_(stepped, non_blocking=True)
            if following:
                near, arrived = coming
        self._all_back = self._down.record_event()

    def wait(self) -> None:
        """Wait until everything is back on the host."""
        if self._all_back is not None:
            self._all_back.synchronize()

    def _bring(self, buffer: Tensor, load: list[Tensor]) -> tuple[list[Tensor], torch.cuda.Event]:
        near = pieces_of(buffer, load)
        with torch.cuda.stream(self._up):
            for there, kept in zip(near, load, strict=True):
                there.copy_(kept, non_blocking=True)
        return near, self._up.record_event()


def _place(places: Sequence[tuple[dict[str, Tensor], str]], moments: Sequence[Tensor]) -> None:
    for (state, key), moment in zip(places, moments, strict=True):
        state[key] = moment


def _set(group: dict[str, Any], parameters: list[Tensor], count: Any) -> None:
    group["params"] = parameters
    group.pop(_COUNT, None)
    if count is not None:
        group[_COUNT] = count
