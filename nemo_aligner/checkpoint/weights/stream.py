"""Tensors into and out of a distributed checkpoint one at a time, for a conversion."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as torch_checkpoint
from megatron.core.dist_checkpointing.mapping import ShardedTensor
from megatron.core.dist_checkpointing.strategies.torch import MCoreSavePlanner
from torch import Tensor
from torch.distributed._shard._utils import narrow_tensor_by_index
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, ReadItem
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from nemo_aligner.checkpoint.weights import zarr as zarr_weights
from nemo_aligner.checkpoint.weights.index import read_metadata
from nemo_aligner.checkpoint.weights.torch_dist import PLANNING, ZARR, PendingSave, read_format
from nemo_aligner.errors import CheckpointError


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


class _IntoTensor(torch_checkpoint.DefaultLoadPlanner):
    def __init__(self, target: Tensor) -> None:
        super().__init__()
        self._target = target

    def resolve_tensor(self, read_item: ReadItem) -> Tensor:
        return narrow_tensor_by_index(self._target, read_item.dest_offsets, read_item.lengths)

    def commit_tensor(self, read_item: ReadItem, tensor: Tensor) -> None:
        pass  # it was read in place


class TensorReader:
    """Reads tensors of the checkpoint in ``folder`` one by one, as they are stored.

    torch_dist or zarr. megatron-core itself would load all layers.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._metadata = None if read_format(folder) == ZARR else read_metadata(folder)

    def read(self, key: str, layer: int | None = None) -> Tensor:
        """The tensor ``key``; of stacked layers, one layer's.

        Raises:
            CheckpointError: there is none, or the data is damaged.
        """
        if self._metadata is None:
            return zarr_weights.read(self._folder, key, layer)
        entry = self._metadata.state_dict_metadata.get(key)
        if not isinstance(entry, TensorStorageMetadata):
            raise CheckpointError(f"{self._folder}: the tensor {key} is missing")
        offsets, sizes = [0] * len(entry.size), list(entry.size)
        if layer is not None:
            offsets[0], sizes[0] = layer, 1
        wanted = ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes))
        items = create_read_items_for_chunk_list(key, entry, [wanted])
        target = torch.empty(sizes, dtype=entry.properties.dtype)
        if sum(item.lengths.numel() for item in items) != target.numel():
            raise CheckpointError(f"{self._folder}: {key}: got a part of it, wanted the whole")
        reader = torch_checkpoint.FileSystemReader(self._folder)
        reader.set_up_storage_reader(self._metadata, is_coordinator=True)
        try:
            reader.read_data(LoadPlan(items), _IntoTensor(target)).wait()
        except Exception as error:  # damaged data may raise anything
            raise CheckpointError(f"{self._folder}: {key}: cannot be read: {error}") from error
        return target if layer is None else target[0]
