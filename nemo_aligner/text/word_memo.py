"""Texts to token ids, with words that occur again looked up and not tokenized again.

Where a tokenizer lets a text be cut between two words (``TextBounds.cuts_at_words``), the ids of a
text are those of its words one after the other. A word of letters that has been seen has its ids in
a table; whatever is between such cuts otherwise, and any text of another tokenizer, is tokenized.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

# The space before each cut's second word; it begins with a letter that a search can look for.
_SPACE = re.compile(r" (?<=[A-Za-z] )(?=[A-Za-z])")
# What is longer hardly comes again.
_LONGEST = 24
# About 200 bytes each.
_MOST_WORDS = 1 << 17

EncodeBatch = Callable[[Sequence[str]], list[list[int]]]
_ID = np.dtype(np.int32)


class WordIds(NamedTuple):
    """The ``[L]`` int32 ids of a text, and how many are between its first cut and its last."""

    ids: np.ndarray
    inner: int = 0


class WordMemo:
    """The ids of words after a space, as far as they have been seen.

    ``encode_batch`` is the tokenizer's own; without ``cuts_at_words`` it is given texts whole.
    """

    def __init__(self, encode_batch: EncodeBatch, cuts_at_words: bool) -> None:
        self._encode_batch = encode_batch
        self._cuts_at_words = cuts_at_words
        self._ids: dict[str, bytes] = {}

    def encode(self, texts: Sequence[str]) -> list[WordIds]:
        """Of each text the ids that ``encode_batch`` gives."""
        if not self._cuts_at_words:
            return [WordIds(np.array(ids, dtype=_ID)) for ids in self._encode_batch(texts)]
        parts = [_SPACE.split(text) for text in texts]
        begins = self._encode_batch([first for first, *_ in parts])
        new = set().union(*(rest for _, *rest in parts)) - self._ids.keys()
        self._learn(list(new))
        found = [
            self._look_up(begin, rest) for begin, (_, *rest) in zip(begins, parts, strict=True)
        ]
        self._forget(new)
        return found

    def _look_up(self, begin: list[int], words: list[str]) -> WordIds:
        found = [_as_bytes(begin), *map(self._ids.__getitem__, words)]
        ids = b"".join(found)
        ends = len(found[0]) + len(found[-1])
        inner = (len(ids) - ends) // _ID.itemsize if words else 0
        return WordIds(np.frombuffer(ids, dtype=_ID), inner)

    def _learn(self, words: list[str]) -> None:
        ids = self._encode_batch([f" {word}" for word in words])
        self._ids.update(zip(words, map(_as_bytes, ids), strict=True))

    def _forget(self, new: set[str]) -> None:
        """Keep of the new words those that may come again, while there is space."""
        is_full = len(self._ids) > _MOST_WORDS
        for word in new:
            if is_full or len(word) > _LONGEST:
                del self._ids[word]


def _as_bytes(ids: list[int]) -> bytes:
    return np.array(ids, dtype=_ID).tobytes()
