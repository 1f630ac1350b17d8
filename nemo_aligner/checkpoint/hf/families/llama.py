"""Llama, and decoders that differ from it by settings or names.

SmolLM (which is a Llama), Mistral, Ministral and Ministral 3, SmolLM3, Granite, Arcee, InternLM2.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from nemo_aligner.checkpoint.hf.families.base import (
    ANY,
    ANY_WINDOW,
    ATTENTION_NORM,
    DOWN,
    FINAL_NORM,
    MLP_NORM,
    UNGATED,
    GgufFormat,
    ModelFamily,
    Rule,
    layer_rules_with,
    norm_rule,
    stacked_rule,
)
from nemo_aligner.checkpoint.hf.families.settings import (
    FULL,
    SLIDING,
    Config,
    HfSettings,
    decoder_to_hf,
    decoder_to_nemo,
    frequency,
    window_everywhere,
    window_to_hf,
    window_to_nemo,
)
from nemo_aligner.models.shape import ModelShape
from nemo_aligner.utils.errors import CheckpointError, shown

# Llama, and SmolLM, which is one.


def _to_nemo(config: Config) -> dict[str, Any]:
    HfSettings(config).only("sliding_window", None)
    return decoder_to_nemo(config)


LLAMA = ModelFamily(
    name="llama",
    to_nemo=_to_nemo,
    to_hf=partial(decoder_to_hf, model_type="llama", attention_bias=False, mlp_bias=False),
    # Mistral's GGUF files have this name, too, and do not mention its window.
    gguf=GgufFormat("llama", is_permuted=True),
)


# Mistral: Llama with a window in all layers, or in none. llama.cpp writes it as a Llama.


def _mistral_to_nemo(config: Config) -> dict[str, Any]:
    read = HfSettings(config)
    read.only("layer_types", None)
    return decoder_to_nemo(config, **window_everywhere(read.window()))


def _mistral_to_hf(config: Config) -> dict[str, Any]:
    window = ModelShape.from_config(config).window_size
    return decoder_to_hf(config, "mistral", sliding_window=window)


MISTRAL = ModelFamily(
    name="mistral",
    to_nemo=_mistral_to_nemo,
    to_hf=_mistral_to_hf,
    made_of={"window_size": ANY},
)


# Ministral: Mistral with a window in the layers that layer_types names.


def _ministral_to_nemo(config: Config) -> dict[str, Any]:
    read = HfSettings(config)
    size = read.window()
    kinds = [FULL if size is None else SLIDING] * read.layers()
    return decoder_to_nemo(config, **window_to_nemo(config, size, kinds))


def _ministral_to_hf(config: Config) -> dict[str, Any]:
    return decoder_to_hf(config, "ministral", **window_to_hf(config))


MINISTRAL = ModelFamily(
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
    read.only("layer_types", None)
    rope = config.get("rope_parameters") or config.get("rope_scaling") or _MINISTRAL3_ROPE
    if not isinstance(rope, Mapping):
        raise CheckpointError(f"rope_parameters: got {shown(rope)}, wanted keys and values")
    scaling = HfSettings(rope)
    return decoder_to_nemo(
        {**config, "rope_parameters": rope, "rope_scaling": None},
        head_dim=128,
        epsilon=1e-5,
        llama_4_scaling_beta=scaling.number(_BETA),
        llama_4_original_max_position_embeddings=scaling.count(
            _LENGTH, read.count("max_position_embeddings")
        ),
        **window_everywhere(read.window(missing=None)),
    )


def _ministral3_to_hf(config: Config) -> dict[str, Any]:
    shape = ModelShape.from_config(config)
    assert shape.query_scaling is not None
    decoder = decoder_to_hf(config, "ministral3", sliding_window=shape.window_size)
    scaling = {_BETA: shape.query_scaling.beta, _LENGTH: shape.query_scaling.old_context_len}
    rope = {**decoder["rope_parameters"], **scaling}
    return {**decoder, "rope_parameters": rope, "rope_scaling": rope}


MINISTRAL3 = ModelFamily(
    name="ministral3",
    to_nemo=_ministral3_to_nemo,
    to_hf=_ministral3_to_hf,
    made_of={"query_scaling": ANY, "window_size": ANY},
)


# SmolLM3: Llama with layers that do not rotate.


def _smollm3_to_nemo(config: Config) -> dict[str, Any]:
    read = HfSettings(config)
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
    size = read.window(missing=None)
    if not read.flag("use_sliding_window", False):
        size = None
    kinds = [SLIDING if mark and size is not None else FULL for mark in without]
    return decoder_to_nemo(
        config,
        base=2000000.0,
        tied=True,
        no_rope_freq=frequency(without, 1) if any(without) else None,
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
        **window_to_hf(config),
    )


SMOLLM3 = ModelFamily(
    name="smollm3",
    to_nemo=_smollm3_to_nemo,
    to_hf=_smollm3_to_hf,
    made_of={"no_rope_freq": ANY, **ANY_WINDOW},
)


# Granite: Llama with a factor for the embeddings, for attention's scores, and for each block.


def _granite_to_nemo(config: Config) -> dict[str, Any]:
    read = HfSettings(config)
    # logits_scaling is not read: it divides the logits of words, which no reward head has.
    return decoder_to_nemo(
        config,
        embedding_multiplier=read.number("embedding_multiplier", 1.0),
        residual_multiplier=read.number("residual_multiplier", 1.0),
        query_pre_attn_scalar=read.number("attention_multiplier", 1.0) ** -2.0,
    )


def _granite_to_hf(config: Config) -> dict[str, Any]:
    shape = ModelShape.from_config(config)
    scale = shape.softmax_scale
    return decoder_to_hf(
        config,
        "granite",
        embedding_multiplier=shape.embedding_multiplier,
        residual_multiplier=shape.residual_multiplier,
        # Rounded to what double precision keeps of its inverse square.
        attention_multiplier=float(f"{shape.kv_channels**-0.5 if scale is None else scale:.15g}"),
        attention_bias=False,
        mlp_bias=False,
    )


GRANITE = ModelFamily(
    name="granite",
    to_nemo=_granite_to_nemo,
    to_hf=_granite_to_hf,
    made_of=dict.fromkeys(
        ("embedding_multiplier", "residual_multiplier", "query_pre_attn_scalar"), ANY
    ),
)


# Arcee (AFM): Llama with a squared ReLU without a gate.

ARCEE = ModelFamily(
    name="arcee",
    to_nemo=partial(decoder_to_nemo, act=("relu2",), epsilon=1e-5, activation="squared-relu"),
    to_hf=partial(
        decoder_to_hf, model_type="arcee", hidden_act="relu2", attention_bias=False, mlp_bias=False
    ),
    layer=layer_rules_with(mlp=(UNGATED, DOWN)),
    made_of={"activation": "squared-relu"},
)


# InternLM2, as its reward models are published: Llama under other names, with q, k and v fused.
# Names and the order of wqkv (the queries of a group, its key, its value: Megatron's own) are those
# of modeling_internlm2.py in those models' folders. transformers has no such class, so exports of
# it are Llama's.


def _internlm2_to_nemo(config: Config) -> dict[str, Any]:
    # Absent, it is true in their class.
    HfSettings({"bias": True, **config}).only("bias", False)
    return decoder_to_nemo(config)


INTERNLM2 = replace(
    LLAMA,
    name="internlm2",
    to_nemo=_internlm2_to_nemo,
    model=(
        Rule("embedding.word_embeddings.weight", ("model.tok_embeddings.weight",)),
        norm_rule(FINAL_NORM, "model.norm.weight"),
    ),
    layer=(
        norm_rule(ATTENTION_NORM, "attention_norm.weight"),
        Rule("self_attention.linear_qkv.weight", ("attention.wqkv.weight",)),
        Rule("self_attention.linear_proj.weight", ("attention.wo.weight",)),
        norm_rule(MLP_NORM, "ffn_norm.weight"),
        stacked_rule("mlp.linear_fc1.weight", "feed_forward.w1.weight", "feed_forward.w3.weight"),
        Rule("mlp.linear_fc2.weight", ("feed_forward.w2.weight",)),
    ),
    untied=Rule("output_layer.weight", ("output.weight",)),
    gguf=None,
)
