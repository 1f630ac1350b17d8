"""Numbers that stop a run, and the fp16 overflows that do not."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from nemo_aligner.batch.packed import LabelColumns
from nemo_aligner.checkpoint.run import RunCheckpoints, RunState
from nemo_aligner.config.common import Precision
from nemo_aligner.data.training_data import validation_batches
from nemo_aligner.distributed.layout import ParallelLayout
from nemo_aligner.models.step import infer
from nemo_aligner.training.learner import RewardLearner
from nemo_aligner.training.nonfinite import StepRecords, check_rewards, check_validation
from nemo_aligner.utils.errors import TrainingError
from tests.evaluation.refusals import NOT_REFUSED, refusal
from tests.training import poisoned

HIGH = 2.0**40  # a loss scale at which the gradients of any step overflow fp16


def set_scale(learner: RewardLearner, scale: float) -> None:
    learner.optimizer._loss_scale.value = scale


def weights(learner: RewardLearner) -> list[torch.Tensor]:
    return [parameter.clone() for parameter in learner.model.parameters()]


@pytest.mark.parametrize("precision", Precision)
def test_reward_that_is_not_finite_is_traced(layout: ParallelLayout, precision: Precision) -> None:
    data = poisoned.dataset((3, 4))
    message = poisoned.error_of(poisoned.build(layout, data, precision, poison_rewards=True))
    one, two = poisoned.lines(data)
    assert message.startswith("step 1: got a reward that is not finite, on rank 0, from ")
    assert f"from {one}, {two}; " in message or f"from {two}, {one}; " in message
    assert ("fp16 ends at 65504" in message) is (precision is Precision.fp16)


@pytest.fixture
def records(layout: ParallelLayout) -> StepRecords:
    """Of step 7, the first eight."""
    return StepRecords(7, range(8), [0] * 8, poisoned.dataset(), layout, torch.device("cpu"))


def test_loss_that_is_not_finite_is_traced_to_who_is_most_to_blame(records: StepRecords) -> None:
    def refused(rewards: torch.Tensor, loss: Callable[[torch.Tensor], torch.Tensor]) -> str:
        total = lambda outputs, _: (loss(outputs), torch.tensor(1))  # noqa: E731
        return refusal(TrainingError, check_rewards, records, rewards, total)

    rewards = torch.zeros(16, 1)
    rewards[6:8] = 2.0
    assert refused(rewards, torch.sum) == NOT_REFUSED
    message = refused(rewards, lambda outputs: torch.exp(outputs * 99).sum())
    assert "a loss that " in message
    assert " on rank 0, from pairs.jsonl:31; " in message
    message = refused(rewards + 3e38, lambda outputs: outputs[::2].sum())
    assert " on rank 0, from no single record; " in message
    rewards[4:14, 0] = torch.tensor([1e20, 1, 1e25, 1, math.nan, 1, 1e30, 1, 1e38, 1])
    lines = ", ".join(f"pairs.jsonl:{line}" for line in (41, 61, 51, 31, 21))
    assert f" on rank 0, from {lines}; " in refused(rewards, lambda outputs: outputs.square().sum())


def test_loss_of_records_without_labels_says_which_label_they_lack(layout: ParallelLayout) -> None:
    data = poisoned.dataset()
    values = torch.ones(len(data), 2)
    values[3, 1] = math.nan
    labels = LabelColumns.of(["help", "margin"], values)
    data = replace(data, records=replace(data.records, labels=labels))
    step = StepRecords(7, range(8), [0] * 8, data, layout, torch.device("cpu"))
    lossy = lambda outputs, of: (outputs.sum() + of.labels.values[:, 1].sum(), torch.tensor(1))  # noqa: E731
    message = refusal(TrainingError, check_rewards, step, torch.zeros(16, 1), lossy)
    assert "1 of the 1 records that cause it have no margin: a missing label is NaN" in message
    assert "from pairs.jsonl:31; " in message


def test_gradient_that_is_not_finite_is_traced(layout: ParallelLayout) -> None:
    data = poisoned.dataset((5,))
    (line,) = poisoned.lines(data)
    for precision in (Precision.fp32, Precision.bf16):
        learner = poisoned.build(layout, data, precision)
        poisoned.poison_gradients(learner.model)
        message = poisoned.error_of(learner)
        assert "step 1: got a gradient norm of " in message
        assert f", on rank 0, from {line}; " in message, precision
    learner = poisoned.build(layout, poisoned.dataset())
    poisoned.poison_gradients(learner.model, lambda batch: len(batch.records) > 1)
    assert ", on rank 0, from no single record; " in poisoned.error_of(learner)


def test_number_that_is_not_finite_is_told_alike_by_two_ranks(two_ranks: dict[str, Any]) -> None:
    one, two = (poisoned.lines(poisoned.dataset(indices)) for indices in ((5,), (3, 4)))
    for name, (first, second) in two_ranks["errors"].items():
        assert first == second, name
        # Of data parallel ranks the first has the record.
        of_gradient = "rank 0" if name == "dp2" else "ranks 0, 1"
        message = f"step 1: got a gradient norm of nan, on {of_gradient}, from {one[0]}; "
        assert message in first["gradient"], name
        assert "a reward that is not finite, on ranks 0, 1, from " in first["reward"], name
        named = first["reward"].partition("from ")[2].partition(";")[0]
        assert sorted(named.split(", ")) == sorted(two), name
    assert set(two_ranks["errors"]) == {"dp2", "tp2", "tp2_sp", "pp2"}


def test_records_to_blame_are_counted_and_labels_that_are_far_out_named_wherever_they_are(
    layout: ParallelLayout,
) -> None:
    data = poisoned.dataset()
    values = torch.arange(len(data), dtype=torch.float32)[:, None] % 5
    values[10] = -1e38
    labels = LabelColumns.of(["help"], values)
    data = replace(data, records=replace(data.records, labels=labels))
    ids = [3, 0, 3, 1, 2, 5, 4, 6]
    records = StepRecords(7, ids, [0] * 8, data, layout, torch.device("cpu"))
    message = str(records.error("a reward", [0, 2], range(8)))
    assert message.startswith("step 7: got a reward, on ranks 0, 2, from pairs.jsonl:31, ")
    assert "pairs.jsonl:51, and 2 more; " in message
    assert "labels of train are outliers: pairs.jsonl:101: help is -1e+" in message
    assert message.count("pairs.jsonl:") == 5 + 1


def test_fp16_overflows_are_skipped_and_counted(layout: ParallelLayout) -> None:
    learner = poisoned.build(layout, poisoned.dataset(), Precision.fp16)
    set_scale(learner, HIGH)
    previous, lr = weights(learner), learner.optimizer.lr
    metrics = [learner.train_step(step) for step in range(2)]
    assert [step_metrics["skipped_steps"] for step_metrics in metrics] == [1.0, 2.0]
    assert all(
        step_metrics["skipped"] and math.isfinite(step_metrics["loss"]) for step_metrics in metrics
    )
    assert not any("grad_norm" in step_metrics for step_metrics in metrics)
    assert all(torch.equal(a, b) for a, b in zip(previous, weights(learner), strict=True))
    assert learner.optimizer.lr == lr
    # The first overflow is forgiven (hysteresis), the second halves the scale.
    assert metrics[1]["loss_scale"] == HIGH
    assert learner.optimizer.loss_scale == HIGH / 2
    set_scale(learner, 2.0**16)
    step_metrics = learner.train_step(3)
    assert (step_metrics["skipped"], step_metrics["skipped_steps"]) == (0.0, 2.0)
    assert math.isfinite(step_metrics["grad_norm"])
    assert not any(torch.equal(a, b) for a, b in zip(previous, weights(learner), strict=True))


def test_fp16_infers_and_trains_as_fp32_does(layout: ParallelLayout) -> None:
    data = poisoned.dataset()
    rewards, curves = [], []
    for precision in (Precision.fp16, Precision.fp32):
        learner = poisoned.build(layout, data, precision)
        packs = validation_batches(data, poisoned.TOKENS_PER_PACK, 0, 1)
        rewards.append(infer(learner._ddp, packs, layout))
        curves.append([learner.train_step(step) for step in range(4)])
    half, single = rewards
    assert half.dtype == torch.float32
    # fp16 has 11 bits: a few roundings of 2^-11, beside the spread of the rewards.
    torch.testing.assert_close(half, single, atol=0.01 * float(single.std()), rtol=0)
    for half_step, step in zip(*curves, strict=True):
        assert half_step["loss"] == pytest.approx(step["loss"], rel=1e-2)
        assert half_step["grad_norm"] == pytest.approx(step["grad_norm"], rel=2e-2)
        scale_metrics = {
            name: half_step[name] for name in ("loss_scale", "skipped", "skipped_steps")
        }
        assert scale_metrics == {"loss_scale": 2.0**16, "skipped": 0.0, "skipped_steps": 0.0}
        assert not scale_metrics.keys() & step.keys()


def test_fp16_overflow_at_the_lowest_scale_is_traced(layout: ParallelLayout) -> None:
    data = poisoned.dataset((4,))
    learner = poisoned.build(layout, data, Precision.fp16)
    poisoned.poison_gradients(learner.model)
    set_scale(learner, 1.0)
    message = poisoned.error_of(learner)
    (line,) = poisoned.lines(data)
    assert f"overflows fp16 at a loss scale of 1, on rank 0, from {line}; " in message


def test_fp16_scale_comes_back(layout: ParallelLayout, tmp_path: Path) -> None:
    first, second = (poisoned.build(layout, poisoned.dataset(), Precision.fp16) for _ in range(2))
    first.train_step(0)
    set_scale(first, HIGH)
    first.train_step(1)
    first.train_step(2)
    checkpoints = RunCheckpoints(tmp_path)
    checkpoints.save(RunState(step=3, consumed_samples=24), first.model, first.optimizer)
    latest = checkpoints.latest()
    assert latest is not None
    checkpoints.load(latest, second.model, second.optimizer)
    assert second.optimizer.loss_scale == first.optimizer.loss_scale == HIGH / 2
    assert second.optimizer.skipped_steps == 2
    assert second.optimizer.lr == first.optimizer.lr
    for learner in (first, second):
        set_scale(learner, 2.0**10)
    for step in (3, 4):
        assert second.train_step(step) == first.train_step(step)
    assert all(torch.equal(a, b) for a, b in zip(weights(first), weights(second), strict=True))


def test_reward_of_a_validation_set_is_traced() -> None:
    data = poisoned.dataset()
    rewards = torch.zeros(2 * len(data), 1)
    check_validation(data, rewards)
    rewards[5] = math.nan
    with pytest.raises(TrainingError, match=rf"got a reward .* finite, from {data.origins[2]}$"):
        check_validation(data, rewards)
