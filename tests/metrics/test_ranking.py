"""Metrics of pairs, and statistics, compared with numpy and with values computed by hand."""

from __future__ import annotations

import math
import tracemalloc
from itertools import product

import numpy as np
import pytest
import torch

from nemo_aligner.metrics.ranking import (
    PairRewards,
    bootstrap_interval,
    brier,
    correlation,
    expected_calibration_error,
    fit_temperature,
    margin_quantile,
    mcnemar,
    nanmean,
    paired_interval,
    share_right,
    wilson_interval,
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
    metrics = measure(rewards)
    assert metrics["accuracy"] == pytest.approx(2 / 5)
    assert metrics["ties"] == pytest.approx(2 / 5)
    assert metrics["reward_margin"] == pytest.approx(-2 / 5)
    low = torch.tensor(16.0)
    high = torch.nextafter(low, torch.tensor(32.0))
    assert measure(torch.stack([high, low]).unsqueeze(0))["accuracy"] == 1.0
    right = torch.tensor([1e-300, 5, 0, -1e-300, -5], dtype=torch.float64)
    assert share_right(right).tolist() == [1, 1, 0.5, 0, 0]


def test_teacher_is_compared_on_the_pairs_that_have_soft_labels() -> None:
    # The same verdict, the opposite, a tie of one of them and of both, and no soft label.
    rewards = torch.tensor([[2.0, 0.0], [0.0, 1.0], [3.0, 3.0], [4.0, 4.0], [9.0, 0.0]])
    teacher = torch.tensor([[1.0, 0.0], [2.0, 0.0], [1.0, 0.0], [5.0, 5.0], [math.nan] * 2])
    metrics = measure_pairs(PairRewards.of(rewards, None, teacher))
    assert metrics["teacher_agreement"] == (1 + 0 + 0.5 + 1) / 4
    chances = [1 / (1 + math.exp(-margin)) for margin in (2, -1, 0, 0, 1, 2, 1, 0)]
    gaps = [abs(chances[n] - chances[n + 4]) for n in range(4)]
    assert metrics["teacher_probability_gap"] == pytest.approx(sum(gaps) / 4)
    hard = measure_pairs(PairRewards.of(rewards, None, teacher * math.nan))
    assert math.isnan(hard["teacher_agreement"])
    assert "teacher_agreement" not in measure(rewards)


def test_reward_spread_is_that_of_the_set_and_not_an_estimate_of_a_larger_one() -> None:
    rewards = np.random.default_rng(0).normal(size=(7, 2))
    metrics = measure(torch.tensor(rewards))
    for name, column in (("chosen", rewards[:, 0]), ("rejected", rewards[:, 1])):
        assert metrics[f"reward_{name}_mean"] == pytest.approx(np.mean(column))
        assert metrics[f"reward_{name}_std"] == pytest.approx(np.std(column))


@pytest.mark.filterwarnings("error")
def test_report_on_no_comparisons_has_the_same_names_and_no_numbers() -> None:
    nothing = measure(torch.zeros(0, 2))
    assert list(nothing) == list(measure(torch.zeros(1, 2)))
    assert all(math.isnan(value) for name, value in nothing.items() if name != "ece")
    assert nothing["ece"] == 0
    assert math.isnan(fit_temperature(pairs_of([]).margins))


def test_quantiles_of_margins_also_of_more_than_torch_takes() -> None:
    metrics = measure(torch.stack([torch.arange(101.0), torch.zeros(101)], dim=1))
    names = [f"reward_margin_p{percent:02d}" for percent in (5, 25, 50, 75, 95)]
    assert [metrics[name] for name in names] == pytest.approx([5, 25, 50, 75, 95])
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
        expected = sum(abs(part.sum()) for part in np.array_split(errors, bins)) / count
        error = expected_calibration_error(pairs_of(margins))
        assert error == pytest.approx(expected, rel=1e-12), count


def test_brier_and_calibration_by_hand() -> None:
    p = 1 / (1 + np.exp(-MARGINS.numpy()))
    assert brier(pairs_of(MARGINS)) == pytest.approx(np.mean((1 - p) ** 2))
    # Too few pairs for two bins; a tie is half right.
    sure = np.maximum(p, 1 - p)
    right = np.array([1, 1, 1, 0, 1, 0.5, 0, 1])
    expected = pytest.approx(abs(np.mean(sure) - np.mean(right)))
    assert expected_calibration_error(pairs_of(MARGINS)) == expected
    # There is no error if 80% of the verdicts with a confidence of 0.8 are right.
    calibrated = torch.full((50,), math.log(0.8 / 0.2), dtype=torch.float64)
    calibrated[::5] *= -1
    assert expected_calibration_error(pairs_of(calibrated)) == pytest.approx(0, abs=1e-12)


def test_temperature_has_the_highest_likelihood() -> None:
    best = fit_temperature(MARGINS)

    def loss(temperature: float) -> float:
        return float(torch.nn.functional.softplus(-MARGINS / temperature).sum())

    assert all(loss(best) <= loss(best * factor) for factor in (0.5, 0.99, 1.01, 2))
    assert fit_temperature(MARGINS * 1000) == pytest.approx(1000 * best)
    assert math.isnan(fit_temperature(MARGINS.abs()))
    assert math.isnan(fit_temperature(-MARGINS))
    assert math.isnan(fit_temperature(torch.tensor([1.0, -1.0])))
    # If all margins have one size, T makes sigmoid(margin / T) the share that is right.
    for right in (51, 75, 99):
        for margin in (0.01, 1.0, 300.0):
            margins = torch.full((100,), -margin, dtype=torch.float64)
            margins[:right] = margin
            expected = pytest.approx(margin / math.log(right / (100 - right)))
            assert fit_temperature(margins) == expected, (right, margin)


def test_length_bias_by_hand() -> None:
    """One more token makes a reply longer; equal lengths count as neither longer nor shorter."""
    longer, shorter, even = [4, 3], [3, 4], [5, 5]
    right, wrong = [1.0, 0.0], [0.0, 1.0]
    rewards = torch.tensor([right, wrong, right, wrong, wrong, right, right])
    lengths = torch.tensor([longer, longer, longer, shorter, shorter, shorter, even])
    metrics = measure(rewards, lengths)
    assert metrics["accuracy_longer_chosen"] == pytest.approx(2 / 3)
    assert metrics["accuracy_shorter_chosen"] == pytest.approx(1 / 3)
    assert metrics["longer_reply_accuracy"] == pytest.approx(3.5 / 7)
    rewards = torch.tensor([[2.0, 1.0], [1.0, 2.0], [3.0, 0.0], [0.0, 0.0]])
    lengths = torch.tensor([[5, 2], [6, 3], [1, 4], [2, 2]])
    metrics = measure(rewards, lengths)
    # Equal lengths count as half right.
    assert metrics["longer_reply_accuracy"] == pytest.approx(2.5 / 4)
    expected = np.corrcoef(rewards.flatten().numpy(), lengths.flatten().numpy())[0, 1]
    assert metrics["length_correlation"] == pytest.approx(expected)
    assert math.isnan(measure(rewards[:1], lengths[:1])["accuracy_shorter_chosen"])


def doubles(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def test_correlation_of_few_numbers_and_of_numbers_near_each_other() -> None:
    assert correlation(doubles(1, 2), doubles(5, 9)) == pytest.approx(1)
    assert correlation(doubles(1, 2), doubles(9, 5)) == pytest.approx(-1)
    assert math.isnan(correlation(doubles(1), doubles(2)))
    assert math.isnan(correlation(doubles(), doubles()))
    one, other = doubles(1, 2, 4), doubles(3, 1, 2)
    expected = correlation(one, other)
    assert correlation(1e-3 * one, 1e-3 * other) == pytest.approx(expected)
    assert correlation(1e3 * one + 5, 1e3 * other - 7) == pytest.approx(expected)
    assert all(math.isnan(correlation(one, doubles(*[value] * 3))) for value in (1, 0.1))


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


def test_paired_interval_is_that_of_the_paper_and_is_never_certain() -> None:
    """Bonett and Price (2012): with f pairs lost and g gained of n, p = (f + 1) / (n + 2), ..."""
    lost, gained, count = 20, 60, 400
    differences = np.repeat([-1.0, 1.0, 0.0], [lost, gained, count - lost - gained])
    first, second = (lost + 1) / (count + 2), (gained + 1) / (count + 2)
    error = math.sqrt((first + second - (second - first) ** 2) / (count + 2))
    wanted = (second - first - 1.959964 * error, second - first + 1.959964 * error)
    assert paired_interval(differences) == pytest.approx(wanted, abs=1e-6)
    assert paired_interval(np.array([-1.0]))[1] > 0.5
    low, high = paired_interval(np.zeros(40))
    assert -low == high > 0.05
    assert all(math.isnan(end) for end in paired_interval(np.zeros(0)))


def test_bootstrap_covers_as_the_normal_distribution_says() -> None:
    differences = np.array([1.0] * 60 + [-1.0] * 20 + [0.0] * 320)
    error = differences.std() / math.sqrt(differences.size)
    low, high = bootstrap_interval(differences)
    assert (low, high) == pytest.approx((0.1 - 1.96 * error, 0.1 + 1.96 * error), abs=0.003)
    assert bootstrap_interval(differences) == (low, high)
    # Of numbers that all differ, too, and in little memory.
    differences = np.random.default_rng(0).normal(size=2000)
    error = differences.std() / math.sqrt(differences.size)
    tracemalloc.start()
    low, high = bootstrap_interval(differences)
    assert tracemalloc.get_traced_memory()[1] < 5e7
    tracemalloc.stop()
    mean = differences.mean()
    assert (low, high) == pytest.approx((mean - 1.96 * error, mean + 1.96 * error), abs=0.003)
    assert bootstrap_interval(np.zeros(5)) == (0, 0)
    assert all(math.isnan(end) for end in bootstrap_interval(np.zeros(0)))
