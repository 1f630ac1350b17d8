"""AdamW on flat shards with torch's fused kernels; moments live on the device or in host memory.

``AdamW`` updates this rank's shards of the weights, which ``optimizer_state.py`` builds.
``MomentStreamer`` copies moments that live in host memory to the GPU and back, chunk by chunk,
while the GPU computes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from nemo_aligner.training.optimizer_state import MOMENTS, Shard
from nemo_aligner.utils.host_transfer import pieces_of, room_for

# Moments that live in host memory are copied to the device in chunks. A chunk has this many
# elements of each of Adam's two moments, 256 MiB in fp32. Two chunks are on the device at a time:
# the next one arrives while the current one is updated.
_CHUNK_NUMEL = 2**25

# Arguments of the fused kernel for each parameter group, by the group's index: lists of flat
# tensors with the fp32 weights, the gradients, the first and the second moments.
_Operands: TypeAlias = dict[int, tuple[list[Tensor], list[Tensor], list[Tensor], list[Tensor]]]
# A shard, and the range ``start:stop`` of its elements.
_Piece: TypeAlias = tuple[Shard, int, int]


class _Run(NamedTuple):
    """A range of adjacent elements of a shard that one call of the kernel can update.

    All its parameters are in the same group, so they have the same hyperparameters.

    Attributes:
        group: index of the group in the argument ``groups`` of ``AdamW.step``.
        start, stop: range of the elements in the shard.
    """

    group: int
    start: int
    stop: int


class AdamW:
    """AdamW (Loshchilov and Hutter 2019, "Decoupled weight decay regularization") on shards.

    Args:
        shards: this rank's shards of all buckets of Megatron's DDP.
        group_of: for each parameter, the index of its group in the argument ``groups`` of ``step``.
        streamer: copies moments from host memory to the device and back, a chunk at a time; None if
            the moments live on the device.
        chunk_numel: elements of a chunk. Every multiple of 64 gives bit-identical results.
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
        # Make the views once: slicing in each step would take longer than launching the kernels.
        self._resident = self._operands(pieces, self._moments[0]) if streamer is None else {}

    @torch.no_grad()
    def step(self, groups: Sequence[Mapping[str, Any]], count: int) -> None:
        """Update the weights and the moments of all shards from their gradients.

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
        """Wait until moments in host memory are complete, so that a save or a load may use them."""
        if self._streamer is not None:
            self._streamer.wait()

    def _operands(self, pieces: Sequence[_Piece], moments: Sequence[Tensor]) -> _Operands:
        """Cut ``pieces`` of shards by parameter group, and collect the tensors of each group.

        ``moments`` has two tensors for each piece: the first and the second moment.
        """
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

    torch.optim.AdamW itself is slower: it keeps a step counter on the device for each parameter,
    and it groups all tensors by device and dtype again in every step.
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
    """Merge adjacent segments of the same group, so that the fused kernel gets few tensors.

    Segments with padding between them stay separate. Merging across padding would change results:
    on a CPU, the last elements of each tensor are computed without vector instructions and round
    differently.
    """
    runs: list[_Run] = []
    for segment in shard.segments:
        group, start = group_of[segment.parameter], segment.start
        if runs and (runs[-1].group, runs[-1].stop) == (group, start):
            start = runs.pop().start
        runs.append(_Run(group, start, segment.stop))
    return runs


def _split_chunks(pieces: Sequence[_Piece], numel: int) -> Iterator[list[_Piece]]:
    """Split ``pieces`` (ranges of shards) into chunks of ``numel`` elements, in order.

    The last chunk may be smaller.
    """
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
    """Copies moments from host memory to the GPU and back, while the GPU updates other moments.

    Each direction has its own CUDA stream.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._up, self._down = torch.cuda.Stream(), torch.cuda.Stream()
        self._all_back: torch.cuda.Event | None = None

    def stream(self, loads: Sequence[list[Tensor]]) -> Iterator[list[Tensor]]:
        """Yield the tensors of each chunk on the GPU, and copy their new values back to the host.

        The copy back is queued when the caller asks for the next chunk, so the caller must have
        launched all kernels on the current chunk by then.

        Args:
            loads: for each chunk, its moments in page-locked host memory.
        """
        if not loads:
            return
        compute = torch.cuda.current_stream()
        room = max(map(room_for, loads))
        buffers = [torch.empty(room, dtype=torch.uint8, device=self._device) for _ in range(2)]
        for buffer in buffers:
            buffer.record_stream(self._up)
            buffer.record_stream(self._down)
        # The first copy must wait for two things: the buffers' memory is free (compute stream), and
        # the previous step's moments are complete in host memory (down stream).
        self._up.wait_stream(compute)
        self._up.wait_stream(self._down)
        on_device, arrived = self._copy_up(buffers[0], loads[0])
        for index, load in enumerate(loads):
            compute.wait_event(arrived)
            following = loads[index + 1 : index + 2]
            if following:
                # The next chunk is copied into the other buffer, so wait until that buffer's
                # updated moments are on the host.
                self._up.wait_stream(self._down)
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
        """Wait until all moments of the last step have been copied back to host memory."""
        if self._all_back is not None:
            self._all_back.synchronize()

    def _copy_up(self, buffer: Tensor, load: list[Tensor]) -> tuple[list[Tensor], torch.cuda.Event]:
        """Start copying the moments ``load`` of one chunk from the host into ``buffer`` on the GPU.

        Returns:
            Views of ``buffer`` with the shapes of ``load``, and an event at the end of the copy.
        """
        on_device = pieces_of(buffer, load)
        with torch.cuda.stream(self._up):
            for target, on_host in zip(on_device, load, strict=True):
                target.copy_(on_host, non_blocking=True)
        return on_device, self._up.record_event()
