"""Activations between the matmuls of an MLP, as modules that megatron-core builds."""

from __future__ import annotations

from collections.abc import Callable

from megatron.core.transformer.module import MegatronModule
from torch import Tensor

from nemo_aligner.cpu import kernels
from nemo_aligner.models.pointwise.eager import (
    by_whole_rows,
    gated_gelu,
    gated_silu,
    gelu,
    squared_relu,
    tanh_gelu,
)
from nemo_aligner.models.pointwise.operations import EAGER, PointwiseKernels


class _Activation(MegatronModule):
    """Base class of activations as modules: megatron-core 0.17 and later accept no functions.

    Attributes:
        is_gated: one half of the input gates the other.
    """

    function: Callable[[Tensor], Tensor]
    is_gated = False

    def forward(self, hidden: Tensor) -> Tensor:
        if self.training or hidden.is_cuda:
            return self.function(hidden)
        return by_whole_rows(self.function, hidden, self.is_gated)


class SwiGLU(_Activation):
    """SwiGLU, ``silu(gate) * linear``: ``[..., 2 f] -> [..., f]``.

    In training and on a GPU, the kernels in ``pointwise`` compute it. In inference on a CPU,
    ``kernels.c`` computes it if it supports the input; otherwise torch does.
    """

    function = staticmethod(gated_silu)
    is_gated = True
    pointwise: PointwiseKernels = EAGER

    def forward(self, hidden: Tensor) -> Tensor:
        if self.training or hidden.is_cuda:
            return self.pointwise.gated_silu(hidden)
        if kernels.take(hidden.unflatten(-1, (2, -1))):
            return kernels.gated_silu(hidden)
        return super().forward(hidden)


class _GeGLU(_Activation):
    function = staticmethod(gated_gelu)
    is_gated = True


class _SquaredReLU(_Activation):
    function = staticmethod(squared_relu)


class _GELU(_Activation):
    function = staticmethod(gelu)


class _TanhGELU(_Activation):
    function = staticmethod(tanh_gelu)


ACTIVATIONS = {
    "swiglu": SwiGLU,
    "geglu": _GeGLU,
    "squared-relu": _SquaredReLU,
    "gelu": _GELU,
    "gelu-tanh": _TanhGELU,
}
