"""gpt-oss (OpenAI 2025): experts with biases, attention sinks, and windows in every other layer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from nemo_aligner.checkpoint.decoder_tensors import SINKS
from nemo_aligner.checkpoint.hf.families import base, settings
from nemo_aligner.checkpoint.hf.families.base import ModelFamily, Rule
from nemo_aligner.checkpoint.hf.families.settings import Config, HfSettings
from nemo_aligner.models.shapes import experts as expert_keys
from nemo_aligner.models.shapes.decoder import ModelShape
from nemo_aligner.models.shapes.experts import ExpertShape
from nemo_aligner.models.shapes.layer import LEARNED_SINKS
from nemo_aligner.utils.errors import CheckpointError

# RoPE settings that transformers' class uses if ``config.json`` has none.
_DEFAULT_ROPE = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}
# The factor in the sigmoid of an expert's gate; no other value is supported.
_ALPHA = 1.702


def _to_nemo(config: Config) -> dict[str, Any]:
    reader = HfSettings(config)
    reader.only("attention_bias", True, None)
    reader.only("swiglu_alpha", _ALPHA, None)
    if not (config.get("rope_parameters") or config.get("rope_scaling")):
        config = {**config, "rope_parameters": _DEFAULT_ROPE}
    count = reader.count("num_local_experts", reader.count("num_experts", 128))
    kinds = settings.alternating_layers(reader.layers())
    return settings.decoder_to_nemo(
        config,
        epsilon=1e-5,
        base=150000.0,
        head_dim=64,
        attention_bias=True,
        proj_bias=True,
        softmax_type=LEARNED_SINKS,
        **settings.window_to_nemo(config, reader.window(missing=128), kinds),
        **{
            "activation": expert_keys.QUICK_GEGLU,
            expert_keys.EXPERT_COUNT: count,
            expert_keys.EXPERT_TOP_K: reader.count("num_experts_per_tok", 4, limit=count),
            expert_keys.EXPERT_WIDTH: reader.count("intermediate_size"),
            expert_keys.PRE_SOFTMAX: False,
            expert_keys.EXPERT_LINEAR_BIAS: True,
            expert_keys.ROUTER_BIAS: True,
            expert_keys.CLAMP_VALUE: reader.number("swiglu_limit", 7.0),
        },
    )


def _to_hf(config: Config) -> dict[str, Any]:
    shape = ModelShape.from_config(config)
    experts = shape.experts
    assert experts is not None
    if shape.ffn_hidden_size != experts.width:
        raise CheckpointError(
            f"model_config.yaml: {expert_keys.EXPERT_WIDTH}: got {experts.width}, but "
            f"ffn_hidden_size is {shape.ffn_hidden_size}. A gpt-oss has one setting for both."
        )
    return settings.decoder_to_hf(
        config,
        "gpt_oss",
        attention_bias=True,
        num_local_experts=experts.count,
        num_experts_per_tok=experts.top_k,
        swiglu_alpha=_ALPHA,
        swiglu_limit=experts.clamp_value,
        **settings.window_to_hf(config, always_sized=True),
    )


# Hugging Face interleaves the channels of gate and up, and stores weights as ``[E, in, out]``, not
# ``[E, out, in]``.


def _join_gate_and_up(tensors: Sequence[Tensor], config: Config) -> Tensor:
    """Separate gate and up: a bias ``[E, 2 f]`` -> ``[E, 2, f]``, a weight to ``[E, 2, f, h]``."""
    (tensor,) = tensors
    by_row = tensor.transpose(1, 2) if tensor.dim() == 3 else tensor
    return by_row.unflatten(1, (-1, 2)).transpose(1, 2)


def _split_gate_and_up(tensor: Tensor, config: Config) -> Sequence[Tensor]:
    by_row = tensor.transpose(1, 2).flatten(1, 2)
    return (by_row.transpose(1, 2) if by_row.dim() == 3 else by_row,)


def _transpose(tensors: Sequence[Tensor], config: Config) -> Tensor:
    (tensor,) = tensors
    return tensor.transpose(1, 2)


def _transpose_back(tensor: Tensor, config: Config) -> Sequence[Tensor]:
    return (tensor.transpose(1, 2),)


_FC1, _FC2, _EXPERTS = "mlp.experts.linear_fc1", "mlp.experts.linear_fc2", "mlp.experts"
_GATE_AND_UP = _join_gate_and_up, _split_gate_and_up
_MLP = (
    Rule("mlp.router.weight", ("mlp.router.weight",)),
    Rule("mlp.router.bias", ("mlp.router.bias",)),
    Rule(f"{_FC1}.weight", (f"{_EXPERTS}.gate_up_proj",), *_GATE_AND_UP),
    Rule(f"{_FC1}.bias", (f"{_EXPERTS}.gate_up_proj_bias",), *_GATE_AND_UP),
    Rule(f"{_FC2}.weight", (f"{_EXPERTS}.down_proj",), _transpose, _transpose_back),
    Rule(f"{_FC2}.bias", (f"{_EXPERTS}.down_proj_bias",)),
)
_ATTENTION = (
    base.QKV,
    base.QKV_BIAS,
    base.PROJECTION,
    Rule("self_attention.linear_proj.bias", ("self_attn.o_proj.bias",)),
    Rule(SINKS, ("self_attn.sinks",), is_by_group=True),
)


def _are_supported(experts: ExpertShape | None) -> bool:
    if experts is None or experts.shared_width is not None or experts.clamp_value is None:
        return False
    return experts.renormalized and experts.has_biases and experts.router_bias


GPT_OSS = ModelFamily(
    name="gpt_oss",
    to_nemo=_to_nemo,
    to_hf=_to_hf,
    layer=base.layer_rules_with(attention=_ATTENTION, mlp=_MLP, mlp_norm=base.EXPERTS_NORM),
    made_of={
        "activation": expert_keys.QUICK_GEGLU,
        "qkv_bias": True,
        "proj_bias": True,
        "attention_sinks": True,
        **base.ANY_WINDOW,
        "experts": _are_supported,
    },
)
