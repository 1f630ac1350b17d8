"""Qwen2, Qwen2.5 and Qwen3, and Seed-OSS, a Qwen2 without windows."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from nemo_aligner.checkpoint.hf.families.base import (
    ANY,
    ANY_WINDOW,
    ATTENTION_NAMES,
    GATED_MLP_NAMES,
    LAYER,
    MLP_NORM_NAMES,
    NAME_KEY,
    QKV_BIAS,
    QUERY_KEY_NORMS,
    GgufFormat,
)
from nemo_aligner.checkpoint.hf.families.llama import LLAMA
from nemo_aligner.checkpoint.hf.families.settings import (
    FULL,
    SLIDING,
    Config,
    HfSettings,
    decoder_to_hf,
    decoder_to_nemo,
    layer_types,
    window_to_nemo,
)
from nemo_aligner.models.shape import ModelShape

# Qwen2 and Qwen2.5: Llama with biases of queries, keys and values.


def qwen_to_nemo(config: Config, **family: Any) -> dict[str, Any]:
    """Translate a Qwen's config: a window, if it is used, in the layers past the first ones."""
    read = HfSettings(config)
    read.only("hidden_act", "silu", "swish")
    layers, size = read.layers(), None
    kinds = [FULL] * layers
    if read.flag("use_sliding_window", False):
        size = read.window()
    if size is not None:
        without = read.count("max_window_layers", 28, least=0)
        kinds = [FULL if layer < without else SLIDING for layer in range(layers)]
    return decoder_to_nemo(config, **family, **window_to_nemo(config, size, kinds))


def qwen_window_to_hf(config: Config) -> dict[str, Any]:
    """Keys of ``config.json`` that say which layers have a window."""
    window = ModelShape.from_config(config).window_size
    kinds = layer_types(config)
    return {
        "use_sliding_window": window is not None,
        "sliding_window": window,
        "max_window_layers": kinds.count(FULL),
        "layer_types": kinds,
    }


def _to_nemo(config: Config) -> dict[str, Any]:
    return qwen_to_nemo(config, qkv_bias=True)


def _to_hf(config: Config) -> dict[str, Any]:
    return decoder_to_hf(config, "qwen2", **qwen_window_to_hf(config))


QWEN2 = replace(
    LLAMA,
    name="qwen2",
    to_nemo=_to_nemo,
    to_hf=_to_hf,
    layer=(*LAYER, QKV_BIAS),
    made_of={"qkv_bias": True, **ANY_WINDOW},
    gguf=GgufFormat("qwen2"),
)


# Seed-OSS: the size of its heads is its own.


def _seed_to_nemo(config: Config) -> dict[str, Any]:
    read = HfSettings(config)
    read.only("hidden_act", "silu", "swish")
    read.only("attention_out_bias", False)
    nemo = decoder_to_nemo(
        {**config, "attention_bias": None},
        kv_channels=read.count("head_dim", 128),
        qkv_bias=read.flag("attention_bias", True),
    )
    return {**nemo, NAME_KEY: "seed_oss"}


def _seed_to_hf(config: Config) -> dict[str, Any]:
    has_bias = ModelShape.from_config(config).qkv_bias
    biases = {"attention_bias": has_bias, "attention_out_bias": False, "mlp_bias": False}
    return decoder_to_hf(config, "seed_oss", **biases)


SEED_OSS = replace(
    QWEN2,
    name="seed_oss",
    to_nemo=_seed_to_nemo,
    to_hf=_seed_to_hf,
    made_of={"qkv_bias": ANY},
    gguf=None,
)


# Qwen3: Llama with norms of queries and keys.


def _qwen3_to_nemo(config: Config) -> dict[str, Any]:
    channels = HfSettings(config).count("head_dim", 128)
    return qwen_to_nemo(config, qk_layernorm=True, kv_channels=channels)


def _qwen3_to_hf(config: Config) -> dict[str, Any]:
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
    to_nemo=_qwen3_to_nemo,
    to_hf=_qwen3_to_hf,
    layer=(*LAYER, *QUERY_KEY_NORMS),
    made_of={"qk_layernorm": True, **ANY_WINDOW},
    gguf=GgufFormat("qwen3", layer=_GGUF_NAMES),
)
