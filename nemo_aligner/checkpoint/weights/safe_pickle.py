"""Reading of untrusted pickles at bounded cost.

A pickle can refer to one object many times: nested tuples make a key of a few bytes that takes
hours to hash or to print, in torch's weights-only loader, too. So whatever is hashed, called with
or printed must be small, counting an object as often as it is referred to. Every file of
``torch.save`` that this package reads goes through ``load_plain`` or ``outline_of``; the index of a
distributed checkpoint has an unpickler of its own.
"""

from __future__ import annotations

import pickle
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from enum import Enum
from io import BytesIO
from types import FunctionType
from typing import Any, BinaryIO

import torch
from megatron.core.dist_checkpointing.strategies.torch import (
    _replace_state_dict_keys_with_sharded_keys,
    mcore_to_pyt_state_dict,
)
from torch.distributed.checkpoint.utils import _DistWrapper

# Private names of torch, megatron-core and Python, used only here. A name that an upgrade removes
# fails when this file is imported.

# The C unpickler does not let a subclass override opcodes.
PythonUnpickler: Any = pickle._Unpickler  # type: ignore[attr-defined]


def torch_archive(stored: BinaryIO) -> Any:
    """Open a zip file of ``torch.save`` with the reader that ``torch.load`` uses.

    Python's zipfile may pick another member of the same name, and does not tell its offset.
    """
    stored.seek(0)
    return torch._C.PyTorchFileReader(stored)


def rank_collectives() -> _DistWrapper:
    """Planning collectives of torch's own save; an error on one rank is raised on each."""
    return _DistWrapper(None, use_dist=True, coordinator_rank=0)


def torch_tensors(sharded_state_dict: dict[str, Any]) -> dict[str, Any]:
    """Flatten a sharded state dict to this rank's tensors by stored key, for torch's planner.

    megatron-core does this inside its own save, which would also start writer processes.
    """
    grouped, _, _ = _replace_state_dict_keys_with_sharded_keys(
        sharded_state_dict, keep_only_main_replica=True
    )
    return mcore_to_pyt_state_dict(grouped)


_MOST_PARTS = 10_000  # of a key or of arguments, which have about a dozen
_MOST_IN_ALL = 1_000_000  # of all that a file holds beside tensors
_PICKLE_NAME = "data.pkl"
_ZIP_BEGINS = b"PK\x03\x04"


def check_small(value: Any, most: int = _MOST_PARTS, what: str = "a key or an argument") -> None:
    """Raise UnpicklingError if ``value`` has more than ``most`` parts.

    A part counts as often as it is referred to; a text or bytes count their length.
    """
    waiting, parts = [value], 0
    while waiting:
        one = waiting.pop()
        inside: Any = ()
        if isinstance(one, dict):
            inside = [*one, *one.values()]
        elif isinstance(one, tuple | list | set | frozenset):
            inside = one
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
            check_small(value)
        load(unpickler)

    return checked


def with_small_ones(dispatch: dict[int, Callable[[Any], None]]) -> dict[int, Any]:
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


class _OutlineUnpickler(PythonUnpickler):
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
        check_small(state, _MOST_IN_ALL, "the state of an object")
        if not isinstance(self.stack[-1], Outline):
            raise pickle.UnpicklingError(f"it builds {type(self.stack[-1]).__name__}")
        self.stack[-1].parts.append(state)

    dispatch = {code[0]: PythonUnpickler.dispatch[code[0]] for code in _TORCH_CODES}  # noqa: RUF012
    dispatch[pickle.REDUCE[0]] = dispatch[pickle.NEWOBJ[0]] = load_call
    dispatch[pickle.BUILD[0]] = load_build
    dispatch = with_small_ones(dispatch)


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
    check_small(found, _MOST_IN_ALL, "content")
    return found


def load_plain(stored: BinaryIO) -> Any:
    """Read tensors, on the CPU, and plain data from a file of ``torch.save``.

    megatron-core's list of safe classes counts as plain data, ``argparse.Namespace`` among them.

    Raises:
        Exception: of many kinds, if the file is damaged, would run code, or would cost more than it
            should.
    """
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
