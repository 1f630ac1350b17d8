"""Llama, and families that differ from it only by settings, or by the names of their tensors.

These are SmolLM (a Llama), Mistral, Ministral and Ministral 3, SmolLM3, Granite, Arcee, Phi-3 and
InternLM2.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from nemo_aligner.checkpoint.hf.families import base, settings
from nemo_aligner.checkpoint.hf.families.base import GgufFormat, ModelFamily, Rule
from nemo_aligner.checkpoint.hf.families.settings import Config, HfSettings
from nemo_aligner.models.shapes.decoder import ModelShape
from nemo_aligner.utils.errors import CheckpointError, shown

# Llama. SmolLM is a Llama, too.


def _to_nemo(config: Config) -> dict[str, Any]:
    HfSettings(config).only("sliding_window", None)
    return settings.decoder_to_nemo(config)


LLAMA = ModelFamily(
    name="llama",
    to_nemo=_to_nemo,
    to_hf=partial(settings.decoder_to_hf, model_type="llama", attention_bias=False, mlp_bias=False),
    # GGUF files of Mistral have this architecture, too. They have no field for the sliding window.
    gguf=GgufFormat("llama", is_permuted=True),
)


# Mistral: Llama with a window in all layers, or in none. llama.cpp's converter writes "llama" as
# the architecture of most Mistrals.


def _mistral_to_nemo(config: Config) -> dict[str, Any]:
    reader = HfSettings(config)
    reader.only("layer_types", None)
    return settings.decoder_to_nemo(config, **settings.window_everywhere(reader.window()))


MISTRAL = ModelFamily(
    name="mistral",
    to_nemo=_mistral_to_nemo,
    to_hf=partial(
        settings.decoder_to_hf, model_type="mistral", of_shape={"sliding_window": "window_size"}
    ),
    made_of={"window_size": base.ANY},
    # llama.cpp's converter writes this architecture only for Mistral Small 3.1 with vision, and
    # "llama" for other Mistrals.
    gguf=GgufFormat("mistral3", is_permuted=True),
)


# Ministral: Mistral with a window only in the layers that layer_types names.


def _ministral_to_nemo(config: Config) -> dict[str, Any]:
    reader = HfSettings(config)
    size = reader.window()
    kinds = [settings.FULL if size is None else settings.SLIDING] * reader.layers()
    return settings.decoder_to_nemo(config, **settings.window_to_nemo(config, size, kinds))


def _ministral_to_hf(config: Config) -> dict[str, Any]:
    return settings.decoder_to_hf(
        config, "ministral", **settings.window_to_hf(config, always_sized=True)
    )


MINISTRAL = ModelFamily(
    name="ministral",
    to_nemo=_ministral_to_nemo,
    to_hf=_ministral_to_hf,
    made_of=base.ANY_WINDOW,
)


# Ministral 3: Mistral with queries that are scaled by their position.

# RoPE settings that transformers' class uses if ``config.json`` has none.
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
    reader = HfSettings(config)
    reader.only("layer_types", None)
    rope = config.get("rope_parameters") or config.get("rope_scaling") or _MINISTRAL3_ROPE
    if not isinstance(rope, Mapping):
        raise CheckpointError(f"rope_parameters: got {shown(rope)}, wanted a mapping")
    scaling = HfSettings(rope)
    return settings.decoder_to_nemo(
        {**config, "rope_parameters": rope, "rope_scaling": None},
        head_dim=128,
        epsilon=1e-5,
        llama_4_scaling_beta=scaling.number(_BETA),
        llama_4_original_max_position_embeddings=scaling.count(
            _LENGTH, reader.count("max_position_embeddings")
        ),
        **settings.window_everywhere(reader.window(missing=None)),
    )


def _ministral3_to_hf(config: Config) -> dict[str, Any]:
    shape = ModelShape.from_config(config)
    assert shape.query_scaling is not None
    decoder = settings.decoder_to_hf(config, "ministral3", sliding_window=shape.window_size)
    scaling = {_BETA: shape.query_scaling.beta, _LENGTH: shape.query_scaling.old_context_len}
    rope = {**decoder["rope_parameters"], **scaling}
    # vLLM reads the scaling of queries under the keys of Mistral's own checkpoint format.
    for_vllm = {_LENGTH: scaling[_LENGTH], "beta": scaling[_BETA]}
    return {
        **decoder,
        "rope_parameters": rope,
        "rope_scaling": rope,
        "llama_4_scaling": for_vllm,
    }


_MSCALE = "mscale_all_dim"


def _ministral3_rope(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``rope_parameters`` with the scaling of queries, and with both mscale keys.

    GGUF has a single field for ``mscale`` and ``mscale_all_dim``, so its value is copied.
    """
    rope = {**config["rope_parameters"], _BETA: config[_BETA]}
    if _MSCALE in config:
        rope |= {"mscale": config[_MSCALE], _MSCALE: config[_MSCALE]}
    return {"rope_parameters": rope}


MINISTRAL3 = ModelFamily(
    name="ministral3",
    to_nemo=_ministral3_to_nemo,
    to_hf=_ministral3_to_hf,
    made_of={"query_scaling": base.ANY, "window_size": base.ANY},
    gguf=GgufFormat(
        "mistral3",
        is_permuted=True,
        marked_by="attention.temperature_scale",
        optional={
            "attention.temperature_scale": _BETA,
            "rope.scaling.yarn_log_multiplier": _MSCALE,
        },
        derived=_ministral3_rope,
    ),
)


# SmolLM3: Llama with layers that have no RoPE.


def _smollm3_to_nemo(config: Config) -> dict[str, Any]:
    reader = HfSettings(config)
    layers = reader.layers()
    interval = reader.count("no_rope_layer_interval", 4)
    marks = config.get("no_rope_layers") or [
        int(layer % interval > 0) for layer in range(1, layers + 1)
    ]
    if (
        not isinstance(marks, list)
        or len(marks) < layers
        or not all(type(mark) in (int, bool) and 0 <= mark <= 1 for mark in marks)
    ):
        raise CheckpointError(
            f"no_rope_layers: got {shown(marks)}, wanted for each of {layers} layers a 1 if it "
            "has RoPE, else a 0"
        )
    without = [1 - mark for mark in marks[:layers]]
    size = reader.window(missing=None)
    if not reader.flag("use_sliding_window", False):
        size = None
    kinds = [settings.SLIDING if mark and size is not None else settings.FULL for mark in without]
    return settings.decoder_to_nemo(
        config,
        base=2000000.0,
        tied=True,
        no_rope_freq=settings.frequency(without, 1) if any(without) else None,
        **settings.window_to_nemo(config, size, kinds),
    )


def _smollm3_to_hf(config: Config) -> dict[str, Any]:
    shape = ModelShape.from_config(config)
    layers = range(1, shape.num_layers + 1)
    return settings.decoder_to_hf(
        config,
        "smollm3",
        attention_bias=False,
        mlp_bias=False,
        # transformers' default is a token of the published model's vocabulary, so write None
        # explicitly.
        pad_token_id=None,
        no_rope_layers=[int(shape.rotates(layer)) for layer in layers],
        use_sliding_window=shape.window_size is not None,
        **settings.window_to_hf(config),
    )


SMOLLM3 = ModelFamily(
    name="smollm3",
    to_nemo=_smollm3_to_nemo,
    to_hf=_smollm3_to_hf,
    made_of={"no_rope_freq": base.ANY, **base.ANY_WINDOW},
    # llama.cpp applies no RoPE in every fourth layer, as in the released model.
    gguf=GgufFormat(
        "smollm3", is_permuted=True, derived=lambda config: {"no_rope_layer_interval": 4}
    ),
)


# Granite: Llama with factors for the embeddings, the attention scores, and the output of each
# block.


def _granite_to_nemo(config: Config) -> dict[str, Any]:
    reader = HfSettings(config)
    # logits_scaling is not read: it scales the logits of tokens, which a reward model does not
    # compute.
    return settings.decoder_to_nemo(
        config,
        embedding_multiplier=reader.number("embedding_multiplier", 1.0),
        residual_multiplier=reader.number("residual_multiplier", 1.0),
        query_pre_attn_scalar=reader.number("attention_multiplier", 1.0) ** -2.0,
    )


def _granite_to_hf(config: Config) -> dict[str, Any]:
    shape = ModelShape.from_config(config)
    scale = shape.softmax_scale
    return settings.decoder_to_hf(
        config,
        "granite",
        embedding_multiplier=shape.embedding_multiplier,
        residual_multiplier=shape.residual_multiplier,
        # Round to 15 digits, because NeMo's config stores the inverse square of this factor, and
        # computing it back is not exact.
        attention_multiplier=float(f"{shape.kv_channels**-0.5 if scale is None else scale:.15g}"),
        attention_bias=False,
        mlp_bias=False,
    )


GRANITE = ModelFamily(
    name="granite",
    to_nemo=_granite_to_nemo,
    to_hf=_granite_to_hf,
    made_of=dict.fromkeys(
        ("embedding_multiplier", "residual_multiplier", "query_pre_attn_scalar"), base.ANY
    ),
    gguf=GgufFormat(
        "granite",
        is_permuted=True,
        optional={
            "attention.scale": "attention_multiplier",
            "embedding_scale": "embedding_multiplier",
            "residual_scale": "residual_multiplier",
            "logit_scale": "logits_scaling",
        },
    ),
)


# Arcee (AFM): Llama with an ungated squared ReLU.

ARCEE = ModelFamily(
    name="arcee",
    to_nemo=partial(
        settings.decoder_to_nemo, act=("relu2",), epsilon=1e-5, activation="squared-relu"
    ),
    to_hf=partial(
        settings.decoder_to_hf,
        model_type="arcee",
        hidden_act="relu2",
        attention_bias=False,
        mlp_bias=False,
    ),
    layer=base.layer_rules_with(mlp=(base.UNGATED, base.DOWN)),
    made_of={"activation": "squared-relu"},
    gguf=GgufFormat(
        "arcee",
        layer={**base.ATTENTION_NAMES, **base.MLP_NORM_NAMES, **base.MLP_NAMES},
        is_permuted=True,
    ),
)


# Phi-3, Phi-3.5, Phi-4 and Phi-4-mini: Llama with fused weights; some models have a window.

# Values of ``rope_type`` that mean LongRoPE in the first releases of Phi-3.
_OLDER_NAMES = ("su", "yarn")


def _phi3_to_nemo(config: Config) -> dict[str, Any]:
    reader = HfSettings(config)
    size = reader.window(missing=None)
    if size is not None and size >= reader.count("max_position_embeddings"):
        size = None  # a window of at least the maximum length has no effect
    rope = config.get("rope_scaling") or config.get("rope_parameters")
    if isinstance(rope, Mapping) and (rope.get("rope_type") or rope.get("type")) in _OLDER_NAMES:
        config = {**config, "rope_scaling": {**rope, "rope_type": "longrope"}}
    return settings.decoder_to_nemo(
        {"original_max_position_embeddings": 4096, **config},
        name="phi3",
        epsilon=1e-5,
        rotated=1.0,
        **settings.window_everywhere(size),
    )


def _phi3_to_hf(config: Config) -> dict[str, Any]:
    shape = ModelShape.from_config(config)
    exported = settings.decoder_to_hf(
        config,
        "phi3",
        partial_rotary_factor=shape.rotary_percentage,
        sliding_window=shape.window_size,
    )
    if shape.longrope is not None:
        # At the top level, because transformers reads this key there before rope_parameters.
        exported[_LENGTH] = shape.longrope.old_context_len
        rope = exported["rope_scaling"]
        # transformers 4 loads a Phi-3 with only these keys. A factor would be lost without its own.
        if not rope.keys() & {"factor", "attention_factor"}:
            lists = {key: rope[key] for key in ("short_factor", "long_factor") if key in rope}
            exported["rope_scaling"] = {"type": "longrope", **lists}
    return exported


def _phi3_length(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return LongRoPE's original length, from ``rope_parameters``, as a top-level key.

    Phi-3's ``config.json`` has the length in both places, but the reader of GGUF files writes only
    the one in ``rope_parameters``.
    """
    length = config["rope_parameters"].get(_LENGTH)
    return {} if length is None else {_LENGTH: length}


PHI3 = ModelFamily(
    name="phi3",
    to_nemo=_phi3_to_nemo,
    to_hf=_phi3_to_hf,
    layer=base.layer_rules_with(
        attention=(
            base.fused_qkv_rule("self_attention.linear_qkv.weight", "self_attn.qkv_proj.weight"),
            base.PROJECTION,
        ),
        mlp=(base.FUSED_GATED, base.DOWN),
    ),
    made_of={"window_size": base.ANY, "rotary_percentage": base.ANY},
    gguf=GgufFormat(
        "phi3",
        layer={
            "attn_norm": "input_layernorm",
            "attn_qkv": "self_attn.qkv_proj",
            "attn_output": "self_attn.o_proj",
            **base.MLP_NORM_NAMES,
            "ffn_up": "mlp.gate_up_proj",
            "ffn_down": "mlp.down_proj",
        },
        derived=_phi3_length,
        is_partly_rotated=True,
        has_windows=True,
    ),
)


# InternLM2 and its published reward models: Llama with other names of tensors, and q, k and v fused
# in wqkv. The names and the order in wqkv (for each group its queries, key and value, like in
# Megatron) are those of modeling_internlm2.py in the published folders. transformers has no such
# class, so a model is exported as a Llama.


def _internlm2_to_nemo(config: Config) -> dict[str, Any]:
    # InternLM2's class has biases if the key is missing.
    HfSettings({"bias": True, **config}).only("bias", False)
    return settings.decoder_to_nemo(config)


INTERNLM2 = replace(
    LLAMA,
    name="internlm2",
    to_nemo=_internlm2_to_nemo,
    model=(
        Rule("embedding.word_embeddings.weight", ("model.tok_embeddings.weight",)),
        base.norm_rule(base.FINAL_NORM, "model.norm.weight"),
    ),
    layer=(
        base.norm_rule(base.ATTENTION_NORM, "attention_norm.weight"),
        Rule("self_attention.linear_qkv.weight", ("attention.wqkv.weight",)),
        Rule("self_attention.linear_proj.weight", ("attention.wo.weight",)),
        base.norm_rule(base.MLP_NORM, "ffn_norm.weight"),
        base.stacked_rule(
            "mlp.linear_fc1.weight", "feed_forward.w1.weight", "feed_forward.w3.weight"
        ),
        Rule("mlp.linear_fc2.weight", ("feed_forward.w2.weight",)),
    ),
    untied=Rule("output_layer.weight", ("output.weight",)),
    # llama.cpp's converter splits wqkv, so a GGUF file has the tensors of a Llama.
    gguf=GgufFormat("internlm2", is_permuted=True, hf_family="llama"),
)
