"""Quantiles: the pinball loss against its formula, and what a model learns by it."""

from __future__ import annotations

import math
from functools import partial

import pytest
import torch

from nemo_aligner.objectives.quantiles import Quantiles
from tests.objectives.hand_made import accepted, learn, rated

NAMES = ("help", "brief")


def test_quantiles_label_above_an_output_costs_its_level_and_one_below_the_rest() -> None:
    objective = Quantiles(NAMES, levels=[0.2, 0.5])
    outputs = torch.tensor([[1.0, 2.0, 7.0, 7.0], [0.0, 5.0, 1.0, -1.0]], requires_grad=True)
    total, count = objective.loss(outputs, rated(torch.tensor([[3.0, math.nan], [2.0, 0.0]])))
    total.backward()
    wanted = (0.2 * 2 + 0.5 * 1 + 0.2 * 2 + 0.5 * 3 + 0.8 * 1 + 0.5 * 1) / 2
    assert (total.item(), int(count)) == (pytest.approx(wanted), 3)
    torch.testing.assert_close(
        2 * outputs.grad, torch.tensor([[-0.2, -0.5, 0, 0], [-0.2, 0.5, 0.8, -0.5]])
    )


def test_linear_model_learns_the_quantiles_of_noise_that_grows() -> None:
    generator = torch.Generator().manual_seed(2)
    scale = torch.rand(2000, 1, generator=generator)
    labels = 2.0 + scale * torch.rand(2000, 1, generator=generator)
    objective = Quantiles(("help",))
    outputs = learn(objective, scale, rated(labels), steps=800)
    wanted = 2.0 + scale.double() * torch.tensor([0.1, 0.5, 0.9], dtype=torch.float64)
    assert float((outputs - wanted).abs().max()) < 0.06
    report = objective.report(outputs, rated(labels), torch.ones(2000, dtype=torch.int64))
    assert report["spread/help"] == pytest.approx(0.8 * float(scale.mean()), abs=0.05)
    assert report["spread_error_correlation/help"] > 0.3


def test_quantile_levels_without_a_median_or_an_order_are_refused() -> None:
    levels = ([0.1, 0.9], [0.5, 0.1], [0.5, 1.0], [0.5], 0.5)
    assert not accepted(partial(Quantiles, NAMES), *(({"levels": each}, "got ") for each in levels))
    assert not accepted(partial(Quantiles, NAMES), ({"levels": ["x", 0.5]}, ""))
