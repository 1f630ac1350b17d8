"""Qwen2, Qwen2.5, Qwen3, and Seed-OSS, which is a Qwen2 without windows."""

from __future__ import annotations

from functools import partial
from typing import Any

from nemo_aligner.checkpoint.hf.families import base, settings
from nemo_aligner.checkpoint.hf.families.base import GgufFormat, ModelFamily
from nemo_aligner.checkpoint.hf.families.settings import Config, HfSettings

# Qwen2 and Qwen2.5: Llama with biases of queries, keys and values.


def qwen_to_nemo(config: Config, **family: Any) -> dict[str, Any]:
    """Translate the config of a Qwen model to a NeMo config.

    If the config enables a sliding window but has no ``layer_types``, the layers from
    ``max_window_layers`` on have the window. ``family`` holds further arguments of
    ``decoder_to_nemo``.
    """
    reader = HfSettings(config)
    layers, size = reader.layers(), None
    kinds = [settings.FULL] * layers
    if reader.flag("use_sliding_window", False):
        size = reader.window()
    if size is not None:
        without = reader.count("max_window_layers", 28, least=0)
        kinds = [settings.FULL if layer < without else settings.SLIDING for layer in range(layers)]
    return settings.decoder_to_nemo(
        config, **family, **settings.window_to_nemo(config, size, kinds)
    )


def qwen_to_hf(config: Config, model_type: str, **family: Any) -> dict[str, Any]:
    """Translate a NeMo config to a Qwen's ``config.json``, with the keys of the sliding window.

    ``family`` holds further keys, which override the others.
    """
    window = settings.window_to_hf(config)
    return settings.decoder_to_hf(
        config,
        model_type,
        use_sliding_window=window["sliding_window"] is not None,
        max_window_layers=window["layer_types"].count(settings.FULL),
        **window,
        **family,
    )


QWEN2 = ModelFamily(
    name="qwen2",
    to_nemo=partial(qwen_to_nemo, qkv_bias=True),
    to_hf=partial(qwen_to_hf, model_type="qwen2"),
    layer=(*base.LAYER, base.QKV_BIAS),
    made_of={"qkv_bias": True, **base.ANY_WINDOW},
    gguf=GgufFormat("qwen2"),
)


# Seed-OSS: the size of a head is a setting of its own, 128 by default.


def _seed_to_nemo(config: Config) -> dict[str, Any]:
    HfSettings(config).only("attention_out_bias", False)
    return settings.decoder_to_nemo(config, name="seed_oss", head_dim=128, attention_bias=True)


SEED_OSS = ModelFamily(
    name="seed_oss",
    to_nemo=_seed_to_nemo,
    to_hf=partial(
        settings.decoder_to_hf,
        model_type="seed_oss",
        of_shape={"attention_bias": "qkv_bias"},
        attention_out_bias=False,
        mlp_bias=False,
    ),
    layer=QWEN2.layer,
    made_of={"qkv_bias": base.ANY},
    gguf=GgufFormat(
        "seed_oss",
        layer={
            **base.ATTENTION_NAMES,
            "post_attention_norm": "post_attention_layernorm",
            **base.GATED_MLP_NAMES,
        },
        may_have_biases=True,
    ),
)


# Qwen3: Llama with norms of queries and keys.

_GGUF_NAMES = {**base.LLAMA_NAMES, **base.QUERY_KEY_NORM_NAMES}

QWEN3 = ModelFamily(
    name="qwen3",
    to_nemo=partial(qwen_to_nemo, head_dim=128, qk_layernorm=True),
    to_hf=partial(qwen_to_hf, model_type="qwen3", attention_bias=False),
    layer=(*base.LAYER, *base.QUERY_KEY_NORMS),
    made_of={"qk_layernorm": True, **base.ANY_WINDOW},
    gguf=GgufFormat("qwen3", layer=_GGUF_NAMES, has_classifier=True),
)
