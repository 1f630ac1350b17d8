"""Pickles in files of anyone: what reading one may cost is bounded before it is loaded.

A pickle may name one object many times: tuples in tuples make a key of a few bytes that takes hours
to hash or to print, in torch's weights-only loader, too. So what is hashed, called with or printed
has to be small, counted as often as it is named. Every file of ``torch.save`` that this package
reads goes through ``load_plain`` or ``outline_of``; the index has an unpickler of its own.
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

# Names that torch, megatron-core and Python keep to themselves: each is used here alone, with why.
#
# One that is gone after an upgrade fails here, when this file is imported.

# The unpickler in C gives no say in what a pickle may change.
PythonUnpickler: Any = pickle._Unpickler  # type: ignore[attr-defined]


def torch_archive(stored: BinaryIO) -> Any:
    """The members of a zip file that ``torch.save`` wrote, as ``torch.load`` finds them.

    Python's zipfile may find another of the same name, and tells not where its content begins.
    """
    stored.seek(0)
    return torch._C.PyTorchFileReader(stored)


def rank_collectives() -> _DistWrapper:
    """All ranks, as torch's own save has them plan and agree: an error of one is raised on each."""
    return _DistWrapper(None, use_dist=True, coordinator_rank=0)


def torch_tensors(sharded_state_dict: dict[str, Any]) -> dict[str, Any]:
    """This rank's tensors by stored key, as torch's planner wants them.

    megatron-core does this inside its own save, which would also start processes to write with.
    """
    grouped, _, _ = _replace_state_dict_keys_with_sharded_keys(
        sharded_state_dict, keep_only_main_replica=True
    )
    return mcore_to_pyt_state_dict(grouped)


_MOST_PARTS = 10_000  # of a key or of arguments, which have a dozen
_MOST_IN_ALL = 1_000_000  # of all that a file holds beside tensors
_PICKLE_NAME = "data.pkl"
_ZIP_BEGINS = b"PK\x03\x04"


def check_small(value: Any, most: int = _MOST_PARTS, what: str = "a key or an argument") -> None:
    """Raise UnpicklingError where ``value`` has more parts than ``most``.

    A part counts as often as it is named; a text or bytes as much as they are long.
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


# What each of these takes from the stack that Python hashes, or may print in an error.
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
    """A Python unpickler's ``dispatch``, refusing large keys and arguments before it uses them."""
    bounded = {
        code[0]: _of_small_ones(dispatch[code[0]], taken)
        for code, taken in _KEYS_AND_ARGUMENTS.items()
        if code[0] in dispatch
    }
    return {**dispatch, **bounded}


@dataclass(eq=False)
class Outline:
    """What a pickle asks for and nobody makes: a global by its ``name``, or what it would return.

    Attributes:
        name: of a global, ``torch._utils._rebuild_tensor_v2``; with ``()`` what a call of it gives;
            ``storage`` for the numbers of a tensor.
        parts: of a call its arguments, of a storage its id; then what is set in it.
    """

    name: str
    parts: list[Any] = field(default_factory=list)

    def __setitem__(self, key: Any, value: Any) -> None:
        self.parts += (key, value)


# All that torch's weights-only unpickler knows.
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
    """Reads what torch's weights-only unpickler reads, and makes outlines of all but plain data."""

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
            # Of a number it would be as many zeros.
            raise pickle.UnpicklingError("it makes a bytearray of other than a text")
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
    """What a file of ``torch.save`` holds, with ``Outline`` for what is not plain data.

    Raises:
        Exception: of many kinds, where it is damaged, or would cost more than it should.
    """
    stored.seek(0)
    if stored.read(len(_ZIP_BEGINS)) != _ZIP_BEGINS:
        # torch has another loader for what begins otherwise: of files before its version 1.6.
        raise zipfile.BadZipFile("File is not a zip file of torch.save")
    with zipfile.ZipFile(stored) as archive:
        is_compressed = any(member.compress_type for member in archive.infolist())
    if is_compressed:  # to a pickle of any size
        raise zipfile.BadZipFile("it is compressed, wanted torch's own form")
    content = torch_archive(stored).get_record(_PICKLE_NAME)
    found = _OutlineUnpickler(BytesIO(content), encoding="bytes").load()
    check_small(found, _MOST_IN_ALL, "content")
    return found


def load_plain(stored: BinaryIO) -> Any:
    """What a file of ``torch.save`` holds: tensors, on the CPU, and plain data.

    megatron-core's list of harmless classes counts as plain, ``argparse.Namespace`` among them.

    Raises:
        Exception: of many kinds, where it is damaged, would run as code, or would cost more than it
            should.
    """
    outline_of(stored)
    stored.seek(0)
    return torch.load(stored, map_location="cpu", weights_only=True)


@contextmanager
def bounded_torch_load() -> Iterator[None]:
    """Have libraries that call ``torch.load`` read what ``load_plain`` would, and nothing else."""
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
