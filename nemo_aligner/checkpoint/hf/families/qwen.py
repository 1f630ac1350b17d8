"""Qwen2, Qwen2.5, Qwen3, Qwen3.5, and Seed-OSS, which is a Qwen2 without windows."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from nemo_aligner.checkpoint.hf.families import base, settings
from nemo_aligner.checkpoint.hf.families.base import GgufFormat, ModelFamily, Rule
from nemo_aligner.checkpoint.hf.families.settings import Config, HfSettings, linear_layers
from nemo_aligner.models.shapes import linear_attention
from nemo_aligner.utils.errors import CheckpointError, shown

Widths = Callable[[Config], tuple[tuple[int, ...], ...]]

# Qwen2 and Qwen2.5: Llama with biases of queries, keys and values.


def has_window_from(layer: int, max_window_layers: int) -> bool:
    """Tell if a layer, numbered from 0, has the window of a Qwen2 without ``layer_types``."""
    return layer >= max_window_layers


def qwen_to_nemo(
    config: Config, has_window: Callable[[int, int], bool] = has_window_from, **family: Any
) -> dict[str, Any]:
    """Translate the config of a Qwen model to a NeMo config.

    Args:
        has_window: tells from a layer's number, from 0, and ``max_window_layers`` whether the layer
            has the window, for a config that enables the window but has no ``layer_types``.
        family: further arguments of ``decoder_to_nemo``.
    """
    reader = HfSettings(config)
    layers, size = reader.layers(), None
    kinds = [settings.FULL] * layers
    if reader.flag("use_sliding_window", False):
        size = reader.window()
    if size is not None:
        limit = reader.count("max_window_layers", 28, minimum=0)
        windows = [has_window(layer, limit) for layer in range(layers)]
        kinds = [settings.SLIDING if window else settings.FULL for window in windows]
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


# Qwen3.5's text decoder: most layers are Gated DeltaNet; in the others attention has output gates.

_FREQUENCY, _VARIANT = linear_attention.LINEAR_FREQUENCY, linear_attention.ATTENTION_VARIANT
# transformers' defaults for the sizes of linear attention, in the order of
# ``LINEAR_ATTENTION_KEYS``.
_SIZES = {
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
}


def hybrid_to_nemo(config: Config, name: str, **family: Any) -> dict[str, Any]:
    """Translate the config of a Qwen whose layers have Gated DeltaNet or gated attention.

    Args:
        name: name of the family.
        family: settings of the family, which are added to the result.
    """
    reader = HfSettings(config)
    count, interval = reader.layers(), reader.count("full_attention_interval", 4)
    kinds = config.get("layer_types") or [
        settings.LINEAR if number % interval else settings.FULL for number in range(1, count + 1)
    ]
    is_list = isinstance(kinds, list) and len(kinds) == count
    if not is_list or not all(kind in (settings.LINEAR, settings.FULL) for kind in kinds):
        raise CheckpointError(
            f"layer_types: got {shown(kinds)}, wanted {settings.LINEAR!r} or {settings.FULL!r} for "
            f"each of the {count} layers"
        )
    linear: dict[str, Any] = {}
    if settings.LINEAR in kinds:
        marks = [int(kind == settings.LINEAR) for kind in kinds]
        linear = {
            _VARIANT: linear_attention.GATED_DELTA_NET,
            _FREQUENCY: settings.frequency(marks, 0),
            **{key: reader.count(key, default) for key, default in _SIZES.items()},
        }
    return settings.decoder_to_nemo(
        config,
        name=name,
        head_dim=256,
        rotated=0.25,
        qk_layernorm=True,
        attention_output_gate=True,
        # Store gamma - 1 in archives, too, because adding 1 to a bf16 weight would round it again.
        layernorm_zero_centered_gamma=True,
        **linear,
        **family,
    )


def hybrid_to_hf(config: Config, model_type: str, **family: Any) -> dict[str, Any]:
    """Invert ``hybrid_to_nemo``: build a ``config.json``, to which ``family`` is added."""
    kinds = [settings.LINEAR if linear else settings.FULL for linear in linear_layers(config)]
    return settings.decoder_to_hf(
        config,
        model_type,
        of_shape={"partial_rotary_factor": "rotary_percentage"},
        attention_bias=False,
        layer_types=kinds,
        **{key: config[key] for key in _SIZES if key in config},
        **family,
    )


def by_key_head(
    megatron: str, names: tuple[str, ...], widths: Widths, heads_key: str = "linear_num_key_heads"
) -> Rule:
    """Build the rule for tensors whose rows Megatron orders by key head.

    Args:
        heads_key: key of the NeMo config for the number of key heads.
        names: Hugging Face names of the tensors that the Megatron tensor holds.
        widths: function of the NeMo config. For each Hugging Face tensor it returns a tuple: the
            number of rows per key head in each part that the tensor concatenates, such as q, k and
            v.
    """

    def join(tensors: Sequence[Tensor], config: Config) -> Tensor:
        heads = config[heads_key]
        parts = [
            part.reshape(heads, -1, *part.shape[1:])
            for tensor, sizes in zip(tensors, widths(config), strict=True)
            for part in tensor.split([heads * size for size in sizes])
        ]
        return torch.cat(parts, dim=1).flatten(0, 1)

    def split(tensor: Tensor, config: Config) -> Sequence[Tensor]:
        by_head = tensor.unflatten(0, (config[heads_key], -1))
        of_tensors = widths(config)
        parts = iter(by_head.split([size for sizes in of_tensors for size in sizes], dim=1))
        return [torch.cat([next(parts).flatten(0, 1) for _ in sizes]) for sizes in of_tensors]

    return Rule(megatron, names, join, split, is_by_group=None)


def _conv_widths(config: Config) -> tuple[tuple[int, ...], ...]:
    """Return the rows that one key head has in queries, keys and values (see ``by_key_head``)."""
    per_key = config["linear_num_value_heads"] // config["linear_num_key_heads"]
    key = config["linear_key_head_dim"]
    return ((key, key, per_key * config["linear_value_head_dim"]),)


def _projection_widths(config: Config) -> tuple[tuple[int, ...], ...]:
    """Return the rows of one key head in q, k and v, output gates, write strengths and decays."""
    per_key = config["linear_num_value_heads"] // config["linear_num_key_heads"]
    values = per_key * config["linear_value_head_dim"]
    return (*_conv_widths(config), (values,), (per_key,), (per_key,))


def _fused_widths(config: Config) -> tuple[tuple[int, ...], ...]:
    """Return the rows of one key head in the projections ``in_proj_qkvz`` and ``in_proj_ba``."""
    *vectors, strengths, decays = (sum(sizes) for sizes in _projection_widths(config))
    return (sum(vectors),), (strengths + decays,)


def conv_rule(rule: Rule) -> Rule:
    """Change a rule to that of a convolution: ``[channels, 1, taps]`` becomes ``[channels, taps]``.

    Args:
        rule: the rule that orders the channels.
    """

    def join(tensors: Sequence[Tensor], config: Config) -> Tensor:
        return rule.join([tensor.flatten(1) for tensor in tensors], config)

    def split(tensor: Tensor, config: Config) -> Sequence[Tensor]:
        return [part.unsqueeze(1) for part in rule.split(tensor, config)]

    return replace(rule, join=join, split=split)


_zero_centered = partial(base.norm_rule, hf_is_zero_centered=True)
_QUERIES, _KEYS, _VALUES = (f"self_attn.{part}_proj.weight" for part in "qkv")
_PROJECTIONS = tuple(f"linear_attn.in_proj_{part}.weight" for part in ("qkv", "z", "b", "a"))
_FUSED_PROJECTIONS = tuple(f"linear_attn.in_proj_{part}.weight" for part in ("qkvz", "ba"))

HYBRID_MODEL = base.model_rules_with(_zero_centered)
# The MLP, with the norm before it, of a layer without experts in a mixture-of-experts model.
HYBRID_DENSE_MLP = (
    _zero_centered(base.MLP_NORM, "post_attention_layernorm.weight"),
    base.GATED,
    base.DOWN,
)
# Fields of ``ModelShape`` in which these families differ from Llama.
HYBRID: Mapping[str, Any] = {
    "qk_layernorm": True,
    "attention_output_gate": True,
    "rotary_percentage": base.ANY,
    "linear_attention": base.ANY,
}


def hybrid_layer_rules(**mlp: Any) -> tuple[Rule, ...]:
    """Build the rules of a layer with gated attention; ``mlp`` is as in ``layer_rules_with``."""
    attention = (
        base.gated_qkv_rule("self_attention.linear_qkv.weight", _QUERIES, _KEYS, _VALUES),
        base.PROJECTION,
    )
    rules = base.layer_rules_with(_zero_centered, attention=attention, **mlp)
    return (*rules, *base.query_key_norms(_zero_centered))


def delta_net_rules(*, is_fused: bool = False, **mlp: Any) -> tuple[Rule, ...]:
    """Build the rules of a layer with Gated DeltaNet.

    Args:
        is_fused: True if Hugging Face has two projections of the input, with rows ordered by key
            head; False if it has four.
        mlp: as in ``layer_rules_with``.
    """
    names, widths = _PROJECTIONS, _projection_widths
    if is_fused:
        names, widths = _FUSED_PROJECTIONS, _fused_widths
    attention = (
        by_key_head("self_attention.linear_qkv.weight", names, widths),
        conv_rule(
            by_key_head("self_attention.conv_weight", ("linear_attn.conv1d.weight",), _conv_widths)
        ),
        Rule("self_attention.a_log", ("linear_attn.A_log",)),
        Rule("self_attention.dt_bias", ("linear_attn.dt_bias",)),
        Rule("self_attention.norm_weight", ("linear_attn.norm.weight",)),
        Rule(
            "self_attention.linear_proj.weight",
            ("linear_attn.out_proj.weight",),
            is_by_group=None,
        ),
    )
    return base.layer_rules_with(_zero_centered, attention=attention, **mlp)


QWEN3_5 = ModelFamily(
    name="qwen3_5_text",
    to_nemo=partial(hybrid_to_nemo, name="qwen3_5_text"),
    to_hf=partial(hybrid_to_hf, model_type="qwen3_5_text"),
    model=HYBRID_MODEL,
    layer=hybrid_layer_rules(),
    linear_layer=delta_net_rules(),
    made_of=HYBRID,
    dropped="mtp.",
)
