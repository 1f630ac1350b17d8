"""The files of a Hugging Face reward model: safetensors shards, config and tokenizer."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from nemo_aligner.checkpoint.hf.families.family import ModelFamily
from nemo_aligner.checkpoint.nemo.write import scratch_beside, sync_to_disk
from nemo_aligner.errors import CheckpointError
from nemo_aligner.text.contract import ScoringContract
from nemo_aligner.text.templates import with_kwargs_inside
from nemo_aligner.text.tokenizer import Tokenizer

_TOKENIZER_CONFIG = "tokenizer_config.json"
_SPECIAL_TOKENS = "special_tokens_map.json"
_TEMPLATE = "chat_template.jinja"
_CLASS_OF_5, _CLASS_OF_BOTH = "TokenizersBackend", "PreTrainedTokenizerFast"
_NEW_PAD = "<|pad|>"
# Tokens that models carry and no text ends with, the likeliest first.
_PAD_LIKE = (r"pad", r"endoftext", r"reserved|unused")


@contextmanager
def folder_when_whole(output: Path) -> Iterator[Path]:
    """A folder to be filled, that is called ``output`` when the block has ended without an error.

    Raises:
        CheckpointError: ``output`` exists, or cannot be made.
    """
    with scratch_beside(output) as scratch:
        staging = scratch / "folder"
        staging.mkdir()
        yield staging
        for file in staging.iterdir():
            sync_to_disk(file)
        staging.rename(output)
    sync_to_disk(output.parent)


class ShardWriter:
    """Writes tensors as they come into files of at most ``max_bytes``, or of one larger tensor."""

    def __init__(self, folder: Path, max_bytes: int) -> None:
        self._folder = folder
        self._max_bytes = max_bytes
        self._waiting: dict[str, Tensor] = {}
        self._files: list[list[str]] = []
        self._bytes = self._total = 0

    def add(self, name: str, tensor: Tensor) -> None:
        """Take one tensor; write those before it if it does not fit beside them."""
        size = tensor.numel() * tensor.element_size()
        if self._waiting and self._bytes + size > self._max_bytes:
            self._flush()
        # A part of a larger tensor would keep all of it in memory.
        is_part = tensor.untyped_storage().nbytes() > size
        self._waiting[name] = tensor.clone() if is_part else tensor
        self._bytes += size
        self._total += size

    def finish(self) -> int:
        """Write what is left, name the files and, if there are several, the index; their number."""
        self._flush()
        count = len(self._files)
        if count == 1:
            self._path(1).rename(self._folder / "model.safetensors")
            return count
        weight_map = {}
        for number, names in enumerate(self._files, start=1):
            file = f"model-{number:05d}-of-{count:05d}.safetensors"
            self._path(number).rename(self._folder / file)
            weight_map.update(dict.fromkeys(names, file))
        index = {"metadata": {"total_size": self._total}, "weight_map": weight_map}
        write_json(self._folder / "model.safetensors.index.json", index)
        return count

    def _flush(self) -> None:
        self._files.append(list(self._waiting))
        tensors = {name: tensor.contiguous() for name, tensor in self._waiting.items()}
        path = self._path(len(self._files))
        path.touch()
        mode = path.stat().st_mode
        try:
            save_file(tensors, path, metadata={"format": "pt"})
        except (OSError, SafetensorError) as error:
            raise CheckpointError(
                f"{self._folder}: the weights cannot be written: {error}"
            ) from error
        path.chmod(mode)  # safetensors lets nobody else read what it writes
        self._waiting, self._bytes = {}, 0

    def _path(self, number: int) -> Path:
        return self._folder / f".shard-{number}"


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """JSON as people read it."""
    path.write_text(
        json.dumps(content, indent=2, ensure_ascii=False, allow_nan=False) + "\n", encoding="utf-8"
    )


def choose_pad(tokenizer: Tokenizer, last_ids: Collection[int]) -> tuple[str, int]:
    """A token to pad with, and its id; the id after all others is of a token that is to be added.

    transformers reads the reward at the last token that is not padding. So the pad token must be
    none that a text ends with: not EOS, and none of ``last_ids``.
    """
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
    """The tokenizer's files byte for byte, but for its pad token, its class and the contract's
    template, which has the contract's ``chat_template_kwargs`` inside.

    A token that ``tokenizer.json`` does not have is added by transformers, behind all others.
    """
    tokenizer.save(folder)
    changes: dict[str, Any] = {}
    if tokenizer.pad_token != pad_token:
        changes["pad_token"] = pad_token
    template = with_kwargs_inside(contract.template, contract.template_kwargs)
    if (tokenizer.chat_template or "") != template:
        changes["chat_template"] = None
        (folder / _TEMPLATE).unlink(missing_ok=True)
        if template:
            (folder / _TEMPLATE).write_text(template, encoding="utf-8", newline="")
    config = _read_json(folder / _TOKENIZER_CONFIG)
    _change_json(folder / _TOKENIZER_CONFIG, {**changes, **_for_transformers_4(config)})
    if (folder / _SPECIAL_TOKENS).is_file():
        _change_json(folder / _SPECIAL_TOKENS, changes)


def _for_transformers_4(config: Mapping[str, Any]) -> dict[str, Any]:
    """What ``tokenizer_config.json`` must have for transformers 4, where 5 wrote it.

    Version 5 names a class of its own for any ``tokenizer.json``, which 4 refuses; and 4's class
    gives token types, which decoders refuse, unless it is told what the model takes.
    """
    if config.get("tokenizer_class") not in (_CLASS_OF_5, _CLASS_OF_BOTH):
        return {}
    inputs = config.get("model_input_names") or ["input_ids", "attention_mask"]
    return {"tokenizer_class": _CLASS_OF_BOTH, "model_input_names": inputs}


def _change_json(path: Path, changes: Mapping[str, Any]) -> None:
    """Set these keys, or drop those that are None; a file that would be the same stays as it is."""
    content = _read_json(path)
    changed = {k: v for k, v in {**content, **changes}.items() if v is not None}
    if changed != content:
        write_json(path, changed)


def _read_json(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}


def hf_config(
    family: ModelFamily,
    config: Mapping[str, Any],
    contract: ScoringContract,
    architecture: str,
    pad_id: int,
    dtype: str,
) -> dict[str, Any]:
    """``config.json`` of a reward model; ``config`` is NeMo's, ``dtype`` the stored weights'."""
    names = dict(enumerate(contract.attributes))
    return {
        "architectures": [architecture],
        **family.to_hf(config),
        "vocab_size": max(config["vocab_size"], pad_id + 1),
        "num_labels": len(names),
        "id2label": names,
        "label2id": {name: number for number, name in names.items()},
        "problem_type": "regression",  # what makes vLLM give scores as they are
        "bos_token_id": contract.bos_id,
        "eos_token_id": contract.eos_id,
        "pad_token_id": pad_id,
        # transformers 5 reads the first, 4 the second.
        "dtype": dtype,
        "torch_dtype": dtype,
        "scoring_contract_hash": contract.hash,
        # The head has no bias: a reward is the logit and its attribute's mean label.
        "label_means": dict(zip(contract.attributes, contract.label_means, strict=True)),
    }
