"""Modules of a decoder layer, read from ``model_config.yaml``; unsupported values are errors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from nemo_aligner.config.common import (
    MAX_COUNT,
    count_of_config,
    number_of_config,
    optional_number_of_config,
    read_count,
)
from nemo_aligner.models.shapes.experts import (
    EXPERT_COUNT,
    EXPERT_FREQUENCY,
    QUICK_GEGLU,
    read_expert_layers,
    read_experts,
)
from nemo_aligner.models.shapes.frequency import read_frequency
from nemo_aligner.models.shapes.linear_attention import ATTENTION_VARIANT, read_linear_attention
from nemo_aligner.models.shapes.rope import FP32_PRODUCTS, FP32_TABLES, ROPE_FP32
from nemo_aligner.utils.errors import CheckpointError, shown

if TYPE_CHECKING:
    from nemo_aligner.models.shapes.decoder import ModelShape

# Values of megatron-core's key ``softmax_type`` without and with attention sinks.
NO_SINKS, LEARNED_SINKS = "vanilla", "learnable"
# The most channels of a head that FlashAttention 2 supports.
LARGEST_FLASH_HEAD = 256


def widest_head(shape: ModelShape) -> int:
    """Return the channels of the widest head in any layer."""
    layers = range(1, shape.num_layers + 1)
    return max(shape.of_layer(number).kv_channels for number in layers)


def why_no_flash_attention(channels: int) -> str | None:
    """Return why FlashAttention 2 does not support heads of so many channels; None if it does."""
    if channels <= LARGEST_FLASH_HEAD and channels % 8 == 0:
        return None
    return f"heads have {channels} channels, wanted a multiple of 8 up to {LARGEST_FLASH_HEAD}"


def copies_keys_without_flash(shape: ModelShape) -> bool:
    """Return whether attention without FlashAttention copies keys and values for every query head.

    It does if query heads share them. Scores with a soft cap or sinks are computed by other code,
    without copies.
    """
    is_grouped = shape.num_query_groups < shape.num_attention_heads
    has_other_code = shape.attn_logit_softcapping is not None or shape.attention_sinks
    return is_grouped and not has_other_code


def read_window(value: Any) -> int | None:
    """Read a window: a number of keys, or NeMo's pair (keys before a token, keys after it).

    Raises:
        CheckpointError: the value is neither of them.
    """
    size = value
    if isinstance(value, list | tuple) and len(value) == 2 and value[1] == 0:
        keys_before = value[0]
        size = keys_before + 1 if type(keys_before) is int else keys_before
        if keys_before == -1:
            size = None
    if size is None or (type(size) is int and 0 < size <= MAX_COUNT):
        return size
    raise CheckpointError(
        f"model_config.yaml: window_size: got {shown(value)}, wanted a number of keys above 0, or "
        "NeMo's pair [keys before the token, 0]"
    )


def read_window_pattern(config: Mapping[str, Any], window: int | None) -> dict[str, Any]:
    """Read which layers have the window, from ``window_pattern`` or ``window_attn_skip_freq``.

    Raises:
        CheckpointError: the config has both keys.
    """
    pattern, key = config.get("window_pattern") or "all", "window_attn_skip_freq"
    skipped = read_frequency(config, key)
    if pattern != "all" and skipped is not None:
        raise CheckpointError(
            f"model_config.yaml: {key}: got {shown(config[key])} and window_pattern={pattern}, "
            "wanted only one of the two keys"
        )
    if window is None:
        pattern, skipped = "all", None
    return {"window_pattern": pattern, key: skipped}


def read_layer(config: Mapping[str, Any]) -> dict[str, Any]:
    """Read the fields of ``ModelShape`` that describe a layer's modules, by field name."""
    normalization = config.get("normalization", "rmsnorm")
    if config.get("proj_bias") and config.get("post_layernorms"):
        raise CheckpointError(
            "model_config.yaml: proj_bias: got true together with post_layernorms=true, which is "
            "not supported. Set one of them to false."
        )
    window = read_window(config.get("window_size"))
    return {
        "activation": _read_activation(config),
        "normalization": normalization,
        "layernorm_zero_centered_gamma": normalization == "layernorm1p"
        or bool(config.get("layernorm_zero_centered_gamma")),
        # In NeMo, biases of all linear layers include those of queries, keys and values.
        "qkv_bias": bool(config.get("qkv_bias") or config.get("bias")),
        "qk_layernorm": bool(config.get("qk_layernorm")),
        "qk_layernorm_across_heads": bool(config.get("qk_layernorm_across_heads")),
        "zero_query_groups": read_zero_groups(config),
        "pre_layernorms": config.get("pre_layernorms") is not False,
        "post_layernorms": bool(config.get("post_layernorms")),
        "apply_embedding_scaling": bool(config.get("apply_embedding_scaling")),
        "embedding_multiplier": number_of_config(config, "embedding_multiplier", 1.0),
        "residual_multiplier": number_of_config(config, "residual_multiplier", 1.0),
        "window_size": window,
        **read_window_pattern(config, window),
        "attn_logit_softcapping": optional_number_of_config(config, "attn_logit_softcapping"),
        "query_pre_attn_scalar": optional_number_of_config(config, "query_pre_attn_scalar"),
        "attention_output_gate": bool(config.get("attention_output_gate")),
        "attention_sinks": config.get("softmax_type") == LEARNED_SINKS,
        "proj_bias": bool(config.get("proj_bias")),
        "experts": read_experts(config),
        **read_linear_attention(config),
        "qk_norm_after_rope": bool(config.get("qk_norm_after_rope")),
        "linear_bias": bool(config.get("bias")),
        "parallel_residual": bool(config.get("parallel_residual")),
        "one_norm_per_layer": bool(config.get("one_norm_per_layer")),
        EXPERT_FREQUENCY: read_expert_layers(config),
    }


def _read_activation(config: Mapping[str, Any]) -> str:
    """Read the MLP's activation; NeMo's key ``openai_gelu`` makes a GELU the tanh approximation."""
    activation = config.get("activation", "swiglu").removeprefix("fast-")
    return "gelu-tanh" if activation == "gelu" and config.get("openai_gelu") else activation


def read_zero_groups(config: Mapping[str, Any]) -> int:
    """Read how many query groups of zeros were added for tensor parallelism.

    Raises:
        CheckpointError: the number is below 0, or not below the number of query groups.
    """
    value = config.get("zero_query_groups") or 0
    largest = count_of_config(config, "num_query_groups", config["num_attention_heads"]) - 1
    expected = f"a whole number from 0 to {largest}, fewer than the query groups"
    return read_count(value, "model_config.yaml: zero_query_groups", expected, 0, largest)


# Supported values of each key; the first one is the default where the key is missing.
_SUPPORTED = {
    "normalization": ("rmsnorm", "layernorm1p", "layernorm", "layernorm_without_bias"),
    "activation": (
        "fast-swiglu",
        "swiglu",
        "geglu",
        "fast-geglu",
        "squared-relu",
        "gelu",
        "gelu-tanh",
        "xielu",
        QUICK_GEGLU,
    ),
    "softmax_type": (NO_SINKS, LEARNED_SINKS, None),
    "position_embedding_type": ("rope", "yarn", "longrope"),
    ROPE_FP32: (None, FP32_PRODUCTS, FP32_TABLES),
    "bias": (False, True, None),
    **dict.fromkeys(
        (
            "qkv_bias",
            "proj_bias",
            "qk_layernorm",
            "qk_layernorm_across_heads",
            "attention_output_gate",
            "post_layernorms",
            "apply_embedding_scaling",
            "layernorm_zero_centered_gamma",
            "scale_positional_embedding",
            "share_embeddings_and_output_weights",
            "qk_norm_after_rope",
            "parallel_residual",
            "one_norm_per_layer",
        ),
        (False, True, None),
    ),
    "pre_layernorms": (True, False, None),
    "transformer_block_type": ("pre_ln",),
    "rotary_interleaved": (False, None),
    "window_pattern": ("all", "alternate", None),
    "moe_num_experts": (None, 0),
}


_REQUIRED = ("num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads", "vocab_size")


def check_supported(config: Mapping[str, Any]) -> None:
    """Raise CheckpointError for missing keys, or the first key whose value is not supported."""
    missing = [key for key in _REQUIRED if config.get(key) is None]
    if missing:
        raise CheckpointError(f"model_config.yaml: it lacks {', '.join(missing)}")
    for key, values in _SUPPORTED.items():
        value = config.get(key, values[0])
        if value not in values:
            expected = " or ".join(str(item) for item in values)
            raise CheckpointError(
                f"model_config.yaml: {key}: got {shown(value)}, wanted {expected}"
            )
    _check_combinations(config)


# Keys that are not supported in a model with experts or linear attention, which ``_OTHER_KINDS``
# switch on.
_OF_DENSE_LAYERS = ("bias", "parallel_residual")
_OTHER_KINDS = (EXPERT_COUNT, ATTENTION_VARIANT)


def _check_combinations(config: Mapping[str, Any]) -> None:
    """Raise CheckpointError for two keys whose layers cannot be combined."""
    pairs = [(first, second) for first in _OF_DENSE_LAYERS for second in _OTHER_KINDS]
    for first, second in (*pairs, ("parallel_residual", "post_layernorms")):
        if config.get(first) and config.get(second):
            raise CheckpointError(
                f"model_config.yaml: {first}: got {shown(config[first])} together with {second}="
                f"{shown(config[second])}, which is not supported"
            )
    if config.get("one_norm_per_layer") and not config.get("parallel_residual"):
        raise CheckpointError(
            "model_config.yaml: one_norm_per_layer: got True without parallel_residual, which is "
            "not supported"
        )
    unsupported = [key for key in ("post_layernorms", "qk_layernorm") if config.get(key)]
    if config.get("normalization") == "layernorm_without_bias" and unsupported:
        raise CheckpointError(
            "model_config.yaml: normalization: got layernorm_without_bias together with "
            f"{unsupported[0]}=True, which is not supported"
        )
    if config.get("parallel_residual") and config.get("pre_layernorms") is False:
        raise CheckpointError(
            "model_config.yaml: parallel_residual: got True together with pre_layernorms=False, "
            "which is not supported"
        )
