"""GLM-4 (``glm`` and ``glm4``) and Helium, which rotate neighbouring channels."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from nemo_aligner.checkpoint.hf.families.base import (
    ANY,
    ATTENTION_NORM,
    DOWN,
    FUSED_GATED,
    GATED,
    MLP_NORM,
    NAME_KEY,
    POST_ATTENTION_NORM,
    POST_MLP_NORM,
    PROJECTION,
    QKV,
    QKV_BIAS,
    interleaved,
    norm_rule,
)
from nemo_aligner.checkpoint.hf.families.llama import LLAMA
from nemo_aligner.checkpoint.hf.families.settings import (
    Config,
    HfSettings,
    decoder_to_hf,
    decoder_to_nemo,
)
from nemo_aligner.models.shape import ModelShape


def _named(name: str, config: Config, **family: Any) -> dict[str, Any]:
    """Translate what all have, with the family's name: their tensors are not those of a Llama."""
    read = HfSettings(config)
    read.only("hidden_act", "silu", "swish")
    nemo = decoder_to_nemo(config, kv_channels=read.count("head_dim", 128), **family)
    return {**nemo, NAME_KEY: name}


# GLM-4: half of a head's channels are rotated, and the two halves of the MLP are one tensor.


def _glm_to_nemo(name: str, config: Config, **family: Any) -> dict[str, Any]:
    read = HfSettings(config)
    return _named(
        name,
        {**config, "attention_bias": None},
        rotated=0.5,
        qkv_bias=read.flag("attention_bias", True),
        layernorm_epsilon=read.number("rms_norm_eps", 1.5625e-7),
        **family,
    )


def _glm_to_hf(name: str, config: Config) -> dict[str, Any]:
    shape = ModelShape.from_config(config)
    return decoder_to_hf(
        config,
        name,
        partial_rotary_factor=shape.rotary_percentage,
        attention_bias=shape.qkv_bias,
    )


_ATTENTION = (interleaved(QKV), interleaved(QKV_BIAS), PROJECTION)
_MLP = (FUSED_GATED, DOWN)
_NORMS = (
    norm_rule(ATTENTION_NORM, "input_layernorm.weight"),
    norm_rule(MLP_NORM, "post_attention_layernorm.weight"),
)

GLM = replace(
    LLAMA,
    name="glm",
    to_nemo=lambda config: _glm_to_nemo("glm", config),
    to_hf=lambda config: _glm_to_hf("glm", config),
    layer=(*_NORMS, *_ATTENTION, *_MLP),
    made_of={"qkv_bias": ANY, "rotary_percentage": ANY},
    gguf=None,
)

# GLM-4-0414: what is added to the residual stream is normed, too.
GLM4 = replace(
    GLM,
    name="glm4",
    to_nemo=lambda config: _glm_to_nemo("glm4", config, post_layernorms=True),
    to_hf=lambda config: _glm_to_hf("glm4", config),
    layer=(
        *GLM.layer,
        norm_rule(POST_ATTENTION_NORM, "post_self_attn_layernorm.weight"),
        norm_rule(POST_MLP_NORM, "post_mlp_layernorm.weight"),
    ),
    made_of={**GLM.made_of, "post_layernorms": True},
)


# Helium: all channels are rotated, and nothing is fused.


def _helium_to_nemo(config: Config) -> dict[str, Any]:
    epsilon = HfSettings(config).number("rms_norm_eps", 1e-8)
    return _named("helium", config, base=100000.0, layernorm_epsilon=epsilon)


def _helium_to_hf(config: Config) -> dict[str, Any]:
    return decoder_to_hf(config, "helium", attention_bias=False, mlp_bias=False)


HELIUM = replace(
    GLM,
    name="helium",
    to_nemo=_helium_to_nemo,
    to_hf=_helium_to_hf,
    layer=(*_NORMS, interleaved(QKV), PROJECTION, GATED, DOWN),
    made_of={},
)
