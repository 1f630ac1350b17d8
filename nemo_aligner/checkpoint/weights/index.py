"""The index of a distributed checkpoint, read without running what anyone may have put into it.

``.metadata`` is a pickle, and torch reads it with ``pickle.load``. Here only the record types of
torch.distributed.checkpoint can be built, so a file that passes may be handed to torch afterwards.
What it hashes or calls with is bounded by ``pickles``.
"""

from __future__ import annotations

import pickle
from enum import Enum
from pathlib import Path, PurePosixPath
from types import FunctionType
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from nemo_aligner.checkpoint.weights.pickles import with_small_ones
from nemo_aligner.checkpoint.weights.private_names import PythonUnpickler
from nemo_aligner.errors import CheckpointError, short, shown

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
    """What ``getattr`` may do in an index: Python 3.11.0 to 3.11.3 write enum members with it."""
    if isinstance(owner, type) and issubclass(owner, Enum) and name in owner.__members__:
        return owner[name]
    raise pickle.UnpicklingError(f"it asks for attribute {shown(name)} of {shown(owner)}")


class _AllowListUnpickler(PythonUnpickler):
    dispatch = with_small_ones(PythonUnpickler.dispatch)
    for _code in (pickle.INST, pickle.OBJ, pickle.NEWOBJ_EX):  # no record is written with these
        del dispatch[_code[0]]

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
    path = folder / INDEX_NAME
    if not path.is_file():
        raise CheckpointError(
            f"{folder}: got no {INDEX_NAME} file, wanted a distributed checkpoint (torch_dist)"
        )
    try:
        with path.open("rb") as stream:
            metadata = _AllowListUnpickler(stream).load()
        _check_structure(metadata)
    except Exception as error:  # a broken pickle may raise anything, and lack anything
        raise CheckpointError(f"{path}: refused or unreadable: {short(error)}") from error
    _check_locations(path, metadata)
    return metadata


def _check_structure(metadata: Any) -> None:
    """Raise an exception of any kind where an index is not what its types promise."""
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
                raise ValueError(f"{shown(name)}: a shape has other than whole numbers")
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
