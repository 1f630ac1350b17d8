"""Private or short-lived names of torch and megatron-core, wrapped in functions of this module."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from types import ModuleType
from typing import Any

import torch
from megatron.core.tensor_parallel import layers
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.spec_utils import ModuleSpec
from torch import Tensor

from nemo_aligner.cpu.matmuls import accumulate_weight_gradients
from nemo_aligner.distributed.gpu_matmuls import add_weight_gradient, adds_to_fp32
from nemo_aligner.models.shapes.rope import RopeScaling

# The private operators that torch's public module torch.nn.attention.varlen calls. That module
# exists only from torch 2.10 on, and is complete only from 2.12 on.
gpu_flash_attention = torch.ops.aten._flash_attention_forward
gpu_flash_attention_backward = torch.ops.aten._flash_attention_backward


def has_weight_gradient_kernel() -> bool:
    """Tell if megatron-core has a fused weight gradient kernel: Apex's, or this package's."""
    return layers._grad_accum_fusion_available


def has_apex_weight_gradients() -> bool:
    """Tell if megatron-core's fused weight gradient kernel is Apex's, and not this package's."""
    return isinstance(getattr(layers, "fused_weight_gradient_mlp_cuda", None), ModuleType)


def add_weight_gradients_on_gpu() -> None:
    """Make megatron-core's linear layers add weight gradients to ``main_grad`` without Apex.

    This is for GPUs. ``cpu/backend.py`` does the same for CPUs.
    """
    if torch.cuda.is_available() and not has_weight_gradient_kernel() and adds_to_fp32():
        accumulate_weight_gradients(layers, add_weight_gradient)


@contextmanager
def fused_output_layer_allowed() -> Iterator[None]:
    """Allow ``gradient_accumulation_fusion`` without Apex while a model is being built.

    GPTModel always builds an output layer, which raises where Apex's kernel is missing, unless it
    is TransformerEngine's. The reward model deletes that layer at once.
    """
    previous = layers._grad_accum_fusion_available
    layers._grad_accum_fusion_available = True
    try:
        yield
    finally:
        layers._grad_accum_fusion_available = previous


def mlp_spec(submodules: MLPSubmodules) -> Any:
    """Wrap an MLP's submodules in the form that the installed megatron-core expects in a spec."""
    build = getattr(MLP, "as_mlp_submodule", None)
    if build is None:  # megatron-core before 0.18
        return ModuleSpec(module=MLP, submodules=submodules)
    return partial(build, submodules=submodules)


def scale_rotary_frequencies(rope: Any, scaling: RopeScaling) -> Tensor:
    """Scale the frequencies of ``rope`` as Llama 3.1 does for long contexts.

    This calls a private method, because megatron-core's constructor takes only ``factor``, not the
    other three fields of ``scaling``.
    """
    return rope._apply_scaling(
        rope.inv_freq,
        factor=scaling.factor,
        low_freq_factor=scaling.low_freq_factor,
        high_freq_factor=scaling.high_freq_factor,
        original_max_position_embeddings=scaling.old_context_len,
    )


_ENGINE = "megatron.core.extensions.transformer_engine"


def engine_layers(model: torch.nn.Module) -> list[Any]:
    """List the layers of a model that are TransformerEngine's."""
    return [module for module in model.modules() if type(module).__module__ == _ENGINE]


def saved_tensor_hooks() -> tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]:
    """Return the current hooks that pack and unpack saved tensors; identities if there are none.

    torch calls only the innermost hooks, so hooks inside of others have to call the outer ones.
    """
    return torch._C._autograd._top_saved_tensors_default_hooks(True) or (
        _return_unchanged,
        _return_unchanged,
    )


def _return_unchanged(saved: Tensor) -> Tensor:
    return saved


def keep_weights_out_of_saved_tensors() -> None:
    """Make megatron-core's linear layers work under hooks on saved tensors, in this process.

    Under such hooks autograd gives the backward pass an alias of the weight that lacks Megatron's
    Python attributes, like ``main_grad`` and ``grad_added_to_main_grad``.
    """
    layers.LinearWithGradAccumulationAndAsyncCommunication = _LinearUnderHooks


_MegatronLinear: Any = layers.LinearWithGradAccumulationAndAsyncCommunication


class _LinearUnderHooks(_MegatronLinear):  # type: ignore[misc]
    """megatron-core's autograd function of a linear layer, with the weight itself in backward.

    See ``keep_weights_out_of_saved_tensors``.
    """

    @staticmethod
    def forward(ctx: Any, input: Tensor, weight: Tensor, *options: Any) -> Tensor:
        ctx.weight = weight
        return _MegatronLinear.forward(ctx, input, weight, *options)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return _MegatronLinear.backward(_WithWeight(ctx), *grads)


class _WithWeight:
    """An autograd context that returns the weight itself as the second saved tensor."""

    def __init__(self, ctx: Any) -> None:
        self._ctx = ctx

    def __getattr__(self, name: str) -> Any:
        return getattr(self._ctx, name)

    @property
    def saved_tensors(self) -> tuple[Tensor, Tensor]:
        input, _ = self._ctx.saved_tensors
        return input, self._ctx.weight


def allow_recompiles(count: int) -> None:
    """Let ``torch.compile`` compile a function up to ``count`` times.

    After that many variants torch would run the function without compilation.
    """
    config = torch._dynamo.config
    config.recompile_limit = max(count, config.recompile_limit)
