"""Texts that are far too long: known by their bytes, and cut before they are tokenized.

A server is sent texts of megabytes. To tokenize one only to refuse it, or to throw all but its end
away, holds up all others. What is said here of a tokenizer holds for every text; where it cannot be
known, nothing is said, and the text is tokenized whole.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

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
    """What the settings of a tokenizer tell of all texts.

    Attributes:
        bytes_per_token: the most bytes of text that one token may stand for; None is unknown.
        cuts_at_words: whether a text cut before the space between two words has the tokens of both
            of its parts.
    """

    bytes_per_token: int | None
    cuts_at_words: bool

    @classmethod
    def of(cls, content: Mapping[str, Any]) -> TextBounds:
        """Of the content of a ``tokenizer.json``."""
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
        """No text of more bytes has only so many tokens; None where that is unknown."""
        return None if self.bytes_per_token is None else tokens * self.bytes_per_token

    def encode_end(self, encode: Encode, text: str, tokens: int) -> list[int] | None:
        """At least the last ``tokens`` ids of those that ``encode`` finds in ``text``.

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
    """How many times fewer bytes a text may have behind it; None is unknown."""
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
