"""Decoders with multi-head latent attention: DeepSeek-V2 and V3, Kimi K2, and GLM-4.7-Flash.

Kimi K2 and Moonlight have the ``model_type`` and the tensors of DeepSeek-V3.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from nemo_aligner.checkpoint.hf.families import base, settings
from nemo_aligner.checkpoint.hf.families.base import ModelFamily, Rule
from nemo_aligner.checkpoint.hf.families.settings import Config, HfSettings
from nemo_aligner.models.shapes import experts as expert_keys
from nemo_aligner.models.shapes import latent_attention as latent_keys
from nemo_aligner.models.shapes.decoder import ModelShape
from nemo_aligner.models.shapes.experts import ExpertShape
from nemo_aligner.models.shapes.latent_attention import LatentAttentionShape
from nemo_aligner.utils.errors import CheckpointError, shown

# Written to a NeMo config, with false, if RoPE rotates the two halves of a head's rotated channels
# in Hugging Face. Usually it rotates neighbouring channels.
_INTERLEAVED = "hf_rope_interleave"
# transformers' norms of the latents have this epsilon, whatever ``rms_norm_eps`` says.
_LATENT_EPSILON = 1e-6


def _latent_to_nemo(config: Config, sizes: tuple[int | None, ...]) -> dict[str, Any]:
    """Translate the settings of latent attention to NeMo's keys.

    Args:
        sizes: transformers' defaults of ``q_lora_rank``, ``kv_lora_rank``, ``qk_nope_head_dim``,
            ``qk_rope_head_dim`` and ``v_head_dim``.
    """
    reader = HfSettings(config)
    heads = reader.count("num_attention_heads")
    if reader.count("num_key_value_heads", heads) != heads:
        raise CheckpointError(
            f"num_key_value_heads: got {shown(config['num_key_value_heads'])}, wanted "
            f"num_attention_heads={heads}: latent attention has a key for each head"
        )
    query_rank, kv_rank, plain, rotated, value = sizes
    # A null means no latent of queries; only a missing key has transformers' default.
    if config.get("q_lora_rank", query_rank) is not None:
        query_rank = reader.count("q_lora_rank", query_rank)
    else:
        query_rank = None
    plain = reader.count("qk_nope_head_dim", plain)
    rotated = reader.count("qk_rope_head_dim", rotated)
    rope = config.get("rope_scaling") or config.get("rope_parameters") or {}
    scale = rope.get("mscale_all_dim") if isinstance(rope, dict) else None
    return {
        latent_keys.LATENT_ATTENTION: True,
        latent_keys.QUERY_RANK: query_rank,
        "kv_lora_rank": reader.count("kv_lora_rank", kv_rank),
        "qk_head_dim": plain,
        "qk_pos_emb_head_dim": rotated,
        "v_head_dim": reader.count("v_head_dim", value),
        "kv_channels": plain + rotated,
        "num_query_groups": heads,
        latent_keys.LATENT_EPSILON: _LATENT_EPSILON,
        # Without mscale, YaRN's cosines ignore mscale_all_dim, but attention scores do not.
        **({"yarn_mscale_all_dim": HfSettings(rope).number("mscale_all_dim")} if scale else {}),
    }


def _latent_of(config: Config) -> LatentAttentionShape:
    """Return the latent attention of a NeMo config, which must have it."""
    latent = ModelShape.from_config(config).latent_attention
    assert latent is not None
    return latent


def _latent_to_hf(config: Config) -> dict[str, Any]:
    """Translate latent attention to the keys of a ``config.json``."""
    latent = _latent_of(config)
    if latent.norm_epsilon != _LATENT_EPSILON:
        raise CheckpointError(
            f"model_config.yaml: {latent_keys.LATENT_EPSILON}: got {latent.norm_epsilon}, but "
            f"transformers' norms of the latents have {_LATENT_EPSILON}, so the model cannot be "
            "exported"
        )
    return {
        "q_lora_rank": latent.q_lora_rank,
        "kv_lora_rank": latent.kv_lora_rank,
        "qk_nope_head_dim": latent.qk_nope_head_dim,
        "qk_rope_head_dim": latent.qk_rope_head_dim,
        "v_head_dim": latent.v_head_dim,
        # transformers computes RoPE's frequencies for this number of channels.
        "head_dim": latent.qk_rope_head_dim,
        "attention_bias": False,
    }


# Rules of attention. RoPE's channels come last in a head of Hugging Face, and first in Megatron's;
# pairs of neighbouring channels become channels i and i + r.


def _is_interleaved(config: Config) -> bool:
    return config.get(_INTERLEAVED) is not False


def _to_halves(rows: Tensor, config: Config) -> Tensor:
    """Reorder RoPE's channels, axis -2 of ``rows [..., channels, in]``, from pairs to halves."""
    if not _is_interleaved(config):
        return rows
    return rows.unflatten(-2, (-1, 2)).transpose(-3, -2).flatten(-3, -2)


def _to_pairs(rows: Tensor, config: Config) -> Tensor:
    """Invert ``_to_halves``."""
    if not _is_interleaved(config):
        return rows
    return rows.unflatten(-2, (2, -1)).transpose(-3, -2).flatten(-3, -2)


def _queries_to_megatron(rows: Tensor, config: Config) -> Tensor:
    """Reorder Hugging Face's queries ``[heads * c, in]`` -> ``[heads, c, in]``."""
    latent = _latent_of(config)
    by_head = rows.reshape(latent.heads, -1, rows.shape[-1])
    plain, rotated = by_head.split([latent.qk_nope_head_dim, latent.qk_rope_head_dim], dim=1)
    return torch.cat([_to_halves(rotated, config), plain], dim=1)


def _queries_to_hf(by_head: Tensor, config: Config) -> Tensor:
    """Invert ``_queries_to_megatron``."""
    latent = _latent_of(config)
    rotated, plain = by_head.split([latent.qk_rope_head_dim, latent.qk_nope_head_dim], dim=1)
    return torch.cat([plain, _to_pairs(rotated, config)], dim=1).flatten(0, 1)


def _keys_to_megatron(rows: Tensor, config: Config) -> Tensor:
    """Reorder ``kv_a_proj_with_mqa``: the latent's rows, then those of the shared key."""
    latent, rotated = rows.tensor_split([_latent_of(config).kv_lora_rank])
    return torch.cat([latent, _to_halves(rotated, config)])


def _keys_to_hf(rows: Tensor, config: Config) -> Tensor:
    """Invert ``_keys_to_megatron``."""
    latent, rotated = rows.tensor_split([_latent_of(config).kv_lora_rank])
    return torch.cat([latent, _to_pairs(rotated, config)])


def _join_latents(tensors: Sequence[Tensor], config: Config) -> Tensor:
    query, keys = tensors
    return torch.cat([query, _keys_to_megatron(keys, config)])


def _split_latents(tensor: Tensor, config: Config) -> Sequence[Tensor]:
    query, keys = tensor.tensor_split([_latent_of(config).q_lora_rank or 0])
    return query, _keys_to_hf(keys, config)


def _join_by_head(tensors: Sequence[Tensor], config: Config) -> Tensor:
    """Join queries and ``kv_a_proj_with_mqa``: each head's query, then its part of the latter."""
    queries = _queries_to_megatron(tensors[0], config)
    keys = _keys_to_megatron(tensors[1], config).unflatten(0, (queries.shape[0], -1))
    return torch.cat([queries, keys], dim=1).flatten(0, 1)


def _split_by_head(tensor: Tensor, config: Config) -> Sequence[Tensor]:
    latent = _latent_of(config)
    queries, keys = tensor.unflatten(0, (latent.heads, -1)).tensor_split([latent.key_channels], 1)
    return _queries_to_hf(queries, config), _keys_to_hf(keys.flatten(0, 1), config)


def _join_queries(tensors: Sequence[Tensor], config: Config) -> Tensor:
    return _queries_to_megatron(tensors[0], config).flatten(0, 1)


def _split_queries(tensor: Tensor, config: Config) -> Sequence[Tensor]:
    return (_queries_to_hf(tensor.unflatten(0, (_latent_of(config).heads, -1)), config),)


def _has_query_latent(config: Config) -> bool:
    return config.get(latent_keys.QUERY_RANK) is not None


def _has_no_query_latent(config: Config) -> bool:
    return not _has_query_latent(config)


_KEYS = "self_attn.kv_a_proj_with_mqa.weight"
_INPUT = partial(Rule, "self_attention.linear_qkv.weight", is_by_group=None)

ATTENTION = (
    _INPUT(
        ("self_attn.q_a_proj.weight", _KEYS),
        join=_join_latents,
        split=_split_latents,
        is_in=_has_query_latent,
    ),
    _INPUT(
        ("self_attn.q_proj.weight", _KEYS),
        join=_join_by_head,
        split=_split_by_head,
        is_in=_has_no_query_latent,
    ),
    Rule(
        "self_attention.q_layernorm.weight",
        ("self_attn.q_a_layernorm.weight",),
        is_in=_has_query_latent,
    ),
    Rule(
        "self_attention.linear_q_up_proj.weight",
        ("self_attn.q_b_proj.weight",),
        join=_join_queries,
        split=_split_queries,
        is_by_group=True,
        is_in=_has_query_latent,
    ),
    Rule("self_attention.kv_layernorm.weight", ("self_attn.kv_a_layernorm.weight",)),
    Rule(
        "self_attention.linear_kv_up_proj.weight",
        ("self_attn.kv_b_proj.weight",),
        is_by_group=True,
    ),
    base.PROJECTION,
)


# Experts, with a shared expert without a gate.


def _experts_to_nemo(
    config: Config, defaults: tuple[int, int | None, int, int], marks: list[int]
) -> dict[str, Any]:
    """Translate the settings of the experts, but not those of the router, to NeMo's keys.

    Args:
        defaults: transformers' defaults of ``n_routed_experts``, ``num_experts_per_tok``,
            ``moe_intermediate_size`` and ``n_shared_experts``.
        marks: a 1 for each layer with experts, and a 0 for each dense layer.

    Returns:
        NeMo's keys; empty if no layer has experts.
    """
    if not any(marks):
        return {}
    reader = HfSettings(config)
    reader.only("moe_layer_freq", 1)
    count = reader.count("n_routed_experts", defaults[0])
    width = reader.count("moe_intermediate_size", defaults[2])
    return {
        expert_keys.EXPERT_COUNT: count,
        expert_keys.EXPERT_TOP_K: reader.count("num_experts_per_tok", defaults[1], limit=count),
        expert_keys.EXPERT_WIDTH: width,
        expert_keys.SHARED_WIDTH: width * reader.count("n_shared_experts", defaults[3]),
        expert_keys.SCALING_FACTOR: reader.number("routed_scaling_factor", 1.0),
        **({} if all(marks) else {expert_keys.EXPERT_FREQUENCY: marks}),
    }


def _groups_to_nemo(config: Config, groups: int, chosen: int) -> dict[str, Any]:
    """Translate the groups of experts; the arguments are the defaults of ``config.json``."""
    reader = HfSettings(config)
    count = reader.count("n_group", groups)
    return {
        expert_keys.GROUP_COUNT: count,
        expert_keys.GROUP_TOP_K: reader.count("topk_group", chosen, limit=count),
    }


def _sigmoid_router_to_nemo(config: Config, groups: int, chosen: int) -> dict[str, Any]:
    """Translate the settings of DeepSeek-V3's router, in a model that has experts."""
    reader = HfSettings(config)
    reader.only("scoring_func", "sigmoid")
    reader.only("topk_method", "noaux_tc")
    return {
        expert_keys.PRE_SOFTMAX: not reader.flag("norm_topk_prob", True),
        expert_keys.SCORE_FUNCTION: expert_keys.SIGMOID,
        expert_keys.EXPERT_BIAS: True,
        **_groups_to_nemo(config, groups, chosen),
    }


def _first_dense(config: Config, default: int) -> list[int]:
    """Mark the layers with experts by 1: all behind ``first_k_dense_replace`` dense layers."""
    reader = HfSettings(config)
    dense = reader.count("first_k_dense_replace", default, least=0)
    return [int(layer >= dense) for layer in range(reader.layers())]


def _marks_of(config: Config) -> list[int]:
    """Return a 1 for each layer of a NeMo config with experts, and a 0 for each dense one."""
    shape = ModelShape.from_config(config)
    if shape.experts is None:
        return [0] * shape.num_layers
    return [*(shape.moe_layer_freq or [1] * shape.num_layers)]


def _experts_to_hf(config: Config) -> dict[str, Any]:
    """Translate the experts of a NeMo config to the keys of a ``config.json``."""
    experts = ModelShape.from_config(config).experts
    if experts is None:
        return {}
    shared = experts.shared_width or 0
    if shared % experts.width:
        raise CheckpointError(
            f"model_config.yaml: {expert_keys.SHARED_WIDTH}: got {shared}, wanted a multiple of "
            f"{expert_keys.EXPERT_WIDTH}={experts.width}: transformers counts shared experts"
        )
    return {
        "n_routed_experts": experts.count,
        "num_experts_per_tok": experts.top_k,
        "moe_intermediate_size": experts.width,
        "n_shared_experts": shared // experts.width,
        "routed_scaling_factor": experts.scaling_factor,
        "norm_topk_prob": experts.renormalized,
        "n_group": experts.num_groups,
        "topk_group": experts.group_topk,
    }


_ROUTER = Rule("mlp.router.weight", ("mlp.gate.weight",))
_BIAS = Rule("mlp.router.expert_bias", ("mlp.gate.e_score_correction_bias",), dtype=torch.float32)


def _layer(*router: Rule) -> tuple[Rule, ...]:
    """Return the rules of a layer with latent attention and experts."""
    kinds = {"experts": f"experts.{base.EXPERT}", "shared_experts": "shared_experts"}
    experts = (
        rule
        for kind, name in kinds.items()
        for rule in base.experts_rules(
            kind, *(f"mlp.{name}.{part}_proj.weight" for part in ("gate", "up", "down"))
        )
    )
    return base.layer_rules_with(
        attention=ATTENTION, mlp=(*router, *experts), mlp_norm=base.EXPERTS_NORM
    )


def _is_there(latent: LatentAttentionShape | None) -> bool:
    return latent is not None


def _have_shared(experts: ExpertShape) -> bool:
    return experts.shared_width is not None and not experts.shared_gate


def _are_of_v3(experts: ExpertShape | None) -> bool:
    return experts is None or (_have_shared(experts) and experts.expert_bias)


def _are_of_v2(experts: ExpertShape | None) -> bool:
    is_softmax = experts is None or not (experts.is_sigmoid or experts.renormalized)
    return experts is None or (_have_shared(experts) and is_softmax)


def _are_last(marks: tuple[int, ...] | None) -> bool:
    return marks is None or list(marks) == sorted(marks)


_MADE_OF = {
    "latent_attention": _is_there,
    "rotary_percentage": base.ANY,
    "experts": _are_of_v3,
    "moe_layer_freq": _are_last,
}


# DeepSeek-V3, and Kimi K2, which has only another name.


def _rope_order_to_nemo(config: Config) -> dict[str, Any]:
    is_interleaved = HfSettings(config).flag("rope_interleave", True)
    return {} if is_interleaved else {_INTERLEAVED: False}


def _v3_to_nemo(config: Config) -> dict[str, Any]:
    experts = _experts_to_nemo(config, (256, 8, 2048, 1), _first_dense(config, 3))
    if experts:
        scale = HfSettings(config).number("routed_scaling_factor", 2.5)
        experts |= {**_sigmoid_router_to_nemo(config, 8, 4), expert_keys.SCALING_FACTOR: scale}
    return settings.decoder_to_nemo(
        config,
        name="deepseek_v3",
        head_dim=64,
        **_latent_to_nemo(config, (1536, 512, 128, 64, 128)),
        **_rope_order_to_nemo(config),
        **experts,
    )


def _v3_to_hf(config: Config) -> dict[str, Any]:
    return settings.decoder_to_hf(
        config,
        "deepseek_v3",
        **_latent_to_hf(config),
        **_experts_to_hf(config),
        rope_interleave=_is_interleaved(config),
        first_k_dense_replace=_marks_of(config).count(0),
    )


DEEPSEEK_V3 = ModelFamily(
    name="deepseek_v3",
    to_nemo=_v3_to_nemo,
    to_hf=_v3_to_hf,
    layer=_layer(_ROUTER, _BIAS),
    made_of=_MADE_OF,
    # Layers for the prediction of several tokens (MTP) are numbered behind the others.
    dropped="model.layers.{layers}.",
)
KIMI_K2 = replace(DEEPSEEK_V3, name="kimi_k2")


# DeepSeek-V2: softmax scores, which are not renormalised.


def _v2_to_nemo(config: Config) -> dict[str, Any]:
    reader = HfSettings(config)
    experts = _experts_to_nemo(config, (64, None, 1407, 2), _first_dense(config, 0))
    if experts:
        reader.only("scoring_func", "softmax")
        # transformers' class ignores true, although DeepSeek's own code does not.
        reader.only("norm_topk_prob", False, None)
        reader.only("topk_method", "greedy", "group_limited_greedy")
        experts[expert_keys.PRE_SOFTMAX] = True
        if config.get("topk_method") == "group_limited_greedy":
            experts |= _groups_to_nemo(config, 1, 1)
    return settings.decoder_to_nemo(
        config,
        name="deepseek_v2",
        head_dim=64,
        **_latent_to_nemo(config, (1536, 512, 128, 64, 128)),
        **experts,
    )


def _v2_to_hf(config: Config) -> dict[str, Any]:
    experts = _experts_to_hf(config)
    is_grouped = experts.get("n_group", 1) > 1
    return settings.decoder_to_hf(
        config,
        "deepseek_v2",
        **_latent_to_hf(config),
        **experts,
        topk_method="group_limited_greedy" if is_grouped else "greedy",
        first_k_dense_replace=_marks_of(config).count(0),
        mlp_bias=False,
    )


DEEPSEEK_V2 = ModelFamily(
    name="deepseek_v2",
    to_nemo=_v2_to_nemo,
    to_hf=_v2_to_hf,
    layer=_layer(_ROUTER),
    made_of={**_MADE_OF, "experts": _are_of_v2},
)


# GLM-4.7-Flash: DeepSeek-V3 with a list of the layers with experts.

_SPARSE, _DENSE = "sparse", "dense"


def _glm_to_nemo(config: Config) -> dict[str, Any]:
    reader = HfSettings(config)
    count = reader.layers()
    kinds = config.get("mlp_layer_types")
    if kinds is None:
        reader.only("first_k_dense_replace", 1)
        kinds = [_DENSE, *[_SPARSE] * (count - 1)]
    is_list = isinstance(kinds, list) and len(kinds) == count
    if not is_list or not all(kind in (_SPARSE, _DENSE) for kind in kinds):
        raise CheckpointError(
            f"mlp_layer_types: got {shown(kinds)}, wanted {_SPARSE!r} or {_DENSE!r} for each of "
            f"the {count} layers"
        )
    marks = [int(kind == _SPARSE) for kind in kinds]
    experts = _experts_to_nemo(config, (64, 4, 1536, 1), marks)
    if experts:
        scale = reader.number("routed_scaling_factor", 1.8)
        experts |= {**_sigmoid_router_to_nemo(config, 1, 1), expert_keys.SCALING_FACTOR: scale}
    return settings.decoder_to_nemo(
        config,
        name="glm4_moe_lite",
        head_dim=64,
        epsilon=1e-5,
        **_latent_to_nemo(config, (768, 512, 192, 64, 256)),
        **_rope_order_to_nemo(config),
        **experts,
    )


def _glm_to_hf(config: Config) -> dict[str, Any]:
    kinds = [_SPARSE if mark else _DENSE for mark in _marks_of(config)]
    return settings.decoder_to_hf(
        config,
        "glm4_moe_lite",
        **_latent_to_hf(config),
        **_experts_to_hf(config),
        rope_interleave=_is_interleaved(config),
        mlp_layer_types=kinds,
    )


GLM4_MOE_LITE = replace(
    DEEPSEEK_V3,
    name="glm4_moe_lite",
    to_nemo=_glm_to_nemo,
    to_hf=_glm_to_hf,
    made_of={**_MADE_OF, "moe_layer_freq": base.ANY},
)
