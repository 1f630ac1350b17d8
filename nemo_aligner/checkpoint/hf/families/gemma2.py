"""Gemma 2: Gemma with alternating windows, capped scores, and norms of what is added."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from nemo_aligner.checkpoint.hf.families.decoder import decoder_to_hf
from nemo_aligner.checkpoint.hf.families.family import ANY, ANY_WINDOW
from nemo_aligner.checkpoint.hf.families.gemma import GEMMA, gemma_norm, gemma_to_nemo
from nemo_aligner.checkpoint.hf.families.gguf_format import (
    ATTENTION_NAMES,
    GATED_MLP_NAMES,
    GgufFormat,
)
from nemo_aligner.checkpoint.hf.families.layer_names import (
    ATTENTION_NORM,
    DOWN,
    GATED,
    MLP_NORM,
    PROJECTION,
    QKV,
)
from nemo_aligner.checkpoint.hf.families.settings import Config, HfSettings
from nemo_aligner.checkpoint.hf.families.windows import (
    alternating_layers,
    layer_types,
    window_to_nemo,
)
from nemo_aligner.models.shape import ModelShape


def _to_nemo(config: Config) -> dict[str, Any]:
    read = HfSettings(config)
    read.only("hidden_activation", "gelu_pytorch_tanh")
    size, is_uncapped = read.window(), config.get("attn_logit_softcapping", 50.0) is None
    return gemma_to_nemo(
        config,
        post_layernorms=True,
        attn_logit_softcapping=None if is_uncapped else read.number("attn_logit_softcapping", 50.0),
        query_pre_attn_scalar=read.number("query_pre_attn_scalar", 256),
        **window_to_nemo(config, size, alternating_layers(read.layers())),
    )


def _to_hf(config: Config) -> dict[str, Any]:
    shape = ModelShape.from_config(config)
    scalar = shape.query_pre_attn_scalar or float(shape.kv_channels)
    return decoder_to_hf(
        config,
        "gemma2",
        hidden_act="gelu_pytorch_tanh",
        hidden_activation="gelu_pytorch_tanh",
        attention_bias=False,
        # transformers takes nothing but an int.
        query_pre_attn_scalar=int(scalar) if scalar.is_integer() else scalar,
        attn_logit_softcapping=shape.attn_logit_softcapping,
        sliding_window=shape.window_size,
        layer_types=layer_types(config),
    )


def _gguf_scale(config: Mapping[str, Any]) -> dict[str, Any]:
    """No field has it: llama.cpp goes by the 46 layers of the 27B, the one that differs."""
    is_27b = config["num_hidden_layers"] == 46
    per_head = config["hidden_size"] // config["num_attention_heads"]
    return {"query_pre_attn_scalar": per_head if is_27b else config["head_dim"]}


_GGUF = GgufFormat(
    "gemma2",
    layer={
        **ATTENTION_NAMES,
        "post_attention_norm": "post_attention_layernorm",
        "ffn_norm": "pre_feedforward_layernorm",
        "post_ffw_norm": "post_feedforward_layernorm",
        **GATED_MLP_NAMES,
    },
    optional={
        "attention.sliding_window": "sliding_window",
        "attn_logit_softcapping": "attn_logit_softcapping",
    },
    derived=_gguf_scale,
    norm_offset=1,
)

GEMMA2 = replace(
    GEMMA,
    name="gemma2",
    to_nemo=_to_nemo,
    to_hf=_to_hf,
    layer=(
        gemma_norm(ATTENTION_NORM, "input_layernorm.weight"),
        QKV,
        PROJECTION,
        gemma_norm(
            "self_attention.linear_proj.post_layernorm.weight", "post_attention_layernorm.weight"
        ),
        gemma_norm(MLP_NORM, "pre_feedforward_layernorm.weight"),
        GATED,
        DOWN,
        gemma_norm("mlp.linear_fc2.post_layernorm.weight", "post_feedforward_layernorm.weight"),
    ),
    made_of={
        **GEMMA.made_of,
        **ANY_WINDOW,
        "post_layernorms": True,
        "attn_logit_softcapping": ANY,
        "query_pre_attn_scalar": ANY,
    },
    gguf=_GGUF,
)
