"""The gradient's norm over all ranks, and its clipping, with one wait for the device.

Without Apex and TransformerEngine megatron-core waits for the norm of every parameter.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.utils import get_total_norm

from nemo_aligner.training.optimizer.megatron_internals import gradients_for_norm, multiply_in_place

_EPSILON = 1e-6  # as Megatron and torch have it


def gradient_norm(optimizers: Sequence[Any]) -> float:
    """The L2 norm of the gradients of all ranks, each parameter's counted once; collective."""
    squares = []
    for optimizer in optimizers:
        gradients = gradients_for_norm(optimizer)
        square = torch.zeros(1, device=torch.cuda.current_device())
        if gradients:
            square += get_total_norm(gradients) ** 2.0
        dist.all_reduce(square, group=optimizer.get_grad_stats_parallel_group())
        squares.append(square)
    return math.sqrt(sum(torch.cat(squares).tolist()))


def clip_gradients(optimizers: Sequence[Any], limit: float, norm: float) -> None:
    """Scale gradients of this ``norm`` down to ``limit``, if they are above it (Pascanu 2013)."""
    factor = limit / (norm + _EPSILON)
    if factor >= 1.0:
        return
    for optimizer in optimizers:
        gradients = [each.grad for each in optimizer.get_parameters() if each.grad is not None]
        if gradients:
            multiply_in_place(gradients, factor)
