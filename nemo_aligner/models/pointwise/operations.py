"""The pointwise operations of a decoder layer that have several implementations.

A layer's RMSNorm, SwiGLU and RoPE, and the sum of the outputs of a token's experts, are bound by
memory bandwidth, and at small widths by the time that the host takes to launch their kernels. Fused
kernels need one pass over memory and one launch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from nemo_aligner.config.kernels import PointwiseChoice
from nemo_aligner.models.pointwise import eager


class NormOperation(Protocol):
    """Compute RMSNorm of ``x [..., c]`` with ``weight [c] + offset``, returned in ``dtype``."""

    def __call__(
        self, x: Tensor, weight: Tensor, eps: float, offset: float, dtype: torch.dtype
    ) -> Tensor: ...


class AddNormOperation(Protocol):
    """Compute the sum ``x + alpha * added``, in the dtype of ``x``, and the norm of the sum."""

    def __call__(
        self,
        x: Tensor,
        added: Tensor,
        weight: Tensor,
        eps: float,
        offset: float,
        dtype: torch.dtype,
        alpha: float,
    ) -> tuple[Tensor, Tensor]: ...


class SplitOperation(Protocol):
    """Split ``mixed [T, 1, groups * (repeats + 2) * channels]``, and rotate queries and keys.

    For each group ``mixed`` has the channels of its query heads, then of its key and its value.
    RoPE rotates the first ``2 r`` channels of a head by ``cos`` and ``sin``, both ``[T, 1, 1, r]``,
    like ``rotary.rotate``.

    Returns:
        Queries ``[T, groups * repeats, channels]``, keys and values ``[T, groups, channels]``, all
        contiguous.
    """

    def __call__(
        self, mixed: Tensor, cos: Tensor, sin: Tensor, groups: int, channels: int
    ) -> tuple[Tensor, Tensor, Tensor]: ...


class SumOperation(Protocol):
    """Compute ``eager.sum_outputs``: ``[T * k, c] -> [T, c]``, in fp32."""

    def __call__(self, rows: Tensor, weights: Tensor, places: Tensor) -> Tensor: ...


@dataclass(frozen=True)
class PointwiseKernels:
    """One implementation of the operations, each with its backward pass.

    For shapes and dtypes that it does not support, an implementation calls the eager functions.

    Attributes:
        gated_silu: SwiGLU, ``silu(gate) * linear``, ``[..., 2 f] -> [..., f]``.
        split_and_rotate: None if attention splits heads and applies RoPE by separate operations.
        sum_outputs: the weighted sum of the outputs of each token's experts.
    """

    name: str
    rms_norm: NormOperation
    add_rms_norm: AddNormOperation
    gated_silu: Callable[[Tensor], Tensor]
    split_and_rotate: SplitOperation | None
    sum_outputs: SumOperation = eager.sum_outputs


EAGER = PointwiseKernels(
    PointwiseChoice.eager.value,
    eager.offset_rms_norm,
    eager.add_rms_norm,
    eager.gated_silu,
    split_and_rotate=None,
)


def use_pointwise_kernels(model: torch.nn.Module, kernels: PointwiseKernels) -> None:
    """Make ``model`` compute all operations that ``kernels`` has with them."""
    for module in model.modules():
        if isinstance(getattr(module, "pointwise", None), PointwiseKernels):
            module.pointwise = kernels  # type: ignore[assignment]
