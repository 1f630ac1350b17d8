"""Bulk tokenization: shared prefixes, repeated words, and texts that are too long."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from nemo_aligner.contract.tokenizer import Tokenizer

# Records to token ids: a common beginning of a record's texts is tokenized once.
#
# If a tokenizer allows cuts between words (``TextBounds.cuts_at_words``), the ids of both parts are
# those of the whole. Any other tokenizer gets every text whole; the ids are the same.


class WrittenText(NamedTuple):
    """A text for the tokenizer, and the reply in it; None where the reply is the whole text."""

    text: str
    reply: str | None


class TextIds(NamedTuple):
    """The ids of a text at its full length, and how many tokens its reply alone has.

    Where a contract has steps, ``reads`` are the places of the ids that are read, and
    ``step_tokens`` how many tokens each step alone has.
    """

    token_ids: list[int]
    reply_tokens: int
    reads: tuple[int, ...] | None = None
    step_tokens: tuple[int, ...] = ()


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
    """The two ends of a reply, outside its first and last cut in a text.

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
    """Length of the common prefix of two texts, by halving; ``commonprefix`` is far slower."""
    low, high = 0, min(len(first), len(second))
    while low < high:
        middle = (low + high + 1) // 2
        if first[low:middle] == second[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


# Texts to token ids, with a table of words seen before.
#
# If a tokenizer allows cuts between words, the ids of a text are those of its words in order. Words
# of letters that were seen before are looked up; other pieces, and any text of another tokenizer,
# are tokenized.

# The space before each cut's second word; it begins with a letter that a search can look for.
_SPACE = re.compile(r" (?<=[A-Za-z] )(?=[A-Za-z])")
# Longer words hardly ever repeat.
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
        """Encode each text to the ids that ``encode_batch`` gives."""
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


# Texts that are far too long: known by their bytes, and cut before they are tokenized.
#
# Servers get texts of megabytes. Tokenizing one only to refuse it, or to keep its end, would delay
# all others. The bounds here hold for every text; where a tokenizer has no known bound, the text is
# tokenized whole.

# No composition of NFC has fewer than a third of the bytes that it is made of (Unicode, UAX 15).
_NFC_SHRINKS = 3
# A piece of these has its letters at its end, or no space after one: GPT-2's, Llama 3's, Qwen 2's.
_KNOWN_REGEXES = frozenset(
    {
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
        r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
        r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    }
)
# Before the space between two words: no piece of text goes beyond it to either side.
_CUT = re.compile(r"(?<=[A-Za-z])(?= [A-Za-z])")
_LAST_CUT = re.compile(r".*[A-Za-z](?= [A-Za-z])", re.DOTALL)
_LETTERS_PER_TOKEN = 8

Encode = Callable[[str], list[int]]


@dataclass(frozen=True)
class TextBounds:
    """Bounds that hold for all texts by the settings of a tokenizer.

    Attributes:
        bytes_per_token: the most bytes of text that one token may stand for; None is unknown.
        cuts_at_words: whether a text cut before the space between two words has the tokens of both
            of its parts.
    """

    bytes_per_token: int | None
    cuts_at_words: bool

    @classmethod
    def of(cls, content: Mapping[str, Any]) -> TextBounds:
        """Read the content of a ``tokenizer.json``."""
        added = content.get("added_tokens") or []
        shrinks = _shrinks_by(content.get("normalizer"))
        steps = _steps_of(content.get("pre_tokenizer"))
        model = content.get("model") or {}
        is_plain = (
            shrinks is not None
            and all(_keeps_text(step) for step in steps)
            and any(step.get("type") == "ByteLevel" for step in steps)
            and model.get("type") == "BPE"
            and not any(token.get("lstrip") or token.get("rstrip") for token in added)
        )
        if not is_plain:
            return cls(None, False)
        # A letter of a byte-level vocabulary is a byte.
        tokens = [*map(len, model.get("vocab", {}))]
        tokens += [len(token["content"].encode()) for token in added]
        with_spaces = any(" " in token["content"] or token.get("single_word") for token in added)
        return cls(
            max(tokens, default=1) * (shrinks or 1),
            not with_spaces
            and not model.get("dropout")
            and any(map(_ends_at_words, steps))
            and all(step["type"] != "Split" or _ends_at_words(step) for step in steps),
        )

    def most_bytes(self, tokens: int) -> int | None:
        """Largest number of bytes that ``tokens`` tokens can stand for; None if unknown."""
        return None if self.bytes_per_token is None else tokens * self.bytes_per_token

    def encode_end(self, encode: Encode, text: str, tokens: int) -> list[int] | None:
        """Encode at least the last ``tokens`` ids of those that ``encode`` finds in ``text``.

        They are those of the whole, whose beginning is not looked at. None if the text is too short
        for that to pay, or has no place where it can be cut.
        """
        if not self.cuts_at_words:
            return None
        length = _LETTERS_PER_TOKEN * tokens
        while length < len(text) // 2:
            cut = _CUT.search(text, len(text) - length)
            if cut is not None:
                ids = encode(text[cut.start() :])
                if len(ids) >= tokens:
                    return ids
            length *= 2
        return None


def first_cut(text: str) -> int | None:
    """The first position in ``text`` to cut at (``TextBounds.cuts_at_words``)."""
    found = _CUT.search(text)
    return None if found is None else found.start()


def last_cut(text: str, stop: int) -> int | None:
    """The last position in ``text[:stop]`` to cut at (``TextBounds.cuts_at_words``)."""
    found = _LAST_CUT.match(text, 0, stop)
    return None if found is None else found.end()


def _shrinks_by(normalizer: Mapping[str, Any] | None) -> int | None:
    """Factor by which a normalizer may shrink a text, in bytes; None if unknown."""
    if normalizer is None:
        return 1
    return _NFC_SHRINKS if normalizer.get("type") == "NFC" else None


def _steps_of(pre_tokenizer: Mapping[str, Any] | None) -> list[Mapping[str, Any]]:
    if pre_tokenizer is None:
        return []
    if pre_tokenizer.get("type") == "Sequence":
        return list(pre_tokenizer.get("pretokenizers") or [])
    return [pre_tokenizer]


def _keeps_text(step: Mapping[str, Any]) -> bool:
    kind = step.get("type")
    return kind in ("ByteLevel", "Digits") or (
        kind == "Split" and step.get("behavior") == "Isolated"
    )


def _ends_at_words(step: Mapping[str, Any]) -> bool:
    if step.get("type") == "ByteLevel":
        return bool(step.get("use_regex", True))
    pattern = step.get("pattern") or {}
    return (
        step.get("type") == "Split"
        and not step.get("invert")
        and pattern.get("Regex") in _KNOWN_REGEXES
    )
