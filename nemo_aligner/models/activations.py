"""Activations between the matmuls of an MLP, as modules that megatron-core builds."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from nemo_aligner.cpu import kernels
from nemo_aligner.models.pointwise.eager import (
    by_whole_rows,
    gated_gelu,
    gated_silu,
    quick_gated_gelu,
    squared_relu,
)
from nemo_aligner.models.pointwise.operations import EAGER, PointwiseKernels
from nemo_aligner.models.shapes.experts import QUICK_GEGLU


class _Activation(MegatronModule):
    """Base class of activations as modules: megatron-core 0.17 and later accept no functions."""

    function: Callable[[Tensor], Tensor]

    def forward(self, hidden: Tensor) -> Tensor:
        if self.training or hidden.is_cuda:
            return self.function(hidden)
        return by_whole_rows(self.function, hidden)


class SwiGLU(_Activation):
    """SwiGLU, ``silu(gate) * linear``: ``[..., 2 f] -> [..., f]``.

    In training and on a GPU, the kernels in ``pointwise`` compute it. In inference on a CPU,
    ``kernels.c`` computes it if it supports the input; otherwise torch does.
    """

    function = staticmethod(gated_silu)
    pointwise: PointwiseKernels = EAGER

    def forward(self, hidden: Tensor) -> Tensor:
        if self.training or hidden.is_cuda:
            return self.pointwise.gated_silu(hidden)
        if kernels.take(hidden.unflatten(-1, (2, -1))):
            return kernels.gated_silu(hidden)
        return super().forward(hidden)


class _GeGLU(_Activation):
    function = staticmethod(gated_gelu)


class _SquaredReLU(_Activation):
    function = staticmethod(squared_relu)


class _QuickGeGLU(_Activation):
    """gpt-oss' ``(up + 1) * gate * sigmoid(1.702 * gate)``: ``[..., 2 f] -> [..., f]``.

    The gate is clamped from above and ``up`` on both sides, if the config has a limit.
    """

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__(config=config)
        self.function = partial(quick_gated_gelu, limit=config.activation_func_clamp_value)


ACTIVATIONS = {
    "swiglu": SwiGLU,
    "geglu": _GeGLU,
    "squared-relu": _SquaredReLU,
    QUICK_GEGLU: _QuickGeGLU,
}
