"""The index of a distributed checkpoint, read without running what a stranger may have put into it.

``.metadata`` is a pickle, and torch reads it with ``pickle.load``. Here only the record types of
torch.distributed.checkpoint can be built, so a file that passes may be handed to torch afterwards.
"""

from __future__ import annotations

import math
import pickle
import re
import zipfile
from collections import defaultdict
from collections.abc import Iterator
from enum import Enum
from io import BufferedReader, RawIOBase
from pathlib import Path, PurePosixPath
from types import FunctionType
from typing import Any, BinaryIO

import torch
from torch.distributed.checkpoint.metadata import (
    Metadata,
    MetadataIndex,
    TensorStorageMetadata,
)

from nemo_aligner.errors import CheckpointError

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
    """What ``getattr`` may do in an index: Python 3.11.0 to 3.11.3 write enum members with it."""
    if isinstance(owner, type) and issubclass(owner, Enum) and name in owner.__members__:
        return owner[name]
    raise pickle.UnpicklingError(f"it asks for attribute {name!r} of {owner!r}")


# The C one gives no say in what may be changed.
_PythonUnpickler: Any = pickle._Unpickler  # type: ignore[attr-defined]


class _AllowListUnpickler(_PythonUnpickler):
    dispatch = dict(_PythonUnpickler.dispatch)  # noqa: RUF012

    def load_build(self) -> None:
        # A pickle may set attributes of what it made, but not of the classes it named.
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
    """The index of the distributed checkpoint in ``folder``, once it is known to be harmless.

    Raises:
        CheckpointError: there is no index, it holds more than an index needs, or it points to a
            file outside ``folder``.
    """
    path = folder / ".metadata"
    if not path.is_file():
        raise CheckpointError(
            f"{folder}: got no .metadata file, wanted a distributed checkpoint (torch_dist)"
        )
    try:
        with path.open("rb") as stream:
            metadata = _AllowListUnpickler(stream).load()
        _check_structure(metadata)
    except Exception as error:  # a broken pickle may raise anything, and lack anything
        raise CheckpointError(f"{path}: refused or unreadable: {error}") from error
    _check_locations(path, metadata)
    return metadata


def _check_structure(metadata: Any) -> None:
    """Raise an exception of any kind where an index is not what its types promise."""
    if not isinstance(metadata, Metadata):
        raise TypeError(f"got {type(metadata).__name__}, wanted a checkpoint index")
    for name, entry in metadata.state_dict_metadata.items():
        if isinstance(entry, TensorStorageMetadata):
            shapes = [entry.size]
            for chunk in entry.chunks:
                shapes += [chunk.offsets, chunk.sizes]
            if not isinstance(entry.properties.dtype, torch.dtype) or not isinstance(name, str):
                raise TypeError(f"{name!r}: got {entry.properties.dtype!r}, wanted a dtype")
            if any(type(number) is not int or number < 0 for shape in shapes for number in shape):
                raise ValueError(f"{name}: a shape has other than whole numbers")
    for index, info in (metadata.storage_data or {}).items():
        place = info.relative_path, info.offset, info.length
        if not isinstance(place[0], str) or any(type(n) is not int or n < 0 for n in place[1:]):
            raise ValueError(f"{index}: got {place}, wanted a file, a place in it and a length")


def _check_locations(path: Path, metadata: Metadata) -> None:
    for info in (metadata.storage_data or {}).values():
        name = info.relative_path
        if name in ("", ".", "..") or PurePosixPath(name).name != name:
            raise CheckpointError(f"{path}: the data file {name!r} is not in its folder")
        if (path.parent / name).is_symlink():
            raise CheckpointError(f"{path}: the data file {name!r} is a link, wanted a plain file")


def stored_tensors(folder: Path) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """Name -> (global shape, dtype) of every tensor in a distributed checkpoint."""
    return {
        name: (tuple(entry.size), entry.properties.dtype)
        for name, entry in read_metadata(folder).state_dict_metadata.items()
        if isinstance(entry, TensorStorageMetadata)
    }


def check_data(folder: Path, *, read: bool) -> None:
    """Find what is missing or damaged before any tensor is used.

    The index has to lay each tensor out without a gap, inside its files. To ``read`` is to compare
    content, too: each piece is a zip file of torch's, which has a CRC-32. Optimizer state is left
    out: it is never read.

    Raises:
        CheckpointError: a piece is missing, cut off, of another size, or damaged.
    """
    metadata = read_metadata(folder)
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


def is_optimizer_state(name: str) -> bool:
    """Whether a stored tensor is an optimizer's, as Megatron names them."""
    return re.match(r"(chained_\d+\.)?optimizer\.", name) is not None


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
                _check_piece(_Part(file, info.offset, end), where)


def _check_piece(part: _Part, where: str) -> None:
    try:
        with zipfile.ZipFile(BufferedReader(part)) as piece:
            if any(member.compress_type for member in piece.infolist()):
                raise ValueError("it is compressed, wanted torch's own form")
            damaged = piece.testzip()
    except (zipfile.BadZipFile, NotImplementedError, OSError, ValueError) as error:
        raise CheckpointError(f"{where}: damaged: {error}") from error
    if damaged is not None:
        raise CheckpointError(f"{where}: damaged: {damaged} has another CRC-32")


class _Part(RawIOBase):
    """The bytes ``start`` to ``end`` of a file, as a file."""

    def __init__(self, file: BinaryIO, start: int, end: int) -> None:
        self._file, self._start, self._size = file, start, end - start
        self._place = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = 0) -> int:
        self._place = max(0, offset + (0, self._place, self._size)[whence])
        return self._place

    def readinto(self, buffer: Any) -> int:
        self._file.seek(self._start + self._place)
        block = self._file.read(min(len(buffer), max(0, self._size - self._place)))
        buffer[: len(block)] = block
        self._place += len(block)
        return len(block)
