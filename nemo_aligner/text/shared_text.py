"""Records to token ids: what the texts of a record begin with is tokenized once.

Where a tokenizer lets a text be cut between two words (``TextBounds.cuts_at_words``), the ids of
both parts are those of the whole. Any other tokenizer is given every text whole; the ids are the
same in both cases.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from nemo_aligner.text.long_texts import first_cut, last_cut
from nemo_aligner.text.tokenizer import Tokenizer
from nemo_aligner.text.word_memo import WordIds


class WrittenText(NamedTuple):
    """What the tokenizer is given, and the reply in it; None where the reply is the whole text."""

    text: str
    reply: str | None


class TextIds(NamedTuple):
    """The ids of a text at its full length, and how many tokens its reply alone has."""

    token_ids: list[int]
    reply_tokens: int


def encode_records(
    tokenizer: Tokenizer, records: Sequence[Sequence[WrittenText]]
) -> list[list[TextIds]]:
    """The ids of every text of every record, as ``encode_batch`` gives them for whole texts."""
    cuts = tokenizer.bounds.cuts_at_words
    heads = [_common_head(record) if cuts else 0 for record in records]
    pieces: list[str] = []
    ends: list[str | None] = []
    for record, head in zip(records, heads, strict=True):
        pieces.append(record[0].text[:head])
        for written in record:
            rest, reply = written.text[head:], written.reply or ""
            ends.append(_ends_of(rest, reply) if cuts else None)
            pieces += [rest, reply if ends[-1] is None else ends[-1]]
    found, found_ends = iter(tokenizer.words.encode(pieces)), iter(ends)
    encoded = []
    for record in records:
        begin = next(found).ids
        encoded.append(
            [_join(begin, next(found), next(found), next(found_ends), each) for each in record]
        )
    return encoded


def _ends_of(text: str, reply: str) -> str | None:
    """What is before the first cut of the reply in a text and what is behind its last.

    Their tokens, and those between the first cut of the text and its last, are the reply's. None
    where its cuts are not all that the text has.
    """
    start = text.find(reply)
    first, last = first_cut(reply), last_cut(reply, len(reply))
    if start < 0 or first is None or last is None or first == last:
        return None
    if (first_cut(text), last_cut(text, len(text))) != (start + first, start + last):
        return None
    return reply[:first] + reply[last:]


def _join(
    begin: np.ndarray, rest: WordIds, counted: WordIds, ends: str | None, written: WrittenText
) -> TextIds:
    """``counted``: of the reply, or of its ``ends`` where there are."""
    ids = np.concatenate([begin, rest.ids]).tolist()
    if written.reply is None:
        return TextIds(ids, len(ids))
    return TextIds(ids, len(counted.ids) + (0 if ends is None else rest.inner))


def _common_head(record: Sequence[WrittenText]) -> int:
    """Up to where all texts are one, and may be cut; 0 for a lone one."""
    first, *others = (written.text for written in record)
    if not others:
        return 0
    return last_cut(first, min(common_start(first, other) for other in others)) or 0


def common_start(first: str, second: str) -> int:
    """How many characters two texts begin with together; ``commonprefix`` looks at each alone."""
    low, high = 0, min(len(first), len(second))
    while low < high:
        middle = (low + high + 1) // 2
        if first[low:middle] == second[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low
