"""Gemma: GEGLU, scaled embeddings, and norms that store gamma - 1."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

from nemo_aligner.checkpoint.hf.families.decoder import decoder_to_hf, decoder_to_nemo
from nemo_aligner.checkpoint.hf.families.gguf_format import GgufFormat
from nemo_aligner.checkpoint.hf.families.layer_names import layer_rules_with, model_rules_with
from nemo_aligner.checkpoint.hf.families.llama import LLAMA
from nemo_aligner.checkpoint.hf.families.rules import norm_rule
from nemo_aligner.checkpoint.hf.families.settings import Config, HfSettings

gemma_norm = partial(norm_rule, hf_is_zero_centered=True)


def gemma_to_nemo(config: Config, **family: Any) -> dict[str, Any]:
    """What the ``config.json`` of all Gemmas says alike."""
    read = HfSettings(config)
    return decoder_to_nemo(
        config,
        kv_channels=read.count("head_dim", 256),
        activation="geglu",
        apply_embedding_scaling=True,
        # As Gemma stores it: 1 + weight would round a bf16 weight once more.
        layernorm_zero_centered_gamma=True,
        share_embeddings_and_output_weights=read.flag("tie_word_embeddings", True),
        **family,
    )


def _to_nemo(config: Config) -> dict[str, Any]:
    read = HfSettings(config)
    # Gemma's own releases say gelu, and mean its approximation.
    read.only("hidden_act", "gelu_pytorch_tanh", "gelu")
    read.only("hidden_activation", None, "gelu_pytorch_tanh")
    return gemma_to_nemo(config)


def _to_hf(config: Config) -> dict[str, Any]:
    return decoder_to_hf(
        config,
        "gemma",
        hidden_act="gelu_pytorch_tanh",
        hidden_activation=None,
        attention_bias=False,
    )


GEMMA = replace(
    LLAMA,
    name="gemma",
    to_nemo=_to_nemo,
    to_hf=_to_hf,
    model=model_rules_with(gemma_norm),
    layer=layer_rules_with(gemma_norm),
    made_of={"activation": "geglu", "apply_embedding_scaling": True},
    gguf=GgufFormat("gemma", norm_offset=1),
)
