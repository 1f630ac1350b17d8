"""OLMo 2 and EXAONE 4, which norm what attention and MLP add, rather than what they read."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from nemo_aligner.checkpoint.hf.families.base import (
    DOWN,
    GATED,
    POST_ATTENTION_NORM,
    POST_MLP_NORM,
    PROJECTION,
    QKV,
    QUERY_KEY_NORMS,
    Config,
    HfSettings,
    decoder_to_hf,
    decoder_to_nemo,
    layer_types,
    norm_rule,
)
from nemo_aligner.checkpoint.hf.families.llama import LLAMA


def _behind_to_nemo(config: Config, **family: Any) -> dict[str, Any]:
    read = HfSettings(config)
    read.only("hidden_act", "silu", "swish")
    return decoder_to_nemo(
        config,
        pre_layernorms=False,
        post_layernorms=True,
        qk_layernorm=True,
        layernorm_epsilon=read.number("rms_norm_eps", 1e-5),
        **family,
    )


# OLMo 2: the norms of queries and keys are over all heads together.


def _olmo2_to_nemo(config: Config) -> dict[str, Any]:
    HfSettings(config).only("clip_qkv", None)
    return _behind_to_nemo(config, qk_layernorm_across_heads=True)


def _olmo2_to_hf(config: Config) -> dict[str, Any]:
    return decoder_to_hf(config, "olmo2", attention_bias=False)


_BLOCKS = (
    QKV,
    PROJECTION,
    norm_rule(POST_ATTENTION_NORM, "post_attention_layernorm.weight"),
    GATED,
    DOWN,
    norm_rule(POST_MLP_NORM, "post_feedforward_layernorm.weight"),
)
_NORMS_BEHIND = {"pre_layernorms": False, "post_layernorms": True, "qk_layernorm": True}

OLMO2 = replace(
    LLAMA,
    name="olmo2",
    to_nemo=_olmo2_to_nemo,
    to_hf=_olmo2_to_hf,
    layer=(*_BLOCKS, *(replace(rule, is_by_group=True) for rule in QUERY_KEY_NORMS)),
    made_of={**_NORMS_BEHIND, "qk_layernorm_across_heads": True},
    gguf=None,
)


# EXAONE 4 without windows. With them, the layers that have none do not rotate either.


def _exaone4_to_nemo(config: Config) -> dict[str, Any]:
    # Absent, it is 4096 in their class.
    HfSettings({"sliding_window": 4096, **config}).only("sliding_window", None)
    return _behind_to_nemo(config)


def _exaone4_to_hf(config: Config) -> dict[str, Any]:
    return decoder_to_hf(config, "exaone4", sliding_window=None, layer_types=layer_types(config))


EXAONE4 = replace(
    OLMO2,
    name="exaone4",
    to_nemo=_exaone4_to_nemo,
    to_hf=_exaone4_to_hf,
    layer=(*_BLOCKS, *QUERY_KEY_NORMS),
    made_of=_NORMS_BEHIND,
)
