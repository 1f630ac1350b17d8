"""OLMo 2, OLMo 3 and EXAONE 4, whose norms are after attention and MLP, not before."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from nemo_aligner.checkpoint.hf.families import base, settings
from nemo_aligner.checkpoint.hf.families.base import GgufFormat, ModelFamily
from nemo_aligner.checkpoint.hf.families.settings import Config, HfSettings
from nemo_aligner.models.shapes.decoder import ModelShape
from nemo_aligner.models.shapes.rope import FP32_TABLES
from nemo_aligner.utils.errors import CheckpointError

_POST_NORMS: dict[str, Any] = {
    "pre_layernorms": False,
    "post_layernorms": True,
    "qk_layernorm": True,
}
_BLOCKS = (
    base.QKV,
    base.PROJECTION,
    base.norm_rule(base.POST_ATTENTION_NORM, "post_attention_layernorm.weight"),
    base.GATED,
    base.DOWN,
    base.norm_rule(base.POST_MLP_NORM, "post_feedforward_layernorm.weight"),
)


_GGUF_NAMES = {
    **{name: hf_name for name, hf_name in base.ATTENTION_NAMES.items() if name != "attn_norm"},
    **base.GATED_MLP_NAMES,
    **base.POST_NORM_NAMES,
    **base.QUERY_KEY_NORM_NAMES,
}


def _post_norms_to_nemo(config: Config, **family: Any) -> dict[str, Any]:
    return settings.decoder_to_nemo(config, epsilon=1e-5, **_POST_NORMS, **family)


# OLMo 2: each norm of queries and keys is over all heads together, and RoPE is computed in fp32.


def _olmo2_to_nemo(config: Config) -> dict[str, Any]:
    HfSettings(config).only("clip_qkv", None)
    return _post_norms_to_nemo(config, qk_layernorm_across_heads=True, rope_fp32=FP32_TABLES)


OLMO2 = ModelFamily(
    name="olmo2",
    to_nemo=_olmo2_to_nemo,
    to_hf=partial(settings.decoder_to_hf, model_type="olmo2", attention_bias=False),
    layer=(*_BLOCKS, *base.ACROSS_HEADS_NORMS),
    made_of={**_POST_NORMS, "qk_layernorm_across_heads": True, "rope_fp32": base.ANY},
    gguf=GgufFormat("olmo2", layer=_GGUF_NAMES),
)


# OLMo 3: OLMo 2 with a window in three of four layers. RoPE is scaled only in the other layers.

_BASE = 500000.0


def _olmo3_to_nemo(config: Config) -> dict[str, Any]:
    reader = HfSettings(config)
    window = settings.window_to_nemo(
        config, reader.window(), settings.every_nth_layer(reader.layers(), 4)
    )
    full_rope, sliding_rope = settings.split_rope_by_window(config, "rope_theta")
    local = settings.rope_to_nemo({"rope_parameters": sliding_rope}, None, _BASE, ("default",))
    without_rope = {key: value for key, value in config.items() if not key.startswith("rope_")}
    return _post_norms_to_nemo(
        without_rope,
        **settings.rope_to_nemo({**without_rope, "rope_parameters": full_rope}, None, _BASE),
        qk_layernorm_across_heads=True,
        rope_fp32=FP32_TABLES,
        rotary_base_local=local["rotary_base"] if window else None,
        **window,
    )


def _olmo3_to_hf(config: Config) -> dict[str, Any]:
    shape = ModelShape.from_config(config)
    olmo2 = OLMO2.to_hf(config)
    full_rope = olmo2["rope_parameters"]
    local_base = shape.rotary_base_local or shape.rotary_base
    sliding_rope = {"rope_type": "default", "rope_theta": local_base}
    return {
        **olmo2,
        "model_type": "olmo3",
        "rope_parameters": {settings.FULL: full_rope, settings.SLIDING: sliding_rope},
        **settings.window_to_hf(config, always_sized=True),
    }


def _olmo3_from_gguf(config: Mapping[str, Any]) -> dict[str, Any]:
    """Derive ``rope_parameters``: scaled RoPE in layers without a window, unscaled in others."""
    full_rope = config["rope_parameters"]
    local = config.get("rope_local_base_freq", full_rope["rope_theta"])
    sliding_rope = {"rope_type": "default", "rope_theta": local}
    return {"rope_parameters": {settings.FULL: full_rope, settings.SLIDING: sliding_rope}}


OLMO3 = replace(
    OLMO2,
    name="olmo3",
    to_nemo=_olmo3_to_nemo,
    to_hf=_olmo3_to_hf,
    made_of={**OLMO2.made_of, **base.ANY_WINDOW, "rotary_base_local": base.ANY},
    gguf=GgufFormat(
        "olmo2",
        layer=_GGUF_NAMES,
        optional={"rope.freq_base_swa": "rope_local_base_freq"},
        derived=_olmo3_from_gguf,
        has_windows=True,
        marked_by="attention.sliding_window",
    ),
)


# EXAONE 4: in a model with windows, the layers without a window have no RoPE.


def _exaone4_to_nemo(config: Config) -> dict[str, Any]:
    reader = HfSettings(config)
    size, kinds = reader.window(), [settings.FULL] * reader.layers()
    if size is not None:
        kinds = config.get("layer_types") or settings.every_nth_layer(
            len(kinds), reader.count("sliding_window_pattern", 4)
        )
    window = settings.window_to_nemo({**config, "layer_types": kinds}, size, kinds)
    without = [int(kind == settings.FULL) for kind in kinds]
    rotating = (
        {"no_rope_freq": settings.frequency(without, 1)}
        if size is not None and any(without)
        else {}
    )
    return _post_norms_to_nemo(config, **window, **rotating)


def _exaone4_to_hf(config: Config) -> dict[str, Any]:
    shape = ModelShape.from_config(config)
    for layer, kind in enumerate(settings.layer_types(config), 1):
        if shape.rotates(layer) != (shape.window_size is None or kind == settings.SLIDING):
            raise CheckpointError(
                f"model_config.yaml: no_rope_freq: got {config.get('no_rope_freq')!r}, but in an "
                "EXAONE 4 with windows exactly the layers without a window have no RoPE"
            )
    return settings.decoder_to_hf(config, "exaone4", **settings.window_to_hf(config))


EXAONE4 = ModelFamily(
    name="exaone4",
    to_nemo=_exaone4_to_nemo,
    to_hf=_exaone4_to_hf,
    layer=(*_BLOCKS, *base.QUERY_KEY_NORMS),
    made_of={**_POST_NORMS, **base.ANY_WINDOW, "no_rope_freq": base.ANY},
    gguf=GgufFormat("exaone4", layer=_GGUF_NAMES, has_windows=True),
)
