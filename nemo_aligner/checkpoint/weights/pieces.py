"""The pieces that a distributed checkpoint's tensors are stored in: whole, in bounds, undamaged."""

from __future__ import annotations

import math
import sys
import zipfile
from collections import defaultdict
from collections.abc import Iterator, Sequence
from io import BufferedReader, RawIOBase
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata

from nemo_aligner.checkpoint.weights.pickles import Outline, load_plain, outline_of
from nemo_aligner.checkpoint.weights.private_names import torch_archive
from nemo_aligner.checkpoint.weights.tensor_store import is_optimizer_state
from nemo_aligner.errors import CheckpointError

_BLOCK_BYTES = 2**24
_STORAGES = {
    f"torch.{name}Storage": dtype
    for name, dtype in (
        ("Double", torch.float64), ("Float", torch.float32), ("Half", torch.float16),
        ("BFloat16", torch.bfloat16), ("Long", torch.int64), ("Int", torch.int32),
        ("Short", torch.int16), ("Char", torch.int8), ("Byte", torch.uint8), ("Bool", torch.bool),
    )
}  # fmt: skip


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
                _check_piece(FileSlice(file, info.offset, end), where)


def _check_piece(stored: FileSlice, where: str) -> None:
    try:
        with zipfile.ZipFile(BufferedReader(stored)) as piece:
            if any(member.compress_type for member in piece.infolist()):
                raise ValueError("it is compressed, wanted torch's own form")
            damaged = piece.testzip()
    except (zipfile.BadZipFile, NotImplementedError, OSError, ValueError) as error:
        raise CheckpointError(f"{where}: damaged: {error}") from error
    if damaged is not None:
        raise CheckpointError(f"{where}: damaged: {damaged} has another CRC-32")


def read_piece(
    stored: BinaryIO, offsets: Sequence[int], shape: Sequence[int], target: Tensor
) -> None:
    """Copy a box of a piece into ``target``; of the file no other rows are read than the box's.

    Args:
        stored: the piece, as ``torch.save`` wrote it.
        offsets: where in the piece the box begins.
        shape: of the whole piece, by the index.
        target: of the box's shape, any dtype and any device.

    Raises:
        Exception: of many kinds, where the piece is damaged, has another shape, or would cost more
            to read than it should.
    """
    place = _place_of(stored, tuple(shape))
    if place is None:
        whole = load_plain(stored)
        if not isinstance(whole, Tensor) or whole.shape != torch.Size(shape):
            raise ValueError(f"got another piece than the index says, wanted {list(shape)}")
        target.copy_(whole[_slices(offsets, target.shape)])
        return
    start, dtype = place
    while target.dim() > 1 and target.size(0) == 1:  # one of stacked layers: its rows
        start += offsets[0] * math.prod(shape[1:]) * dtype.itemsize
        shape, offsets, target = shape[1:], offsets[1:], target[0]
    if target.dim() == 0:
        shape, offsets, target = (1,), (0,), target.view(1)
    row, inside = math.prod(shape[1:]) * dtype.itemsize, _slices(offsets[1:], target.shape[1:])
    stored.seek(start + offsets[0] * row)
    for rows in target.split(max(1, _BLOCK_BYTES // max(1, row))) if target.numel() else ():
        content = bytearray(rows.size(0) * row)
        if stored.readinto(content) != len(content):  # type: ignore[attr-defined]
            raise ValueError("the file ends within it")
        block = torch.frombuffer(content, dtype=dtype).view(rows.size(0), *shape[1:])
        rows.copy_(block[(slice(None), *inside)])


def _slices(offsets: Sequence[int], lengths: Sequence[int]) -> tuple[slice, ...]:
    bounds = zip(offsets, lengths, strict=True)
    return tuple(slice(start, start + length) for start, length in bounds)


def _place_of(stored: BinaryIO, shape: tuple[int, ...]) -> tuple[int, torch.dtype] | None:
    """Where in a piece its numbers begin, if they lie row by row, and their dtype.

    None for what torch has to put together: of another byte order, with holes, of a rare dtype.
    """
    found = outline_of(stored)
    if not isinstance(found, Outline) or found.name != "torch._utils._rebuild_tensor_v2()":
        return None
    storage, first, size, stride, *_ = found.parts
    _, of_type, key, *_ = storage.parts[0]
    dtype = _STORAGES.get(getattr(of_type, "name", ""))
    archive, name = torch_archive(stored), f"data/{key}"
    row_by_row = tuple(math.prod(shape[axis + 1 :]) for axis in range(len(shape)))
    if (
        dtype is None
        or (size, stride) != (shape, row_by_row)
        or not archive.has_record("byteorder")
        or archive.get_record("byteorder") != sys.byteorder.encode()
    ):
        return None
    if type(first) is not int or first < 0:
        raise ValueError("it begins before its own numbers")
    if (first + math.prod(shape)) * dtype.itemsize > archive.get_record_size(name):
        raise ValueError(f"it has fewer numbers than {list(shape)} takes")
    return archive.get_record_offset(name) + first * dtype.itemsize, dtype


class FileSlice(RawIOBase):
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
