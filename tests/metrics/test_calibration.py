"""Calibration beside the textbook's sums, and of sets as small as can be."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from nemo_aligner.metrics.calibration import brier, expected_calibration_error, fit_temperature
from nemo_aligner.metrics.ranking import PairRewards


def pairs_of(margins: object) -> PairRewards:
    chosen = torch.as_tensor(margins, dtype=torch.float64)
    return PairRewards.of(torch.stack([chosen, torch.zeros_like(chosen)], dim=1))


@pytest.mark.parametrize(
    ("pairs", "bins"), [(9, 1), (19, 1), (29, 2), (149, 14), (150, 15), (900, 15)]
)
def test_there_are_fifteen_bins_or_as_many_as_get_ten_pairs_each(pairs: int, bins: int) -> None:
    rng = np.random.default_rng(pairs)
    margins = rng.normal(0.3, 2.0, size=pairs)
    sure = 1 / (1 + np.exp(-np.abs(margins)))
    order = np.argsort(sure, kind="stable")
    errors = sure[order] - (margins > 0)[order]
    wanted = sum(abs(part.sum()) for part in np.array_split(errors, bins)) / pairs
    found = expected_calibration_error(pairs_of(margins))
    assert found == pytest.approx(wanted, rel=1e-12)


def test_one_pair_has_an_error_and_no_pair_has_none() -> None:
    sure = 1 / (1 + math.exp(-2))
    assert expected_calibration_error(pairs_of([2.0])) == pytest.approx(1 - sure)
    assert brier(pairs_of([2.0])) == pytest.approx((1 - sure) ** 2)
    assert expected_calibration_error(pairs_of([])) == 0
    assert math.isnan(brier(pairs_of([])))
    assert math.isnan(fit_temperature(pairs_of([]).margins))


@pytest.mark.parametrize("right", [51, 75, 99])
@pytest.mark.parametrize("margin", [0.01, 1.0, 300.0])
def test_margins_of_one_size_have_the_temperature_that_makes_them_the_odds(
    right: int, margin: float
) -> None:
    margins = torch.full((100,), -margin, dtype=torch.float64)
    margins[:right] = margin
    assert fit_temperature(margins) == pytest.approx(margin / math.log(right / (100 - right)))
