"""What a set of comparisons says, beside numpy; and a set without any."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from nemo_aligner.metrics.ranking import PairRewards, margin_quantile
from nemo_aligner.metrics.table import measure_pairs


def test_only_equal_rewards_are_ties() -> None:
    # Margins 0, 1, -1, 0, -2.
    rewards = torch.tensor([[1.0, 1.0], [2.0, 1.0], [1.0, 2.0], [0.0, 0.0], [0.0, 2.0]])
    found = measure_pairs(PairRewards.of(rewards), in_step=True)
    assert found["ties"] == pytest.approx(2 / 5)
    assert found["accuracy"] == pytest.approx(2 / 5)


def test_the_spread_is_that_of_the_set_and_not_an_estimate_of_a_larger_one() -> None:
    rewards = np.random.default_rng(0).normal(size=(7, 2))
    found = measure_pairs(PairRewards.of(torch.tensor(rewards)))
    for name, column in (("chosen", rewards[:, 0]), ("rejected", rewards[:, 1])):
        assert found[f"reward_{name}_mean"] == pytest.approx(np.mean(column))
        assert found[f"reward_{name}_std"] == pytest.approx(np.std(column))


@pytest.mark.filterwarnings("error")
def test_a_report_on_no_comparisons_has_the_same_names_and_no_numbers() -> None:
    nothing = measure_pairs(PairRewards.of(torch.zeros(0, 2)))
    assert list(nothing) == list(measure_pairs(PairRewards.of(torch.zeros(1, 2))))
    assert all(math.isnan(value) for name, value in nothing.items() if name != "ece")


def test_a_step_has_the_metrics_that_make_sense_of_one_batch() -> None:
    sides = [f"reward_{side}_{what}" for side in ("chosen", "rejected") for what in ("mean", "std")]
    found = measure_pairs(PairRewards.of(torch.tensor([[1.0, 0.0]])), in_step=True)
    assert list(found) == ["accuracy", "ties", "reward_margin", *sides]


def test_quantiles_of_more_margins_than_torch_takes() -> None:
    margins = torch.arange(2**24 + 3, dtype=torch.float32)
    pairs = PairRewards.of(torch.stack([margins, torch.zeros_like(margins)], dim=1))
    assert margin_quantile(50)(pairs) == pytest.approx((2**24 + 2) / 2)
