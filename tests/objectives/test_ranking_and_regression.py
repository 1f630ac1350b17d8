"""Comparisons by a weighted sum of attributes and ratings by each, in one loss."""

from __future__ import annotations

import math

import pytest
import torch

from nemo_aligner.batch import LabelColumns, Records
from nemo_aligner.metrics.table import PAIRS
from nemo_aligner.objectives.masked_mse import MaskedMse
from nemo_aligner.objectives.ranking_and_regression import RankingAndRegression
from tests.objectives.hand_made import check_any_batch, check_gradient, learn

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


def test_mixed_gradients_and_sums_do_not_depend_on_the_batch() -> None:
    rewards = torch.randn(8, 2, generator=torch.Generator().manual_seed(1))
    check_gradient(WEIGHTED, rewards, mixed())
    check_any_batch(WEIGHTED, rewards, mixed())


def test_linear_model_learns_the_sum_of_pairs_and_the_attributes_of_ratings() -> None:
    generator = torch.Generator().manual_seed(2)
    features = torch.randn(240, 2, generator=generator)
    quality = features[:, 0] - features[:, 1]
    sizes = [2] * 80 + [1] * 80
    labels = torch.full((160, 2), MISSING)
    labels[80:, 0] = features[160:, 0]
    # Nobody rates brevity: what is known of it is what people prefer.
    pairs = (-quality[:160].view(80, 2)).argsort(dim=1).argsort(dim=1).flatten()
    ranks = torch.cat([pairs, torch.zeros(80, dtype=torch.int64)])
    records = Records.of(range(160), sizes, LabelColumns.of(NAMES, labels), ranks)
    rewards = learn(RankingAndRegression(NAMES), features, records, steps=300)
    assert float((rewards[:, 0] - features[:, 0]).abs().mean()) < 0.2
    assert float(torch.corrcoef(torch.stack([rewards.sum(dim=1), quality]))[0, 1]) > 0.99
    lengths = torch.ones(240, dtype=torch.int64)
    report = RankingAndRegression(NAMES).report(rewards, records, lengths)
    assert report["accuracy"] > 0.95
    assert report["pearson/help"] > 0.95


def test_mixed_report_has_the_metrics_of_the_kinds_that_are_there() -> None:
    lengths = torch.ones(8, dtype=torch.int64)
    rewards = torch.randn(8, 2, generator=torch.Generator().manual_seed(3))
    both = set(WEIGHTED.report(rewards, mixed(), lengths))
    of_pairs = mixed(LABELS[:1], [2])
    of_ratings = mixed(LABELS[:2], [1, 1])
    compared = set(WEIGHTED.report(rewards[:2], of_pairs, lengths[:2]))
    rated = set(WEIGHTED.report(rewards[:2], of_ratings, lengths[:2]))
    assert both == compared | rated
    assert ("accuracy" in compared, "pearson_mean" in compared) == (True, False)
    assert ("accuracy" in rated, "pearson_mean" in rated) == (False, True)
    step = WEIGHTED.step_metrics(rewards[:2], of_pairs)
    assert list(step) == [metric.name for metric in PAIRS if metric.in_step]
    assert step["accuracy"] in (0.0, 1.0)
    wanted = MaskedMse(NAMES).report(rewards[:2], of_ratings, lengths[:2])
    found = WEIGHTED.report(rewards[:2], of_ratings, lengths[:2])
    assert found == pytest.approx(wanted, nan_ok=True)


def test_mixed_pairs_are_shown_with_what_labels_were_centred_on() -> None:
    records = mixed(LABELS[:1], [2])
    labels = records.labels.centred_on({"help": 2.0, "brief": 4.0})
    centred = Records(records.ids, records.bounds, labels, records.ranks)
    rewards = torch.tensor([[1.0, 0.0], [0.0, 2.0]])
    step = WEIGHTED.step_metrics(rewards, centred)
    assert (step["reward_margin"], step["reward_chosen_mean"]) == (2.0, 1.0 + 2.0 - 0.5 * 4.0)


def test_regression_weight_below_zero_is_refused() -> None:
    with pytest.raises(ValueError, match="regression_weight: got -1, wanted a number of 0 or more"):
        RankingAndRegression(NAMES, regression_weight=-1)
