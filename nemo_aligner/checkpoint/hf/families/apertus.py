"""Apertus: an MLP without a gate whose activation, xIELU, has learned parameters in each layer."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from nemo_aligner.checkpoint.hf.families import base, settings
from nemo_aligner.checkpoint.hf.families.base import ModelFamily, Rule
from nemo_aligner.checkpoint.hf.families.settings import Config, HfSettings

# RoPE settings that transformers' class uses if ``config.json`` has none.
_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 12000000.0,
    "factor": 8.0,
    "original_max_position_embeddings": 8192,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
}


def _to_nemo(config: Config) -> dict[str, Any]:
    reader = HfSettings(config)
    reader.only("post_norm", False, None)
    reader.only("qk_norm", True, None)
    has_rope = any(config.get(key) for key in ("rope_parameters", "rope_scaling", "rope_theta"))
    return settings.decoder_to_nemo(
        config if has_rope else {**config, "rope_parameters": _ROPE},
        act=("xielu",),
        epsilon=1e-5,
        base=12000000.0,
        qk_layernorm=True,
        activation="xielu",
    )


def _scalars_rule(megatron: str, *hf: str) -> Rule:
    """Build the rule for xIELU's scalars, which Megatron stores as one tensor ``[len(hf)]``.

    transformers stores each scalar by itself: learned ones as ``[1]``, constants as ``[]``.
    """
    is_learned = megatron.endswith("alpha")

    def join(tensors: Sequence[Tensor], config: Config) -> Tensor:
        return torch.cat([tensor.reshape(1) for tensor in tensors])

    def split(tensor: Tensor, config: Config) -> Sequence[Tensor]:
        return [part if is_learned else part.squeeze(0) for part in tensor.split(1)]

    return Rule(megatron, hf, join, split)


APERTUS = ModelFamily(
    name="apertus",
    to_nemo=_to_nemo,
    to_hf=partial(
        settings.decoder_to_hf, model_type="apertus", hidden_act="xielu", attention_bias=False
    ),
    layer=(
        base.norm_rule(base.ATTENTION_NORM, "attention_layernorm.weight"),
        base.QKV,
        base.PROJECTION,
        base.norm_rule(base.MLP_NORM, "feedforward_layernorm.weight"),
        base.UNGATED,
        base.DOWN,
        *base.QUERY_KEY_NORMS,
        _scalars_rule("mlp.activation_func.alpha", "mlp.act_fn.alpha_p", "mlp.act_fn.alpha_n"),
        _scalars_rule("mlp.activation_func.constants", "mlp.act_fn.beta", "mlp.act_fn.eps"),
    ),
    made_of={"activation": "xielu", "qk_layernorm": True},
)
