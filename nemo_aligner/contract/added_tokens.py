"""Added tokens that a Hugging Face tokenizer declares outside ``tokenizer.json``.

These tokens are in ``tokenizer_config.json``, ``special_tokens_map.json`` or ``added_tokens.json``;
transformers adds them when it loads a folder. ``load_hf_tokenizer`` does the same for folders
without a scoring contract. Afterwards ``tokenizer.json`` has them, and only that file decides ids
and the contract's fingerprint.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from tokenizers import AddedToken

from nemo_aligner.contract.fields import is_text
from nemo_aligner.contract.tokenizer import Tokenizer, load_tokenizer
from nemo_aligner.utils.errors import DataError, short, shown

_CONFIG = "tokenizer_config.json"
_SPECIAL, ADDED_NAME = "special_tokens_map.json", "added_tokens.json"
_BY_ID = "added_tokens_decoder"
# Keys whose tokens are added to the tokenizer. ``pad_token`` is left out, because no text contains
# it, and the model may have no embedding for it.
_BOUNDARIES = ("bos_token", "eos_token")
_LISTS = ("additional_special_tokens", "extra_special_tokens")
_RULES = ("single_word", "lstrip", "rstrip", "normalized", "special")


def load_hf_tokenizer(folder: str | Path, location: str | None = None) -> Tokenizer:
    """Read a tokenizer folder as transformers does, with the tokens declared in its other files.

    A token gets the id that transformers gives it: its id in the vocabulary or, if it is not in the
    vocabulary, the next free id. If ``tokenizer_config.json`` and ``tokenizer.json`` have different
    matching rules for a token, those of ``tokenizer_config.json`` apply. If no token is missing,
    ``tokenizer.json`` stays unchanged byte for byte.

    Args:
        location: name of the folder in error messages, for example if it is a temporary copy;
            None uses its path.

    Raises:
        DataError: there is no ``tokenizer.json``, or a file is invalid.
    """
    tokenizer = load_tokenizer(folder, location)
    missing = _missing_tokens(Path(folder), location or str(folder), tokenizer.all_added_tokens)
    return tokenizer.with_tokens(missing) if missing else tokenizer


def without_surplus_tokens(tokenizer: Tokenizer, vocab_size: int) -> tuple[Tokenizer, list[str]]:
    """Remove added tokens that no sample contains and for which a model has no embedding.

    Published tokenizers have such tokens: one for images next to a text decoder (Gemma 3 1B), or a
    padding token that was added without resizing the embedding (Llama 2).

    Args:
        vocab_size: number of embeddings of the model.

    Returns:
        The tokenizer, the same one if it has no such token, and the texts of the removed tokens.
    """
    names = tokenizer.surplus_tokens(vocab_size)
    return (tokenizer.without_tokens(names) if names else tokenizer), names


def describe_removed_tokens(removed: Iterable[str], vocab_size: int) -> str:
    """Describe to the user what ``without_surplus_tokens`` has removed, and why."""
    return (
        f"removed from the tokenizer: {', '.join(map(short, removed))}, because the model has only "
        f"{vocab_size} embeddings"
    )


def _missing_tokens(folder: Path, name: str, existing: list[AddedToken]) -> list[AddedToken]:
    """List the declared tokens that ``tokenizer.json`` lacks, or has with other matching rules.

    Their order is the one in which transformers adds them: it decides the ids of new tokens.

    Args:
        name: name of the folder in error messages.
        existing: the added tokens of ``tokenizer.json``.
    """
    location, config = f"{name}/{_CONFIG}", _read_json_object(folder, name, _CONFIG)
    names = {token.content for token in existing}
    if _BY_ID in config:
        by_id = config[_BY_ID]
        if not isinstance(by_id, dict) or not all(key.isdecimal() for key in by_id):
            raise DataError(
                f"{location}: {_BY_ID}: got {shown(by_id)}, wanted an object that maps "
                "ids to tokens"
            )
        rules = {repr(token) for token in existing}
        tokens = [_make_added_token(by_id[key], location) for key in sorted(by_id, key=_parse_id)]
        missing = [token for token in tokens if repr(token) not in rules]
    else:
        # Older folders declare tokens in special_tokens_map.json and added_tokens.json.
        config = {**_read_json_object(folder, name, _SPECIAL), **config}
        ids = _read_json_object(folder, name, ADDED_NAME)
        if not all(type(token_id) is int for token_id in ids.values()):
            raise DataError(
                f"{name}/{ADDED_NAME}: got {shown(ids)}, wanted an object that maps tokens to ids"
            )
        missing = [AddedToken(token) for token in sorted(ids, key=lambda token: ids[token])]
        missing = [token for token in missing if token.content not in names]
    names |= {token.content for token in missing}
    for entry in _list_special_entries(config, location):
        token = _make_added_token(entry, location, special=True)
        if token.content not in names:
            names.add(token.content)
            missing.append(token)
    return missing


def _list_special_entries(config: Mapping[str, Any], location: str) -> list[Any]:
    """List the special tokens that ``config`` declares, except the padding token.

    An entry is the text of a token, or an object with its content and matching rules.
    """
    entries = [config.get(key) for key in _BOUNDARIES]
    for key in _LISTS:
        tokens = config.get(key)
        if not isinstance(tokens, list | dict | None):
            raise DataError(f"{location}: {key}: got {shown(tokens)}, wanted a list of tokens")
        # ``tokens`` is a list of tokens, or an object from names to tokens.
        entries += tokens.values() if isinstance(tokens, dict) else tokens or []
    padding = config.get("pad_token")
    return [entry for entry in entries if entry is not None and entry != padding]


def _make_added_token(entry: Any, location: str, *, special: bool = False) -> AddedToken:
    """Make a token from its text, or from an object with its content and matching rules.

    Args:
        special: whether the token is special, if ``entry`` does not say so itself.
    """
    if is_text(entry):
        return AddedToken(entry, special=special, normalized=not special)
    if isinstance(entry, dict) and is_text(entry.get("content")):
        rules = {key: entry[key] for key in _RULES if key in entry}
        if all(isinstance(rule, bool) for rule in rules.values()):
            return AddedToken(entry["content"], **{"special": special, **rules})
    raise DataError(
        f"{location}: got {shown(entry)}, wanted a token: a string, or an object with a string "
        f"under the key content. Its keys {', '.join(_RULES)} must be true or false, or missing"
    )


def _parse_id(key: str) -> int:
    # Cut the key to 20 digits, because Python does not parse integers of more than 4,300 digits.
    return int(key[:20])


def _read_json_object(folder: Path, name: str, file: str) -> dict[str, Any]:
    """Read the JSON object in ``folder / file``; {} if there is no such file.

    Args:
        name: name of the folder in error messages.
    """
    path, location = folder / file, f"{name}/{file}"
    if not path.is_file():
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise DataError(f"{location}: not JSON: {short(error)}") from error
    if not isinstance(content, dict):
        raise DataError(f"{location}: got {shown(content)}, wanted a JSON object")
    return content
