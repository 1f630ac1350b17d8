"""Tokenizer of the scoring contract: a Hugging Face ``tokenizer.json`` and its settings, in memory."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nemo_aligner.contract.bulk_encoding import TextBounds, WordMemo
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
