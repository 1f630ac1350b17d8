"""Losses of rankings and pairs against their written-out formulas."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from nemo_aligner.batch.packed import Records
from nemo_aligner.losses.base import Objective
from nemo_aligner.losses.multi_head import HeadEnsemble
from nemo_aligner.losses.pairwise import BradleyTerry, Davidson, PlackettLuce, RaoKupper
from tests.losses.hand_made import accepted, check_any_batch, check_gradient, loss_of, ranked

MISSING = math.nan


def lost(margin: float) -> float:
    return math.log1p(math.exp(-margin))


def focal(margin: float, gamma: float) -> float:
    p = 1 / (1 + math.exp(-margin))
    return (1 - 2 * max(0.0, p - 0.5)) ** gamma * -math.log(p)


def chosen(best: float, *other_rewards: float) -> float:
    """``-log`` of the softmax of the best one."""
    return math.log(sum(math.exp(reward - best) for reward in (best, *other_rewards)))


def test_bradley_terry_without_settings_is_the_plain_one_bit_for_bit() -> None:
    rewards = torch.randn(64, 1, generator=torch.Generator().manual_seed(0)) * 4
    inputs, plain = rewards.clone().requires_grad_(), rewards.clone().requires_grad_()
    total, count = BradleyTerry().loss(inputs, Records.of(range(32), [2] * 32))
    total.backward()
    expected = F.softplus(plain[1::2, 0] - plain[::2, 0]).sum()
    expected.backward()
    assert inputs.grad is not None
    assert plain.grad is not None
    assert torch.equal(total, expected)
    assert torch.equal(inputs.grad, plain.grad)
    assert int(count) == 32


PAIRS = [1.5, 0.25, -1.0, 2.0]  # margins 1.25 and -3
LABELLED = ranked([0, 1], [0, 1], label_margins=[2.0, 0.5])
UNLABELLED = ranked([0, 1], [0, 1], label_margins=[MISSING, MISSING])
ONE_TIED = ranked([0, 0], [0, 1])
THREE, OF_THREE = [0.5, 2.0, -1.0, 1.0, 0.0], ranked([1, 0, 1], [0, 1])
TIED, TIED_OF_THREE = (lost(1.25) + lost(-1.25)) / 2, (lost(1.5) + lost(-1.5)) / 2
OF_LABELLED: list[tuple[dict[str, Any], float]] = [
    ({}, lost(1.25) + lost(-3)),
    (
        {"label_smoothing": 0.1},
        0.9 * lost(1.25) + 0.1 * lost(-1.25) + 0.9 * lost(-3) + 0.1 * lost(3),
    ),
    ({"center_rewards_coefficient": 0.01}, lost(1.25) + lost(-3) + 0.01 * (1.75**2 + 1.0**2)),
    ({"focal_gamma": 2}, focal(1.25, 2) + focal(-3, 2)),
    ({"focal_gamma": 0.5}, focal(1.25, 0.5) + lost(-3)),
    ({"label_margin": "subtract"}, lost(1.25 - 2) + lost(-3 - 0.5)),
    ({"label_margin": "scale"}, 2 * lost(1.25) + 0.5 * lost(-3)),
    (
        {"label_margin": "subtract", "label_smoothing": 0.2, "focal_gamma": 1},
        0.8 * focal(-0.75, 1) + 0.2 * focal(-3.25, 1) + 0.8 * focal(-3.5, 1) + 0.2 * focal(2.5, 1),
    ),
    (
        {"label_margin": "scale", "label_smoothing": 0.2, "center_rewards_coefficient": 1},
        2 * (0.8 * lost(1.25) + 0.2 * lost(-1.25))
        + 0.5 * (0.8 * lost(-3) + 0.2 * lost(3))
        + 1.75**2
        + 1.0**2,
    ),
]
HALF, SMOOTH = {"ties": "half"}, {"ties": "half", "label_smoothing": 0.25}
# Ties are dropped, or half a win for each; all pairs of several completions are one record.
OF_OTHERS: list[tuple[dict[str, Any], list[float], Records, float, int]] = [
    ({"label_margin": "subtract"}, PAIRS, UNLABELLED, lost(1.25) + lost(-3), 2),
    ({"label_margin": "scale"}, PAIRS, UNLABELLED, lost(1.25) + lost(-3), 2),
    ({}, PAIRS, ONE_TIED, lost(-3), 1),
    (HALF, PAIRS, ONE_TIED, TIED + lost(-3), 2),
    (SMOOTH, PAIRS, ONE_TIED, TIED + 0.75 * lost(-3) + 0.25 * lost(3), 2),
    ({}, THREE, OF_THREE, (lost(1.5) + lost(3.0)) / 2 + lost(1.0), 2),
    (HALF, THREE, OF_THREE, (lost(1.5) + lost(3.0) + TIED_OF_THREE) / 3 + lost(1.0), 2),
]


def wrong_losses(*cases: tuple[Objective, list[float], Records, float, int]) -> list[str]:
    """Of objectives, rewards and records those whose loss or count is not the one wanted."""
    losses = [(case, loss_of(*case[:3])) for case in cases]
    return [
        f"{case[0]}: {loss}" for case, loss in losses if loss != (pytest.approx(case[3]), case[4])
    ]


def test_bradley_terry_settings_are_their_formulas() -> None:
    labelled = [(settings, PAIRS, LABELLED, expected, 2) for settings, expected in OF_LABELLED]
    cases = [*labelled, *OF_OTHERS]
    assert not wrong_losses(*((BradleyTerry(**settings), *case) for settings, *case in cases))
    assert BradleyTerry(ties="half").learns_from_ties
    assert not BradleyTerry().learns_from_ties
    for value in ("subtract", "scale"):
        assert BradleyTerry(label_margin=value).columns == ("label_margin",)


def soft(margin: float, p: float) -> float:
    """Cross-entropy of the probability p that the better reply is better."""
    return p * lost(margin) + (1 - p) * lost(-margin)


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x))


@pytest.mark.parametrize(("weight", "temperature"), [(1.0, 1.0), (0.3, 2.5), (0.0, 4.0)])
def test_soft_labels_are_learned_by_cross_entropy(weight: float, temperature: float) -> None:
    """Formula and gradient; the pair without a teacher's rewards has the loss of a hard label."""
    settings: dict[str, Any] = {
        "soft_label_weight": weight,
        "soft_label_temperature": temperature,
    }
    teacher = torch.tensor([1.0, 0.25, MISSING, MISSING, 0.5, 2.0])
    records = replace(ranked([0, 1], [0, 1], [1, 1]), teacher_rewards=teacher)
    rewards = [*PAIRS, 0.75, -0.5]

    def mixed(hard: float, margin: float) -> float:
        return (1 - weight) * hard + weight * sigmoid(margin / temperature)

    pairs = soft(1.25, mixed(1, 0.75)) + lost(-3)
    smooth = soft(1.25, mixed(0.8, 0.75)) + soft(-3, 0.8) + soft(1.25, mixed(0.5, -1.5))
    # The derivative of the loss by the margin d is ``sigmoid(d) - p``.
    slope = sigmoid(1.25) - mixed(1, 0.75)
    cases = [({}, pairs, 2), ({"ties": "half", "label_smoothing": 0.2}, smooth, 3)]
    for more, expected, count in cases:
        objective = BradleyTerry(**settings, **more)
        assert loss_of(objective, rewards, records) == (pytest.approx(expected, rel=1e-12), count)
    leaf = torch.tensor(rewards, dtype=torch.float64)[:, None].requires_grad_()
    (total, _) = BradleyTerry(**settings).loss(leaf, records)
    (gradient,) = torch.autograd.grad(total, leaf)
    assert gradient[:2, 0].tolist() == pytest.approx([slope, -slope], rel=1e-12)
    ensemble = HeadEnsemble(heads=2, bootstrap=False, center_rewards_coefficient=0, **settings)
    heads = leaf.detach().expand(-1, 2)
    assert float(ensemble.loss(heads, records)[0]) == pytest.approx(pairs, rel=1e-12)


def test_plackett_luce_learns_the_softmax_of_a_teacher() -> None:
    teacher = torch.tensor([1.0, 3.0, -0.5, MISSING, MISSING, 1.0, 2.0])
    records = replace(ranked([1, 0, 2], [0, 1], [3, 3]), teacher_rewards=teacher)
    rewards, order = [0.5, 2.0, -1.0, 0.25, 3.0, 0.0, 1.0], (2.0, 0.5, -1.0)
    hard = chosen(*order) + chosen(*order[1:])
    weights = [math.exp(t / 2) for t in (3.0, 1.0, -0.5)]
    others = [[*order[:n], *order[n + 1 :]] for n in range(3)]
    listwise = sum(
        weight / sum(weights) * chosen(best, *rest)
        for weight, best, rest in zip(weights, order, others, strict=True)
    )
    for weight in (1.0, 0.25, 0.0):
        objective = PlackettLuce(soft_label_weight=weight, soft_label_temperature=2)
        expected = (1 - weight) * hard + weight * listwise + chosen(0.25, 3.0)
        assert loss_of(objective, rewards, records) == (pytest.approx(expected, rel=1e-12), 2)


def test_plackett_luce_is_minus_log_of_one_choice_after_the_other() -> None:
    """Tied completions are not compared, and a record without any order counts for nothing."""
    four = chosen(2.0, 0.5, -1.0, 1.0) + chosen(0.5, -1.0, 1.0) + chosen(1.0, -1.0)
    two = chosen(0.25, 3.0)
    tied = chosen(1.0, -0.5) + chosen(0.5, -0.5) + chosen(2.0, 0.0, 1.0)
    assert not wrong_losses(
        *(
            (PlackettLuce(), rewards, ranked(*ranks), expected, count)
            for rewards, ranks, expected, count in (
                ([0.5, 2.0, -1.0, 1.0, 0.25, 3.0], ([1, 0, 3, 2], [5, 9]), four + two, 2),
                ([1.0, 0.5, -0.5, 2.0, 0.0, 1.0], ([0, 0, 4], [0, 1, 1]), tied, 2),
                ([1.0, 0.5, 0.0, -0.5, 2.0, 0.0], ([0, 0, 0], [1], [0, 1]), chosen(2.0, 0.0), 1),
                ([1.0, 2.0], ([3, 3],), 0.0, 0),
                ([-500.0, 500.0, 0.0], ([0, 1, 2],), 1000.0, 1),
            )
        )
    )


def test_models_of_ties_are_their_formulas() -> None:
    """Rao-Kupper's 2 and Davidson's 1, by which equals are tied one time in three, are defaults."""
    wrong = []
    for first, second in ((0.7, -0.4), (1.3, 1.3), (-3.0, 0.0), (8.0, 0.0)):
        a, b, root = math.exp(first), math.exp(second), math.exp((first + second) / 2)
        for settings in ({}, {"tie_parameter": 1.5}):
            theta, nu = settings.get("tie_parameter", 2.0), settings.get("tie_parameter", 1.0)
            wins, loses = a / (a + theta * b), b / (b + theta * a)
            total = a + b + nu * root
            for objective, expected in (
                (RaoKupper(**settings), (wins, loses, (theta**2 - 1) * wins * loses)),
                (Davidson(**settings), (a / total, b / total, nu * root / total)),
            ):
                probabilities = [
                    math.exp(-loss_of(objective, [first, second], ranked(ranks))[0])
                    for ranks in ([0, 1], [1, 0], [2, 2])
                ]
                if probabilities != pytest.approx(expected) or not objective.learns_from_ties:
                    wrong.append((objective, first, second, probabilities, expected))
    assert not wrong


@pytest.mark.parametrize(
    ("objective", "parameter"), [(RaoKupper, 1.5), (RaoKupper, 40.0), (Davidson, 0.3)]
)
def test_tie_parameter_learned_has_the_loss_of_a_fixed_one(
    objective: type[RaoKupper | Davidson], parameter: float
) -> None:
    # Learned from another start, so that only its x can say the parameter.
    fixed, learned = objective(tie_parameter=parameter), objective(learned=True)
    assert (fixed.initial_scalars, fixed.output_columns.count) == ((), 1)
    assert learned.output_columns.count == 2
    (x,) = objective(tie_parameter=parameter, learned=True).initial_scalars
    records = ranked([0, 1], [2, 0, 1], [0, 0], [1, 0, 0, 2])
    rewards = torch.randn(11, 1, generator=torch.Generator().manual_seed(1)).double()
    both = torch.cat([rewards, torch.full_like(rewards, x)], dim=1)
    torch.testing.assert_close(learned.loss(both, records), fixed.loss(rewards, records))
    check_gradient(learned, both, records)
    check_any_batch(learned, both, records)
    lengths = torch.ones(11, dtype=torch.int64)
    assert learned.report(both, records, lengths)["tie_parameter"] == pytest.approx(parameter)
    step = learned.step_metrics(both, records)
    assert step.pop("tie_parameter") == pytest.approx(parameter)
    assert step == fixed.step_metrics(rewards, records)


def test_settings_of_rankings_that_cannot_be_are_refused() -> None:
    number, tie = "wanted a number of 0 or more", "wanted a number above"
    assert not accepted(
        BradleyTerry,
        ({"label_smoothing": 0.5}, f"label_smoothing: got 0.5, {number} and l"),
        ({"label_smoothing": -0.1}, f"label_smoothing: got -0.1, {number}"),
        ({"label_smoothing": "much"}, f"label_smoothing: got 'much', {number}"),
        ({"center_rewards_coefficient": MISSING}, f"center_rewards_coefficient: got nan, {number}"),
        ({"focal_gamma": math.inf}, f"focal_gamma: got inf, {number}"),
        ({"label_margin": "add"}, "label_margin: got 'add', wanted one of none, subtract, scale"),
        ({"ties": "keep"}, "ties: got 'keep', wanted one of drop, half"),
        ({"soft_label_weight": 1.1}, "soft_label_weight: got 1.1, wanted a number from 0 to 1"),
        ({"soft_label_temperature": 0}, f"soft_label_temperature: got 0, {tie} 0"),
    )
    assert not accepted(
        RaoKupper,
        *(
            ({"tie_parameter": value}, f"tie_parameter: got {value!r}, {tie} 1")
            for value in (1, 0.5, math.nan, math.inf, "two", True)
        ),
    )
    assert not accepted(
        Davidson,
        ({"tie_parameter": -1}, f"tie_parameter: got -1, {tie} 0"),
        ({"learned": 1}, "learned: got 1, wanted true or false"),
    )
