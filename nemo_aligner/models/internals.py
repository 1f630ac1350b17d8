"""Private or short-lived names of torch and megatron-core, each behind a function of our own."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from megatron.core.tensor_parallel import layers
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.spec_utils import ModuleSpec
from torch import Tensor

from nemo_aligner.models.layer_shape import RopeScaling

# Below scaled_dot_product_attention, which drops the log-sum-exp of the scores.
cpu_flash_attention = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
cpu_flash_attention_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
# Below torch.nn.attention.varlen, which is new in torch 2.10 and complete from 2.12 on.
gpu_flash_attention = torch.ops.aten._flash_attention_forward
gpu_flash_attention_backward = torch.ops.aten._flash_attention_backward


def has_weight_gradient_kernel() -> bool:
    """Tell if megatron-core has a fused weight gradient kernel: Apex's, or ours for the CPU."""
    return layers._grad_accum_fusion_available


@contextmanager
def fused_output_layer_allowed() -> Iterator[None]:
    """Allow ``gradient_accumulation_fusion`` without Apex while a model is built.

    GPTModel always builds an output layer. It is not a TransformerEngine module, and raises where
    Apex's kernel is missing, though the reward model deletes it at once.
    """
    found = layers._grad_accum_fusion_available
    layers._grad_accum_fusion_available = True
    try:
        yield
    finally:
        layers._grad_accum_fusion_available = found


def mlp_spec(submodules: MLPSubmodules) -> Any:
    """Wrap an MLP's submodules in the form that the installed megatron-core expects of a layer."""
    build = getattr(MLP, "as_mlp_submodule", None)
    if build is None:  # before megatron-core 0.18
        return ModuleSpec(module=MLP, submodules=submodules)
    return partial(build, submodules=submodules)


def scale_rotary_frequencies(rope: Any, scaling: RopeScaling) -> Tensor:
    """Scale the frequencies of ``rope`` as Llama 3.1 does for long contexts.

    megatron-core's constructor exposes only ``factor`` of the four numbers.
    """
    return rope._apply_scaling(
        rope.inv_freq,
        factor=scaling.factor,
        low_freq_factor=scaling.low_freq_factor,
        high_freq_factor=scaling.high_freq_factor,
        original_max_position_embeddings=scaling.old_context_len,
    )


def allow_recompiles(count: int) -> None:
    """Let ``torch.compile`` compile a function ``count`` times before it runs it eagerly."""
    config = torch._dynamo.config
    config.recompile_limit = max(count, config.recompile_limit)
