"""AdamW on flat shards by torch's fused kernels, with moments on the device or in host memory."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from nemo_aligner.training.optimizer_state import MOMENTS, Shard
from nemo_aligner.utils.host_transfer import pieces_of, room_for

# Elements whose moments are on the device at a time, if they live in host memory: 256 MiB. Two such
# chunks are there, since one arrives while the other one is updated.
_CHUNK_NUMEL = 2**25

# Of each group: fp32 weights, gradients and both moments, as lists of flat tensors.
_Operands: TypeAlias = dict[int, tuple[list[Tensor], list[Tensor], list[Tensor], list[Tensor]]]
# The elements of a shard from a position to another one.
_Piece: TypeAlias = tuple[Shard, int, int]


class _Run(NamedTuple):
    """Adjacent elements of a shard with the same hyperparameters."""

    group: int
    start: int
    stop: int


class AdamW:
    """AdamW (Loshchilov and Hutter 2019, "Decoupled weight decay regularization") on shards.

    Args:
        group_of: for each parameter, the index of its group among those that ``step`` is given.
        ferry: carries moments from host memory to the device and back, a chunk at a time; None if
            they are on the device.
        chunk_numel: elements of a chunk; a multiple of 64 keeps results independent of it.
    """

    def __init__(
        self,
        shards: Sequence[Shard],
        group_of: Mapping[torch.nn.Parameter, int],
        ferry: Ferry | None = None,
        chunk_numel: int = _CHUNK_NUMEL,
    ) -> None:
        self._shards = shards
        self._runs = {shard: _runs(shard, group_of) for shard in shards}
        self._ferry = ferry
        whole = [(shard, 0, shard.weights.numel()) for shard in shards]
        self._chunks = [whole] if ferry is None else list(_chunks(whole, chunk_numel))
        self._moments = [
            [shard.state[key][start:stop] for shard, start, stop in chunk for key in MOMENTS]
            for chunk in self._chunks
        ]
        # Views are made once: slicing them anew would take the host longer than launching kernels.
        self._resident = self._operands(whole, self._moments[0]) if ferry is None else {}

    @torch.no_grad()
    def step(self, groups: Sequence[Mapping[str, Any]], count: int) -> None:
        """Update the shards' weights by their gradients.

        Args:
            groups: ``lr``, ``weight_decay``, ``betas`` and ``eps`` of each group.
            count: of updates, with this one, for the bias correction.
        """
        if not self._shards:
            return
        device = self._shards[0].gradients.device
        counter = torch.full((), count, dtype=torch.float32, device=device)
        if self._ferry is None:
            _update(self._resident, groups, counter)
        else:
            for index, moments in enumerate(self._ferry.carry(self._moments)):
                _update(self._operands(self._chunks[index], moments), groups, counter)
        rounded = [shard for shard in self._shards if shard.weights.dtype is not torch.float32]
        if rounded:
            torch._foreach_copy_(
                [shard.weights for shard in rounded], [shard.state["param"] for shard in rounded]
            )

    def wait(self) -> None:
        """Wait until the host may read and write the moments."""
        if self._ferry is not None:
            self._ferry.wait()

    def _operands(self, pieces: Sequence[_Piece], moments: Sequence[Tensor]) -> _Operands:
        """Cut ``pieces`` into runs; of each piece there are two ``moments``."""
        operands: _Operands = {}
        for piece, *of_piece in zip(pieces, moments[::2], moments[1::2], strict=True):
            shard, start, stop = piece
            flat = [shard.state["param"][start:stop], shard.gradients[start:stop], *of_piece]
            for group, first, last in self._runs[shard]:
                first, last = max(first, start) - start, min(last, stop) - start
                if first < last:
                    lists = operands.setdefault(group, ([], [], [], []))
                    for tensors, tensor in zip(lists, flat, strict=True):
                        tensors.append(tensor[first:last])
        return operands


def _update(operands: _Operands, groups: Sequence[Mapping[str, Any]], counter: Tensor) -> None:
    """Update each group by one call, in which torch.optim.AdamW ends, too.

    That keeps a counter on the device for each parameter, and sorts all tensors in every step.
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


def _runs(shard: Shard, group_of: Mapping[torch.nn.Parameter, int]) -> list[_Run]:
    """Merge adjacent segments of a group, so that kernels get few tensors.

    Segments with padding between them stay apart: on a CPU the last elements of a tensor are
    computed without vector instructions, and round differently.
    """
    runs: list[_Run] = []
    for segment in shard.segments:
        group, start = group_of[segment.parameter], segment.start
        if runs and (runs[-1].group, runs[-1].stop) == (group, start):
            start = runs.pop().start
        runs.append(_Run(group, start, segment.stop))
    return runs


def _chunks(pieces: Sequence[_Piece], numel: int) -> Iterator[list[_Piece]]:
    """Cut ``pieces`` into lists of ``numel`` elements, in order."""
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


class Ferry:
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
