"""What steps and validations of a tiny learner give back; the small parts that need no model."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from nemo_aligner.batch.packed import LabelColumns
from nemo_aligner.config.common import RecordKind
from nemo_aligner.config.training import ExpManagerConfig, MonitorMode
from nemo_aligner.data.packing import pack_records
from nemo_aligner.data.token_index import TokenSequences
from nemo_aligner.distributed.layout import ParallelLayout
from nemo_aligner.losses.pairwise import BradleyTerry
from nemo_aligner.losses.regression import MaskedMse
from nemo_aligner.training.learner import (
    RewardLearner,
    as_one_pack,
    compute_gradients,
    describe_rewards,
    validation_metric_names,
)
from nemo_aligner.training.prepare import open_checkpoints
from nemo_aligner.training.resume import changed_settings
from nemo_aligner.utils.errors import ConfigError
from tests.data.test_packing import dataset
from tests.training import balanced, poisoned


class Data:
    def __init__(self, *names: str) -> None:
        self.objective = BradleyTerry()
        self.validation = [replace(dataset([2, 3] * 4), name=name) for name in names]


def test_monitor_is_one_of_the_metrics() -> None:
    config = ExpManagerConfig()
    assert open_checkpoints(config, Data("validation-c")).monitor == "validation-c/accuracy"  # type: ignore[arg-type]
    two = Data("validation-a", "validation-b")
    assert open_checkpoints(config, two).monitor == "validation-a/accuracy"  # type: ignore[arg-type]
    assert open_checkpoints(config, Data()).monitor is None  # type: ignore[arg-type]
    config.checkpoint_callback_params.monitor = "loss"
    assert open_checkpoints(config, two).monitor == "validation-a/loss"  # type: ignore[arg-type]
    config.checkpoint_callback_params.monitor = "val_loss"
    with pytest.raises(ConfigError, match=r"got 'val_loss', wanted one of validation-c/loss, "):
        open_checkpoints(config, Data("validation-c"))  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="no validation data"):
        open_checkpoints(config, Data())  # type: ignore[arg-type]
    rated = dataset([2, 3, 5, 4], RecordKind.rating)
    rated = replace(rated, name="validation-c", sources=["x", "x", "y", "x"])
    objective = MaskedMse(("x", "y"))
    names = validation_metric_names(objective, [rated])
    assert {"validation-c/pearson/x", "validation-c/by_source/x/loss"} <= set(names)
    # A name of the first set, which may have slashes, or that of any set.
    two = Data("validation-c")
    two.objective, two.validation = objective, [rated]  # type: ignore[assignment]
    for monitor in ("pearson/x", "validation-c/pearson/x"):
        config.checkpoint_callback_params.monitor = monitor
        assert open_checkpoints(config, two).monitor == "validation-c/pearson/x"  # type: ignore[arg-type]
    measured = describe_rewards(objective, rated, torch.zeros(4, 2))
    assert names == [f"validation-c/{name}" for name in measured]
    # The labels of the first record are from 0 to 1, those of the others are not: no verdicts.
    stepped = validation_metric_names(
        replace(objective, has_steps=True), [dataset([2, 3], rated.kind)]
    )
    assert not [name for name in stepped if "step_accuracy" in name]


def test_work_of_a_step_is_that_of_its_packs() -> None:
    data = dataset([30, 12, 55, 7, 41, 9])
    record_ids = [2, 0, 1]
    packs = pack_records(data, record_ids, 100)
    assert len(packs) > 1
    counted = as_one_pack(data, record_ids)
    assert counted.tokens == sum(pack.num_tokens for pack in packs)
    assert counted.sequences == sum(pack.rows.numel() for pack in packs)
    # A token sees those before it in its sequence, and itself.
    keys = sum(int((pack.position_ids + 1).sum()) for pack in packs)
    assert counted.keys * counted.tokens == pytest.approx(keys)


def test_monitor_mode_suits_the_metric_unless_it_is_set() -> None:
    config = ExpManagerConfig()
    better = {"loss": 0.1, "accuracy": 0.9, "ece": 0.1, "reward_margin_p05": 0.9}
    for name, value in better.items():
        config.checkpoint_callback_params.monitor = f"validation-c/{name}"
        checkpoints = open_checkpoints(config, Data("validation-c"))  # type: ignore[arg-type]
        keys = [checkpoints._sort_key({f"validation-c/{name}": number}) for number in (value, 0.5)]
        assert keys[0] < keys[1], name  # type: ignore[operator]
    # Where neither is better it may be said; against a metric's own it is an error.
    settings = config.checkpoint_callback_params
    settings.monitor, settings.mode = "validation-c/reward_margin_p05", MonitorMode.min
    checkpoints = open_checkpoints(config, Data("validation-c"))  # type: ignore[arg-type]
    assert checkpoints._sort_key({settings.monitor: 0.9})[0] == 0.9  # type: ignore[index]
    for monitor, mode, other in (("loss", "max", "min"), ("accuracy", "min", "max")):
        settings.monitor, settings.mode = monitor, MonitorMode[mode]
        with pytest.raises(ConfigError, match=f"mode: got {mode}, .*{monitor}.* Set it to {other}"):
            open_checkpoints(config, Data("validation-c"))  # type: ignore[arg-type]


def test_changed_settings_name_the_key_and_both_values() -> None:
    previous = {"model": {"seed": 1, "optim": {"lr": 1e-3}}, "gone": 1}
    now = {"model": {"seed": 1, "optim": {"lr": 1e-4}}}
    assert changed_settings(previous, now) == ["model.optim.lr: 0.001 -> 0.0001", "gone: 1 -> None"]


@pytest.fixture
def learner(layout: Any) -> RewardLearner:
    return poisoned.build(layout, poisoned.dataset())


def test_step_tells_the_rate_it_took_and_the_tokens_it_saw(learner: RewardLearner) -> None:
    data = learner.data.train
    for step in range(2):
        batch = learner._loader.global_batch(step)
        metrics = learner.train_step(step)
        assert metrics["tokens"] == sum(len(side) for i in batch for side in data.record(i))
        # Two steps of warm-up.
        assert metrics["lr"] == pytest.approx(0.01 * (step + 1) / 3)
        assert metrics["grad_norm"] > 0
        assert not {"loss_scale", "skipped", "skipped_steps"} & set(metrics)


def test_auxiliary_loss_of_experts_is_a_mean_over_records_at_any_layout(
    two_ranks: dict[str, Any], layout: ParallelLayout
) -> None:
    """Whatever the loss of rewards divides by: here by 23 labels of 6 records."""
    archive = Path(two_ranks["experts"])
    by_hand = balanced.gradient_norm_by_hand(archive, layout)
    norms = {"one": balanced.build(archive, layout).train_step(0)["grad_norm"]}
    norms |= two_ranks["auxiliary"]
    assert set(norms) == {"one", "dp2", "tp2", "tp2_sp"}
    assert norms == pytest.approx(dict.fromkeys(norms, by_hand), rel=1e-5)


def test_validation_changes_nothing_and_the_next_step_trains(learner: RewardLearner) -> None:
    learner.train_step(0)
    sets = [replace(dataset([9, 5, 4, 4, 3, 8]), name=name) for name in ("first", "second")]
    reversed_ids = [ids[::-1] for ids in dataset([6, 5] * 3).sequences]
    sets[1] = replace(sets[1], sequences=TokenSequences.of(reversed_ids))
    learner.data = replace(learner.data, validation=sets)
    previous = [parameter.clone() for parameter in learner.model.parameters()]
    metrics = learner.validate()
    assert learner.validate() == pytest.approx(metrics, nan_ok=True)
    assert {name.partition("/")[0] for name in metrics} == {"first", "second"}
    assert metrics["first/loss"] != metrics["second/loss"]
    assert not learner.model.training
    assert all(map(torch.equal, previous, learner.model.parameters()))
    learner.train_step(1)
    assert learner.model.training
    assert not all(map(torch.equal, previous, learner.model.parameters()))
    assert learner.validate()["first/loss"] != metrics["first/loss"]


def test_gradients_do_not_add_up_over_steps(layout: Any, learner: RewardLearner) -> None:
    learner.train_step(0)
    anew = poisoned.build(layout, poisoned.dataset())
    anew.model.load_state_dict(learner.model.state_dict())
    assert learner.train_step(1)["grad_norm"] == pytest.approx(anew.train_step(1)["grad_norm"])


def test_spread_of_rewards_is_told_with_what_labels_were_centred_on() -> None:
    data = dataset([2, 3, 4], RecordKind.rating)
    rewards = torch.tensor([[1.0, -1.0], [2.0, 0.0], [6.0, 4.0]])
    metrics = describe_rewards(MaskedMse(("x", "y")), data, rewards)
    assert metrics["reward_mean/x"] == pytest.approx(3.0 + 1.0)
    assert metrics["reward_mean/y"] == pytest.approx(1.0 + 0.5)
    deviation = ((4 + 1 + 9) / 3) ** 0.5
    assert metrics["reward_std/x"] == pytest.approx(deviation)
    assert metrics["reward_std/y"] == pytest.approx(deviation)
    values = data.records.labels.values
    plain = replace(data.records, labels=LabelColumns.of(["x", "y"], values))
    metrics = describe_rewards(MaskedMse(("x", "y")), replace(data, records=plain), rewards)
    assert (metrics["reward_mean/x"], metrics["reward_mean/y"]) == (3.0, 1.0)
    pairs = describe_rewards(BradleyTerry(), dataset([2, 3, 4, 5]), torch.arange(4.0)[:, None])
    assert pairs["reward_mean/reward"] == 1.5


def test_loss_of_a_whole_batch_has_the_gradient_of_one_pack(layout: ParallelLayout) -> None:
    """In one pack the loss is differentiated as it stands; in many by its gradient by rewards."""
    objective = BradleyTerry(length_correlation_penalty=5.0)
    data = poisoned.dataset()
    many = poisoned.build(layout, data, objective=objective, tokens_per_pack=40)
    one = poisoned.build(layout, data, objective=objective, tokens_per_pack=1000)
    plans = [learner._loader.plan(0) for learner in (many, one)]
    assert (len(plans[0].packs) > 3, len(plans[1].packs)) == (True, 1)
    gradients = []
    for learner, plan, loss in zip(
        (many, one), plans, (many._step_loss(plans[0]), objective.loss), strict=True
    ):
        compute_gradients(learner._ddp, plan.packs, layout, loss)
        parameters = learner.model.parameters()
        gradients.append(torch.cat([parameter.main_grad.flatten() for parameter in parameters]))
    torch.testing.assert_close(*gradients, rtol=1e-4, atol=1e-5)
    norm = pytest.approx(float(gradients[1].norm()), rel=1e-4)
    assert many.train_step(0)["grad_norm"] == norm
    assert poisoned.build(layout, data).train_step(0)["grad_norm"] != norm
