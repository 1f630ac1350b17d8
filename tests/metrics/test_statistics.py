"""Correlations, ranks and means of the fewest and the smallest numbers that there can be."""

from __future__ import annotations

import math

import pytest
import torch

from nemo_aligner.metrics.ranking import share_right
from nemo_aligner.metrics.statistics import correlation, nanmean, ranks


def doubles(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def test_two_numbers_correlate_and_one_does_not() -> None:
    assert correlation(doubles(1, 2), doubles(5, 9)) == pytest.approx(1)
    assert correlation(doubles(1, 2), doubles(9, 5)) == pytest.approx(-1)
    assert math.isnan(correlation(doubles(1), doubles(2)))
    assert math.isnan(correlation(doubles(), doubles()))


def test_numbers_near_each_other_correlate_as_those_far_apart() -> None:
    one, other = doubles(1, 2, 4), doubles(3, 1, 2)
    wanted = correlation(one, other)
    assert correlation(1e-3 * one, 1e-3 * other) == pytest.approx(wanted)
    assert correlation(1e3 * one + 5, 1e3 * other - 7) == pytest.approx(wanted)
    assert math.isnan(correlation(one, torch.ones(3, dtype=torch.float64)))


def test_ranks_are_counted_from_zero_and_equal_for_equal_values() -> None:
    assert ranks(doubles(30, 10, 20)).tolist() == [2, 0, 1]
    assert ranks(doubles(7, 1, 7, 9, 7)).tolist() == [2, 0, 2, 4, 2]
    assert ranks(doubles(5, 5)).tolist() == [0.5, 0.5]


def test_a_margin_is_right_wrong_or_half_right() -> None:
    assert share_right(doubles(1e-300, 5, 0, -1e-300, -5)).tolist() == [1, 1, 0.5, 0, 0]


def test_a_mean_leaves_out_what_is_missing_and_keeps_all_digits() -> None:
    assert nanmean([1.0, math.nan, 1 + 2**-40]) == 1 + 2**-41
    assert math.isnan(nanmean([math.nan]))
    assert math.isnan(nanmean([]))
