"""Llama (and SmolLM, which is one), Mistral and Arcee."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from nemo_aligner.checkpoint.hf.families.base import (
    ANY,
    DOWN,
    LAYER,
    MODEL,
    OUTPUT,
    UNGATED,
    Config,
    GgufFormat,
    HfSettings,
    ModelFamily,
    decoder_to_hf,
    decoder_to_nemo,
    layer_rules_with,
    norm_rule,
    window_everywhere,
)
from nemo_aligner.models.shape import ModelShape

# Llama, and SmolLM, which is one.


def _to_nemo(config: Config) -> dict[str, Any]:
    read = HfSettings(config)
    read.only("hidden_act", "silu", "swish")
    read.only("sliding_window", None)
    return decoder_to_nemo(config)


def _to_hf(config: Config) -> dict[str, Any]:
    return decoder_to_hf(config, "llama", attention_bias=False, mlp_bias=False)


LLAMA = ModelFamily(
    name="llama",
    to_nemo=_to_nemo,
    to_hf=_to_hf,
    model=MODEL,
    layer=LAYER,
    untied=OUTPUT,
    # Mistral's GGUF files have this name, too, and do not mention its window.
    gguf=GgufFormat("llama", is_permuted=True),
    unused=("rotary_emb.inv_freq",),
)


# Mistral: Llama with a window in all layers, or in none.


def _mistral_to_nemo(config: Config) -> dict[str, Any]:
    read = HfSettings(config)
    read.only("hidden_act", "silu", "swish")
    read.only("layer_types", None)
    size = read.window()
    return decoder_to_nemo(config, **({} if size is None else window_everywhere(size)))


def _mistral_to_hf(config: Config) -> dict[str, Any]:
    window = ModelShape.from_config(config).window_size
    return decoder_to_hf(config, "mistral", sliding_window=window)


MISTRAL = replace(
    LLAMA,
    name="mistral",
    to_nemo=_mistral_to_nemo,
    to_hf=_mistral_to_hf,
    made_of={"window_size": ANY},
    gguf=None,  # llama.cpp writes it as a Llama
)


# Arcee: Llama with a squared ReLU without a gate.


def _arcee_to_nemo(config: Config) -> dict[str, Any]:
    read = HfSettings(config)
    read.only("hidden_act", "relu2")
    epsilon = read.number("rms_norm_eps", 1e-5)
    return decoder_to_nemo(config, activation="squared-relu", layernorm_epsilon=epsilon)


def _arcee_to_hf(config: Config) -> dict[str, Any]:
    return {**_to_hf(config), "model_type": "arcee", "hidden_act": "relu2"}


ARCEE = replace(
    LLAMA,
    name="arcee",
    to_nemo=_arcee_to_nemo,
    to_hf=_arcee_to_hf,
    layer=layer_rules_with(norm_rule, mlp=(UNGATED, DOWN)),
    made_of={"activation": "squared-relu"},
    gguf=None,
)
