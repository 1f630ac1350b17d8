"""The fields of a GGUF file as a ``config.json``.

What a file leaves out has the value that llama.cpp itself gives it.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from nemo_aligner.checkpoint.hf.families.gguf_format import GgufFormat
from nemo_aligner.config.numbers import read_count, read_number
from nemo_aligner.errors import CheckpointError, shown

ROPE_FREQS = "rope_freqs.weight"
_MOST_FLOAT = sys.float_info.max

# Fields of every family, which have to be there; the others are read one by one.
_SETTINGS = {
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "block_count": "num_hidden_layers",
    "context_length": "max_position_embeddings",
    "attention.head_count": "num_attention_heads",
}
_OWN = (
    "attention.head_count_kv", "attention.key_length", "attention.value_length",
    "rope.dimension_count", "rope.freq_base", "rope.scaling.type", "rope.scaling.factor",
)  # fmt: skip
# These change no hidden state: sizes that the tensors have, the other kind of norm's epsilon, what
# only yarn reads, what is done to logits and to embeddings of texts, and notes.
_IGNORED = (
    "vocab_size", "attention.layer_norm_epsilon", "attention.layer_norm_rms_epsilon",
    "rope.scaling.original_context_length", "rope.scaling.finetuned", "final_logit_softcapping",
    "pooling_type", "tensor_data_layout",
)  # fmt: skip


class GgufFields:
    """The fields of an architecture, without its name; every error has the whole key."""

    def __init__(self, fields: Mapping[str, Any], architecture: str) -> None:
        self._architecture = architecture
        prefix = f"{architecture}."
        self.values = {
            key.removeprefix(prefix): value
            for key, value in fields.items()
            if key.startswith(prefix)
        }

    def error(self, name: str, wanted: str) -> CheckpointError:
        """What is wrong with a field; ``wanted`` are the words after what was got."""
        got = shown(self.values.get(name))
        return CheckpointError(f"{self._architecture}.{name}: got {got}, {wanted}")

    def count(self, name: str, default: int | None = None) -> int:
        """A whole number above 0, of any size that GGUF has."""
        where = f"{self._architecture}.{name}"
        value = self.values.get(name, default)
        return read_count(value, where, "a whole number from 1 on", most=2**64)

    def number(self, name: str, default: float | None = None) -> float:
        """A finite number."""
        where = f"{self._architecture}.{name}"
        value = self.values.get(name, default)
        return read_number(value, where, "a number", -_MOST_FLOAT, _MOST_FLOAT)


def read_config(
    fields: Mapping[str, Any], gguf: GgufFormat, rope_divisors: Tensor | None
) -> dict[str, Any]:
    """``config.json`` of a file's ``fields``, but for ``model_type`` and what the tensors say.

    ``rope_divisors``: ``rope_freqs.weight``, ``[rotated channels / 2]``.

    Raises:
        CheckpointError: a field is missing, no family has it, or its value is not supported.
    """
    read = GgufFields(fields, gguf.architecture)
    _refuse_others(read, gguf)
    config: dict[str, Any] = {ours: read.count(name) for name, ours in _SETTINGS.items()}
    epsilon, epsilon_key = gguf.epsilon
    heads = config["num_attention_heads"]
    head_dim = read.count("attention.key_length", config["hidden_size"] // heads)
    rotated = _rotated_channels(read, gguf, config, head_dim)
    rope = _rope(read, rotated, rope_divisors)
    if gguf.is_partly_rotated:
        rope["partial_rotary_factor"] = rotated / head_dim
    config |= {
        epsilon_key: read.number(epsilon),
        "num_key_value_heads": read.count("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "rope_parameters": rope,
        **{ours: read.number(name) for name, ours in gguf.optional.items() if name in read.values},
    }
    return {**config, **gguf.derived(config)}


def _rotated_channels(
    read: GgufFields, gguf: GgufFormat, config: Mapping[str, Any], head_dim: int
) -> int:
    """Of a head's ``head_dim`` channels."""
    rotated = read.count("rope.dimension_count", head_dim)
    if read.count("attention.value_length", head_dim) != head_dim:
        raise read.error("attention.value_length", f"wanted the keys' {head_dim}")
    if rotated != head_dim and not (gguf.is_partly_rotated and rotated < head_dim):
        raise read.error("rope.dimension_count", f"wanted the head's {head_dim}")
    heads, hidden = config["num_attention_heads"], config["hidden_size"]
    if gguf.is_partly_rotated and heads * head_dim != hidden:
        # The converter takes the part of hidden / heads, which then is not a head's size.
        raise read.error(
            "attention.key_length",
            f"wanted {hidden // heads}, a head's part of the hidden size: else the "
            "file does not say how much is rotated; take the Hugging Face folder",
        )
    return rotated


def _refuse_others(read: GgufFields, gguf: GgufFormat) -> None:
    """A field that is not read might change what the model computes, unless it is off."""
    known = {*_SETTINGS, *_OWN, *_IGNORED, *gguf.optional}
    for name, value in read.values.items():
        is_plain = value is True if name == "attention.causal" else not value
        if name not in known and not is_plain:
            raise read.error(name, "which is not supported")


def _rope(read: GgufFields, rotated: int, divisors: Tensor | None) -> dict[str, Any]:
    base = float(read.number("rope.freq_base", 10000.0))
    # As in llama.cpp, a factor without a type is linear, and none at all is 1.
    kind = read.values.get("rope.scaling.type", "linear")
    factor = read.number("rope.scaling.factor", 0.0)
    if kind not in ("none", "linear"):
        raise read.error("rope.scaling.type", "wanted 'none' or 'linear'")
    is_linear = kind == "linear" and factor not in (0.0, 1.0)
    if divisors is None:
        scaling = {"rope_type": "linear", "factor": factor} if is_linear else {}
        return {"rope_type": "default", "rope_theta": base, **scaling}
    if is_linear:
        raise read.error("rope.scaling.factor", f"and {ROPE_FREQS}; wanted one of them")
    return {"rope_theta": base, **_llama3_scaling(base, rotated, divisors)}


def _llama3_scaling(base: float, rotated: int, divisors: Tensor) -> dict[str, Any]:
    if divisors.shape != (rotated // 2,) or rotated < 2:
        got = list(divisors.shape)
        raise CheckpointError(f"{ROPE_FREQS}: got shape {got}, wanted {[rotated // 2]}")
    scaling = {
        "rope_type": "llama3",
        "factor": round(float(divisors.max()), 4),
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    # The file keeps only the result: accept it where Llama 3's constants give the same.
    if not torch.allclose(divisors, llama3_divisors(base, rotated, scaling), rtol=1e-3):
        raise CheckpointError(f"{ROPE_FREQS}: not the rope scaling of Llama 3.1")
    return scaling


def llama3_divisors(base: float, head_dim: int, scaling: Mapping[str, Any]) -> Tensor:
    """What Llama 3.1's rope scaling divides each of the ``head_dim / 2`` frequencies by."""
    frequencies = 1.0 / base ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)
    turns = scaling["original_max_position_embeddings"] * frequencies / (2 * math.pi)
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    smooth = ((turns - low) / (high - low)).clamp(0, 1)
    return 1.0 / ((1 - smooth) / scaling["factor"] + smooth)
