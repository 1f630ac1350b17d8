"""Pointwise operations in plain torch, as autograd functions that save little but their inputs.

Without these functions, autograd would save several tensors of the input's size for each operation,
and read and write memory as many times. On a CPU that takes a third of a layer's memory and a tenth
of its time.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function

# The most elements that torch gives to one thread while others are free: at::internal::GRAIN_SIZE,
# and GELU's own limit (Activation.cpp).
_GRAIN, _GELU_GRAIN = 2**15, 2**14
# More elements than torch computes in one step of a vector register, of any dtype and processor.
_REGISTER = 64


def gated_silu(x: Tensor) -> Tensor:
    """Compute SwiGLU, ``silu(gate) * linear``, from gate and linear: ``[..., 2 f] -> [..., f]``.

    Shazeer 2020, arXiv:2002.05202. Only ``x`` is saved for the backward pass.
    """
    return _Gated.apply(x, F.silu, torch.ops.aten.silu_backward.grad_input)


def gated_gelu(x: Tensor) -> Tensor:
    """Compute GEGLU with tanh GELU (Shazeer 2020), as in Gemma: ``[..., 2 f] -> [..., f]``."""
    return _Gated.apply(x, _gelu, _gelu_backward)


def quick_gated_gelu(x: Tensor, limit: float | None) -> Tensor:
    """Compute gpt-oss' ``(up + 1) * gate * sigmoid(1.702 * gate)``: ``[..., 2 f] -> [..., f]``.

    Only ``x``, which is the gate and then ``up``, is saved for the backward pass.

    Args:
        limit: the gate is at most ``limit``, and ``up`` from ``-limit`` to ``limit``; None means no
            limit.
    """
    return _QuickGated.apply(x, torch.inf if limit is None else limit)


def by_whole_rows(function: Callable[[Tensor], Tensor], x: Tensor, is_gated: bool = True) -> Tensor:
    """Apply ``function`` to ``x [T, ..., c]`` on a CPU; a row's result is the same for any T.

    torch splits the elements evenly over its threads. A thread uses a different exponential for its
    last elements, if they do not fill a vector register. Zero rows are added until every thread
    gets whole rows. Then these elements are at the same place in every row. Rows that are not
    gated follow one another in memory, so they are also padded to whole vector registers.

    Args:
        is_gated: the result has half as many elements as ``x``, because one half gates the other.
    """
    if x.size(0) == 0:
        return function(x)
    channels = x.size(-1)
    if not is_gated and channels % _REGISTER:
        return by_whole_rows(function, F.pad(x, (0, -channels % _REGISTER)), False)[..., :channels]
    rows, width = x.size(0), x.numel() // x.size(0) // (1 + is_gated)
    fitting = next(count for count in itertools.count(rows) if _splits_by_rows(count, width))
    if fitting == rows:
        return function(x)
    return function(F.pad(x, (0, 0) * (x.dim() - 1) + (0, fitting - rows)))[:rows]


def _splits_by_rows(rows: int, width: int) -> bool:
    """Tell if torch splits ``rows`` rows of ``width`` elements so that each thread gets whole rows.

    torch uses one thread for each ``_GRAIN`` elements, up to all threads. Its GELU uses all threads
    for more than ``_GELU_GRAIN`` elements.
    """
    numbers, threads = rows * width, torch.get_num_threads()
    by_grains = min(threads, -(-numbers // _GRAIN))
    return rows % by_grains == 0 and (numbers <= _GELU_GRAIN or rows % threads == 0)


def squared_relu(x: Tensor) -> Tensor:
    """Compute ``relu(x)^2`` (Primer, So et al. 2021); save ``relu(x)`` for the backward pass."""
    return F.relu(x).square()


def gelu(x: Tensor) -> Tensor:
    """Compute the exact GELU, ``x * Phi(x)`` (Hendrycks and Gimpel 2016)."""
    return F.gelu(x)


def tanh_gelu(x: Tensor) -> Tensor:
    """Compute GELU's tanh approximation (Hendrycks and Gimpel 2016)."""
    return F.gelu(x, approximate="tanh")


def xielu(x: Tensor, positive: Tensor, negative: Tensor, beta: Tensor, limit: Tensor) -> Tensor:
    """Compute xIELU (Huang and Schlag 2024, arXiv:2411.13010) of ``x [..., c]``.

    It is ``positive x^2 + beta x`` for x above 0, and ``negative (expm1(min(x, limit)) - x) + beta
    x`` elsewhere. Only ``x`` and the scalars are saved for the backward pass.
    """
    return _XIELU.apply(x, positive, negative, beta, limit)


class _XIELU(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, *scalars: Tensor) -> Tensor:
        ctx.save_for_backward(x, *scalars)
        positive, negative, beta, limit = scalars
        out = torch.minimum(x, limit).expm1_().sub_(x).mul_(negative)
        squares = (x * positive).mul_(x)
        return torch.where(x > 0, squares, out, out=out).addcmul_(x, beta)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None]:
        (x, positive, negative, beta, limit), (grad,) = ctx.saved_tensors, grads
        is_positive = x > 0
        exponential = torch.minimum(x, limit).expm1_()
        # Each of these is as large as x, so it is summed and freed before the next one is made.
        curves = (exponential - x).mul_(grad).masked_fill_(is_positive, 0.0)
        to_negative = curves.sum(dtype=torch.float32).to(negative.dtype)
        del curves
        squares = (x * x).mul_(grad).masked_fill_(~is_positive, 0.0)
        to_positive = squares.sum(dtype=torch.float32).to(positive.dtype)
        del squares
        # The derivative of expm1 is 1 + expm1, and 0 where the limit replaces x.
        slope = exponential.masked_fill_(x >= limit, -1.0).mul_(negative)
        torch.where(is_positive, x * (2 * positive), slope, out=slope)
        return slope.add_(beta).mul_(grad), to_positive, to_negative, None, None


_gelu = partial(F.gelu, approximate="tanh")
_gelu_backward = partial(torch.ops.aten.gelu_backward.grad_input, approximate="tanh")


class _Gated(Function):
    """Autograd function for ``activation(gate) * linear``.

    ``derivative`` is torch's operator for the backward pass of ``activation``.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, activation: Callable[..., Tensor], derivative: Callable[..., Tensor]
    ) -> Tensor:
        ctx.save_for_backward(x)
        ctx.activation, ctx.derivative = activation, derivative
        gate, linear = x.chunk(2, dim=-1)
        return activation(gate).mul_(linear)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        (x,), (grad,) = ctx.saved_tensors, grads
        gate, linear = x.chunk(2, dim=-1)
        out = torch.empty_like(x)
        to_gate, to_linear = out.chunk(2, dim=-1)
        scratch = ctx.activation(gate)
        torch.mul(grad, scratch, out=to_linear)
        torch.mul(grad, linear, out=scratch)
        ctx.derivative(scratch, gate, grad_input=to_gate)
        return out, None, None


_QUICK_ALPHA = 1.702


class _QuickGated(Function):
    """Autograd function for ``quick_gated_gelu``."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, limit: float) -> Tensor:
        ctx.save_for_backward(x)
        ctx.limit = limit
        gate, up = x.chunk(2, dim=-1)
        gate = gate.clamp(max=limit)
        # The rows of the sigmoid's input are not adjacent. If they were, torch would compute them
        # as one long row, and a row's last elements by another exponential than in other packs.
        scaled = torch.empty_like(x).chunk(2, dim=-1)[0]
        factor = torch.mul(gate, _QUICK_ALPHA, out=scaled).sigmoid()
        return gate.mul_(factor).mul_(up.clamp(-limit, limit).add_(1))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        (x,), (grad,), limit = ctx.saved_tensors, grads, ctx.limit
        gate, up = x.chunk(2, dim=-1)
        out = torch.empty_like(x)
        to_gate, to_up = out.chunk(2, dim=-1)
        scratch = gate.clamp(max=limit)
        torch.mul(scratch, _QUICK_ALPHA, out=to_gate)
        factor = to_gate.sigmoid()
        torch.mul(scratch, factor, out=to_up).mul_(grad)
        # The derivative of gate * sigmoid(a gate) is factor * (1 + a gate * (1 - factor)).
        torch.neg(factor, out=scratch).add_(1)
        to_gate.mul_(scratch).add_(1).mul_(factor).mul_(grad)
        to_gate.mul_(torch.clamp(up, -limit, limit, out=scratch).add_(1))
        to_gate.masked_fill_(gate > limit, 0.0)
        torch.abs(up, out=scratch)
        to_up.masked_fill_(scratch > limit, 0.0)
        return out, None


@dataclass(frozen=True)
class Shared:
    """How a norm's rows are split over ranks, each of which has some channels of every row.

    Attributes:
        width: number of channels of a whole row.
        total: function that sums ``[..., 1]`` over the ranks.
    """

    width: int
    total: Callable[[Tensor], Tensor]


def rms_norm(
    x: Tensor,
    weight: Tensor,
    eps: float,
    dtype: torch.dtype | None = None,
    shared: Shared | None = None,
) -> Tensor:
    """Compute ``x / sqrt(mean(x^2) + eps) * weight`` over the last dim (Zhang and Sennrich 2019).

    The norm is computed in fp32 and returned in ``dtype``, by default the dtype of ``x``. For the
    backward pass it saves ``x`` and one value per row. On CUDA torch's fused kernel is used if
    ``weight`` has the dtype of ``x`` or ``x`` is fp32, unless ``shared`` says that rows are split
    over ranks.
    """
    dtype = x.dtype if dtype is None else dtype
    if shared is None and x.is_cuda and x.dtype in (weight.dtype, torch.float32):
        return F.rms_norm(x, (x.size(-1),), weight.to(x.dtype), eps).to(dtype)
    return _RMSNorm.apply(x, weight, eps, dtype, shared or Shared(x.size(-1), _alone))


def offset_rms_norm(
    x: Tensor, weight: Tensor, eps: float, offset: float, dtype: torch.dtype
) -> Tensor:
    """Compute ``rms_norm`` with the weight ``weight + offset`` in fp32; Gemma stores gamma - 1."""
    return rms_norm(x, weight.float() + offset if offset else weight, eps, dtype)


def add_rms_norm(
    x: Tensor,
    added: Tensor,
    weight: Tensor,
    eps: float,
    offset: float,
    dtype: torch.dtype,
    alpha: float,
) -> tuple[Tensor, Tensor]:
    """Return the sum ``x + alpha * added``, and its ``offset_rms_norm`` in ``dtype``."""
    total = torch.add(x, added, alpha=alpha)
    return total, offset_rms_norm(total, weight, eps, offset, dtype)


def sum_outputs(rows: Tensor, weights: Tensor, places: Tensor) -> Tensor:
    """Sum the outputs of each token's k experts in fp32: ``[T * k, c] -> [T, c]``.

    Args:
        rows: outputs of the experts.
        weights: ``[T, k]``; row ``places[t, i]`` is multiplied by ``weights[t, i]``.
        places: ``[T, k]`` int64: the row of the output of token t's i-th expert. Each row has one
            place.
    """
    total: Tensor = _SumOutputs.apply(rows, weights, places)
    return total


class _SumOutputs(Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, weights: Tensor, places: Tensor) -> Tensor:
        ctx.save_for_backward(rows, weights, places)
        total = rows.new_zeros(places.size(0), rows.size(1), dtype=torch.float32)
        for index, weight in zip(places.unbind(1), weights.unbind(1), strict=True):
            total += rows[index] * weight[:, None]
        return total

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None]:
        (grad,), (rows, weights, places) = grads, ctx.saved_tensors
        to_rows, to_weights = torch.empty_like(rows), torch.empty_like(weights)
        for number, index in enumerate(places.unbind(1)):
            to_rows[index] = (grad * weights[:, number, None]).to(rows.dtype)
            to_weights[:, number] = (grad * rows[index]).sum(1)
        return to_rows, to_weights, None


def _alone(partial: Tensor) -> Tensor:
    return partial


class _RMSNorm(Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, eps: float, dtype: torch.dtype, shared: Shared
    ) -> Tensor:
        wide = x.float()
        norm = torch.linalg.vector_norm(wide, dim=-1, keepdim=True)
        scale = shared.total(norm.square_()).div_(shared.width).add_(eps).rsqrt_()
        ctx.save_for_backward(x, weight, scale)
        ctx.shared = shared
        return (wide * scale).mul_(weight).to(dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None, None, None]:
        x, weight, scale = ctx.saved_tensors
        grad, wide_weight = grads[0].float(), weight.float()
        normed = x.float() * scale
        product = grad * normed
        to_weight = product.flatten(0, -2).sum(0)
        mean = torch.matmul(product, wide_weight).unsqueeze(-1)
        mean = ctx.shared.total(mean).div_(ctx.shared.width)
        to_x = torch.mul(grad, wide_weight, out=product)
        to_x.addcmul_(normed, mean, value=-1).mul_(scale)
        return to_x.to(x.dtype), to_weight.to(weight.dtype), None, None, None
