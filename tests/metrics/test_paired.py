"""Intervals and tests against numbers that were worked out, or counted."""

from __future__ import annotations

import math
from itertools import product

import numpy as np
import pytest

from nemo_aligner.metrics.paired import bootstrap_interval, mcnemar, wilson_interval


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
