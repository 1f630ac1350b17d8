"""Steps beside AdamW written out: a gradient above the limit is shortened to it."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from nemo_aligner.config.common import Precision
from nemo_aligner.config.model import OptimConfig, Schedule, SchedulerConfig
from nemo_aligner.distributed.layout import ParallelLayout
from nemo_aligner.models.reward_model import build_reward_model
from nemo_aligner.models.training_wrap import wrap_for_training
from nemo_aligner.training.optimizer import build_optimizer
from tests.training import poisoned

CONFIG = OptimConfig(
    lr=0.01,
    weight_decay=0.1,
    betas=[0.9, 0.95],
    eps=1e-6,
    sched=SchedulerConfig(name=Schedule.constant, warmup_steps=0),
)
# Norms below the limit and above it: Adam's very first step does not tell a scale.
LIMIT = 1.0
SCALES = (0.001, 0.1, 0.002, 3.0)


class WrittenOut:
    """AdamW with its gradient clipped by the norm of all of it, in float64."""

    def __init__(self, weights: list[torch.Tensor], limit: float) -> None:
        self.weights = [weight.double().clone() for weight in weights]
        self._first = [torch.zeros_like(weight) for weight in self.weights]
        self._second = [torch.zeros_like(weight) for weight in self.weights]
        self._limit = limit
        self._steps = 0

    def step(self, gradients: list[torch.Tensor]) -> float:
        """The norm before clipping."""
        self._steps += 1
        norm = math.sqrt(sum(float(gradient.square().sum()) for gradient in gradients))
        factor = self._limit / norm if 0 < self._limit < norm else 1.0
        one, two = CONFIG.betas
        for index, gradient in enumerate(gradients):
            clipped, weight = factor * gradient, self.weights[index]
            first, second = self._first[index], self._second[index]
            first.mul_(one).add_(clipped, alpha=1 - one)
            second.mul_(two).add_(clipped.square(), alpha=1 - two)
            if weight.dim() > 1:
                weight.mul_(1 - CONFIG.lr * CONFIG.weight_decay)
            down = (second / (1 - two**self._steps)).sqrt() + CONFIG.eps
            weight.sub_(CONFIG.lr * first / (1 - one**self._steps) / down)
        return norm


def gradients_of(parameters: list[torch.Tensor], step: int, rank: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(100 * step + rank)
    scale = SCALES[step]
    return [scale * torch.randn(p.shape, generator=generator).double() for p in parameters]


def compare(layout: ParallelLayout, limit: float) -> dict[str, Any]:
    """Norms and weights of a few steps; the gradients of data parallel ranks add up."""
    model = build_reward_model(poisoned.SHAPE, layout, num_attributes=1, precision=Precision.fp32)
    torch.manual_seed(0)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    parameters = list(model.parameters())
    written_out = WrittenOut([parameter.detach() for parameter in parameters], limit)
    wrapped = wrap_for_training(model, bucket_size=500)
    optimizer = build_optimizer(wrapped, CONFIG, limit, total_steps=len(SCALES))
    norms, expected = [], []
    for step in range(len(SCALES)):
        of_ranks = [gradients_of(parameters, step, rank) for rank in range(layout.dp)]
        wrapped.zero_grad_buffer()
        for parameter, gradient in zip(parameters, of_ranks[layout.dp_rank], strict=True):
            parameter.main_grad.copy_(gradient)
        wrapped.start_grad_sync()
        wrapped.finish_grad_sync()
        norms.append(optimizer.step().grad_norm)
        expected.append(written_out.step([sum(parts) for parts in zip(*of_ranks, strict=True)]))
    optimizer.finish_update()
    pairs = zip(parameters, written_out.weights, strict=True)
    difference = max(float((clipped.detach() - weight).abs().max()) for clipped, weight in pairs)
    return {"norms": norms, "wanted": expected, "difference": difference}


def check(results: dict[str, Any]) -> None:
    assert results["norms"] == pytest.approx(results["wanted"], rel=1e-5)  # as they were
    assert min(results["wanted"]) < LIMIT < max(results["wanted"])
    # float32 beside float64, after a few steps of 0.01.
    assert results["difference"] < 1e-5


def test_clipping_moves_the_weights_as_adamw_on_the_clipped_gradient(
    layout: ParallelLayout,
) -> None:
    """At zero nothing is clipped."""
    for limit in (LIMIT, 0.0):
        check(compare(layout, limit))


def test_clipping_on_two_ranks_is_by_the_norm_of_the_whole_gradient(
    two_ranks: dict[str, Any],
) -> None:
    check(two_ranks["clipping"])
