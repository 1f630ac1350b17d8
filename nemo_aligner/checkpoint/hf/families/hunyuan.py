"""HunYuan's dense models: a Qwen3 whose norms of queries and keys come after RoPE."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from nemo_aligner.checkpoint.hf.families import base, settings
from nemo_aligner.checkpoint.hf.families.base import ModelFamily
from nemo_aligner.checkpoint.hf.families.settings import Config, HfSettings

_ROPE_KEYS = ("rope_scaling", "rope_parameters")


def _to_nemo(config: Config) -> dict[str, Any]:
    reader = HfSettings(config)
    reader.only("use_qk_norm", True, None)
    reader.only("use_cla", False, None)
    return settings.decoder_to_nemo(
        _with_stretched_base(config),
        epsilon=1e-5,
        qk_layernorm=True,
        qk_norm_after_rope=True,
    )


def _with_stretched_base(config: Config) -> Config:
    """Replace the "dynamic" RoPE of the released models by a plain RoPE of a larger base.

    Dynamic RoPE usually depends on the length of a sample, but the released models set ``alpha``, a
    constant. The base is then ``rope_theta * alpha^(c / (c - 2))`` for heads of c channels
    (NTK-aware scaling).
    """
    reader = HfSettings(config)
    key = next((key for key in _ROPE_KEYS if config.get(key)), None)
    rope = {} if key is None else config[key]
    is_dynamic = isinstance(rope, Mapping) and "dynamic" in (
        rope.get("rope_type"),
        rope.get("type"),
    )
    if not is_dynamic or not rope.get("alpha"):
        return config
    theta = HfSettings({"rope_theta": rope.get("rope_theta") or config.get("rope_theta")})
    heads, hidden = reader.count("num_attention_heads"), reader.count("hidden_size")
    channels = reader.count("head_dim", hidden // heads, minimum=3)
    alpha = HfSettings(rope).number("alpha")
    base_of_rope = theta.number("rope_theta", 10000.0) * alpha ** (channels / (channels - 2))
    without = {name: value for name, value in config.items() if name not in _ROPE_KEYS}
    return {**without, "rope_theta": base_of_rope}


_NORMS = {"q_norm": "query_layernorm", "k_norm": "key_layernorm"}


def _norm(megatron: str, hf: str) -> base.Rule:
    """Build the rule of a norm of queries or keys, with HunYuan's name instead of Qwen3's."""
    for usual, name in _NORMS.items():
        hf = hf.replace(usual, name)
    return base.norm_rule(megatron, hf)


HUNYUAN = ModelFamily(
    name="hunyuan_v1_dense",
    to_nemo=_to_nemo,
    to_hf=partial(
        settings.decoder_to_hf,
        model_type="hunyuan_v1_dense",
        attention_bias=False,
        use_qk_norm=True,
    ),
    layer=(*base.LAYER, *base.query_key_norms(_norm)),
    made_of={"qk_layernorm": True, "qk_norm_after_rope": True},
)
