"""The likelihood of a ranking, against its formula and against Bradley-Terry's."""

from __future__ import annotations

import math

import pytest
import torch

from nemo_aligner.batch import Records
from nemo_aligner.objectives.bradley_terry import BradleyTerry
from nemo_aligner.objectives.plackett_luce import PlackettLuce
from tests.objectives.hand_made import learn, loss_of, ranked


def chosen(best: float, *others: float) -> float:
    """``-log`` of the softmax of the best one."""
    return math.log(sum(math.exp(each - best) for each in (best, *others)))


def test_plackett_luce_is_minus_log_of_one_choice_after_the_other() -> None:
    rewards = [0.5, 2.0, -1.0, 1.0, 0.25, 3.0]
    wanted = chosen(2.0, 0.5, -1.0, 1.0) + chosen(0.5, -1.0, 1.0) + chosen(1.0, -1.0)
    total, count = loss_of(PlackettLuce(), rewards, ranked([1, 0, 3, 2], [5, 9]))
    assert (total, count) == (pytest.approx(wanted + chosen(0.25, 3.0)), 2)


def test_plackett_luce_of_two_completions_is_the_case_of_bradley_terry() -> None:
    rewards = torch.randn(40, 1, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    records = ranked(*[[0, 1], [1, 0]] * 10)
    ours, bradley_terry = (
        objective.loss(rewards, records) for objective in (PlackettLuce(), BradleyTerry())
    )
    torch.testing.assert_close(ours, bradley_terry)


def test_plackett_luce_probabilities_of_all_rankings_sum_to_one() -> None:
    orders = [[0, 1, 2], [0, 2, 1], [1, 0, 2], [1, 2, 0], [2, 0, 1], [2, 1, 0]]
    losses = [loss_of(PlackettLuce(), [0.3, -1.2, 2.0], ranked(order))[0] for order in orders]
    assert sum(math.exp(-loss) for loss in losses) == pytest.approx(1)


def test_plackett_luce_tied_completions_are_not_compared() -> None:
    # Both of the best ones above the third; a best one above two that are tied.
    rewards = [1.0, 0.5, -0.5, 2.0, 0.0, 1.0]
    wanted = chosen(1.0, -0.5) + chosen(0.5, -0.5) + chosen(2.0, 0.0, 1.0)
    total, count = loss_of(PlackettLuce(), rewards, ranked([0, 0, 4], [0, 1, 1]))
    assert (total, count) == (pytest.approx(wanted), 2)


def test_plackett_luce_record_without_any_order_counts_for_nothing() -> None:
    rewards = [1.0, 0.5, 0.0, -0.5, 2.0, 0.0]
    total, count = loss_of(PlackettLuce(), rewards, ranked([0, 0, 0], [1], [0, 1]))
    assert (total, count) == (pytest.approx(chosen(2.0, 0.0)), 1)
    assert loss_of(PlackettLuce(), [1.0, 2.0], ranked([3, 3])) == (0.0, 0)
    nothing, none = PlackettLuce().loss(torch.zeros(0, 1), Records.of([], []))
    assert (float(nothing), int(none)) == (0.0, 0)


def test_plackett_luce_rewards_that_are_far_apart_stay_finite() -> None:
    rewards = torch.tensor([[-500.0], [500.0], [0.0]], requires_grad=True)
    total, _ = PlackettLuce().loss(rewards, ranked([0, 1, 2]))
    total.backward()
    assert total.item() == 1000.0
    torch.testing.assert_close(rewards.grad, torch.tensor([[-1.0], [1.0], [0.0]]))


def test_linear_model_learns_rankings() -> None:
    features = torch.randn(400, 5, generator=torch.Generator().manual_seed(2))
    true = features @ torch.tensor([1.0, -2.0, 0.5, 0.0, 1.0])
    records = ranked(
        *(four.argsort(descending=True).argsort().tolist() for four in true.view(100, 4))
    )
    rewards = learn(PlackettLuce(), features, records)
    assert PlackettLuce().step_metrics(rewards, records)["accuracy"] > 0.97
