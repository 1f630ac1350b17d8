"""Weights that are stored as torch_dist: the pieces of all tensors in a few files, and an index."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch.distributed.checkpoint as torch_checkpoint
from torch import Size, Tensor
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadPlan, ReadItem
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from nemo_aligner.checkpoint.weights.index import read_metadata
from nemo_aligner.checkpoint.weights.pieces import check_pieces
from nemo_aligner.checkpoint.weights.tensor_store import TensorStore
from nemo_aligner.errors import CheckpointError

FORMAT = "torch_dist"


class TorchDistStore(TensorStore):
    """Weights as megatron-core and torch.distributed.checkpoint write them.

    A rank reads the pieces that its own tensors lie in. megatron-core's load would read the index
    again, with ``pickle.load``.
    """

    def __init__(self, folder: Path) -> None:
        """Raises CheckpointError where the index is missing, or may be harmful."""
        self._metadata = read_metadata(folder)
        self._entries = {
            name: entry
            for name, entry in self._metadata.state_dict_metadata.items()
            if isinstance(entry, TensorStorageMetadata)
        }
        super().__init__(
            folder,
            {
                name: (tuple(entry.size), entry.properties.dtype)
                for name, entry in self._entries.items()
            },
        )

    def check_data(self, *, read: bool) -> None:
        check_pieces(self.folder, self._metadata, read=read)

    def read_into(self, target: Tensor, key: str, offsets: Sequence[int]) -> int:
        wanted = ChunkStorageMetadata(Size(offsets), target.size())
        try:
            items = create_read_items_for_chunk_list(key, self._entries[key], [wanted])
            reader = torch_checkpoint.FileSystemReader(self.folder)
            reader.set_up_storage_reader(self._metadata, is_coordinator=True)
            reader.read_data(LoadPlan(items), _IntoTensor(target)).wait()
        except Exception as error:  # damaged data may raise anything
            raise CheckpointError(f"{self.folder}: {key}: cannot be read: {error}") from error
        return sum(item.lengths.numel() for item in items)


class _IntoTensor(torch_checkpoint.DefaultLoadPlanner):
    def __init__(self, target: Tensor) -> None:
        super().__init__()
        self._target = target

    def resolve_tensor(self, read_item: ReadItem) -> Tensor:
        bounds = zip(read_item.dest_offsets, read_item.lengths, strict=True)
        return self._target[tuple(slice(start, start + length) for start, length in bounds)]

    def commit_tensor(self, read_item: ReadItem, tensor: Tensor) -> None:
        pass  # it was read in place
