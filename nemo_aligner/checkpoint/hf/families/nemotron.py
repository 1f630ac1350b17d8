"""Nemotron: squared ReLU, LayerNorm1P, and RoPE over half of a head's channels."""

from __future__ import annotations

from typing import Any

from nemo_aligner.checkpoint.hf.families import base, settings
from nemo_aligner.checkpoint.hf.families.base import GgufFormat, ModelFamily, Rule
from nemo_aligner.checkpoint.hf.families.settings import Config, HfSettings
from nemo_aligner.models.shapes.decoder import ModelShape


def _to_nemo(config: Config) -> dict[str, Any]:
    return settings.decoder_to_nemo(
        config,
        act=("relu2",),
        rotated=0.5,
        normalization="layernorm1p",
        layernorm_epsilon=HfSettings(config).number("norm_eps", 1e-5),
        activation="squared-relu",
    )


def _to_hf(config: Config) -> dict[str, Any]:
    shape = ModelShape.from_config(config)
    decoder = settings.decoder_to_hf(
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
    """Build the rule for a norm's weight, which needs no shift.

    Hugging Face and Megatron both store it as gamma - 1 (LayerNorm1P).
    """
    return Rule(megatron, (hf,))


NEMOTRON = ModelFamily(
    name="nemotron",
    to_nemo=_to_nemo,
    to_hf=_to_hf,
    model=(
        base.EMBEDDING,
        Rule(base.FINAL_NORM, ("model.norm.weight",)),
        Rule("decoder.final_layernorm.bias", ("model.norm.bias",)),
    ),
    layer=(
        *base.layer_rules_with(_norm_rule, mlp=(base.UNGATED, base.DOWN)),
        Rule("self_attention.linear_qkv.layer_norm_bias", ("input_layernorm.bias",)),
        Rule("mlp.linear_fc1.layer_norm_bias", ("post_attention_layernorm.bias",)),
    ),
    made_of={
        "activation": "squared-relu",
        "normalization": "layernorm1p",
        "rotary_percentage": base.ANY,
    },
    gguf=GgufFormat(
        "nemotron",
        layer={**base.ATTENTION_NAMES, **base.MLP_NORM_NAMES, **base.MLP_NAMES},
        epsilon=("attention.layer_norm_epsilon", "norm_eps"),
        norm_offset=1,
        is_partly_rotated=True,
        is_share_of_hidden=True,
    ),
)
