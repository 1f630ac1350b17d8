"""Phi-3, Phi-3.5, Phi-4 and Phi-4-mini: Llama with fused weights, some of it with a window."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from nemo_aligner.checkpoint.hf.families.base import (
    ANY,
    DOWN,
    FUSED_GATED,
    PROJECTION,
    ModelFamily,
    fused_qkv_rule,
    layer_rules_with,
)
from nemo_aligner.checkpoint.hf.families.settings import (
    Config,
    HfSettings,
    decoder_to_hf,
    decoder_to_nemo,
    window_everywhere,
)
from nemo_aligner.models.shape import ModelShape

# Of LongRoPE, in the first releases.
_OLDER_NAMES = ("su", "yarn")


def _to_nemo(config: Config) -> dict[str, Any]:
    read = HfSettings(config)
    size = read.window(missing=None)
    if size is not None and size >= read.count("max_position_embeddings"):
        size = None  # it changes nothing
    rope = config.get("rope_scaling") or config.get("rope_parameters")
    if isinstance(rope, Mapping) and (rope.get("rope_type") or rope.get("type")) in _OLDER_NAMES:
        config = {**config, "rope_scaling": {**rope, "rope_type": "longrope"}}
    return decoder_to_nemo(
        {"original_max_position_embeddings": 4096, **config},
        name="phi3",
        epsilon=1e-5,
        rotated=1.0,
        **window_everywhere(size),
    )


def _to_hf(config: Config) -> dict[str, Any]:
    shape = ModelShape.from_config(config)
    # It overrides the one in rope_parameters.
    of_rope = shape.longrope and {
        "original_max_position_embeddings": shape.longrope.old_context_len
    }
    return decoder_to_hf(
        config,
        "phi3",
        **(of_rope or {}),
        partial_rotary_factor=shape.rotary_percentage,
        sliding_window=shape.window_size,
    )


PHI3 = ModelFamily(
    name="phi3",
    to_nemo=_to_nemo,
    to_hf=_to_hf,
    layer=layer_rules_with(
        attention=(
            fused_qkv_rule("self_attention.linear_qkv.weight", "self_attn.qkv_proj.weight"),
            PROJECTION,
        ),
        mlp=(FUSED_GATED, DOWN),
    ),
    made_of={"window_size": ANY, "rotary_percentage": ANY},
)
