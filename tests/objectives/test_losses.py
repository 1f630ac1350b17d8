"""The losses against their definitions, and against a mean over everything at once."""

from __future__ import annotations

import math

import pytest
import torch

from nemo_aligner.batch import LabelColumns, Records
from nemo_aligner.objectives.bradley_terry import BradleyTerry
from nemo_aligner.objectives.masked_mse import MaskedMse
from nemo_aligner.objectives.measure import mean_loss, measure_set, measure_step


def bradley_terry(rewards: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Of ``[N, 2]``, chosen then rejected."""
    records = Records.of(range(len(rewards)), [2] * len(rewards))
    return BradleyTerry().loss(rewards.reshape(-1, 1), records)


def rated(labels: torch.Tensor) -> Records:
    names = [f"attribute_{column}" for column in range(labels.shape[1])]
    return Records.of(range(len(labels)), [1] * len(labels), LabelColumns.of(names, labels))


def masked_mse(rewards: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    records = rated(labels)
    return MaskedMse(records.labels.names).loss(rewards, records)


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


def test_the_loss_that_is_logged_is_the_one_that_is_trained() -> None:
    rewards = torch.tensor([[2.0], [1.0], [1.0], [1.0], [0.0], [3.0], [5.0], [1.0]])
    records = Records.of(range(4), [2] * 4)
    wanted = sum(math.log1p(math.exp(-margin)) for margin in (1, 0, -3, 4)) / 4
    assert mean_loss(BradleyTerry(), rewards, records) == pytest.approx(wanted)
    step = measure_step(BradleyTerry(), rewards, records)
    assert (step["loss"], step["accuracy"]) == (pytest.approx(wanted), pytest.approx(2.5 / 4))
    whole = measure_set(
        BradleyTerry(), rewards, records, torch.ones(8, dtype=torch.int64), ["x", "x", "y", "y"]
    )
    assert whole["loss"] == step["loss"]
    of_y = sum(math.log1p(math.exp(-margin)) for margin in (-3, 4)) / 2
    assert whole["by_source/y/loss"] == pytest.approx(of_y)


def test_a_step_without_labels_has_a_loss_of_zero() -> None:
    records = rated(torch.full((2, 1), float("nan")))
    objective = MaskedMse(records.labels.names)
    assert measure_step(objective, torch.ones(2, 1), records) == {"loss": 0.0}


def test_regression_learns_from_centred_labels() -> None:
    labels = LabelColumns.of(["a"], torch.tensor([[3.0], [5.0]])).centred_on({"a": 4.0})
    records = Records.of([0, 1], [1, 1], labels)
    total, count = MaskedMse(("a",)).loss(torch.tensor([[-1.0], [2.0]]), records)
    assert (float(total), int(count)) == (1.0, 2)


@pytest.mark.parametrize(
    ("labels", "loss"),
    [([[math.nan], [math.nan]], 0.0), ([[3.0], [math.nan]], 4.0), ([[3.0], [4.0]], 4.0)],
)
def test_the_loss_is_a_mean_over_the_labels_that_are_there(
    labels: list[list[float]], loss: float
) -> None:
    records = rated(torch.tensor(labels))
    rewards = torch.tensor([[1.0], [2.0]])
    assert mean_loss(MaskedMse(records.labels.names), rewards, records) == loss
