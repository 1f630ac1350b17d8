"""The pieces that a distributed checkpoint's tensors are stored in: whole, in bounds, undamaged."""

from __future__ import annotations

import math
import zipfile
from collections import defaultdict
from collections.abc import Iterator
from io import BufferedReader, RawIOBase
from pathlib import Path
from typing import Any, BinaryIO

from torch.distributed.checkpoint.metadata import (
    Metadata,
    MetadataIndex,
    TensorStorageMetadata,
)

from nemo_aligner.checkpoint.weights.tensor_store import is_optimizer_state
from nemo_aligner.errors import CheckpointError


def check_pieces(folder: Path, metadata: Metadata, *, read: bool) -> None:
    """Find what is missing or damaged before any tensor is used.

    The index has to lay each tensor out without a gap, inside its files. To ``read`` is to compare
    content, too: each piece is a zip file of torch's, which has a CRC-32. Optimizer state is left
    out: it is never read.

    Raises:
        CheckpointError: a piece is missing, cut off, of another size, or damaged.
    """
    pieces = defaultdict(list)
    for name, entry in metadata.state_dict_metadata.items():
        if isinstance(entry, TensorStorageMetadata) and not is_optimizer_state(name):
            try:
                for info, least in _pieces(metadata, name, entry):
                    pieces[info.relative_path].append((info, least, name))
            except (KeyError, ValueError) as error:
                raise CheckpointError(f"{folder}: .metadata: {name}: {error}") from error
    for file, found in pieces.items():
        _check_file(folder / file, found, read)


def _pieces(
    metadata: Metadata, name: str, entry: TensorStorageMetadata
) -> Iterator[tuple[Any, int]]:
    """Where each piece of a tensor is stored, and the least bytes that it takes."""
    size, item = tuple(entry.size), entry.properties.dtype.itemsize
    volumes = []
    for chunk in entry.chunks:
        bounds = zip(chunk.offsets, chunk.sizes, size, strict=True)
        if any(start + length > whole for start, length, whole in bounds):
            raise ValueError(f"a piece of shape {tuple(chunk.sizes)} lies outside {size}")
        volumes.append(math.prod(chunk.sizes))
        info = (metadata.storage_data or {})[MetadataIndex(name, chunk.offsets)]
        if getattr(info, "transform_descriptors", None):
            raise ValueError("it is stored in another form than torch's own")
        yield info, volumes[-1] * item
    starts = {tuple(chunk.offsets) for chunk in entry.chunks}
    if len(starts) < len(volumes) or sum(volumes) != math.prod(size):
        raise ValueError(f"its pieces do not make up its shape {size}")


def _check_file(path: Path, pieces: list[tuple[Any, int, str]], read: bool) -> None:
    if not path.is_file():
        raise CheckpointError(f"{path}: no such file, wanted the data of {pieces[0][2]}")
    end = 0
    with path.open("rb") as file:
        for info, least, name in sorted(pieces, key=lambda piece: piece[0].offset):
            where = f"{path}: {name}"
            if info.offset < end or least > info.length:
                raise CheckpointError(
                    f"{where}: got {info.length} bytes at {info.offset}, wanted at least {least} "
                    f"from {end} on"
                )
            end = info.offset + info.length
            if end > path.stat().st_size:
                raise CheckpointError(
                    f"{where}: the file ends at {path.stat().st_size}, wanted {end} bytes"
                )
            if read:
                _check_piece(_FileSlice(file, info.offset, end), where)


def _check_piece(stored: _FileSlice, where: str) -> None:
    try:
        with zipfile.ZipFile(BufferedReader(stored)) as piece:
            if any(member.compress_type for member in piece.infolist()):
                raise ValueError("it is compressed, wanted torch's own form")
            damaged = piece.testzip()
    except (zipfile.BadZipFile, NotImplementedError, OSError, ValueError) as error:
        raise CheckpointError(f"{where}: damaged: {error}") from error
    if damaged is not None:
        raise CheckpointError(f"{where}: damaged: {damaged} has another CRC-32")


class _FileSlice(RawIOBase):
    """The bytes ``start`` to ``end`` of a file, as a file."""

    def __init__(self, file: BinaryIO, start: int, end: int) -> None:
        self._file, self._start, self._size = file, start, end - start
        self._position = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = 0) -> int:
        self._position = max(0, offset + (0, self._position, self._size)[whence])
        return self._position

    def readinto(self, buffer: Any) -> int:
        self._file.seek(self._start + self._position)
        block = self._file.read(min(len(buffer), max(0, self._size - self._position)))
        buffer[: len(block)] = block
        self._position += len(block)
        return len(block)
