"""GLM-4 (``glm`` and ``glm4``) and Helium, which rotate neighbouring channels.

Their NeMo configs name the family: the tensors of such a decoder are not those of a Llama.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

from nemo_aligner.checkpoint.hf.families.base import (
    ANY,
    DOWN,
    FUSED_GATED,
    POST_ATTENTION_NORM,
    POST_MLP_NORM,
    PROJECTION,
    QKV,
    QKV_BIAS,
    ModelFamily,
    interleaved,
    layer_rules_with,
    norm_rule,
)
from nemo_aligner.checkpoint.hf.families.settings import (
    Config,
    decoder_to_hf,
    decoder_to_nemo,
)
from nemo_aligner.models.shape import ModelShape

# GLM-4: half of a head's channels are rotated, and the two halves of the MLP are one tensor.

_glm_to_nemo = partial(
    decoder_to_nemo, epsilon=1.5625e-7, rotated=0.5, head_dim=128, attention_bias=True
)


def _glm_to_hf(config: Config, model_type: str) -> dict[str, Any]:
    shape = ModelShape.from_config(config)
    return decoder_to_hf(
        config,
        model_type,
        partial_rotary_factor=shape.rotary_percentage,
        attention_bias=shape.qkv_bias,
    )


GLM = ModelFamily(
    name="glm",
    to_nemo=partial(_glm_to_nemo, name="glm"),
    to_hf=partial(_glm_to_hf, model_type="glm"),
    layer=layer_rules_with(
        attention=(interleaved(QKV), interleaved(QKV_BIAS), PROJECTION), mlp=(FUSED_GATED, DOWN)
    ),
    made_of={"qkv_bias": ANY, "rotary_percentage": ANY},
)

# GLM-4-0414: what is added to the residual stream is normed, too.
GLM4 = replace(
    GLM,
    name="glm4",
    to_nemo=partial(_glm_to_nemo, name="glm4", post_layernorms=True),
    to_hf=partial(_glm_to_hf, model_type="glm4"),
    layer=(
        *GLM.layer,
        norm_rule(POST_ATTENTION_NORM, "post_self_attn_layernorm.weight"),
        norm_rule(POST_MLP_NORM, "post_mlp_layernorm.weight"),
    ),
    made_of={**GLM.made_of, "post_layernorms": True},
)

# Helium: all channels are rotated, and nothing is fused.
HELIUM = ModelFamily(
    name="helium",
    to_nemo=partial(decoder_to_nemo, name="helium", epsilon=1e-8, base=100000.0, head_dim=128),
    to_hf=partial(decoder_to_hf, model_type="helium", attention_bias=False, mlp_bias=False),
    layer=layer_rules_with(attention=(interleaved(QKV), PROJECTION)),
)
