"""Records to token ids: what the texts of a record have in common is tokenized once.

Two texts of a record begin with the same prompt, and a reply's own tokens are counted apart. Where
a tokenizer lets a text be cut at words (``TextBounds.cuts_at_words``), the ids of both parts are
those of the whole; so the common beginning is one piece, and the middle of a reply another, which
counts for the text and for the reply. Any other tokenizer is given every text whole, and every
reply. The ids are the same in both cases.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from itertools import chain
from typing import NamedTuple

from nemo_aligner.text.long_texts import first_cut, last_cut
from nemo_aligner.text.tokenizer import Tokenizer


class WrittenText(NamedTuple):
    """What the tokenizer is given, and the reply in it; None where the reply is the whole text."""

    text: str
    reply: str | None


class TextIds(NamedTuple):
    """The ids of a text at its full length, and how many tokens its reply alone has."""

    token_ids: list[int]
    reply_tokens: int


class _Middle(NamedTuple):
    """Where the middle of a reply stands in its text, and what of the reply is around it."""

    start: int
    stop: int
    before: str
    after: str


class _Plan(NamedTuple):
    """Which pieces make a text, and which its reply; None where that is the whole text."""

    whole: list[int]
    reply: list[int] | None

    def of(self, ids: Sequence[list[int]]) -> TextIds:
        whole = list(chain.from_iterable(ids[piece] for piece in self.whole))
        if self.reply is None:
            return TextIds(whole, len(whole))
        return TextIds(whole, sum(len(ids[piece]) for piece in self.reply))


class _Pieces:
    """Different texts to tokenize, each once."""

    def __init__(self) -> None:
        self._numbers: dict[str, int] = {}

    def add(self, *texts: str) -> list[int]:
        """The numbers of these texts; empty ones have no tokens."""
        numbers = self._numbers
        return [numbers.setdefault(text, len(numbers)) for text in texts if text]

    @property
    def texts(self) -> list[str]:
        return list(self._numbers)


def encode_records(
    tokenizer: Tokenizer, records: Sequence[Sequence[WrittenText]]
) -> list[list[TextIds]]:
    """The ids of every text of every record, as ``encode_batch`` gives them for whole texts."""
    pieces = _Pieces()
    plan = _plan_cut if tokenizer.bounds.cuts_at_words else _plan_whole
    plans = [plan(record, pieces) for record in records]
    ids = tokenizer.encode_batch(pieces.texts)
    return [[each.of(ids) for each in record] for record in plans]


def _plan_whole(record: Sequence[WrittenText], pieces: _Pieces) -> list[_Plan]:
    return [
        _Plan(
            pieces.add(written.text), None if written.reply is None else pieces.add(written.reply)
        )
        for written in record
    ]


def _plan_cut(record: Sequence[WrittenText], pieces: _Pieces) -> list[_Plan]:
    middles = [_find_middle(written) for written in record]
    head = _common_head(record, middles)
    plans = []
    for written, middle in zip(record, middles, strict=True):
        text, reply = written
        if middle is None:
            parts = pieces.add(text[:head], text[head:])
            plans.append(_Plan(parts, None if reply is None else pieces.add(reply)))
            continue
        start, stop, before, after = middle
        parts = pieces.add(text[:head], text[head:start], text[start:stop], text[stop:])
        plans.append(_Plan(parts, pieces.add(before, text[start:stop], after)))
    return plans


def _common_head(record: Sequence[WrittenText], middles: Sequence[_Middle | None]) -> int:
    """Up to where all texts are one, and may be cut; 0 for a lone one."""
    if len(record) == 1:
        return 0
    common = len(os.path.commonprefix([written.text for written in record]))  # noqa: RUF071
    starts = (middle.start for middle in middles if middle is not None)
    return last_cut(record[0].text, min([common, *starts])) or 0


def _find_middle(written: WrittenText) -> _Middle | None:
    """What of a reply can be cut out of it, and of its text; None if there is no such part."""
    text, reply = written.text, written.reply
    if reply is None:
        return None
    first, last = first_cut(reply), last_cut(reply, len(reply))
    if first is None or last is None or first == last:
        return None
    # A template may write the reply otherwise: trimmed, or each of its words.
    begin = text.rfind(reply[first - 1 : last + 2])
    if begin < 0:
        return None
    start = begin + 1
    return _Middle(start, start + last - first, reply[:first], reply[last:])
