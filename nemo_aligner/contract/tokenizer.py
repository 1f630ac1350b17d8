"""Tokenizer of the scoring contract: the files of a Hugging Face fast tokenizer, in memory.

A tokenizer is a folder with ``tokenizer.json`` (written by ``save_pretrained`` of a fast tokenizer)
and optionally ``tokenizer_config.json``, ``special_tokens_map.json`` and ``chat_template.jinja``.
The ``tokenizers`` library runs ``tokenizer.json`` unchanged: a class name in the config cannot
replace it. This module adds no special tokens to a text; it recognises those that a chat template
has written.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Iterable, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nemo_aligner.contract.bulk_encoding import TextBounds, WordMemo
from nemo_aligner.contract.fields import is_text
from nemo_aligner.utils.errors import DataError, short, shown

if TYPE_CHECKING:
    import tokenizers

    from nemo_aligner.contract.chat_template import ChatTemplate
    from nemo_aligner.contract.turns import TurnMarks


_JSON = "tokenizer.json"
_CONFIG = "tokenizer_config.json"
_SPECIAL = "special_tokens_map.json"
_TEMPLATE = "chat_template.jinja"
_FILES = (_JSON, _CONFIG, _SPECIAL, _TEMPLATE)
# The parts of tokenizer.json that decide the ids of a text when no special tokens are added.
_PARTS_FINGERPRINTED = ("added_tokens", "normalizer", "pre_tokenizer", "model")


class Tokenizer:
    """A fast tokenizer in memory.

    Args:
        files: content of each file by its name, at least ``tokenizer.json``.
        location: name of the folder in error messages.

    Attributes:
        turn_marks: cache of ``contract.turns.turn_marks``, which ends with the tokenizer.
    """

    def __init__(self, files: dict[str, bytes], location: str = "tokenizer") -> None:
        import tokenizers

        self._files = files
        self._location = location
        self.turn_marks: dict[ChatTemplate, TurnMarks] = {}
        try:
            self._backend: tokenizers.Tokenizer = tokenizers.Tokenizer.from_buffer(files[_JSON])
        except Exception as error:  # the library raises bare Exception
            raise DataError(f"{location}/{_JSON}: not a tokenizer: {short(error)}") from error
        # tokenizer.json may have settings for truncation and padding. Both are turned off.
        self._backend.no_truncation()
        self._backend.no_padding()
        self._check()

    def __reduce__(self) -> tuple[Any, ...]:
        return Tokenizer, (self._files, self._location)

    def _check(self) -> None:
        """Raise DataError for damaged files now instead of at the first text."""
        try:
            self._backend.encode("a")
            self._backend.encode("a", add_special_tokens=False)
        except Exception as error:  # the library raises bare Exception
            raise DataError(
                f"{self._location}/{_JSON}: encoding a text fails: {short(error)}"
            ) from error
        _ = self.bos_id, self.eos_id, self.pad_token, self.chat_template

    @cached_property
    def _config(self) -> dict[str, Any]:
        config: dict[str, Any] = {}
        for name in (_SPECIAL, _CONFIG):
            if name in self._files:
                try:
                    content = json.loads(self._files[name])
                except (ValueError, RecursionError) as error:
                    raise DataError(f"{self._location}/{name}: not JSON: {error}") from error
                if not isinstance(content, dict):
                    raise DataError(f"{self._location}/{name}: wanted a JSON object")
                config.update(content)
        return config

    def special_token(self, name: str) -> str | None:
        """Return the text of a special token, such as ``pad_token``; None if there is none.

        Raises:
            DataError: the tokenizer's files have no text for it, but another value.
        """
        value = self._config.get(name)
        token = value.get("content") if isinstance(value, dict) else value
        if token is not None and not is_text(token):
            raise DataError(
                f"{self._location}/{_CONFIG}: {name}: got {shown(token)}, wanted a string"
            )
        return token

    def _special_id(self, name: str) -> int | None:
        token = self.special_token(name)
        return None if token is None else self._backend.token_to_id(token)

    @cached_property
    def bos_id(self) -> int | None:
        return self._special_id("bos_token")

    @cached_property
    def eos_id(self) -> int | None:
        return self._special_id("eos_token")

    @property
    def bos_token(self) -> str:
        """The BOS token's text; empty if the tokenizer has none."""
        return self.special_token("bos_token") or ""

    @property
    def eos_token(self) -> str:
        """The EOS token's text; empty if the tokenizer has none."""
        return self.special_token("eos_token") or ""

    @property
    def pad_token(self) -> str:
        """The padding token's text; empty if the tokenizer has none."""
        return self.special_token("pad_token") or ""

    @cached_property
    def vocab_size(self) -> int:
        """One more than the highest token id: the number of embeddings that a model needs."""
        return max(self._backend.get_vocab(with_added_tokens=True).values()) + 1

    def check_fits(self, vocab_size: int) -> None:
        """Check that a model with ``vocab_size`` embeddings has an embedding for every token.

        Raises:
            DataError: a token id is ``vocab_size`` or more.
        """
        if self.vocab_size > vocab_size:
            first = shown(self._backend.id_to_token(vocab_size))
            raise DataError(
                f"{self._location}: got ids up to {self.vocab_size - 1} ({first} is "
                f"{vocab_size}), wanted them below {vocab_size}: the model has only {vocab_size} "
                "embeddings. Resize its embeddings, or remove these tokens"
            )

    @cached_property
    def chat_template(self) -> str | None:
        """The tokenizer's chat template; None if it has none.

        It is ``chat_template.jinja``. Without this file it is ``chat_template`` of
        ``tokenizer_config.json``; if that has several, the one named ``default``.
        """
        if _TEMPLATE in self._files:
            try:
                return self._files[_TEMPLATE].decode("utf-8")
            except UnicodeDecodeError as error:
                raise DataError(f"{self._location}/{_TEMPLATE}: {error}") from error
        template = self._config.get("chat_template")
        if isinstance(template, list):
            named = {
                str(entry.get("name")): entry.get("template")
                for entry in template
                if isinstance(entry, dict)
            }
            template = named.get("default")
        if template is not None and not is_text(template):
            raise DataError(
                f"{self._location}/{_CONFIG}: chat_template: got {shown(template)}, wanted a string"
            )
        return template

    @cached_property
    def adds_bos(self) -> bool:
        """True if ``add_special_tokens=True`` would put BOS before a raw text."""
        # ``encode`` adds no special tokens; ``_backend.encode`` adds the default ones.
        return self.encode("a")[:1] != [self.bos_id] == self._backend.encode("a").ids[:1]

    @cached_property
    def adds_eos(self) -> bool:
        """True if ``add_special_tokens=True`` would put EOS after a raw text."""
        return self.encode("a")[-1:] != [self.eos_id] == self._backend.encode("a").ids[-1:]

    @cached_property
    def fingerprint(self) -> str:
        """sha256 (hex) of everything that decides token ids: vocabulary, rules, special tokens.

        The layout of the files, the chat template and padding settings are not included.
        """
        content = json.loads(self._files[_JSON])
        parts = {part: content.get(part) for part in _PARTS_FINGERPRINTED}
        parts["bos_token"], parts["eos_token"] = self.bos_token, self.eos_token
        canonical = json.dumps(parts, sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(canonical.encode("ascii")).hexdigest()

    @cached_property
    def special_ids(self) -> frozenset[int]:
        """Ids of the special tokens, such as BOS and end-of-turn tokens."""
        added = self._backend.get_added_tokens_decoder()
        return frozenset(token_id for token_id, token in added.items() if token.special)

    @property
    def all_added_tokens(self) -> list[tokenizers.AddedToken]:
        """All added tokens, special or not; they are matched before a text is split."""
        return list(self._backend.get_added_tokens_decoder().values())

    def with_tokens(self, tokens: Sequence[tokenizers.AddedToken]) -> Tokenizer:
        """Return a copy whose ``tokenizer.json`` also has ``tokens``, with the next free ids."""
        import tokenizers

        # The file is read again, to keep its truncation and padding, which ``self._backend`` lacks.
        backend = tokenizers.Tokenizer.from_buffer(self._files[_JSON])
        backend.add_tokens(list(tokens))
        content = backend.to_str(pretty=True).encode("utf-8")
        return Tokenizer({**self._files, _JSON: content}, self._location)

    def without_tokens(self, names: Collection[str]) -> Tokenizer:
        """Return a copy without the added tokens whose text is in ``names``."""
        files = dict(self._files)
        content = json.loads(files[_JSON])
        added = content.get("added_tokens") or []
        content["added_tokens"] = [token for token in added if token["content"] not in names]
        changed = {_JSON: content}
        for name in (_CONFIG, _SPECIAL):
            if name in files:
                changed[name] = _without_entries(json.loads(files[name]), names)
        files |= {
            name: json.dumps(content, ensure_ascii=False, indent=2).encode("utf-8")
            for name, content in changed.items()
        }
        return Tokenizer(files, self._location)

    def surplus_tokens(self, vocab_size: int) -> list[str]:
        """List the added tokens whose ids are ``vocab_size`` or more, by id.

        Tokens that samples may contain are left out: BOS, EOS, and those in the chat template.
        """
        added = self._backend.get_added_tokens_decoder()
        texts = (self.bos_token, self.eos_token, self.chat_template or "")
        names = [added[token_id].content for token_id in sorted(added) if token_id >= vocab_size]
        return [name for name in names if not any(name in text for text in texts)]

    def added_tokens(self, texts: Iterable[str]) -> list[tokenizers.AddedToken]:
        """Return the added tokens, special or not, that occur in ``texts``."""
        added = self._backend.get_added_tokens_decoder()
        token_ids = dict.fromkeys(token_id for text in texts for token_id in self.encode(text))
        return [added[token_id] for token_id in token_ids if token_id in added]

    @property
    def has_normalizer(self) -> bool:
        """True if texts are normalized before they are split into tokens."""
        return self._backend.normalizer is not None

    def normalize(self, text: str) -> str:
        """Apply the tokenizer's normalizer, such as NFC, to ``text``."""
        normalizer = self._backend.normalizer
        return text if normalizer is None else normalizer.normalize_str(text)

    @cached_property
    def bounds(self) -> TextBounds:
        """Bounds on the number of tokens of a text, known before it is tokenized."""
        return TextBounds.of(json.loads(self._files[_JSON]))

    @cached_property
    def words(self) -> WordMemo:
        """A cache of the token ids of words, which speeds up many texts with the same words."""
        return WordMemo(self.encode_batch, self.bounds.cuts_at_words)

    def encode(self, text: str) -> list[int]:
        """Return the token ids of ``text``, without adding special tokens."""
        return self._backend.encode(text, add_special_tokens=False).ids

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Encode many texts on all cores, to the same ids as ``encode``."""
        # "fast" skips the character offsets, which are not needed here.
        encodings = self._backend.encode_batch_fast(list(texts), add_special_tokens=False)
        return [encoding.ids for encoding in encodings]

    def decode(self, token_ids: Sequence[int]) -> str:
        """Return the text of ``token_ids``, special tokens included."""
        return self._backend.decode(list(token_ids), skip_special_tokens=False)

    def token_id(self, text: str) -> int:
        """Return the id of the single token ``text``.

        Raises:
            DataError: there is no such token, or encoding ``text`` gives a token other than its
                entry in the vocabulary.
        """
        vocabulary_id, encoded = self._backend.token_to_id(text), self.encode(text)
        ids = set() if vocabulary_id is None else {vocabulary_id}
        if len(encoded) == 1:
            ids.add(encoded[0])
        if not ids:
            raise DataError(
                f"token {shown(text)}: the tokenizer splits it into {len(encoded)} tokens, "
                "wanted a single token"
            )
        if len(ids) > 1:
            raise DataError(
                f"token {shown(text)}: it is ambiguous: the vocabulary has it as token "
                f"{vocabulary_id}, but encoding it gives token {encoded[0]}; give one of the two "
                "ids instead"
            )
        return ids.pop()

    def save(self, folder: str | Path) -> None:
        """Write the files that the tokenizer was loaded from, byte for byte, into ``folder``."""
        target = Path(folder)
        target.mkdir(parents=True, exist_ok=True)
        for name, content in self._files.items():
            (target / name).write_bytes(content)


def _without_entries(value: Any, names: Collection[str]) -> Any:
    """Return JSON values without the entries that are, or describe, a token with one of ``names``.

    Both forms of an entry are removed, at any depth: the text, and an object with its ``content``.
    """

    def is_kept(entry: Any) -> bool:
        token = entry.get("content") if isinstance(entry, dict) else entry
        return not (isinstance(token, str) and token in names)

    if isinstance(value, dict):
        return {k: _without_entries(v, names) for k, v in value.items() if is_kept(v)}
    if isinstance(value, list):
        return [_without_entries(entry, names) for entry in value if is_kept(entry)]
    return value


def load_tokenizer(folder: str | Path, location: str | None = None) -> Tokenizer:
    """Read a tokenizer folder into memory; the folder is not needed afterwards.

    Args:
        location: name of the folder in error messages, for example if it is a temporary copy;
            None uses its path.

    Raises:
        DataError: there is no ``tokenizer.json``, or it is damaged.
    """
    source = Path(folder)
    files = {name: (source / name).read_bytes() for name in _FILES if (source / name).is_file()}
    if _JSON not in files:
        raise DataError(
            f"{location or source}: it has no {_JSON}; wanted the folder of a fast tokenizer, as "
            "save_pretrained of Hugging Face transformers writes it"
        )
    return Tokenizer(files, location or str(source))
