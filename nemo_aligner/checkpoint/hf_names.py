"""Hugging Face's names and settings of a model family, and what Megatron and NeMo call them.

A family is one ``Family`` value: how its ``config.json`` reads as ``model_config.yaml`` and back,
which of its tensors make up each Megatron tensor, and how that is taken apart again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from nemo_aligner.errors import CheckpointError

Config = Mapping[str, Any]
Join = Callable[[Sequence[Tensor], Config], Tensor]
Split = Callable[[Tensor, Config], Sequence[Tensor]]


def pack_qkv(query: Tensor, key: Tensor, value: Tensor, heads: int, groups: int) -> Tensor:
    """q ``[heads * d, ...]``, k and v ``[groups * d, ...]`` in Megatron's order.

    Per group of query heads: its queries, its key, its value; ``[(heads + 2 * groups) * d, ...]``.
    """
    rest = query.shape[1:]
    parts = [tensor.reshape(groups, -1, *rest) for tensor in (query, key, value)]
    return torch.cat(parts, dim=1).reshape(-1, *rest)


def unpack_qkv(packed: Tensor, heads: int, groups: int) -> tuple[Tensor, Tensor, Tensor]:
    """The inverse of ``pack_qkv``."""
    rest = packed.shape[1:]
    size = packed.shape[0] // (heads + 2 * groups)
    grouped = packed.reshape(groups, -1, *rest)
    query, key, value = grouped.split([heads // groups * size, size, size], dim=1)
    return (query.reshape(-1, *rest), key.reshape(-1, *rest), value.reshape(-1, *rest))


def add_zero_groups(name: str, tensor: Tensor, groups: int, wanted: int) -> Tensor:
    """A Megatron tensor of ``groups`` query groups, with groups of zeros up to ``wanted``.

    Their values are zeros and so are their columns of the projection: they add nothing to the
    output, their gradients are exactly zero, and so they stay.
    """
    axis = {"self_attention.linear_qkv.weight": 0, "self_attention.linear_proj.weight": 1}.get(name)
    if axis is None:
        return tensor
    shape = list(tensor.shape)
    shape[axis] = shape[axis] // groups * (wanted - groups)
    return torch.cat([tensor, tensor.new_zeros(shape)], dim=axis)


def remove_zero_groups(name: str, tensor: Tensor, groups: int, kept: int) -> Tensor:
    """The inverse of ``add_zero_groups``: of ``groups`` query groups the first ``kept``."""
    axis = {"self_attention.linear_qkv.weight": 0, "self_attention.linear_proj.weight": 1}.get(name)
    if axis is None:
        return tensor
    return tensor.narrow(axis, 0, tensor.size(axis) // groups * kept)


def _copy(tensors: Sequence[Tensor], config: Config) -> Tensor:
    (tensor,) = tensors
    return tensor


def _whole(tensor: Tensor, config: Config) -> Sequence[Tensor]:
    return (tensor,)


def _stack_rows(tensors: Sequence[Tensor], config: Config) -> Tensor:
    return torch.cat(list(tensors))


def _halve_rows(tensor: Tensor, config: Config) -> Sequence[Tensor]:
    return tensor.chunk(2)


def _interleave_qkv(tensors: Sequence[Tensor], config: Config) -> Tensor:
    query, key, value = tensors
    return pack_qkv(query, key, value, config["num_attention_heads"], config["num_query_groups"])


def _separate_qkv(tensor: Tensor, config: Config) -> Sequence[Tensor]:
    return unpack_qkv(tensor, config["num_attention_heads"], config["num_query_groups"])


@dataclass(frozen=True)
class Rule:
    """One Megatron tensor, the Hugging Face tensors that ``join`` makes it of, and the way back.

    Both take the NeMo config as it is without added query groups.
    """

    megatron: str
    hf: tuple[str, ...]
    join: Join = _copy
    split: Split = _whole


@dataclass(frozen=True)
class Family:
    """A model family: its config, and its tensors.

    ``to_hf`` gives the keys of ``config.json`` that say what the decoder is, ``model_type`` first.

    ``model`` are those outside the layers, ``layer`` those inside each, ``untied`` the output layer
    where it is not the embeddings. ``unused`` ends the names of stored tensors without weights.
    """

    name: str
    to_nemo: Callable[[Config], dict[str, Any]]
    to_hf: Callable[[Config], dict[str, Any]]
    model: tuple[Rule, ...]
    layer: tuple[Rule, ...]
    untied: Rule
    unused: tuple[str, ...] = ()

    def rules(self, config: Config) -> list[tuple[Rule, int | None]]:
        """Every rule with its layer number, in the model's order; ``config`` is the NeMo one."""
        layers = range(config["num_layers"])
        tied = config["share_embeddings_and_output_weights"]
        return [
            *((rule, None) for rule in self.model),
            *((rule, layer) for layer in layers for rule in self.layer),
            *(() if tied else ((self.untied, None),)),
        ]


def hf_layer_name(name: str, layer: int | None) -> str:
    """The full Hugging Face name of a rule's tensor."""
    return name if layer is None else f"model.layers.{layer}.{name}"


class _Settings:
    """A ``config.json``, read key by key; every complaint names the key."""

    def __init__(self, config: Config) -> None:
        self.config = config

    def number(self, key: str, default: float | None = None) -> Any:
        value = self.config.get(key)
        value = default if value is None else value
        if not isinstance(value, int | float) or isinstance(value, bool) or value <= 0:
            raise CheckpointError(f"{key}: got {value!r}, wanted a number above 0")
        return value

    def only(self, key: str, *allowed: Any) -> None:
        """Refuse any value but ``allowed``; the first one is the default."""
        value = self.config.get(key, allowed[0])
        if value not in allowed:
            wanted = " or ".join(repr(choice) for choice in allowed)
            raise CheckpointError(f"{key}: got {value!r}, which is not supported; wanted {wanted}")


def _rope(config: Config) -> dict[str, Any]:
    """Rotary settings; transformers 5 writes ``rope_parameters``, older ones two keys."""
    rope = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
    base = rope.pop("rope_theta", None) or config.get("rope_theta") or 10000.0
    kind = rope.pop("rope_type", None) or rope.pop("type", None) or "default"
    rotary = {"position_embedding_type": "rope", "rotary_base": base, "rotary_percentage": 1.0}
    if kind not in ("default", "llama3"):
        raise CheckpointError(
            f"rope_type: got {kind!r}, which is not supported; wanted 'default' or 'llama3'"
        )
    scaling = _Settings(rope)
    scaling.only("partial_rotary_factor", 1.0, None)
    if kind == "default":
        return {**rotary, "scale_positional_embedding": False}
    return {
        **rotary,
        "scale_positional_embedding": True,
        "scale_factor": scaling.number("factor"),
        "low_freq_factor": scaling.number("low_freq_factor"),
        "high_freq_factor": scaling.number("high_freq_factor"),
        "old_context_len": scaling.number("original_max_position_embeddings"),
    }


def _llama_to_nemo(config: Config) -> dict[str, Any]:
    read = _Settings(config)
    read.only("hidden_act", "silu", "swish")
    read.only("attention_bias", False)
    read.only("mlp_bias", False)
    read.only("sliding_window", None)
    read.only("partial_rotary_factor", 1.0, None)
    read.only("quantization_config", None)
    heads, hidden = read.number("num_attention_heads"), read.number("hidden_size")
    return {
        "num_layers": read.number("num_hidden_layers"),
        "hidden_size": hidden,
        "ffn_hidden_size": read.number("intermediate_size"),
        "num_attention_heads": heads,
        "num_query_groups": read.number("num_key_value_heads", heads),
        "kv_channels": read.number("head_dim", hidden // heads),
        "encoder_seq_length": read.number("max_position_embeddings"),
        "max_position_embeddings": read.number("max_position_embeddings"),
        "normalization": "rmsnorm",
        "layernorm_epsilon": read.number("rms_norm_eps", 1e-6),
        "activation": "fast-swiglu",
        "bias": False,
        "qkv_bias": False,
        "qk_layernorm": False,
        **_rope(config),
        "vocab_size": read.number("vocab_size"),
        "make_vocab_size_divisible_by": 128,
        "share_embeddings_and_output_weights": bool(config.get("tie_word_embeddings", False)),
    }


def _rope_to_hf(config: Config) -> dict[str, Any]:
    rope: dict[str, Any] = {"rope_theta": config["rotary_base"], "rope_type": "default"}
    if config.get("scale_positional_embedding"):
        rope |= {
            "rope_type": "llama3",
            "factor": config.get("scale_factor", 8.0),
            "low_freq_factor": config.get("low_freq_factor", 1.0),
            "high_freq_factor": config.get("high_freq_factor", 4.0),
            "original_max_position_embeddings": config.get("old_context_len", 8192),
        }
    # transformers 5 reads the first, 4 the other two.
    scaling = None if rope["rope_type"] == "default" else rope
    return {
        "rope_parameters": rope,
        "rope_theta": config["rotary_base"],
        "rope_scaling": scaling,
    }


def _llama_to_hf(config: Config) -> dict[str, Any]:
    return {
        "model_type": "llama",
        "num_hidden_layers": config["num_layers"],
        "hidden_size": config["hidden_size"],
        "intermediate_size": config["ffn_hidden_size"],
        "num_attention_heads": config["num_attention_heads"],
        "num_key_value_heads": config["num_query_groups"],
        "head_dim": config["kv_channels"],
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "max_position_embeddings": config["max_position_embeddings"],
        "rms_norm_eps": config["layernorm_epsilon"],
        **_rope_to_hf(config),
        "vocab_size": config["vocab_size"],
        "tie_word_embeddings": bool(config["share_embeddings_and_output_weights"]),
    }


LLAMA = Family(
    name="llama",
    to_nemo=_llama_to_nemo,
    to_hf=_llama_to_hf,
    model=(
        Rule("embedding.word_embeddings.weight", ("model.embed_tokens.weight",)),
        Rule("decoder.final_layernorm.weight", ("model.norm.weight",)),
    ),
    layer=(
        Rule("self_attention.linear_qkv.layer_norm_weight", ("input_layernorm.weight",)),
        Rule(
            "self_attention.linear_qkv.weight",
            ("self_attn.q_proj.weight", "self_attn.k_proj.weight", "self_attn.v_proj.weight"),
            _interleave_qkv,
            _separate_qkv,
        ),
        Rule("self_attention.linear_proj.weight", ("self_attn.o_proj.weight",)),
        Rule("mlp.linear_fc1.layer_norm_weight", ("post_attention_layernorm.weight",)),
        Rule(
            "mlp.linear_fc1.weight",
            ("mlp.gate_proj.weight", "mlp.up_proj.weight"),
            _stack_rows,
            _halve_rows,
        ),
        Rule("mlp.linear_fc2.weight", ("mlp.down_proj.weight",)),
    ),
    untied=Rule("output_layer.weight", ("lm_head.weight",)),
    unused=("rotary_emb.inv_freq",),
)

_FAMILIES = {family.name: family for family in (LLAMA,)}


def find_family(model_type: Any) -> Family:
    """The family that ``config.json`` calls ``model_type``."""
    if model_type not in _FAMILIES:
        known = ", ".join(sorted(_FAMILIES))
        raise CheckpointError(f"model_type: got {model_type!r}, wanted one of: {known}")
    return _FAMILIES[model_type]


def family_of(config: Config) -> Family:
    """The family that a NeMo config is of, by what its decoder is made of."""
    return LLAMA
