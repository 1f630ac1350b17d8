"""Metadata of a GGUF file as a ``config.json``; a missing field has llama.cpp's default."""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from nemo_aligner.checkpoint.hf.families.base import GgufFormat
from nemo_aligner.checkpoint.hf.families.settings import FULL, SLIDING
from nemo_aligner.config.common import read_count, read_number
from nemo_aligner.utils.errors import CheckpointError, shown

# Names of a reward head's rows, in a file for llama.cpp's rank pooling.
LABELS = "classifier.output_labels"
# Factors of the rotation, which are tensors in GGUF and no settings.
ROPE_FREQS = "rope_freqs.weight"
_SHORT, _LONG = "rope_factors_short.weight", "rope_factors_long.weight"
ROPE_TENSORS = (ROPE_FREQS, _SHORT, _LONG)
_MOST_FLOAT = sys.float_info.max

# Fields that every family must have; the others are read one by one.
SETTINGS = {
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "block_count": "num_hidden_layers",
    "context_length": "max_position_embeddings",
    "attention.head_count": "num_attention_heads",
}
_OWN = (
    "attention.head_count_kv", "attention.key_length", "attention.value_length",
    "rope.dimension_count", "rope.freq_base", "rope.scaling.type", "rope.scaling.factor",
    "rope.scaling.original_context_length",
)  # fmt: skip
# Fields that only one kind of RoPE scaling reads, and their names in config.json.
_ATTENTION_FACTOR = "attention_factor"
_SCALING_FIELDS = {
    "yarn": {
        "rope.scaling.yarn_attn_factor": _ATTENTION_FACTOR,
        "rope.scaling.yarn_beta_fast": "beta_fast",
        "rope.scaling.yarn_beta_slow": "beta_slow",
    },
    "longrope": {"rope.scaling.attn_factor": _ATTENTION_FACTOR},
}
# Fields that change no hidden state: sizes that the tensors have, the other norm's epsilon, changes
# to logits and to text embeddings, and notes.
_IGNORED = (
    "vocab_size", "attention.layer_norm_epsilon", "attention.layer_norm_rms_epsilon",
    "rope.scaling.finetuned", "final_logit_softcapping", "logit_scale", "pooling_type",
    "tensor_data_layout", LABELS,
)  # fmt: skip


# Values of fields that ask for what is computed anyway: causal attention, and the softmax of a
# router's scores.
_PLAIN = {"attention.causal": True, "expert_gating_func": 1}


class GgufFields:
    """Typed access to an architecture's fields; every error has the whole key."""

    def __init__(self, fields: Mapping[str, Any], architecture: str) -> None:
        self._architecture = architecture
        prefix = f"{architecture}."
        self.values = {
            key.removeprefix(prefix): value
            for key, value in fields.items()
            if key.startswith(prefix)
        }

    def error(self, name: str, wanted: str) -> CheckpointError:
        """Make the error for a field; ``wanted`` follows what was got."""
        got = shown(self.values.get(name))
        return CheckpointError(f"{self._architecture}.{name}: got {got}, {wanted}")

    def count(self, name: str, default: int | None = None) -> int:
        """Read a positive integer of any width."""
        value = self.values.get(name, default)
        return read_count(value, self._key(name), "a whole number from 1 on", maximum=2**64)

    def number(self, name: str, default: float | None = None) -> float:
        """Read a finite number."""
        value = self.values.get(name, default)
        return read_number(value, self._key(name), "a number", -_MOST_FLOAT, _MOST_FLOAT)

    def _key(self, name: str) -> str:
        return f"{self._architecture}.{name}"


def read_config(
    fields: Mapping[str, Any], gguf: GgufFormat, rope_tensors: Mapping[str, Tensor]
) -> dict[str, Any]:
    """Translate ``fields`` to ``config.json``, without ``model_type`` and what the tensors tell.

    Args:
        rope_tensors: those of ROPE_TENSORS that the file has, ``[rotated channels / 2]`` each.
    """
    read = GgufFields(fields, gguf.architecture)
    _refuse_others(read, gguf)
    config: dict[str, Any] = {ours: read.count(name) for name, ours in SETTINGS.items()}
    epsilon, epsilon_key = gguf.epsilon
    heads = config["num_attention_heads"]
    head_dim = read.count("attention.key_length", config["hidden_size"] // heads)
    rotated = _rotated_channels(read, gguf, config, head_dim)
    rope = _rope(read, rotated, rope_tensors)
    if gguf.is_partly_rotated:
        rope["partial_rotary_factor"] = rotated / head_dim
    config |= {
        epsilon_key: read.number(epsilon),
        "num_key_value_heads": read.count("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "rope_parameters": rope,
        **{ours: read.number(name) for name, ours in gguf.optional.items() if name in read.values},
    }
    if gguf.has_windows:
        config |= _windows(read, config["num_hidden_layers"])
    return {**config, **gguf.derived(config)}


_SCALING_TYPE = "rope.scaling.type"
_WINDOW, _PATTERN = "attention.sliding_window", "attention.sliding_window_pattern"


def _windows(read: GgufFields, layers: int) -> dict[str, Any]:
    """The window, and the layers that have it where the file lists them; 0 is none."""
    size, pattern = read.values.get(_WINDOW) or None, read.values.get(_PATTERN)
    window: dict[str, Any] = {"sliding_window": None if size is None else read.count(_WINDOW)}
    if size is None or pattern is None:
        return window
    are_flags = isinstance(pattern, list) and all(isinstance(flag, bool) for flag in pattern)
    if not are_flags or len(pattern) != layers:
        raise read.error(_PATTERN, f"wanted true or false for each of {layers} layers")
    return {**window, "layer_types": [SLIDING if flag else FULL for flag in pattern]}


def _rotated_channels(
    read: GgufFields, gguf: GgufFormat, config: Mapping[str, Any], head_dim: int
) -> int:
    """Count the rotated channels, of a head's ``head_dim``."""
    rotated = read.count("rope.dimension_count", head_dim)
    if read.count("attention.value_length", head_dim) != head_dim:
        raise read.error("attention.value_length", f"wanted the keys' {head_dim}")
    if rotated != head_dim and not (gguf.is_partly_rotated and rotated < head_dim):
        raise read.error("rope.dimension_count", f"wanted the head's {head_dim}")
    heads, hidden = config["num_attention_heads"], config["hidden_size"]
    if gguf.is_share_of_hidden and heads * head_dim != hidden:
        # The converter takes the share of hidden / heads, which then is not the size of a head.
        raise read.error(
            "attention.key_length",
            f"wanted {hidden // heads}, a head's part of the hidden size: else the "
            "file does not say how much is rotated; take the Hugging Face folder",
        )
    return rotated


def _refuse_others(read: GgufFields, gguf: GgufFormat) -> None:
    """Refuse unread fields, which might change what the model computes, unless they are off."""
    known = {*SETTINGS, *_OWN, *_IGNORED, *gguf.optional}
    known |= {_WINDOW, _PATTERN} if gguf.has_windows else set()
    known |= _SCALING_FIELDS.get(str(read.values.get(_SCALING_TYPE)), {}).keys()
    for name, value in read.values.items():
        is_plain = value == _PLAIN[name] if name in _PLAIN else not value
        if name not in known and not is_plain:
            raise read.error(name, "which is not supported")


def _rope(read: GgufFields, rotated: int, tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    base = float(read.number("rope.freq_base", 10000.0))
    # As in llama.cpp, a factor without a type is linear, and a missing one is 1.
    kind = read.values.get(_SCALING_TYPE, "linear")
    factor = read.number("rope.scaling.factor", 0.0)
    if kind not in ("none", "linear", "yarn", "longrope"):
        raise read.error(_SCALING_TYPE, "wanted 'none', 'linear', 'yarn' or 'longrope'")
    if kind == "longrope" and not tensors.keys() & {_SHORT, _LONG}:
        raise read.error(_SCALING_TYPE, f"but the file has no {_SHORT} and no {_LONG}")
    is_linear = kind == "linear" and factor not in (0.0, 1.0)
    if kind == "yarn":
        return {"rope_theta": base, **_yarn_scaling(read)}
    if tensors.keys() & {_SHORT, _LONG}:
        return {"rope_theta": base, **_longrope_scaling(read, rotated, tensors)}
    if ROPE_FREQS not in tensors:
        scaling = {"rope_type": "linear", "factor": factor} if is_linear else {}
        return {"rope_type": "default", "rope_theta": base, **scaling}
    if is_linear:
        raise read.error("rope.scaling.factor", f"and {ROPE_FREQS}; wanted one of them")
    return {"rope_theta": base, **_llama3_scaling(base, rotated, tensors[ROPE_FREQS])}


def _yarn_scaling(read: GgufFields) -> dict[str, Any]:
    scaling = {
        "rope_type": "yarn",
        "factor": read.number("rope.scaling.factor"),
        _OLD_LENGTH: read.count("rope.scaling.original_context_length"),
    }
    return {**scaling, **_scaling_fields(read, "yarn")}


def _scaling_fields(read: GgufFields, kind: str) -> dict[str, float]:
    """Settings of a kind of RoPE scaling that the file has."""
    names = _SCALING_FIELDS[kind]
    return {ours: read.number(name) for name, ours in names.items() if name in read.values}


_OLD_LENGTH = "original_max_position_embeddings"


def _longrope_scaling(
    read: GgufFields, rotated: int, tensors: Mapping[str, Tensor]
) -> dict[str, Any]:
    lists: dict[str, Any] = {}
    for key, name in (("short_factor", _SHORT), ("long_factor", _LONG)):
        size = list(tensors[name].shape) if name in tensors else None
        if size != [rotated // 2]:
            raise CheckpointError(f"{name}: got shape {size}, wanted {[rotated // 2]}")
        # The shortest decimals that are these fp32 numbers, as in config.json.
        lists[key] = [float(str(number)) for number in tensors[name].float().numpy()]
    lists |= _scaling_fields(read, "longrope")
    length = read.count("rope.scaling.original_context_length")
    return {"rope_type": "longrope", _OLD_LENGTH: length, **lists}


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
    # The file keeps only the divisors: accept them if Llama 3's constants give the same.
    if not torch.allclose(divisors, llama3_divisors(base, rotated, scaling), rtol=1e-3):
        raise CheckpointError(f"{ROPE_FREQS}: not the rope scaling of Llama 3.1")
    return scaling


def llama3_divisors(base: float, head_dim: int, scaling: Mapping[str, Any]) -> Tensor:
    """Divisors of the ``head_dim / 2`` frequencies by Llama 3.1's rope scaling."""
    frequencies = 1.0 / base ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)
    turns = scaling["original_max_position_embeddings"] * frequencies / (2 * math.pi)
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    smooth = ((turns - low) / (high - low)).clamp(0, 1)
    return 1.0 / ((1 - smooth) / scaling["factor"] + smooth)
