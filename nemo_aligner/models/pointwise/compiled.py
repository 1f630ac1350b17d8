"""The pointwise operations as plain formulas, each compiled by ``torch.compile``.

Forward and backward are compiled separately, inside an autograd function. So torch does not trace
through autograd, this module decides what is saved for the backward pass, and calls need not check
guards on autograd's state.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from nemo_aligner.config.kernels import PointwiseChoice
from nemo_aligner.models.internals import allow_recompiles
from nemo_aligner.models.pointwise.fused import fused_kernels
from nemo_aligner.models.pointwise.operations import PointwiseKernels


class CompiledKernels:
    """``fused.Kernels`` that ``torch.compile`` compiles with a ``backend``.

    torch first compiles for one number of tokens, and when another number occurs, for any number.
    If all packs have the same size, only the first version is used, which is slightly faster.
    """

    def __init__(self, backend: str) -> None:
        # torch compiles a function once for each width, dtype and set of options that a model has.
        allow_recompiles(64)

        def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
            return torch.compile(function, backend=backend)

        self.norm_forward = compiled(norm_forward)
        self.norm_backward = compiled(norm_backward)
        self.silu_forward = compiled(silu_forward)
        self.silu_backward = compiled(silu_backward)
        self.split_forward = compiled(split_forward)
        self.split_backward = compiled(split_backward)
        self.sum_outputs = compiled(sum_outputs)
        self.output_gradients = compiled(output_gradients)


def compiled_kernels(backend: str = "inductor") -> PointwiseKernels:
    """Build the implementation whose operations ``torch.compile`` compiles at their first call."""
    return fused_kernels(PointwiseChoice.compile.value, CompiledKernels(backend))


def norm_forward(
    x: Tensor,
    added: Tensor | None,
    weight: Tensor,
    eps: float,
    offset: float,
    dtype: torch.dtype,
    alpha: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the sum ``x + alpha * added``, its norm, and the factor that norms each row.

    ``fused.Kernels.norm_forward`` describes arguments and results.
    """
    total = x if added is None else torch.add(x, added, alpha=alpha)
    wide = total.float()
    scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return total, (wide * scale * (weight.float() + offset)).to(dtype), scale


def norm_backward(
    grad: Tensor,
    grad_sum: Tensor | None,
    total: Tensor,
    weight: Tensor,
    scale: Tensor,
    offset: float,
    needs_weight: bool,
) -> tuple[Tensor, Tensor | None]:
    """Compute the gradients of a norm's input, and of its weight if ``needs_weight`` is set.

    Args:
        grad: gradient of the norm's output.
        grad_sum: gradient of the sum from its other uses; None is 0.
        total, scale: the sum and the rows' factors from ``norm_forward``.
    """
    wide = grad.float()
    normed = total.float() * scale
    weighted = wide * (weight.float() + offset)
    to_sum = (weighted - normed * (weighted * normed).mean(-1, keepdim=True)) * scale
    if grad_sum is not None:
        to_sum = to_sum + grad_sum.float()
    to_weight = (wide * normed).flatten(0, -2).sum(0).to(weight.dtype) if needs_weight else None
    return to_sum.to(total.dtype), to_weight


def silu_forward(x: Tensor) -> Tensor:
    """Compute SwiGLU, ``silu(gate) * linear``: ``[..., 2 f] -> [..., f]``.

    The gate is the first half of the channels of ``x``.
    """
    gate, linear = x.float().chunk(2, dim=-1)
    return (gate * torch.sigmoid(gate) * linear).to(x.dtype)


def silu_backward(grad: Tensor, x: Tensor) -> Tensor:
    """Compute the gradient of ``x [..., 2 f]`` from ``grad [..., f]``, that of SwiGLU's output."""
    gate, linear = x.float().chunk(2, dim=-1)
    wide, sigmoid = grad.float(), torch.sigmoid(gate)
    to_gate = wide * linear * sigmoid * (1 + gate * (1 - sigmoid))
    return torch.cat([to_gate, wide * gate * sigmoid], dim=-1).to(x.dtype)


def split_forward(
    mixed: Tensor, cos: Tensor, sin: Tensor, groups: int, channels: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Split linear_qkv's output ``mixed`` into queries, keys and values, and apply RoPE.

    ``SplitOperation`` describes arguments and results.
    """
    heads = mixed.view(mixed.size(0), groups, -1, channels)
    rotated = _rotate(heads[:, :, :-1], cos, sin)
    query, key = rotated[:, :, :-1].flatten(1, 2), rotated[:, :, -1]
    return query.contiguous(), key.contiguous(), heads[:, :, -1].contiguous()


def split_backward(query: Tensor, key: Tensor, value: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Compute the gradient of linear_qkv's output from those of queries, keys and values."""
    groups = key.size(1)
    rotated = torch.cat([query.unflatten(1, (groups, -1)), key.unsqueeze(2)], dim=2)
    heads = torch.cat([_rotate(rotated, cos, -sin), value.unsqueeze(2)], dim=2)
    return heads.flatten(1).unsqueeze(1)


def sum_outputs(rows: Tensor, weights: Tensor, places: Tensor) -> Tensor:
    """Compute ``eager.sum_outputs``: ``[T * k, c] -> [T, c]``, in fp32."""
    return (rows[places].float() * weights[..., None].float()).sum(1)


def output_gradients(
    grad: Tensor, rows: Tensor, weights: Tensor, places: Tensor
) -> tuple[Tensor, Tensor]:
    """Compute the gradients of ``rows [T * k, c]`` and of ``weights [T, k]``.

    Args:
        grad: ``[T, c]`` fp32: gradient of the sums.
    """
    to_outputs = (grad[:, None] * weights[..., None].float()).to(rows.dtype)
    to_rows = torch.empty_like(rows).index_copy(0, places.flatten(), to_outputs.flatten(0, 1))
    to_weights = (grad[:, None] * rows[places].float()).sum(-1)
    return to_rows, to_weights.to(weights.dtype)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    half = cos.size(-1)
    first, second = x[..., :half].float(), x[..., half : 2 * half].float()
    turned = (first * cos - second * sin).to(x.dtype), (second * cos + first * sin).to(x.dtype)
    return torch.cat([*turned, x[..., 2 * half :]], dim=-1)
