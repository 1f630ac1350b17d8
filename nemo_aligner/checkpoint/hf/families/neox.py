"""GPT-NeoX (Pythia) and StarCoder2: LayerNorms, biases of all linear layers, MLPs without a gate.

A NeMo config of these models must name its family: the settings of a GPT-NeoX without parallel
residual could be those of a StarCoder2.
"""

from __future__ import annotations

from typing import Any

from nemo_aligner.checkpoint.hf.families import base, settings
from nemo_aligner.checkpoint.hf.families.base import ModelFamily, Rule
from nemo_aligner.checkpoint.hf.families.settings import Config, HfSettings
from nemo_aligner.models.shapes.decoder import ModelShape
from nemo_aligner.utils.errors import CheckpointError, shown

# Values of ``hidden_act`` that are supported, each with NeMo's name for it.
_ACTIVATIONS = {
    "gelu": "gelu",
    "gelu_pytorch_tanh": "gelu-tanh",
    "gelu_new": "gelu-tanh",
    "gelu_fast": "gelu-tanh",
}
_TO_HF = {"gelu": "gelu", "gelu-tanh": "gelu_pytorch_tanh"}


def _to_nemo(
    config: Config, name: str, activation: str, epsilon: str, **family: Any
) -> dict[str, Any]:
    """Translate the settings that both families have.

    Args:
        activation: default of ``hidden_act``.
        epsilon: key for the epsilon of the norms.
        family: further arguments of ``decoder_to_nemo``.
    """
    reader = HfSettings(config)
    names = (activation, *(act for act in _ACTIVATIONS if act != activation))
    reader.only("hidden_act", *names)
    return settings.decoder_to_nemo(
        {**config, "attention_bias": None},
        name=name,
        act=(),
        normalization="layernorm",
        layernorm_epsilon=reader.number(epsilon, 1e-5),
        activation=_ACTIVATIONS[config.get("hidden_act", activation)],
        bias=True,
        qkv_bias=True,
        **family,
    )


def _to_hf(config: Config, model_type: str, epsilon: str, **family: Any) -> dict[str, Any]:
    """Translate a NeMo config to a ``config.json``; arguments as in ``_to_nemo``."""
    shape = ModelShape.from_config(config)
    decoder = settings.decoder_to_hf(
        config, model_type, hidden_act=_TO_HF[shape.activation], **family
    )
    decoder[epsilon] = decoder.pop("rms_norm_eps")
    return decoder


def _norms(megatron: str, hf: str) -> tuple[Rule, ...]:
    """Build the rules of a LayerNorm: of its weight and of its bias."""
    return (
        base.norm_rule(f"{megatron}weight", f"{hf}.weight"),
        Rule(f"{megatron}bias", (f"{hf}.bias",)),
    )


def _linear(megatron: str, hf: str) -> tuple[Rule, ...]:
    """Build the rules of a linear layer: of its weight and of its bias."""
    return tuple(Rule(f"{megatron}.{kind}", (f"{hf}.{kind}",)) for kind in ("weight", "bias"))


def _layer(qkv: tuple[Rule, ...], projection: str, fc1: str, fc2: str) -> tuple[Rule, ...]:
    """Build the rules of a layer, given those of the queries, keys and values.

    Args:
        projection: name of the output projection of attention.
        fc1, fc2: names of the MLP's linear layers.
    """
    return (
        *_norms("self_attention.linear_qkv.layer_norm_", "input_layernorm"),
        *qkv,
        *_linear("self_attention.linear_proj", projection),
        *_norms("mlp.linear_fc1.layer_norm_", "post_attention_layernorm"),
        *_linear("mlp.linear_fc1", fc1),
        *_linear("mlp.linear_fc2", fc2),
    )


_MADE_OF = {
    "activation": lambda activation: activation in _TO_HF,
    "normalization": "layernorm",
    "qkv_bias": True,
    "linear_bias": True,
}

# GPT-NeoX: attention and MLP read the same input (``use_parallel_residual``), and RoPE rotates a
# quarter of a head's channels.

_ROPE = {"rope_theta": ("rotary_emb_base", 10000), "partial_rotary_factor": ("rotary_pct", 0.25)}


def _neox_to_nemo(config: Config) -> dict[str, Any]:
    reader = HfSettings(config)
    reader.only("attention_bias", True, None)
    older = {name: config.get(key, default) for name, (key, default) in _ROPE.items()}
    return _to_nemo(
        # transformers' class ignores these two keys: every head has its own keys and values.
        {**older, **config, "num_key_value_heads": None, "head_dim": None},
        "gpt_neox",
        "gelu",
        "layer_norm_eps",
        rotated=0.25,
        parallel_residual=reader.flag("use_parallel_residual", True),
    )


def _neox_to_hf(config: Config) -> dict[str, Any]:
    shape = ModelShape.from_config(config)
    heads = shape.num_attention_heads
    sizes = shape.num_query_groups, shape.kv_channels * heads
    if sizes != (heads, shape.hidden_size):
        raise CheckpointError(
            f"model_config.yaml: num_query_groups and kv_channels: got {shown(sizes[0])} and "
            f"{shown(shape.kv_channels)}, but a Hugging Face GPT-NeoX always has as many groups as "
            f"heads, here {heads}, and hidden_size / heads channels, here "
            f"{shape.hidden_size // heads}. The model cannot be exported"
        )
    decoder = _to_hf(
        config,
        "gpt_neox",
        "layer_norm_eps",
        attention_bias=True,
        use_parallel_residual=shape.parallel_residual,
        rotary_pct=shape.rotary_percentage,
        rotary_emb_base=shape.rotary_base,
        partial_rotary_factor=shape.rotary_percentage,
    )
    decoder["rope_parameters"]["partial_rotary_factor"] = shape.rotary_percentage
    del decoder["num_key_value_heads"], decoder["head_dim"]
    return decoder


GPT_NEOX = ModelFamily(
    name="gpt_neox",
    to_nemo=_neox_to_nemo,
    to_hf=_neox_to_hf,
    model=(
        Rule(base.EMBEDDING.megatron, ("gpt_neox.embed_in.weight",)),
        *_norms("decoder.final_layernorm.", "gpt_neox.final_layer_norm"),
    ),
    # The fused tensor is ordered as in Megatron: for each head its query, key and value.
    layer=_layer(
        _linear("self_attention.linear_qkv", "attention.query_key_value"),
        "attention.dense",
        "mlp.dense_h_to_4h",
        "mlp.dense_4h_to_h",
    ),
    untied=Rule(base.OUTPUT.megatron, ("embed_out.weight",)),
    made_of={**_MADE_OF, "parallel_residual": base.ANY, "rotary_percentage": base.ANY},
    layer_prefix="gpt_neox.layers.",
    # Older versions of transformers saved these buffers (RoPE's frequencies and causal masks).
    unused=("rotary_emb.inv_freq", "attention.bias", "attention.masked_bias"),
)

# StarCoder2: grouped query heads, and a sliding window in all layers.


def _starcoder2_to_nemo(config: Config) -> dict[str, Any]:
    reader = HfSettings(config)
    reader.only("use_bias", True, None)
    reader.only("norm_type", "layer_norm", None)
    reader.only("mlp_type", "default", None)
    return _to_nemo(
        {**config, "num_key_value_heads": reader.count("num_key_value_heads", 2)},
        "starcoder2",
        "gelu_pytorch_tanh",
        "norm_epsilon",
        tied=True,
        **settings.window_everywhere(reader.window(missing=None)),
    )


def _starcoder2_to_hf(config: Config) -> dict[str, Any]:
    window = ModelShape.from_config(config).window_size
    return _to_hf(config, "starcoder2", "norm_epsilon", use_bias=True, sliding_window=window)


STARCODER2 = ModelFamily(
    name="starcoder2",
    to_nemo=_starcoder2_to_nemo,
    to_hf=_starcoder2_to_hf,
    model=(base.EMBEDDING, *_norms("decoder.final_layernorm.", "model.norm")),
    layer=_layer((base.QKV, base.QKV_BIAS), "self_attn.o_proj", "mlp.c_fc", "mlp.c_proj"),
    made_of={**_MADE_OF, "window_size": base.ANY},
)
