"""Llama (and SmolLM, which is one), Mistral, Ministral and SmolLM3."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from nemo_aligner.checkpoint.hf.families.base import (
    ANY,
    ANY_WINDOW,
    FULL,
    LAYER,
    MODEL,
    OUTPUT,
    SLIDING,
    Config,
    GgufFormat,
    HfSettings,
    ModelFamily,
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
