"""Losses against length: their formulas written out, and what they do to a model that counts."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from nemo_aligner.batch.packed import Records
from nemo_aligner.losses.base import PairObjective, reward_gradient
from nemo_aligner.losses.length import pearson
from nemo_aligner.losses.pairwise import BradleyTerry
from tests.losses.hand_made import accepted, check_any_batch, check_gradient, learn, ranked

REWARDS = [1.0, 0.2, -0.5, 0.7, 2.0, 2.5, -1.0, -3.0]
LENGTHS = [10, 40, 30, 12, 7, 7, 90, 2]
PAIRS = replace(ranked(*[[0, 1]] * 4), reply_lengths=torch.tensor(LENGTHS, dtype=torch.int32))
RANKED = replace(
    ranked([2, 0, 1], [0, 1], [0, 0], [1, 0]),
    reply_lengths=torch.tensor([3, 9, 4, 8, 2, 5, 5, 1, 7]),
)


def by_hand(
    rewards: list[float], weight: float = 1.0, bias: float = 0.0, penalty: float = 0.0
) -> float:
    total = 0.0
    for better in range(0, 8, 2):
        margin = rewards[better] - rewards[better + 1]
        margin += bias * math.log(LENGTHS[better] / LENGTHS[better + 1])
        heavy = weight if LENGTHS[better] > LENGTHS[better + 1] else 1.0
        total += heavy * math.log1p(math.exp(-margin))
    return total + 4 * penalty * np.corrcoef(rewards, LENGTHS)[0, 1] ** 2


def test_terms_against_length_are_those_written_out() -> None:
    rewards = torch.tensor(REWARDS, dtype=torch.float64)[:, None]
    cases = {
        BradleyTerry(): by_hand(REWARDS),
        BradleyTerry(longer_chosen_weight=0.4): by_hand(REWARDS, weight=0.4),
        BradleyTerry(length_bias=0.7): by_hand(REWARDS, bias=0.7),
        BradleyTerry(length_correlation_penalty=3.0): by_hand(REWARDS, penalty=3.0),
    }
    for objective, expected in cases.items():
        total, count = objective.loss(rewards, PAIRS)
        assert (float(total), int(count)) == (pytest.approx(expected), 4), objective
    learned = BradleyTerry(length_bias=0.7, learn_length_bias=True)
    both = torch.cat([rewards, torch.full_like(rewards, 0.7)], dim=1)
    assert float(learned.loss(both, PAIRS)[0]) == pytest.approx(by_hand(REWARDS, bias=0.7))
    assert learned.learned_scalars(both) == {"length_bias": pytest.approx(0.7)}
    of_pairs = BradleyTerry(length_correlation_penalty=2.0, length_correlation_of="pairs")
    margins, differences = (np.subtract(column[::2], column[1::2]) for column in (REWARDS, LENGTHS))
    r = margins @ differences / np.linalg.norm(margins) / np.linalg.norm(differences)
    total, _ = of_pairs.loss(rewards, PAIRS)
    assert float(total) == pytest.approx(by_hand(REWARDS) + 4 * 2 * r**2)


@pytest.mark.parametrize(
    "objective",
    [
        BradleyTerry(longer_chosen_weight=0.5, length_bias=0.3, ties="half"),
        BradleyTerry(length_bias=0.3, learn_length_bias=True),
        BradleyTerry(length_correlation_penalty=1.0, label_smoothing=0.1),
        BradleyTerry(length_correlation_penalty=1.0, length_correlation_of="pairs"),
    ],
)
def test_gradient_by_reward_is_that_of_the_whole_batch(objective: PairObjective) -> None:
    """Packs that use it add up to the mean loss; a loss that is a sum does so by itself."""
    for records in (PAIRS, RANKED):
        shape = (records.num_rewards, objective.output_columns.count)
        rewards = torch.randn(shape, generator=torch.Generator().manual_seed(1))
        check_gradient(objective, rewards, records)
        leaf = rewards.double().requires_grad_()
        total, count = objective.loss(leaf, records)
        (expected,) = torch.autograd.grad(total / count, leaf)
        gradient = reward_gradient(objective, rewards, records) / len(records)
        torch.testing.assert_close(gradient, expected.float())
        if not objective.is_batch_level:
            check_any_batch(objective, rewards, records)
    alone = torch.ones(2, objective.output_columns.count)
    gradient = reward_gradient(objective, alone, PAIRS.select([0]))
    assert bool(torch.isfinite(gradient).all()), "of rewards that are all the same"
    assert float(objective.loss(alone[:0], PAIRS.select([]))[0]) == 0


def test_model_that_sees_lengths_and_content_is_taught_the_content() -> None:
    """Of 200 pairs 80% chose the longer reply, 80% of both kinds the one that is better.

    So better replies are longer: weights and biases leave that to the reward, a penalty does not.
    """
    generator = torch.Generator().manual_seed(0)
    is_longer = (torch.rand(200, generator=generator) < 0.8).float() * 2 - 1
    is_better = (torch.rand(200, generator=generator) < 0.8).float() * 2 - 1
    features = torch.stack([is_longer, is_better], dim=1)
    features = torch.stack([features, -features], dim=1).view(-1, 2)
    lengths = (20 + 10 * features[:, 0]).int()
    records = replace(Records.of(range(200), [2] * 200), reply_lengths=lengths)
    slopes, correlations = [], []
    for objective in (
        BradleyTerry(),
        BradleyTerry(longer_chosen_weight=0.25),
        BradleyTerry(length_bias=1.3),
        BradleyTerry(length_correlation_penalty=10.0),
    ):
        rewards = learn(objective, features, records)[:, 0]
        of_length, of_content = torch.linalg.lstsq(features.double(), rewards[:, None]).solution
        slopes.append(float(of_length / of_content))
        correlations.append(float(pearson(rewards, lengths.double())))
    assert slopes[0] > 0.8
    assert correlations[0] > 0.8
    assert max(map(abs, slopes[1:3])) < 0.15
    assert max(map(abs, correlations[3:])) < 0.1


def test_tied_pair_has_no_longer_reply_that_was_chosen() -> None:
    """Its loss is the same whichever of its replies the file lists first."""
    objective = BradleyTerry(ties="half", longer_chosen_weight=0.5)
    tied, lengths, rewards = ranked([0, 0]), torch.tensor([9, 5]), torch.tensor([[1.0], [0.3]])
    unweighted = float(BradleyTerry(ties="half").loss(rewards, tied)[0])
    for order in ([0, 1], [1, 0]):
        records = replace(tied, reply_lengths=lengths[order])
        assert float(objective.loss(rewards[order], records)[0]) == pytest.approx(unweighted)


def test_settings_against_length_that_are_no_use_are_refused() -> None:
    assert not accepted(
        BradleyTerry,
        ({"longer_chosen_weight": 0}, "longer_chosen_weight: got 0, wanted a number above 0"),
        ({"length_bias": -1}, "length_bias: got -1, wanted a number of 0 or more"),
        ({"learn_length_bias": 1}, "learn_length_bias: got 1, wanted true or false"),
        ({"length_correlation_of": "texts"}, "wanted one of replies, pairs"),
    )
    with pytest.raises(ValueError, match="not counted"):
        BradleyTerry(length_bias=1).loss(torch.zeros(2, 1), ranked([0, 1]))
