"""``PartialRequest``: the part of a call that is sent in one request.

A call of any size is split into requests that the servers accept, and each is encoded when it is
sent.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from nemo_aligner.contract.messages import Text
from nemo_aligner.serving.failures import RefusedError
from nemo_aligner.serving.protocols import kserve
from nemo_aligner.serving.protocols.kserve_body import Tensors
from nemo_aligner.utils.errors import DataError, shown

Split = Callable[[int], "list[PartialRequest]"]
Encode = Callable[[Sequence[Any]], Tensors]
# Errors while encoding a row: a value that JSON cannot represent, half of a surrogate pair (invalid
# Unicode), or lists that are nested too deeply.
_UNSENDABLE = (TypeError, ValueError, RecursionError)


@dataclass(frozen=True)
class PartialRequest:
    """Some samples of a call that are sent in one request; ``rows`` are their indices in ``items``.

    Rows are encoded only when the request is sent, so that a call of millions of samples has few
    encoded samples in memory.
    """

    rows: list[int]
    items: Sequence[Any]
    encode: Encode

    @property
    def inputs(self) -> Tensors:
        """Encode this request's samples as tensors."""
        return self.encode([self.items[row] for row in self.rows])

    def select(self, rows: list[int]) -> PartialRequest:
        """Return a smaller request; ``rows`` are some of this request's indices in ``items``."""
        return replace(self, rows=rows)

    def split(self, size: int) -> list[PartialRequest]:
        """Split the request into requests of at most ``size`` rows."""
        return [self.select(rows) for rows in _split_rows(self.rows, size)]


def split_texts(texts: Sequence[Text], limit: int) -> list[PartialRequest]:
    """Split samples into requests of at most ``limit`` raw texts or conversations."""
    # One request has either raw texts or conversations, so the two are sent separately.
    sentences = [row for row, text in enumerate(texts) if isinstance(text, str)]
    conversations = [row for row, text in enumerate(texts) if not isinstance(text, str)]
    return [
        *PartialRequest(sentences, texts, kserve.encode_sentences).split(limit),
        *PartialRequest(conversations, texts, kserve.encode_conversations).split(limit),
    ]


def token_rows(token_lists: Sequence[Sequence[int]]) -> list[Sequence[int]]:
    """Check token sequences, and return each one as a row of the call.

    Raises:
        TypeError: ``token_lists`` is not a list of lists.
    """
    expected = "wanted a list of lists of token ids"
    if isinstance(token_lists, str) or not isinstance(token_lists, Iterable):
        raise TypeError(f"token_lists: got {shown(token_lists)}, {expected}")
    rows = list(token_lists)
    for row, ids in enumerate(rows):
        if isinstance(ids, str) or not _has_length(ids):
            raise TypeError(f"token_lists, row {row}: got {shown(ids)}, {expected}")
    return rows


def split_tokens(token_lists: Sequence[Sequence[int]], limit: int) -> list[PartialRequest]:
    """Split token sequences into requests of at most ``limit`` rows."""
    # Sorted by length, so that a request carries little padding.
    by_length = sorted(range(len(token_lists)), key=lambda row: len(token_lists[row]))
    return PartialRequest(by_length, token_lists, kserve.encode_tokens).split(limit)


def _has_length(ids: object) -> bool:
    try:
        len(ids)  # type: ignore[arg-type]
    except TypeError:  # TypeError: a number, or a 0-dimensional tensor, whose __len__ raises
        return False
    return True


def _split_rows(rows: list[int], size: int) -> Iterable[list[int]]:
    return (rows[start : start + size] for start in range(0, len(rows), size))


def encode_request(part: PartialRequest) -> Tensors:
    """Encode the tensors of a request.

    Raises:
        RefusedError: a row cannot be encoded; the message has its index in the request.
    """
    try:
        return part.inputs
    except DataError as error:  # a DataError already names the row
        raise RefusedError("client", 400, str(error)) from error
    except _UNSENDABLE:  # e.g. half of a surrogate pair (invalid Unicode); find the row that has it
        for place, row in enumerate(part.rows):
            try:
                _ = part.select([row]).inputs
            except _UNSENDABLE as error:
                text = f"row {place}: it cannot be sent: {error}"
                raise RefusedError("client", 400, text) from error
        raise
