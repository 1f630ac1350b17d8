"""ERNIE 4.5 with experts, which the router chooses by softmax scores plus a bias.

Some layers are dense. RoPE rotates pairs of neighbouring channels, in fp32. Shared experts have no
gate.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from nemo_aligner.checkpoint.hf.families import base, settings
from nemo_aligner.checkpoint.hf.families.base import ModelFamily, Rule
from nemo_aligner.checkpoint.hf.families.mixtures import BIASED_EXPERTS
from nemo_aligner.checkpoint.hf.families.settings import Config, HfSettings
from nemo_aligner.models.shapes import experts as expert_keys
from nemo_aligner.models.shapes.decoder import ModelShape
from nemo_aligner.models.shapes.experts import ExpertShape
from nemo_aligner.models.shapes.rope import FP32_TABLES, ROPE_FP32


def _to_nemo(config: Config) -> dict[str, Any]:
    reader = HfSettings(config)
    reader.only("use_bias", False, None)
    reader.only("moe_norm_min", 1e-12, None)
    # transformers' class also takes the usual names of two keys.
    experts = reader.count("num_experts", reader.count("moe_num_experts", 64))
    top_k = reader.count("num_experts_per_tok", reader.count("moe_k", 6), limit=experts)
    layers = reader.layers()
    width = reader.count("moe_intermediate_size", 1536)
    shared = reader.count("moe_num_shared_experts", 2, minimum=0)
    first = reader.count("moe_layer_start_index", 1, minimum=0)
    last = reader.count("moe_layer_end_index", -1, minimum=-1)
    last = layers - 1 if last == -1 else last
    marks = _mark_layers(layers, first, last, reader.count("moe_layer_interval", 1))
    nemo: dict[str, Any] = {
        expert_keys.EXPERT_COUNT: experts,
        expert_keys.EXPERT_TOP_K: top_k,
        expert_keys.EXPERT_WIDTH: width,
        expert_keys.PRE_SOFTMAX: False,
        expert_keys.EXPERT_BIAS: True,
        **({expert_keys.SHARED_WIDTH: shared * width} if shared else {}),
        **({} if all(marks) else {expert_keys.EXPERT_FREQUENCY: list(marks)}),
        ROPE_FP32: FP32_TABLES,
    }
    return settings.decoder_to_nemo(config, epsilon=1e-5, base=500000.0, tied=True, **nemo)


def _mark_layers(layers: int, first: int, last: int, interval: int) -> tuple[int, ...]:
    """List a 1 for layers with experts (every ``interval``-th, ``first`` to ``last``), else a 0."""
    return tuple(
        int(first <= layer <= last and (layer + 1) % interval == 0) for layer in range(layers)
    )


def _find_layers(marks: tuple[int, ...]) -> tuple[int, int, int] | None:
    """Invert ``_mark_layers``: return ``first``, ``last`` and ``interval``; None if none fit."""
    numbers = [layer for layer, mark in enumerate(marks) if mark]
    for interval in range(1, len(marks) + 1):
        if _mark_layers(len(marks), numbers[0], numbers[-1], interval) == marks:
            return numbers[0], numbers[-1], interval
    return None


def _to_hf(config: Config) -> dict[str, Any]:
    shape = ModelShape.from_config(config)
    experts, marks = shape.experts, shape.moe_layer_freq or (1,) * shape.num_layers
    chosen = _find_layers(marks)
    assert experts is not None
    assert chosen is not None
    first, last, interval = chosen
    return settings.decoder_to_hf(
        config,
        "ernie4_5_moe",
        use_bias=False,
        moe_num_experts=experts.count,
        moe_k=experts.top_k,
        moe_intermediate_size=experts.width,
        moe_num_shared_experts=(experts.shared_width or 0) // experts.width,
        moe_layer_start_index=first,
        moe_layer_end_index=last,
        moe_layer_interval=interval,
    )


def _have_its_router(experts: ExpertShape | None) -> bool:
    if experts is None or (experts.shared_width or 0) % experts.width or experts.shared_gate:
        return False
    is_plain = experts.num_groups == 1 and experts.scaling_factor == 1
    has_bias = experts.expert_bias and not experts.is_sigmoid
    return has_bias and experts.renormalized and is_plain


def _flatten(tensors: Sequence[Tensor], config: Config) -> Tensor:
    return tensors[0].flatten()


def _as_row(tensor: Tensor, config: Config) -> Sequence[Tensor]:
    return (tensor.unsqueeze(0),)


_BIAS = Rule(
    "mlp.router.expert_bias",
    ("mlp.moe_statics.e_score_correction_bias",),  # [1, E]
    _flatten,
    _as_row,
    dtype=torch.float32,
)

ERNIE4_5_MOE = ModelFamily(
    name="ernie4_5_moe",
    to_nemo=_to_nemo,
    to_hf=_to_hf,
    layer=base.layer_rules_with(
        attention=(base.interleaved(base.QKV), base.PROJECTION),
        mlp=tuple(_BIAS if rule.megatron == _BIAS.megatron else rule for rule in BIASED_EXPERTS),
        mlp_norm=base.EXPERTS_NORM,
    ),
    made_of={
        "experts": _have_its_router,
        "rope_fp32": base.ANY,
        "moe_layer_freq": lambda marks: marks is None or _find_layers(marks) is not None,
    },
    dropped="model.mtp_",
)
