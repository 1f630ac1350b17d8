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

from nemo_aligner.checkpoint.streaming import UnreadTensor
from nemo_aligner.errors import CheckpointError

_MODEL_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_ROPE_FREQS = "rope_freqs.weight"


@dataclass(frozen=True)
class _Stored:
    """A tensor's place in the file; ``shape`` and ``dtype`` are those of its (packed) numbers."""

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
    """``config`` is as in ``config.json``; ``tensors`` are under their Hugging Face names."""

    def __init__(self, path: Path) -> None:
        reader = _open(path)
        self._path = path
        # The reader makes arrays of every word of the vocabulary: let go of these.
        self._fields = {
            key: field for key, field in reader.fields.items() if not key.startswith("tokenizer.")
        }
        self._stored = {tensor.name: _Stored.of(tensor) for tensor in reader.tensors}
        self.config = self._read_config()
        self.tensors = {
            self._hf_name(name): UnreadTensor(
                stored.unpacked_shape, torch.float32, partial(self._read, name)
            )
            for name, stored in self._stored.items()
            if name != _ROPE_FREQS
        }

    def _field(self, key: str, default: Any = None) -> Any:
        found = self._fields.get(key)
        return default if found is None else found.contents()

    def _read_config(self) -> dict[str, Any]:
        kind = self._field("general.architecture")
        if kind != "llama":
            raise CheckpointError(
                f"{self._path}: general.architecture: got {kind!r}, wanted 'llama'"
            )
        for key in ("llama.expert_count", "llama.attention.sliding_window"):
            if self._field(key):
                raise CheckpointError(
                    f"{self._path}: {key}: got {self._field(key)}, which is not supported"
                )
        heads = self._field("llama.attention.head_count")
        hidden = self._field("llama.embedding_length")
        if not (heads and hidden and "token_embd.weight" in self._stored):
            raise CheckpointError(f"{self._path}: it lacks a head count, a size or embeddings")
        head_dim = self._field("llama.attention.key_length", hidden // heads)
        if self._field("llama.rope.dimension_count", head_dim) != head_dim:
            raise CheckpointError(
                f"{self._path}: llama.rope.dimension_count: got "
                f"{self._field('llama.rope.dimension_count')}, wanted the head's {head_dim}"
            )
        base = self._field("llama.rope.freq_base", 10000.0)
        return {
            "model_type": "llama",
            "hidden_size": hidden,
            "intermediate_size": self._field("llama.feed_forward_length"),
            "num_hidden_layers": self._field("llama.block_count"),
            "num_attention_heads": heads,
            "num_key_value_heads": self._field("llama.attention.head_count_kv", heads),
            "head_dim": head_dim,
            "hidden_act": "silu",
            "max_position_embeddings": self._field("llama.context_length"),
            "rms_norm_eps": self._field("llama.attention.layer_norm_rms_epsilon"),
            "rope_parameters": {"rope_theta": base, **self._rope_scaling(base, head_dim)},
            "vocab_size": self._stored["token_embd.weight"].unpacked_shape[0],
            "tie_word_embeddings": "output.weight" not in self._stored,
        }

    def _rope_scaling(self, base: float, head_dim: int) -> dict[str, Any]:
        kind = self._field("llama.rope.scaling.type", "none")
        if kind != "none":
            raise CheckpointError(
                f"{self._path}: llama.rope.scaling.type: got {kind!r}, wanted 'none'"
            )
        if _ROPE_FREQS not in self._stored:
            return {"rope_type": "default"}
        divisors = self._dequantized(_ROPE_FREQS)
        scaling = {
            "rope_type": "llama3",
            "factor": round(float(divisors.max()), 4),
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        }
        # The file keeps only the result: accept it where Llama 3's constants give the same.
        if not torch.allclose(divisors, llama3_divisors(base, head_dim, scaling), rtol=1e-3):
            raise CheckpointError(f"{self._path}: {_ROPE_FREQS}: not the rope scaling of Llama 3.1")
        return scaling

    def _hf_name(self, name: str) -> str:
        if name in _MODEL_NAMES:
            return _MODEL_NAMES[name]
        block, _, rest = name.removeprefix("blk.").partition(".")
        part, _, kind = rest.partition(".")
        if not (name.startswith("blk.") and block.isdigit() and part in _LAYER_NAMES):
            raise CheckpointError(f"{self._path}: tensor {name!r} is unknown in a Llama model")
        return f"model.layers.{block}.{_LAYER_NAMES[part]}.{kind}"

    def _dequantized(self, name: str) -> Tensor:
        import gguf

        stored = self._stored[name]
        # Not from the mapped file, whose pages would stay in this process's memory.
        count = math.prod(stored.shape)
        data = np.fromfile(self._path, stored.dtype, count, offset=stored.offset)
        values = gguf.dequantize(data.reshape(stored.shape), stored.kind)
        return torch.from_numpy(np.require(values, requirements="W"))

    def _read(self, name: str) -> Tensor:
        tensor = self._dequantized(name)
        if ".attn_q." in name:
            return _halves_order(tensor, self.config["num_attention_heads"])
        if ".attn_k." in name:
            return _halves_order(tensor, self.config["num_key_value_heads"])
        return tensor


def _open(path: Path) -> Any:
    try:
        import gguf
    except ImportError as error:
        raise CheckpointError(f"{path}: GGUF files need the gguf package (extra [gguf])") from error
    try:
        return gguf.GGUFReader(path)
    except (OSError, ValueError, KeyError, IndexError) as error:
        raise CheckpointError(f"{path}: not a readable GGUF file: {error}") from error


def _halves_order(weight: Tensor, heads: int) -> Tensor:
    """Rows of q or k ``[heads * d, ...]``: from llama.cpp's rotary pairs to rotary halves."""
    return weight.reshape(heads, -1, 2, *weight.shape[1:]).transpose(1, 2).reshape(weight.shape)


def llama3_divisors(base: float, head_dim: int, scaling: dict[str, Any]) -> Tensor:
    """What Llama 3.1's rope scaling divides each of the ``head_dim / 2`` frequencies by."""
    frequencies = 1.0 / base ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)
    turns = scaling["original_max_position_embeddings"] * frequencies / (2 * math.pi)
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    smooth = ((turns - low) / (high - low)).clamp(0, 1)
    return 1.0 / ((1 - smooth) / scaling["factor"] + smooth)
