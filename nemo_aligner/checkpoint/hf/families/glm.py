"""GLM-4 (``glm``, ``glm4``), Helium, ERNIE 4.5: RoPE rotates pairs of neighbouring channels.

A NeMo config of these models must name its family: its other settings could be those of a Llama,
but in Hugging Face the tensors of a Llama have other names or another order of rows.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

from nemo_aligner.checkpoint.hf.families import base, settings
from nemo_aligner.checkpoint.hf.families.base import GgufFormat, ModelFamily
from nemo_aligner.checkpoint.hf.families.settings import Config, HfSettings
from nemo_aligner.models.shapes.rope import FP32_TABLES

# GLM-4: RoPE rotates half of a head's channels, and the gate and up projections are one tensor.

_glm_to_nemo = partial(
    settings.decoder_to_nemo, epsilon=1.5625e-7, rotated=0.5, head_dim=128, attention_bias=True
)
_glm_to_hf = partial(
    settings.decoder_to_hf,
    of_shape={"partial_rotary_factor": "rotary_percentage", "attention_bias": "qkv_bias"},
)

GLM = ModelFamily(
    name="glm",
    to_nemo=partial(_glm_to_nemo, name="glm"),
    to_hf=partial(_glm_to_hf, model_type="glm"),
    layer=base.layer_rules_with(
        attention=(base.interleaved(base.QKV), base.interleaved(base.QKV_BIAS), base.PROJECTION),
        mlp=(base.FUSED_GATED, base.DOWN),
    ),
    made_of={"qkv_bias": base.ANY, "rotary_percentage": base.ANY},
)

# GLM-4-0414: GLM-4 with norms after attention and MLP, too.
GLM4 = replace(
    GLM,
    name="glm4",
    to_nemo=partial(_glm_to_nemo, name="glm4", post_layernorms=True),
    to_hf=partial(_glm_to_hf, model_type="glm4"),
    layer=(
        *GLM.layer,
        base.norm_rule(base.POST_ATTENTION_NORM, "post_self_attn_layernorm.weight"),
        base.norm_rule(base.POST_MLP_NORM, "post_mlp_layernorm.weight"),
    ),
    made_of={**GLM.made_of, "post_layernorms": True},
    # llama.cpp also rotates neighbouring channels for this architecture, so no rows are reordered.
    gguf=GgufFormat(
        "glm4",
        layer={
            **base.ATTENTION_NAMES,
            "post_attention_norm": "post_self_attn_layernorm",
            **base.MLP_NORM_NAMES,
            "ffn_up": "mlp.gate_up_proj",
            "ffn_down": "mlp.down_proj",
            "post_ffw_norm": "post_mlp_layernorm",
        },
        is_partly_rotated=True,
        may_have_biases=True,
    ),
)

# Helium: RoPE rotates all channels, and no tensors are fused.
HELIUM = ModelFamily(
    name="helium",
    to_nemo=partial(
        settings.decoder_to_nemo, name="helium", epsilon=1e-8, base=100000.0, head_dim=128
    ),
    to_hf=partial(
        settings.decoder_to_hf, model_type="helium", attention_bias=False, mlp_bias=False
    ),
    layer=base.layer_rules_with(attention=(base.interleaved(base.QKV), base.PROJECTION)),
)


# ERNIE 4.5, the dense models: like Helium, with other defaults, and RoPE is computed in fp32.


def _ernie_to_nemo(config: Config) -> dict[str, Any]:
    HfSettings(config).only("use_bias", False, None)
    return settings.decoder_to_nemo(
        config,
        name="ernie4_5",
        epsilon=1e-5,
        base=500000.0,
        head_dim=128,
        tied=True,
        rope_fp32=FP32_TABLES,
    )


ERNIE4_5 = ModelFamily(
    name="ernie4_5",
    to_nemo=_ernie_to_nemo,
    to_hf=partial(settings.decoder_to_hf, model_type="ernie4_5", use_bias=False),
    layer=HELIUM.layer,
    made_of={"rope_fp32": base.ANY},
    # llama.cpp also rotates neighbouring channels for this architecture, so no rows are reordered.
    gguf=GgufFormat("ernie4_5"),
)
