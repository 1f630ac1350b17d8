"""Nemotron-H, Nemotron Nano 2 and Nemotron 3: layers of Mamba-2, attention, an MLP or experts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from nemo_aligner.checkpoint.hf.families import base, settings
from nemo_aligner.checkpoint.hf.families.base import ModelFamily, Rule, norm_rule
from nemo_aligner.checkpoint.hf.families.mixtures import (
    biased_experts_to_hf,
    biased_experts_to_nemo,
)
from nemo_aligner.checkpoint.hf.families.qwen import by_key_head, conv_rule
from nemo_aligner.checkpoint.hf.families.settings import Config, HfSettings
from nemo_aligner.models.shapes import hybrid
from nemo_aligner.models.shapes import linear_attention as mamba_keys
from nemo_aligner.models.shapes.decoder import ModelShape
from nemo_aligner.models.shapes.experts import SHARED_WIDTH, ExpertShape
from nemo_aligner.models.shapes.linear_attention import Mamba2Shape
from nemo_aligner.utils.errors import CheckpointError, shown

# Names in ``layers_block_type``, by the letters of ``hybrid_override_pattern``; then older names.
_KINDS = {
    hybrid.MAMBA: "linear_attention",
    hybrid.ATTENTION: "full_attention",
    hybrid.MLP: "mlp",
    hybrid.EXPERTS: "moe",
}
_LETTERS = {
    **{name: letter for letter, name in _KINDS.items()},
    "mamba": hybrid.MAMBA,
    "attention": hybrid.ATTENTION,
}
_MOST_LAYERS, _DEFAULT_PATTERN = 10_000, "ME*-"
# Keys of ``config.json`` with transformers' default and the only supported value.
_ONLY = (
    ("mlp_hidden_act", "relu2"),
    ("mamba_hidden_act", "silu"),
    ("use_bias", False),
    ("mamba_proj_bias", False),
    ("residual_in_fp32", False),
    ("sliding_window", None),
    ("moe_latent_size", None),
    ("n_shared_experts", 1),
)
# Other names of keys, which transformers prefers if a config has both.
_ALIASES = {
    "mamba_n_groups": "n_groups",
    "mamba_d_conv": "conv_kernel",
    "mamba_conv_bias": "use_conv_bias",
    "mamba_dt_min": "time_step_min",
    "mamba_dt_limit": "time_step_limit",
    "layer_types": "layers_block_type",
}
# transformers' defaults for the sizes of Mamba-2, with their keys in ``config.json`` and NeMo's.
_SIZES = (
    (mamba_keys.MAMBA_HEADS, "mamba_num_heads", 128),
    (mamba_keys.MAMBA_GROUPS, "n_groups", 8),
    (mamba_keys.MAMBA_STATE, "ssm_state_size", 128),
    (mamba_keys.MAMBA_HEAD_DIM, "mamba_head_dim", 64),
    (mamba_keys.MAMBA_KERNEL, "conv_kernel", 4),
)
_EXPERT_DEFAULTS = {
    "n_routed_experts": 8,
    "moe_intermediate_size": 7688,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "routed_scaling_factor": 1.0,
    "first_k_dense_replace": 0,
}


def _read_pattern(config: Config) -> str:
    """Read the kinds of all layers, as letters of ``hybrid_override_pattern``.

    Like transformers, prefer the list ``layers_block_type``.
    """
    key = "layers_block_type"
    if config.get(key) is None:
        key = "hybrid_override_pattern"
    kinds = config.get(key) or _DEFAULT_PATTERN
    if isinstance(kinds, list):
        kinds = "".join(_LETTERS.get(str(name), "?") for name in kinds)
    is_known = isinstance(kinds, str) and 0 < len(kinds) <= _MOST_LAYERS
    if not is_known or set(str(kinds)) - set(_KINDS):
        raise CheckpointError(
            f"{key}: got {shown(config.get(key))}, wanted one of {', '.join(_KINDS.values())} for "
            f"each layer, or {' '.join(_KINDS)} in hybrid_override_pattern"
        )
    return str(kinds)


def _check_time_step(config: Config) -> None:
    """Check that the time step has no upper limit; transformers' lower one is time_step_min."""
    limits = config.get("time_step_limit")
    values = limits if isinstance(limits, list | tuple) else (0.0, float("inf"))
    last = values[-1] if values else None
    # transformers 5 writes infinity as a mapping.
    is_infinite = last in ("Infinity", float("inf")) or last == {"__float__": "Infinity"}
    if len(values) != 2 or values[0] != 0 or not is_infinite:
        raise CheckpointError(
            f"time_step_limit: got {shown(limits)}, which is not supported; wanted 0 and infinity"
        )


def _without_aliases(config: Config) -> dict[str, Any]:
    """Return the config with the values of ``_ALIASES`` under the usual keys."""
    usual = {key: config[alias] for alias, key in _ALIASES.items() if config.get(alias) is not None}
    return {**config, **usual}


def _to_nemo(config: Config) -> dict[str, Any]:
    config = _without_aliases(config)
    reader, pattern = HfSettings(config), _read_pattern(config)
    for key, *values in _ONLY:
        reader.only(key, *values)
    _check_time_step(config)
    config = {**config, "num_hidden_layers": len(pattern)}
    # The MLP's width must be set even if no layer has an MLP without experts.
    config.setdefault("intermediate_size", 21504)
    parts: dict[str, Any] = {}
    if hybrid.MAMBA in pattern:
        parts |= {nemo: reader.count(key, default) for nemo, key, default in _SIZES}
        parts[mamba_keys.MAMBA_CONV_BIAS] = reader.flag("use_conv_bias", True)
        parts[mamba_keys.MAMBA_LEAST_STEP] = reader.number("time_step_min", 0.001)
    if hybrid.EXPERTS in pattern:
        parts |= biased_experts_to_nemo(config, **_EXPERT_DEFAULTS)
        parts[SHARED_WIDTH] = reader.count("moe_shared_expert_intermediate_size", 7688)
    return settings.decoder_to_nemo(
        config,
        act=(),
        head_dim=128,
        layernorm_epsilon=reader.number("layer_norm_epsilon", 1e-5),
        activation="squared-relu",
        no_rope_freq=1,
        hybrid_override_pattern=pattern,
        **parts,
    )


def _to_hf(config: Config) -> dict[str, Any]:
    shape = ModelShape.from_config(config)
    pattern = shape.hybrid_pattern
    assert pattern is not None
    decoder = settings.decoder_to_hf(
        config,
        "nemotron_h",
        layers_block_type=[_KINDS[letter] for letter in pattern],
        hybrid_override_pattern=pattern,
        layer_norm_epsilon=shape.layernorm_epsilon,
        mlp_hidden_act="relu2",
        attention_bias=False,
        mlp_bias=False,
        use_bias=False,
    )
    mamba = shape.linear_attention
    if isinstance(mamba, Mamba2Shape):
        decoder |= {key: config.get(nemo, default) for nemo, key, default in _SIZES}
        decoder |= {
            "use_conv_bias": mamba.conv_bias,
            "time_step_min": mamba.least_step,
            "mamba_hidden_act": "silu",
            "mamba_proj_bias": False,
        }
    if shape.experts is not None:
        decoder |= biased_experts_to_hf(config)
        decoder |= {
            "n_shared_experts": 1,
            "moe_shared_expert_intermediate_size": shape.experts.shared_width,
            "moe_latent_size": None,
        }
        del decoder["first_k_dense_replace"]
    unused = ("rms_norm_eps", "hidden_act", "rope_parameters", "rope_theta", "rope_scaling")
    return {key: value for key, value in decoder.items() if key not in unused}


def _conv_widths(config: Config) -> tuple[tuple[int, ...], ...]:
    """Return the rows that one group has in x, B and C (see ``by_key_head``)."""
    heads = config[mamba_keys.MAMBA_HEADS] // config[mamba_keys.MAMBA_GROUPS]
    state = config[mamba_keys.MAMBA_STATE]
    return ((heads * config[mamba_keys.MAMBA_HEAD_DIM], state, state),)


def _projection_widths(config: Config) -> tuple[tuple[int, ...], ...]:
    """Return the rows that one group has in x, B and C, the gates z, and the time steps."""
    heads = config[mamba_keys.MAMBA_HEADS] // config[mamba_keys.MAMBA_GROUPS]
    (convolved,) = _conv_widths(config)
    return ((*convolved, heads * config[mamba_keys.MAMBA_HEAD_DIM], heads),)


_by_group = partial(by_key_head, heads_key=mamba_keys.MAMBA_GROUPS)


def _projection_rule() -> Rule:
    """Build the rule of ``in_proj``, whose rows are z, x, B, C and the time steps."""
    rule = _by_group(
        "self_attention.linear_qkv.weight", ("mixer.in_proj.weight",), _projection_widths
    )

    def sizes(config: Config) -> tuple[int, int]:
        """Return the rows of z, and of x, B and C."""
        groups, ((value, *states),) = config[mamba_keys.MAMBA_GROUPS], _conv_widths(config)
        return groups * value, groups * (value + sum(states))

    def join(tensors: Sequence[Tensor], config: Config) -> Tensor:
        gate, convolved = sizes(config)
        gates, inputs, steps = tensors[0].tensor_split([gate, gate + convolved])
        return rule.join([torch.cat([inputs, gates, steps])], config)

    def split(tensor: Tensor, config: Config) -> Sequence[Tensor]:
        gate, convolved = sizes(config)
        (rows,) = rule.split(tensor, config)
        inputs, gates, steps = rows.tensor_split([convolved, convolved + gate])
        return (torch.cat([gates, inputs, steps]),)

    return replace(rule, join=join, split=split)


def _has_conv_bias(config: Config) -> bool:
    return config.get(mamba_keys.MAMBA_CONV_BIAS) is not False


_conv = partial(_by_group, widths=_conv_widths)
_MAMBA = (
    norm_rule(base.ATTENTION_NORM, "norm.weight"),
    _projection_rule(),
    conv_rule(_conv("self_attention.conv_weight", ("mixer.conv1d.weight",))),
    replace(
        _conv("self_attention.conv_bias", ("mixer.conv1d.bias",)),
        is_in=_has_conv_bias,
    ),
    Rule("self_attention.a_log", ("mixer.A_log",)),
    Rule("self_attention.dt_bias", ("mixer.dt_bias",)),
    Rule("self_attention.skip", ("mixer.D",)),
    Rule("self_attention.norm_weight", ("mixer.norm.weight",)),
    Rule("self_attention.linear_proj.weight", ("mixer.out_proj.weight",), is_by_group=None),
)
_ATTENTION = (
    norm_rule(base.ATTENTION_NORM, "norm.weight"),
    base.qkv_rule(
        "self_attention.linear_qkv.weight",
        *(f"mixer.{part}_proj.weight" for part in "qkv"),
    ),
    Rule("self_attention.linear_proj.weight", ("mixer.o_proj.weight",)),
)
_UP, _DOWN = "mixer.{}up_proj.weight", "mixer.{}down_proj.weight"


def _mlp_rules(kind: str, owner: str) -> tuple[Rule, ...]:
    """Build the rules of the experts or the shared expert, named ``owner`` in Hugging Face."""
    return tuple(
        base.experts_rule(f"mlp.{kind}.linear_fc{number}.weight", name.format(owner))
        for number, name in ((1, _UP), (2, _DOWN))
    )


_EXPERTS = (
    norm_rule(base.EXPERTS_NORM, "norm.weight"),
    # The choice of experts depends on small differences of scores and biases, so transformers'
    # class keeps both tensors in fp32.
    Rule("mlp.router.weight", ("mixer.gate.weight",), dtype=torch.float32),
    Rule("mlp.router.expert_bias", ("mixer.gate.e_score_correction_bias",), dtype=torch.float32),
    *_mlp_rules("experts", f"experts.{base.EXPERT}."),
    *_mlp_rules("shared_experts", "shared_experts."),
)


def _are_supported(experts: ExpertShape | None) -> bool:
    if experts is None:
        return True
    has_bias = experts.is_sigmoid and experts.expert_bias
    return has_bias and experts.shared_width is not None and not experts.shared_gate


NEMOTRON_H = ModelFamily(
    name="nemotron_h",
    to_nemo=_to_nemo,
    to_hf=_to_hf,
    model=(
        Rule("embedding.word_embeddings.weight", ("backbone.embeddings.weight",)),
        norm_rule(base.FINAL_NORM, "backbone.norm_f.weight"),
    ),
    layer=(*_ATTENTION, *_EXPERTS),
    linear_layer=_MAMBA,
    dense_mlp=(
        norm_rule(base.MLP_NORM, "norm.weight"),
        Rule("mlp.linear_fc1.weight", (_UP.format(""),)),
        Rule("mlp.linear_fc2.weight", (_DOWN.format(""),)),
    ),
    layer_prefix="backbone.layers.",
    prefixes={"model.": "backbone."},
    made_of={
        "activation": "squared-relu",
        "no_rope_freq": 1,
        "linear_attention": base.ANY,
        "experts": _are_supported,
        "hybrid_pattern": lambda pattern: pattern is not None,
    },
    dropped="mtp.",
)
