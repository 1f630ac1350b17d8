"""A GGUF file as the Hugging Face checkpoint that it was made of: its config and its tensors.

Needs the ``gguf`` package (extra ``[gguf]``). The format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from nemo_aligner.checkpoint.hf.families import find_gguf_family
from nemo_aligner.checkpoint.hf.families.gguf_fields import ROPE_FREQS, read_config
from nemo_aligner.checkpoint.hf.gguf.header import check_header
from nemo_aligner.checkpoint.weights.stream import UnreadTensor
from nemo_aligner.errors import CheckpointError, short, shown


@dataclass(frozen=True)
class _Stored:
    """Where a tensor is in the file; ``shape`` and ``dtype`` are those of its (packed) numbers."""

    offset: int
    shape: tuple[int, ...]
    dtype: np.dtype
    kind: Any
    unpacked_shape: tuple[int, ...]

    @classmethod
    def of(cls, tensor: Any) -> _Stored:
        # GGUF counts axes from the fastest one.
        unpacked = tuple(map(int, reversed(tensor.shape)))
        data = tensor.data
        return cls(int(tensor.data_offset), data.shape, data.dtype, tensor.tensor_type, unpacked)


class GgufCheckpoint:
    """``config`` is as in ``config.json``; ``tensors`` are under their Hugging Face names.

    ``fields`` are all that the file says by key, but for the vocabulary.

    Raises:
        CheckpointError: not a GGUF file, not of a known family, or with a tensor or a field that
            the family does not have; whoever asked for the file has to name it.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self.fields, self._stored = _open(path)
        if self.fields.get("split.count", 1) not in (0, 1):
            raise CheckpointError(
                f"split.count: got one of {self.fields['split.count']} files, wanted a whole one; "
                "llama.cpp's llama-gguf-split --merge makes it"
            )
        self._family, self._format = find_gguf_family(self.fields.get("general.architecture"))
        divisors = self._dequantized(ROPE_FREQS) if ROPE_FREQS in self._stored else None
        self.tensors = {
            self._hf_name(name): UnreadTensor(
                stored.unpacked_shape, torch.float32, partial(self._read, name)
            )
            for name, stored in self._stored.items()
            if name != ROPE_FREQS
        }
        if "token_embd.weight" not in self._stored:
            raise CheckpointError("token_embd.weight: the tensor is missing")
        self.config = {
            "model_type": self._family.name,
            **read_config(self.fields, self._format, divisors),
            "vocab_size": self._stored["token_embd.weight"].unpacked_shape[0],
            "tie_word_embeddings": "output.weight" not in self._stored,
        }

    def _hf_name(self, name: str) -> str:
        part, _, kind = name.rpartition(".")
        if part in self._format.model:
            return f"{self._format.model[part]}.{kind}"
        block, _, part = part.removeprefix("blk.").partition(".")
        if not (name.startswith("blk.") and block.isdigit() and part in self._format.layer):
            raise CheckpointError(f"tensor {shown(name)} is unknown in a model of its family")
        return f"{self._family.layer_prefix}{block}.{self._format.layer[part]}.{kind}"

    def _dequantized(self, name: str) -> Tensor:
        import gguf

        stored = self._stored[name]
        # Not from the mapped file, whose pages would stay in this process's memory.
        count = math.prod(stored.shape)
        data = np.fromfile(self._path, stored.dtype, count, offset=stored.offset)
        try:
            values = gguf.dequantize(data.reshape(stored.shape), stored.kind)
        except NotImplementedError as error:
            raise CheckpointError(f"tensor {name}: {error}") from error
        return torch.from_numpy(np.require(values, requirements="W"))

    def _read(self, name: str) -> Tensor:
        tensor = self._dequantized(name)
        if self._format.norm_offset and name.endswith("norm.weight"):
            return tensor - self._format.norm_offset
        if self._format.is_permuted and ".attn_q." in name:
            return _halves_order(tensor, self.config["num_attention_heads"])
        if self._format.is_permuted and ".attn_k." in name:
            return _halves_order(tensor, self.config["num_key_value_heads"])
        return tensor


def _open(path: Path) -> tuple[dict[str, Any], dict[str, _Stored]]:
    """What the fields say, by key, and where the tensors are, by name."""
    try:
        import gguf
    except ImportError as error:
        raise CheckpointError("GGUF files need the gguf package (extra [gguf])") from error
    try:
        check_header(path)
        reader = gguf.GGUFReader(path)
        # Not the vocabulary: the reader makes an array of every word.
        fields = {
            key: _value(field)
            for key, field in reader.fields.items()
            if not (key.startswith("tokenizer.") and field.types[0].name == "ARRAY")
        }
        return fields, {tensor.name: _Stored.of(tensor) for tensor in reader.tensors}
    except (OSError, ValueError, KeyError, IndexError) as error:
        raise CheckpointError(f"not a readable GGUF file: {short(error)}") from error


def _value(field: Any) -> Any:
    value = field.contents()
    # The shortest decimal that is this fp32 number, as config.json has it: 1e-5.
    return float(str(np.float32(value))) if field.types[0].name == "FLOAT32" else value


def _halves_order(weight: Tensor, heads: int) -> Tensor:
    """Rows of q or k ``[heads * d, ...]``: from llama.cpp's rotary pairs to rotary halves."""
    return weight.reshape(heads, -1, 2, *weight.shape[1:]).transpose(1, 2).reshape(weight.shape)
