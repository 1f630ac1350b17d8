"""Hybrid models, whose layers have either a mixer or an MLP, read from ``model_config.yaml``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from nemo_aligner.utils.errors import CheckpointError, shown

# Megatron's key for the kinds of all layers, with a letter for each layer, as in "M-M*-ME".
HYBRID_PATTERN = "hybrid_override_pattern"
MAMBA, ATTENTION, MLP, EXPERTS = "M", "*", "-", "E"
MIXERS = (MAMBA, ATTENTION)
# Other keys that make layers differ, or that need layers with both a mixer and an MLP, each with
# the values that it may have in a hybrid model.
_OTHER_LAYERS: dict[str, tuple[Any, ...]] = {
    "experimental_attention_variant": (None,),
    "linear_attention_freq": (None,),
    "moe_layer_freq": (None,),
    "multi_latent_attention": (None, False),
    "bias": (None, False),
    "parallel_residual": (None, False),
    "pre_layernorms": (None, True),
    "post_layernorms": (None, False),
    "normalization": (None, "rmsnorm"),
}


def read_hybrid_pattern(config: Mapping[str, Any]) -> str | None:
    """Read the pattern of a hybrid model: for each layer MAMBA, ATTENTION, MLP or EXPERTS.

    Returns:
        A string with one letter for each layer; None if the model is not hybrid.

    Raises:
        CheckpointError: the pattern has another letter or length, has EXPERTS in a model without
            experts or lacks them in a model with experts, or is combined with a setting that hybrid
            models do not support.
    """
    pattern = config.get(HYBRID_PATTERN)
    if pattern is None:
        return None
    location, layers = f"model_config.yaml: {HYBRID_PATTERN}", config.get("num_layers")
    kinds = (MAMBA, ATTENTION, MLP, EXPERTS)
    if not isinstance(pattern, str) or len(pattern) != layers or set(pattern) - set(kinds):
        raise CheckpointError(
            f"{location}: got {shown(pattern)}, wanted one of {' '.join(kinds)} for each of the "
            f"{layers} layers"
        )
    if (EXPERTS in pattern) != bool(config.get("num_moe_experts")):
        raise CheckpointError(
            f"{location}: got {shown(pattern)} with num_moe_experts="
            f"{shown(config.get('num_moe_experts'))}, wanted experts exactly if a layer is "
            f"{EXPERTS}"
        )
    for key, values in _OTHER_LAYERS.items():
        if config.get(key) not in values:
            raise CheckpointError(
                f"{location}: got {shown(pattern)} together with {key}={shown(config[key])}, which "
                "is not supported"
            )
    return pattern
