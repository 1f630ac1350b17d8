"""Models of ties: their probabilities, and what they learn from replies that people found equal."""

from __future__ import annotations

import math

import pytest
import torch

from nemo_aligner.objectives.base import PairObjective, count_outputs
from nemo_aligner.objectives.bradley_terry import BradleyTerry
from nemo_aligner.objectives.davidson import Davidson
from nemo_aligner.objectives.rao_kupper import RaoKupper
from tests.objectives.hand_made import (
    accepted,
    check_any_batch,
    check_gradient,
    learn,
    loss_of,
    ranked,
)

BOTH = (RaoKupper(), RaoKupper(tie_parameter=1.1), Davidson(), Davidson(tie_parameter=3))


def probabilities(
    objective: RaoKupper | Davidson, first: float, second: float
) -> tuple[float, ...]:
    """That the first one wins, that the second does, and that they are tied."""
    ranks = ([0, 1], [1, 0], [2, 2])
    losses = [loss_of(objective, [first, second], ranked(own))[0] for own in ranks]
    return tuple(math.exp(-loss) for loss in losses)


def test_rao_kupper_is_its_formula() -> None:
    a, b, theta = math.exp(0.7), math.exp(-0.4), 1.5
    win, loss = a / (a + theta * b), b / (b + theta * a)
    tie = (theta**2 - 1) * a * b / ((a + theta * b) * (theta * a + b))
    got = probabilities(RaoKupper(tie_parameter=theta), 0.7, -0.4)
    assert got == pytest.approx((win, loss, tie))


def test_davidson_is_its_formula() -> None:
    a, b, nu = math.exp(0.7), math.exp(-0.4), 0.6
    total = a + b + nu * math.sqrt(a * b)
    got = probabilities(Davidson(tie_parameter=nu), 0.7, -0.4)
    assert got == pytest.approx((a / total, b / total, nu * math.sqrt(a * b) / total))


def test_ties_wins_and_losses_are_all_there_is() -> None:
    for objective in BOTH:
        assert objective.learns_from_ties
        for first in (-3.0, 0.0, 0.2, 8.0):
            total = sum(probabilities(objective, first, 0.0))
            assert total == pytest.approx(1), (objective, first)


def test_ties_by_default_equal_replies_are_tied_one_time_in_three() -> None:
    for objective in (RaoKupper(), Davidson()):
        assert probabilities(objective, 1.3, 1.3) == pytest.approx([1 / 3] * 3)


def test_ties_that_are_rare_leave_bradley_terry() -> None:
    records, rewards = ranked([0, 1], [1, 0]), [1.0, 0.5, -1.0, 2.0]
    wanted = loss_of(BradleyTerry(), rewards, records)[0]
    for objective in (RaoKupper(tie_parameter=1 + 1e-9), Davidson(tie_parameter=1e-9)):
        assert loss_of(objective, rewards, records) == (pytest.approx(wanted), 2)


def test_ties_at_large_margins_stay_finite() -> None:
    for objective in BOTH:
        rewards = torch.tensor([[-500.0], [500.0], [500.0], [-500.0]], requires_grad=True)
        total, _ = objective.loss(rewards, ranked([0, 1], [0, 0]))
        total.backward()
        assert rewards.grad is not None
        assert bool(torch.isfinite(rewards.grad).all()), objective
        assert math.isfinite(total.item()), objective


@pytest.mark.parametrize("objective", [RaoKupper(), Davidson(), BradleyTerry(ties="half")])
def test_linear_model_learns_what_is_better_and_what_is_equal(objective: PairObjective) -> None:
    # The first feature decides, in whole steps; the second is what replies of one step differ by.
    generator = torch.Generator().manual_seed(4)
    quality = torch.randint(3, (150, 2), generator=generator)
    features = torch.stack([quality.float(), torch.randn(150, 2, generator=generator)], dim=2)
    records = ranked(*(-quality).tolist())
    rewards = learn(objective, features.view(300, 2), records).view(150, 2)
    margins = (rewards[:, 0] - rewards[:, 1]).abs()
    tied = quality[:, 0] == quality[:, 1]
    assert objective.step_metrics(rewards.view(300, 1), records)["accuracy"] == 1.0
    assert float(margins[tied].mean()) < 0.1 * float(margins[~tied].mean())


@pytest.mark.parametrize(
    ("objective", "parameter"), [(RaoKupper, 1.5), (RaoKupper, 40.0), (Davidson, 0.3)]
)
def test_tie_parameter_learned_has_the_loss_of_a_fixed_one(
    objective: type[RaoKupper | Davidson], parameter: float
) -> None:
    fixed, learned = (objective(tie_parameter=parameter, learned=each) for each in (False, True))
    assert (fixed.start_of_learned, count_outputs(fixed), count_outputs(learned)) == ((), 1, 2)
    (x,) = learned.start_of_learned
    records = ranked([0, 1], [2, 0, 1], [0, 0], [1, 0, 0, 2])
    rewards = torch.randn(11, 1, generator=torch.Generator().manual_seed(1)).double()
    both = torch.cat([rewards, torch.full_like(rewards, x)], dim=1)
    total, count = learned.loss(both, records)
    wanted, number = fixed.loss(rewards, records)
    torch.testing.assert_close(total, wanted)
    assert int(count) == int(number)
    check_gradient(learned, both, records)
    check_any_batch(learned, both, records)
    lengths = torch.ones(11, dtype=torch.int64)
    assert learned.report(both, records, lengths)["tie_parameter"] == pytest.approx(parameter)
    step = learned.step_metrics(both, records)
    assert step.pop("tie_parameter") == pytest.approx(parameter)
    assert step == fixed.step_metrics(rewards, records)


@pytest.mark.parametrize("objective", [RaoKupper, Davidson])
def test_tie_parameter_learned_is_the_share_of_ties_among_equals(
    objective: type[RaoKupper | Davidson],
) -> None:
    # Of equal replies three in five are tied, of which each model knows its parameter.
    learned = objective(learned=True)
    records = ranked(*([0, 0],) * 60, *([0, 1], [1, 0]) * 20)
    x = torch.tensor(learned.start_of_learned, dtype=torch.float64, requires_grad=True)
    optimizer = torch.optim.Adam([x], lr=0.05)
    for _ in range(300):
        optimizer.zero_grad()
        rewards = torch.zeros(200, 1, dtype=torch.float64)
        total, _ = learned.loss(torch.cat([rewards, x.expand(200, 1)], dim=1), records)
        total.backward()
        optimizer.step()
    parameter = learned.parameter(float(x))
    shares = {RaoKupper: (parameter - 1) / (parameter + 1), Davidson: parameter / (parameter + 2)}
    assert shares[objective] == pytest.approx(0.6, abs=1e-3)


def test_tie_parameter_that_allows_no_tie_is_refused() -> None:
    for value in (1, 0.5, math.nan, math.inf, "two", True):
        wrong = ({"tie_parameter": value}, f"tie_parameter: got {value!r}, wanted a number above 1")
        assert not accepted(RaoKupper, wrong)
    assert not accepted(
        Davidson,
        ({"tie_parameter": -1}, "tie_parameter: got -1, wanted a number above 0"),
        ({"learned": 1}, "learned: got 1, wanted true or false"),
    )
