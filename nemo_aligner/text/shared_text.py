"""Records to token ids: what the texts of a record begin with is tokenized once.

Where a tokenizer lets a text be cut between two words (``TextBounds.cuts_at_words``), the ids of
both parts are those of the whole. Any other tokenizer is given every text whole; the ids are the
same in both cases.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from nemo_aligner.text.long_texts import last_cut
from nemo_aligner.text.tokenizer import Tokenizer


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
    for record, head in zip(records, heads, strict=True):
        pieces.append(record[0].text[:head])
        for written in record:
            pieces += [written.text[head:], written.reply or ""]
    found = iter(tokenizer.words.encode(pieces))
    encoded = []
    for record in records:
        begin = next(found)
        encoded.append([_join(begin, next(found), next(found), written) for written in record])
    return encoded


def _join(begin: np.ndarray, rest: np.ndarray, reply: np.ndarray, written: WrittenText) -> TextIds:
    ids = np.concatenate([begin, rest]).tolist()
    return TextIds(ids, len(ids) if written.reply is None else len(reply))


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
