"""The text decoder of Gemma 4 (Gemma Team 2026).

Layers without a window have heads of another size, and may use their keys as values. The last
layers of the small models read the keys of earlier ones, and every layer of these models has an
input from the token's embeddings. Layers of the 26B-A4B have experts next to a dense MLP, which is
a shared expert to Megatron.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor

from nemo_aligner.checkpoint import decoder_tensors
from nemo_aligner.checkpoint.hf.families import base, settings
from nemo_aligner.checkpoint.hf.families.base import ModelFamily, Rule, norm_rule
from nemo_aligner.checkpoint.hf.families.settings import Config, HfSettings
from nemo_aligner.models.shapes import experts as expert_keys
from nemo_aligner.models.shapes import gemma4 as keys
from nemo_aligner.models.shapes.decoder import ModelShape
from nemo_aligner.models.shapes.gemma4 import Gemma4Shape
from nemo_aligner.utils.errors import CheckpointError, shown

_DEFAULT_ROPE = {
    settings.SLIDING: {"rope_type": "default", "rope_theta": 10000.0},
    settings.FULL: {
        "rope_type": "proportional",
        "partial_rotary_factor": 0.25,
        "rope_theta": 1000000.0,
    },
}
# Defaults of transformers' class for keys that all families need. The config.json of a release with
# vision has only the settings that differ from these.
_SIZES = {
    "vocab_size": 262144,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 30,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 131072,
}


def _to_nemo(config: Config) -> dict[str, Any]:
    config = {**_SIZES, **{key: value for key, value in config.items() if value is not None}}
    reader = HfSettings(config)
    reader.only("hidden_activation", "gelu_pytorch_tanh")
    # For text, "vision" is causal attention.
    reader.only("use_bidirectional_attention", None, "vision")
    config["use_bidirectional_attention"] = None
    config["layer_types"] = _layer_types(reader)
    full = [settings.FULL] * reader.layers()
    window = settings.window_to_nemo(config, reader.window(missing=512), full)
    rope = config.get("rope_parameters") or _DEFAULT_ROPE
    full_rope, local_rope = settings.split_rope_by_window({"rope_parameters": rope}, "")
    local = settings.rope_to_nemo({"rope_parameters": local_rope}, None, 10000.0, ("default",))
    without_rope = {key: value for key, value in config.items() if not key.startswith("rope_")}
    return settings.decoder_to_nemo(
        without_rope,
        act=(),
        head_dim=256,
        tied=True,
        activation="geglu",
        apply_embedding_scaling=True,
        post_layernorms=True,
        qk_layernorm=True,
        query_pre_attn_scalar=1.0,
        rotary_base_local=local["rotary_base"],
        **window,
        **_read_global_layers(reader, full_rope),
        **_read_small_models(reader),
        **_read_experts(reader),
    )


def _layer_types(reader: HfSettings) -> Any:
    """Return ``layer_types``; as in transformers' class, the last layer has full attention."""
    kinds = reader.config.get("layer_types") or settings.every_nth_layer(reader.layers(), 6)
    return [*kinds[:-1], settings.FULL] if isinstance(kinds, list) else kinds


def _read_global_layers(reader: HfSettings, rope: Mapping[str, Any]) -> dict[str, Any]:
    """Translate the settings of layers without a window.

    transformers reads ``global_head_dim`` and ``num_global_key_value_heads``, and writes them for
    each layer in ``per_layer_config``.
    """
    as_values = reader.flag("attention_k_eq_v", False)
    channels = reader.count("global_head_dim", 512)
    groups = reader.count("num_key_value_heads")
    if as_values:
        groups = reader.count("num_global_key_value_heads", groups)
    by_layer = reader.config.get("per_layer_config")
    if by_layer is not None:
        channels, groups = _read_layer_sizes(reader, by_layer, groups)
    scaling = HfSettings(rope)
    scaling.only("rope_type", "proportional", "default")
    scaling.only("factor", None, 1, 1.0)
    is_proportional = rope.get("rope_type", "proportional") == "proportional"
    rotated = scaling.number("partial_rotary_factor", 1.0) if is_proportional else 1.0
    return {
        "rotary_base": scaling.number("rope_theta", 1000000.0),
        keys.GLOBAL_CHANNELS: channels,
        keys.GLOBAL_GROUPS: groups,
        keys.KEYS_AS_VALUES: as_values,
        keys.GLOBAL_ROTARY: rotated,
    }


def _read_layer_sizes(reader: HfSettings, by_layer: Any, groups: int) -> tuple[int, int]:
    """Read from ``per_layer_config`` the sizes that all layers without a window have.

    Args:
        groups: number of key heads of layers for which it gives none.

    Returns:
        Channels of a head, and number of key heads.
    """
    kinds = enumerate(_layer_types(reader))
    of_global = {str(number) for number, kind in kinds if kind == settings.FULL}
    sizes = [*by_layer.values()] if isinstance(by_layer, Mapping) else []
    first = sizes[0] if sizes and isinstance(sizes[0], Mapping) else {}
    is_one_kind = bool(first) and all(size == first for size in sizes)
    surplus = first.keys() - {"head_dim", "num_key_value_heads"}
    if not is_one_kind or {*map(str, by_layer)} != of_global or surplus:
        raise CheckpointError(
            f"per_layer_config: got {shown(by_layer)}, wanted the same head_dim and "
            f"num_key_value_heads for all layers of {settings.FULL!r}, and nothing for others"
        )
    inside = HfSettings(first)
    return inside.count("head_dim"), inside.count("num_key_value_heads", groups)


def _read_small_models(reader: HfSettings) -> dict[str, Any]:
    """Translate the settings of shared keys, and of inputs of each layer."""
    layers = reader.layers()
    shared = reader.count("num_kv_shared_layers", 0, minimum=0, limit=layers)
    width = reader.count("hidden_size_per_layer_input", 256, minimum=0) or None
    rows, vocabulary = (
        reader.count(key, 262144) for key in ("vocab_size_per_layer_input", "vocab_size")
    )
    if width is not None and rows != vocabulary:
        raise CheckpointError(
            f"vocab_size_per_layer_input: got {rows}, wanted vocab_size={vocabulary}, as other "
            "sizes of the layers' embedding table are not supported"
        )
    return {
        keys.SHARED_LAYERS: shared,
        keys.DOUBLE_WIDE: reader.flag("use_double_wide_mlp", False),
        keys.PER_LAYER_WIDTH: width,
    }


def _read_experts(reader: HfSettings) -> dict[str, Any]:
    """Translate the settings of experts next to a dense MLP; empty for a model without experts."""
    if not reader.flag("enable_moe_block", False):
        return {}
    if reader.config.get("num_kv_shared_layers"):
        reader.only("use_double_wide_mlp", False)
    count = reader.count("num_experts")
    return {
        expert_keys.EXPERT_COUNT: count,
        expert_keys.EXPERT_TOP_K: reader.count("top_k_experts", limit=count),
        expert_keys.EXPERT_WIDTH: reader.count("moe_intermediate_size"),
        expert_keys.PRE_SOFTMAX: False,
        expert_keys.SHARED_WIDTH: reader.count("intermediate_size"),
        expert_keys.BRANCH_NORMS: True,
    }


def _to_hf(config: Config) -> dict[str, Any]:
    shape = ModelShape.from_config(config)
    gemma4, experts = shape.gemma4, shape.experts
    assert gemma4 is not None
    written = settings.decoder_to_hf(
        config,
        "gemma4_text",
        hidden_act="gelu_pytorch_tanh",
        hidden_activation="gelu_pytorch_tanh",
        attention_bias=False,
        global_head_dim=gemma4.global_channels,
        num_global_key_value_heads=gemma4.global_groups,
        attention_k_eq_v=gemma4.keys_as_values,
        num_kv_shared_layers=gemma4.shared_layers,
        use_double_wide_mlp=gemma4.double_wide,
        hidden_size_per_layer_input=gemma4.per_layer_width or 0,
        vocab_size_per_layer_input=shape.vocab_size,
        enable_moe_block=experts is not None,
        num_experts=experts and experts.count,
        top_k_experts=experts and experts.top_k,
        moe_intermediate_size=experts and experts.width,
        **settings.window_to_hf(config, always_sized=True),
    )
    rope = {
        settings.FULL: {
            "rope_type": "proportional",
            "partial_rotary_factor": gemma4.global_rotary,
            "rope_theta": shape.rotary_base,
        },
        settings.SLIDING: {"rope_type": "default", "rope_theta": shape.rotary_base_local},
    }
    unused = ("rope_theta", "rope_scaling", "hidden_act")
    used = {key: value for key, value in written.items() if key not in unused}
    return {**used, "rope_parameters": rope}


# Rules of the tensors. A layer's sizes of heads are not in the NeMo config, so each kind of layer
# has its own rules.


@cache
def _qkv_rule(heads: int, groups: int, channels: int, parts: str) -> Rule:
    """Build the rule for the projections ``parts`` of a layer, which Megatron orders by group.

    Args:
        parts: ``qkv``; ``qk`` if keys serve as values; or ``q`` if the layer has no keys.
    """
    widths = [heads // groups * channels, channels, channels][: len(parts)]
    names = tuple(f"self_attn.{part}_proj.weight" for part in parts)

    def join(tensors: Sequence[Tensor], config: Config) -> Tensor:
        expected = [groups * width for width in widths]
        rows = [tensor.shape[0] for tensor in tensors]
        if rows != expected:
            raise CheckpointError(
                f"{', '.join(f'{part}_proj' for part in parts)}: got {rows} rows, but the config "
                f"implies {expected}"
            )
        by_group = [tensor.reshape(groups, -1, *tensor.shape[1:]) for tensor in tensors]
        return torch.cat(by_group, dim=1).flatten(0, 1)

    def split(tensor: Tensor, config: Config) -> Sequence[Tensor]:
        by_group = tensor.reshape(groups, -1, *tensor.shape[1:])
        return [part.flatten(0, 1) for part in by_group.split(widths, dim=1)]

    return Rule("self_attention.linear_qkv.weight", names, join, split, is_by_group=None)


def _has_layer_inputs(config: Config) -> bool:
    return config.get(keys.PER_LAYER_WIDTH) is not None


_of_inputs = partial(Rule, is_in=_has_layer_inputs)
_PROJECTION = Rule(base.PROJECTION.megatron, base.PROJECTION.hf, is_by_group=None)
_OUTPUT = "layer_output"
_LAYER = (
    norm_rule(base.ATTENTION_NORM, "input_layernorm.weight"),
    _PROJECTION,
    norm_rule(base.POST_ATTENTION_NORM, "post_attention_layernorm.weight"),
    Rule(f"{_OUTPUT}.scalar", ("layer_scalar",)),
    _of_inputs(f"{_OUTPUT}.gate.weight", ("per_layer_input_gate.weight",)),
    _of_inputs(f"{_OUTPUT}.projection.weight", ("per_layer_projection.weight",)),
    _of_inputs(
        f"{_OUTPUT}.projection.post_layernorm.weight", ("post_per_layer_input_norm.weight",)
    ),
)
_DENSE_MLP = (
    norm_rule(base.MLP_NORM, "pre_feedforward_layernorm.weight"),
    base.GATED,
    base.DOWN,
    norm_rule(base.POST_MLP_NORM, "post_feedforward_layernorm.weight"),
)


def _fused_gate_rule(megatron: str, hf: str) -> Rule:
    """Build the rule for gate and up projections ``[E, 2 f, h]``, in Megatron ``[E, 2, f, h]``."""

    def join(tensors: Sequence[Tensor], config: Config) -> Tensor:
        (fused,) = tensors
        return fused.unflatten(1, (2, -1))

    def split(tensor: Tensor, config: Config) -> Sequence[Tensor]:
        return (tensor.flatten(1, 2),)

    return Rule(megatron, (hf,), join, split)


# Published files have one tensor for the matrices of all experts of a layer.
_EXPERTS_AND_MLP = (
    Rule("mlp.router.weight", ("router.proj.weight",)),
    norm_rule("mlp.router.norm.weight", "router.scale"),
    Rule("mlp.router.expert_scale", ("router.per_expert_scale",)),
    _fused_gate_rule("mlp.experts.linear_fc1.weight", "experts.gate_up_proj"),
    Rule("mlp.experts.linear_fc2.weight", ("experts.down_proj",)),
    *base.experts_rules(
        "shared_experts", *(f"mlp.{part}_proj.weight" for part in ("gate", "up", "down"))
    ),
    *(
        norm_rule(f"mlp.{megatron}layernorm.weight", f"{hf}.weight")
        for megatron, hf in {
            "shared_experts_": "pre_feedforward_layernorm",
            "shared_experts_post_": "post_feedforward_layernorm_1",
            "experts_": "pre_feedforward_layernorm_2",
            "experts_post_": "post_feedforward_layernorm_2",
            "post_": "post_feedforward_layernorm",
        }.items()
    ),
)


def _rules_of(layer: ModelShape) -> tuple[Rule, ...]:
    assert layer.gemma4 is not None
    assert layer.gemma4.layer is not None
    parts = "q" if not layer.has_keys else "qk" if layer.gemma4.layer.keys_as_values else "qkv"
    sizes = layer.num_attention_heads, layer.num_query_groups, layer.kv_channels
    norms = base.QUERY_KEY_NORMS[: 1 + layer.has_keys]
    mlp = _DENSE_MLP if layer.experts is None else _EXPERTS_AND_MLP
    return (_qkv_rule(*sizes, parts), *norms, *_LAYER, *mlp)


def _unused_keys(config: Config) -> list[str]:
    """Name the projections and norms of keys and values that layers without keys may have."""
    reader = HfSettings(config)
    layers = reader.layers()
    first = layers - reader.count("num_kv_shared_layers", 0, minimum=0, limit=layers)
    return [
        f"model.layers.{layer}.self_attn.{part}_{kind}."
        for layer in range(first, layers)
        for part in "kv"
        for kind in ("proj", "norm")
    ]


GEMMA4 = ModelFamily(
    name="gemma4_text",
    to_nemo=_to_nemo,
    to_hf=_to_hf,
    model=(
        *base.MODEL,
        _of_inputs(decoder_tensors.PER_LAYER_TABLE, ("model.embed_tokens_per_layer.weight",)),
        _of_inputs(
            decoder_tensors.PER_LAYER_PROJECTION, ("model.per_layer_model_projection.weight",)
        ),
        _of_inputs(decoder_tensors.PER_LAYER_NORM, ("model.per_layer_projection_norm.weight",)),
    ),
    rules_of=_rules_of,
    dropped=_unused_keys,
    made_of={
        "activation": "geglu",
        "apply_embedding_scaling": True,
        "post_layernorms": True,
        "qk_layernorm": True,
        "query_pre_attn_scalar": 1.0,
        "rotary_base_local": base.ANY,
        **base.ANY_WINDOW,
        "gemma4": lambda traits: isinstance(traits, Gemma4Shape),
        "experts": lambda experts: experts is None or experts.branch_norms,
    },
)
