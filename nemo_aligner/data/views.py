"""What a data set has of every record, without an object for each: arrays, and what they stand for.

Arrays of several files are looked at one after the other, and not joined, so that mapped ones cost
no memory.
"""

from __future__ import annotations

from abc import abstractmethod
from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate
from typing import Generic, TypeVar, overload

import numpy as np

from nemo_aligner.data.records import Origin

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
    """Where records say they are from; ``parts`` are names, and ``[n]`` which of them each has."""

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
        """Of sequences that lie anywhere."""
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
