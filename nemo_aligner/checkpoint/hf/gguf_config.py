"""Translate the metadata of a GGUF file to a ``config.json``.

A missing field has llama.cpp's default. A field that this module does not read raises an error
unless it is off (0, false or empty), because it might change what the model computes.
"""

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

# Metadata field with the names of the reward head's two rows, which llama.cpp's rank pooling needs.
LABELS = "classifier.output_labels"
# Names of the tensors in which GGUF stores RoPE's factors.
ROPE_FREQS = "rope_freqs.weight"
_SHORT, _LONG = "rope_factors_short.weight", "rope_factors_long.weight"
ROPE_TENSORS = (ROPE_FREQS, _SHORT, _LONG)
_MAX_FLOAT = sys.float_info.max

# Fields that the files of every family must have, and their keys in config.json.
SETTINGS = {
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "block_count": "num_hidden_layers",
    "context_length": "max_position_embeddings",
    "attention.head_count": "num_attention_heads",
}
# Further fields that files may have, of any family.
_OPTIONAL_FIELDS = (
    "attention.head_count_kv", "attention.key_length", "attention.value_length",
    "rope.dimension_count", "rope.freq_base", "rope.scaling.type", "rope.scaling.factor",
    "rope.scaling.original_context_length",
)  # fmt: skip
# Fields that only one kind of RoPE scaling reads, and their keys in config.json.
_ATTENTION_FACTOR = "attention_factor"
_SCALING_FIELDS = {
    "yarn": {
        "rope.scaling.yarn_attn_factor": _ATTENTION_FACTOR,
        "rope.scaling.yarn_beta_fast": "beta_fast",
        "rope.scaling.yarn_beta_slow": "beta_slow",
    },
    "longrope": {"rope.scaling.attn_factor": _ATTENTION_FACTOR},
}
# Fields that may be ignored, because they change no hidden state: sizes that also follow from the
# tensors; the epsilon of a kind of norm that the model does not have; settings for logits and for
# text embeddings; comments.
_IGNORED = (
    "vocab_size", "attention.layer_norm_epsilon", "attention.layer_norm_rms_epsilon",
    "rope.scaling.finetuned", "final_logit_softcapping", "logit_scale", "pooling_type",
    "tensor_data_layout", LABELS,
)  # fmt: skip


# Fields that are accepted with only one value: causal attention, and a softmax over the scores of
# an MoE router.
_SUPPORTED_VALUES = {"attention.causal": True, "expert_gating_func": 1}


class GgufFields:
    """Typed access to the metadata fields of a GGUF file; errors have the field's complete key.

    Attributes:
        values: values of the fields whose keys begin with the architecture's name, such as
            ``qwen3.``; the keys here lack this prefix.
    """

    def __init__(self, fields: Mapping[str, Any], architecture: str) -> None:
        self._architecture = architecture
        prefix = f"{architecture}."
        self.values = {
            key.removeprefix(prefix): value
            for key, value in fields.items()
            if key.startswith(prefix)
        }

    def error(self, name: str, problem: str) -> CheckpointError:
        """Build the error for the field ``name``; its text is key, value and ``problem``."""
        value = shown(self.values.get(name))
        return CheckpointError(f"{self._architecture}.{name}: got {value}, {problem}")

    def count(self, name: str, default: int | None = None) -> int:
        """Read a positive integer of up to 64 bits; ``default`` if the file lacks the field."""
        value = self.values.get(name, default)
        return read_count(value, self._key(name), "a whole number from 1 on", maximum=2**64)

    def number(self, name: str, default: float | None = None) -> float:
        """Read a finite number; ``default`` if the file lacks the field."""
        value = self.values.get(name, default)
        return read_number(value, self._key(name), "a number", -_MAX_FLOAT, _MAX_FLOAT)

    def _key(self, name: str) -> str:
        return f"{self._architecture}.{name}"


def read_config(
    fields: Mapping[str, Any], gguf: GgufFormat, rope_tensors: Mapping[str, Tensor]
) -> dict[str, Any]:
    """Translate ``fields`` to the keys of ``config.json``.

    The caller adds ``model_type``, and the settings that follow from the tensors.

    Args:
        fields: metadata by key.
        gguf: how the family is stored in GGUF files.
        rope_tensors: the tensors of ROPE_TENSORS in the file, each ``[rotated channels / 2]``.
    """
    reader = GgufFields(fields, gguf.architecture)
    _refuse_unread_fields(reader, gguf)
    config: dict[str, Any] = {key: reader.count(name) for name, key in SETTINGS.items()}
    epsilon, epsilon_key = gguf.epsilon
    heads = config["num_attention_heads"]
    head_dim = reader.count("attention.key_length", config["hidden_size"] // heads)
    rotated = _count_rotated_channels(reader, gguf, config, head_dim)
    rope = _translate_rope(reader, rotated, rope_tensors)
    if gguf.is_partly_rotated:
        rope["partial_rotary_factor"] = rotated / head_dim
    config |= {
        epsilon_key: reader.number(epsilon),
        "num_key_value_heads": reader.count("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "rope_parameters": rope,
        **{
            key: reader.number(name) for name, key in gguf.optional.items() if name in reader.values
        },
    }
    if gguf.has_windows:
        config |= _translate_windows(reader, config["num_hidden_layers"])
    return {**config, **gguf.derived(config)}


_SCALING_TYPE = "rope.scaling.type"
_WINDOW, _PATTERN = "attention.sliding_window", "attention.sliding_window_pattern"


def _translate_windows(reader: GgufFields, layers: int) -> dict[str, Any]:
    """Translate the sliding window (0 means none) and the list of layers that have it."""
    size, pattern = reader.values.get(_WINDOW) or None, reader.values.get(_PATTERN)
    window: dict[str, Any] = {"sliding_window": None if size is None else reader.count(_WINDOW)}
    if size is None or pattern is None:
        return window
    are_flags = isinstance(pattern, list) and all(isinstance(flag, bool) for flag in pattern)
    if not are_flags or len(pattern) != layers:
        raise reader.error(_PATTERN, f"wanted true or false for each of {layers} layers")
    return {**window, "layer_types": [SLIDING if flag else FULL for flag in pattern]}


def _count_rotated_channels(
    reader: GgufFields, gguf: GgufFormat, config: Mapping[str, Any], head_dim: int
) -> int:
    """Return the number of a head's ``head_dim`` channels to which RoPE is applied.

    Raises:
        CheckpointError: the family does not support this number, or this size of a head; or the
            number in the file is wrong, because llama.cpp's converter assumed another size of a
            head.
    """
    rotated = reader.count("rope.dimension_count", head_dim)
    if reader.count("attention.value_length", head_dim) != head_dim:
        raise reader.error("attention.value_length", f"wanted {head_dim}, the length of the keys")
    if rotated != head_dim and not (gguf.is_partly_rotated and rotated < head_dim):
        raise reader.error("rope.dimension_count", f"wanted {head_dim}, all channels of a head")
    heads, hidden = config["num_attention_heads"], config["hidden_size"]
    if gguf.is_share_of_hidden and heads * head_dim != hidden:
        # llama.cpp's converter computed rope.dimension_count from hidden / heads, which differs
        # from head_dim here.
        raise reader.error(
            "attention.key_length",
            f"wanted {hidden // heads}, the hidden size divided by the heads. Otherwise the file "
            "does not tell how many channels are rotated. Convert the Hugging Face folder instead",
        )
    return rotated


def _refuse_unread_fields(reader: GgufFields, gguf: GgufFormat) -> None:
    """Raise CheckpointError for a field that this module does not read, unless the field is off.

    A field that is on (not 0, false or empty) might change what the model computes.
    """
    readable = {*SETTINGS, *_OPTIONAL_FIELDS, *_IGNORED, *gguf.optional}
    readable |= {_WINDOW, _PATTERN} if gguf.has_windows else set()
    readable |= _SCALING_FIELDS.get(str(reader.values.get(_SCALING_TYPE)), {}).keys()
    for name, value in reader.values.items():
        is_off = value == _SUPPORTED_VALUES[name] if name in _SUPPORTED_VALUES else not value
        if name not in readable and not is_off:
            raise reader.error(name, "which is not supported")


def _translate_rope(
    reader: GgufFields, rotated: int, tensors: Mapping[str, Tensor]
) -> dict[str, Any]:
    """Translate the RoPE settings to ``rope_parameters``.

    Args:
        rotated: number of a head's channels to which RoPE is applied.
        tensors: the tensors of ROPE_TENSORS in the file.
    """
    base = float(reader.number("rope.freq_base", 10000.0))
    # Like llama.cpp, read a factor without a type as linear scaling, and a missing factor as 1.
    kind = reader.values.get(_SCALING_TYPE, "linear")
    factor = reader.number("rope.scaling.factor", 0.0)
    if kind not in ("none", "linear", "yarn", "longrope"):
        raise reader.error(_SCALING_TYPE, "wanted 'none', 'linear', 'yarn' or 'longrope'")
    if kind == "longrope" and not tensors.keys() & {_SHORT, _LONG}:
        raise reader.error(_SCALING_TYPE, f"but the tensors {_SHORT} and {_LONG} are missing")
    is_linear = kind == "linear" and factor not in (0.0, 1.0)
    if kind == "yarn":
        return {"rope_theta": base, **_translate_yarn(reader)}
    if tensors.keys() & {_SHORT, _LONG}:
        return {"rope_theta": base, **_translate_longrope(reader, rotated, tensors)}
    if ROPE_FREQS not in tensors:
        scaling = {"rope_type": "linear", "factor": factor} if is_linear else {}
        return {"rope_type": "default", "rope_theta": base, **scaling}
    if is_linear:
        raise reader.error(
            "rope.scaling.factor", f"and the tensor {ROPE_FREQS}; wanted one of them"
        )
    return {"rope_theta": base, **_recognize_llama3(base, rotated, tensors[ROPE_FREQS])}


def _translate_yarn(reader: GgufFields) -> dict[str, Any]:
    scaling = {
        "rope_type": "yarn",
        "factor": reader.number("rope.scaling.factor"),
        _OLD_LENGTH: reader.count("rope.scaling.original_context_length"),
    }
    return {**scaling, **_read_scaling_fields(reader, "yarn")}


def _read_scaling_fields(reader: GgufFields, kind: str) -> dict[str, float]:
    """Read the fields that only this kind of RoPE scaling has.

    Returns:
        The values by their keys in ``rope_parameters``, without those that the file lacks.
    """
    names = _SCALING_FIELDS[kind]
    return {key: reader.number(name) for name, key in names.items() if name in reader.values}


_OLD_LENGTH = "original_max_position_embeddings"


def _translate_longrope(
    reader: GgufFields, rotated: int, tensors: Mapping[str, Tensor]
) -> dict[str, Any]:
    lists: dict[str, Any] = {}
    for key, name in (("short_factor", _SHORT), ("long_factor", _LONG)):
        size = list(tensors[name].shape) if name in tensors else None
        if size != [rotated // 2]:
            raise CheckpointError(f"{name}: got shape {size}, wanted {[rotated // 2]}")
        # Convert fp32 via its shortest decimal, as in config.json.
        lists[key] = [float(str(number)) for number in tensors[name].float().numpy()]
    lists |= _read_scaling_fields(reader, "longrope")
    length = reader.count("rope.scaling.original_context_length")
    return {"rope_type": "longrope", _OLD_LENGTH: length, **lists}


def _recognize_llama3(base: float, rotated: int, divisors: Tensor) -> dict[str, Any]:
    """Return the settings of Llama 3.1's RoPE scaling; raise CheckpointError for other divisors.

    Args:
        divisors: divisors of the frequencies, ``[rotated / 2]``.
    """
    if divisors.shape != (rotated // 2,) or rotated < 2:
        shape = list(divisors.shape)
        raise CheckpointError(f"{ROPE_FREQS}: got shape {shape}, wanted {[rotated // 2]}")
    scaling = {
        "rope_type": "llama3",
        "factor": round(float(divisors.max()), 4),
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    # The file has the divisors, but not the constants from which they were computed. So compute the
    # divisors from Llama 3.1's constants, and compare.
    if not torch.allclose(divisors, llama3_divisors(base, rotated, scaling), rtol=1e-3):
        raise CheckpointError(
            f"{ROPE_FREQS}: its values are not those of Llama 3.1's RoPE scaling, and no other "
            "scaling by a tensor is supported"
        )
    return scaling


def llama3_divisors(base: float, head_dim: int, scaling: Mapping[str, Any]) -> Tensor:
    """Compute the divisors of RoPE's frequencies in Llama 3.1's scaling, fp32 ``[head_dim / 2]``.

    ``scaling`` has the keys of ``rope_parameters``, such as ``low_freq_factor``.
    """
    frequencies = 1.0 / base ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)
    turns = scaling["original_max_position_embeddings"] * frequencies / (2 * math.pi)
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    smooth = ((turns - low) / (high - low)).clamp(0, 1)
    return 1.0 / ((1 - smooth) / scaling["factor"] + smooth)
