"""Offloaded activations: the same bits with every kind of layer, and nothing left behind."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from torch import Tensor

from nemo_aligner.batch.packed import Group, PackedBatch, Records
from nemo_aligner.config.common import Precision
from nemo_aligner.config.model import Recompute
from nemo_aligner.distributed.layout import ParallelLayout
from nemo_aligner.losses.pairwise import BradleyTerry
from nemo_aligner.models.activation_offload import ActivationOffload, offload_activations
from nemo_aligner.models.reward_model import build_reward_model
from nemo_aligner.models.shapes.decoder import ModelShape
from nemo_aligner.models.step import forward_backward
from nemo_aligner.models.training_wrap import set_routers, wrap_for_training
from nemo_aligner.utils.errors import ConfigError

CONFIG = {
    "num_layers": 5,
    "hidden_size": 64,
    "ffn_hidden_size": 160,
    "num_attention_heads": 4,
    "num_query_groups": 2,
    "kv_channels": 16,
    "vocab_size": 500,
    "max_position_embeddings": 2048,
}
EXPERTS = {"num_moe_experts": 8, "moe_router_topk": 2, "moe_ffn_hidden_size": 48}
GEMMA4 = {
    "activation": "geglu",
    "post_layernorms": True,
    "qk_layernorm": True,
    "window_size": 16,
    "window_attn_skip_freq": 2,
    "rotary_base_local": 100.0,
    "global_kv_channels": 32,
    "global_query_groups": 2,
    "kv_shared_layers": 2,
    "per_layer_input_size": 24,
}
KINDS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "plain": ({}, {}),
    "bf16": ({}, {"precision": Precision.bf16}),
    "norms of queries": ({"qk_layernorm": True, "post_layernorms": True}, {}),
    "experts": (EXPERTS, {}),
    "shared keys and layers' inputs": (GEMMA4, {}),
    "recomputed": ({}, {"recompute": Recompute.full}),
    "two of five recomputed": ({}, {"recompute": Recompute.full, "recompute_layers": 2}),
}


def pack(length: int) -> PackedBatch:
    """Two pairs, the first of which shares a prefix."""
    return PackedBatch.pack(
        [list(range(3, 3 + length))] * 2 + [[5] * length, [6] * length],
        Records.of(range(2), [2] * 2),
        rows=range(4),
        groups=[Group(2, length // 2), Group(2, 0)],
    )


def gradients(
    layout: ParallelLayout, changes: dict[str, Any], kinds: dict[str, Any], is_offloaded: bool
) -> tuple[list[Tensor], ActivationOffload | None]:
    """Gradients of two steps, of packs of other lengths."""
    torch.manual_seed(0)
    shape = ModelShape.from_config({**CONFIG, **changes})
    options = {"precision": Precision.fp32, **kinds}
    model = build_reward_model(shape, layout, num_attributes=1, **options)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(1.0) if parameter.dim() == 1 else parameter.normal_(std=0.05)
    offload = offload_activations(model) if is_offloaded else None
    set_routers(model, trained=False, aux_loss_coeff=0.0)
    wrapped = wrap_for_training(model)
    wrapped.train()
    found = []
    for lengths in ((40,), (80, 40, 60)):
        wrapped.zero_grad_buffer()
        forward_backward(wrapped, [pack(each) for each in lengths], layout, BradleyTerry().loss)
        found += [buffer.grad_data.clone() for buffer in wrapped.buffers]
    return found, offload


def test_gradients_have_the_bits_that_they_have_without_offload(layout: ParallelLayout) -> None:
    wrong = []
    for name, (changes, kinds) in KINDS.items():
        expected, _ = gradients(layout, changes, kinds, is_offloaded=False)
        found, offload = gradients(layout, changes, kinds, is_offloaded=True)
        assert offload is not None
        assert offload.host_bytes > 0, name
        assert all(each.abs().sum() > 0 for each in expected), name
        if not all(map(torch.equal, found, expected)):
            wrong.append(name)
    assert not wrong


def test_a_pass_without_a_backward_pass_gives_its_host_memory_back(layout: ParallelLayout) -> None:
    model = build_reward_model(
        ModelShape.from_config(CONFIG), layout, num_attributes=1, precision=Precision.fp32
    )
    for parameter in model.parameters():
        torch.nn.init.zeros_(parameter)
    offload = offload_activations(model)
    wrapped = wrap_for_training(model)
    wrapped.train()
    for length in (80, 80, 40):
        wrapped(pack(length))
        gc.collect()
    # Of three layers that are offloaded, each has a buffer of its own, and no later one needs more.
    one_pass = offload.host_bytes
    wrapped(pack(80)).sum().backward()
    assert offload.host_bytes == one_pass
    with torch.no_grad():
        wrapped(pack(120))
    assert offload.host_bytes == one_pass
    # Longer packs take larger buffers in the place of these.
    wrapped(pack(120)).sum().backward()
    assert one_pass < offload.host_bytes < 2 * one_pass


def test_layers_of_transformer_engine_are_refused(layout: ParallelLayout) -> None:
    model = build_reward_model(
        ModelShape.from_config(CONFIG), layout, num_attributes=1, precision=Precision.fp32
    )
    kind = type("TENorm", (torch.nn.Module,), {})
    kind.__module__ = "megatron.core.extensions.transformer_engine"
    model.decoder.layers[0].input_layernorm = kind()
    with pytest.raises(ConfigError, match=r"model\.activations_offload: got true, but the layers"):
        offload_activations(model)
