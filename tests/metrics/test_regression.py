"""Metrics of ratings: correlations by attribute, and what length alone would reach."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from nemo_aligner.metrics.ranking import (
    ranks,
)
from nemo_aligner.metrics.regression import RatedRewards
from nemo_aligner.metrics.table import measure_ratings

MISSING = math.nan


def measure(
    rewards: torch.Tensor,
    labels: torch.Tensor,
    attributes: str,
    lengths: torch.Tensor | None = None,
) -> dict[str, float]:
    return measure_ratings(RatedRewards.of(rewards, labels, tuple(attributes.split()), lengths))


def doubles(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def test_correlations_are_numpys_over_the_labels_that_are_there() -> None:
    rng = np.random.default_rng(0)
    rewards, labels = rng.normal(size=(20, 2)), rng.integers(0, 5, size=(20, 2)).astype(float)
    labels[:5, 1] = MISSING
    metrics = measure(torch.tensor(rewards), torch.tensor(labels), "help brief")
    expected = np.corrcoef(rewards[:, 0], labels[:, 0])[0, 1]
    assert metrics["pearson/help"] == pytest.approx(expected)
    expected_brief = np.corrcoef(rewards[5:, 1], labels[5:, 1])[0, 1]
    assert metrics["pearson/brief"] == pytest.approx(expected_brief)
    assert metrics["pearson_mean"] == pytest.approx((expected + expected_brief) / 2)
    # An attribute with constant labels, or with one label, is undefined, and left out of the mean.
    rewards = torch.tensor([[1.0, 1.0, 1.0], [2.0, 2.0, 2.0], [3.0, 3.0, 3.0]])
    labels = torch.tensor([[1.0, 4.0, MISSING], [2.0, 4.0, MISSING], [3.0, 4.0, 1.0]])
    metrics = measure(rewards, labels, "good constant rare")
    assert metrics["pearson/good"] == metrics["pearson_mean"] == pytest.approx(1.0)
    assert math.isnan(metrics["pearson/constant"])
    assert math.isnan(metrics["spearman/rare"])


def test_spearman_is_pearson_of_ranks_with_mean_ranks_for_equal_values() -> None:
    rewards = torch.tensor([[10.0], [20.0], [20.0], [1000.0]])
    labels = torch.tensor([[1.0], [2.0], [3.0], [4.0]])
    expected = np.corrcoef([0, 1.5, 1.5, 3], [0, 1, 2, 3])[0, 1]
    assert measure(rewards, labels, "a")["spearman/a"] == pytest.approx(expected)
    rewards = torch.tensor([[1.0, 1.0], [2.0, 2.0], [9.0, 3.0]])
    labels = torch.tensor([[1.0, 3.0], [2.0, 1.0], [3.0, 2.0]])
    metrics = measure(rewards, labels, "a b")
    assert metrics["spearman_mean"] == pytest.approx((1 - 0.5) / 2)
    assert metrics["pearson_mean"] == pytest.approx((0.9176629 - 0.5) / 2)
    assert ranks(doubles(30, 10, 20)).tolist() == [2, 0, 1]
    assert ranks(doubles(7, 1, 7, 9, 7)).tolist() == [2, 0, 2, 4, 2]
    assert ranks(doubles(5, 5)).tolist() == [0.5, 0.5]


def test_report_tells_what_length_alone_would_give() -> None:
    rewards = torch.tensor([[1.0, 0.0], [2.0, 1.0], [3.0, 0.0]])
    labels = torch.tensor([[3.0, 1.0], [2.0, MISSING], [1.0, 5.0]])
    metrics = measure(rewards, labels, "a b", torch.tensor([10, 20, 30]))
    assert metrics["length_correlation/a"] == pytest.approx(1.0)
    assert metrics["length_correlation/b"] == pytest.approx(0.0)
    assert metrics["length_only_pearson_mean"] == pytest.approx(1.0)
