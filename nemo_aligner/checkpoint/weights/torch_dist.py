"""Reading of untrusted torch_dist checkpoints: a checked index, and shards that are whole."""

from __future__ import annotations

import math
import pickle
import sys
import zipfile
from collections import defaultdict
from collections.abc import Iterator, Sequence
from enum import Enum
from io import BufferedReader, BytesIO, RawIOBase
from pathlib import Path, PurePosixPath
from types import FunctionType
from typing import Any, BinaryIO

import torch
from torch import Size, Tensor
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import ReadItem
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from nemo_aligner.checkpoint.weights.safe_pickle import (
    Outline,
    PythonUnpickler,
    load_plain,
    outline_of,
    torch_archive,
    with_small_ones,
)
from nemo_aligner.checkpoint.weights.tensor_store import TensorStore, is_optimizer_state
from nemo_aligner.utils.errors import CheckpointError, short, shown

# The store: shards of all tensors in a few files, and an index.

TORCH_DIST = "torch_dist"


class TorchDistStore(TensorStore):
    """Weights as megatron-core and torch.distributed.checkpoint write them.

    A rank reads the shards that overlap its own tensors. megatron-core's load would read the index
    again, with ``pickle.load``.
    """

    def __init__(self, folder: Path) -> None:
        """Raises CheckpointError if the index is missing or unsafe."""
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
        check_shards(self.folder, self._metadata, read=read)

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
            shard = BufferedReader(FileSlice(file, info.offset, info.offset + info.length))
            read_shard(shard, item.storage_offsets, stored.sizes, box)


# The index.
#
# ``.metadata`` is a pickle that torch reads with ``pickle.load``. This unpickler builds only the
# record types of torch.distributed.checkpoint, so a file that passes may be handed to torch
# afterwards. Whatever it hashes or calls with is bounded by ``safe_pickle``.

INDEX_NAME = ".metadata"
_DCP = "torch.distributed.checkpoint"
_DTYPES = (
    "float64", "float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2",
    "int64", "int32", "int16", "int8", "uint8", "bool",
)  # fmt: skip
_ALLOWED = {
    f"{_DCP}.metadata": {
        "Metadata", "TensorStorageMetadata", "BytesStorageMetadata", "ChunkStorageMetadata",
        "TensorProperties", "MetadataIndex", "StorageMeta", "_MEM_FORMAT_ENCODING",
    },
    f"{_DCP}.planner": {
        "SavePlan", "WriteItem", "WriteItemType", "TensorWriteData", "BytesIOWriteData",
    },
    f"{_DCP}.filesystem": {"_StorageInfo", "_StoragePrefix"},
    "megatron.core.dist_checkpointing.strategies.torch": {"MCoreMetadata", "MCoreSavePlan"},
    "torch": {"Size", "device", "strided", "contiguous_format", "preserve_format", *_DTYPES},
    "torch.serialization": {"_get_layout"},
    "pathlib": {"PosixPath"},
    "pathlib._local": {"PosixPath"},
    "collections": {"OrderedDict"},
    "builtins": {"set"},
    "__builtin__": {"set"},
}  # fmt: skip


def _enum_member(owner: Any, name: Any) -> Any:
    """Stand-in for ``getattr``, with which Python 3.11.0 to 3.11.3 pickle enum members."""
    if isinstance(owner, type) and issubclass(owner, Enum) and name in owner.__members__:
        return owner[name]
    raise pickle.UnpicklingError(f"it asks for attribute {shown(name)} of {shown(owner)}")


class _AllowListUnpickler(PythonUnpickler):
    dispatch = with_small_ones(PythonUnpickler.dispatch)
    for _code in (pickle.INST, pickle.OBJ, pickle.NEWOBJ_EX):  # not used by any record
        del dispatch[_code[0]]

    def load_build(self) -> None:
        # A pickle may set attributes of objects that it made, but not of classes that it named.
        if isinstance(self.stack[-2], type | FunctionType):
            raise pickle.UnpicklingError(f"it changes {self.stack[-2]!r}")
        super().load_build()

    dispatch[pickle.BUILD[0]] = load_build

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in (("builtins", "getattr"), ("__builtin__", "getattr")):
            return _enum_member
        if name not in _ALLOWED.get(module, ()):
            raise pickle.UnpicklingError(f"it names {module}.{name}, which no checkpoint needs")
        return super().find_class(module, name)


def read_metadata(folder: Path) -> Metadata:
    """Read the index of the distributed checkpoint in ``folder``, checking that it is harmless.

    Raises:
        CheckpointError: there is no index, it holds more than an index needs, or it points to a
            file outside ``folder``.
    """
    path = folder / INDEX_NAME
    if not path.is_file():
        raise CheckpointError(
            f"{folder}: got no {INDEX_NAME} file, wanted a distributed checkpoint (torch_dist)"
        )
    try:
        with path.open("rb") as stream:
            metadata = _AllowListUnpickler(stream).load()
        _check_structure(metadata)
    except Exception as error:  # a broken pickle may raise anything
        raise CheckpointError(f"{path}: refused or unreadable: {short(error)}") from error
    _check_locations(path, metadata)
    return metadata


def _check_structure(metadata: Any) -> None:
    """Raise some exception if an index violates its own types."""
    if not isinstance(metadata, Metadata):
        raise TypeError(f"got {type(metadata).__name__}, wanted a checkpoint index")
    for name, entry in metadata.state_dict_metadata.items():
        _check_name(name)
        if isinstance(entry, TensorStorageMetadata):
            shapes = [entry.size]
            for chunk in entry.chunks:
                shapes += [chunk.offsets, chunk.sizes]
            dtype = entry.properties.dtype
            if not isinstance(dtype, torch.dtype):
                raise TypeError(f"{shown(name)}: got {type(dtype).__name__}, wanted a dtype")
            if any(type(number) is not int or number < 0 for shape in shapes for number in shape):
                raise ValueError(f"{shown(name)}: a shape has entries that are not integers")
    for index, info in (metadata.storage_data or {}).items():
        _check_name(index.fqn)
        numbers = info.offset, info.length
        if not isinstance(info.relative_path, str) or any(
            type(number) is not int or number < 0 for number in numbers
        ):
            got = ", ".join(type(value).__name__ for value in (info.relative_path, *numbers))
            raise ValueError(
                f"{shown(index.fqn)}: got {got}, wanted a file, an offset in it and a length"
            )


def _check_name(name: Any) -> None:
    if not isinstance(name, str):
        raise TypeError(f"got {type(name).__name__}, wanted the name of a tensor")


def _check_locations(path: Path, metadata: Metadata) -> None:
    for info in (metadata.storage_data or {}).values():
        name = info.relative_path
        if name in ("", ".", "..") or PurePosixPath(name).name != name:
            raise CheckpointError(f"{path}: the data file {shown(name)} is not in its folder")
        if (path.parent / name).is_symlink():
            raise CheckpointError(
                f"{path}: the data file {shown(name)} is a link, wanted a plain file"
            )


# Shards: whole, in bounds, undamaged.

_BLOCK_BYTES = 2**24
_STORAGES = {
    f"torch.{name}Storage": dtype
    for name, dtype in (
        ("Double", torch.float64), ("Float", torch.float32), ("Half", torch.float16),
        ("BFloat16", torch.bfloat16), ("Long", torch.int64), ("Int", torch.int32),
        ("Short", torch.int16), ("Char", torch.int8), ("Byte", torch.uint8), ("Bool", torch.bool),
    )
}  # fmt: skip


def check_shards(folder: Path, metadata: Metadata, *, read: bool) -> None:
    """Find missing or damaged shards before any tensor is used.

    The index must lay each tensor out without gaps, within its files. ``read`` also checks contents
    by the CRC-32 of each shard, which is a zip file of torch's. Optimizer state is skipped, because
    it is not read.

    Raises:
        CheckpointError: a shard is missing, cut off, of another size, or damaged.
    """
    shards = defaultdict(list)
    for name, entry in metadata.state_dict_metadata.items():
        if isinstance(entry, TensorStorageMetadata) and not is_optimizer_state(name):
            try:
                for info, least in _shards(metadata, name, entry):
                    shards[info.relative_path].append((info, least, name))
            except (KeyError, ValueError) as error:
                raise CheckpointError(f"{folder}: .metadata: {name}: {error}") from error
    for file, found in shards.items():
        _check_file(folder / file, found, read)


def _shards(
    metadata: Metadata, name: str, entry: TensorStorageMetadata
) -> Iterator[tuple[Any, int]]:
    """Yield where each shard of a tensor is stored, and the least bytes that it takes."""
    size, item = tuple(entry.size), entry.properties.dtype.itemsize
    volumes = []
    for chunk in entry.chunks:
        bounds = zip(chunk.offsets, chunk.sizes, size, strict=True)
        if any(start + length > whole for start, length, whole in bounds):
            raise ValueError(f"a shard of shape {tuple(chunk.sizes)} lies outside {size}")
        volumes.append(math.prod(chunk.sizes))
        info = (metadata.storage_data or {})[MetadataIndex(name, chunk.offsets)]
        if getattr(info, "transform_descriptors", None):
            raise ValueError("it is stored in another form than torch's own")
        yield info, volumes[-1] * item
    starts = {tuple(chunk.offsets) for chunk in entry.chunks}
    if len(starts) < len(volumes) or sum(volumes) != math.prod(size):
        raise ValueError(f"its shards do not make up its shape {size}")


def _check_file(path: Path, shards: list[tuple[Any, int, str]], read: bool) -> None:
    if not path.is_file():
        raise CheckpointError(f"{path}: no such file, wanted the data of {shards[0][2]}")
    end = 0
    with path.open("rb") as file:
        for info, least, name in sorted(shards, key=lambda shard: shard[0].offset):
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
                _check_shard(FileSlice(file, info.offset, end), where)


def _check_shard(stored: FileSlice, where: str) -> None:
    try:
        with zipfile.ZipFile(BufferedReader(stored)) as shard:
            if any(member.compress_type for member in shard.infolist()):
                raise ValueError("it is compressed, wanted torch's own form")
            damaged = shard.testzip()
    except (zipfile.BadZipFile, NotImplementedError, OSError, ValueError) as error:
        raise CheckpointError(f"{where}: damaged: {error}") from error
    if damaged is not None:
        raise CheckpointError(f"{where}: damaged: {damaged} has another CRC-32")


def read_shard(
    stored: BinaryIO, offsets: Sequence[int], shape: Sequence[int], target: Tensor
) -> None:
    """Copy a box of a shard into ``target``, reading only the rows of the box.

    Args:
        stored: the shard, as ``torch.save`` wrote it.
        offsets: of the box in the shard.
        shape: of the whole shard, by the index.
        target: of the box's shape, any dtype and any device.

    Raises:
        Exception: of many kinds, if the shard is damaged, has another shape, or would cost more to
            read than it should.
    """
    place = _place_of(stored, tuple(shape))
    if place is None:
        whole = load_plain(stored)
        if not isinstance(whole, Tensor) or whole.shape != torch.Size(shape):
            raise ValueError(f"got another shard than the index says, wanted {list(shape)}")
        target.copy_(whole[_slices(offsets, target.shape)])
        return
    start, dtype = place
    while target.dim() > 1 and target.size(0) == 1:  # one of stacked layers: narrow to its rows
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
    """Find the offset of a shard's data if it is contiguous, and its dtype.

    None for what torch must assemble: other byte orders, strides, or rare dtypes.
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
    """Bytes ``start`` to ``end`` of a file, as a file."""

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


# Plain data beside the tensors: in ``common.pt``, as NeMo, megatron-core up to 0.16 and this
# package write it. Since 0.17 megatron-core itself stores it among the tensors' shards.

COMMON_NAME = "common.pt"
# megatron-core's key for an object in a single shard: a list of one.
_AMONG_SHARDS = "common_state/shard_0_1"


def write_common(common: dict[str, Any], folder: Path) -> None:
    """Write ``common`` beside the tensors. Raises OSError if that fails."""
    torch.save(common, folder / COMMON_NAME)


def read_common(folder: Path) -> dict[str, Any]:
    """Read the plain data that ``folder`` holds beside tensors.

    megatron-core's list of safe classes counts as plain, ``argparse.Namespace`` among them.

    Raises:
        CheckpointError: it is missing or damaged, or would run code.
    """
    common = folder / COMMON_NAME
    if not common.exists() and (folder / INDEX_NAME).is_file():
        return _among_shards(folder)
    try:
        with common.open("rb") as stored:
            return _plain(stored, common)
    except OSError as error:
        raise CheckpointError(f"{common}: refused or unreadable: {short(error)}") from error


def _among_shards(folder: Path) -> dict[str, Any]:
    where = (read_metadata(folder).storage_data or {}).get(MetadataIndex(_AMONG_SHARDS))
    if where is None:
        raise CheckpointError(
            f"{folder}: got neither {COMMON_NAME} nor {_AMONG_SHARDS} in {INDEX_NAME}, "
            "wanted the plain data beside the tensors"
        )
    path = folder / where.relative_path
    try:
        with path.open("rb") as file:
            file.seek(where.offset)
            stored = file.read(where.length)
    except OSError as error:
        raise CheckpointError(f"{path}: {_AMONG_SHARDS}: cannot be read: {error}") from error
    found = _plain(BytesIO(stored), f"{path}: {_AMONG_SHARDS}")
    return found[0] if type(found) is list and len(found) == 1 else found


def _plain(stored: BinaryIO, name: Path | str) -> Any:
    try:
        return load_plain(stored)
    except Exception as error:
        raise CheckpointError(f"{name}: refused or unreadable: {short(error)}") from error
