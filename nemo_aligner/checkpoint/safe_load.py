"""Read untrusted files as plain data, without running code and at a bounded cost.

A downloaded checkpoint may be malicious: a pickle can run any code, and a few bytes of YAML or
pickle can expand to gigabytes. This module has three parts:

- text, YAML and JSON: ``read_text``, ``read_yaml``, ``read_json``;
- pickles in files of ``torch.save``: ``load_plain``, ``TorchFile``, ``bounded_torch_load``;
- the index of a distributed checkpoint, which is also a pickle: ``read_metadata``.
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

# The first part reads text, YAML and JSON.

# Limits for files of settings. They are generous: a model's settings have about a hundred values,
# and a scoring contract has a chat template of a few kB.
MAX_TEXT_BYTES = 2**20
_MAX_NODES = 100_000
_MAX_DEPTH = 50
_MAX_DIGITS = 400


def read_yaml(path: Path, name: str | None = None) -> dict[str, Any]:
    """Read a YAML file that holds one mapping, whose aliases expand only to a limited size.

    Args:
        name: name of the file in errors; None means its path.

    Raises:
        CheckpointError: the file is missing or too large, holds no mapping, or has tags that name
            code.
    """
    text, name = read_text(path, name), name or str(path)
    try:
        # Measure the composed nodes before constructing the values, because safe_load would expand
        # aliases of aliases to any size.
        node = yaml.compose(text, Loader=yaml.SafeLoader)
        if node is not None:
            _check_size(node, name)
        content = yaml.safe_load(text)
    except (yaml.YAMLError, ValueError, TypeError, RecursionError, AttributeError) as error:
        raise CheckpointError(f"{name}: {_describe_error(error)}") from error
    return _check_mapping(content, name)


def read_json(
    path: Path, name: str | None = None, max_bytes: int = MAX_TEXT_BYTES
) -> dict[str, Any]:
    """Read a JSON file of at most ``max_bytes`` that holds one object.

    ``read_yaml`` explains the other arguments.

    Raises:
        CheckpointError: the file is missing or too large, or holds no valid JSON object.
    """
    return parse_json(read_text(path, name, max_bytes), name or str(path))


def parse_json(text: str, name: str) -> dict[str, Any]:
    """Parse a text that holds one JSON object.

    Raises:
        CheckpointError: the text holds something else; the message begins with ``name``.
    """
    try:
        content = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{name}: {_describe_error(error)}") from error
    # Limit the depth: a deeper value would exceed the recursion limit of code that walks or prints
    # it.
    _check_depth(content, name)
    return _check_mapping(content, name)


def read_text(path: Path, name: str | None = None, max_bytes: int = MAX_TEXT_BYTES) -> str:
    """Read a small UTF-8 file; ``name`` is its name in errors, by default its path.

    Raises:
        CheckpointError: the file is missing, too large, or not UTF-8.
    """
    name = name or str(path)
    if not path.is_file():
        raise CheckpointError(f"{name}: no such file")
    if path.stat().st_size > max_bytes:
        raise CheckpointError(
            f"{name}: got {path.stat().st_size} bytes, wanted at most {max_bytes}"
        )
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{name}: {error}") from error


def _check_mapping(content: Any, name: str) -> dict[str, Any]:
    if not isinstance(content, dict):
        raise CheckpointError(f"{name}: got {type(content).__name__}, wanted a mapping")
    return content


def _check_depth(content: Any, name: str, depth: int = 0) -> None:
    if depth > _MAX_DEPTH:
        raise CheckpointError(f"{name}: its values are nested deeper than {_MAX_DEPTH} levels")
    if isinstance(content, dict | list):
        for part in content.values() if isinstance(content, dict) else content:
            _check_depth(part, name, depth + 1)


def _check_size(root: yaml.Node, name: str) -> None:
    """Raise CheckpointError for aliases that expand to too many nodes, or that form a cycle."""
    sizes: dict[int, int] = {}

    def size(node: yaml.Node, depth: int) -> int:
        if depth > _MAX_DEPTH:
            raise CheckpointError(
                f"{name}: its values are nested deeper than {_MAX_DEPTH} levels, or an alias "
                "contains itself"
            )
        if id(node) not in sizes:
            is_leaf = isinstance(node, yaml.ScalarNode)
            if is_leaf and node.tag.endswith(":int") and len(node.value) > _MAX_DIGITS:
                raise CheckpointError(
                    f"{name}: got a number of {len(node.value)} digits, wanted at most "
                    f"{_MAX_DIGITS}"
                )
            parts = [] if is_leaf else node.value
            pairs = (part if isinstance(part, tuple) else (part,) for part in parts)
            # Count a long text by its length, because an alias may repeat texts, too.
            node_size = 1 + (len(node.value) // 10 if is_leaf else 0)
            children = (child for pair in pairs for child in pair)
            sizes[id(node)] = node_size + sum(size(child, depth + 1) for child in children)
        return sizes[id(node)]

    if size(root, 0) > _MAX_NODES:
        raise CheckpointError(f"{name}: its aliases expand to more than {_MAX_NODES} values")


def _describe_error(error: BaseException) -> str:
    return f"{type(error).__name__}: {first_line(error)}"


# The second part reads pickles.  A pickle can refer to one object many times. With nested tuples of
# such references, a few bytes make a dictionary key that takes hours to hash or to print, also in
# torch's weights-only loader. So every value that is hashed, printed or passed to a call must be
# small, where an object counts once for each reference to it.

# Python's unpickler is used, because a subclass of the C unpickler cannot override opcodes.
_PythonUnpickler: Any = pickle._Unpickler  # type: ignore[attr-defined]


class TorchFile:
    """A zip file of ``torch.save``, open in the reader that ``torch.load`` uses.

    Python's zipfile does not tell the offset of a member's data, and if two members have the same
    name, it may choose another one than torch.

    Args:
        stored: the file; it must stay open.

    Raises:
        Exception: of many types, if the file is damaged, compressed or no zip file.
    """

    def __init__(self, stored: BinaryIO) -> None:
        stored.seek(0)
        if stored.read(len(_ZIP_BEGINS)) != _ZIP_BEGINS:
            # Other files have the format before torch 1.6, which torch reads with other, unchecked
            # code.
            raise zipfile.BadZipFile("File is not a zip file of torch.save")
        with zipfile.ZipFile(stored) as archive:
            self._members = archive.infolist()
        if any(member.compress_type for member in self._members):  # could expand to any size
            raise zipfile.BadZipFile("it is compressed; torch.save writes uncompressed files")
        stored.seek(0)
        self._reader: Any = torch._C.PyTorchFileReader(stored)

    def has_record(self, name: str) -> bool:
        """Tell if there is a record of this name."""
        return bool(self._reader.has_record(name))

    def read_record(self, name: str) -> bytes:
        """Return the content of the record ``name``."""
        return bytes(self._reader.get_record(name))

    def locate_record(self, name: str) -> tuple[int, int]:
        """Return where the record ``name`` begins in the file, and its size, in bytes."""
        # torch itself has ``get_record_size`` only since 2.12.
        header = self._reader.get_record_header_offset(name)
        size = next(member.file_size for member in self._members if member.header_offset == header)
        return self._reader.get_record_offset(name), size

    def read_outline(self) -> Any:
        """Return what is stored, with an ``Outline`` for everything that is not plain data.

        Raises:
            Exception: of many types, if reading it would take too much time or memory, too.
        """
        outline = _OutlineUnpickler(
            BytesIO(self.read_record(_PICKLE_NAME)), encoding="bytes"
        ).load()
        _check_small(outline, _MAX_FILE_PARTS, "content")
        return outline


# Most parts (see ``_check_small``) of a key, or of the arguments of a call; those of checkpoints
# have about a dozen.
_MAX_KEY_PARTS = 10_000
_MAX_FILE_PARTS = 1_000_000  # most parts of a file, without the data of its tensors
_PICKLE_NAME = "data.pkl"
_ZIP_BEGINS = b"PK\x03\x04"


def _check_small(
    value: Any, limit: int = _MAX_KEY_PARTS, description: str = "a key or an argument"
) -> None:
    """Raise UnpicklingError if ``value`` has more than ``limit`` parts.

    The parts of a value are its items, keys and attributes, and the parts of these. A part counts
    once for each reference to it; the length of a string or bytes counts, too.
    """
    unvisited, parts = [value], 0
    while unvisited:
        item = unvisited.pop()
        # Loop instead of recursion, because a deeply nested object would overflow the stack.
        inside: Any = ()
        if isinstance(item, str | bytes):
            parts += len(item)
        elif isinstance(item, dict):
            inside = [*item, *item.values()]
        elif isinstance(item, tuple | list | set | frozenset):
            inside = item
        # Do not look into classes and functions: they come from this package or from torch, not
        # from the file.
        elif not isinstance(item, int | type | FunctionType | Enum):
            inside = getattr(item, "__dict__", {}).values()
        parts += 1 + len(inside)
        if parts > limit:
            raise pickle.UnpicklingError(
                f"the pickle has {description} of more than {limit} parts, unlike a checkpoint"
            )
        unvisited += inside


# For each opcode, the operands on the stack that it hashes, or that its errors may print; these
# must be small.
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


def _bound_operands(
    load: Callable[[Any], None], select_operands: Callable[[list[Any]], list[Any]]
) -> Callable[[Any], None]:
    """Wrap an unpickler's function for one opcode to check the size of its operands first.

    Args:
        load: the function.
        select_operands: returns the operands to check from the unpickler's stack.
    """

    def load_bounded(unpickler: Any) -> None:
        for value in select_operands(unpickler.stack):
            _check_small(value)
        load(unpickler)

    return load_bounded


def _bound_dispatch(dispatch: dict[int, Callable[[Any], None]]) -> dict[int, Any]:
    """Return a copy of an unpickler's ``dispatch`` that checks keys and arguments before their use.

    A key or an argument that is too large raises UnpicklingError.
    """
    bounded = {
        code[0]: _bound_operands(dispatch[code[0]], select_operands)
        for code, select_operands in _KEYS_AND_ARGUMENTS.items()
        if code[0] in dispatch
    }
    return {**dispatch, **bounded}


@dataclass(eq=False)
class Outline:
    """Placeholder for an object that a pickle asks to create; the object itself is not created.

    Attributes:
        name: name of a global, such as ``torch._utils._rebuild_tensor_v2``; followed by ``()`` for
            the result of a call; ``storage`` for a tensor's data.
        parts: arguments of a call, or the id of a storage; then items and state that the pickle
            sets on the object.
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
    """Reads the pickles that torch's weights-only unpickler reads, and creates only plain data.

    Every other object, such as a tensor, becomes an ``Outline``.
    """

    def find_class(self, module: str, name: str) -> Outline:
        return Outline(f"{module}.{name}")

    def persistent_load(self, pid: Any) -> Outline:
        return Outline("storage", [pid])

    def load_call(self) -> None:
        arguments = self.stack.pop()
        function = self.stack.pop()
        if not isinstance(function, Outline) or not isinstance(arguments, tuple):
            types = type(function).__name__, type(arguments).__name__
            raise pickle.UnpicklingError(
                f"it calls an object of the type {types[0]} with {types[1]}"
            )
        if function.name.endswith("bytearray") and not all(map(_is_text, arguments)):
            # Reject numbers: bytearray(n) would allocate n zeros.
            raise pickle.UnpicklingError("it makes a bytearray from something other than text")
        self.append(Outline(f"{function.name}()", list(arguments)))

    def load_build(self) -> None:
        state = self.stack.pop()
        _check_small(state, _MAX_FILE_PARTS, "the state of an object")
        if not isinstance(self.stack[-1], Outline):
            raise pickle.UnpicklingError(f"it sets attributes of a {type(self.stack[-1]).__name__}")
        self.stack[-1].parts.append(state)

    dispatch = {code[0]: _PythonUnpickler.dispatch[code[0]] for code in _TORCH_CODES}  # noqa: RUF012
    dispatch[pickle.REDUCE[0]] = dispatch[pickle.NEWOBJ[0]] = load_call
    dispatch[pickle.BUILD[0]] = load_build
    dispatch = _bound_dispatch(dispatch)


def _is_text(value: Any) -> bool:
    is_encoded = isinstance(value, Outline) and value.name == _BYTES_FROM_TEXT
    return is_encoded or isinstance(value, str | bytes)


def load_plain(stored: BinaryIO) -> Any:
    """Read tensors, on the CPU, and plain data from a file of ``torch.save``.

    Objects of the classes that megatron-core lists as safe count as plain data;
    ``argparse.Namespace`` is one of them.

    Raises:
        Exception: of many types, if the file is damaged, would run code, or would take too much
            time or memory.
    """
    # Read the file twice: the first pass creates no objects and bounds the cost, the second is
    # torch's.
    TorchFile(stored).read_outline()
    stored.seek(0)
    return torch.load(stored, map_location="cpu", weights_only=True)


@contextmanager
def bounded_torch_load() -> Iterator[None]:
    """Apply the checks of ``load_plain`` to every call of ``torch.load`` during the block.

    Use this for calls of libraries that call ``torch.load`` themselves, such as transformers.
    """
    load = torch.load

    def bounded(file: Any, *arguments: Any, **options: Any) -> Any:
        with nullcontext(file) if hasattr(file, "read") else open(file, "rb") as stored:
            TorchFile(stored).read_outline()
            stored.seek(0)
        return load(file, *arguments, **{**options, "weights_only": True})

    torch.load = bounded  # type: ignore[assignment]
    try:
        yield
    finally:
        torch.load = load


# The third part reads the index of a distributed checkpoint.  ``.metadata`` is a pickle that torch
# reads with ``pickle.load``. The unpickler below creates only the record types of
# torch.distributed.checkpoint, so a file that passes is safe for torch to read afterwards. The size
# of values that it hashes or passes to calls is limited as in the second part.

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
    """Return a member of an enum; the unpickler calls this function in place of ``getattr``.

    Python 3.11.0 to 3.11.3 pickle an enum member as a call of ``getattr``, which could read any
    attribute of any object.
    """
    if isinstance(owner, type) and issubclass(owner, Enum) and name in owner.__members__:
        return owner[name]
    raise pickle.UnpicklingError(f"it reads the attribute {shown(name)} of {shown(owner)}")


class _AllowListUnpickler(_PythonUnpickler):
    """Unpickler for an index that creates only objects of the classes in ``_ALLOWED``."""

    dispatch = _bound_dispatch(_PythonUnpickler.dispatch)
    for _code in (pickle.INST, pickle.OBJ, pickle.NEWOBJ_EX):  # no index uses these opcodes
        del dispatch[_code[0]]

    def load_build(self) -> None:
        # A pickle may set attributes of objects that it has created, but not those of classes or
        # functions.
        if isinstance(self.stack[-2], type | FunctionType):
            raise pickle.UnpicklingError(f"it sets attributes of {self.stack[-2]!r}")
        super().load_build()

    dispatch[pickle.BUILD[0]] = load_build

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in (("builtins", "getattr"), ("__builtin__", "getattr")):
            return _enum_member
        if name not in _ALLOWED.get(module, ()):
            raise pickle.UnpicklingError(f"it names {module}.{name}, unlike a checkpoint")
        return super().find_class(module, name)


def read_metadata(folder: Path) -> Metadata:
    """Read the index of the distributed checkpoint in ``folder``, and check that it is safe.

    Raises:
        CheckpointError: there is no index, it refers to classes or functions that no index needs,
            or it names a data file outside ``folder``.
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
    except Exception as error:  # a damaged pickle may raise anything
        raise CheckpointError(f"{path}: cannot be read safely: {short(error)}") from error
    _check_locations(path, metadata)
    return metadata


def _check_structure(metadata: Any) -> None:
    """Raise an exception of any type if a field of the index has a wrong type or value."""
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
                raise ValueError(
                    f"{shown(name)}: a shape has entries that are not integers from 0 on"
                )
    # Require int exactly: True or 1.5 would pass unnoticed where offsets and sizes are added and
    # compared.
    for index, info in (metadata.storage_data or {}).items():
        _check_name(index.fqn)
        numbers = info.offset, info.length
        if not isinstance(info.relative_path, str) or any(
            type(number) is not int or number < 0 for number in numbers
        ):
            types = ", ".join(type(value).__name__ for value in (info.relative_path, *numbers))
            raise ValueError(
                f"{shown(index.fqn)}: got values of the types {types}, wanted a file name, an "
                "offset in the file and a length"
            )


def _check_name(name: Any) -> None:
    if not isinstance(name, str):
        raise TypeError(f"got {type(name).__name__}, wanted the name of a tensor")


def _check_locations(path: Path, metadata: Metadata) -> None:
    for info in (metadata.storage_data or {}).values():
        name = info.relative_path
        if name in ("", ".", "..") or PurePosixPath(name).name != name:
            raise CheckpointError(
                f"{path}: the data file {shown(name)} is outside the checkpoint's folder"
            )
        # Reject links: through a link, any file of this machine could be read into the weights.
        if (path.parent / name).is_symlink():
            raise CheckpointError(
                f"{path}: the data file {shown(name)} is a link, wanted a plain file"
            )
