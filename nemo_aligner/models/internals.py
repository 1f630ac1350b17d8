"""What the models take of torch and megatron-core that has no public name, or no lasting one."""

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

from nemo_aligner.models.shape import RopeScaling

# scaled_dot_product_attention calls them, too, but keeps the log-sum-exp of the scores to itself.
cpu_flash_attention = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
cpu_flash_attention_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
# Behind torch.nn.attention.varlen, which is not there before torch 2.10, nor all of it before 2.12.
gpu_flash_attention = torch.ops.aten._flash_attention_forward


def has_weight_gradient_kernel() -> bool:
    """Whether megatron-core found Apex's kernel, or was given ours; its config does not ask."""
    return layers._grad_accum_fusion_available


@contextmanager
def fused_output_layer_allowed() -> Iterator[None]:
    """Build a model whose weight gradients TransformerEngine sums, without Apex.

    megatron-core's GPTModel always has an output layer, which is no TransformerEngine module, and
    is refused where Apex's kernel is missing.
    """
    found = layers._grad_accum_fusion_available
    layers._grad_accum_fusion_available = True
    try:
        yield
    finally:
        layers._grad_accum_fusion_available = found


def mlp_spec(submodules: MLPSubmodules) -> Any:
    """The MLP of a layer, as the layer wants to be told of it."""
    build = getattr(MLP, "as_mlp_submodule", None)
    if build is None:  # before megatron-core 0.18
        return ModuleSpec(module=MLP, submodules=submodules)
    return partial(build, submodules=submodules)


def scale_rotary_frequencies(rope: Any, scaling: RopeScaling) -> Tensor:
    """The frequencies of ``rope`` for longer texts, as Llama 3.1 has them.

    megatron-core's constructor takes of these numbers only the factor.
    """
    return rope._apply_scaling(
        rope.inv_freq,
        factor=scaling.factor,
        low_freq_factor=scaling.low_freq_factor,
        high_freq_factor=scaling.high_freq_factor,
        original_max_position_embeddings=scaling.old_context_len,
    )
