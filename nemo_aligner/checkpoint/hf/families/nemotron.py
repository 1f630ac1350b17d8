"""Nemotron: squared ReLU, LayerNorm1P, and half of a head's channels rotated."""

from __future__ import annotations

from typing import Any

from nemo_aligner.checkpoint.hf.families.base import (
    ANY,
    ATTENTION_NAMES,
    DOWN,
    EMBEDDING,
    FINAL_NORM,
    MLP_NAMES,
    MLP_NORM_NAMES,
    UNGATED,
    GgufFormat,
    ModelFamily,
    Rule,
    layer_rules_with,
)
from nemo_aligner.checkpoint.hf.families.settings import (
    Config,
    HfSettings,
    decoder_to_hf,
    decoder_to_nemo,
)
from nemo_aligner.models.shape import ModelShape


def _to_nemo(config: Config) -> dict[str, Any]:
    return decoder_to_nemo(
        config,
        act=("relu2",),
        rotated=0.5,
        normalization="layernorm1p",
        layernorm_epsilon=HfSettings(config).number("norm_eps", 1e-5),
        activation="squared-relu",
    )


def _to_hf(config: Config) -> dict[str, Any]:
    shape = ModelShape.from_config(config)
    decoder = decoder_to_hf(
        config,
        "nemotron",
        hidden_act="relu2",
        norm_eps=shape.layernorm_epsilon,
        partial_rotary_factor=shape.rotary_percentage,
        attention_bias=False,
        mlp_bias=False,
    )
    del decoder["rms_norm_eps"]
    return decoder


def _norm_rule(megatron: str, hf: str) -> Rule:
    """Rule for a weight that both sides store as LayerNorm1P's gamma - 1."""
    return Rule(megatron, (hf,))


NEMOTRON = ModelFamily(
    name="nemotron",
    to_nemo=_to_nemo,
    to_hf=_to_hf,
    model=(
        EMBEDDING,
        Rule(FINAL_NORM, ("model.norm.weight",)),
        Rule("decoder.final_layernorm.bias", ("model.norm.bias",)),
    ),
    layer=(
        *layer_rules_with(_norm_rule, mlp=(UNGATED, DOWN)),
        Rule("self_attention.linear_qkv.layer_norm_bias", ("input_layernorm.bias",)),
        Rule("mlp.linear_fc1.layer_norm_bias", ("post_attention_layernorm.bias",)),
    ),
    made_of={
        "activation": "squared-relu",
        "normalization": "layernorm1p",
        "rotary_percentage": ANY,
    },
    gguf=GgufFormat(
        "nemotron",
        layer={**ATTENTION_NAMES, **MLP_NORM_NAMES, **MLP_NAMES},
        epsilon=("attention.layer_norm_epsilon", "norm_eps"),
        norm_offset=1,
        is_partly_rotated=True,
    ),
)
