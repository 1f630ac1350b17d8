"""The settings of Bradley-Terry against written-out formulas, alone and together."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from nemo_aligner.batch import Records
from nemo_aligner.objectives.bradley_terry import BradleyTerry
from tests.objectives.hand_made import accepted, learn, loss_of, ranked

PAIRS = [1.5, 0.25, -1.0, 2.0]  # margins 1.25 and -3
MISSING = math.nan


def lost(margin: float) -> float:
    return math.log1p(math.exp(-margin))


def p(margin: float) -> float:
    return 1 / (1 + math.exp(-margin))


def focal(margin: float, gamma: float) -> float:
    return (1 - 2 * max(0.0, p(margin) - 0.5)) ** gamma * -math.log(p(margin))


def test_bradley_terry_without_settings_is_the_plain_one_bit_for_bit() -> None:
    rewards = torch.randn(64, 1, generator=torch.Generator().manual_seed(0)) * 4
    given, plain = rewards.clone().requires_grad_(), rewards.clone().requires_grad_()
    total, count = BradleyTerry().loss(given, Records.of(range(32), [2] * 32))
    total.backward()
    wanted = F.softplus(plain[1::2, 0] - plain[::2, 0]).sum()
    wanted.backward()
    assert given.grad is not None
    assert plain.grad is not None
    assert torch.equal(total, wanted)
    assert torch.equal(given.grad, plain.grad)
    assert int(count) == 32


FORMULAS: list[tuple[dict[str, Any], float]] = [
    ({}, lost(1.25) + lost(-3)),
    (
        {"label_smoothing": 0.1},
        0.9 * lost(1.25) + 0.1 * lost(-1.25) + 0.9 * lost(-3) + 0.1 * lost(3),
    ),
    (
        {"center_rewards_coefficient": 0.01},
        lost(1.25) + lost(-3) + 0.01 * (1.75**2 + 1.0**2),
    ),
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


def test_bradley_terry_settings_are_their_formulas() -> None:
    records = ranked([0, 1], [0, 1], label_margins=[2.0, 0.5])
    for settings, wanted in FORMULAS:
        got = loss_of(BradleyTerry(**settings), PAIRS, records)
        assert got == (pytest.approx(wanted), 2), settings


def test_pair_without_a_label_has_the_plain_loss() -> None:
    records = ranked([0, 1], [0, 1], label_margins=[MISSING, MISSING])
    for how in ("subtract", "scale"):
        objective = BradleyTerry(label_margin=how)
        assert objective.columns == ("label_margin",)
        assert loss_of(objective, PAIRS, records) == (pytest.approx(lost(1.25) + lost(-3)), 2), how


def test_bradley_terry_ties_are_dropped_or_half_a_win_for_each() -> None:
    records = ranked([0, 0], [0, 1])
    assert loss_of(BradleyTerry(), PAIRS, records) == (pytest.approx(lost(-3)), 1)
    objective = BradleyTerry(ties="half")
    assert objective.learns_from_ties
    assert not BradleyTerry().learns_from_ties
    tied = (lost(1.25) + lost(-1.25)) / 2
    assert loss_of(objective, PAIRS, records) == (pytest.approx(tied + lost(-3)), 2)
    smooth = BradleyTerry(ties="half", label_smoothing=0.25)
    ordered = 0.75 * lost(-3) + 0.25 * lost(3)
    assert loss_of(smooth, PAIRS, records) == (pytest.approx(tied + ordered), 2)


def test_bradley_terry_all_pairs_of_several_completions_are_one_record() -> None:
    rewards, records = [0.5, 2.0, -1.0, 1.0, 0.0], ranked([1, 0, 1], [0, 1])
    drop = (lost(2.0 - 0.5) + lost(2.0 + 1.0)) / 2 + lost(1.0)
    assert loss_of(BradleyTerry(), rewards, records) == (pytest.approx(drop, rel=1e-6), 2)
    tie = (lost(1.5) + lost(-1.5)) / 2
    half = (lost(1.5) + lost(3.0) + tie) / 3 + lost(1.0)
    got = loss_of(BradleyTerry(ties="half"), rewards, records)
    assert got == (pytest.approx(half, rel=1e-6), 2)


SETTINGS: list[dict[str, Any]] = [
    {},
    {"label_smoothing": 0.1, "focal_gamma": 2.0, "ties": "half"},
    {"label_margin": "subtract", "center_rewards_coefficient": 0.1, "ties": "half"},
    {"label_margin": "scale", "label_smoothing": 0.2, "focal_gamma": 0.5},
]


def test_focal_loss_stays_finite_where_a_pair_is_as_good_as_certain() -> None:
    for margin in (-1000.0, 0.0, 50.0, 1000.0):
        rewards = torch.tensor([[margin], [0.0]], requires_grad=True)
        total, _ = BradleyTerry(focal_gamma=0.5).loss(rewards, Records.of([0], [2]))
        total.backward()
        assert rewards.grad is not None
        assert bool(torch.isfinite(rewards.grad).all())
        assert math.isfinite(total.item())


def test_linear_model_learns_by_each_setting() -> None:
    features = torch.randn(300, 5, generator=torch.Generator().manual_seed(2))
    true = features @ torch.tensor([1.0, -2.0, 0.5, 0.0, 1.0])
    ranks = [three.argsort(descending=True).argsort().tolist() for three in true.view(100, 3)]
    records = ranked(*ranks, label_margins=[1.0, 2.0] * 50)
    for settings in SETTINGS:
        objective = BradleyTerry(**settings)
        rewards = learn(objective, features, records)
        assert objective.step_metrics(rewards, records)["accuracy"] > 0.95, settings


def test_centred_rewards_are_around_zero() -> None:
    records = ranked([0, 1], [0, 1])
    features = torch.tensor([[1.0, 3.0], [0.0, 3.0], [2.0, 3.0], [0.5, 3.0]])
    plain = learn(BradleyTerry(), features, records)
    centred = learn(BradleyTerry(center_rewards_coefficient=1.0), features, records)
    assert abs(float(centred.mean())) < 0.1 < abs(float(plain.mean()))


def test_bradley_terry_refuses_what_a_setting_cannot_be() -> None:
    assert not accepted(
        BradleyTerry,
        ({"label_smoothing": 0.5}, "label_smoothing: got 0.5, wanted a number of 0 or more and l"),
        ({"label_smoothing": -0.1}, "label_smoothing: got -0.1, wanted a number of 0 or more"),
        ({"label_smoothing": "much"}, "label_smoothing: got 'much', wanted a number of 0 or more"),
        (
            {"center_rewards_coefficient": MISSING},
            "center_rewards_coefficient: got nan, wanted a number of 0 or more",
        ),
        ({"focal_gamma": math.inf}, "focal_gamma: got inf, wanted a number of 0 or more"),
        ({"label_margin": "add"}, "label_margin: got 'add', wanted one of none, subtract, scale"),
        ({"ties": "keep"}, "ties: got 'keep', wanted one of drop, half"),
    )
