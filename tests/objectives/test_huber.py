"""Huber's loss: a square near the label, a line far from it, nothing without one."""

from __future__ import annotations

import math
from functools import partial

import pytest
import torch

from nemo_aligner.objectives.huber import Huber
from nemo_aligner.objectives.masked_mse import MaskedMse
from tests.objectives.hand_made import accepted, learn, rated

NAMES = ("help", "brief")


def test_huber_small_errors_count_by_their_square_and_large_ones_by_their_size() -> None:
    records = rated(torch.tensor([[1.0, math.nan], [0.0, 4.0]]))
    rewards = torch.tensor([[1.5, 9.0], [-2.0, 1.0]], requires_grad=True)
    total, count = Huber(NAMES, delta=0.75).loss(rewards, records)
    total.backward()
    wanted = 0.5 * 0.5**2 + 0.75 * (2.0 - 0.375) + 0.75 * (3.0 - 0.375)
    assert (total.item(), int(count)) == (pytest.approx(wanted), 3)
    torch.testing.assert_close(rewards.grad, torch.tensor([[0.5, 0.0], [-0.75, -0.75]]))


def test_huber_of_a_large_delta_is_half_of_the_squared_error() -> None:
    generator = torch.Generator().manual_seed(0)
    records = rated(torch.randn(6, 2, generator=generator))
    rewards = torch.randn(6, 2, generator=generator)
    huber, _ = Huber(NAMES, delta=100.0).loss(rewards, records)
    squared, _ = MaskedMse(NAMES).loss(rewards, records)
    torch.testing.assert_close(2 * huber, squared)


def test_linear_model_learns_although_a_few_labels_are_far_off() -> None:
    features = torch.randn(200, 3, generator=torch.Generator().manual_seed(2))
    true = features @ torch.tensor([[0.5], [-1.0], [0.25]])
    labels = true.clone()
    labels[:20] = 50.0
    by_huber = learn(Huber(("help",), delta=0.1), features, rated(labels), steps=300)
    by_square = learn(MaskedMse(("help",)), features, rated(labels), steps=300)
    errors = [float((rewards - true)[20:].abs().mean()) for rewards in (by_huber, by_square)]
    assert errors[0] < 0.1 < errors[1]


def test_huber_delta_that_is_not_above_zero_is_refused() -> None:
    for delta in (0, -1.0, math.nan, "1"):
        wrong = ({"delta": delta}, f"delta: got {delta!r}, wanted a number above 0")
        assert not accepted(partial(Huber, NAMES), wrong)
