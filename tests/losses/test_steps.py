"""Losses and metrics of turns and steps, by hand."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from nemo_aligner.batch.packed import LabelColumns, Records
from nemo_aligner.config.common import Aggregate
from nemo_aligner.config.model import ModelConfig
from nemo_aligner.contract.readout import Readout
from nemo_aligner.contract.steps import aggregate_steps
from nemo_aligner.losses import build_objective, default_step_objective
from nemo_aligner.losses.base import Objective, label_limits
from nemo_aligner.losses.pairwise import AGGREGATES, BradleyTerry
from nemo_aligner.losses.regression import BinaryCrossEntropy, MaskedMse, OrdinalBins
from nemo_aligner.utils.errors import ConfigError
from tests.losses.hand_made import check_any_batch, check_gradient, loss_of, ranked

MISSING = math.nan


def stepped(labels: list[list[float]], mean: float | None = None) -> Records:
    """A record of each list: the labels of its steps."""
    flat = torch.tensor([[label] for own in labels for label in own])
    columns = LabelColumns.of(["right"], flat)
    if mean is not None:
        columns = columns.centred_on({"right": mean})
    counts = [*map(len, labels)]
    return Records.of(range(len(labels)), [1] * len(labels), columns, reward_counts=counts)


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x))


def test_binary_cross_entropy_of_hard_soft_and_missing_labels() -> None:
    records = stepped([[1.0, 0.7, MISSING], [0.0]])
    rewards = [0.5, -1.0, 9.0, 2.0]
    wanted = -math.log(sigmoid(0.5)) - math.log(1 - sigmoid(2.0))
    wanted -= 0.7 * math.log(sigmoid(-1.0)) + 0.3 * math.log(sigmoid(1.0))
    objective = BinaryCrossEntropy(("right",))
    assert loss_of(objective, rewards, records) == (pytest.approx(wanted), 3)
    assert label_limits(objective, ["right"]).tolist() == [[0.0, 1.0]]
    assert loss_of(objective, [1000.0, -1000.0], stepped([[1.0, 0.0]])) == (0.0, 2)


def test_two_classes_are_ordinal_bins_of_0_and_1() -> None:
    objective = OrdinalBins(("right",), values=[0, 1])
    outputs = torch.tensor([[0.5, 1.5], [2.0, -1.0], [1.0, 1.0]], dtype=torch.float64)
    total, count = objective.loss(outputs, stepped([[1.0, 0.25], [MISSING]]))
    wrong, right = math.log(1 + math.exp(3.0)), math.log(1 + math.exp(-3.0))
    wanted = math.log(1 + math.exp(-1.0)) + 0.25 * wrong + 0.75 * right
    assert (float(total), int(count)) == (pytest.approx(wanted), 2)
    assert objective.readout is not None
    probabilities = objective.readout.rewards(outputs.numpy())[:, 0].tolist()
    assert probabilities == pytest.approx([sigmoid(1.0), sigmoid(-3.0), 0.5])


def test_mse_on_returns_is_over_all_steps() -> None:
    records = stepped([[3.0, MISSING, -1.0], [2.0]], mean=1.0)
    wanted = (0.5 - 2.0) ** 2 + (1.0 + 2.0) ** 2 + (0.0 - 1.0) ** 2
    assert loss_of(MaskedMse(("right",)), [0.5, 7.0, 1.0, 0.0], records) == (
        pytest.approx(wanted),
        3,
    )


@pytest.mark.parametrize("how", AGGREGATES)
def test_learned_scalar_is_none_of_the_rewards_that_are_aggregated(how: str) -> None:
    """Bradley-Terry of m + b log(n_better / n_worse), b the same in every row."""
    good, bad, bias = [2.0, -1.0, 0.5], [1.0, 0.25], 1.7
    lengths = [3, 4, 12, 2, 8]  # the last is that of the whole reply
    (better,), (worse,) = (
        aggregate_steps(np.array(text, np.float32)[:, None], Aggregate(how)) for text in (good, bad)
    )
    margin = float(better) - float(worse) + bias * math.log(12 / 8)
    records = Records.of(
        [0],
        [2],
        reward_counts=[3, 2],
        reply_lengths=torch.tensor(lengths),
    )
    objective = BradleyTerry(aggregate=how, learn_length_bias=True, has_steps=True)
    rewards = torch.tensor([[reward, bias] for reward in (*good, *bad)])
    total, count = objective.loss(rewards.double(), records)
    assert (float(total), int(count)) == (pytest.approx(-math.log(sigmoid(margin)), rel=1e-6), 1)
    assert objective.step_metrics(rewards, records)["length_bias"] == pytest.approx(bias)
    check_gradient(objective, rewards, records)
    check_any_batch(objective, rewards, records)


@pytest.mark.parametrize("how", AGGREGATES)
def test_trajectories_are_compared_by_their_aggregates(how: str) -> None:
    texts = [[2.0, -1.0, 0.5], [1.0], [-0.5, 3.0], [0.0, 0.0]]
    of = {
        "last": lambda own: own[-1],
        "min": min,
        "mean": lambda own: sum(own) / len(own),
        "product": lambda own: sum(math.log(sigmoid(x)) for x in own),
    }[how]
    for own in texts:  # the same without torch
        made = aggregate_steps(np.array(own, np.float32)[:, None], Aggregate(how))
        assert (made.dtype, made[0]) == (np.float32, pytest.approx(of(own), rel=1e-6))
    first, second, third, fourth = map(of, texts)
    wanted = -math.log(sigmoid(first - second)) - math.log(sigmoid(third - fourth))
    records = Records.of([0, 1], [2, 2], reward_counts=[len(own) for own in texts])
    flat = [reward for own in texts for reward in own]
    objective = BradleyTerry(aggregate=how, has_steps=True)
    assert loss_of(objective, flat, records) == (pytest.approx(wanted), 2)
    rewards = torch.tensor(flat)[:, None]
    check_gradient(objective, rewards, records)
    check_any_batch(objective, rewards, records)
    # A label mean is added before steps are merged: a product depends on it.
    offset = replace(records, labels=records.labels.centred_on({"reward": 0.25}))
    assert loss_of(objective, [reward - 0.25 for reward in flat], offset) == (
        pytest.approx(wanted),
        2,
    )
    # The last reward of a trajectory has its length: 3 against 1, and 2 against 2.
    report = objective.report(rewards, records, torch.tensor([9, 9, 3, 1, 9, 2, 7, 2]))
    right = float(first > second) + float(third > fourth)
    assert report["accuracy"] == right / 2
    assert report["longer_reply_accuracy"] == (1 + 0.5) / 2


def test_one_step_each_is_bradley_terry_to_the_bit() -> None:
    records = ranked([0, 1], [1, 0], [0, 1])
    rewards = torch.randn(6, 1, generator=torch.Generator().manual_seed(0))
    wanted = BradleyTerry().loss(rewards, records)
    for how in AGGREGATES[:3]:
        found = BradleyTerry(aggregate=how, has_steps=True).loss(rewards, records)
        assert [float(each) for each in found] == [float(each) for each in wanted]


def test_rewards_of_samples_without_steps_are_not_aggregated() -> None:
    """The setting ``aggregate`` has no effect, and there are no metrics of steps."""
    records = ranked([0, 1], [1, 0])
    rewards = torch.randn(4, 1, generator=torch.Generator().manual_seed(0))
    for how in AGGREGATES:
        found = BradleyTerry(aggregate=how).loss(rewards, records)
        assert [float(value) for value in found] == [
            float(value) for value in BradleyTerry().loss(rewards, records)
        ]
    whole = stepped([[1.0], [0.0]])
    assert "step_accuracy" not in report_of(BinaryCrossEntropy(("right",)), [1.0, 0.0], whole)


@pytest.mark.parametrize(
    "objective", [BinaryCrossEntropy(("right",)), OrdinalBins(("right",), values=[0, 1])]
)
def test_sums_over_steps_do_not_depend_on_the_batch(objective: Objective) -> None:
    records = stepped([[1.0, 0.5, 0.0], [MISSING, 1.0], [0.0], [MISSING]])
    width = 1 if isinstance(objective, BinaryCrossEntropy) else 2
    rewards = torch.randn(7, width, generator=torch.Generator().manual_seed(1))
    check_gradient(objective, rewards, records)
    check_any_batch(objective, rewards, records)


def report_of(objective: Any, rewards: list[float], records: Records) -> dict[str, float]:
    lengths = torch.ones(len(rewards), dtype=torch.int64)
    return objective.report(torch.tensor(rewards)[:, None], records, lengths)


def test_probabilities_are_judged_like_their_log_odds() -> None:
    """Labels from 0 to 1 have a probability for a reward unless log-odds are asked for."""
    labels = [[1.0, 1.0, 0.0, MISSING], [1.0, 1.0], [0.0, 1.0], [1.0, MISSING, 0.0]]
    outputs = [1.0, 2.0, -1.0, 5.0, 0.0, -0.5, 1.0, 1.0, 1.0, 1.0, 1.0]
    default = BinaryCrossEntropy(("right",), has_steps=True)
    odds = BinaryCrossEntropy(("right",), "log_odds", has_steps=True)
    assert (default.scale, default.right_from, odds.right_from) == ("probability", 0.5, 0.0)
    assert odds.readout is None
    assert default.readout is not None
    assert loss_of(default, outputs, stepped(labels)) == loss_of(odds, outputs, stepped(labels))
    found, wanted = (report_of(each, outputs, stepped(labels)) for each in (default, odds))
    judged = [name for name in wanted if name.startswith(("step_", "first_error_"))]
    assert len(judged) > 10
    assert {name: found[name] for name in judged} == {
        name: pytest.approx(wanted[name], abs=1e-7) for name in judged
    }
    with pytest.raises(ValueError, match="scale: got 'odds', wanted probability or log_odds"):
        BinaryCrossEntropy(("right",), "odds")


def test_evaluation_measures_probabilities_by_the_loss_of_training() -> None:
    labels, outputs = [[1.0, 0.7, MISSING], [0.0]], [0.5, -1.0, 9.0, 2.0]
    trained = BinaryCrossEntropy(("right",))
    assert trained.readout is not None
    evaluated = default_step_objective(trained.readout.to_json(), [0.0], ["right"])
    rewards = trained.readout.rewards(np.array(outputs)[:, None])[:, 0].tolist()
    wanted, count = loss_of(trained, outputs, stepped(labels))
    assert loss_of(evaluated, rewards, stepped(labels)) == (pytest.approx(wanted, rel=1e-6), count)
    assert evaluated.right_from == trained.right_from
    certain, _ = loss_of(evaluated, [0.0, 1.0], stepped([[1.0, 0.0]]))
    assert 80 < certain < 120
    earlier = default_step_objective(None, [0.0], ["right"])
    assert earlier == BinaryCrossEntropy(("right",), "log_odds", has_steps=True)


@pytest.mark.parametrize("how", AGGREGATES)
def test_product_of_probabilities_is_that_of_their_log_odds(how: str) -> None:
    odds = np.array([[2.0], [-1.0], [0.5]], dtype=np.float32)
    probabilities = Readout("sigmoid", ((1.0,),)).rewards(odds)
    found = aggregate_steps(probabilities, Aggregate(how), "probability")
    plain = aggregate_steps(probabilities, Aggregate(how))
    wanted = aggregate_steps(odds, Aggregate.product) if how == "product" else plain
    np.testing.assert_allclose(found, wanted, rtol=1e-6)
    never = np.zeros((1, 1), dtype=np.float32)
    assert np.isfinite(aggregate_steps(never, Aggregate(how), "probability")).all()


def test_metrics_of_steps() -> None:
    labels = [[1.0, 1.0, 0.0, MISSING], [1.0, 1.0], [0.0, 1.0], [1.0, MISSING, 0.0]]
    rewards = [1.0, 2.0, -1.0, 5.0, 0.0, -0.5, 1.0, 1.0, 1.0, 1.0, 1.0]
    odds_objective = BinaryCrossEntropy(("right",), "log_odds", has_steps=True)
    mse = MaskedMse(("right",), has_steps=True)
    found = report_of(odds_objective, rewards, stepped(labels))
    # Wrong: the second of the second text, the first of the third, the last of the fourth.
    assert found["step_accuracy"] == pytest.approx(6 / 9)
    # Found in the first text; the second has none, of which one is found; the third's is not
    # found; before the fourth's first error a label is missing.
    assert found["first_error_accuracy"] == pytest.approx(1 / 3)
    assert found["first_error_f1"] == 0.0
    assert [name for name in found if name.startswith("step_position/")] == [
        f"step_position/{place}/{name}"
        for place in (1, 2, 3)  # the only fourth step has no label
        for name in ("labels", "label", "probability", "accuracy")
    ]
    second = [found[f"step_position/2/{name}"] for name in ("labels", "label", "accuracy")]
    assert second == [3, 1.0, pytest.approx(2 / 3)]
    odds = torch.tensor([2.0, -0.5, 1.0], dtype=torch.float64)
    assert found["step_position/2/probability"] == pytest.approx(float(odds.sigmoid().mean()))
    long = report_of(mse, [*[0.0] * 9, 0.25, 0.75], stepped([[1.0] * 11]))
    tenth = [long[f"step_position/10/{name}"] for name in ("labels", "probability", "accuracy")]
    assert tenth == [2, 0.5, 0.5]
    rewards[5] = 0.5
    found = report_of(odds_objective, rewards, stepped(labels))
    assert found["first_error_f1"] == pytest.approx(2 * 0.5 * 1 / 1.5)
    # Centred labels are measured where they are; returns are neither right nor wrong.
    moved = report_of(mse, [r - 0.5 for r in rewards], stepped(labels, mean=0.5))
    plain = report_of(mse, rewards, stepped(labels))
    for name in ("step_accuracy", "first_error_accuracy", "first_error_f1"):
        assert moved[name] == plain[name]
    assert "step_accuracy" not in report_of(mse, [1.0, 2.0], stepped([[3.0, 0.0]]))


@pytest.mark.parametrize(("label", "mean"), [(1.0, 0.01), (0.5, 0.02)])
def test_verdicts_are_by_the_labels_of_the_data_whatever_their_mean(
    label: float, mean: float
) -> None:
    """These means, subtracted and added again in fp32, move 1 above 1, and 0.5 below 0.5."""
    centred = float(np.float32(label - mean)) + float(np.float32(mean))
    assert centred > 1 or centred < 0.5
    records = stepped([[label, 0.0]], mean=mean)
    objective = MaskedMse(("right",), has_steps=True)
    found = report_of(objective, [label - mean + 0.01, 0.1 - mean], records)
    assert found["step_accuracy"] == 1.0


def test_aggregate_is_one_that_is_known() -> None:
    config = ModelConfig(objective="bradley_terry", objective_kwargs={"aggregate": "max"})
    with pytest.raises(ConfigError, match="aggregate: got 'max', wanted one of last, min, mean"):
        build_objective(config, ["reward"])
