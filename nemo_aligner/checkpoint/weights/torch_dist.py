"""Weights that are stored as torch_dist: the pieces of all tensors in a few files, and an index."""

from __future__ import annotations

from collections.abc import Sequence
from io import BufferedReader
from pathlib import Path

from torch import Size, Tensor
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import ReadItem
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from nemo_aligner.checkpoint.weights.index import read_metadata
from nemo_aligner.checkpoint.weights.pieces import FileSlice, check_pieces, read_piece
from nemo_aligner.checkpoint.weights.tensor_store import TensorStore
from nemo_aligner.errors import CheckpointError, short

TORCH_DIST = "torch_dist"


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
            for item in items:
                self._read_item(item, target)
        except Exception as error:  # damaged data may raise anything
            raise CheckpointError(
                f"{self.folder}: {key}: cannot be read: {short(error)}"
            ) from error
        return sum(item.lengths.numel() for item in items)

    def _read_item(self, item: ReadItem, target: Tensor) -> None:
        info = (self._metadata.storage_data or {})[item.storage_index]
        if getattr(info, "transform_descriptors", None):
            raise ValueError("it is stored in another form than torch's own")
        stored = self._entries[item.storage_index.fqn].chunks[item.storage_index.index or 0]
        bounds = zip(item.dest_offsets, item.lengths, strict=True)
        box = target[tuple(slice(start, start + length) for start, length in bounds)]
        with (self.folder / info.relative_path).open("rb") as file:
            piece = BufferedReader(FileSlice(file, info.offset, info.offset + info.length))
            read_piece(piece, item.storage_offsets, stored.sizes, box)
