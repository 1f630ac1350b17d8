"""What a step and a validation of a tiny learner give back, beside what can be computed by hand."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from nemo_aligner.batch import LabelColumns
from nemo_aligner.config.common import Precision, RecordKind
from nemo_aligner.data.views import TokenSequences
from nemo_aligner.objectives.bradley_terry import BradleyTerry
from nemo_aligner.objectives.masked_mse import MaskedMse
from nemo_aligner.training.learner import RewardLearner, describe_rewards
from tests.data.test_packing import dataset
from tests.training import poisoned


@pytest.fixture
def learner(layout: Any) -> RewardLearner:
    return poisoned.build(layout, poisoned.dataset())


def test_step_tells_the_rate_it_took_and_the_tokens_it_saw(learner: RewardLearner) -> None:
    data = learner.data.train
    for step in range(2):
        batch = learner._loader.global_batch(step)
        found = learner.train_step(step)
        assert found["tokens"] == sum(len(side) for i in batch for side in data.record(i))
        # Two steps of warm-up.
        assert found["lr"] == pytest.approx(0.01 * (step + 1) / 3)
        assert found["grad_norm"] > 0
        assert not {"loss_scale", "skipped", "skipped_steps"} & set(found)


def test_step_in_fp16_tells_its_loss_scale(layout: Any) -> None:
    found = poisoned.build(layout, poisoned.dataset(), Precision.fp16).train_step(0)
    assert found["loss_scale"] == 2.0**16
    assert (found["skipped"], found["skipped_steps"]) == (0.0, 0.0)
    assert type(found["skipped"]) is float


def test_validation_changes_nothing_and_the_next_step_trains(learner: RewardLearner) -> None:
    learner.train_step(0)
    sets = [replace(dataset([9, 5, 4, 4, 3, 8]), name=name) for name in ("first", "second")]
    reversed_ids = [ids[::-1] for ids in dataset([6, 5] * 3).sequences]
    sets[1] = replace(sets[1], sequences=TokenSequences.of(reversed_ids))
    learner.data = replace(learner.data, validation=sets)
    before = [parameter.clone() for parameter in learner.model.parameters()]
    found = learner.validate()
    assert learner.validate() == pytest.approx(found, nan_ok=True)
    assert {name.partition("/")[0] for name in found} == {"first", "second"}
    assert found["first/loss"] != found["second/loss"]
    assert not learner.model.training
    assert all(map(torch.equal, before, learner.model.parameters()))
    learner.train_step(1)
    assert learner.model.training
    assert not all(map(torch.equal, before, learner.model.parameters()))
    assert learner.validate()["first/loss"] != found["first/loss"]


def test_gradients_do_not_add_up_over_steps(layout: Any, learner: RewardLearner) -> None:
    learner.train_step(0)
    anew = poisoned.build(layout, poisoned.dataset())
    anew.model.load_state_dict(learner.model.state_dict())
    assert learner.train_step(1)["grad_norm"] == pytest.approx(anew.train_step(1)["grad_norm"])


def test_imbalance_is_that_of_the_loader(learner: RewardLearner) -> None:
    assert learner.imbalance(range(2)) == learner._loader.imbalance(range(2))


def test_spread_of_rewards_is_told_with_what_labels_were_centred_on() -> None:
    data = dataset([2, 3, 4], RecordKind.rating)
    rewards = torch.tensor([[1.0, -1.0], [2.0, 0.0], [6.0, 4.0]])
    found = describe_rewards(MaskedMse(("x", "y")), data, rewards)
    assert found["reward_mean/x"] == pytest.approx(3.0 + 1.0)
    assert found["reward_mean/y"] == pytest.approx(1.0 + 0.5)
    deviation = ((4 + 1 + 9) / 3) ** 0.5
    assert found["reward_std/x"] == pytest.approx(deviation)
    assert found["reward_std/y"] == pytest.approx(((4 + 1 + 9) / 3) ** 0.5)
    values = data.records.labels.values
    plain = replace(data.records, labels=LabelColumns.of(["x", "y"], values))
    found = describe_rewards(MaskedMse(("x", "y")), replace(data, records=plain), rewards)
    assert (found["reward_mean/x"], found["reward_mean/y"]) == (3.0, 1.0)
    pairs = describe_rewards(BradleyTerry(), dataset([2, 3, 4, 5]), torch.arange(4.0)[:, None])
    assert pairs["reward_mean/reward"] == 1.5
