"""Write the tokenizer of an exported model: pad token, class and chat template for transformers."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nemo_aligner.checkpoint.hf.transformers_classes import is_in_transformers, load_pretrained
from nemo_aligner.contract.contract import ScoringContract
from nemo_aligner.contract.tokenizer import Tokenizer
from nemo_aligner.utils.errors import CheckpointError

if TYPE_CHECKING:
    import tokenizers

_TOKENIZER_CONFIG = "tokenizer_config.json"
_SPECIAL_TOKENS = "special_tokens_map.json"
_TEMPLATE = "chat_template.jinja"
# Names that transformers 5 writes, and those that both versions read.
_CLASS_OF_5, _CLASS_OF_BOTH = "TokenizersBackend", "PreTrainedTokenizerFast"
_SPECIALS_OF_5, _SPECIALS_OF_BOTH = "extra_special_tokens", "additional_special_tokens"
# The parts of a tokenizer's model that are not options.
_VOCABULARY = ("vocab", "merges")
_NEW_PAD = "<|pad|>"
# Patterns of unused special tokens that can serve as the pad token, in order of preference.
_PAD_LIKE = (r"pad", r"endoftext", r"reserved|unused")


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Write ``content`` to a file as indented JSON."""
    path.write_text(
        json.dumps(content, indent=2, ensure_ascii=False, allow_nan=False) + "\n", encoding="utf-8"
    )


def choose_pad(
    tokenizer: Tokenizer, contract: ScoringContract, last_ids: Collection[int]
) -> tuple[str, int]:
    """Choose a pad token; return its text and its id.

    If no existing token is suitable, the id is the vocabulary size, and the caller adds the token.

    transformers reads the reward at the last token that is not padding, so no scored sample may end
    with the pad token. The pad token is neither BOS, nor EOS, nor one of ``last_ids``.

    Args:
        contract: its ``trailing_pad_id`` is the pad token, because transformers skips no other.
        last_ids: ids at which samples are read.
    """
    if contract.trailing_pad_id is not None:
        return tokenizer.decode([contract.trailing_pad_id]), contract.trailing_pad_id
    # Prefer a special token that the vocabulary already has: a new token needs a new row in the
    # embedding.
    taken = {tokenizer.bos_id, tokenizer.eos_id, *last_ids}
    specials = {
        tokenizer.decode([token_id]): token_id for token_id in sorted(tokenizer.special_ids)
    }
    free = [token for token, token_id in specials.items() if token_id not in taken]
    if tokenizer.pad_token in free:
        return tokenizer.pad_token, specials[tokenizer.pad_token]
    for pattern in _PAD_LIKE:
        for token in free:
            if re.search(pattern, token, re.IGNORECASE):
                return token, specials[token]
    return _NEW_PAD, tokenizer.vocab_size


def write_tokenizer(
    folder: Path, tokenizer: Tokenizer, contract: ScoringContract, pad_token: str
) -> None:
    """Write the tokenizer's files, adjusted for transformers: pad token, class and chat template.

    The chat template is the contract's, with the contract's ``chat_template_kwargs`` written into
    it. If ``tokenizer.json`` lacks the pad token, transformers adds it after all others.

    An export's ``folder`` already has the model's ``config.json``: transformers chooses the
    tokenizer's class by it, too.
    """
    tokenizer.save(folder)
    changes: dict[str, Any] = {"auto_map": None}  # the export has no code
    if tokenizer.pad_token != pad_token:
        changes["pad_token"] = pad_token
    if contract.reply_marker is not None:
        # Clear these lists of special tokens: sentence-transformers miscounts a prompt by one if
        # its last token is in them.
        changes |= dict.fromkeys((_SPECIALS_OF_5, _SPECIALS_OF_BOTH))
    template = contract.chat_template(tokenizer).with_kwargs_inside()
    if template and contract.reward_token_id is not None:
        # Let the template append the reward token, at which the head reads, because most programs
        # do not append it.
        template += "{{ " + json.dumps(tokenizer.decode([contract.reward_token_id])) + " }}"
    if (tokenizer.chat_template or "") != template:
        changes["chat_template"] = None
        (folder / _TEMPLATE).unlink(missing_ok=True)
        if template:
            (folder / _TEMPLATE).write_text(template, encoding="utf-8", newline="")
    _change_json(folder / _TOKENIZER_CONFIG, changes)
    if (folder / _SPECIAL_TOKENS).is_file():
        _change_json(folder / _SPECIAL_TOKENS, changes)
    _change_json(folder / _TOKENIZER_CONFIG, _settings_of_both(folder))


def _settings_of_both(folder: Path) -> dict[str, Any]:
    """Return changes of ``tokenizer_config.json`` with which transformers 4 and 5 load ``folder``.

    Version 5 names tokenizer classes that version 4 does not have, and lists special tokens under a
    key where version 4 expects a mapping. The class that runs ``tokenizer.json`` as it is in both
    versions replaces these and all classes that do not. In version 4 that class returns token
    types, which decoders reject, unless the settings list the model's inputs.
    """
    config = _read_json(folder / _TOKENIZER_CONFIG)
    changes: dict[str, Any] = {}
    specials = config.get(_SPECIALS_OF_5)
    if isinstance(specials, list):
        changes[_SPECIALS_OF_5] = None
        changes[_SPECIALS_OF_BOTH] = specials or config.get(_SPECIALS_OF_BOTH)
    if config.get("tokenizer_class") in (_CLASS_OF_5, _CLASS_OF_BOTH) or not _runs_rules(folder):
        inputs = config.get("model_input_names") or ["input_ids", "attention_mask"]
        changes |= {"tokenizer_class": _CLASS_OF_BOTH, "model_input_names": inputs}
    return changes


def _runs_rules(folder: Path) -> bool:
    """Tell if transformers has the tokenizer's class, which runs ``tokenizer.json`` as it is.

    Some classes of transformers 5, such as its LlamaTokenizer, replace the rules in that file.
    """
    import tokenizers
    from transformers import AutoTokenizer

    name = _read_json(folder / _TOKENIZER_CONFIG).get("tokenizer_class")
    if name is not None and not is_in_transformers(str(name).removesuffix("Fast")):
        return False
    try:
        loaded = load_pretrained(AutoTokenizer, folder, local_files_only=True).backend_tokenizer
    except (CheckpointError, AttributeError):  # some classes have no backend_tokenizer
        return False
    stored = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    return _rules(loaded) == _rules(stored)


def _rules(backend: tokenizers.Tokenizer) -> list[dict[str, Any] | None]:
    """Return normalizer, pre-tokenizer and the model's options, without those of no effect."""
    content = json.loads(backend.to_str())
    options = {
        key: value for key, value in content["model"].items() if key not in _VOCABULARY and value
    }
    return [content["normalizer"], content["pre_tokenizer"], options]


def _change_json(path: Path, changes: Mapping[str, Any]) -> None:
    """Apply ``changes`` to the JSON file at ``path``: a value replaces a key's, None removes it.

    A file that would not change is not rewritten.
    """
    content = _read_json(path)
    changed = {k: v for k, v in {**content, **changes}.items() if v is not None}
    if changed != content:
        write_json(path, changed)


def _read_json(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
