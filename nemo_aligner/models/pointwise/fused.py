"""The pointwise operations as autograd functions around fused forward and backward kernels.

For the backward pass they save the same tensors as the eager functions: the input of a norm or of
SwiGLU, one value per row of a norm, and RoPE's tables.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd import Function

from nemo_aligner.models.pointwise import eager
from nemo_aligner.models.pointwise.operations import PointwiseKernels

FLOATS = (torch.float32, torch.bfloat16, torch.float16)


class Kernels(Protocol):
    """Forward and backward kernels, without autograd. All their tensors are contiguous."""

    def norm_forward(
        self,
        x: Tensor,
        added: Tensor | None,
        weight: Tensor,
        eps: float,
        offset: float,
        dtype: torch.dtype,
        alpha: float,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Compute the sum ``x + alpha * added``, or ``x`` itself without ``added``, and its norm.

        Returns:
            The sum in the dtype of ``x``; its norm in ``dtype``; and the rows' factors
            ``1 / sqrt(mean(sum^2) + eps)``, fp32, one for each row.
        """

    def norm_backward(
        self,
        grad: Tensor,
        grad_sum: Tensor | None,
        total: Tensor,
        weight: Tensor,
        scale: Tensor,
        offset: float,
        needs_weight: bool,
    ) -> tuple[Tensor, Tensor | None]:
        """Compute the gradients of the sum and of the weight.

        Args:
            grad: gradient of the norm's output.
            grad_sum: gradient of the sum from its other uses, which is added; None is 0.
            total: the sum that ``norm_forward`` returned.
            scale: the rows' factors from ``norm_forward``.
        """

    def silu_forward(self, x: Tensor) -> Tensor:
        """Compute SwiGLU, ``silu(gate) * linear``: ``[..., 2 f] -> [..., f]``.

        The gate is the first half of the channels of ``x``.
        """

    def silu_backward(self, grad: Tensor, x: Tensor) -> Tensor:
        """Compute the gradient of ``x [..., 2 f]`` from ``grad [..., f]``, that of the output."""

    def split_forward(
        self, mixed: Tensor, cos: Tensor, sin: Tensor, groups: int, channels: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Split linear_qkv's output ``mixed`` into queries, keys and values, and apply RoPE.

        ``SplitOperation`` describes arguments and results.
        """

    def split_backward(
        self, query: Tensor, key: Tensor, value: Tensor, cos: Tensor, sin: Tensor
    ) -> Tensor:
        """Compute the gradient of linear_qkv's output from those of queries, keys and values."""

    def sum_outputs(self, rows: Tensor, weights: Tensor, places: Tensor) -> Tensor:
        """Compute ``eager.sum_outputs``: ``[T * k, c] -> [T, c]``, in fp32."""

    def output_gradients(
        self, grad: Tensor, rows: Tensor, weights: Tensor, places: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Compute the gradients of ``rows [T * k, c]`` and of ``weights [T, k]``.

        Args:
            grad: ``[T, c]`` fp32: gradient of the sums.
        """


class _RMSNorm(Function):
    @staticmethod
    def forward(
        ctx: Any,
        kernels: Kernels,
        x: Tensor,
        weight: Tensor,
        eps: float,
        offset: float,
        dtype: torch.dtype,
    ) -> Tensor:
        x = x.contiguous()
        _, normed, scale = kernels.norm_forward(x, None, weight, eps, offset, dtype, 1.0)
        ctx.save_for_backward(x, weight, scale)
        ctx.kernels, ctx.offset = kernels, offset
        return normed

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        x, weight, scale = ctx.saved_tensors
        to_x, to_weight = ctx.kernels.norm_backward(
            grads[0].contiguous(), None, x, weight, scale, ctx.offset, ctx.needs_input_grad[2]
        )
        return None, to_x, to_weight, None, None, None


class _AddRMSNorm(Function):
    @staticmethod
    def forward(
        ctx: Any,
        kernels: Kernels,
        x: Tensor,
        added: Tensor,
        weight: Tensor,
        eps: float,
        offset: float,
        dtype: torch.dtype,
        alpha: float,
    ) -> tuple[Tensor, Tensor]:
        total, normed, scale = kernels.norm_forward(
            x.contiguous(), added.contiguous(), weight, eps, offset, dtype, alpha
        )
        ctx.save_for_backward(total, weight, scale)
        ctx.kernels, ctx.offset, ctx.alpha = kernels, offset, alpha
        ctx.dtype_of_added = added.dtype
        return total, normed

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        total, weight, scale = ctx.saved_tensors
        grad_sum, grad = grads[0].contiguous(), grads[1].contiguous()
        to_sum, to_weight = ctx.kernels.norm_backward(
            grad, grad_sum, total, weight, scale, ctx.offset, ctx.needs_input_grad[3]
        )
        to_added = to_sum if ctx.alpha == 1 else to_sum * ctx.alpha
        to_added = to_added.to(ctx.dtype_of_added)
        return None, to_sum, to_added, to_weight, None, None, None, None


class _GatedSiLU(Function):
    @staticmethod
    def forward(ctx: Any, kernels: Kernels, x: Tensor) -> Tensor:
        x = x.contiguous()
        ctx.save_for_backward(x)
        ctx.kernels = kernels
        return kernels.silu_forward(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, Tensor]:
        (x,) = ctx.saved_tensors
        return None, ctx.kernels.silu_backward(grads[0].contiguous(), x)


class _SplitAndRotate(Function):
    @staticmethod
    def forward(
        ctx: Any,
        kernels: Kernels,
        mixed: Tensor,
        cos: Tensor,
        sin: Tensor,
        groups: int,
        channels: int,
    ) -> tuple[Tensor, Tensor, Tensor]:
        ctx.save_for_backward(cos, sin)
        ctx.kernels = kernels
        return kernels.split_forward(mixed.contiguous(), cos, sin, groups, channels)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        query, key, value = (grad.contiguous() for grad in grads)
        to_mixed = ctx.kernels.split_backward(query, key, value, *ctx.saved_tensors)
        return None, to_mixed, None, None, None, None


class _SumOutputs(Function):
    @staticmethod
    def forward(
        ctx: Any, kernels: Kernels, rows: Tensor, weights: Tensor, places: Tensor
    ) -> Tensor:
        weights = weights.contiguous()
        ctx.save_for_backward(rows, weights, places)
        ctx.kernels = kernels
        return kernels.sum_outputs(rows, weights, places)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        gradients = ctx.kernels.output_gradients(grads[0].contiguous(), *ctx.saved_tensors)
        return None, *gradients, None


def fused_kernels(name: str, kernels: Kernels) -> PointwiseKernels:
    """Make an implementation of the pointwise operations, with autograd, from ``kernels``.

    For dtypes that the kernels do not support, it calls the eager functions.
    """

    def rms_norm(
        x: Tensor, weight: Tensor, eps: float, offset: float, dtype: torch.dtype
    ) -> Tensor:
        if x.dtype not in FLOATS:
            return eager.offset_rms_norm(x, weight, eps, offset, dtype)
        return _RMSNorm.apply(kernels, x, weight, eps, offset, dtype)

    def add_rms_norm(
        x: Tensor,
        added: Tensor,
        weight: Tensor,
        eps: float,
        offset: float,
        dtype: torch.dtype,
        alpha: float,
    ) -> tuple[Tensor, Tensor]:
        if x.dtype not in FLOATS:
            return eager.add_rms_norm(x, added, weight, eps, offset, dtype, alpha)
        return _AddRMSNorm.apply(kernels, x, added, weight, eps, offset, dtype, alpha)

    def gated_silu(x: Tensor) -> Tensor:
        return _GatedSiLU.apply(kernels, x) if x.dtype in FLOATS else eager.gated_silu(x)

    def split_and_rotate(
        mixed: Tensor, cos: Tensor, sin: Tensor, groups: int, channels: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        return _SplitAndRotate.apply(kernels, mixed, cos, sin, groups, channels)

    def sum_outputs(rows: Tensor, weights: Tensor, places: Tensor) -> Tensor:
        if rows.dtype not in FLOATS:
            return eager.sum_outputs(rows, weights, places)
        return _SumOutputs.apply(kernels, rows.contiguous(), weights, places)

    return PointwiseKernels(name, rms_norm, add_rms_norm, gated_silu, split_and_rotate, sum_outputs)
