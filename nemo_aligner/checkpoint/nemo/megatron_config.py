"""Settings of NeMo 2, Megatron-Bridge and Megatron-LM, translated to ``model_config.yaml``.

Checked against public sources: NeMo's ``LlamaConfig`` classes and its YAML writer, a
``run_config.yaml`` that Megatron-Bridge printed, megatron-core 0.16's ``TransformerConfig``, and
Megatron-LM's ``core_transformer_config_from_args``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from nemo_aligner.utils.errors import CheckpointError, shown

Config = Mapping[str, Any]

_NORMS = {"RMSNorm": "rmsnorm", "LayerNorm": "layernorm"}
# (gated, name of the activation function) -> NeMo's name for both. NeMo's openai_gelu and
# megatron-core's fast_gelu are the tanh approximation, as in Gemma; torch's gelu is exact.
_ACTIVATIONS = {
    (True, "silu"): "fast-swiglu",
    (True, "openai_gelu"): "geglu",
    (True, "fast_gelu"): "geglu",
    (False, "squared_relu"): "squared-relu",
}
# Settings that change what a model computes, and the values supported for each.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "activation_func_clamp_value": (None,),
    "apply_residual_connection_post_layernorm": (False, None),
    "attention_output_gate": (False, None),
    "enable_hyper_connections": (False, None),
    "experimental_attention_variant": (None,),
    "fp32_residual_connection": (False, None),
    "glu_linear_offset": (0.0, None),
    "head_wise_attn_gate": (False, None),
    "heterogeneous_block_specs": (False, None),
    "is_hybrid_model": (False, None),
    "linear_attention_freq": (None,),
    "mtp_num_layers": (None, 0),
    "multi_latent_attention": (False, None),
    "num_experts": (None, 0),
    "num_moe_experts": (None, 0),
    "qk_l2_norm": (False, None),
    "rotary_base_per_layer": (None,),
    "rotary_interleaved": (False, None),
    "softmax_scale": (None,),
    "softmax_type": ("vanilla", None),
    "use_mup": (False, None),
}
# Archives of this package have mixtures, whose tensors have other shapes than Megatron's.
_OF_ARCHIVES = ("num_moe_experts",)
# Gemma 2's settings. NeMo applies the window in the layers where Google's model has none, so it is
# not read. final_logit_softcapping is not listed, because it changes no hidden state.
_NEUTRAL_IN_ATTENTION: dict[str, tuple[Any, ...]] = {
    "attn_logit_softcapping": (None, 0),
    "query_pre_attn_scalar": (None,),
}
# What is read beside NeMo 1's other settings, but not in its section for those of megatron-core.
_NOT_IN_SECTION: dict[str, tuple[Any, ...]] = {
    "no_rope_freq": (None,),
    "window_attn_skip_freq": (None,),
}
_CUSTOMIZATION = "mcore_customization_config"
_SAME = (
    "num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads", "num_query_groups",
    "kv_channels", "layernorm_epsilon", "make_vocab_size_divisible_by", "position_embedding_type",
    "rotary_base", "seq_len_interpolation_factor", "layernorm_zero_centered_gamma",
    "share_embeddings_and_output_weights", "window_size", "vocab_size", "padded_vocab_size",
    "window_attn_skip_freq", "no_rope_freq", "yarn_rotary_scaling_factor",
    "yarn_original_max_position_embeddings", "yarn_beta_fast", "yarn_beta_slow", "yarn_mscale",
    "yarn_mscale_all_dim", "yarn_correction_range_round_to_int",
)  # fmt: skip
_ROPE_KEYS = ("scale_factor", "low_freq_factor", "high_freq_factor", "old_context_len")


def from_transformer_config(model: Config, where: str) -> dict[str, Any]:
    """Translate fields of megatron-core's ``TransformerConfig`` and ``GPTModel``.

    A class or function is a mapping with ``_target_``, whose last name is compared.

    Raises:
        CheckpointError: a setting is missing, or has an unsupported value.
    """
    by_class = _gemma(model, where)
    _check_neutral({**_NEUTRAL, **_NEUTRAL_IN_ATTENTION}, model, where)
    gated, function = bool(model.get("gated_linear_unit")), _name(model.get("activation_func"))
    config = {
        "position_embedding_type": "learned_absolute",  # GPTModel's default
        **{key: model[key] for key in _SAME if model.get(key) is not None},
        "encoder_seq_length": model.get("seq_length"),
        "max_position_embeddings": model.get("max_position_embeddings", model.get("seq_length")),
        "normalization": _one_of(_NORMS, model.get("normalization"), "normalization", where),
        "activation": _one_of(_ACTIVATIONS, (gated, function), "activation_func", where),
        "bias": bool(model.get("add_bias_linear", True)),
        "qkv_bias": bool(model.get("add_qkv_bias", False)),
        "qk_layernorm": bool(model.get("qk_layernorm", False)),
        "rotary_percentage": model.get("rotary_percent", 1.0),
        "openai_gelu": function in ("openai_gelu", "fast_gelu"),
    }
    if config["normalization"] == "layernorm" and config.get("layernorm_zero_centered_gamma"):
        config["normalization"] = "layernorm1p"
        del config["layernorm_zero_centered_gamma"]
    return {**config, **_rope(model), **by_class}


def from_arguments(arguments: Config, where: str) -> dict[str, Any]:
    """Translate the arguments of Megatron-LM's training script, from ``common.pt``."""
    model = dict(arguments)
    model["layernorm_epsilon"] = arguments.get("norm_epsilon", arguments.get("layernorm_epsilon"))
    model["layernorm_zero_centered_gamma"] = bool(arguments.get("apply_layernorm_1p"))
    model["share_embeddings_and_output_weights"] = not arguments.get(
        "untie_embeddings_and_output_weights", False
    )
    model["gated_linear_unit"] = bool(arguments.get("swiglu"))
    model["activation_func"] = "silu" if arguments.get("swiglu") else "gelu"
    if arguments.get("squared_relu"):
        model["activation_func"] = "squared_relu"
    if not arguments.get("group_query_attention"):
        model["num_query_groups"] = None
    model["seq_len_interpolation_factor"] = arguments.get("rotary_seq_len_interpolation_factor")
    model["rope_scaling"] = arguments.get("use_rope_scaling")
    if arguments.get("quick_geglu") or arguments.get("openai_gelu"):
        raise CheckpointError(f"{where}: args: quick_geglu and openai_gelu are not supported")
    return from_transformer_config(model, f"{where}: args")


def check_nemo1(config: Config, where: str) -> None:
    """Refuse settings that NeMo 1 passes on to megatron-core and that this package ignores.

    NeMo 1 sets every field of ``TransformerConfig`` that its settings name, then those of the
    section ``mcore_customization_config``.

    Raises:
        CheckpointError: a setting has an unsupported value.
    """
    read = {key: values for key, values in _NEUTRAL.items() if key not in _OF_ARCHIVES}
    _check_neutral(read, config, where)
    section = config.get(_CUSTOMIZATION) or {}
    where = f"{where}: {_CUSTOMIZATION}"
    if not isinstance(section, Mapping):
        raise CheckpointError(f"{where}: got {section!r}, wanted a mapping")
    _check_neutral({**_NEUTRAL, **_NEUTRAL_IN_ATTENTION, **_NOT_IN_SECTION}, section, where)


def _check_neutral(neutral: Mapping[str, tuple[Any, ...]], model: Config, where: str) -> None:
    for key, values in neutral.items():
        if key in model and model[key] not in values:
            raise CheckpointError(f"{where}: {key}: got {shown(model[key])}, wanted {values[0]!r}")


def _name(value: Any) -> Any:
    if isinstance(value, Mapping):
        value = value.get("_target_")
    return value.rpartition(".")[2] if isinstance(value, str) else value


def _one_of(names: Mapping[Any, str], value: Any, key: str, where: str) -> str:
    try:
        return names[value]
    except (KeyError, TypeError):
        wanted = ", ".join(map(str, names))
        raise CheckpointError(
            f"{where}: {key}: got {shown(value)}, wanted one of {wanted}"
        ) from None


def _rope(model: Config) -> dict[str, Any]:
    """Translate Llama 3's rope scaling: NeMo's and Bridge's four fields, or megatron-core's two."""
    if model.get("scale_factor") is not None:
        given = {key: model[key] for key in _ROPE_KEYS if model.get(key) is not None}
        return {"scale_positional_embedding": True, **given}
    if model.get("rope_scaling"):
        factor = model.get("rope_scaling_factor", 8.0)
        return {"scale_positional_embedding": True, "scale_factor": factor}
    return {"scale_positional_embedding": False}


def _gemma(model: Config, where: str) -> dict[str, Any]:
    """Settings that NeMo and Bridge imply by a Gemma's class rather than by a field."""
    kind = str(_name(model.get("_target_")) or "")
    if "Gemma" not in kind:
        return {}
    if not kind.startswith(("GemmaConfig", "CodeGemma", "GemmaModelProvider")):
        raise CheckpointError(f"{where}: _target_: got {shown(kind)}, which is not supported")
    return {"apply_embedding_scaling": True}
