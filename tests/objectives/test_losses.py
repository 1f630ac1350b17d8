"""Losses as they are logged, of labels that are centred or missing, and of nothing."""

from __future__ import annotations

import math

import pytest
import torch

from nemo_aligner.batch import LabelColumns, Records
from nemo_aligner.objectives.bradley_terry import BradleyTerry
from nemo_aligner.objectives.masked_mse import MaskedMse
from nemo_aligner.objectives.measure import mean_loss, measure_set, measure_step
from tests.objectives.hand_made import rated

NAMES = ("a", "b", "c")


def bradley_terry(rewards: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Of ``[N, 2]``, chosen then rejected."""
    records = Records.of(range(len(rewards)), [2] * len(rewards))
    return BradleyTerry().loss(rewards.reshape(-1, 1), records)


def masked_mse(rewards: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return MaskedMse(NAMES[: labels.shape[1]]).loss(rewards, rated(labels, NAMES))


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


def test_loss_of_no_records_is_a_sum_of_nothing() -> None:
    total, count = bradley_terry(torch.zeros(0, 2))
    assert (float(total), int(count)) == (0.0, 0)
    total, count = masked_mse(torch.zeros(0, 3), torch.zeros(0, 3))
    assert (float(total), int(count)) == (0.0, 0)


def test_loss_that_is_logged_is_the_one_that_is_trained() -> None:
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


def test_masked_mse_learns_from_centred_labels() -> None:
    labels = LabelColumns.of(["a"], torch.tensor([[3.0], [5.0]])).centred_on({"a": 4.0})
    records = Records.of([0, 1], [1, 1], labels)
    total, count = MaskedMse(("a",)).loss(torch.tensor([[-1.0], [2.0]]), records)
    assert (float(total), int(count)) == (1.0, 2)


def test_loss_that_is_logged_is_a_mean_over_the_labels_that_are_there() -> None:
    rewards, objective = torch.tensor([[1.0], [2.0]]), MaskedMse(("a",))
    for labels, loss in (((math.nan, math.nan), 0.0), ((3.0, math.nan), 4.0), ((3.0, 4.0), 4.0)):
        records = rated(torch.tensor(labels)[:, None], NAMES)
        assert mean_loss(objective, rewards, records) == loss, labels
        assert measure_step(objective, rewards, records) == {"loss": loss}, labels
