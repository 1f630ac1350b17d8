"""Metrics on numbers small enough to check by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from nemo_aligner.metrics import table
from nemo_aligner.metrics.by_source import by_source
from nemo_aligner.metrics.calibration import fit_temperature
from nemo_aligner.metrics.ranking import PairRewards
from nemo_aligner.metrics.regression import RatedRewards
from nemo_aligner.metrics.table import (
    Shown,
    find_metric,
    is_shown,
    lower_is_better,
    measure_pairs,
    measure_ratings,
)
from tests.tiny import ROOT

MISSING = float("nan")


def of_pairs(rewards: torch.Tensor, lengths: torch.Tensor | None = None) -> dict[str, float]:
    return measure_pairs(PairRewards.of(rewards, lengths))


def of_margins(margins: torch.Tensor) -> dict[str, float]:
    return of_pairs(torch.stack([margins, torch.zeros_like(margins)], dim=1))


def of_ratings(
    rewards: torch.Tensor,
    labels: torch.Tensor,
    attributes: list[str],
    lengths: torch.Tensor | None = None,
) -> dict[str, float]:
    return measure_ratings(RatedRewards.of(rewards, labels, tuple(attributes), lengths))


def test_a_tie_counts_one_half_and_is_reported() -> None:
    metrics = of_pairs(torch.tensor([[2.0, 1.0], [1.0, 1.0], [0.0, 3.0], [5.0, 1.0]]))
    assert metrics["accuracy"] == pytest.approx(2.5 / 4)
    assert metrics["ties"] == pytest.approx(1 / 4)
    assert metrics["reward_margin"] == pytest.approx((1 + 0 - 3 + 4) / 4)
    assert metrics["reward_chosen_mean"] == pytest.approx(2.0)
    assert metrics["reward_rejected_std"] == pytest.approx(math.sqrt(3) / 2)


def test_rewards_that_differ_by_one_float32_step_are_no_tie() -> None:
    low = torch.tensor(16.0)
    high = torch.nextafter(low, torch.tensor(32.0))
    assert of_pairs(torch.stack([high, low]).unsqueeze(0))["accuracy"] == 1.0


def test_correlations_equal_numpys_over_the_labels_that_are_there() -> None:
    rng = np.random.default_rng(0)
    rewards, labels = rng.normal(size=(20, 2)), rng.integers(0, 5, size=(20, 2)).astype(float)
    labels[:5, 1] = MISSING
    metrics = of_ratings(torch.tensor(rewards), torch.tensor(labels), ["help", "brief"])
    expected = np.corrcoef(rewards[:, 0], labels[:, 0])[0, 1]
    assert metrics["pearson/help"] == pytest.approx(expected)
    expected_brief = np.corrcoef(rewards[5:, 1], labels[5:, 1])[0, 1]
    assert metrics["pearson/brief"] == pytest.approx(expected_brief)
    assert metrics["pearson_mean"] == pytest.approx((expected + expected_brief) / 2)


def test_spearman_is_pearson_of_ranks_with_mean_ranks_for_equal_values() -> None:
    rewards = torch.tensor([[10.0], [20.0], [20.0], [1000.0]])
    labels = torch.tensor([[1.0], [2.0], [3.0], [4.0]])
    metrics = of_ratings(rewards, labels, ["a"])
    expected = np.corrcoef([0, 1.5, 1.5, 3], [0, 1, 2, 3])[0, 1]
    assert metrics["spearman/a"] == pytest.approx(expected)


def test_an_attribute_without_spread_has_no_correlation_and_spoils_no_mean() -> None:
    rewards = torch.tensor([[1.0, 1.0, 1.0], [2.0, 2.0, 2.0], [3.0, 3.0, 3.0]])
    labels = torch.tensor([[1.0, 4.0, MISSING], [2.0, 4.0, MISSING], [3.0, 4.0, 1.0]])
    metrics = of_ratings(rewards, labels, ["good", "constant", "rare"])
    assert metrics["pearson/good"] == pytest.approx(1.0)
    assert math.isnan(metrics["pearson/constant"])
    assert math.isnan(metrics["spearman/rare"])
    assert metrics["pearson_mean"] == pytest.approx(1.0)


MARGINS = torch.tensor([2.0, 1.0, 0.5, -1.0, 3.0, 0.0, -0.2, 1.5], dtype=torch.float64)


def test_brier_and_ece_by_hand() -> None:
    found = of_margins(MARGINS)
    p = 1 / (1 + np.exp(-MARGINS.numpy()))
    assert found["brier"] == pytest.approx(np.mean((1 - p) ** 2))
    # Too few pairs for two bins.
    sure = np.maximum(p, 1 - p)
    right = np.array([1, 1, 1, 0, 1, 0.5, 0, 1])
    assert found["ece"] == pytest.approx(abs(np.mean(sure) - np.mean(right)))


def test_ece_is_over_bins_of_equal_numbers() -> None:
    """Of 20 pairs ten are sure and right half the time, ten unsure and always right."""
    margins = torch.tensor([5.0, -5.0] * 5 + [0.1] * 10, dtype=torch.float64)
    high, low = torch.sigmoid(torch.tensor([5.0, 0.1], dtype=torch.float64)).tolist()
    wanted = (abs(high - 0.5) + abs(low - 1.0)) / 2
    assert of_margins(margins)["ece"] == pytest.approx(wanted)


def test_verdicts_that_are_right_as_often_as_they_claim() -> None:
    """Verdicts that are right as often as they claim have none; ones that always err have all."""
    sure = 0.8
    margin = math.log(sure / (1 - sure))
    margins = torch.full((50,), margin, dtype=torch.float64)
    margins[::5] *= -1
    assert of_margins(margins)["ece"] == pytest.approx(0, abs=1e-12)
    assert of_margins(-margins.abs())["ece"] == pytest.approx(sure)


def test_the_temperature_has_the_highest_likelihood() -> None:
    found = fit_temperature(MARGINS)

    def loss(temperature: float) -> float:
        return float(torch.nn.functional.softplus(-MARGINS / temperature).sum())

    assert all(loss(found) <= loss(found * factor) for factor in (0.5, 0.99, 1.01, 2))
    assert fit_temperature(MARGINS * 1000) == pytest.approx(1000 * found)
    assert math.isnan(fit_temperature(MARGINS.abs()))
    assert math.isnan(fit_temperature(-MARGINS))


def test_length_bias_by_hand() -> None:
    rewards = torch.tensor([[2.0, 1.0], [1.0, 2.0], [3.0, 0.0], [0.0, 0.0]])
    lengths = torch.tensor([[5, 2], [6, 3], [1, 4], [2, 2]])
    found = of_pairs(rewards, lengths)
    assert found["accuracy_longer_chosen"] == pytest.approx(0.5)
    assert found["accuracy_shorter_chosen"] == pytest.approx(1.0)
    assert found["longer_reply_accuracy"] == pytest.approx(2.5 / 4)
    expected = np.corrcoef(rewards.flatten().numpy(), lengths.flatten().numpy())[0, 1]
    assert found["length_correlation"] == pytest.approx(expected)
    assert math.isnan(of_pairs(rewards[:1], lengths[:1])["accuracy_shorter_chosen"])


def test_a_report_has_quantiles_of_the_margin() -> None:
    rewards = torch.stack([torch.arange(101.0), torch.zeros(101)], dim=1)
    found = of_pairs(rewards, torch.ones(101, 2))
    names = [f"reward_margin_p{percent:02d}" for percent in (5, 25, 50, 75, 95)]
    assert [found[name] for name in names] == pytest.approx([5, 25, 50, 75, 95])
    in_step = measure_pairs(PairRewards.of(rewards), in_step=True)
    assert in_step.items() <= found.items()
    assert list(in_step)[:3] == ["accuracy", "ties", "reward_margin"]


def test_a_regression_report_tells_what_length_alone_would_give() -> None:
    rewards = torch.tensor([[1.0, 0.0], [2.0, 1.0], [3.0, 0.0]])
    labels = torch.tensor([[3.0, 1.0], [2.0, MISSING], [1.0, 5.0]])
    found = of_ratings(rewards, labels, ["a", "b"], torch.tensor([10, 20, 30]))
    assert found["length_correlation/a"] == pytest.approx(1.0)
    assert found["length_correlation/b"] == pytest.approx(0.0)
    assert found["length_only_pearson_mean"] == pytest.approx(1.0)


def test_sources_are_apart_from_each_other() -> None:
    found = by_source(["x", "y", "x", ""], lambda records: {"sum": float(sum(records))})
    assert found == {"by_source/none/sum": 3, "by_source/x/sum": 2, "by_source/y/sum": 1}
    assert by_source(["x"] * 4, lambda records: {"sum": 0.0}) == {}
    assert by_source([str(n) for n in range(51)], lambda records: {"sum": 0.0}) == {}


def test_what_is_better_small() -> None:
    assert [lower_is_better(f"v/{name}") for name in ("loss", "ece", "accuracy")] == [1, 1, 0]


def test_an_attribute_may_have_the_name_of_a_metric() -> None:
    assert not lower_is_better("v/pearson/ties")
    assert lower_is_better("v/by_source/x/ties")
    assert not lower_is_better("v/by_source/ties/accuracy")
    assert not lower_is_better("v/what_is_this")
    assert find_metric("v/what_is_this") is None


def test_the_table_says_where_a_metric_is_shown() -> None:
    assert is_shown("accuracy", Shown.step)
    assert is_shown("pearson/help", Shown.validation)
    assert not is_shown("pearson/help", Shown.source)
    assert not is_shown("brier", Shown.validation)


def test_a_metric_is_a_function_and_its_row(monkeypatch: pytest.MonkeyPatch) -> None:
    row = table.Metric("half", "half of the margin", lambda pairs: float(pairs.margins[0]) / 2)
    monkeypatch.setattr(table, "PAIRS", [*table.PAIRS, row])
    assert of_pairs(torch.tensor([[3.0, 1.0]]))["half"] == 1.0
    assert find_metric("validation-x/half") is row


@pytest.mark.parametrize("row", table.all_metrics(), ids=lambda row: row.name)
def test_the_page_of_metrics_names_every_row(row: table.Metric) -> None:
    page = (ROOT / "docs" / "metrics.md").read_text()
    stem, _, ending = row.name.rpartition("_")
    assert f"`{row.name}" in page or (stem in page and f"`_{ending}`" in page)
