"""Qwen3: Llama with norms of queries and keys."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from nemo_aligner.checkpoint.hf.families.decoder import decoder_to_hf
from nemo_aligner.checkpoint.hf.families.family import ANY_WINDOW
from nemo_aligner.checkpoint.hf.families.gguf_format import (
    ATTENTION_NAMES,
    GATED_MLP_NAMES,
    MLP_NORM_NAMES,
    GgufFormat,
)
from nemo_aligner.checkpoint.hf.families.layer_names import LAYER
from nemo_aligner.checkpoint.hf.families.llama import LLAMA
from nemo_aligner.checkpoint.hf.families.qwen2 import qwen_to_nemo, qwen_window_to_hf
from nemo_aligner.checkpoint.hf.families.rules import norm_rule
from nemo_aligner.checkpoint.hf.families.settings import Config, HfSettings


def _to_nemo(config: Config) -> dict[str, Any]:
    channels = HfSettings(config).count("head_dim", 128)
    return qwen_to_nemo(config, qk_layernorm=True, kv_channels=channels)


def _to_hf(config: Config) -> dict[str, Any]:
    return decoder_to_hf(config, "qwen3", attention_bias=False, **qwen_window_to_hf(config))


_GGUF_NAMES = {
    **ATTENTION_NAMES,
    **MLP_NORM_NAMES,
    **GATED_MLP_NAMES,
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
}

QWEN3 = replace(
    LLAMA,
    name="qwen3",
    to_nemo=_to_nemo,
    to_hf=_to_hf,
    layer=(
        *LAYER,
        norm_rule("self_attention.q_layernorm.weight", "self_attn.q_norm.weight"),
        norm_rule("self_attention.k_layernorm.weight", "self_attn.k_norm.weight"),
    ),
    made_of={"qk_layernorm": True, **ANY_WINDOW},
    gguf=GgufFormat("qwen3", layer=_GGUF_NAMES),
)
