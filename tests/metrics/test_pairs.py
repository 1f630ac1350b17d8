"""Metrics of comparisons, beside numpy and numbers small enough to check by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from nemo_aligner.metrics.ranking import (
    PairRewards,
    brier,
    expected_calibration_error,
    fit_temperature,
    margin_quantile,
    share_right,
)
from nemo_aligner.metrics.table import measure_pairs

MARGINS = torch.tensor([2.0, 1.0, 0.5, -1.0, 3.0, 0.0, -0.2, 1.5], dtype=torch.float64)


def measure(rewards: torch.Tensor, lengths: torch.Tensor | None = None) -> dict[str, float]:
    return measure_pairs(PairRewards.of(rewards, lengths))


def pairs_of(margins: object) -> PairRewards:
    chosen = torch.as_tensor(margins, dtype=torch.float64)
    return PairRewards.of(torch.stack([chosen, torch.zeros_like(chosen)], dim=1))


def test_accuracy_counts_a_tie_one_half_and_only_equal_rewards_are_ties() -> None:
    # Margins 0, 1, -1, 0, -2.
    rewards = torch.tensor([[1.0, 1.0], [2.0, 1.0], [1.0, 2.0], [0.0, 0.0], [0.0, 2.0]])
    found = measure(rewards)
    assert found["accuracy"] == pytest.approx(2 / 5)
    assert found["ties"] == pytest.approx(2 / 5)
    assert found["reward_margin"] == pytest.approx(-2 / 5)
    low = torch.tensor(16.0)
    high = torch.nextafter(low, torch.tensor(32.0))
    assert measure(torch.stack([high, low]).unsqueeze(0))["accuracy"] == 1.0
    right = torch.tensor([1e-300, 5, 0, -1e-300, -5], dtype=torch.float64)
    assert share_right(right).tolist() == [1, 1, 0.5, 0, 0]


def test_reward_spread_is_that_of_the_set_and_not_an_estimate_of_a_larger_one() -> None:
    rewards = np.random.default_rng(0).normal(size=(7, 2))
    found = measure(torch.tensor(rewards))
    for name, column in (("chosen", rewards[:, 0]), ("rejected", rewards[:, 1])):
        assert found[f"reward_{name}_mean"] == pytest.approx(np.mean(column))
        assert found[f"reward_{name}_std"] == pytest.approx(np.std(column))


@pytest.mark.filterwarnings("error")
def test_report_on_no_comparisons_has_the_same_names_and_no_numbers() -> None:
    nothing = measure(torch.zeros(0, 2))
    assert list(nothing) == list(measure(torch.zeros(1, 2)))
    assert all(math.isnan(value) for name, value in nothing.items() if name != "ece")
    assert nothing["ece"] == 0
    assert math.isnan(fit_temperature(pairs_of([]).margins))


def test_quantiles_of_margins_also_of_more_than_torch_takes() -> None:
    found = measure(torch.stack([torch.arange(101.0), torch.zeros(101)], dim=1))
    names = [f"reward_margin_p{percent:02d}" for percent in (5, 25, 50, 75, 95)]
    assert [found[name] for name in names] == pytest.approx([5, 25, 50, 75, 95])
    margins = torch.arange(2**24 + 3, dtype=torch.float32)
    pairs = PairRewards.of(torch.stack([margins, torch.zeros_like(margins)], dim=1))
    assert margin_quantile(50)(pairs) == pytest.approx((2**24 + 2) / 2)


def test_calibration_has_fifteen_bins_or_as_many_as_get_ten_pairs_each() -> None:
    for count, bins in ((1, 1), (9, 1), (19, 1), (29, 2), (149, 14), (150, 15), (900, 15)):
        rng = np.random.default_rng(count)
        margins = rng.normal(0.3, 2.0, size=count)
        sure = 1 / (1 + np.exp(-np.abs(margins)))
        order = np.argsort(sure, kind="stable")
        errors = sure[order] - (margins > 0)[order]
        wanted = sum(abs(part.sum()) for part in np.array_split(errors, bins)) / count
        found = expected_calibration_error(pairs_of(margins))
        assert found == pytest.approx(wanted, rel=1e-12), count


def test_brier_and_calibration_by_hand() -> None:
    p = 1 / (1 + np.exp(-MARGINS.numpy()))
    assert brier(pairs_of(MARGINS)) == pytest.approx(np.mean((1 - p) ** 2))
    # Too few pairs for two bins; a tie is half right.
    sure = np.maximum(p, 1 - p)
    right = np.array([1, 1, 1, 0, 1, 0.5, 0, 1])
    wanted = pytest.approx(abs(np.mean(sure) - np.mean(right)))
    assert expected_calibration_error(pairs_of(MARGINS)) == wanted
    # Verdicts that are right as often as they claim have no error.
    often = torch.full((50,), math.log(0.8 / 0.2), dtype=torch.float64)
    often[::5] *= -1
    assert expected_calibration_error(pairs_of(often)) == pytest.approx(0, abs=1e-12)


def test_temperature_has_the_highest_likelihood() -> None:
    found = fit_temperature(MARGINS)

    def loss(temperature: float) -> float:
        return float(torch.nn.functional.softplus(-MARGINS / temperature).sum())

    assert all(loss(found) <= loss(found * factor) for factor in (0.5, 0.99, 1.01, 2))
    assert fit_temperature(MARGINS * 1000) == pytest.approx(1000 * found)
    assert math.isnan(fit_temperature(MARGINS.abs()))
    assert math.isnan(fit_temperature(-MARGINS))
    assert math.isnan(fit_temperature(torch.tensor([1.0, -1.0])))
    # Margins of one size: the one that makes them the odds.
    for right in (51, 75, 99):
        for margin in (0.01, 1.0, 300.0):
            margins = torch.full((100,), -margin, dtype=torch.float64)
            margins[:right] = margin
            wanted = pytest.approx(margin / math.log(right / (100 - right)))
            assert fit_temperature(margins) == wanted, (right, margin)


def test_length_bias_by_hand() -> None:
    """One token more is longer, and as many is neither."""
    longer, shorter, even = [4, 3], [3, 4], [5, 5]
    right, wrong = [1.0, 0.0], [0.0, 1.0]
    rewards = torch.tensor([right, wrong, right, wrong, wrong, right, right])
    lengths = torch.tensor([longer, longer, longer, shorter, shorter, shorter, even])
    found = measure(rewards, lengths)
    assert found["accuracy_longer_chosen"] == pytest.approx(2 / 3)
    assert found["accuracy_shorter_chosen"] == pytest.approx(1 / 3)
    assert found["longer_reply_accuracy"] == pytest.approx(3.5 / 7)
    rewards = torch.tensor([[2.0, 1.0], [1.0, 2.0], [3.0, 0.0], [0.0, 0.0]])
    lengths = torch.tensor([[5, 2], [6, 3], [1, 4], [2, 2]])
    found = measure(rewards, lengths)
    assert found["longer_reply_accuracy"] == pytest.approx(2.5 / 4)  # a tie of both is half right
    expected = np.corrcoef(rewards.flatten().numpy(), lengths.flatten().numpy())[0, 1]
    assert found["length_correlation"] == pytest.approx(expected)
    assert math.isnan(measure(rewards[:1], lengths[:1])["accuracy_shorter_chosen"])
