"""The losses against their definitions, and against a mean over everything at once."""

from __future__ import annotations

import math

import pytest
import torch

from nemo_aligner.losses import bradley_terry, masked_mse


def test_bradley_terry_is_the_negative_log_probability_of_the_order() -> None:
    rewards = torch.tensor([[1.0, 0.0], [0.0, 2.0], [3.0, 3.0]])
    total, count = bradley_terry(rewards)
    expected = sum(-math.log(1 / (1 + math.exp(-margin))) for margin in (1.0, -2.0, 0.0))
    assert total.item() == pytest.approx(expected)
    assert int(count) == 3


def test_bradley_terry_stays_finite_at_large_margins() -> None:
    rewards = torch.tensor([[-500.0, 500.0], [500.0, -500.0]], requires_grad=True)
    total, _ = bradley_terry(rewards)
    total.backward()
    assert total.item() == 1000.0
    torch.testing.assert_close(rewards.grad, torch.tensor([[-1.0, 1.0], [0.0, 0.0]]))


def test_masked_mse_leaves_missing_labels_out_of_sum_count_and_gradient() -> None:
    missing = float("nan")
    rewards = torch.tensor([[1.0, 2.0], [3.0, 4.0]], requires_grad=True)
    labels = torch.tensor([[0.0, missing], [5.0, 4.0]])
    total, count = masked_mse(rewards, labels)
    total.backward()
    assert total.item() == 1.0 + 4.0
    assert int(count) == 3
    torch.testing.assert_close(rewards.grad, torch.tensor([[2.0, 0.0], [-4.0, 0.0]]))


@pytest.mark.parametrize("sizes", [(7,), (1, 6), (3, 1, 3)])
def test_sums_over_uneven_batches_give_the_mean_over_everything(sizes: tuple[int, ...]) -> None:
    rewards = torch.randn(7, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    parts = [bradley_terry(part) for part in rewards.split(list(sizes))]
    mean = sum(float(total) for total, _ in parts) / sum(int(count) for _, count in parts)
    expected = -torch.nn.functional.logsigmoid(rewards[:, 0] - rewards[:, 1]).mean()
    assert mean == pytest.approx(float(expected), rel=1e-12)


def test_no_records_are_a_sum_of_nothing() -> None:
    total, count = bradley_terry(torch.zeros(0, 2))
    assert (float(total), int(count)) == (0.0, 0)
    total, count = masked_mse(torch.zeros(0, 3), torch.zeros(0, 3))
    assert (float(total), int(count)) == (0.0, 0)
