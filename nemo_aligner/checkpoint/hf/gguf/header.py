"""A GGUF file's header, walked through before a library believes its counts and lengths.

The gguf package makes an object of every item that an array says it has, also past the file's end.
"""

from __future__ import annotations

import mmap
import struct
from pathlib import Path

from nemo_aligner.errors import CheckpointError

_MAGIC = b"GGUF"
_STRING, _ARRAY = 8, 9
_SIZES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
# Far more than any file has: a vocabulary is of 300,000 words, and has as many merges again.
_MOST_ENTRIES, _MOST_ITEMS, _MOST_AXES = 2**16, 2**23, 8


def check_header(path: Path) -> None:
    """Refuse a header whose fields and tensors' entries do not lie in the file.

    Raises:
        CheckpointError: it says where.
    """
    with path.open("rb") as file:
        if file.read(4) != _MAGIC:
            raise CheckpointError("not a GGUF file")
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            _Header(data).check()


class _Header:
    """A position in a file, which moves on as numbers are read."""

    def __init__(self, data: mmap.mmap) -> None:
        self._data, self._position = data, len(_MAGIC)
        self._order = "<"

    def check(self) -> None:
        if self._number("I") & 0xFFFF == 0:  # the version, of a machine of the other byte order
            self._order = ">"
        tensors, fields = self._count("tensors"), self._count("fields")
        items_left = _MOST_ITEMS
        for _ in range(fields):
            self._skip(self._number("Q"))
            items_left -= self._skip_value(self._number("I"), items_left)
        for _ in range(tensors):
            self._skip(self._number("Q"))
            axes = self._number("I")
            if axes > _MOST_AXES:
                raise self._error(f"a tensor of {axes} axes")
            self._skip(8 * axes + 4 + 8)  # their lengths, its type, its offset

    def _skip_value(self, kind: int, items_left: int) -> int:
        """Skip a field's value; gives the number of its items, if it is an array."""
        if kind != _ARRAY:
            self._skip(self._size(kind))
            return 0
        kind, count = self._number("I"), self._number("Q")
        if count > items_left:
            raise self._error(f"an array of {count} items, wanted at most {_MOST_ITEMS} in all")
        if kind == _STRING:
            for _ in range(count):
                self._skip(self._number("Q"))
        else:
            self._skip(count * self._size(kind))
        return count

    def _size(self, kind: int) -> int:
        if kind == _STRING:
            return self._number("Q")
        if kind not in _SIZES:
            raise self._error(f"a value of type {kind}, which is not known")
        return _SIZES[kind]

    def _count(self, what: str) -> int:
        count = self._number("Q")
        if count > _MOST_ENTRIES:
            raise self._error(f"{count} {what}, wanted at most {_MOST_ENTRIES}")
        return count

    def _number(self, kind: str) -> int:
        start = self._position
        self._skip(struct.calcsize(f"{self._order}{kind}"))
        return struct.unpack_from(f"{self._order}{kind}", self._data, start)[0]

    def _skip(self, size: int) -> None:
        if size > len(self._data) - self._position:
            raise self._error(f"{size} bytes more, of which the file has not so many")
        self._position += size

    def _error(self, got: str) -> CheckpointError:
        return CheckpointError(f"not a readable GGUF file: byte {self._position}: got {got}")
