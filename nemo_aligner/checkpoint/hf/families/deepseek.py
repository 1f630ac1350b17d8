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
from nemo_aligner.checkpoint.hf.families.mixtures import (
    BIASED_EXPERTS,
    are_first_layers_dense,
    biased_experts_to_hf,
    biased_experts_to_nemo,
    have_biased_router,
)
from nemo_aligner.checkpoint.hf.families.settings import Config, HfSettings
from nemo_aligner.models.shapes import experts as expert_keys
from nemo_aligner.models.shapes import latent_attention as latent_keys
from nemo_aligner.models.shapes.decoder import ModelShape
from nemo_aligner.models.shapes.experts import ExpertShape
from nemo_aligner.models.shapes.latent_attention import LatentAttentionShape
from nemo_aligner.models.shapes.rope import FP32_TABLES
from nemo_aligner.utils.errors import CheckpointError, shown

# Key of a NeMo config. It is written, with the value false, if RoPE in the Hugging Face model
# rotates channel i with channel i + r. Without the key it rotates neighbouring channels.
_INTERLEAVED = "hf_rope_interleave"
# Epsilon of the norms of the latents in transformers, where ``rms_norm_eps`` applies to other norms
# only.
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
    # If the key is null, queries have no latent. If the key is missing, transformers' default
    # applies.
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
        # transformers scales attention scores by mscale_all_dim even if mscale is missing, so
        # translate it here.
        **({"yarn_mscale_all_dim": HfSettings(rope).number("mscale_all_dim")} if scale else {}),
    }


def _latent_of(config: Config) -> LatentAttentionShape:
    """Return the shape of the latent attention that a NeMo config describes (it must have one)."""
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
        # In these models head_dim is the number of channels to which RoPE is applied.
        "head_dim": latent.qk_rope_head_dim,
        "attention_bias": False,
    }


# Rules of attention. RoPE's channels come last in a head of Hugging Face, and first in Megatron's;
# pairs of neighbouring channels become channels i and i + r, where r is half the number of RoPE's
# channels.


def _is_interleaved(config: Config) -> bool:
    return config.get(_INTERLEAVED) is not False


def _to_halves(rows: Tensor, config: Config) -> Tensor:
    """Reorder RoPE's rows, axis -2: pairs of neighbours become two halves, ``i`` and ``i + r``."""
    if not _is_interleaved(config):
        return rows
    return rows.unflatten(-2, (-1, 2)).transpose(-3, -2).flatten(-3, -2)


def _to_pairs(rows: Tensor, config: Config) -> Tensor:
    """Invert ``_to_halves``, for an export."""
    if not _is_interleaved(config):
        return rows
    return rows.unflatten(-2, (2, -1)).transpose(-3, -2).flatten(-3, -2)


def _queries_to_megatron(rows: Tensor, config: Config) -> Tensor:
    """Put RoPE's channels first in each head: ``[heads * c, in]`` -> ``[heads, c, in]``."""
    latent = _latent_of(config)
    by_head = rows.reshape(latent.heads, -1, rows.shape[-1])
    plain, rotated = by_head.split([latent.qk_nope_head_dim, latent.qk_rope_head_dim], dim=1)
    return torch.cat([_to_halves(rotated, config), plain], dim=1)


def _queries_to_hf(by_head: Tensor, config: Config) -> Tensor:
    """Invert ``_queries_to_megatron``, for an export."""
    latent = _latent_of(config)
    rotated, plain = by_head.split([latent.qk_rope_head_dim, latent.qk_nope_head_dim], dim=1)
    return torch.cat([plain, _to_pairs(rotated, config)], dim=1).flatten(0, 1)


def _keys_to_megatron(rows: Tensor, config: Config) -> Tensor:
    """Reorder the shared key, the last rows of ``kv_a_proj_with_mqa``, by ``_to_halves``."""
    latent, rotated = rows.tensor_split([_latent_of(config).kv_lora_rank])
    return torch.cat([latent, _to_halves(rotated, config)])


def _keys_to_hf(rows: Tensor, config: Config) -> Tensor:
    """Invert ``_keys_to_megatron``, for an export."""
    latent, rotated = rows.tensor_split([_latent_of(config).kv_lora_rank])
    return torch.cat([latent, _to_pairs(rotated, config)])


def _join_latents(tensors: Sequence[Tensor], config: Config) -> Tensor:
    query, keys = tensors
    return torch.cat([query, _keys_to_megatron(keys, config)])


def _split_latents(tensor: Tensor, config: Config) -> Sequence[Tensor]:
    query, keys = tensor.tensor_split([_latent_of(config).q_lora_rank or 0])
    return query, _keys_to_hf(keys, config)


def _join_by_head(tensors: Sequence[Tensor], config: Config) -> Tensor:
    """Interleave queries and ``kv_a_proj_with_mqa`` by head, in one tensor as in Megatron."""
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
_INPUT = partial(Rule, "self_attention.linear_qkv.weight")

ATTENTION = (
    _INPUT(
        ("self_attn.q_a_proj.weight", _KEYS),
        join=_join_latents,
        split=_split_latents,
        is_by_group=None,
        is_in=_has_query_latent,
    ),
    _INPUT(
        ("self_attn.q_proj.weight", _KEYS),
        join=_join_by_head,
        split=_split_by_head,
        is_by_group=True,
        is_in=_has_no_query_latent,
    ),
    Rule(
        "self_attention.q_latent_layernorm.weight",
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
    Rule("self_attention.kv_latent_layernorm.weight", ("self_attn.kv_a_layernorm.weight",)),
    Rule(
        "self_attention.linear_kv_up_proj.weight",
        ("self_attn.kv_b_proj.weight",),
        is_by_group=True,
    ),
    base.PROJECTION,
)


# Experts. A model of these families may also be dense.


def _first_dense(config: Config, default: int) -> list[int]:
    """List a 0 for each of the first ``first_k_dense_replace`` layers, which are dense, then 1s."""
    reader = HfSettings(config)
    dense = reader.count("first_k_dense_replace", default, minimum=0)
    return [int(layer >= dense) for layer in range(reader.layers())]


def _experts_to_nemo(
    config: Config, marks: list[int], router: tuple[str, ...], **defaults: int | float
) -> dict[str, Any]:
    """Translate the settings of experts to NeMo's keys; return {} if no layer has experts.

    Args:
        marks: a 1 for each layer with experts, and a 0 for each dense layer.
        router: the only supported values of ``scoring_func`` (first) and ``topk_method``.
        defaults: see ``biased_experts_to_nemo``.
    """
    if not any(marks):
        return {}
    reader = HfSettings(config)
    reader.only("moe_layer_freq", 1)
    reader.only("scoring_func", router[0])
    reader.only("topk_method", *router[1:])
    experts = biased_experts_to_nemo({**config, "first_k_dense_replace": 0}, **defaults)
    return experts if all(marks) else {**experts, expert_keys.EXPERT_FREQUENCY: marks}


_SIGMOID = ("sigmoid", "noaux_tc")


def _experts_to_hf(config: Config) -> dict[str, Any]:
    """Translate the experts of a NeMo config to the keys of a ``config.json``."""
    shape = ModelShape.from_config(config)
    if shape.experts is None:
        return {"first_k_dense_replace": shape.num_layers}
    return biased_experts_to_hf(config)


def _layer(experts: tuple[Rule, ...]) -> tuple[Rule, ...]:
    """Return a layer's rules: latent attention, and ``experts`` (router and experts)."""
    return base.layer_rules_with(attention=ATTENTION, mlp=experts, mlp_norm=base.EXPERTS_NORM)


def _is_there(latent: LatentAttentionShape | None) -> bool:
    return latent is not None


def _are_of_v3(experts: ExpertShape | None) -> bool:
    return experts is None or have_biased_router(experts)


def _are_of_v2(experts: ExpertShape | None) -> bool:
    if experts is None:
        return True
    has_shared = bool(experts.shared_width) and not experts.shared_gate
    is_softmax = not (experts.is_sigmoid or experts.expert_bias or experts.renormalized)
    return has_shared and is_softmax and (experts.shared_width or 0) % experts.width == 0


_MADE_OF: dict[str, Any] = {
    "latent_attention": _is_there,
    "rotary_percentage": base.ANY,
    "experts": _are_of_v3,
    "moe_layer_freq": are_first_layers_dense,
}


# DeepSeek-V3, and Kimi K2, which differs only in its name.


def _rope_order_to_nemo(config: Config) -> dict[str, Any]:
    is_interleaved = HfSettings(config).flag("rope_interleave", True)
    return {} if is_interleaved else {_INTERLEAVED: False}


def _v3_to_nemo(config: Config) -> dict[str, Any]:
    return settings.decoder_to_nemo(
        config,
        name="deepseek_v3",
        head_dim=64,
        **_latent_to_nemo(config, (1536, 512, 128, 64, 128)),
        **_rope_order_to_nemo(config),
        **_experts_to_nemo(
            config,
            _first_dense(config, 3),
            _SIGMOID,
            n_routed_experts=256,
            moe_intermediate_size=2048,
            n_group=8,
            topk_group=4,
            routed_scaling_factor=2.5,
        ),
    )


def _v3_to_hf(config: Config) -> dict[str, Any]:
    return settings.decoder_to_hf(
        config,
        "deepseek_v3",
        **_latent_to_hf(config),
        **_experts_to_hf(config),
        rope_interleave=_is_interleaved(config),
        num_nextn_predict_layers=0,
    )


DEEPSEEK_V3 = ModelFamily(
    name="deepseek_v3",
    to_nemo=_v3_to_nemo,
    to_hf=_v3_to_hf,
    layer=_layer(BIASED_EXPERTS),
    made_of=_MADE_OF,
    dropped=base.MTP_LAYERS,
)
KIMI_K2 = replace(DEEPSEEK_V3, name="kimi_k2")


# DeepSeek-V2: softmax scores, which are not renormalised, and RoPE is computed in fp32.


def _v2_to_nemo(config: Config) -> dict[str, Any]:
    reader = HfSettings(config)
    experts = _experts_to_nemo(
        {"n_shared_experts": 2, **config},
        _first_dense(config, 0),
        ("softmax", "greedy", "group_limited_greedy"),
        n_routed_experts=64,
        moe_intermediate_size=1407,
    )
    if experts:
        reader.count("num_experts_per_tok")  # transformers' class has no default
        # transformers' class ignores the value true, but DeepSeek's own code does not, so the two
        # would differ.
        reader.only("norm_topk_prob", False, None)
        experts |= {
            expert_keys.PRE_SOFTMAX: True,
            expert_keys.SCORE_FUNCTION: expert_keys.SOFTMAX,
            expert_keys.EXPERT_BIAS: False,
        }
        if config.get("topk_method") != "group_limited_greedy":
            experts |= {expert_keys.GROUP_COUNT: 1, expert_keys.GROUP_TOP_K: 1}
    return settings.decoder_to_nemo(
        config,
        name="deepseek_v2",
        head_dim=64,
        **_latent_to_nemo(config, (1536, 512, 128, 64, 128)),
        rope_fp32=FP32_TABLES,
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
        mlp_bias=False,
    )


DEEPSEEK_V2 = ModelFamily(
    name="deepseek_v2",
    to_nemo=_v2_to_nemo,
    to_hf=_v2_to_hf,
    layer=_layer(
        tuple(rule for rule in BIASED_EXPERTS if rule.megatron != "mlp.router.expert_bias")
    ),
    made_of={**_MADE_OF, "experts": _are_of_v2, "rope_fp32": base.ANY},
)


# GLM-4.7-Flash: DeepSeek-V3 with a list of the layers with experts.

_SPARSE, _DENSE = "sparse", "dense"


def _glm_to_nemo(config: Config) -> dict[str, Any]:
    reader = HfSettings(config)
    count, kinds = reader.layers(), config.get("mlp_layer_types")
    if kinds is None:
        reader.only("first_k_dense_replace", 1)
        kinds = [_DENSE, *[_SPARSE] * (count - 1)]
    is_list = isinstance(kinds, list) and len(kinds) == count
    if not is_list or not all(kind in (_SPARSE, _DENSE) for kind in kinds):
        raise CheckpointError(
            f"mlp_layer_types: got {shown(kinds)}, wanted {_SPARSE!r} or {_DENSE!r} for each of "
            f"the {count} layers"
        )
    return settings.decoder_to_nemo(
        config,
        name="glm4_moe_lite",
        head_dim=64,
        epsilon=1e-5,
        **_latent_to_nemo(config, (768, 512, 192, 64, 256)),
        **_rope_order_to_nemo(config),
        **_experts_to_nemo(
            config,
            [int(kind == _SPARSE) for kind in kinds],
            _SIGMOID,
            n_routed_experts=64,
            num_experts_per_tok=4,
            moe_intermediate_size=1536,
            routed_scaling_factor=1.8,
        ),
    )


def _glm_to_hf(config: Config) -> dict[str, Any]:
    shape, experts = ModelShape.from_config(config), _experts_to_hf(config)
    del experts["first_k_dense_replace"]
    numbers = range(1, shape.num_layers + 1)
    kinds = [_DENSE if shape.of_layer(n).experts is None else _SPARSE for n in numbers]
    return settings.decoder_to_hf(
        config,
        "glm4_moe_lite",
        **_latent_to_hf(config),
        **experts,
        rope_interleave=_is_interleaved(config),
        mlp_layer_types=kinds,
        num_nextn_predict_layers=0,
    )


GLM4_MOE_LITE = replace(
    DEEPSEEK_V3,
    name="glm4_moe_lite",
    to_nemo=_glm_to_nemo,
    to_hf=_glm_to_hf,
    made_of={**_MADE_OF, "moe_layer_freq": base.ANY},
)
