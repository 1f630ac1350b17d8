"""Tokens that only the other files of a Hugging Face tokenizer name, not its ``tokenizer.json``.

transformers adds them when it loads a folder. So does ``load_hf_tokenizer``, for every folder that
has no scoring contract yet: a contract fingerprints ``tokenizer.json``, and ids come from that file
alone.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tokenizers import AddedToken

from nemo_aligner.contract.fields import is_text
from nemo_aligner.contract.tokenizer import Tokenizer, load_tokenizer
from nemo_aligner.utils.errors import DataError, short, shown

_CONFIG = "tokenizer_config.json"
_SPECIAL, _ADDED = "special_tokens_map.json", "added_tokens.json"
_BY_ID = "added_tokens_decoder"
# A padding token is left out: no text has one, and the model may have no row for it.
_BOUNDARIES = ("bos_token", "eos_token")
_LISTS = ("additional_special_tokens", "extra_special_tokens")
_RULES = ("single_word", "lstrip", "rstrip", "normalized", "special")


def load_hf_tokenizer(folder: str | Path, where: str | None = None) -> Tokenizer:
    """Read a tokenizer folder as transformers does, with the tokens that only other files name.

    They get the ids that transformers gives them: those in the vocabulary, or else the next free
    ones. A token that has other rules in ``tokenizer_config.json`` gets these, as in transformers.
    ``tokenizer.json`` stays as it is, byte for byte, if nothing is missing.

    Args:
        where: names the folder in errors, if it is a copy.

    Raises:
        DataError: there is no ``tokenizer.json``, or a file is no tokenizer's.
    """
    tokenizer = load_tokenizer(folder, where)
    missing = _missing_tokens(Path(folder), where or str(folder), tokenizer.all_added_tokens)
    return tokenizer.with_tokens(missing) if missing else tokenizer


def _missing_tokens(folder: Path, name: str, existing: list[AddedToken]) -> list[AddedToken]:
    """List the tokens to add, in the order in which transformers adds them."""
    where, config = f"{name}/{_CONFIG}", _read(folder, name, _CONFIG)
    names = {token.content for token in existing}
    if _BY_ID in config:
        by_id = config[_BY_ID]
        if not isinstance(by_id, dict) or not all(key.isdecimal() for key in by_id):
            raise DataError(f"{where}: {_BY_ID}: got {shown(by_id)}, wanted tokens by their ids")
        rules = {repr(token) for token in existing}
        tokens = [_added_token(by_id[key], where) for key in sorted(by_id, key=_as_number)]
        missing = [token for token in tokens if repr(token) not in rules]
    else:
        # Older folders, in which these two files say it.
        config = {**_read(folder, name, _SPECIAL), **config}
        ids = _read(folder, name, _ADDED)
        if not all(type(number) is int for number in ids.values()):
            raise DataError(f"{name}/{_ADDED}: got {shown(ids)}, wanted ids by token")
        missing = [AddedToken(name) for name in sorted(ids, key=lambda name: ids[name])]
        missing = [token for token in missing if token.content not in names]
    names |= {token.content for token in missing}
    for entry in _special_entries(config, where):
        token = _added_token(entry, where, special=True)
        if token.content not in names:
            names.add(token.content)
            missing.append(token)
    return missing


def _special_entries(config: Mapping[str, Any], where: str) -> list[Any]:
    entries = [config.get(key) for key in _BOUNDARIES]
    for key in _LISTS:
        tokens = config.get(key)
        if not isinstance(tokens, list | dict | None):
            raise DataError(f"{where}: {key}: got {shown(tokens)}, wanted a list of tokens")
        # By their names, or without.
        entries += tokens.values() if isinstance(tokens, dict) else tokens or []
    padding = config.get("pad_token")
    return [entry for entry in entries if entry is not None and entry != padding]


def _added_token(entry: Any, where: str, *, special: bool = False) -> AddedToken:
    """Make a token of its name, or of its name with its rules."""
    if is_text(entry):
        return AddedToken(entry, special=special, normalized=not special)
    if isinstance(entry, dict) and is_text(entry.get("content")):
        rules = {key: entry[key] for key in _RULES if key in entry}
        if all(isinstance(rule, bool) for rule in rules.values()):
            return AddedToken(entry["content"], **{"special": special, **rules})
    raise DataError(f"{where}: got {shown(entry)}, wanted a token, or its content and rules")


def _as_number(key: str) -> int:
    # Python reads no number of more than 4,300 digits.
    return int(key[:20])


def _read(folder: Path, name: str, file: str) -> dict[str, Any]:
    """Read the JSON object in ``file``, whose folder errors call ``name``; {} if there is none."""
    path, where = folder / file, f"{name}/{file}"
    if not path.is_file():
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise DataError(f"{where}: not JSON: {short(error)}") from error
    if not isinstance(content, dict):
        raise DataError(f"{where}: got {shown(content)}, wanted a JSON object")
    return content
