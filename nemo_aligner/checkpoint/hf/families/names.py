"""Hugging Face's names of a model family's tensors, and what Megatron and NeMo call them.

A family is one ``Family`` value: which of its tensors make up each Megatron tensor, how that is
taken apart again, and, from ``hf_configs.py``, how its ``config.json`` reads as
``model_config.yaml`` and back.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from nemo_aligner.checkpoint.hf.families import configs as hf_configs
from nemo_aligner.checkpoint.hf.families.configs import Config, is_tied
from nemo_aligner.errors import CheckpointError, shown
from nemo_aligner.models.shape import ModelShape

Join = Callable[[Sequence[Tensor], Config], Tensor]
Split = Callable[[Tensor, Config], Sequence[Tensor]]

# The axis of query groups in the tensors that have one.
_GROUP_AXES = {
    "self_attention.linear_qkv.weight": 0,
    "self_attention.linear_qkv.bias": 0,
    "self_attention.linear_proj.weight": 1,
}


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
    axis = _GROUP_AXES.get(name)
    if axis is None:
        return tensor
    shape = list(tensor.shape)
    shape[axis] = shape[axis] // groups * (wanted - groups)
    return torch.cat([tensor, tensor.new_zeros(shape)], dim=axis)


def remove_zero_groups(name: str, tensor: Tensor, groups: int, kept: int) -> Tensor:
    """The inverse of ``add_zero_groups``: of ``groups`` query groups the first ``kept``."""
    axis = _GROUP_AXES.get(name)
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
    heads, groups = config["num_attention_heads"], config["num_query_groups"]
    wanted = [count * config["kv_channels"] for count in (heads, groups, groups)]
    got = [tensor.shape[0] for tensor in tensors]
    if got != wanted:
        raise CheckpointError(
            f"q_proj, k_proj and v_proj: got {got} rows, wanted {wanted}, as the config says"
        )
    return pack_qkv(query, key, value, heads, groups)


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
        tied = is_tied(config)
        return [
            *((rule, None) for rule in self.model),
            *((rule, layer) for layer in layers for rule in self.layer),
            *(() if tied else ((self.untied, None),)),
        ]


def hf_layer_name(name: str, layer: int | None) -> str:
    """The full Hugging Face name of a rule's tensor."""
    return name if layer is None else f"model.layers.{layer}.{name}"


def _norm(megatron: str, hf: str, *, hf_is_zero_centered: bool = False) -> Rule:
    """A norm's weight, which either side has as gamma or as gamma - 1."""

    def shift(config: Config) -> int:
        return hf_is_zero_centered - bool(config.get("layernorm_zero_centered_gamma"))

    def join(tensors: Sequence[Tensor], config: Config) -> Tensor:
        return _copy(tensors, config) + shift(config)

    def split(tensor: Tensor, config: Config) -> Sequence[Tensor]:
        return (tensor - shift(config),)

    return Rule(megatron, (hf,), join, split)


def _qkv(kind: str) -> Rule:
    parts = tuple(f"self_attn.{part}_proj.{kind}" for part in "qkv")
    return Rule(f"self_attention.linear_qkv.{kind}", parts, _interleave_qkv, _separate_qkv)


_EMBEDDING = Rule("embedding.word_embeddings.weight", ("model.embed_tokens.weight",))
_PROJECTION = Rule("self_attention.linear_proj.weight", ("self_attn.o_proj.weight",))
_GATED = Rule(
    "mlp.linear_fc1.weight",
    ("mlp.gate_proj.weight", "mlp.up_proj.weight"),
    _stack_rows,
    _halve_rows,
)
_DOWN = Rule("mlp.linear_fc2.weight", ("mlp.down_proj.weight",))
_FINAL_NORM = "decoder.final_layernorm.weight"
_ATTENTION_NORM = "self_attention.linear_qkv.layer_norm_weight"
_MLP_NORM = "mlp.linear_fc1.layer_norm_weight"


def _layer(norm: Callable[[str, str], Rule]) -> tuple[Rule, ...]:
    """A layer with a norm before attention, and one before a gated MLP."""
    return (
        norm(_ATTENTION_NORM, "input_layernorm.weight"),
        _qkv("weight"),
        _PROJECTION,
        norm(_MLP_NORM, "post_attention_layernorm.weight"),
        _GATED,
        _DOWN,
    )


LLAMA = Family(
    name="llama",
    to_nemo=hf_configs.llama_to_nemo,
    to_hf=hf_configs.llama_to_hf,
    model=(_EMBEDDING, _norm(_FINAL_NORM, "model.norm.weight")),
    layer=_layer(_norm),
    untied=Rule("output_layer.weight", ("lm_head.weight",)),
    unused=("rotary_emb.inv_freq",),
)

MISTRAL = replace(
    LLAMA, name="mistral", to_nemo=hf_configs.mistral_to_nemo, to_hf=hf_configs.mistral_to_hf
)

QWEN2 = replace(
    LLAMA,
    name="qwen2",
    to_nemo=hf_configs.qwen2_to_nemo,
    to_hf=hf_configs.qwen2_to_hf,
    layer=(*LLAMA.layer, _qkv("bias")),
)

QWEN3 = replace(
    LLAMA,
    name="qwen3",
    to_nemo=hf_configs.qwen3_to_nemo,
    to_hf=hf_configs.qwen3_to_hf,
    layer=(
        *LLAMA.layer,
        _norm("self_attention.q_layernorm.weight", "self_attn.q_norm.weight"),
        _norm("self_attention.k_layernorm.weight", "self_attn.k_norm.weight"),
    ),
)

_zero_centered_norm = partial(_norm, hf_is_zero_centered=True)

GEMMA = replace(
    LLAMA,
    name="gemma",
    to_nemo=hf_configs.gemma_to_nemo,
    to_hf=hf_configs.gemma_to_hf,
    model=(_EMBEDDING, _zero_centered_norm(_FINAL_NORM, "model.norm.weight")),
    layer=_layer(_zero_centered_norm),
)

GEMMA2 = replace(
    GEMMA,
    name="gemma2",
    to_nemo=hf_configs.gemma2_to_nemo,
    to_hf=hf_configs.gemma2_to_hf,
    layer=(
        _zero_centered_norm(_ATTENTION_NORM, "input_layernorm.weight"),
        _qkv("weight"),
        _PROJECTION,
        _zero_centered_norm(
            "self_attention.linear_proj.post_layernorm.weight", "post_attention_layernorm.weight"
        ),
        _zero_centered_norm(_MLP_NORM, "pre_feedforward_layernorm.weight"),
        _GATED,
        _DOWN,
        _zero_centered_norm(
            "mlp.linear_fc2.post_layernorm.weight", "post_feedforward_layernorm.weight"
        ),
    ),
)

# Both sides store LayerNorm1P's gamma - 1.
NEMOTRON = replace(
    LLAMA,
    name="nemotron",
    to_nemo=hf_configs.nemotron_to_nemo,
    to_hf=hf_configs.nemotron_to_hf,
    model=(
        _EMBEDDING,
        Rule(_FINAL_NORM, ("model.norm.weight",)),
        Rule("decoder.final_layernorm.bias", ("model.norm.bias",)),
    ),
    layer=(
        Rule(_ATTENTION_NORM, ("input_layernorm.weight",)),
        Rule("self_attention.linear_qkv.layer_norm_bias", ("input_layernorm.bias",)),
        _qkv("weight"),
        _PROJECTION,
        Rule(_MLP_NORM, ("post_attention_layernorm.weight",)),
        Rule("mlp.linear_fc1.layer_norm_bias", ("post_attention_layernorm.bias",)),
        Rule("mlp.linear_fc1.weight", ("mlp.up_proj.weight",)),
        _DOWN,
    ),
)

_FAMILIES = {
    family.name: family for family in (LLAMA, MISTRAL, QWEN2, QWEN3, GEMMA, GEMMA2, NEMOTRON)
}


def find_family(model_type: Any) -> Family:
    """The family that ``config.json`` calls ``model_type``."""
    if not isinstance(model_type, str) or model_type not in _FAMILIES:
        experts = ", a mixture of experts" if model_type in _EXPERTS else ""
        known = ", ".join(_FAMILIES)
        raise CheckpointError(
            f"model_type: got {shown(model_type)}{experts}, wanted one of: {known}"
        )
    return _FAMILIES[model_type]


_EXPERTS = ("mixtral", "qwen2_moe", "qwen3_moe")

# What a decoder may be made of beside what Llama is: the first is Llama's.
_PLAIN = {
    "activation": "swiglu",
    "normalization": "rmsnorm",
    "qkv_bias": False,
    "qk_layernorm": False,
    "post_layernorms": False,
    "apply_embedding_scaling": False,
    "rotary_percentage": 1.0,
    "window_size": None,
    "window_pattern": "all",
    "attn_logit_softcapping": None,
    "query_pre_attn_scalar": None,
}
_ANY = object()
_WINDOWS = {"window_size": _ANY, "window_pattern": _ANY}
_GEMMA = {"activation": "geglu", "apply_embedding_scaling": True}
_MADE_OF: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {"window_size": _ANY},
    "qwen2": {"qkv_bias": True, **_WINDOWS},
    "qwen3": {"qk_layernorm": True, **_WINDOWS},
    "gemma": _GEMMA,
    "gemma2": {
        **_GEMMA,
        **_WINDOWS,
        "post_layernorms": True,
        "attn_logit_softcapping": _ANY,
        "query_pre_attn_scalar": _ANY,
    },
    "nemotron": {
        "activation": "squared-relu",
        "normalization": "layernorm1p",
        "rotary_percentage": _ANY,
    },
}


def family_of(config: Config) -> Family:
    """The family that a NeMo config is of, by what its decoder is made of.

    Raises:
        CheckpointError: no family is made of this; it names what is not Llama's.
    """
    shape = ModelShape.from_config(config)
    found = {key: getattr(shape, key) for key in _PLAIN}
    for name, differences in _MADE_OF.items():
        wanted = _PLAIN | differences
        if all(wanted[key] in (_ANY, value) for key, value in found.items()):
            return _FAMILIES[name]
    own = ", ".join(f"{key}={value}" for key, value in found.items() if value != _PLAIN[key])
    raise CheckpointError(
        f"model_config.yaml: got a decoder with {own}, which is not of any family: "
        f"{', '.join(_FAMILIES)}"
    )
