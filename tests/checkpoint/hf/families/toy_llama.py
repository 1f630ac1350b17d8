"""ToyLlama: a Llama whose config, layers and MLP have other names."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from nemo_aligner.checkpoint.hf.families import NAME_KEY
from nemo_aligner.checkpoint.hf.families.base import Rule, layer_rules_with, norm_rule, stacked_rule
from nemo_aligner.checkpoint.hf.families.llama import LLAMA


def to_nemo(config: Mapping[str, Any]) -> dict[str, Any]:
    llama = {**config, "intermediate_size": config.get("ffn_dim")}
    # Its decoder is a Llama's: without its name, an export would be a Llama.
    return {**LLAMA.to_nemo(llama), NAME_KEY: "toy_llama"}


def to_hf(config: Mapping[str, Any]) -> dict[str, Any]:
    llama = LLAMA.to_hf(config)
    channels = llama.pop("intermediate_size")
    return {**llama, "model_type": "toy_llama", "ffn_dim": channels}


TOY_LLAMA = replace(
    LLAMA,
    name="toy_llama",
    to_nemo=to_nemo,
    to_hf=to_hf,
    layer_prefix="model.blocks.",
    layer=layer_rules_with(
        norm_rule,
        mlp=(
            stacked_rule("mlp.linear_fc1.weight", "mlp.w1.weight", "mlp.w3.weight"),
            Rule("mlp.linear_fc2.weight", ("mlp.w2.weight",)),
        ),
    ),
    gguf=None,
)
