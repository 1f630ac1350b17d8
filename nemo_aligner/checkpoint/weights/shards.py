"""Shards of the format torch_dist: find missing or damaged ones, and read parts of them.

The index and the files are not trusted. A shard is a zip file of ``torch.save``, and one of several
in its file.
"""

from __future__ import annotations

import math
import re
import sys
import zipfile
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from io import BufferedReader, RawIOBase
from itertools import product
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata

from nemo_aligner.checkpoint.safe_load import (
    INDEX_NAME,
    Outline,
    TorchFile,
    load_plain,
)
from nemo_aligner.utils.errors import CheckpointError

# Most axes of a tensor. The time of ``_are_tiling`` grows with 2 to the power of this number.
_MOST_AXES = 8
_BLOCK_BYTES = 2**24
_STORAGES = {
    f"torch.{name}Storage": dtype
    for name, dtype in (
        ("Double", torch.float64), ("Float", torch.float32), ("Half", torch.float16),
        ("BFloat16", torch.bfloat16), ("Long", torch.int64), ("Int", torch.int32),
        ("Short", torch.int16), ("Char", torch.int8), ("Byte", torch.uint8), ("Bool", torch.bool),
    )
}  # fmt: skip


def check_shards(
    folder: Path,
    metadata: Metadata,
    entries: Mapping[str, TensorStorageMetadata],
    *,
    read: bool,
    part: tuple[int, int] = (0, 1),
) -> None:
    """Find missing or damaged shards before any tensor is used.

    The shards in the index must cover each tensor without gaps or overlaps, and must lie within
    their files.

    Args:
        metadata: the index of the checkpoint in ``folder``.
        entries: what the index says about the tensors to check, by name.
        read: also read the shards, and compare their CRC-32; each is a zip file of ``torch.save``.
        part: (i, n): read only the i-th (from 0) of n parts of about equal size.

    Raises:
        CheckpointError: a shard is missing, misplaced or damaged.
    """
    shards = defaultdict(list)
    for name, entry in entries.items():
        try:
            for info, min_bytes in _locate_shards(metadata, name, entry):
                shards[info.relative_path].append((info, min_bytes, name))
        except ValueError as error:
            raise CheckpointError(f"{folder}: {INDEX_NAME}: {name}: {error}") from error
    sizes = {file: sum(info.length for info, *_ in stored) for file, stored in shards.items()}
    index, count = part
    total = sum(sizes.values())
    to_read = range(total * index // count, total * (index + 1) // count) if read else range(0)
    start = 0
    # Visit the files in the order of the ranks that wrote them. If the layout is unchanged, a rank
    # then checks the file that it loads next, so the page cache still holds it.
    for file in sorted(shards, key=_numeric_sort_key):
        _check_file(folder / file, shards[file], start, to_read)
        start += sizes[file]


def _numeric_sort_key(name: str) -> tuple[list[int], str]:
    """Return a sort key that orders names by their numbers: ``__2_0`` before ``__10_0``."""
    return [int(digits) for digits in re.findall("[0-9]{1,9}", name)], name


def _locate_shards(
    metadata: Metadata, name: str, entry: TensorStorageMetadata
) -> Iterator[tuple[Any, int]]:
    """Yield each shard's location (storage info), and its size in bytes without headers.

    Raises:
        ValueError: the index has no location of a shard, or the shards do not cover the tensor
            exactly once.
    """
    size, element_bytes = tuple(entry.size), entry.properties.dtype.itemsize
    boxes = [(tuple(chunk.offsets), tuple(chunk.sizes)) for chunk in entry.chunks]
    for offsets, lengths in boxes:
        ends = map(sum, zip(offsets, lengths, strict=True))
        if any(end > axis_size for end, axis_size in zip(ends, size, strict=True)):
            raise ValueError(
                f"a shard of shape {lengths} at {offsets} lies outside the tensor's shape {size}"
            )
        info = (metadata.storage_data or {}).get(MetadataIndex(name, offsets))
        if info is None:
            raise ValueError(f"the index does not say in which file the shard at {offsets} is")
        check_untransformed(info)
        yield info, math.prod(lengths) * element_bytes
    if not _are_tiling(boxes, size):
        raise ValueError(f"its shards overlap or do not cover its shape {size}")


def check_untransformed(info: Any) -> None:
    """Raise ValueError if a shard, with this storage info, is stored in a transformed form."""
    if getattr(info, "transform_descriptors", None):
        raise ValueError(
            "compressed or otherwise transformed data is not supported; save it untransformed"
        )


_Box = tuple[tuple[int, ...], tuple[int, ...]]


def _are_tiling(boxes: Sequence[_Box], size: tuple[int, ...]) -> bool:
    """Tell if ``boxes``, each its offsets and its lengths, cover a tensor's shape exactly once.

    Count the corners of all boxes, with a minus for every axis along which a corner is an end. The
    counts determine how often each element is covered, because they are its differences along all
    axes. So they equal those of the whole tensor exactly if every element is covered once.
    """
    if len(size) > _MOST_AXES:
        raise ValueError(f"got a shape of {len(size)} axes, wanted at most {_MOST_AXES}")
    corners: Counter[tuple[int, ...]] = Counter()
    for sign, (offsets, lengths) in ((-1, ((0,) * len(size), size)), *((1, box) for box in boxes)):
        for are_ends in product((False, True), repeat=len(size)):
            corner = tuple(
                offset + length * is_end
                for offset, length, is_end in zip(offsets, lengths, are_ends, strict=True)
            )
            corners[corner] += sign * (-1) ** sum(are_ends)
    return not any(corners.values())


def _check_file(path: Path, shards: list[tuple[Any, int, str]], start: int, to_read: range) -> None:
    """Check that a file's shards lie within it, and read those that begin in ``to_read``.

    Args:
        shards: each shard's location (storage info), minimal size in bytes, and tensor's name.
        start: number of bytes in the shards of all files that were checked before.
        to_read: range of bytes to read, counted over the shards of all files.
    """
    if not path.is_file():
        raise CheckpointError(f"{path}: no such file, but the index places {shards[0][2]} in it")
    end = 0
    with path.open("rb") as file:
        for info, min_bytes, name in sorted(shards, key=lambda shard: shard[0].offset):
            location = f"{path}: {name}"
            # Reject overlaps, which could make this check read the same bytes thousands of times.
            if info.offset < end or min_bytes > info.length:
                raise CheckpointError(
                    f"{location}: got {info.length} bytes at offset {info.offset}, wanted at least "
                    f"{min_bytes} bytes, at offset {end} or later"
                )
            end = info.offset + info.length
            if end > path.stat().st_size:
                raise CheckpointError(
                    f"{location}: the file ends at {path.stat().st_size}, wanted {end} bytes"
                )
            if start in to_read:
                check_zip(FileSlice(file, info.offset, end), location)
            start += info.length


def check_zip(stored: RawIOBase, location: str) -> None:
    """Check the CRC-32 sums in a zip file of ``torch.save``; errors begin with ``location``."""
    try:
        with zipfile.ZipFile(BufferedReader(stored)) as shard:
            # Reject compressed members: testzip() would decompress them to whatever size.
            if any(member.compress_type for member in shard.infolist()):
                raise ValueError("it is compressed; torch.save writes uncompressed files")
            damaged = shard.testzip()
    except (zipfile.BadZipFile, NotImplementedError, OSError, ValueError) as error:
        raise CheckpointError(f"{location}: damaged: {error}") from error
    if damaged is not None:
        raise CheckpointError(f"{location}: damaged: the CRC-32 of {damaged} does not match")


def read_shard(
    stored: BinaryIO, offsets: Sequence[int], shape: Sequence[int], target: Tensor
) -> None:
    """Copy a part of a shard into ``target``, reading only the rows that have the part.

    Args:
        stored: the shard, as ``torch.save`` wrote it.
        offsets: index of the part's first element in the shard, one number for each axis.
        shape: shape of the whole shard, according to the index.
        target: tensor of the part's shape, with any dtype and on any device.

    Raises:
        Exception: of many types, if the shard is damaged, has another shape, or would take too much
            time or memory to read.
    """
    location = _locate_data(stored, tuple(shape))
    if location is None:
        shard = load_plain(stored)
        if not isinstance(shard, Tensor) or shard.shape != torch.Size(shape):
            raise ValueError(f"got no tensor of shape {list(shape)}, which the index promises")
        target.copy_(shard[slices_of(offsets, target.shape)])
        return
    start, dtype = location
    # If the target is one layer of a stack, narrow the shard to it, to read only its rows.
    while target.dim() > 1 and target.size(0) == 1:
        start += offsets[0] * math.prod(shape[1:]) * dtype.itemsize
        shape, offsets, target = shape[1:], offsets[1:], target[0]
    if target.dim() == 0:
        shape, offsets, target = (1,), (0,), target.view(1)
    row, inside = math.prod(shape[1:]) * dtype.itemsize, slices_of(offsets[1:], target.shape[1:])
    stored.seek(start + offsets[0] * row)
    for rows in target.split(max(1, _BLOCK_BYTES // max(1, row))) if target.numel() else ():
        # Read the rows in blocks, so that a target on a GPU does not need a copy of the whole shard
        # on the host.
        content = bytearray(rows.size(0) * row)
        if stored.readinto(content) != len(content):  # type: ignore[attr-defined]
            raise ValueError("the file ends before the data does: copy the checkpoint again")
        block = torch.frombuffer(content, dtype=dtype).view(rows.size(0), *shape[1:])
        rows.copy_(block[(slice(None), *inside)])


def slices_of(offsets: Sequence[int], lengths: Sequence[int]) -> tuple[slice, ...]:
    """Return the slices that select ``lengths`` elements of each axis, from ``offsets`` on."""
    bounds = zip(offsets, lengths, strict=True)
    return tuple(slice(start, start + length) for start, length in bounds)


def _locate_data(stored: BinaryIO, shape: tuple[int, ...]) -> tuple[int, torch.dtype] | None:
    """Find the offset in bytes and the dtype of a shard's data, if the data is contiguous.

    Return None if only torch can load the shard, as its byte order, strides or dtype are unusual.
    """
    file = TorchFile(stored)
    outline = file.read_outline()
    if not isinstance(outline, Outline) or outline.name != "torch._utils._rebuild_tensor_v2()":
        return None
    storage, first, size, stride, *_ = outline.parts
    # In torch.save, a storage has: "storage", its class, its key in the zip, a device, its size.
    _, storage_class, key, *_ = storage.parts[0]
    dtype = _STORAGES.get(getattr(storage_class, "name", ""))
    row_by_row = tuple(math.prod(shape[axis + 1 :]) for axis in range(len(shape)))
    if (
        dtype is None
        or (size, stride) != (shape, row_by_row)
        or not file.has_record("byteorder")
        or file.read_record("byteorder") != sys.byteorder.encode()
    ):
        return None
    if type(first) is not int or first < 0:
        raise ValueError(f"its tensor begins at element {first!r} of its storage, wanted 0 or more")
    start, stored_bytes = file.locate_record(f"data/{key}")
    if (first + math.prod(shape)) * dtype.itemsize > stored_bytes:
        raise ValueError(f"it stores fewer elements than its shape {list(shape)} needs")
    return start + first * dtype.itemsize, dtype


class FileSlice(RawIOBase):
    """A file object that reads only the bytes ``start`` to ``end`` of another file."""

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
