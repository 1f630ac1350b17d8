"""Activations between the matmuls of an MLP, as modules that megatron-core builds."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.tensor_parallel import copy_to_tensor_model_parallel_region
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from nemo_aligner.cpu import kernels
from nemo_aligner.models.pointwise.eager import (
    by_whole_rows,
    gated_gelu,
    gated_silu,
    gelu,
    quick_gated_gelu,
    squared_relu,
    tanh_gelu,
    xielu,
)
from nemo_aligner.models.pointwise.operations import EAGER, PointwiseKernels
from nemo_aligner.models.shapes.experts import QUICK_GEGLU


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
        if kernels.supports(hidden.unflatten(-1, (2, -1))):
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


class XIELU(_Activation):
    """xIELU (Huang and Schlag 2024, arXiv:2411.13010), with parameters learned in each layer.

    Every TP rank has the same parameters and a part of the channels, so the ranks' gradients are
    summed.

    Attributes:
        alpha: ``[2]``: the softplus of the first is the factor of ``x^2`` where x is positive; beta
            plus the softplus of the second is the factor of the exponential part elsewhere.
        constants: ``[2]``, not learned: beta, the slope at 0, and the largest argument of expm1, a
            negative number near 0.
    """

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__(config)
        kind = {"dtype": config.params_dtype, "device": torch.cuda.current_device()}
        self.alpha = torch.nn.Parameter(torch.zeros(2, **kind))
        self.register_buffer("constants", torch.tensor([0.5, -1e-6], **kind))
        self._group = parallel_state.get_tensor_model_parallel_group()

    def forward(self, hidden: Tensor) -> Tensor:
        alpha = copy_to_tensor_model_parallel_region(self.alpha, group=self._group)
        factors, (beta, limit) = F.softplus(alpha), self.constants
        function = partial(
            xielu, positive=factors[0], negative=beta + factors[1], beta=beta, limit=limit
        )
        if self.training or hidden.is_cuda:
            return function(hidden)
        return by_whole_rows(function, hidden, is_gated=False)


class _QuickGeGLU(_Activation):
    """gpt-oss' ``(up + 1) * gate * sigmoid(1.702 * gate)``: ``[..., 2 f] -> [..., f]``.

    If the config sets ``activation_func_clamp_value``, the gate is clamped to at most this limit,
    and ``up`` to between minus and plus the limit.
    """

    is_gated = True

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__(config=config)
        self.function = partial(quick_gated_gelu, limit=config.activation_func_clamp_value)


ACTIVATIONS = {
    "swiglu": SwiGLU,
    "geglu": _GeGLU,
    "squared-relu": _SquaredReLU,
    "gelu": _GELU,
    "gelu-tanh": _TanhGELU,
    "xielu": XIELU,
    QUICK_GEGLU: _QuickGeGLU,
}
