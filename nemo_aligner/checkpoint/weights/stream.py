"""Tensors into a distributed checkpoint one at a time, for a conversion."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from megatron.core.dist_checkpointing.mapping import ShardedTensor
from megatron.core.dist_checkpointing.strategies.torch import MCoreSavePlanner
from torch import Tensor
from torch.distributed.checkpoint.metadata import MetadataIndex

from nemo_aligner.checkpoint.weights.save import PLANNING, PendingSave


@dataclass(frozen=True)
class UnreadTensor:
    """A tensor whose ``shape`` and ``dtype`` are known, and which ``read`` brings into memory."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    read: Callable[[], Tensor]

    def outline(self) -> Tensor:
        """The tensor without its numbers, on torch's meta device."""
        return torch.empty(self.shape, dtype=self.dtype, device="meta")


def dtype_of_matrices(tensors: Iterable[UnreadTensor]) -> torch.dtype:
    """The dtype that holds every number of the matrices; norms and biases do not count."""
    dtypes = {tensor.dtype for tensor in tensors if len(tensor.shape) > 1}
    return dtypes.pop() if len(dtypes) == 1 else torch.float32


class _ReadingPlanner(MCoreSavePlanner):
    """Plans with outlines; a tensor is read when it is to be written."""

    def __init__(self, tensors: Mapping[tuple[str, tuple[int, ...]], UnreadTensor]) -> None:
        super().__init__(**PLANNING)
        self._tensors = tensors

    def lookup_object(self, index: MetadataIndex) -> Tensor:
        assert index.offset is not None, index
        tensor = self._tensors[index.fqn, tuple(index.offset)]
        data = tensor.read()
        assert (tuple(data.shape), data.dtype) == (tensor.shape, tensor.dtype), index
        # Where a key holds all layers, a layer has one axis more in the file.
        return data.view((1,) * (len(index.offset) - data.dim()) + data.shape)


def save_unread(
    tensors: Mapping[str, UnreadTensor],
    layers: Mapping[str, Sequence[UnreadTensor]],
    folder: Path,
) -> None:
    """Write ``tensors``, and ``layers`` stacked under one key each, reading one after the other.

    One process calls it, where torch.distributed is initialised. torch's writer holds on to the
    last tensor of every key, so that the most in memory is ``tensors`` and two layers.

    Raises:
        CheckpointError: the folder cannot be written to, or a tensor not be read.
    """
    request: dict[str, Any] = {}
    unread = {}
    for key, tensor in tensors.items():
        request[key] = ShardedTensor.from_rank_offsets(key, tensor.outline())
        unread[key, (0,) * len(tensor.shape)] = tensor
    for key, stack in layers.items():
        for number, tensor in enumerate(stack):
            request[f"{number}.{key}"] = ShardedTensor.from_rank_offsets(
                key, tensor.outline(), (0, number, len(stack)), prepend_axis_num=1
            )
            unread[key, (number, *(0,) * len(tensor.shape))] = tensor
    folder.mkdir(parents=True, exist_ok=True)
    PendingSave(request, folder, _ReadingPlanner(unread)).finish()
