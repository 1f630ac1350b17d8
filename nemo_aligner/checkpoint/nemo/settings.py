"""Translate settings of NeMo 2, Megatron-Bridge and Megatron-LM to NeMo 1's ``model_config.yaml``.

The sources are NeMo's LlamaConfig classes and its YAML writer, a run_config.yaml that
Megatron-Bridge printed, megatron-core 0.16's TransformerConfig, and Megatron-LM's
core_transformer_config_from_args.
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
# Settings that change what a model computes and that this package does not implement, with the
# values that switch each of them off.
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
    "hybrid_override_pattern": (None,),
}
# Settings that are supported only in archives of this package. In checkpoints of Megatron, the
# tensors of mixture-of-experts (MoE) layers, of linear and of latent attention have other shapes.
_SUPPORTED_IN_ARCHIVES = (
    "num_moe_experts",
    "attention_output_gate",
    "experimental_attention_variant",
    "linear_attention_freq",
    "multi_latent_attention",
    "activation_func_clamp_value",
    "softmax_type",
    "hybrid_override_pattern",
)
# Gemma 2's settings, with the values that switch them off. NeMo applies the sliding window in the
# layers in which Google's model has none, so Gemma 2 is not supported. final_logit_softcapping is
# not listed, because it changes no hidden state.
_NEUTRAL_IN_ATTENTION: dict[str, tuple[Any, ...]] = {
    "attn_logit_softcapping": (None, 0),
    "query_pre_attn_scalar": (None,),
}
# Keys that are supported at the top level of NeMo 1's config, but not in its section
# ``mcore_customization_config``, with the values that switch each of them off.
_UNSUPPORTED_IN_SECTION: dict[str, tuple[Any, ...]] = {
    "no_rope_freq": (None,),
    "window_attn_skip_freq": (None,),
}
_CUSTOMIZATION = "mcore_customization_config"
# Settings with the same name and meaning in NeMo 1 and in megatron-core.
_SAME_NAMES = (
    "num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads", "num_query_groups",
    "kv_channels", "layernorm_epsilon", "make_vocab_size_divisible_by", "position_embedding_type",
    "rotary_base", "seq_len_interpolation_factor", "layernorm_zero_centered_gamma",
    "share_embeddings_and_output_weights", "window_size", "vocab_size", "padded_vocab_size",
    "window_attn_skip_freq", "no_rope_freq", "yarn_rotary_scaling_factor",
    "yarn_original_max_position_embeddings", "yarn_beta_fast", "yarn_beta_slow", "yarn_mscale",
    "yarn_mscale_all_dim", "yarn_correction_range_round_to_int",
)  # fmt: skip
_ROPE_KEYS = ("scale_factor", "low_freq_factor", "high_freq_factor", "old_context_len")


def from_transformer_config(model: Config, location: str) -> dict[str, Any]:
    """Translate fields of megatron-core's ``TransformerConfig`` and ``GPTModel`` to NeMo 1's keys.

    If a field's value is a class or a function, the YAML has a mapping with its dotted name under
    ``_target_``, of which only the last part is used, e.g. ``silu``.

    Args:
        location: file and section of the settings, for errors.

    Raises:
        CheckpointError: a setting has a value that is not supported.
    """
    class_settings = _read_gemma_settings(model, location)
    _check_neutral({**_NEUTRAL, **_NEUTRAL_IN_ATTENTION}, model, location)
    # megatron-core's linear layers have biases by default, but they are supported only in archives
    # of this package.
    biases = {"add_bias_linear": model.get("add_bias_linear", True)}
    _check_neutral({"add_bias_linear": (False,)}, biases, location)
    gated = bool(model.get("gated_linear_unit"))
    function = _last_name(model.get("activation_func"))
    config = {
        "position_embedding_type": "learned_absolute",  # GPTModel's default, if the key is missing
        **{key: model[key] for key in _SAME_NAMES if model.get(key) is not None},
        "encoder_seq_length": model.get("seq_length"),
        "max_position_embeddings": model.get("max_position_embeddings", model.get("seq_length")),
        "normalization": _translate(_NORMS, model.get("normalization"), "normalization", location),
        "activation": _translate(_ACTIVATIONS, (gated, function), "activation_func", location),
        "bias": False,
        "qkv_bias": bool(model.get("add_qkv_bias", False)),
        "qk_layernorm": bool(model.get("qk_layernorm", False)),
        "rotary_percentage": model.get("rotary_percent", 1.0),
        "openai_gelu": function in ("openai_gelu", "fast_gelu"),
    }
    if config["normalization"] == "layernorm" and config.get("layernorm_zero_centered_gamma"):
        config["normalization"] = "layernorm1p"
        del config["layernorm_zero_centered_gamma"]
    return {**config, **_translate_rope(model), **class_settings}


def from_arguments(arguments: Config, location: str) -> dict[str, Any]:
    """Translate the arguments of Megatron-LM's training script, which ``common.pt`` stores.

    Raises:
        CheckpointError: an argument has an unsupported value; the message begins with ``location``.
    """
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
    # Ignore --num-query-groups (default 1) unless --group-query-attention is set, as Megatron-LM
    # does.
    if not arguments.get("group_query_attention"):
        model["num_query_groups"] = None
    model["seq_len_interpolation_factor"] = arguments.get("rotary_seq_len_interpolation_factor")
    model["rope_scaling"] = arguments.get("use_rope_scaling")
    if arguments.get("quick_geglu") or arguments.get("openai_gelu"):
        raise CheckpointError(
            f"{location}: args: quick_geglu or openai_gelu is set, an activation that is not "
            "supported"
        )
    return from_transformer_config(model, f"{location}: args")


def check_nemo1(config: Config, location: str) -> None:
    """Raise CheckpointError for settings of NeMo 1 that this package would silently ignore.

    NeMo 1 passes on to megatron-core every field of ``TransformerConfig`` that its settings name,
    and every entry of the section ``mcore_customization_config``.
    """
    unsupported = {
        key: values for key, values in _NEUTRAL.items() if key not in _SUPPORTED_IN_ARCHIVES
    }
    _check_neutral(unsupported, config, location)
    section = config.get(_CUSTOMIZATION) or {}
    location = f"{location}: {_CUSTOMIZATION}"
    if not isinstance(section, Mapping):
        raise CheckpointError(f"{location}: got {section!r}, wanted a mapping")
    unsupported = {**_NEUTRAL, **_NEUTRAL_IN_ATTENTION, **_UNSUPPORTED_IN_SECTION}
    _check_neutral(unsupported, section, location)


def _check_neutral(neutral: Mapping[str, tuple[Any, ...]], model: Config, location: str) -> None:
    """Raise CheckpointError if a setting that this package does not implement is in use.

    Args:
        neutral: for each such setting the values that switch it off.
        model: the checkpoint's settings. A setting that is absent counts as off.
    """
    for key, values in neutral.items():
        if key in model and model[key] not in values:
            raise CheckpointError(
                f"{location}: {key}: got {shown(model[key])}, which is not supported; wanted "
                f"{values[0]!r}"
            )


def _last_name(value: Any) -> Any:
    """Return the last part of a dotted name: ``silu`` of ``torch.nn.functional.silu``.

    If ``value`` is a mapping, its ``_target_`` has the name.
    """
    if isinstance(value, Mapping):
        value = value.get("_target_")
    return value.rpartition(".")[2] if isinstance(value, str) else value


def _translate(names: Mapping[Any, str], value: Any, key: str, location: str) -> str:
    """Translate megatron-core's value of the setting ``key`` to NeMo's name for it.

    Raises:
        CheckpointError: ``names`` does not have the value.
    """
    try:
        return names[value]
    except (KeyError, TypeError):
        supported = ", ".join(map(str, names))
        raise CheckpointError(
            f"{location}: {key}: got {shown(value)}, wanted one of {supported}"
        ) from None


def _translate_rope(model: Config) -> dict[str, Any]:
    """Translate Llama 3's RoPE scaling to NeMo 1's keys.

    NeMo 2 and Megatron-Bridge have four fields for it, Megatron-LM has two.
    """
    if model.get("scale_factor") is not None:
        fields = {key: model[key] for key in _ROPE_KEYS if model.get(key) is not None}
        return {"scale_positional_embedding": True, **fields}
    if model.get("rope_scaling"):
        factor = model.get("rope_scaling_factor", 8.0)
        return {"scale_positional_embedding": True, "scale_factor": factor}
    return {"scale_positional_embedding": False}


def _read_gemma_settings(model: Config, location: str) -> dict[str, Any]:
    """Return the settings that the class of a Gemma model in NeMo 2 or Megatron-Bridge implies.

    These formats have no fields for the settings. The result is empty for other models.
    """
    class_name = str(_last_name(model.get("_target_")) or "")
    if "Gemma" not in class_name:
        return {}
    if not class_name.startswith(("GemmaConfig", "CodeGemma", "GemmaModelProvider")):
        raise CheckpointError(
            f"{location}: _target_: got {shown(class_name)}, which is not supported"
        )
    return {"apply_embedding_scaling": True}
