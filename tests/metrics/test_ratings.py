"""Metrics of ratings, and statistics of few and of small numbers: means, ranks, intervals."""

from __future__ import annotations

import math
from itertools import product

import numpy as np
import pytest
import torch

from nemo_aligner.metrics.ranking import (
    bootstrap_interval,
    correlation,
    mcnemar,
    nanmean,
    ranks,
    wilson_interval,
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
    # Without spread, or of one label, there is none, which spoils no mean.
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
    found = measure(rewards, labels, "a b")
    assert found["spearman_mean"] == pytest.approx((1 - 0.5) / 2)
    assert found["pearson_mean"] == pytest.approx((0.9176629 - 0.5) / 2)
    assert ranks(doubles(30, 10, 20)).tolist() == [2, 0, 1]
    assert ranks(doubles(7, 1, 7, 9, 7)).tolist() == [2, 0, 2, 4, 2]
    assert ranks(doubles(5, 5)).tolist() == [0.5, 0.5]


def test_report_tells_what_length_alone_would_give() -> None:
    rewards = torch.tensor([[1.0, 0.0], [2.0, 1.0], [3.0, 0.0]])
    labels = torch.tensor([[3.0, 1.0], [2.0, MISSING], [1.0, 5.0]])
    found = measure(rewards, labels, "a b", torch.tensor([10, 20, 30]))
    assert found["length_correlation/a"] == pytest.approx(1.0)
    assert found["length_correlation/b"] == pytest.approx(0.0)
    assert found["length_only_pearson_mean"] == pytest.approx(1.0)


def test_correlation_of_few_numbers_and_of_numbers_near_each_other() -> None:
    assert correlation(doubles(1, 2), doubles(5, 9)) == pytest.approx(1)
    assert correlation(doubles(1, 2), doubles(9, 5)) == pytest.approx(-1)
    assert math.isnan(correlation(doubles(1), doubles(2)))
    assert math.isnan(correlation(doubles(), doubles()))
    one, other = doubles(1, 2, 4), doubles(3, 1, 2)
    wanted = correlation(one, other)
    assert correlation(1e-3 * one, 1e-3 * other) == pytest.approx(wanted)
    assert correlation(1e3 * one + 5, 1e3 * other - 7) == pytest.approx(wanted)
    assert math.isnan(correlation(one, torch.ones(3, dtype=torch.float64)))


def test_mean_leaves_out_what_is_missing_and_keeps_all_digits() -> None:
    assert nanmean([1.0, math.nan, 1 + 2**-40]) == 1 + 2**-41
    assert math.isnan(nanmean([math.nan]))
    assert math.isnan(nanmean([]))


def test_wilson_interval_is_that_of_its_formula() -> None:
    """Newcombe 1998, table I: 81 of 263, and 0 of 20."""
    assert wilson_interval(81, 263) == pytest.approx((0.2553, 0.3662), abs=5e-5)
    assert wilson_interval(0, 20) == pytest.approx((0.0, 0.1611), abs=5e-5)
    assert wilson_interval(20, 20) == pytest.approx((0.8389, 1.0), abs=5e-5)
    assert wilson_interval(0, 0) == (0.0, 1.0)


def test_mcnemar_counts_all_ways_in_which_verdicts_can_turn() -> None:
    for lost, gained in ((1, 9), (9, 1), (3, 3), (0, 5), (4, 6)):
        ways = [sum(turns) for turns in product((0, 1), repeat=lost + gained)]
        uneven = abs(gained - lost)
        as_uneven = [way for way in ways if abs(2 * way - lost - gained) >= uneven]
        assert mcnemar(lost, gained) == pytest.approx(len(as_uneven) / len(ways))
    assert mcnemar(0, 0) == 1
    assert 0 < mcnemar(4000, 6000) < 1e-80


def test_bootstrap_covers_as_the_normal_distribution_says() -> None:
    differences = np.array([1.0] * 60 + [-1.0] * 20 + [0.0] * 320)
    error = differences.std() / math.sqrt(differences.size)
    low, high = bootstrap_interval(differences)
    assert (low, high) == pytest.approx((0.1 - 1.96 * error, 0.1 + 1.96 * error), abs=0.003)
    assert bootstrap_interval(differences) == (low, high)
    assert bootstrap_interval(np.zeros(5)) == (0, 0)
    assert all(math.isnan(end) for end in bootstrap_interval(np.zeros(0)))
