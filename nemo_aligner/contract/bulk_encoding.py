"""Fast tokenization of many samples, with the ids that tokenizing each sample whole would give.

Three optimizations rest on one property of the common byte-level BPE tokenizers: if a text is cut
before the space between two words, its tokens are those of the two parts
(``TextBounds.cuts_at_words``). Such a position is called a cut. With a tokenizer that lacks this
property every text is tokenized whole.

- ``encode_records`` tokenizes the shared prefix of a record's samples once;
- ``WordMemo`` looks up words that were tokenized before;
- ``TextBounds`` bounds the number of tokens of a text before it is tokenized, and encodes only the
  end of a text that is far too long.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from nemo_aligner.contract.tokenizer import Tokenizer

# Tokenization of records. The prefix that all samples of a record share is tokenized once.


class WrittenText(NamedTuple):
    """The whole text of a sample, as it will be tokenized, and the text of its reply.

    ``reply`` is None for raw text, all of which counts as the reply.
    """

    text: str
    reply: str | None


class TextIds(NamedTuple):
    """The token ids of a sample before truncation, and the lengths of its reply and steps.

    Attributes:
        reply_tokens: number of tokens of the reply, tokenized by itself.
        reads: for a contract with steps, the indices in ``token_ids`` where rewards are read.
        step_tokens: for a contract with steps, the number of tokens of each step, tokenized by
            itself; else empty.
    """

    token_ids: list[int]
    reply_tokens: int
    reads: tuple[int, ...] | None = None
    step_tokens: tuple[int, ...] = ()


def encode_records(
    tokenizer: Tokenizer, records: Sequence[Sequence[WrittenText]]
) -> list[list[TextIds]]:
    """Tokenize the samples of all records, and count the tokens of their replies.

    The ids are those of ``Tokenizer.encode_batch``. The optimizations in the docstring of this
    module make it faster.

    Returns:
        For each record the ``TextIds`` of its samples, without ``reads`` and ``step_tokens``.
    """
    cuts = tokenizer.bounds.cuts_at_words
    prefix_lengths = [_shared_prefix_length(record) if cuts else 0 for record in records]
    # The pieces of a record are its shared prefix, then two pieces per sample: the text after the
    # prefix, and the reply or the ends of the reply (``_cut_reply_ends``), to count its tokens.
    pieces: list[str] = []
    reply_ends: list[str | None] = []
    for record, prefix_length in zip(records, prefix_lengths, strict=True):
        pieces.append(record[0].text[:prefix_length])
        for sample in record:
            suffix, reply = sample.text[prefix_length:], sample.reply or ""
            ends = _cut_reply_ends(suffix, reply) if cuts else None
            reply_ends.append(ends)
            pieces += [suffix, reply if ends is None else ends]
    piece_ids, remaining_ends = iter(tokenizer.words.encode(pieces)), iter(reply_ends)
    encoded = []
    for record in records:
        prefix_ids = next(piece_ids).ids
        encoded.append(
            [
                _join_pieces(
                    prefix_ids, next(piece_ids), next(piece_ids), next(remaining_ends), sample
                )
                for sample in record
            ]
        )
    return encoded


def _cut_reply_ends(text: str, reply: str) -> str | None:
    """Return the first and last words of a reply, which must be tokenized to count its tokens.

    A cut is a position before the space between two words, where a text may be split without a
    change of its tokens. The result is the part before the reply's first cut and the part after its
    last cut, joined.

    The tokens between the two cuts are counted when ``text``, which contains the reply, is
    tokenized (``WordIds.inner``). Return None if the first or last cut of ``text`` is not that of
    the reply: then all of the reply must be tokenized.
    """
    start = text.find(reply)
    first, last = first_cut(reply), last_cut(reply, len(reply))
    if start < 0 or first is None or last is None or first == last:
        return None
    if (first_cut(text), last_cut(text, len(text))) != (start + first, start + last):
        return None
    return reply[:first] + reply[last:]


def _join_pieces(
    prefix_ids: np.ndarray, suffix: WordIds, counted: WordIds, ends: str | None, sample: WrittenText
) -> TextIds:
    """Join the ids of a sample, and count the tokens of its reply.

    Args:
        prefix_ids: the ids of the prefix that all samples of the record share.
        suffix: the ids of the text after this prefix.
        counted: the ids of ``ends`` or, if ``ends`` is None, of the whole reply.
        ends: the result of ``_cut_reply_ends``.
    """
    ids = np.concatenate([prefix_ids, suffix.ids]).tolist()
    if sample.reply is None:
        return TextIds(ids, len(ids))
    return TextIds(ids, len(counted.ids) + (0 if ends is None else suffix.inner))


def _shared_prefix_length(record: Sequence[WrittenText]) -> int:
    """Return the length in characters of the prefix that all samples of a record share.

    The prefix ends before the space between two words, where it can be tokenized by itself.

    It is 0 for a record of one sample, which shares nothing.
    """
    first, *other_texts = (sample.text for sample in record)
    if not other_texts:
        return 0
    shared_length = min(common_prefix_length(first, text) for text in other_texts)
    return last_cut(first, shared_length) or 0


def common_prefix_length(first: str, second: str) -> int:
    """Return the length of the common prefix of two strings.

    Bisection over slices is far faster than the loop over characters in ``os.path.commonprefix``.
    """
    low, high = 0, min(len(first), len(second))
    while low < high:
        middle = (low + high + 1) // 2
        if first[low:middle] == second[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


# Tokenization with a cache of words.
#
# If a tokenizer allows cuts between words, the ids of a text are the ids of its words in order.

# The space between two words, where a text is cut. The pattern begins with a literal space, because
# the regex engine finds literals fast.
_SPACE = re.compile(r" (?<=[A-Za-z] )(?=[A-Za-z])")
# Words of more letters hardly ever repeat, so they are not cached.
_MAX_WORD_LENGTH = 24
# Largest number of words in the cache; an entry takes about 200 bytes.
_MAX_WORDS = 1 << 17

EncodeBatch = Callable[[Sequence[str]], list[list[int]]]
_ID = np.dtype(np.int32)


class WordIds(NamedTuple):
    """The ``[L]`` int32 ids of a text, and how many of them lie between its first and last word.

    ``inner`` is this number. It is 0 for a text without a space between two words.
    """

    ids: np.ndarray
    inner: int = 0


class WordMemo:
    """A cache from each word to the token ids of the word with a space in front.

    Args:
        encode_batch: the tokenizer's ``encode_batch``.
        cuts_at_words: True if no token spans the space between two words; if False, nothing is
            cached.
    """

    def __init__(self, encode_batch: EncodeBatch, cuts_at_words: bool) -> None:
        self._encode_batch = encode_batch
        self._cuts_at_words = cuts_at_words
        self._ids: dict[str, bytes] = {}

    def encode(self, texts: Sequence[str]) -> list[WordIds]:
        """Return the ids that ``encode_batch`` gives, but tokenize only words not in the cache."""
        if not self._cuts_at_words:
            return [WordIds(np.array(ids, dtype=_ID)) for ids in self._encode_batch(texts)]
        parts = [_SPACE.split(text) for text in texts]
        first_ids = self._encode_batch([first for first, *_ in parts])
        new_words = set().union(*(words for _, *words in parts)) - self._ids.keys()
        self._add_words(list(new_words))
        encoded = [
            self._join_ids(ids, words) for ids, (_, *words) in zip(first_ids, parts, strict=True)
        ]
        self._drop_words(new_words)
        return encoded

    def _join_ids(self, first_ids: list[int], words: list[str]) -> WordIds:
        parts = [_to_bytes(first_ids), *map(self._ids.__getitem__, words)]
        ids = b"".join(parts)
        ends = len(parts[0]) + len(parts[-1])
        inner = (len(ids) - ends) // _ID.itemsize if words else 0
        return WordIds(np.frombuffer(ids, dtype=_ID), inner)

    def _add_words(self, words: list[str]) -> None:
        ids = self._encode_batch([f" {word}" for word in words])
        self._ids.update(zip(words, map(_to_bytes, ids), strict=True))

    def _drop_words(self, new_words: set[str]) -> None:
        """Remove new words that are unlikely to repeat because they are long.

        If the cache is full, remove all new words.
        """
        is_full = len(self._ids) > _MAX_WORDS
        for word in new_words:
            if is_full or len(word) > _MAX_WORD_LENGTH:
                del self._ids[word]


def _to_bytes(ids: list[int]) -> bytes:
    return np.array(ids, dtype=_ID).tobytes()


# Texts that are far too long.
#
# Servers receive texts of megabytes. Tokenizing one only to reject it, or to keep its last tokens,
# would delay all other requests.

# NFC shrinks the UTF-8 bytes of a text to no less than a third (Unicode, UAX 15).
_NFC_SHRINKS = 3
# Pre-tokenizers of Llama 3 and Qwen 2. None of their pieces spans the space between two words.
_KNOWN_REGEXES = frozenset(
    {
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
        r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
        r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    }
)
# A cut: the position before the space between two words, which no piece of a pre-tokenizer spans.
_CUT = re.compile(r"(?<=[A-Za-z])(?= [A-Za-z])")
_LAST_CUT = re.compile(r".*[A-Za-z](?= [A-Za-z])", re.DOTALL)
_LETTERS_PER_TOKEN = 8

Encode = Callable[[str], list[int]]


@dataclass(frozen=True)
class TextBounds:
    """Properties that a tokenizer's settings guarantee for every text.

    Attributes:
        bytes_per_token: largest number of UTF-8 bytes of text that one token stands for; None if
            unknown.
        cuts_at_words: True if a text may be cut before the space between two words: its tokens are
            those of its two parts.
    """

    bytes_per_token: int | None
    cuts_at_words: bool

    @classmethod
    def of(cls, content: Mapping[str, Any]) -> TextBounds:
        """Derive the bounds from the content of a ``tokenizer.json``."""
        added = content.get("added_tokens") or []
        shrink_factor = _shrink_factor(content.get("normalizer"))
        steps = _list_steps(content.get("pre_tokenizer"))
        model = content.get("model") or {}
        is_plain = (
            shrink_factor is not None
            and all(_keeps_text(step) for step in steps)
            and any(step.get("type") == "ByteLevel" for step in steps)
            and model.get("type") == "BPE"
            and not any(token.get("lstrip") or token.get("rstrip") for token in added)
        )
        if not is_plain:
            return cls(None, False)
        # In a byte-level vocabulary each character stands for one byte.
        tokens = [*map(len, model.get("vocab", {}))]
        tokens += [len(token["content"].encode()) for token in added]
        with_spaces = any(" " in token["content"] or token.get("single_word") for token in added)
        return cls(
            max(tokens, default=1) * (shrink_factor or 1),
            not with_spaces
            and not model.get("dropout")
            and any(map(_ends_at_words, steps))
            and all(step["type"] != "Split" or _ends_at_words(step) for step in steps),
        )

    def most_bytes(self, tokens: int) -> int | None:
        """Return how many bytes of text ``tokens`` tokens can stand for; None if unknown."""
        return None if self.bytes_per_token is None else tokens * self.bytes_per_token

    def encode_end(self, encode: Encode, text: str, tokens: int) -> list[int] | None:
        """Encode only the end of ``text``: at least the last ``tokens`` ids of ``encode(text)``.

        Return None if the text is too short to gain anything, or has no cut; then the caller must
        encode all of it.
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
    """Return the index of the first space between two words; None if there is none."""
    match = _CUT.search(text)
    return None if match is None else match.start()


def last_cut(text: str, stop: int) -> int | None:
    """Return the index of the last space between two words in ``text[:stop]``; None without one."""
    match = _LAST_CUT.match(text, 0, stop)
    return None if match is None else match.end()


def _shrink_factor(normalizer: Mapping[str, Any] | None) -> int | None:
    """Return the largest factor by which a normalizer shrinks a text in bytes; None if unknown.

    One token can stand for that many times more bytes of the original text.
    """
    if normalizer is None:
        return 1
    return _NFC_SHRINKS if normalizer.get("type") == "NFC" else None


def _list_steps(pre_tokenizer: Mapping[str, Any] | None) -> list[Mapping[str, Any]]:
    """Return the steps of a pre-tokenizer: several for the type ``Sequence``, else one."""
    if pre_tokenizer is None:
        return []
    if pre_tokenizer.get("type") == "Sequence":
        return list(pre_tokenizer.get("pretokenizers") or [])
    return [pre_tokenizer]


def _keeps_text(step: Mapping[str, Any]) -> bool:
    """Return whether a pre-tokenizer step only splits a text and drops nothing."""
    kind = step.get("type")
    return kind in ("ByteLevel", "Digits") or (
        kind == "Split" and step.get("behavior") == "Isolated"
    )


def _ends_at_words(step: Mapping[str, Any]) -> bool:
    """Return whether a pre-tokenizer step splits the text before every space between two words."""
    if step.get("type") == "ByteLevel":
        return bool(step.get("use_regex", True))
    pattern = step.get("pattern") or {}
    return (
        step.get("type") == "Split"
        and not step.get("invert")
        and pattern.get("Regex") in _KNOWN_REGEXES
    )
