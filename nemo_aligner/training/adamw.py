"""AdamW on flat shards with torch's fused kernels; moments live on the device or in host memory.

``AdamW`` updates the shards of ``optimizer_state.py``. ``MomentStreamer`` copies moments that live
in host memory to the GPU and back, chunk by chunk, while the GPU computes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from nemo_aligner.training.optimizer_state import MOMENTS, Shard
from nemo_aligner.utils.host_transfer import pieces_of, room_for

# Elements of a chunk of moments that come to the device together if they live in host memory: 256
# MiB. Two chunks are on the device at a time, because one arrives while the other is updated.
_CHUNK_NUMEL = 2**25

# By index of the group: fp32 weights, gradients and both moments, as lists of flat tensors.
_Operands: TypeAlias = dict[int, tuple[list[Tensor], list[Tensor], list[Tensor], list[Tensor]]]
# A shard, and the range of its elements.
_Piece: TypeAlias = tuple[Shard, int, int]


class _Run(NamedTuple):
    """Adjacent elements of a shard with the same hyperparameters."""

    group: int
    start: int
    stop: int


class AdamW:
    """AdamW (Loshchilov and Hutter 2019, "Decoupled weight decay regularization") on shards.

    Args:
        shards: this rank's shards of all buckets.
        group_of: index of each parameter's group in the ``groups`` that ``step`` gets.
        streamer: copies moments from host memory to the device and back, a chunk at a time; None if
            they live on the device.
        chunk_numel: elements of a chunk. With a multiple of 64 the results do not depend on it.
    """

    def __init__(
        self,
        shards: Sequence[Shard],
        group_of: Mapping[torch.nn.Parameter, int],
        streamer: MomentStreamer | None = None,
        chunk_numel: int = _CHUNK_NUMEL,
    ) -> None:
        self._shards = shards
        self._runs = {shard: _merge_segments(shard, group_of) for shard in shards}
        self._streamer = streamer
        pieces = [(shard, 0, shard.weights.numel()) for shard in shards]
        self._chunks = [pieces] if streamer is None else list(_split_chunks(pieces, chunk_numel))
        self._moments = [
            [shard.state[key][start:stop] for shard, start, stop in chunk for key in MOMENTS]
            for chunk in self._chunks
        ]
        # Views are made once: slicing in each step would take longer than launching the kernels.
        self._resident = self._operands(pieces, self._moments[0]) if streamer is None else {}

    @torch.no_grad()
    def step(self, groups: Sequence[Mapping[str, Any]], count: int) -> None:
        """Update the shards' weights and moments by their gradients.

        Args:
            groups: ``lr``, ``weight_decay``, ``betas`` and ``eps`` of each group.
            count: number of updates including this one, for the bias correction.
        """
        if not self._shards:
            return
        device = self._shards[0].gradients.device
        counter = torch.full((), count, dtype=torch.float32, device=device)
        if self._streamer is None:
            _update(self._resident, groups, counter)
        else:
            for index, moments in enumerate(self._streamer.stream(self._moments)):
                _update(self._operands(self._chunks[index], moments), groups, counter)
        rounded = [shard for shard in self._shards if shard.weights.dtype is not torch.float32]
        if rounded:
            torch._foreach_copy_(
                [shard.weights for shard in rounded], [shard.state["param"] for shard in rounded]
            )

    def wait(self) -> None:
        """Wait until the host may read and write the moments."""
        if self._streamer is not None:
            self._streamer.wait()

    def _operands(self, pieces: Sequence[_Piece], moments: Sequence[Tensor]) -> _Operands:
        """Cut ``pieces`` into runs and group their tensors; ``moments`` are two for each piece."""
        operands: _Operands = {}
        for piece, *piece_moments in zip(pieces, moments[::2], moments[1::2], strict=True):
            shard, start, stop = piece
            flat = [shard.state["param"][start:stop], shard.gradients[start:stop], *piece_moments]
            for group, first, last in self._runs[shard]:
                first, last = max(first, start) - start, min(last, stop) - start
                if first < last:
                    lists = operands.setdefault(group, ([], [], [], []))
                    for tensors, tensor in zip(lists, flat, strict=True):
                        tensors.append(tensor[first:last])
        return operands


def _update(operands: _Operands, groups: Sequence[Mapping[str, Any]], counter: Tensor) -> None:
    """Update each group by one call of the fused kernel that torch.optim.AdamW also calls.

    torch.optim.AdamW would keep a counter on the device for each parameter and sort all tensors in
    every step.
    """
    for index, lists in operands.items():
        group = groups[index]
        torch._fused_adamw_(
            *lists,
            [],
            [counter] * len(lists[0]),
            lr=group["lr"],
            beta1=group["betas"][0],
            beta2=group["betas"][1],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            amsgrad=False,
            maximize=False,
        )


def _merge_segments(shard: Shard, group_of: Mapping[torch.nn.Parameter, int]) -> list[_Run]:
    """Merge adjacent segments with the same group, so that the kernels get few tensors.

    Segments with padding between them stay separate. On a CPU the last elements of a tensor are
    computed without vector instructions and round differently, so merging would change results.
    """
    runs: list[_Run] = []
    for segment in shard.segments:
        group, start = group_of[segment.parameter], segment.start
        if runs and (runs[-1].group, runs[-1].stop) == (group, start):
            start = runs.pop().start
        runs.append(_Run(group, start, segment.stop))
    return runs


def _split_chunks(pieces: Sequence[_Piece], numel: int) -> Iterator[list[_Piece]]:
    """Split ``pieces`` into chunks of ``numel`` elements, in order."""
    chunk, room = list[_Piece](), numel
    for shard, start, stop in pieces:
        while start < stop:
            end = min(stop, start + room)
            chunk.append((shard, start, end))
            room -= end - start
            start = end
            if room == 0:
                yield chunk
                chunk, room = [], numel
    if chunk:
        yield chunk


class MomentStreamer:
    """Copies moments to the GPU and back on two side streams, overlapping with computation."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._up, self._down = torch.cuda.Stream(), torch.cuda.Stream()
        self._all_back: torch.cuda.Event | None = None

    def stream(self, loads: Sequence[list[Tensor]]) -> Iterator[list[Tensor]]:
        """Yield a copy of each of ``loads`` on the device; copy it back when the caller is done."""
        if not loads:
            return
        compute = torch.cuda.current_stream()
        room = max(map(room_for, loads))
        buffers = [torch.empty(room, dtype=torch.uint8, device=self._device) for _ in range(2)]
        for buffer in buffers:
            buffer.record_stream(self._up)
            buffer.record_stream(self._down)
        # Wait for the buffers' memory, and for what the previous step sent to the host.
        self._up.wait_stream(compute)
        self._up.wait_stream(self._down)
        on_device, arrived = self._copy_up(buffers[0], loads[0])
        for index, load in enumerate(loads):
            compute.wait_event(arrived)
            following = loads[index + 1 : index + 2]
            if following:
                self._up.wait_stream(self._down)  # the previous load has left this buffer
                upcoming = self._copy_up(buffers[(index + 1) % 2], following[0])
            yield on_device
            self._down.wait_stream(compute)
            with torch.cuda.stream(self._down):
                for on_host, updated in zip(load, on_device, strict=True):
                    on_host.copy_(updated, non_blocking=True)
            if following:
                on_device, arrived = upcoming
        self._all_back = self._down.record_event()

    def wait(self) -> None:
        """Wait until everything is back on the host."""
        if self._all_back is not None:
            self._all_back.synchronize()

    def _copy_up(self, buffer: Tensor, load: list[Tensor]) -> tuple[list[Tensor], torch.cuda.Event]:
        """Copy ``load`` into ``buffer``; views of it, and an event when they are complete."""
        on_device = pieces_of(buffer, load)
        with torch.cuda.stream(self._up):
            for target, on_host in zip(on_device, load, strict=True):
                target.copy_(on_host, non_blocking=True)
        return on_device, self._up.record_event()
