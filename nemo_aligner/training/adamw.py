"""AdamW on flat shards by torch's fused kernels, with moments on the device or in host memory."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from nemo_aligner.training.optimizer_state import MOMENTS, Shard
from nemo_aligner.utils.host_transfer import pieces_of, room_for

# Elements whose moments are on the device at a time, if they live in host memory: 256 MiB. Two such
# chunks are there, since one arrives while the other one is updated.
_CHUNK_NUMEL = 2**25


class _Run(NamedTuple):
    """Adjacent elements of a shard with the same hyperparameters."""

    group: int
    start: int
    stop: int


class _Piece(NamedTuple):
    """The elements of a shard from ``start`` to ``stop``."""

    shard: Shard
    start: int
    stop: int


class _Operands(NamedTuple):
    """What a fused kernel updates: lists of flat fp32 tensors."""

    params: list[Tensor]
    gradients: list[Tensor]
    exp_avgs: list[Tensor]
    exp_avg_sqs: list[Tensor]


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
        betas: Sequence[float],
        eps: float,
        ferry: Ferry | None = None,
        chunk_numel: int = _CHUNK_NUMEL,
    ) -> None:
        self._shards = shards
        self._runs = {shard: _runs(shard, group_of) for shard in shards}
        self._beta1, self._beta2 = betas
        self._eps = eps
        self._ferry = ferry
        whole = [_Piece(shard, 0, shard.weights.numel()) for shard in shards]
        self._chunks = [whole] if ferry is None else list(_chunks(whole, chunk_numel))
        self._moments = [
            [shard.state[key][start:stop] for shard, start, stop in chunk for key in MOMENTS]
            for chunk in self._chunks
        ]
        # Views are made once: slicing them anew would take the host longer than launching kernels.
        self._resident = self._operands(whole, self._moments[0]) if ferry is None else {}

    @torch.no_grad()
    def step(self, groups: Sequence[Mapping[str, float]], count: int) -> None:
        """Update the shards' weights by their gradients.

        Args:
            groups: ``lr`` and ``weight_decay`` of each group.
            count: of updates, with this one, for the bias correction.
        """
        if not self._shards:
            return
        counter = torch.full(
            (), count, dtype=torch.float32, device=self._shards[0].gradients.device
        )
        if self._ferry is None:
            self._update(self._resident, groups, counter)
        else:
            for index, moments in enumerate(self._ferry.carry(self._moments)):
                self._update(self._operands(self._chunks[index], moments), groups, counter)
        rounded = [shard for shard in self._shards if shard.weights.dtype is not torch.float32]
        if rounded:
            torch._foreach_copy_(
                [shard.weights for shard in rounded], [shard.state["param"] for shard in rounded]
            )

    def wait(self) -> None:
        """Wait until the host may read and write the moments."""
        if self._ferry is not None:
            self._ferry.wait()

    def _operands(
        self, pieces: Sequence[_Piece], moments: Sequence[Tensor]
    ) -> dict[int, _Operands]:
        """The operands of ``pieces`` by group; ``moments`` are two tensors for each piece."""
        operands: dict[int, _Operands] = {}
        for piece, exp_avg, exp_avg_sq in zip(pieces, moments[::2], moments[1::2], strict=True):
            shard, start, stop = piece
            params, gradients = shard.state["param"][start:stop], shard.gradients[start:stop]
            for run in self._runs[shard]:
                first, last = max(run.start, start) - start, min(run.stop, stop) - start
                if first >= last:
                    continue
                lists = operands.setdefault(run.group, _Operands([], [], [], []))
                flat = (params, gradients, exp_avg, exp_avg_sq)
                for tensors, tensor in zip(lists, flat, strict=True):
                    tensors.append(tensor[first:last])
        return operands

    def _update(
        self,
        operands: Mapping[int, _Operands],
        groups: Sequence[Mapping[str, float]],
        counter: Tensor,
    ) -> None:
        # torch.optim.AdamW ends in this call, too. It keeps a counter on the device for each
        # parameter, and sorts all tensors by device and dtype in every step.
        for index, lists in operands.items():
            torch._fused_adamw_(
                *lists,
                [],
                [counter] * len(lists.params),
                lr=groups[index]["lr"],
                beta1=self._beta1,
                beta2=self._beta2,
                weight_decay=groups[index]["weight_decay"],
                eps=self._eps,
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
    chunk: list[_Piece] = []
    room = numel
    for shard, start, stop in pieces:
        while start < stop:
            middle = min(stop, start + room)
            chunk.append(_Piece(shard, start, middle))
            room -= middle - start
            start = middle
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
