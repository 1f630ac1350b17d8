"""Llama (and SmolLM, which is one), Mistral, Ministral and Ministral 3, SmolLM3."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from nemo_aligner.checkpoint.hf.families.base import (
    ANY,
    ANY_WINDOW,
    LAYER,
    MODEL,
    OUTPUT,
    GgufFormat,
    ModelFamily,
)
from nemo_aligner.checkpoint.hf.families.settings import (
    FULL,
    SLIDING,
    Config,
    HfSettings,
    decoder_to_hf,
    decoder_to_nemo,
    frequency,
    layer_types,
    window_everywhere,
    window_to_nemo,
)
from nemo_aligner.models.shape import ModelShape
from nemo_aligner.utils.errors import CheckpointError, shown

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


# Ministral: Mistral with a window in the layers that layer_types names.


def _ministral_to_nemo(config: Config) -> dict[str, Any]:
    read = HfSettings(config)
    read.only("hidden_act", "silu", "swish")
    size = read.window()
    kinds = [FULL if size is None else SLIDING] * read.layers()
    return decoder_to_nemo(config, **window_to_nemo(config, size, kinds))


def _ministral_to_hf(config: Config) -> dict[str, Any]:
    window = ModelShape.from_config(config).window_size
    return decoder_to_hf(
        config, "ministral", sliding_window=window, layer_types=layer_types(config)
    )


MINISTRAL = replace(
    MISTRAL,
    name="ministral",
    to_nemo=_ministral_to_nemo,
    to_hf=_ministral_to_hf,
    made_of=ANY_WINDOW,
)


# Ministral 3: Mistral with queries that are scaled by their position.

# Of transformers' class.
_MINISTRAL3_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 1000000.0,
    "factor": 16.0,
    "original_max_position_embeddings": 16384,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.1,
}
_BETA, _LENGTH = "llama_4_scaling_beta", "original_max_position_embeddings"


def _ministral3_to_nemo(config: Config) -> dict[str, Any]:
    read = HfSettings(config)
    read.only("hidden_act", "silu", "swish")
    read.only("layer_types", None)
    size = None if config.get("sliding_window") is None else read.count("sliding_window")
    rope = config.get("rope_parameters") or config.get("rope_scaling") or _MINISTRAL3_ROPE
    if not isinstance(rope, Mapping):
        raise CheckpointError(f"rope_parameters: got {shown(rope)}, wanted keys and values")
    scaling = HfSettings(rope)
    return decoder_to_nemo(
        {**config, "rope_parameters": rope, "rope_scaling": None},
        kv_channels=read.count("head_dim", 128),
        layernorm_epsilon=read.number("rms_norm_eps", 1e-5),
        llama_4_scaling_beta=scaling.number(_BETA),
        llama_4_original_max_position_embeddings=scaling.count(
            _LENGTH, read.count("max_position_embeddings")
        ),
        **({} if size is None else window_everywhere(size)),
    )


def _ministral3_to_hf(config: Config) -> dict[str, Any]:
    shape = ModelShape.from_config(config)
    assert shape.query_scaling is not None
    decoder = decoder_to_hf(config, "ministral3", sliding_window=shape.window_size)
    scaling = {_BETA: shape.query_scaling.beta, _LENGTH: shape.query_scaling.old_context_len}
    rope = {**decoder["rope_parameters"], **scaling}
    return {**decoder, "rope_parameters": rope, "rope_scaling": rope}


MINISTRAL3 = replace(
    MISTRAL,
    name="ministral3",
    to_nemo=_ministral3_to_nemo,
    to_hf=_ministral3_to_hf,
    made_of={"query_scaling": ANY, **MISTRAL.made_of},
)


# SmolLM3: Llama with layers that do not rotate.


def _smollm3_to_nemo(config: Config) -> dict[str, Any]:
    read = HfSettings(config)
    read.only("hidden_act", "silu", "swish")
    layers = read.layers()
    every = read.count("no_rope_layer_interval", 4)
    marks = config.get("no_rope_layers") or [
        int(layer % every > 0) for layer in range(1, layers + 1)
    ]
    if (
        not isinstance(marks, list)
        or len(marks) < layers
        or not all(type(mark) in (int, bool) and 0 <= mark <= 1 for mark in marks)
    ):
        raise CheckpointError(
            f"no_rope_layers: got {shown(marks)}, wanted a 1 for each of {layers} layers that "
            "rotates, and a 0 for each other one"
        )
    without = [1 - mark for mark in marks[:layers]]
    size = read.count("sliding_window") if config.get("sliding_window") is not None else None
    if not read.flag("use_sliding_window", False):
        size = None
    kinds = [SLIDING if mark and size is not None else FULL for mark in without]
    return decoder_to_nemo(
        config,
        base=2000000.0,
        no_rope_freq=frequency(without, 1) if any(without) else None,
        share_embeddings_and_output_weights=read.flag("tie_word_embeddings", True),
        **window_to_nemo(config, size, kinds),
    )


def _smollm3_to_hf(config: Config) -> dict[str, Any]:
    shape = ModelShape.from_config(config)
    layers = range(1, shape.num_layers + 1)
    return decoder_to_hf(
        config,
        "smollm3",
        attention_bias=False,
        mlp_bias=False,
        # Their default is a token of the published model.
        pad_token_id=None,
        no_rope_layers=[int(shape.rotates(layer)) for layer in layers],
        use_sliding_window=shape.window_size is not None,
        sliding_window=shape.window_size,
        layer_types=layer_types(config),
    )


SMOLLM3 = replace(
    LLAMA,
    name="smollm3",
    to_nemo=_smollm3_to_nemo,
    to_hf=_smollm3_to_hf,
    made_of={"no_rope_freq": ANY, **ANY_WINDOW},
    gguf=None,
)
