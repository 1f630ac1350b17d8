"""A call of any size as requests that servers take."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from nemo_aligner.errors import shown
from nemo_aligner.serving.client.tensors import Tensors
from nemo_aligner.serving.wire import kserve
from nemo_aligner.text.messages import Text

Encode = Callable[[Sequence[Any]], Tensors]


@dataclass(frozen=True)
class PartialRequest:
    """Some of the caller's rows, by their indices in ``items``, to be sent together."""

    rows: list[int]
    items: Sequence[Any]
    encode: Encode

    @property
    def inputs(self) -> Tensors:
        """The request's tensors."""
        return self.encode([self.items[row] for row in self.rows])

    def only(self, rows: list[int]) -> PartialRequest:
        """A request for these of its rows."""
        return replace(self, rows=rows)

    def chunks(self, size: int) -> list[PartialRequest]:
        """Requests of at most ``size`` rows."""
        return [self.only(rows) for rows in _chunks(self.rows, size)]


def split_texts(texts: Sequence[Text], limit: int) -> list[PartialRequest]:
    """Requests of at most ``limit`` texts each, of raw texts or of conversations."""
    sentences = [row for row, text in enumerate(texts) if isinstance(text, str)]
    conversations = [row for row, text in enumerate(texts) if not isinstance(text, str)]
    return [
        *PartialRequest(sentences, texts, kserve.encode_sentences).chunks(limit),
        *PartialRequest(conversations, texts, kserve.encode_conversations).chunks(limit),
    ]


def token_rows(token_lists: Sequence[Sequence[int]]) -> list[Sequence[int]]:
    """The rows of a call for token sequences.

    Raises:
        TypeError: they are no list of lists.
    """
    wanted = "wanted a list of lists of token ids"
    if isinstance(token_lists, str) or not isinstance(token_lists, Iterable):
        raise TypeError(f"token_lists: got {shown(token_lists)}, {wanted}")
    rows = list(token_lists)
    for row, ids in enumerate(rows):
        if isinstance(ids, str) or not _has_length(ids):
            raise TypeError(f"token_lists, row {row}: got {shown(ids)}, {wanted}")
    return rows


def split_tokens(token_lists: Sequence[Sequence[int]], limit: int) -> list[PartialRequest]:
    """Requests of at most ``limit`` token sequences each."""
    # Alike in length, so that a request carries little padding.
    by_length = sorted(range(len(token_lists)), key=lambda row: len(token_lists[row]))
    return PartialRequest(by_length, token_lists, kserve.encode_tokens).chunks(limit)


def _has_length(ids: object) -> bool:
    try:
        len(ids)  # type: ignore[arg-type]
    except TypeError:  # also a number in an array of torch, which has the method
        return False
    return True


def _chunks(rows: list[int], size: int) -> Iterable[list[int]]:
    return (rows[start : start + size] for start in range(0, len(rows), size))
