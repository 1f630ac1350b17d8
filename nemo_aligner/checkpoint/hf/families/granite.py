"""Granite: Llama with a factor for the embeddings, for attention's scores, and for each block."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from nemo_aligner.checkpoint.hf.families.base import ANY
from nemo_aligner.checkpoint.hf.families.llama import LLAMA
from nemo_aligner.checkpoint.hf.families.settings import (
    Config,
    HfSettings,
    decoder_to_hf,
    decoder_to_nemo,
)
from nemo_aligner.models.shape import ModelShape


def _to_nemo(config: Config) -> dict[str, Any]:
    read = HfSettings(config)
    read.only("hidden_act", "silu", "swish")
    # logits_scaling is not read: it divides the logits of words, which no reward head has.
    return decoder_to_nemo(
        config,
        embedding_multiplier=read.number("embedding_multiplier", 1.0),
        residual_multiplier=read.number("residual_multiplier", 1.0),
        query_pre_attn_scalar=read.number("attention_multiplier", 1.0) ** -2.0,
    )


def _to_hf(config: Config) -> dict[str, Any]:
    shape = ModelShape.from_config(config)
    scale = shape.softmax_scale
    return decoder_to_hf(
        config,
        "granite",
        embedding_multiplier=shape.embedding_multiplier,
        residual_multiplier=shape.residual_multiplier,
        # Rounded to what double precision keeps of its inverse square.
        attention_multiplier=float(f"{shape.kv_channels**-0.5 if scale is None else scale:.15g}"),
        attention_bias=False,
        mlp_bias=False,
    )


GRANITE = replace(
    LLAMA,
    name="granite",
    to_nemo=_to_nemo,
    to_hf=_to_hf,
    made_of={
        "embedding_multiplier": ANY,
        "residual_multiplier": ANY,
        "query_pre_attn_scalar": ANY,
    },
    gguf=None,
)
