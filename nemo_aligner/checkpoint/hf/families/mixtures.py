"""Mixture-of-experts (MoE) models: Mixtral, Qwen2-MoE, Qwen3-MoE, OLMoE, GLM-4.5, hybrid Qwens.

Some layers of Qwen's and GLM's models have an MLP instead of experts. Published files have one
tensor for each matrix of an expert. transformers 5 may fuse the matrices of all experts in one
tensor, which ``source.py`` splits.
"""

from __future__ import annotations

from typing import Any

import torch

from nemo_aligner.checkpoint.hf.families import base, settings
from nemo_aligner.checkpoint.hf.families.base import GgufFormat, ModelFamily, Rule
from nemo_aligner.checkpoint.hf.families.qwen import (
    HYBRID,
    HYBRID_DENSE_MLP,
    HYBRID_MODEL,
    delta_net_rules,
    hybrid_layer_rules,
    hybrid_to_hf,
    hybrid_to_nemo,
    qwen_to_hf,
    qwen_to_nemo,
)
from nemo_aligner.checkpoint.hf.families.settings import Config, HfSettings
from nemo_aligner.models.shapes import experts as expert_keys
from nemo_aligner.models.shapes.decoder import ModelShape
from nemo_aligner.models.shapes.experts import ExpertShape
from nemo_aligner.utils.errors import CheckpointError, shown


def _to_nemo(
    config: Config,
    width: tuple[str, int | None],
    experts: int,
    top_k: int,
    renormalized: bool | None = None,
) -> dict[str, Any]:
    """Translate the expert settings of a ``config.json`` to NeMo's keys.

    Args:
        width: key of ``config.json`` for the MLP channels of an expert, and transformers' default
            for it.
        experts: default number of experts.
        top_k: default number of experts for a token.
        renormalized: whether the weights of the chosen experts are renormalized to sum to 1; None
            reads ``norm_topk_prob`` from the config.
    """
    reader = HfSettings(config)
    # transformers 5 writes num_local_experts for some models that had num_experts.
    count = reader.count("num_experts", reader.count("num_local_experts", experts))
    if renormalized is None:
        renormalized = reader.flag("norm_topk_prob", False)
    return {
        expert_keys.EXPERT_COUNT: count,
        expert_keys.EXPERT_TOP_K: reader.count("num_experts_per_tok", top_k, limit=count),
        expert_keys.EXPERT_WIDTH: reader.count(*width),
        expert_keys.PRE_SOFTMAX: not renormalized,
    }


def expert_layers_to_nemo(config: Config) -> dict[str, Any]:
    """Translate Qwen's settings of the layers with experts to Megatron's ``moe_layer_freq``.

    Every ``decoder_sparse_step``-th layer has experts, except for the layers that
    ``mlp_only_layers`` lists by their numbers from 0. The result is empty if all layers have
    experts.
    """
    reader = HfSettings(config)
    layers, step = reader.layers(), reader.count("decoder_sparse_step", 1)
    dense = config.get("mlp_only_layers")
    dense = [] if dense is None else dense
    if not isinstance(dense, list) or not all(type(number) is int for number in dense):
        raise CheckpointError(
            f"mlp_only_layers: got {shown(dense)}, wanted a list of layer numbers"
        )
    marks = [int(number % step == 0 and number - 1 not in dense) for number in range(1, layers + 1)]
    if not any(marks):
        raise CheckpointError(
            f"mlp_only_layers: got {shown(dense)} with decoder_sparse_step={step}, so that none of "
            f"the {layers} layers has experts, which is not supported"
        )
    return {} if all(marks) else {expert_keys.EXPERT_FREQUENCY: marks}


def expert_layers_to_hf(config: Config) -> dict[str, Any]:
    """Invert ``expert_layers_to_nemo``: build ``decoder_sparse_step`` and ``mlp_only_layers``."""
    marks = ModelShape.from_config(config).moe_layer_freq or ()
    dense = [layer for layer, mark in enumerate(marks) if not mark]
    return {"decoder_sparse_step": 1, "mlp_only_layers": dense}


def _to_hf(config: Config, width: str) -> dict[str, Any]:
    """Translate the expert settings of a NeMo config to the keys of a ``config.json``.

    Args:
        width: key of ``config.json`` for the MLP channels of an expert.
    """
    experts = _experts_of(config)
    return {
        "num_experts": experts.count,
        "num_experts_per_tok": experts.top_k,
        width: experts.width,
        "norm_topk_prob": experts.renormalized,
    }


def _experts_of(config: Config) -> ExpertShape:
    """Return the shape of the experts that a NeMo config describes (it must have some)."""
    experts = ModelShape.from_config(config).experts
    assert experts is not None
    return experts


def _layer_rules(moe: str, *added: Rule, gate: str, up: str, down: str) -> tuple[Rule, ...]:
    """Return the rules that translate a layer's tensors: Llama's, with experts instead of the MLP.

    Args:
        moe: Hugging Face name of the layer's module with the router and the experts.
        added: more rules of the layer.
        gate, up, down: Hugging Face names of an expert's three projections, such as ``gate_proj``.
    """
    experts = _expert_rules(moe, gate, up, down)
    return (*base.layer_rules_with(mlp=experts, mlp_norm=base.EXPERTS_NORM), *added)


def _expert_rules(moe: str, gate: str, up: str, down: str) -> tuple[Rule, ...]:
    """Return the rules that translate the tensors of a layer's router and experts.

    A rule maps a Megatron tensor to its Hugging Face tensors.

    Args:
        moe: Hugging Face name of the layer's module with the router and the experts.
        gate, up, down: Hugging Face names of an expert's three projections, such as ``gate_proj``.
    """
    names = [f"{moe}.experts.{base.EXPERT}.{name}.weight" for name in (gate, up, down)]
    router = Rule("mlp.router.weight", (f"{moe}.gate.weight",))
    return (router, *base.experts_rules("experts", *names))


# GGUF stores the matrices of all experts of a layer in one tensor. It has no field for whether the
# weights of the chosen experts sum to 1; llama.cpp decides that by the architecture.
_GGUF_PARTS = {"gate": "ffn_gate", "up": "ffn_up", "down": "ffn_down"}
_GGUF_FIELDS = {"expert_count": "num_experts", "expert_used_count": "num_experts_per_tok"}
_GGUF_WIDTHS = {
    "expert_feed_forward_length": "moe_intermediate_size",
    "expert_shared_feed_forward_length": "shared_expert_intermediate_size",
}


def _gguf_names(moe: str, *, gate: str, up: str, down: str) -> dict[str, str]:
    """Map GGUF's names of a layer's tensors to Hugging Face's.

    Args:
        moe: Hugging Face name of the layer's module with the router and the experts.
        gate, up, down: Hugging Face names of an expert's three projections, such as ``gate_proj``.
    """
    parts = {"gate": gate, "up": up, "down": down}
    return {
        **base.ATTENTION_NAMES,
        **base.MLP_NORM_NAMES,
        "ffn_gate_inp": f"{moe}.gate",
        **{
            f"{_GGUF_PARTS[part]}_exps": f"{moe}.experts.{base.EXPERT}.{name}"
            for part, name in parts.items()
        },
    }


_QWEN_PROJECTIONS = {"gate": "gate_proj", "up": "up_proj", "down": "down_proj"}


def _are_plain(experts: ExpertShape | None) -> bool:
    return experts is not None and experts.shared_width is None and experts.has_plain_router


def _are_renormalized(experts: ExpertShape | None) -> bool:
    return experts is not None and _are_plain(experts) and experts.renormalized


def _have_shared_gate(experts: ExpertShape | None) -> bool:
    return experts is not None and experts.shared_gate and experts.has_plain_router


# Mixtral: Mistral with experts in place of the MLP.


def _mixtral_to_nemo(config: Config) -> dict[str, Any]:
    return settings.decoder_to_nemo(
        config,
        epsilon=1e-5,
        base=1e6,
        **_to_nemo(config, ("intermediate_size", None), 8, 2, renormalized=True),
        **settings.window_everywhere(HfSettings(config).window(missing=None)),
    )


def _mixtral_to_hf(config: Config) -> dict[str, Any]:
    shape, experts = ModelShape.from_config(config), _experts_of(config)
    if shape.ffn_hidden_size != experts.width:
        raise CheckpointError(
            f"model_config.yaml: {expert_keys.EXPERT_WIDTH}: got {experts.width}, but "
            f"ffn_hidden_size is {shape.ffn_hidden_size}; a Mixtral has one setting for both"
        )
    return settings.decoder_to_hf(
        config,
        "mixtral",
        sliding_window=shape.window_size,
        num_local_experts=experts.count,
        num_experts_per_tok=experts.top_k,
    )


MIXTRAL = ModelFamily(
    name="mixtral",
    to_nemo=_mixtral_to_nemo,
    to_hf=_mixtral_to_hf,
    layer=_layer_rules("block_sparse_moe", gate="w1", up="w3", down="w2"),
    made_of={"window_size": base.ANY, "experts": _are_renormalized},
    gguf=GgufFormat(
        "llama",
        layer=_gguf_names("block_sparse_moe", gate="w1", up="w3", down="w2"),
        optional={**_GGUF_FIELDS, "expert_count": "num_local_experts"},
        is_permuted=True,
        marked_by="expert_count",
    ),
)


# Qwen2-MoE: Qwen2 with a shared expert.

_SHARED = "shared_expert_intermediate_size"


def _alternates(layer: int, max_window_layers: int) -> bool:
    """Tell if a layer, from 0, has the window by default: every second one below the limit."""
    return layer % 2 == 0 and layer < max_window_layers


def _qwen2_moe_to_nemo(config: Config) -> dict[str, Any]:
    reader = HfSettings(config)
    return qwen_to_nemo(
        config,
        _alternates,
        qkv_bias=reader.flag("qkv_bias", True),
        **_to_nemo(config, ("moe_intermediate_size", 1408), 60, 4),
        **expert_layers_to_nemo(config),
        **{expert_keys.SHARED_WIDTH: reader.count(_SHARED, 5632), expert_keys.SHARED_GATE: True},
    )


def _qwen2_moe_to_hf(config: Config) -> dict[str, Any]:
    return qwen_to_hf(
        config,
        "qwen2_moe",
        **_to_hf(config, "moe_intermediate_size"),
        **{_SHARED: _experts_of(config).shared_width},
        qkv_bias=ModelShape.from_config(config).qkv_bias,
        **expert_layers_to_hf(config),
    )


_shared = (f"mlp.shared_expert.{name}.weight" for name in _QWEN_PROJECTIONS.values())
_SHARED_RULES = (
    Rule("mlp.router.shared_gate", ("mlp.shared_expert_gate.weight",)),
    *base.experts_rules("shared_experts", *_shared),
)

QWEN2_MOE = ModelFamily(
    name="qwen2_moe",
    to_nemo=_qwen2_moe_to_nemo,
    to_hf=_qwen2_moe_to_hf,
    layer=_layer_rules(
        "mlp",
        base.QKV_BIAS,
        *_SHARED_RULES,
        **_QWEN_PROJECTIONS,
    ),
    made_of={
        "qkv_bias": base.ANY,
        **base.ANY_WINDOW,
        "experts": _have_shared_gate,
        "moe_layer_freq": base.ANY,
    },
    gguf=GgufFormat(
        "qwen2moe",
        layer={
            **_gguf_names("mlp", **_QWEN_PROJECTIONS),
            "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
            **{
                f"{_GGUF_PARTS[part]}_shexp": f"mlp.shared_expert.{name}"
                for part, name in _QWEN_PROJECTIONS.items()
            },
        },
        optional={**_GGUF_FIELDS, **_GGUF_WIDTHS},
        derived=lambda config: {"norm_topk_prob": False},
    ),
)


# Qwen3-MoE: Qwen3 without a shared expert.


def _qwen3_moe_to_nemo(config: Config) -> dict[str, Any]:
    reader = HfSettings(config)
    reader.only("use_sliding_window", False, None)
    experts = _to_nemo(config, ("moe_intermediate_size", 768), 128, 8)
    return settings.decoder_to_nemo(
        config, qk_layernorm=True, **experts, **expert_layers_to_nemo(config)
    )


def _qwen3_moe_to_hf(config: Config) -> dict[str, Any]:
    return settings.decoder_to_hf(
        config,
        "qwen3_moe",
        **_to_hf(config, "moe_intermediate_size"),
        attention_bias=False,
        **expert_layers_to_hf(config),
    )


QWEN3_MOE = ModelFamily(
    name="qwen3_moe",
    to_nemo=_qwen3_moe_to_nemo,
    to_hf=_qwen3_moe_to_hf,
    layer=_layer_rules("mlp", *base.QUERY_KEY_NORMS, **_QWEN_PROJECTIONS),
    made_of={"qk_layernorm": True, "experts": _are_plain, "moe_layer_freq": base.ANY},
    gguf=GgufFormat(
        "qwen3moe",
        layer={**_gguf_names("mlp", **_QWEN_PROJECTIONS), **base.QUERY_KEY_NORM_NAMES},
        optional={**_GGUF_FIELDS, **_GGUF_WIDTHS},
        derived=lambda config: {"norm_topk_prob": True},
    ),
)


# OLMoE: each norm of queries and keys is over all heads together.


def _olmoe_to_nemo(config: Config) -> dict[str, Any]:
    HfSettings(config).only("clip_qkv", None)
    return settings.decoder_to_nemo(
        config,
        epsilon=1e-5,
        qk_layernorm=True,
        qk_layernorm_across_heads=True,
        **_to_nemo(config, ("intermediate_size", None), 64, 8),
    )


def _olmoe_to_hf(config: Config) -> dict[str, Any]:
    return settings.decoder_to_hf(
        config, "olmoe", **_to_hf(config, "intermediate_size"), attention_bias=False
    )


OLMOE = ModelFamily(
    name="olmoe",
    to_nemo=_olmoe_to_nemo,
    to_hf=_olmoe_to_hf,
    layer=_layer_rules("mlp", *base.ACROSS_HEADS_NORMS, **_QWEN_PROJECTIONS),
    made_of={"qk_layernorm": True, "qk_layernorm_across_heads": True, "experts": _are_plain},
    gguf=GgufFormat(
        "olmoe",
        layer={**_gguf_names("mlp", **_QWEN_PROJECTIONS), **base.QUERY_KEY_NORM_NAMES},
        optional=_GGUF_FIELDS,
        derived=lambda config: {"norm_topk_prob": False},
    ),
)


# Experts as in DeepSeek-V3 (arXiv:2412.19437): the first layers are dense, scores are sigmoids, the
# choice of experts is biased and may be limited to groups, and the shared expert has no gate.

# transformers' defaults for GLM-4.5's experts, by key; other families override some of them.
_BIASED_DEFAULTS: dict[str, Any] = {
    "n_routed_experts": 128,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 1408,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
    "routed_scaling_factor": 1.0,
}
_CORRECTION_BIAS = "mlp.gate.e_score_correction_bias"


def biased_experts_to_nemo(config: Config, **defaults: int | float) -> dict[str, Any]:
    """Translate the settings of DeepSeek-like experts with sigmoid scores to NeMo's keys.

    Args:
        defaults: values for missing keys, by key, where transformers' defaults for this family
            differ from those for GLM-4.5.
    """
    reader, default = HfSettings(config), {**_BIASED_DEFAULTS, **defaults}
    key = "n_routed_experts" if config.get("n_routed_experts") is not None else "num_local_experts"
    layers, experts = reader.layers(), reader.count(key, default["n_routed_experts"])
    width = reader.count("moe_intermediate_size", default["moe_intermediate_size"])
    key = "first_k_dense_replace"
    dense = reader.count(key, default[key], minimum=0, limit=layers - 1)
    groups = reader.count("n_group", default["n_group"], limit=experts)
    factor = reader.number("routed_scaling_factor", default["routed_scaling_factor"])
    key = "num_experts_per_tok"
    frequency = [int(layer >= dense) for layer in range(layers)]
    return {
        expert_keys.EXPERT_COUNT: experts,
        expert_keys.EXPERT_TOP_K: reader.count(key, default[key], limit=experts),
        expert_keys.EXPERT_WIDTH: width,
        expert_keys.PRE_SOFTMAX: not reader.flag("norm_topk_prob", True),
        expert_keys.SHARED_WIDTH: width * reader.count("n_shared_experts", 1),
        expert_keys.SHARED_GATE: False,
        expert_keys.SCORE_FUNCTION: expert_keys.SIGMOID,
        expert_keys.EXPERT_BIAS: True,
        expert_keys.GROUP_COUNT: groups,
        expert_keys.GROUP_TOP_K: reader.count("topk_group", default["topk_group"], limit=groups),
        expert_keys.SCALING_FACTOR: factor,
        **({expert_keys.EXPERT_FREQUENCY: frequency} if dense else {}),
    }


def biased_experts_to_hf(config: Config) -> dict[str, Any]:
    """Translate the experts of a NeMo config to DeepSeek's settings."""
    experts, marks = _experts_of(config), ModelShape.from_config(config).moe_layer_freq or (1,)
    assert experts.shared_width is not None
    return {
        "n_routed_experts": experts.count,
        "num_experts_per_tok": experts.top_k,
        "moe_intermediate_size": experts.width,
        "norm_topk_prob": experts.renormalized,
        "n_shared_experts": experts.shared_width // experts.width,
        "first_k_dense_replace": marks.index(1),
        "n_group": experts.num_groups,
        "topk_group": experts.group_topk,
        "routed_scaling_factor": experts.scaling_factor,
    }


_biased_shared = (f"mlp.shared_experts.{name}.weight" for name in _QWEN_PROJECTIONS.values())
# Rules of the router, the experts and the shared expert of such a layer.
BIASED_EXPERTS = (
    # The choice of experts depends on small differences of scores and biases, so transformers'
    # classes keep both tensors in fp32.
    Rule("mlp.router.weight", ("mlp.gate.weight",), dtype=torch.float32),
    Rule("mlp.router.expert_bias", (_CORRECTION_BIAS,), dtype=torch.float32),
    *base.experts_rules(
        "experts",
        *(f"mlp.experts.{base.EXPERT}.{name}.weight" for name in _QWEN_PROJECTIONS.values()),
    ),
    *base.experts_rules("shared_experts", *_biased_shared),
)


def have_biased_router(experts: ExpertShape | None) -> bool:
    """Tell if the router is DeepSeek-V3's: sigmoid scores, and a bias for the choice of experts."""
    if experts is None or experts.shared_width is None or experts.shared_width % experts.width:
        return False
    return experts.is_sigmoid and experts.expert_bias and not experts.shared_gate


def are_first_layers_dense(marks: tuple[int, ...] | None) -> bool:
    """Tell if all dense layers come first; ``marks`` has a 1 for layers with experts, else a 0."""
    return marks is None or list(marks) == sorted(marks)


# GLM-4.5 and 4.6: GLM-4 without fused weights, with experts as in DeepSeek-V3. RoPE rotates half of
# a head's channels. Published files have one more layer, which predicts further tokens in training
# and is dropped.


def _glm4_moe_to_nemo(config: Config) -> dict[str, Any]:
    return settings.decoder_to_nemo(
        config,
        epsilon=1e-5,
        rotated=0.5,
        attention_bias=False,
        qk_layernorm=HfSettings(config).flag("use_qk_norm", False),
        **biased_experts_to_nemo(config),
    )


def _glm4_moe_to_hf(config: Config) -> dict[str, Any]:
    return settings.decoder_to_hf(
        config,
        "glm4_moe",
        of_shape={
            "partial_rotary_factor": "rotary_percentage",
            "attention_bias": "qkv_bias",
            "use_qk_norm": "qk_layernorm",
        },
        **biased_experts_to_hf(config),
        num_nextn_predict_layers=0,
    )


GLM4_MOE = ModelFamily(
    name="glm4_moe",
    to_nemo=_glm4_moe_to_nemo,
    to_hf=_glm4_moe_to_hf,
    layer=(
        *base.layer_rules_with(
            attention=(base.QKV, base.QKV_BIAS, base.PROJECTION),
            mlp=BIASED_EXPERTS,
            mlp_norm=base.EXPERTS_NORM,
        ),
        *base.QUERY_KEY_NORMS,
    ),
    made_of={
        "qkv_bias": base.ANY,
        "qk_layernorm": base.ANY,
        "rotary_percentage": base.ANY,
        "experts": have_biased_router,
        "moe_layer_freq": are_first_layers_dense,
    },
    dropped=base.MTP_LAYERS,
)


# Qwen3.5-MoE's text decoder and Qwen3-Next: Qwen2-MoE's experts, next to Gated DeltaNet and gated
# attention. Their keys of ``config.json`` for experts are Qwen2-MoE's.

_HYBRID_MLP: dict[str, Any] = {
    "mlp": (*_expert_rules("mlp", **_QWEN_PROJECTIONS), *_SHARED_RULES),
    "mlp_norm": base.EXPERTS_NORM,
}


def _are_shared_and_renormalized(experts: ExpertShape | None) -> bool:
    return experts is not None and experts.shared_gate and experts.renormalized


def _hybrid_experts_to_nemo(config: Config, **experts: Any) -> dict[str, Any]:
    """Translate the experts of models with linear attention; ``experts`` is as in ``_to_nemo``."""
    return {
        **_to_nemo(config, ("moe_intermediate_size", 512), **experts),
        expert_keys.SHARED_WIDTH: HfSettings(config).count(_SHARED, 512),
        expert_keys.SHARED_GATE: True,
    }


def _qwen3_5_moe_to_nemo(config: Config) -> dict[str, Any]:
    experts = _hybrid_experts_to_nemo(config, experts=256, top_k=8, renormalized=True)
    # All layers have experts, so ``config.json`` has no width of a dense MLP. NeMo needs one, so
    # use that of an expert.
    config = {**config, "intermediate_size": experts[expert_keys.EXPERT_WIDTH]}
    return hybrid_to_nemo(config, "qwen3_5_moe_text", **experts)


def _qwen3_5_moe_to_hf(config: Config) -> dict[str, Any]:
    settings_of_experts = _to_hf(config, "moe_intermediate_size")
    del settings_of_experts["norm_topk_prob"]
    shared = {_SHARED: _experts_of(config).shared_width}
    decoder = hybrid_to_hf(config, "qwen3_5_moe_text", **settings_of_experts, **shared)
    del decoder["intermediate_size"]
    return decoder


QWEN3_5_MOE = ModelFamily(
    name="qwen3_5_moe_text",
    to_nemo=_qwen3_5_moe_to_nemo,
    to_hf=_qwen3_5_moe_to_hf,
    model=HYBRID_MODEL,
    layer=hybrid_layer_rules(**_HYBRID_MLP),
    linear_layer=delta_net_rules(**_HYBRID_MLP),
    made_of={**HYBRID, "experts": _are_shared_and_renormalized},
    dropped="mtp.",
)


def _qwen3_next_to_nemo(config: Config) -> dict[str, Any]:
    renormalized = HfSettings(config).flag("norm_topk_prob", True)
    experts = _hybrid_experts_to_nemo(config, experts=512, top_k=10, renormalized=renormalized)
    return hybrid_to_nemo(config, "qwen3_next", **experts, **expert_layers_to_nemo(config))


def _qwen3_next_to_hf(config: Config) -> dict[str, Any]:
    return hybrid_to_hf(
        config,
        "qwen3_next",
        **_to_hf(config, "moe_intermediate_size"),
        **{_SHARED: _experts_of(config).shared_width},
        **expert_layers_to_hf(config),
    )


QWEN3_NEXT = ModelFamily(
    name="qwen3_next",
    to_nemo=_qwen3_next_to_nemo,
    to_hf=_qwen3_next_to_hf,
    model=HYBRID_MODEL,
    layer=hybrid_layer_rules(**_HYBRID_MLP),
    linear_layer=delta_net_rules(is_fused=True, **_HYBRID_MLP),
    dense_mlp=HYBRID_DENSE_MLP,
    made_of={**HYBRID, "experts": _have_shared_gate, "moe_layer_freq": base.ANY},
    dropped="mtp.",
)
