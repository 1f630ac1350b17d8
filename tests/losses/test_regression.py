"""Losses of ratings, of ratings beside comparisons, and of a critic's values, by hand."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import Tensor

from nemo_aligner.batch.packed import LabelColumns, Records
from nemo_aligner.contract.readout import Readout
from nemo_aligner.losses.base import label_limits, rewards_of, spreads_of
from nemo_aligner.losses.pairwise import BradleyTerry
from nemo_aligner.losses.regression import (
    Huber,
    MaskedMse,
    OrdinalBins,
    Quantiles,
    RankingAndRegression,
)
from nemo_aligner.losses.value import ClippedValueLoss
from nemo_aligner.metrics.table import PAIRS
from tests.losses.hand_made import accepted, check_any_batch, check_gradient, learn, rated

NAMES = ("help", "brief")
MISSING = math.nan


def check_loss(
    objective: MaskedMse | Huber | Quantiles | OrdinalBins,
    outputs: list[list[float]],
    labels: list[list[float]],
    expected: tuple[float, int],
    gradient: list[list[float]] | None = None,
) -> None:
    leaf = torch.tensor(outputs, requires_grad=True)
    total, count = objective.loss(leaf, rated(torch.tensor(labels)))
    total.backward()
    assert (total.item(), int(count)) == (pytest.approx(expected[0], rel=1e-6), expected[1])
    if gradient is not None:
        torch.testing.assert_close(leaf.grad, torch.tensor(gradient))


def test_masked_mse_leaves_missing_labels_out_of_sum_count_and_gradient() -> None:
    rewards, gradient = [[1.0, 2.0], [3.0, 4.0]], [[2.0, 0.0], [-4.0, 0.0]]
    check_loss(MaskedMse(NAMES), rewards, [[0.0, MISSING], [5.0, 4.0]], (1.0 + 4.0, 3), gradient)
    labels = LabelColumns.of(["help"], torch.tensor([[3.0], [5.0]])).centred_on({"help": 4.0})
    records = Records.of([0, 1], [1, 1], labels)
    total, count = MaskedMse(("help",)).loss(torch.tensor([[-1.0], [2.0]]), records)
    assert (float(total), int(count)) == (1.0, 2)


def test_huber_small_errors_count_by_their_square_and_large_ones_by_their_size() -> None:
    labels = [[1.0, MISSING], [0.0, 4.0]]
    check_loss(
        Huber(NAMES, delta=0.75),
        [[1.5, 9.0], [-2.0, 1.0]],
        labels,
        (0.5 * 0.5**2 + 0.75 * (2.0 - 0.375) + 0.75 * (3.0 - 0.375), 3),
        [[0.5, 0.0], [-0.75, -0.75]],
    )


def test_quantiles_label_above_an_output_costs_its_level_and_one_below_the_rest() -> None:
    check_loss(
        Quantiles(NAMES, levels=[0.2, 0.5]),
        [[1.0, 2.0, 7.0, 7.0], [0.0, 5.0, 1.0, -1.0]],
        [[3.0, MISSING], [2.0, 0.0]],
        ((0.2 * 2 + 0.5 * 1 + 0.2 * 2 + 0.5 * 3 + 0.8 * 1 + 0.5 * 1) / 2, 3),
        [[-0.1, -0.25, 0, 0], [-0.1, 0.25, 0.4, -0.25]],
    )


def test_ordinal_bins_are_the_cross_entropy_of_a_label_or_of_the_two_values_around_it() -> None:
    rows = [[0.5, -1.0, 2.0, 9.0, 9.0, 9.0], [0.0, 1.0, 0.0, 0.2, 0.4, 0.1]]

    def log_probability(logits: list[float], index: int) -> float:
        return logits[index] - math.log(sum(map(math.exp, logits)))

    expected = -log_probability(rows[0][:3], 2)
    # 2.5 is half way from 1 to 4.
    expected -= (log_probability(rows[1][:3], 1) + log_probability(rows[1][:3], 2)) / 2
    expected -= log_probability(rows[1][3:], 0)
    objective = OrdinalBins(NAMES, values={"help": [0, 1, 4], "brief": [-1, 0, 1]})
    check_loss(objective, rows, [[4.0, MISSING], [2.5, -1.0]], (expected, 3))


def test_ordinal_bins_values_are_given_for_all_by_name_or_taken_from_the_labels() -> None:
    labels = rated(torch.tensor([[1.0, -2.0], [3.0, 6.0], [MISSING, 0.0]])).labels
    measured = OrdinalBins(NAMES, bins=3).fit_to_labels(labels, None)
    assert measured.readout == Readout("bins", ((1.0, 2.0, 3.0), (-2.0, 2.0, 6.0)))
    assert OrdinalBins(NAMES, bins=3).readout is None
    for_all = OrdinalBins(NAMES, values=[0, 1]).fit_to_labels(labels, None)
    assert for_all.readout == Readout("bins", ((0.0, 1.0),) * 2)
    base_readout = Readout("bins", ((0.0, 5.0),) * 2)
    assert OrdinalBins(NAMES).fit_to_labels(labels, base_readout).readout == base_readout
    assert measured.output_columns.count == 6
    assert label_limits(measured, NAMES).tolist() == [[1.0, 3.0], [-2.0, 6.0]]
    with pytest.raises(ValueError, match=r"values: got none, and all training labels of brief"):
        OrdinalBins(NAMES).fit_to_labels(rated(torch.tensor([[1.0, 2.0], [3.0, 2.0]])).labels, None)


def test_linear_model_learns_grades_and_where_it_cannot_know_them() -> None:
    generator = torch.Generator().manual_seed(2)
    side = torch.randint(2, (300, 1), generator=generator).double()
    # On one side the label is 1, on the other 0 or 4 by chance.
    chance = 4.0 * torch.randint(2, (300, 1), generator=generator)
    objective = OrdinalBins(("help",), values=[0, 1, 4])
    records = rated(torch.where(side > 0, chance, 1.0).float())
    outputs = learn(objective, torch.cat([side, 1 - side], dim=1), records, steps=600)
    rewards, spreads = (of(objective.readout, outputs) for of in (rewards_of, spreads_of))
    assert spreads is not None
    sure = side[:, 0] == 0
    assert float((rewards[sure] - 1).abs().max()) < 0.1
    assert float((rewards[~sure] - chance[~sure].mean()).abs().max()) < 0.1
    assert float(spreads[sure].max()) < 0.3
    assert float((spreads[~sure] - 2).abs().max()) < 0.1
    report = objective.report(outputs, records, torch.ones(300, dtype=torch.int64))
    assert report["spread_error_correlation/help"] > 0.8
    assert report["spread/help"] == pytest.approx(float(spreads.mean()))


def test_linear_model_learns_the_quantiles_of_noise_that_grows() -> None:
    generator = torch.Generator().manual_seed(2)
    scale = torch.rand(2000, 1, generator=generator)
    labels = 2.0 + scale * torch.rand(2000, 1, generator=generator)
    objective = Quantiles(("help",))
    outputs = learn(objective, scale, rated(labels), steps=800)
    expected = 2.0 + scale.double() * torch.tensor([0.1, 0.5, 0.9], dtype=torch.float64)
    assert float((outputs - expected).abs().max()) < 0.06
    report = objective.report(outputs, rated(labels), torch.ones(2000, dtype=torch.int64))
    assert report["spread/help"] == pytest.approx(0.8 * float(scale.mean()), abs=0.05)
    assert report["spread_error_correlation/help"] > 0.3


def values_lost(
    loss: ClippedValueLoss, values: Tensor, *rows: tuple[float, float, float]
) -> tuple[float, int]:
    """Of a token for each row of return, earlier value and mask; gradients are left in values."""
    labels = LabelColumns.of(ClippedValueLoss.columns, torch.tensor(rows))
    total, count = loss.loss(values, Records.of(range(len(rows)), [1] * len(rows), labels))
    total.backward()
    return total.item(), int(count)


def test_clipped_value_that_moved_far_pays_for_the_clipped_one() -> None:
    """One that came nearer has no gradient, and one that is masked may be anything."""
    for clip, value, gradient, expected in (
        # Near the return, but far from what it was: the clipped error is the larger one.
        (0.2, 0.9, 0.0, 0.5 * 0.8**2),
        (0.0, 0.9, -0.1, 0.5 * 0.1**2),
        (5.0, 0.9, -0.1, 0.5 * 0.1**2),
        (0.2, -0.9, -1.9, 0.5 * 1.9**2),
    ):
        values = torch.tensor([[value], [7.0]], requires_grad=True)
        masked = (MISSING, math.inf, 0.0)
        lost = values_lost(ClippedValueLoss(clip), values, (1.0, 0.0, 1.0), masked)
        assert lost == (pytest.approx(expected), 1), clip
        assert values.grad is not None
        assert values.grad[:, 0].tolist() == [pytest.approx(gradient, rel=1e-5), 0.0], clip


def test_clipped_value_merges_attributes_by_weights_and_label_means_as_rewards_do() -> None:
    for means, value in (((), 2.0), ((1.5, 2.5), 2.25)):
        outputs = torch.tensor([[3.0, 2.0]], requires_grad=True)
        loss = ClippedValueLoss(0.0, weights=(1.0, -0.5), means=means)
        assert loss.merge(outputs).tolist() == [pytest.approx(value)]
        assert values_lost(loss, outputs, (0.0, 0.0, 1.0))[0] == pytest.approx(0.5 * value**2)


def test_settings_of_ratings_that_cannot_be_are_refused() -> None:
    levels = ([0.1, 0.9], [0.5, 0.1], [0.5, 1.0], [0.5])
    not_numbers = (0.5, "0.5", ["0.1", "0.5", "0.9"], ["x", 0.5])
    refused: dict[Callable[..., object], list[tuple[dict[str, object], str]]] = {
        Huber: [
            ({"delta": delta}, f"delta: got {delta!r}, wanted a number above 0")
            for delta in (0, -1.0, MISSING, "1")
        ],
        Quantiles: [
            *(({"levels": value}, "got ") for value in levels),
            *(
                ({"levels": value}, f"levels: got {value!r}, wanted a list of numbers")
                for value in not_numbers
            ),
        ],
        OrdinalBins: [
            ({"bins": 1}, "bins: got 1, wanted a whole number from 2 on"),
            ({"bins": 2.5}, "bins: got 2.5, wanted a whole number"),
            ({"values": [1]}, "wanted 2 to 1000 ascending numbers"),
            ({"values": [1, "2"]}, "wanted a list of numbers"),
            ({"values": 3}, "values: got 3, wanted a list of numbers"),
            ({"values": {"help": [0, 1]}}, "values: got lists for ['help'], wanted one"),
            ({"values": {"help": [0, 1], "brief": [0, 1, 2]}}, "different numbers of outputs"),
        ],
    }
    for kind, cases in refused.items():
        assert not accepted(partial(kind, NAMES), *cases)


# A pair, a rating of both, a ranking of three, a rating of one, one of none.
LABELS = torch.tensor([[MISSING] * 2, [1.0, 3.0], [MISSING] * 2, [MISSING, 2.0], [MISSING] * 2])
SIZES, RANKS = [2, 1, 3, 1, 1], [0, 1, 0, 1, 0, 2, 0, 0]
WEIGHTED = RankingAndRegression(NAMES, weights=(1.0, -0.5), regression_weight=0.25)


def mixed(labels: torch.Tensor = LABELS, sizes: list[int] = SIZES) -> Records:
    ranks = torch.tensor(RANKS[: sum(sizes)])
    return Records.of(range(len(sizes)), sizes, LabelColumns.of(NAMES, labels), ranks)


def test_mixed_record_counts_as_one_whichever_kind_it_is() -> None:
    rewards = torch.randn(8, 2, generator=torch.Generator().manual_seed(0))
    total, count = WEIGHTED.loss(rewards, mixed())
    rows = rewards.tolist()
    sums = [help_ - 0.5 * brief for help_, brief in rows]

    def ranking(better: int, worse: int) -> float:
        return math.log1p(math.exp(sums[worse] - sums[better]))

    expected = ranking(0, 1)
    expected += (ranking(4, 3) + ranking(4, 5) + ranking(3, 5)) / 3
    expected += 0.25 * ((rows[2][0] - 1) ** 2 + (rows[2][1] - 3) ** 2) / 2
    expected += 0.25 * (rows[6][1] - 2) ** 2
    assert (total.item(), int(count)) == (pytest.approx(expected), 4)
    check_gradient(WEIGHTED, rewards, mixed())
    check_any_batch(WEIGHTED, rewards, mixed())
    with pytest.raises(ValueError, match="regression_weight: got -1, wanted"):
        RankingAndRegression(NAMES, regression_weight=-1)


def test_mixed_report_has_the_metrics_of_the_kinds_that_are_there() -> None:
    lengths = torch.ones(8, dtype=torch.int64)
    rewards = torch.randn(8, 2, generator=torch.Generator().manual_seed(3))
    of_pairs, of_ratings = mixed(LABELS[:1], [2]), mixed(LABELS[:2], [1, 1])
    compared = WEIGHTED.report(rewards[:2], of_pairs, lengths[:2])
    rated = WEIGHTED.report(rewards[:2], of_ratings, lengths[:2])
    assert {*WEIGHTED.report(rewards, mixed(), lengths)} == {*compared, *rated}
    merged = rewards[:2] @ torch.tensor([[1.0], [-0.5]])
    expected = BradleyTerry().report(merged, Records.of([0], [2]), lengths[:2])
    assert compared == pytest.approx(expected, nan_ok=True)
    expected = MaskedMse(NAMES).report(rewards[:2], of_ratings, lengths[:2])
    assert rated == pytest.approx(expected, nan_ok=True)


def test_mixed_pairs_are_shown_with_what_labels_were_centred_on() -> None:
    records = mixed(LABELS[:1], [2])
    labels = records.labels.centred_on({"help": 2.0, "brief": 1.0})
    centred = replace(records, labels=labels)
    rewards = torch.tensor([[1.0, 0.0], [0.0, 2.0]])
    step = WEIGHTED.step_metrics(rewards, centred)
    assert list(step) == [metric.name for metric in PAIRS if metric.in_step]
    assert (step["reward_margin"], step["reward_chosen_mean"]) == (2.0, 1.0 + 2.0 - 0.5 * 1.0)
    # Without weights it is the sum.
    step = RankingAndRegression(NAMES).step_metrics(rewards, centred)
    assert (step["reward_margin"], step["reward_chosen_mean"]) == (-1.0, 1.0 + 2.0 + 1.0)
    # In fp32 both would be equal after the means are added.
    close = torch.tensor([[2e-8, 0.0], [1e-8, 0.0]])
    step = WEIGHTED.step_metrics(close, centred)
    assert (step["accuracy"], step["ties"]) == (1.0, 0.0)
