"""Norms as megatron-core builds them, and the fused pointwise parts of a layer."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor
from torch.autograd import Function

# Norms as megatron-core builds them: of a residual stream of any dtype, for products in one.


class SequenceParallelRMSNorm(torch.nn.RMSNorm):
    """RMSNorm that tells Megatron whether its weight sees only a shard of the tokens.

    Its output has the dtype of the model, as the products want it, whatever the input's.
    Unmarked under sequence parallelism, its gradient would miss the other ranks' tokens.
    """

    def __init__(
        self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **unused: Any
    ) -> None:
        device = torch.cuda.current_device()
        super().__init__(hidden_size, eps=eps, dtype=config.params_dtype, device=device)
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
        self._eps = eps
        self._is_zero_centered = config.layernorm_zero_centered_gamma
        self._dtype = config.params_dtype

    def forward(self, x: Tensor) -> Tensor:
        weight = self.weight.float() + 1 if self._is_zero_centered else self.weight
        return rms_norm(x, weight, self._eps, self._dtype)


class SequenceParallelLayerNorm1P(torch.nn.LayerNorm):
    """The same for a LayerNorm with a bias, whose weight is gamma - 1."""

    def __init__(
        self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **unused: Any
    ) -> None:
        device = torch.cuda.current_device()
        super().__init__(hidden_size, eps=eps, dtype=config.params_dtype, device=device)
        for parameter in self.parameters():
            parameter.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
        self._dtype = config.params_dtype

    def forward(self, x: Tensor) -> Tensor:
        weight, bias = self.weight.to(x.dtype), self.bias.to(x.dtype)
        normed = F.layer_norm(x, self.normalized_shape, weight + 1, bias, self.eps)
        return normed.to(self._dtype)


NORMS = {"RMSNorm": SequenceParallelRMSNorm, "LayerNorm": SequenceParallelLayerNorm1P}


# The pointwise parts of a layer, in few passes over memory, and keeping little for the backward.
#
# Left to autograd, each of them keeps several tensors of its input's size and makes as many passes
# again; on a CPU that is a third of a layer's memory and a tenth of its time.

# Numbers that one thread computes: at::internal::GRAIN_SIZE, and GELU's own (Activation.cpp).
_GRAIN, _GELU_GRAIN = 2**15, 2**14


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary position embedding (RoFormer, Su et al. 2021) of the first ``2 r`` channels.

    Channel ``i`` turns with channel ``i + r``, as GPT-NeoX and Llama pair them.

    Args:
        x: ``[T, 1, heads, c]``, ``c >= 2 r``.
        cos: ``[T, 1, 1, r]`` in the dtype of ``x``.
        sin: the same of the sines.
    """
    return _Rotate.apply(x, cos, sin)


class _Rotate(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return _rotated(x, cos, sin)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        return _rotated(grads[0], cos, -sin), None, None


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    half, channels = cos.size(-1), x.size(-1)
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    first, second = x[..., :half], x[..., half : 2 * half]
    torch.mul(first, cos, out=out[..., :half]).addcmul_(second, sin, value=-1)
    torch.mul(second, cos, out=out[..., half : 2 * half]).addcmul_(first, sin)
    if channels > 2 * half:
        out[..., 2 * half :] = x[..., 2 * half :]
    return out


def gated_silu(x: Tensor) -> Tensor:
    """``[..., 2 f] -> [..., f]``: ``silu(gate) * linear`` (SwiGLU, Shazeer 2020), gate first.

    Only ``x`` is kept for the backward.
    """
    return _Gated.apply(x, F.silu, torch.ops.aten.silu_backward.grad_input)


def gated_gelu(x: Tensor) -> Tensor:
    """The same with GELU (GEGLU), by its approximation with tanh, as Gemma has it."""
    return _Gated.apply(x, _gelu, _gelu_backward)


def by_whole_rows(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """``function`` of ``x [T, ..., c]`` on a CPU, the same bits for a row in whatever company.

    torch shares all numbers out over its threads, and what is left over of a thread's share past
    whole vectors has another exponential function. So there are as many rows as can be shared out
    evenly, the last ones of zeros.
    """
    rows, width = x.size(0), x.numel() // x.size(0) // 2
    fitting = next(count for count in itertools.count(rows) if _splits_by_rows(count, width))
    if fitting == rows:
        return function(x)
    return function(F.pad(x, (0, 0) * (x.dim() - 1) + (0, fitting - rows)))[:rows]


def _splits_by_rows(rows: int, width: int) -> bool:
    """Whether each thread gets whole rows, by the rule for pointwise functions, and by GELU's."""
    numbers, threads = rows * width, torch.get_num_threads()
    by_grains = min(threads, -(-numbers // _GRAIN))
    return rows % by_grains == 0 and (numbers <= _GELU_GRAIN or rows % threads == 0)


def squared_relu(x: Tensor) -> Tensor:
    """``relu(x)^2`` (Primer, So et al. 2021); ``relu(x)`` is kept for the backward."""
    return F.relu(x).square()


_gelu = partial(F.gelu, approximate="tanh")
_gelu_backward = partial(torch.ops.aten.gelu_backward.grad_input, approximate="tanh")


class _Gated(Function):
    """``activation(gate) * linear``; ``derivative`` takes a gradient and a gate."""

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


def rms_norm(x: Tensor, weight: Tensor, eps: float, dtype: torch.dtype | None = None) -> Tensor:
    """``x / sqrt(mean(x^2) + eps) * weight`` over the last dimension (Zhang and Sennrich 2019).

    Computed in fp32, given back in ``dtype``, by default that of ``x``; for the backward ``x`` is
    kept and one number per row. CUDA has a kernel for it, which is called there if ``weight`` has
    the dtype of ``x``, or ``x`` is fp32.
    """
    dtype = x.dtype if dtype is None else dtype
    if x.is_cuda and x.dtype in (weight.dtype, torch.float32):
        return F.rms_norm(x, (x.size(-1),), weight.to(x.dtype), eps).to(dtype)
    return _RMSNorm.apply(x, weight, eps, dtype)


class _RMSNorm(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float, dtype: torch.dtype) -> Tensor:
        wide = x.float()
        norm = torch.linalg.vector_norm(wide, dim=-1, keepdim=True)
        scale = norm.square_().div_(x.size(-1)).add_(eps).rsqrt_()
        ctx.save_for_backward(x, weight, scale)
        return (wide * scale).mul_(weight).to(dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None, None]:
        x, weight, scale = ctx.saved_tensors
        grad, wide_weight = grads[0].float(), weight.float()
        normed = x.float() * scale
        product = grad * normed
        to_weight = product.flatten(0, -2).sum(0)
        mean = torch.matmul(product, wide_weight).div_(x.size(-1)).unsqueeze(-1)
        to_x = torch.mul(grad, wide_weight, out=product)
        to_x.addcmul_(normed, mean, value=-1).mul_(scale)
        return to_x.to(x.dtype), to_weight.to(weight.dtype), None, None
