"""Metrics on numbers small enough to check by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from nemo_aligner.metrics import ranking_metrics, regression_metrics

MISSING = float("nan")


def test_a_tie_counts_one_half_and_is_reported() -> None:
    metrics = ranking_metrics(torch.tensor([[2.0, 1.0], [1.0, 1.0], [0.0, 3.0], [5.0, 1.0]]))
    assert metrics["accuracy"] == pytest.approx(2.5 / 4)
    assert metrics["ties"] == pytest.approx(1 / 4)
    assert metrics["reward_margin"] == pytest.approx((1 + 0 - 3 + 4) / 4)
    assert metrics["reward_chosen_mean"] == pytest.approx(2.0)
    assert metrics["reward_rejected_std"] == pytest.approx(math.sqrt(3) / 2)
    assert metrics["loss"] == pytest.approx(
        sum(math.log1p(math.exp(-margin)) for margin in (1, 0, -3, 4)) / 4
    )


def test_rewards_that_differ_by_one_float32_step_are_no_tie() -> None:
    low = torch.tensor(16.0)
    high = torch.nextafter(low, torch.tensor(32.0))
    assert ranking_metrics(torch.stack([high, low]).unsqueeze(0))["accuracy"] == 1.0


def test_correlations_equal_numpys_over_the_labels_that_are_there() -> None:
    rng = np.random.default_rng(0)
    rewards, labels = rng.normal(size=(20, 2)), rng.integers(0, 5, size=(20, 2)).astype(float)
    labels[:5, 1] = MISSING
    metrics = regression_metrics(torch.tensor(rewards), torch.tensor(labels), ["help", "brief"])
    expected = np.corrcoef(rewards[:, 0], labels[:, 0])[0, 1]
    assert metrics["pearson/help"] == pytest.approx(expected)
    expected_brief = np.corrcoef(rewards[5:, 1], labels[5:, 1])[0, 1]
    assert metrics["pearson/brief"] == pytest.approx(expected_brief)
    assert metrics["pearson_mean"] == pytest.approx((expected + expected_brief) / 2)
    errors = (rewards - labels)[~np.isnan(labels)]
    assert metrics["loss"] == pytest.approx(np.mean(errors**2))


def test_spearman_is_pearson_of_ranks_with_shared_ranks_for_equal_values() -> None:
    rewards = torch.tensor([[10.0], [20.0], [20.0], [1000.0]])
    labels = torch.tensor([[1.0], [2.0], [3.0], [4.0]])
    metrics = regression_metrics(rewards, labels, ["a"])
    expected = np.corrcoef([0, 1.5, 1.5, 3], [0, 1, 2, 3])[0, 1]
    assert metrics["spearman/a"] == pytest.approx(expected)


def test_an_attribute_without_spread_has_no_correlation_and_spoils_no_mean() -> None:
    rewards = torch.tensor([[1.0, 1.0, 1.0], [2.0, 2.0, 2.0], [3.0, 3.0, 3.0]])
    labels = torch.tensor([[1.0, 4.0, MISSING], [2.0, 4.0, MISSING], [3.0, 4.0, 1.0]])
    metrics = regression_metrics(rewards, labels, ["good", "constant", "rare"])
    assert metrics["pearson/good"] == pytest.approx(1.0)
    assert math.isnan(metrics["pearson/constant"])
    assert math.isnan(metrics["spearman/rare"])
    assert metrics["pearson_mean"] == pytest.approx(1.0)
