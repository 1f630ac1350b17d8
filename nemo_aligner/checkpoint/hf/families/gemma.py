"""Gemma, Gemma 2 and the text decoder of Gemma 3."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from nemo_aligner.checkpoint.hf.families import base, settings
from nemo_aligner.checkpoint.hf.families.base import GgufFormat, ModelFamily
from nemo_aligner.checkpoint.hf.families.settings import Config, HfSettings
from nemo_aligner.models.shapes.decoder import ModelShape

# Gemma: GEGLU, scaled embeddings, and norms that store gamma - 1.

gemma_norm = partial(base.norm_rule, hf_is_zero_centered=True)
gemma_to_nemo = partial(
    settings.decoder_to_nemo,
    act=(),  # the callers check the activation's key, which differs between Gemma 1, 2 and 3
    head_dim=256,
    tied=True,
    activation="geglu",
    apply_embedding_scaling=True,
    # Store gamma - 1 in archives, too, because adding 1 to a bf16 weight would round it again.
    layernorm_zero_centered_gamma=True,
)


def _to_nemo(config: Config) -> dict[str, Any]:
    reader = HfSettings(config)
    # Gemma's releases have "gelu" here, but use the tanh approximation.
    reader.only("hidden_act", "gelu_pytorch_tanh", "gelu")
    reader.only("hidden_activation", None, "gelu_pytorch_tanh")
    return gemma_to_nemo(config)


GEMMA = ModelFamily(
    name="gemma",
    to_nemo=_to_nemo,
    to_hf=partial(
        settings.decoder_to_hf,
        model_type="gemma",
        hidden_act="gelu_pytorch_tanh",
        hidden_activation=None,
        attention_bias=False,
    ),
    model=base.model_rules_with(gemma_norm),
    layer=base.layer_rules_with(gemma_norm),
    made_of={"activation": "geglu", "apply_embedding_scaling": True},
    gguf=GgufFormat("gemma", norm_offset=1),
)


# Gemma 2: Gemma with windows in every second layer, soft-capped attention scores, and norms on the
# outputs of attention and MLP.


def _gemma2_to_nemo(config: Config) -> dict[str, Any]:
    reader = HfSettings(config)
    reader.only("hidden_activation", "gelu_pytorch_tanh")
    size, is_uncapped = reader.window(), config.get("attn_logit_softcapping", 50.0) is None
    return gemma_to_nemo(
        config,
        post_layernorms=True,
        attn_logit_softcapping=None
        if is_uncapped
        else reader.number("attn_logit_softcapping", 50.0),
        query_pre_attn_scalar=reader.number("query_pre_attn_scalar", 256),
        **settings.window_to_nemo(config, size, settings.alternating_layers(reader.layers())),
    )


def _gemma2_to_hf(config: Config) -> dict[str, Any]:
    shape = ModelShape.from_config(config)
    scalar = shape.query_pre_attn_scalar or float(shape.kv_channels)
    return settings.decoder_to_hf(
        config,
        "gemma2",
        hidden_act="gelu_pytorch_tanh",
        hidden_activation="gelu_pytorch_tanh",
        attention_bias=False,
        # transformers' class accepts only an int.
        query_pre_attn_scalar=int(scalar) if scalar.is_integer() else scalar,
        attn_logit_softcapping=shape.attn_logit_softcapping,
        **settings.window_to_hf(config, always_sized=True),
    )


def _gguf_scale(config: Mapping[str, Any]) -> dict[str, Any]:
    """Derive ``query_pre_attn_scalar``, the attention scale, for which GGUF has no field.

    The value is the number of channels of a head. The 27B model is an exception: its value is the
    hidden size divided by the number of heads. Like llama.cpp, recognize it by its 46 layers.
    """
    is_27b = config["num_hidden_layers"] == 46
    per_head = config["hidden_size"] // config["num_attention_heads"]
    return {"query_pre_attn_scalar": per_head if is_27b else config["head_dim"]}


_GGUF = GgufFormat(
    "gemma2",
    layer={
        **base.ATTENTION_NAMES,
        "post_attention_norm": "post_attention_layernorm",
        "ffn_norm": "pre_feedforward_layernorm",
        "post_ffw_norm": "post_feedforward_layernorm",
        **base.GATED_MLP_NAMES,
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
    to_nemo=_gemma2_to_nemo,
    to_hf=_gemma2_to_hf,
    layer=(
        gemma_norm(base.ATTENTION_NORM, "input_layernorm.weight"),
        base.QKV,
        base.PROJECTION,
        gemma_norm(base.POST_ATTENTION_NORM, "post_attention_layernorm.weight"),
        gemma_norm(base.MLP_NORM, "pre_feedforward_layernorm.weight"),
        base.GATED,
        base.DOWN,
        gemma_norm(base.POST_MLP_NORM, "post_feedforward_layernorm.weight"),
    ),
    made_of={
        **GEMMA.made_of,
        **base.ANY_WINDOW,
        "post_layernorms": True,
        "attn_logit_softcapping": base.ANY,
        "query_pre_attn_scalar": base.ANY,
    },
    gguf=_GGUF,
)


# Gemma 3: Gemma 2 with norms of queries and keys instead of soft-capping, windows in all layers but
# every sixth, and another RoPE in the layers with a window.

_GLOBAL_BASE, _LOCAL_BASE = 1000000.0, 10000.0
# Defaults of transformers' class. The config.json of a release with vision has only the settings
# that differ from these.
_GEMMA3_SIZES = {
    "vocab_size": 262208,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 131072,
}


def _gemma3_to_nemo(config: Config) -> dict[str, Any]:
    config = {**_GEMMA3_SIZES, **config}
    reader = HfSettings(config)
    reader.only("hidden_activation", "gelu_pytorch_tanh")
    reader.only("attn_logit_softcapping", None)
    size, layers = reader.window(), reader.layers()
    kinds = settings.every_nth_layer(layers, reader.count("sliding_window_pattern", 6))
    window = settings.window_to_nemo(config, size, kinds)
    full_rope, local_rope = settings.split_rope_by_window(config, "rope_local_base_freq")
    local = settings.rope_to_nemo({"rope_parameters": local_rope}, None, _LOCAL_BASE, ("default",))
    without_rope = {key: value for key, value in config.items() if not key.startswith("rope_")}
    return gemma_to_nemo(
        without_rope,
        **settings.rope_to_nemo(
            {"rope_parameters": full_rope}, None, _GLOBAL_BASE, ("default", "linear")
        ),
        post_layernorms=True,
        qk_layernorm=True,
        query_pre_attn_scalar=reader.number("query_pre_attn_scalar", 256),
        rotary_base_local=local["rotary_base"] if window else None,
        **window,
    )


def _gemma3_to_hf(config: Config) -> dict[str, Any]:
    shape = ModelShape.from_config(config)
    gemma2 = _gemma2_to_hf(config)
    del gemma2["attn_logit_softcapping"]
    full_rope = gemma2.pop("rope_parameters")
    local = shape.rotary_base_local or _LOCAL_BASE
    local_rope = {"rope_type": "default", "rope_theta": local}
    return {
        **gemma2,
        "model_type": "gemma3_text",
        "rope_local_base_freq": local,
        "rope_parameters": {settings.FULL: full_rope, settings.SLIDING: local_rope},
    }


def _gemma3_from_gguf(config: Mapping[str, Any]) -> dict[str, Any]:
    """Derive settings without a GGUF field: the attention scale, and RoPE in layers with a window.

    The 27B model has another attention scale. Like llama.cpp, recognize it by its 62 layers.
    """
    is_27b = config["num_hidden_layers"] == 62
    per_head = config["hidden_size"] // config["num_attention_heads"]
    local = config.get("rope_local_base_freq", _LOCAL_BASE)
    local_rope = {"rope_type": "default", "rope_theta": local}
    full = [settings.FULL] * config["num_hidden_layers"]
    return {
        "query_pre_attn_scalar": per_head if is_27b else config["head_dim"],
        "rope_parameters": {settings.FULL: config["rope_parameters"], settings.SLIDING: local_rope},
        # The GGUF file of a model without a window has no field for the window.
        **({} if config["sliding_window"] else {"sliding_window": 4096, "layer_types": full}),
    }


GEMMA3 = replace(
    GEMMA2,
    name="gemma3_text",
    to_nemo=_gemma3_to_nemo,
    to_hf=_gemma3_to_hf,
    layer=(*GEMMA2.layer, *base.query_key_norms(gemma_norm)),
    made_of={
        **GEMMA2.made_of,
        "attn_logit_softcapping": None,
        "qk_layernorm": True,
        "rotary_base_local": base.ANY,
    },
    gguf=GgufFormat(
        "gemma3",
        layer={**_GGUF.layer, **base.QUERY_KEY_NORM_NAMES},
        optional={"rope.freq_base_swa": "rope_local_base_freq"},
        derived=_gemma3_from_gguf,
        norm_offset=1,
        has_windows=True,
    ),
)
