"""Arcee (AFM): Llama with a squared ReLU without a gate."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from nemo_aligner.checkpoint.hf.families.base import DOWN, UNGATED, layer_rules_with, norm_rule
from nemo_aligner.checkpoint.hf.families.llama import LLAMA
from nemo_aligner.checkpoint.hf.families.settings import (
    Config,
    HfSettings,
    decoder_to_hf,
    decoder_to_nemo,
)


def _to_nemo(config: Config) -> dict[str, Any]:
    read = HfSettings(config)
    read.only("hidden_act", "relu2")
    epsilon = read.number("rms_norm_eps", 1e-5)
    return decoder_to_nemo(config, activation="squared-relu", layernorm_epsilon=epsilon)


def _to_hf(config: Config) -> dict[str, Any]:
    return decoder_to_hf(config, "arcee", hidden_act="relu2", attention_bias=False, mlp_bias=False)


ARCEE = replace(
    LLAMA,
    name="arcee",
    to_nemo=_to_nemo,
    to_hf=_to_hf,
    layer=layer_rules_with(norm_rule, mlp=(UNGATED, DOWN)),
    made_of={"activation": "squared-relu"},
    gguf=None,
)
