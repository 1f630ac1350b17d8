"""Tokenizer of the scoring contract, and bulk tokenization: shared prefixes, repeated words, long
texts.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from nemo_aligner.contract.fields import is_text
from nemo_aligner.utils.errors import DataError, short, shown

if TYPE_CHECKING:
    import tokenizers

# Text to ids: the part of the scoring contract that a tokenizer knows.
#
# A tokenizer here is a folder with ``tokenizer.json`` (what ``save_pretrained`` of a fast tokenizer
# writes), and beside it ``tokenizer_config.json`` and ``chat_template.jinja`` where there are any.
# ``tokenizer.json`` is run as it stands, by the ``tokenizers`` library: a class name in the config
# cannot replace it. No special tokens are added here; those that are written in the text, as a chat
# template writes them, are recognised.

_JSON = "tokenizer.json"
_CONFIG = "tokenizer_config.json"
_SPECIAL = "special_tokens_map.json"
_TEMPLATE = "chat_template.jinja"
_FILES = (_JSON, _CONFIG, _SPECIAL, _TEMPLATE)
# The parts of tokenizer.json that decide the ids of a text when no special tokens are added.
_PARTS_THAT_MATTER = ("added_tokens", "normalizer", "pre_tokenizer", "model")


class Tokenizer:
    """A fast tokenizer held in memory, with the files it came from (name to content)."""

    def __init__(self, files: dict[str, bytes], where: str = "tokenizer") -> None:
        import tokenizers

        self._files = files
        self._where = where
        try:
            self._backend: tokenizers.Tokenizer = tokenizers.Tokenizer.from_buffer(files[_JSON])
        except Exception as error:  # the library raises bare Exception
            raise DataError(f"{where}/{_JSON}: not a tokenizer: {short(error)}") from error
        # tokenizer.json keeps both as they were set last.
        self._backend.no_truncation()
        self._backend.no_padding()
        self._check()

    def __reduce__(self) -> tuple[Any, ...]:
        return Tokenizer, (self._files, self._where)

    def _check(self) -> None:
        """Find now what is no tokenizer, and not at the first text."""
        try:
            self._backend.encode("a")
            self._backend.encode("a", add_special_tokens=False)
        except Exception as error:  # as above
            raise DataError(f"{self._where}/{_JSON}: it encodes nothing: {short(error)}") from error
        _ = self.bos_id, self.eos_id, self.pad_token, self.chat_template

    @cached_property
    def _config(self) -> dict[str, Any]:
        config: dict[str, Any] = {}
        for name in (_SPECIAL, _CONFIG):
            if name in self._files:
                try:
                    content = json.loads(self._files[name])
                except (ValueError, RecursionError) as error:
                    raise DataError(f"{self._where}/{name}: not JSON: {error}") from error
                if not isinstance(content, dict):
                    raise DataError(f"{self._where}/{name}: wanted a JSON object")
                config.update(content)
        return config

    def _special_token(self, name: str) -> str | None:
        value = self._config.get(name)
        token = value.get("content") if isinstance(value, dict) else value
        if token is not None and not is_text(token):
            raise DataError(f"{self._where}/{_CONFIG}: {name}: got {shown(token)}, wanted a text")
        return token

    def _special_id(self, name: str) -> int | None:
        token = self._special_token(name)
        return None if token is None else self._backend.token_to_id(token)

    @cached_property
    def bos_id(self) -> int | None:
        return self._special_id("bos_token")

    @cached_property
    def eos_id(self) -> int | None:
        return self._special_id("eos_token")

    @property
    def bos_token(self) -> str:
        """Empty where there is none."""
        return self._special_token("bos_token") or ""

    @property
    def eos_token(self) -> str:
        """Empty where there is none."""
        return self._special_token("eos_token") or ""

    @property
    def pad_token(self) -> str:
        """Empty where there is none."""
        return self._special_token("pad_token") or ""

    @cached_property
    def vocab_size(self) -> int:
        """One more than the highest id."""
        return max(self._backend.get_vocab(with_added_tokens=True).values()) + 1

    def check_fits(self, vocab_size: int) -> None:
        """Refuse a model that has embeddings for ``vocab_size`` tokens, and not for all of these.

        Raises:
            DataError: a text could have ids that the model has not.
        """
        if self.vocab_size > vocab_size:
            first = shown(self._backend.id_to_token(vocab_size))
            raise DataError(
                f"{self._where}: got ids up to {self.vocab_size - 1} ({first} is {vocab_size}), "
                f"wanted them below {vocab_size}, as the model has no embeddings beyond; resize "
                "these, or take these tokens out"
            )

    @cached_property
    def chat_template(self) -> str | None:
        """The tokenizer's own: ``chat_template.jinja``, or the config's (the one named default)."""
        if _TEMPLATE in self._files:
            try:
                return self._files[_TEMPLATE].decode("utf-8")
            except UnicodeDecodeError as error:
                raise DataError(f"{self._where}/{_TEMPLATE}: {error}") from error
        template = self._config.get("chat_template")
        if isinstance(template, list):
            named = {
                str(entry.get("name")): entry.get("template")
                for entry in template
                if isinstance(entry, dict)
            }
            template = named.get("default")
        if template is not None and not is_text(template):
            raise DataError(f"{self._where}/{_CONFIG}: chat_template: wanted a text")
        return template

    @cached_property
    def adds_bos(self) -> bool:
        """True if the tokenizer puts BOS before a bare text when asked for special tokens."""
        # A text alone has none, and gets it where special tokens are asked for.
        return self.encode("a")[:1] != [self.bos_id] == self._backend.encode("a").ids[:1]

    @cached_property
    def adds_eos(self) -> bool:
        """True if the tokenizer puts EOS after a bare text when asked for special tokens."""
        return self.encode("a")[-1:] != [self.eos_id] == self._backend.encode("a").ids[-1:]

    @cached_property
    def fingerprint(self) -> str:
        """sha256 (hex) of everything that decides ids: vocabulary, rules, special tokens.

        The layout of the files, the chat template and the settings for padding do not count.
        """
        content = json.loads(self._files[_JSON])
        matter = {part: content.get(part) for part in _PARTS_THAT_MATTER}
        matter["bos_token"], matter["eos_token"] = self.bos_token, self.eos_token
        canonical = json.dumps(matter, sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(canonical.encode("ascii")).hexdigest()

    @cached_property
    def special_ids(self) -> frozenset[int]:
        """The ids of tokens that stand for no text of people's."""
        added = self._backend.get_added_tokens_decoder()
        return frozenset(token_id for token_id, token in added.items() if token.special)

    @property
    def all_added_tokens(self) -> list[tokenizers.AddedToken]:
        """All tokens that are matched before a text is split, special or not."""
        return list(self._backend.get_added_tokens_decoder().values())

    def with_tokens(self, tokens: Sequence[tokenizers.AddedToken]) -> Tokenizer:
        """Make a copy with ``tokens`` in its ``tokenizer.json``, too, by the next free ids."""
        import tokenizers

        # Read anew: the backend has lost the file's own truncation and padding.
        backend = tokenizers.Tokenizer.from_buffer(self._files[_JSON])
        backend.add_tokens(list(tokens))
        content = backend.to_str(pretty=True).encode("utf-8")
        return Tokenizer({**self._files, _JSON: content}, self._where)

    def added_tokens(self, texts: Iterable[str]) -> list[tokenizers.AddedToken]:
        """Added tokens, special or not, that occur in ``texts``."""
        added = self._backend.get_added_tokens_decoder()
        found = dict.fromkeys(token_id for text in texts for token_id in self.encode(text))
        return [added[token_id] for token_id in found if token_id in added]

    @property
    def has_normalizer(self) -> bool:
        """True if texts are normalized before they are split into tokens."""
        return self._backend.normalizer is not None

    def normalize(self, text: str) -> str:
        """Normalize ``text`` as the tokenizer does before it splits it."""
        normalizer = self._backend.normalizer
        return text if normalizer is None else normalizer.normalize_str(text)

    @cached_property
    def bounds(self) -> TextBounds:
        """Bounds on the tokens of a text before it is tokenized."""
        return TextBounds.of(json.loads(self._files[_JSON]))

    @cached_property
    def words(self) -> WordMemo:
        """``encode_batch`` for texts in which words come again and again."""
        return WordMemo(self.encode_batch, self.bounds.cuts_at_words)

    def encode(self, text: str) -> list[int]:
        """The ids of ``text``, nothing added."""
        return self._backend.encode(text, add_special_tokens=False).ids

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """``encode`` of many texts at once, on all cores; the same ids."""
        # "fast" leaves out the offsets, which nobody reads here.
        encodings = self._backend.encode_batch_fast(list(texts), add_special_tokens=False)
        return [encoding.ids for encoding in encodings]

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of ``token_ids``, special tokens included."""
        return self._backend.decode(list(token_ids), skip_special_tokens=False)

    def token_id(self, text: str) -> int:
        """The id of the token that is ``text``.

        Raises:
            DataError: there is none, or the text alone is encoded as another token.
        """
        named, written = self._backend.token_to_id(text), self.encode(text)
        ids = {each for each in (named, *written[: len(written) == 1]) if each is not None}
        if not ids:
            raise DataError(f"token {shown(text)}: got {len(written)} tokens for it, wanted one")
        if len(ids) > 1:
            raise DataError(
                f"token {shown(text)}: its id is {named}, but a text of it alone is token "
                f"{written[0]}; wanted one of the two numbers"
            )
        return ids.pop()

    def save(self, folder: str | Path) -> None:
        """Write the files it was loaded from, byte for byte, into ``folder``."""
        target = Path(folder)
        target.mkdir(parents=True, exist_ok=True)
        for name, content in self._files.items():
            (target / name).write_bytes(content)


def load_tokenizer(folder: str | Path, where: str | None = None) -> Tokenizer:
    """Read a tokenizer folder into memory; the folder is not needed afterwards.

    ``where`` names the folder in errors, if it is a copy.

    Raises:
        DataError: there is no ``tokenizer.json``, or it is damaged.
    """
    source = Path(folder)
    files = {name: (source / name).read_bytes() for name in _FILES if (source / name).is_file()}
    if _JSON not in files:
        raise DataError(
            f"{where or source}: it has no {_JSON}; wanted the folder of a fast tokenizer, as "
            "save_pretrained of Hugging Face transformers writes it"
        )
    return Tokenizer(files, where or str(source))


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
