"""Libraries and compilers that compute the operations of a model, as settings name them."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class PointwiseChoice(Enum):
    """The library or compiler that computes RMSNorm, SwiGLU and RoPE."""

    eager = "eager"
    compile = "compile"
    liger = "liger"
    triton = "triton"


class AttentionChoice(Enum):
    """The library whose GPU kernels compute attention in training and scoring."""

    torch = "torch"
    flash_attn_3 = "flash_attn_3"
    flash_attn_4 = "flash_attn_4"


class DeltaChoice(Enum):
    """The library that computes the gated delta rule of Gated DeltaNet layers in training."""

    torch = "torch"
    flash_linear_attention = "flash_linear_attention"


@dataclass(frozen=True)
class KernelChoices:
    """Which implementations compute the operations of a model, in training and in scoring.

    Attributes:
        pointwise: ``model.pointwise_kernels``; None chooses the default of the device.
        attention: ``model.attention_kernels``.
        batch_invariant: ``model.batch_invariant``: no kernels may be used whose results depend on
            the batch.
    """

    pointwise: PointwiseChoice | None = None
    attention: AttentionChoice = AttentionChoice.torch
    batch_invariant: bool = True


DEFAULT_KERNELS = KernelChoices()
TORCH_KERNELS = KernelChoices(PointwiseChoice.eager)
"""All operations are torch's own, as in transformers."""
