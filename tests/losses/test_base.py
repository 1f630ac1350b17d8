"""What objectives on pairs and on ratings read, and which metrics and losses they log when."""

from __future__ import annotations

import math

import pytest
import torch

from nemo_aligner.batch.packed import LabelColumns, Records
from nemo_aligner.losses.base import Objective, label_limits, mean_loss, measure_set, measure_step
from nemo_aligner.losses.pairwise import BradleyTerry
from nemo_aligner.losses.regression import MaskedMse, Quantiles
from nemo_aligner.metrics.table import PAIRS
from tests.losses.hand_made import rated

MISSING = math.nan
LENGTHS = torch.tensor([10, 20, 30, 40])


def test_label_limits_are_those_that_the_loss_sets() -> None:
    objectives: dict[float, tuple[Objective, ...]] = {
        -math.inf: (MaskedMse(("help",)), Quantiles(("help",)), BradleyTerry()),
        0.0: (BradleyTerry(label_margin="scale"),),
    }
    for lowest, those in objectives.items():
        for objective in those:
            assert label_limits(objective, ["help"]).tolist() == [[lowest, math.inf]]


def test_step_on_pairs_has_the_metrics_of_a_batch_and_a_report_has_all() -> None:
    records = Records.of([0, 1], [2, 2])
    # The first attribute is the one that counts.
    rewards = torch.tensor([[2.0, 0.0], [1.0, 9.0], [0.0, 9.0], [3.0, 0.0]])
    assert BradleyTerry().columns == ()
    step = BradleyTerry().step_metrics(rewards, records)
    assert list(step) == [metric.name for metric in PAIRS if metric.in_step]
    assert (step["accuracy"], step["reward_margin"]) == (0.5, -1.0)
    report = BradleyTerry().report(rewards, records, LENGTHS)
    assert list(report) == [metric.name for metric in PAIRS]
    assert step.items() <= report.items()
    assert report["longer_reply_accuracy"] == 0.0


def test_report_on_ratings_follows_labels_and_lengths() -> None:
    values = torch.tensor([[1.0, 5.0], [2.0, MISSING], [3.0, 4.0], [4.0, 3.0]])
    labels = LabelColumns.of(["help", "brief"], values).centred_on({"help": 2.5})
    records = Records.of(range(4), [1] * 4, labels)
    rewards = torch.tensor([[1.0, 1.0], [2.0, 0.0], [3.0, 2.0], [4.0, 3.0]])
    objective = MaskedMse(("help", "brief"))
    assert objective.columns == ("help", "brief")
    assert objective.step_metrics(rewards, records) == {}
    report = objective.report(rewards, records, LENGTHS)
    assert report["pearson/help"] == pytest.approx(1)
    assert report["pearson/brief"] == pytest.approx(-1)
    assert report["length_correlation/help"] == pytest.approx(1)
    # A label that is missing counts for nothing, its reply's length does for the others.
    assert report["length_only_pearson_mean"] == pytest.approx((1 + 0.9819805) / 2)


def test_loss_that_is_logged_is_the_one_that_is_trained() -> None:
    rewards = torch.tensor([[2.0], [1.0], [1.0], [1.0], [0.0], [3.0], [5.0], [1.0]])
    records = Records.of(range(4), [2] * 4)
    losses = [math.log1p(math.exp(-margin)) for margin in (1, 0, -3, 4)]
    expected = pytest.approx(sum(losses) / 4)
    assert mean_loss(BradleyTerry(), rewards, records) == expected
    step = measure_step(BradleyTerry(), rewards, records)
    assert (step["loss"], step["accuracy"]) == (expected, pytest.approx(2.5 / 4))
    lengths = torch.ones(8, dtype=torch.int64)
    metrics = measure_set(BradleyTerry(), rewards, records, lengths, ["x", "x", "y", "y"])
    assert metrics["loss"] == step["loss"]
    assert metrics["by_source/y/loss"] == pytest.approx(sum(losses[2:]) / 2)


def test_loss_that_is_logged_is_a_mean_over_the_labels_that_are_there() -> None:
    rewards, objective = torch.tensor([[1.0], [2.0]]), MaskedMse(("help",))
    for labels, loss in (((MISSING, MISSING), 0.0), ((3.0, MISSING), 4.0), ((3.0, 4.0), 4.0)):
        records = rated(torch.tensor(labels)[:, None])
        assert mean_loss(objective, rewards, records) == loss, labels
        assert measure_step(objective, rewards, records) == {"loss": loss}, labels
