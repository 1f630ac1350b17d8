"""Arrays of a data file's records: growing files on disk, and views without an object for each."""

from __future__ import annotations

import os
from abc import abstractmethod
from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path
from typing import BinaryIO, Generic, Protocol, TypeVar, overload

import numpy as np

from nemo_aligner.data.records import Origin

# Named arrays that grow at their end: files of a folder, or bytes in memory.
#
# Not megatron-core's IndexedDataset: it has sequences and documents alone, so ranks, labels, reply
# lengths and lines would need such files beside it anyway.


class Arrays(Protocol):
    """A store that takes arrays part by part, and is read from once it is complete."""

    def append(self, name: str, part: np.ndarray) -> None: ...

    def replace(self, name: str, array: np.ndarray) -> None: ...

    def read(self, name: str, dtype: np.dtype, width: int | None = None) -> np.ndarray: ...

    def sizes(self) -> dict[str, int]: ...


class ArraysInMemory:
    """Arrays that live as long as the process."""

    def __init__(self) -> None:
        self._bytes: dict[str, bytearray] = {}

    def append(self, name: str, part: np.ndarray) -> None:
        """Append ``part`` to an array."""
        self._bytes.setdefault(name, bytearray()).extend(part.tobytes())

    def replace(self, name: str, array: np.ndarray) -> None:
        """Replace an array."""
        self._bytes[name] = bytearray(array.tobytes())

    def read(self, name: str, dtype: np.dtype, width: int | None = None) -> np.ndarray:
        """Read a whole array, ``[n]`` or ``[n, width]``."""
        return _shaped(np.frombuffer(bytearray(self._bytes.get(name, b"")), dtype), width)

    def sizes(self) -> dict[str, int]:
        """Bytes of each."""
        return {name: len(content) for name, content in self._bytes.items()}


class ArraysInFolder:
    """Arrays in files of ``folder``, without a header; they are memory-mapped when read.

    Raises:
        OSError: a file cannot be read or written.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._open: dict[str, BinaryIO] = {}

    def append(self, name: str, part: np.ndarray) -> None:
        """Append ``part`` to an array."""
        if name not in self._open:
            self._open[name] = self._path(name).open("ab")
        self._open[name].write(part.tobytes())

    def replace(self, name: str, array: np.ndarray) -> None:
        """Replace an array."""
        file = self._open.pop(name, None)
        if file is not None:
            file.close()
        # Not written over: what is mapped of the old file stays.
        self._path(name).unlink(missing_ok=True)
        self.append(name, array)

    def read(self, name: str, dtype: np.dtype, width: int | None = None) -> np.ndarray:
        """Map a whole array, ``[n]`` or ``[n, width]``; writes to it stay in this process."""
        if name in self._open:
            self._open[name].flush()
        path = self._path(name)
        if not path.exists() or path.stat().st_size == 0:
            return _shaped(np.zeros(0, dtype), width)
        return _shaped(np.memmap(path, dtype, mode="c"), width)

    def sizes(self) -> dict[str, int]:
        """Bytes of each."""
        return {path.stem: path.stat().st_size for path in self._folder.glob("*.bin")}

    def close(self) -> None:
        """Have all of it on the disk."""
        for file in self._open.values():
            file.flush()
            os.fsync(file.fileno())
            file.close()
        self._open.clear()

    def _path(self, name: str) -> Path:
        return self._folder / f"{name}.bin"


def _shaped(array: np.ndarray, width: int | None) -> np.ndarray:
    # Not a memmap: each slice of one costs much more than one of a plain array.
    plain = array.view(np.ndarray)
    if width is None:
        return plain
    return plain.reshape(-1, width) if width else np.zeros((0, 0), array.dtype)


# Views of a data set as sequences of records, without an object for each record.
#
# Arrays of several files are not joined, so that mapped ones cost no memory.

Item = TypeVar("Item")


class FileParts(Sequence[Item], Generic[Item]):
    """Items of several files, of which each has so many."""

    def __init__(self, sizes: Sequence[int]) -> None:
        self._starts = [0, *accumulate(sizes)]

    def __len__(self) -> int:
        return self._starts[-1]

    @overload
    def __getitem__(self, index: int) -> Item: ...

    @overload
    def __getitem__(self, index: slice) -> list[Item]: ...

    def __getitem__(self, index: int | slice) -> Item | list[Item]:
        if isinstance(index, slice):
            return [self._at(each) for each in range(*index.indices(len(self)))]
        return self._at(range(len(self))[index])

    def _at(self, index: int) -> Item:
        part = bisect_right(self._starts, index) - 1
        return self._of_part(part, index - self._starts[part])

    @abstractmethod
    def _of_part(self, part: int, index: int) -> Item: ...


class Origins(FileParts[Origin]):
    """File and line of every record; ``parts`` are a path and ``[n]`` lines for each file."""

    def __init__(self, parts: Sequence[tuple[str, np.ndarray]]) -> None:
        super().__init__([len(lines) for _, lines in parts])
        self._parts = parts

    def _of_part(self, part: int, index: int) -> Origin:
        path, lines = self._parts[part]
        return Origin(path, int(lines[index]))


class Sources(FileParts[str]):
    """Sources of records; ``parts`` are names, and ``[n]`` indices of the name that each has."""

    def __init__(self, parts: Sequence[tuple[Sequence[str], np.ndarray]]) -> None:
        super().__init__([len(codes) for _, codes in parts])
        self._parts = parts

    def _of_part(self, part: int, index: int) -> str:
        names, codes = self._parts[part]
        return names[codes[index]]


class TokenSequences(FileParts[np.ndarray]):
    """S sequences as ``[L]`` int32 each.

    ``parts`` are for each file ``[T]`` tokens, and ``[s + 1]`` offsets of its sequences into them.
    """

    def __init__(self, parts: Sequence[tuple[np.ndarray, np.ndarray]]) -> None:
        super().__init__([len(offsets) - 1 for _, offsets in parts])
        self._parts = parts

    @classmethod
    def of(cls, sequences: Sequence[Sequence[int] | np.ndarray]) -> TokenSequences:
        """Build from sequences that lie anywhere in memory."""
        flat = [np.asarray(sequence, dtype=np.int32) for sequence in sequences]
        offsets = np.array([0, *accumulate(map(len, flat))], dtype=np.int64)
        return cls([(np.concatenate([np.zeros(0, np.int32), *flat]), offsets)])

    def _of_part(self, part: int, index: int) -> np.ndarray:
        tokens, offsets = self._parts[part]
        return tokens[offsets[index] : offsets[index + 1]].astype(np.int32)

    @property
    def num_tokens(self) -> int:
        """T, of all of them."""
        return sum(int(offsets[-1]) for _, offsets in self._parts)

    def lengths(self, start: int, stop: int) -> np.ndarray:
        """``[stop - start]`` int64 tokens of these sequences."""
        found = [np.zeros(0, np.int64)]
        for (_, offsets), first in zip(self._parts, self._starts, strict=False):
            low = min(max(start - first, 0), len(offsets) - 1)
            high = min(max(stop - first, 0), len(offsets) - 1)
            found.append(np.diff(offsets[low : high + 1]))
        return np.concatenate(found)
