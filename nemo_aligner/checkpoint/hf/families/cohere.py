"""Cohere (Command R) and Cohere 2 (Command R7B, Command A): one norm for attention and MLP.

Attention and MLP are in parallel and read the same normed input. The norms are LayerNorms without a
bias, and RoPE rotates pairs of neighbouring channels, whose products are computed in fp32.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from nemo_aligner.checkpoint.hf.families import base, settings
from nemo_aligner.checkpoint.hf.families.base import ModelFamily
from nemo_aligner.checkpoint.hf.families.settings import Config, HfSettings
from nemo_aligner.models.shapes.decoder import ModelShape
from nemo_aligner.models.shapes.rope import FP32_PRODUCTS
from nemo_aligner.utils.errors import CheckpointError


def _to_nemo(config: Config, name: str, **family: Any) -> dict[str, Any]:
    return settings.decoder_to_nemo(
        config,
        name=name,
        tied=True,
        normalization="layernorm_without_bias",
        layernorm_epsilon=HfSettings(config).number("layer_norm_eps", 1e-5),
        parallel_residual=True,
        one_norm_per_layer=True,
        rope_fp32=FP32_PRODUCTS,
        **family,
    )


def _to_hf(config: Config, model_type: str, **family: Any) -> dict[str, Any]:
    decoder = settings.decoder_to_hf(config, model_type, attention_bias=False, **family)
    decoder["layer_norm_eps"] = decoder.pop("rms_norm_eps")
    shape = ModelShape.from_config(config)
    if shape.kv_channels * shape.num_attention_heads != shape.hidden_size:
        raise CheckpointError(
            f"model_config.yaml: kv_channels: got {shape.kv_channels}, wanted "
            f"{shape.hidden_size // shape.num_attention_heads} (hidden_size / heads), "
            "the size of a head in a Hugging Face Cohere"
        )
    return decoder


# Cohere: no windows.


def _cohere_to_nemo(config: Config) -> dict[str, Any]:
    HfSettings(config).only("use_qk_norm", False, None)
    # transformers' class ignores head_dim, so a head has hidden_size / heads channels.
    return _to_nemo({**config, "head_dim": None}, "cohere", base=500000.0)


def _cohere_to_hf(config: Config) -> dict[str, Any]:
    return _to_hf(config, "cohere", use_qk_norm=False)


COHERE = ModelFamily(
    name="cohere",
    to_nemo=_cohere_to_nemo,
    to_hf=_cohere_to_hf,
    layer=(
        base.norm_rule(base.ATTENTION_NORM, "input_layernorm.weight"),
        base.interleaved(base.QKV),
        base.PROJECTION,
        base.GATED,
        base.DOWN,
    ),
    made_of={
        "normalization": "layernorm_without_bias",
        "parallel_residual": True,
        "one_norm_per_layer": True,
        "rope_fp32": base.ANY,
    },
)

# Cohere 2: windows in 3 of 4 layers, and RoPE in these layers only.


def _cohere2_to_nemo(config: Config) -> dict[str, Any]:
    reader = HfSettings(config)
    kinds = config.get("layer_types") or settings.every_nth_layer(
        reader.layers(), reader.count("sliding_window_pattern", 4)
    )
    window = settings.window_to_nemo({**config, "layer_types": kinds}, reader.window(), kinds)
    without = [int(kind == settings.FULL) for kind in kinds]
    rotating = {"no_rope_freq": settings.frequency(without, 1)} if any(without) else {}
    return _to_nemo({**config, "head_dim": None}, "cohere2", **window, **rotating)


def _cohere2_to_hf(config: Config) -> dict[str, Any]:
    shape = ModelShape.from_config(config)
    for layer, kind in enumerate(settings.layer_types(config), 1):
        if shape.rotates(layer) != (kind == settings.SLIDING):
            raise CheckpointError(
                f"model_config.yaml: no_rope_freq: got {config.get('no_rope_freq')!r}, but in a "
                "Cohere 2 exactly the layers without a window have no RoPE, so the model cannot be "
                "exported"
            )
    return _to_hf(config, "cohere2", **settings.window_to_hf(config, always_sized=True))


COHERE2 = replace(
    COHERE,
    name="cohere2",
    to_nemo=_cohere2_to_nemo,
    to_hf=_cohere2_to_hf,
    made_of={**COHERE.made_of, **base.ANY_WINDOW, "no_rope_freq": base.ANY},
)
