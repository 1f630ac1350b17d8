"""Untrusted files, read as plain data at bounded cost.

Text, YAML and JSON; pickles, such as every file of ``torch.save``; and the index of a distributed
checkpoint, which is one, too.
"""

from __future__ import annotations

import json
import pickle
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from enum import Enum
from io import BytesIO
from pathlib import Path, PurePosixPath
from types import FunctionType
from typing import Any, BinaryIO

import torch
import yaml
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from nemo_aligner.utils.errors import CheckpointError, first_line, short, shown

# Text, YAML and JSON.

# A model's settings have some hundred values, and a scoring contract a template of a few kB.
MAX_TEXT_BYTES = 2**20
_MAX_NODES = 100_000
_MAX_DEPTH = 50
_MAX_DIGITS = 400


def read_yaml(path: Path, where: str | None = None) -> dict[str, Any]:
    """Read a YAML file that holds one mapping, with few aliases.

    Args:
        where: name of the file in errors; None is its path.

    Raises:
        CheckpointError: it is missing, too large, no mapping, or has tags that name code.
    """
    text, where = read_text(path, where), where or str(path)
    try:
        # Composed first: safe_load would unfold aliases of aliases to any size.
        node = yaml.compose(text, Loader=yaml.SafeLoader)
        if node is not None:
            _check_size(node, where)
        content = yaml.safe_load(text)
    except (yaml.YAMLError, ValueError, TypeError, RecursionError, AttributeError) as error:
        raise CheckpointError(f"{where}: {_first_line(error)}") from error
    return _mapping(content, where)


def read_json(path: Path, where: str | None = None) -> dict[str, Any]:
    """Read a JSON file that holds one object; raises as ``read_yaml`` does."""
    return parse_json(read_text(path, where), where or str(path))


def parse_json(text: str, where: str) -> dict[str, Any]:
    """Parse a JSON object; CheckpointError begins with ``where``."""
    try:
        content = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{where}: {_first_line(error)}") from error
    # A value that is nested so deep breaks whoever walks or prints it later.
    _check_depth(content, where)
    return _mapping(content, where)


def read_text(path: Path, where: str | None = None) -> str:
    """Read a small UTF-8 file; raises as ``read_yaml`` does."""
    where = where or str(path)
    if not path.is_file():
        raise CheckpointError(f"{where}: no such file")
    if path.stat().st_size > MAX_TEXT_BYTES:
        raise CheckpointError(
            f"{where}: got {path.stat().st_size} bytes, wanted at most {MAX_TEXT_BYTES}"
        )
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{where}: {error}") from error


def _mapping(content: Any, where: str) -> dict[str, Any]:
    if not isinstance(content, dict):
        raise CheckpointError(f"{where}: got {type(content).__name__}, wanted a mapping")
    return content


def _check_depth(content: Any, where: str, depth: int = 0) -> None:
    if depth > _MAX_DEPTH:
        raise CheckpointError(f"{where}: nested deeper than {_MAX_DEPTH}")
    if isinstance(content, dict | list):
        for part in content.values() if isinstance(content, dict) else content:
            _check_depth(part, where, depth + 1)


def _check_size(root: yaml.Node, where: str) -> None:
    """Refuse aliases that expand to more nodes than a config needs, or form a cycle."""
    sizes: dict[int, int] = {}

    def size(node: yaml.Node, depth: int) -> int:
        if depth > _MAX_DEPTH:
            raise CheckpointError(f"{where}: nested deeper than {_MAX_DEPTH}, or within itself")
        if id(node) not in sizes:
            is_leaf = isinstance(node, yaml.ScalarNode)
            if is_leaf and node.tag.endswith(":int") and len(node.value) > _MAX_DIGITS:
                raise CheckpointError(f"{where}: a number of {len(node.value)} digits")
            parts = [] if is_leaf else node.value
            pairs = (part if isinstance(part, tuple) else (part,) for part in parts)
            # Long texts count by their length: an alias may repeat them, too.
            own = 1 + (len(node.value) // 10 if is_leaf else 0)
            sizes[id(node)] = own + sum(size(child, depth + 1) for pair in pairs for child in pair)
        return sizes[id(node)]

    if size(root, 0) > _MAX_NODES:
        raise CheckpointError(f"{where}: it unfolds to more than {_MAX_NODES} values")


def _first_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {first_line(error)}"


# Pickles. One can refer to an object many times: nested tuples make a key of a few bytes that takes
# hours to hash or to print, in torch's weights-only loader, too. So whatever is hashed, called with
# or printed must be small, counting an object as often as it is referred to.

# The C unpickler does not let a subclass override opcodes.
_PythonUnpickler: Any = pickle._Unpickler  # type: ignore[attr-defined]


def torch_archive(stored: BinaryIO) -> Any:
    """Open a zip file of ``torch.save`` with the reader that ``torch.load`` uses.

    Python's zipfile may pick another member of the same name, and does not tell its offset.
    """
    stored.seek(0)
    return torch._C.PyTorchFileReader(stored)


def record_size(stored: BinaryIO, archive: Any, name: str) -> int:
    """Bytes of the record ``name`` of ``torch_archive(stored)``.

    Its ``get_record_size`` is new in torch 2.12.
    """
    start = archive.get_record_header_offset(name)
    members = zipfile.ZipFile(stored).infolist()
    return next(member.file_size for member in members if member.header_offset == start)


_MOST_PARTS = 10_000  # of a key or of arguments, which have about a dozen
_MOST_IN_ALL = 1_000_000  # of all that a file holds beside tensors
_PICKLE_NAME = "data.pkl"
_ZIP_BEGINS = b"PK\x03\x04"


def _check_small(value: Any, most: int = _MOST_PARTS, what: str = "a key or an argument") -> None:
    """Raise UnpicklingError if ``value`` has more than ``most`` parts.

    A part counts as often as it is referred to; a text or bytes count their length.
    """
    waiting, parts = [value], 0
    while waiting:
        one = waiting.pop()
        # No recursion: an object that is nested deep enough would end the process.
        inside: Any = ()
        if isinstance(one, dict):
            inside = [*one, *one.values()]
        elif isinstance(one, tuple | list | set | frozenset):
            inside = one
        # Classes and functions are ours or torch's, and their insides no part of the file.
        elif not isinstance(one, type | FunctionType | Enum):
            inside = getattr(one, "__dict__", {}).values()
        parts += 1 + len(inside) + (len(one) if isinstance(one, str | bytes) else 0)
        if parts > most:
            raise pickle.UnpicklingError(f"it has {what} of more than {most} parts")
        waiting += inside


# Operands on the stack that an opcode hashes, or that its errors may print.
_KEYS_AND_ARGUMENTS: dict[bytes, Callable[[list[Any]], list[Any]]] = {
    pickle.SETITEM: lambda stack: stack[-2:-1],
    pickle.SETITEMS: lambda stack: stack[::2],
    pickle.DICT: lambda stack: stack[::2],
    pickle.ADDITEMS: list,
    pickle.FROZENSET: list,
    pickle.REDUCE: lambda stack: stack[-2:],
    pickle.NEWOBJ: lambda stack: stack[-2:],
    pickle.BINPERSID: lambda stack: stack[-1:],
}


def _of_small_ones(
    load: Callable[[Any], None], taken: Callable[[list[Any]], list[Any]]
) -> Callable[[Any], None]:
    def checked(unpickler: Any) -> None:
        for value in taken(unpickler.stack):
            _check_small(value)
        load(unpickler)

    return checked


def _with_small_ones(dispatch: dict[int, Callable[[Any], None]]) -> dict[int, Any]:
    """Wrap an unpickler's ``dispatch`` to refuse large keys and arguments before using them."""
    bounded = {
        code[0]: _of_small_ones(dispatch[code[0]], taken)
        for code, taken in _KEYS_AND_ARGUMENTS.items()
        if code[0] in dispatch
    }
    return {**dispatch, **bounded}


@dataclass(eq=False)
class Outline:
    """Stand-in for an object that a pickle asks for and that is not built.

    Attributes:
        name: of a global, such as ``torch._utils._rebuild_tensor_v2``; followed by ``()`` for the
            result of a call; ``storage`` for a tensor's data.
        parts: arguments of a call, or the id of a storage; then the items and state set on it.
    """

    name: str
    parts: list[Any] = field(default_factory=list)

    def __setitem__(self, key: Any, value: Any) -> None:
        self.parts += (key, value)


# All opcodes that torch's weights-only unpickler supports.
_TORCH_CODES = (
    pickle.APPEND, pickle.APPENDS, pickle.BINFLOAT, pickle.BINGET, pickle.BININT, pickle.BININT1,
    pickle.BININT2, pickle.BINPERSID, pickle.BINPUT, pickle.BINUNICODE, pickle.BUILD,
    pickle.EMPTY_DICT, pickle.EMPTY_LIST, pickle.EMPTY_SET, pickle.EMPTY_TUPLE, pickle.GLOBAL,
    pickle.LONG1, pickle.LONG_BINGET, pickle.LONG_BINPUT, pickle.MARK, pickle.NEWFALSE,
    pickle.NEWOBJ, pickle.NEWTRUE, pickle.NONE, pickle.PROTO, pickle.REDUCE, pickle.SETITEM,
    pickle.SETITEMS, pickle.SHORT_BINSTRING, pickle.STOP, pickle.TUPLE, pickle.TUPLE1,
    pickle.TUPLE2, pickle.TUPLE3,
)  # fmt: skip
_BYTES_FROM_TEXT = "_codecs.encode()"


class _OutlineUnpickler(_PythonUnpickler):
    """Reads what torch's weights-only unpickler reads, with outlines for all but plain data."""

    def find_class(self, module: str, name: str) -> Outline:
        return Outline(f"{module}.{name}")

    def persistent_load(self, pid: Any) -> Outline:
        return Outline("storage", [pid])

    def load_call(self) -> None:
        arguments = self.stack.pop()
        called = self.stack.pop()
        if not isinstance(called, Outline) or not isinstance(arguments, tuple):
            got = type(called).__name__, type(arguments).__name__
            raise pickle.UnpicklingError(f"it calls {got[0]} with {got[1]}")
        if called.name.endswith("bytearray") and not all(map(_is_text, arguments)):
            # Of an int it would be that many zeros.
            raise pickle.UnpicklingError("it makes a bytearray from something other than text")
        self.append(Outline(f"{called.name}()", list(arguments)))

    def load_build(self) -> None:
        state = self.stack.pop()
        _check_small(state, _MOST_IN_ALL, "the state of an object")
        if not isinstance(self.stack[-1], Outline):
            raise pickle.UnpicklingError(f"it builds {type(self.stack[-1]).__name__}")
        self.stack[-1].parts.append(state)

    dispatch = {code[0]: _PythonUnpickler.dispatch[code[0]] for code in _TORCH_CODES}  # noqa: RUF012
    dispatch[pickle.REDUCE[0]] = dispatch[pickle.NEWOBJ[0]] = load_call
    dispatch[pickle.BUILD[0]] = load_build
    dispatch = _with_small_ones(dispatch)


def _is_text(value: Any) -> bool:
    is_encoded = isinstance(value, Outline) and value.name == _BYTES_FROM_TEXT
    return is_encoded or isinstance(value, str | bytes)


def outline_of(stored: BinaryIO) -> Any:
    """Read a file of ``torch.save``, with an ``Outline`` for everything that is not plain data.

    Raises:
        Exception: of many kinds, if the file is damaged, or would cost more than it should.
    """
    stored.seek(0)
    if stored.read(len(_ZIP_BEGINS)) != _ZIP_BEGINS:
        # torch has another loader for other beginnings, the format before version 1.6.
        raise zipfile.BadZipFile("File is not a zip file of torch.save")
    with zipfile.ZipFile(stored) as archive:
        is_compressed = any(member.compress_type for member in archive.infolist())
    if is_compressed:  # it may expand to any size
        raise zipfile.BadZipFile("it is compressed, wanted torch's own form")
    content = torch_archive(stored).get_record(_PICKLE_NAME)
    found = _OutlineUnpickler(BytesIO(content), encoding="bytes").load()
    _check_small(found, _MOST_IN_ALL, "content")
    return found


def load_plain(stored: BinaryIO) -> Any:
    """Read tensors, on the CPU, and plain data from a file of ``torch.save``.

    megatron-core's list of safe classes counts as plain data, ``argparse.Namespace`` among them.

    Raises:
        Exception: of many kinds, if the file is damaged, would run code, or would cost more than it
            should.
    """
    # Parsed twice: the first pass builds nothing and bounds the cost, the second is torch's own.
    outline_of(stored)
    stored.seek(0)
    return torch.load(stored, map_location="cpu", weights_only=True)


@contextmanager
def bounded_torch_load() -> Iterator[None]:
    """Make libraries that call ``torch.load`` read only what ``load_plain`` would."""
    load = torch.load

    def bounded(file: Any, *arguments: Any, **options: Any) -> Any:
        with nullcontext(file) if hasattr(file, "read") else open(file, "rb") as stored:
            outline_of(stored)
            stored.seek(0)
        return load(file, *arguments, **{**options, "weights_only": True})

    torch.load = bounded  # type: ignore[assignment]
    try:
        yield
    finally:
        torch.load = load


# The index of a distributed checkpoint.
#
# ``.metadata`` is a pickle that torch reads with ``pickle.load``. This unpickler builds only the
# record types of torch.distributed.checkpoint, so a file that passes may be handed to torch
# afterwards. Whatever it hashes or calls with is bounded as above.

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


class _AllowListUnpickler(_PythonUnpickler):
    dispatch = _with_small_ones(_PythonUnpickler.dispatch)
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
    # Offsets and sizes are added and compared later, where True or 1.5 would pass for numbers.
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
        # A link would read any file of this machine into the weights.
        if (path.parent / name).is_symlink():
            raise CheckpointError(
                f"{path}: the data file {shown(name)} is a link, wanted a plain file"
            )
