"""Comparisons by a weighted sum of attributes and ratings by each, in one loss."""

from __future__ import annotations

import math

import pytest
import torch

from nemo_aligner.batch import LabelColumns, Records
from nemo_aligner.objectives.bradley_terry import BradleyTerry
from nemo_aligner.objectives.masked_mse import MaskedMse
from nemo_aligner.objectives.ranking_and_regression import RankingAndRegression
from tests.objectives.hand_made import check_any_batch, check_gradient

NAMES = ("help", "brief")
MISSING = math.nan
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

    wanted = ranking(0, 1)
    wanted += (ranking(4, 3) + ranking(4, 5) + ranking(3, 5)) / 3
    wanted += 0.25 * ((rows[2][0] - 1) ** 2 + (rows[2][1] - 3) ** 2) / 2
    wanted += 0.25 * (rows[6][1] - 2) ** 2
    assert (total.item(), int(count)) == (pytest.approx(wanted), 4)
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
    wanted = BradleyTerry().report(merged, Records.of([0], [2]), lengths[:2])
    assert compared == pytest.approx(wanted, nan_ok=True)
    wanted = MaskedMse(NAMES).report(rewards[:2], of_ratings, lengths[:2])
    assert rated == pytest.approx(wanted, nan_ok=True)


def test_mixed_pairs_are_shown_with_what_labels_were_centred_on() -> None:
    records = mixed(LABELS[:1], [2])
    labels = records.labels.centred_on({"help": 2.0, "brief": 4.0})
    centred = Records(records.ids, records.bounds, labels, records.ranks)
    step = WEIGHTED.step_metrics(torch.tensor([[1.0, 0.0], [0.0, 2.0]]), centred)
    assert (step["reward_margin"], step["reward_chosen_mean"]) == (2.0, 1.0 + 2.0 - 0.5 * 4.0)
