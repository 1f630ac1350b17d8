"""The model families as llama.cpp's converter writes them: names, settings, and changed tensors.

The converter: https://github.com/ggml-org/llama.cpp/blob/master/convert_hf_to_gguf.py. What a file
leaves out has the value that llama.cpp itself gives it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from nemo_aligner.errors import CheckpointError, shown

ROPE_FREQS = "rope_freqs.weight"
MODEL_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
_ATTENTION = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
}
_MLP = {"ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj"}
_GATED_MLP = {**_MLP, "ffn_gate": "mlp.gate_proj"}
_MLP_NORM = {"ffn_norm": "post_attention_layernorm"}

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


def _nothing(config: Mapping[str, Any]) -> dict[str, Any]:
    return {}


def _gemma2_scale(config: Mapping[str, Any]) -> dict[str, Any]:
    """No field has it: llama.cpp goes by the 46 layers of the 27B, the one that differs."""
    is_27b = config["num_hidden_layers"] == 46
    per_head = config["hidden_size"] // config["num_attention_heads"]
    return {"query_pre_attn_scalar": per_head if is_27b else config["head_dim"]}


@dataclass(frozen=True)
class Architecture:
    """How a family is written; its name is also the ``model_type`` of its ``config.json``.

    Names are GGUF's, then Hugging Face's: ``layer``, a layer's tensors; ``epsilon``, of its norms;
    ``optional``, fields that only this family has. ``derived`` gives the keys that no field has.
    ``is_permuted``: the rows of q and k are in rotary pairs, not halves. ``norm_offset`` was added
    to the weights of norms. ``is_partly_rotated``: a part of a head's channels may not be rotated.
    """

    layer: Mapping[str, str]
    epsilon: tuple[str, str] = ("attention.layer_norm_rms_epsilon", "rms_norm_eps")
    optional: Mapping[str, str] = field(default_factory=dict)
    derived: Callable[[Mapping[str, Any]], dict[str, Any]] = _nothing
    is_permuted: bool = False
    norm_offset: int = 0
    is_partly_rotated: bool = False


_QWEN2 = Architecture({**_ATTENTION, **_MLP_NORM, **_GATED_MLP})
_GEMMA = replace(_QWEN2, norm_offset=1)

ARCHITECTURES = {
    # Mistral too, without a word on its window.
    "llama": replace(_QWEN2, is_permuted=True),
    "qwen2": _QWEN2,
    "qwen3": Architecture(
        {**_QWEN2.layer, "attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}
    ),
    "gemma": _GEMMA,
    "gemma2": replace(
        _GEMMA,
        layer={
            **_ATTENTION,
            "post_attention_norm": "post_attention_layernorm",
            "ffn_norm": "pre_feedforward_layernorm",
            "post_ffw_norm": "post_feedforward_layernorm",
            **_GATED_MLP,
        },
        optional={
            "attention.sliding_window": "sliding_window",
            "attn_logit_softcapping": "attn_logit_softcapping",
        },
        derived=_gemma2_scale,
    ),
    "nemotron": Architecture(
        {**_ATTENTION, **_MLP_NORM, **_MLP},
        epsilon=("attention.layer_norm_epsilon", "norm_eps"),
        norm_offset=1,
        is_partly_rotated=True,
    ),
}


def find_architecture(name: Any) -> Architecture:
    """The family of a file whose ``general.architecture`` is ``name``."""
    if not isinstance(name, str) or name not in ARCHITECTURES:
        known = ", ".join(ARCHITECTURES)
        raise CheckpointError(f"general.architecture: got {shown(name)}, wanted one of: {known}")
    return ARCHITECTURES[name]


class _Fields:
    """The fields of an architecture, without its name; every complaint has the whole key."""

    def __init__(self, fields: Mapping[str, Any], kind: str) -> None:
        self._kind = kind
        prefix = f"{kind}."
        self.values = {
            key.removeprefix(prefix): value
            for key, value in fields.items()
            if key.startswith(prefix)
        }

    def error(self, name: str, wanted: str) -> CheckpointError:
        return CheckpointError(f"{self._kind}.{name}: got {shown(self.values.get(name))}, {wanted}")

    def count(self, name: str, default: int | None = None) -> int:
        value = self.values.get(name, default)
        if type(value) is not int or value < 1:
            raise self.error(name, "wanted a whole number from 1 on")
        return value

    def number(self, name: str, default: float | None = None) -> float:
        value: Any = self.values.get(name, default)
        if type(value) not in (int, float) or not math.isfinite(value):
            raise self.error(name, "wanted a number")
        return value


def read_config(fields: Mapping[str, Any], rope_divisors: Tensor | None) -> dict[str, Any]:
    """``config.json`` of a file's ``fields``, but for what the tensors say.

    ``rope_divisors``: ``rope_freqs.weight``, ``[rotated channels / 2]``.

    Raises:
        CheckpointError: a field is missing, no family has it, or its value is not supported.
    """
    architecture = find_architecture(fields.get("general.architecture"))
    kind = fields["general.architecture"]
    read = _Fields(fields, kind)
    _refuse_others(read, architecture)
    config: dict[str, Any] = {"model_type": kind}
    config |= {ours: read.count(name) for name, ours in _SETTINGS.items()}
    epsilon, epsilon_key = architecture.epsilon
    heads = config["num_attention_heads"]
    head_dim = read.count("attention.key_length", config["hidden_size"] // heads)
    rotated = read.count("rope.dimension_count", head_dim)
    if read.count("attention.value_length", head_dim) != head_dim:
        raise read.error("attention.value_length", f"wanted the keys' {head_dim}")
    if rotated != head_dim and not (architecture.is_partly_rotated and rotated < head_dim):
        raise read.error("rope.dimension_count", f"wanted the head's {head_dim}")
    if architecture.is_partly_rotated and heads * head_dim != config["hidden_size"]:
        # The converter takes the part of hidden / heads, which then is not a head's size.
        raise read.error(
            "attention.key_length",
            f"wanted {config['hidden_size'] // heads}, a head's part of the hidden size: else the "
            "file does not say how much is rotated; take the Hugging Face folder",
        )
    rope = _rope(read, rotated, rope_divisors)
    if architecture.is_partly_rotated:
        rope["partial_rotary_factor"] = rotated / head_dim
    config |= {
        epsilon_key: read.number(epsilon),
        "num_key_value_heads": read.count("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "rope_parameters": rope,
        **{
            ours: read.number(name)
            for name, ours in architecture.optional.items()
            if name in read.values
        },
    }
    return {**config, **architecture.derived(config)}


def _refuse_others(read: _Fields, architecture: Architecture) -> None:
    """A field that is not read might change what the model computes, unless it is off."""
    known = {*_SETTINGS, *_OWN, *_IGNORED, *architecture.optional}
    for name, value in read.values.items():
        is_plain = value is True if name == "attention.causal" else not value
        if name not in known and not is_plain:
            raise read.error(name, "which is not supported")


def _rope(read: _Fields, rotated: int, divisors: Tensor | None) -> dict[str, Any]:
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
