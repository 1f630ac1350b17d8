"""Learning rates, the optimizer's state, and gradients that are no longer finite."""

from __future__ import annotations

import math
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from megatron.core.optimizer import (
    OptimizerConfig,
    get_megatron_optimizer,
    get_standard_config_overrides,
)

from nemo_aligner.checkpoint.nemo.reward_model import load_pretrained
from nemo_aligner.checkpoint.run import RunCheckpoints, RunState
from nemo_aligner.checkpoint.run_folder import STATE_NAME
from nemo_aligner.checkpoint.weights import open_weights
from nemo_aligner.config.common import Precision
from nemo_aligner.config.model import OptimConfig, Schedule, SchedulerConfig
from nemo_aligner.distributed.layout import ParallelLayout
from nemo_aligner.models.reward_model import build_reward_model
from nemo_aligner.models.training_wrap import freeze_lower_layers, wrap_for_training
from nemo_aligner.training.optimizer import Optimizer, Update, _lr_multiples, build_optimizer
from nemo_aligner.utils.errors import CheckpointError
from tests.checkpoint.refusals import check_damages
from tests.distributed.late_copies import play_late_copies
from tests.harness import families
from tests.models import layouts
from tests.training import poisoned


def build(
    layout: ParallelLayout,
    precision: Precision = Precision.fp32,
    freeze: int = 0,
    total_steps: int = 10,
    cpu_offload: bool = False,
    **sched: Any,
) -> tuple[Any, Optimizer]:
    model = build_reward_model(poisoned.SHAPE, layout, num_attributes=1, precision=precision)
    torch.manual_seed(0)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    freeze_lower_layers(model, freeze, poisoned.SHAPE.num_layers)
    wrapped = wrap_for_training(model)
    config = OptimConfig(lr=0.01, cpu_offload=cpu_offload, sched=SchedulerConfig(**sched))
    return wrapped, build_optimizer(wrapped, config, 1.0, total_steps)


def step(wrapped: Any, optimizer: Optimizer, gradient: float = 0.01) -> Update:
    """One update with the same gradient everywhere."""
    wrapped.zero_grad_buffer()
    for parameter in wrapped.parameters():
        if parameter.requires_grad:
            parameter.main_grad.fill_(gradient)
    wrapped.finish_grad_sync()
    return optimizer.step()


def rates(layout: ParallelLayout, total: int, **sched: Any) -> list[float]:
    wrapped, optimizer = build(layout, total_steps=total, **sched)
    used = []
    for _ in range(total):
        used.append(round(optimizer.lr, 8))
        step(wrapped, optimizer)
    return used


def test_learning_rates(layout: ParallelLayout) -> None:
    warm = [0.01 / 3, 0.02 / 3]
    cosine = [0.5 * (1 + math.cos(math.pi * k / 4)) for k in range(4)]
    for name, factors in (
        (Schedule.constant, [1.0] * 4),
        (Schedule.linear, [1.0, 0.75, 0.5, 0.25]),
        (Schedule.cosine, cosine),
    ):
        used = rates(layout, 6, name=name, warmup_steps=2, min_lr=0.002)
        low = 0.002 if name is not Schedule.constant else 0.0
        expected = [*warm, *(low + (0.01 - low) * factor for factor in factors)]
        assert used == pytest.approx(expected, abs=1e-8)
    # The last steps of a run stay where the rate ends, as with NeMo's CosineAnnealing.
    used = rates(layout, 8, warmup_steps=2, constant_steps=2, min_lr=0.002)
    cooled = [0.002 + 0.008 * factor for factor in (*cosine, 0.0, 0.0)]
    assert used == pytest.approx([*warm, *cooled], abs=1e-8)
    assert rates(layout, 2, warmup_steps=0)[0] == 0.01
    # A constant rate has no decay that needs a step.
    constant = {"name": Schedule.constant, "warmup_steps": 0, "constant_steps": 9}
    assert rates(layout, 2, **constant) == [0.01, 0.01]
    # A run shorter than its warm-up stays in it.
    assert rates(layout, 2, warmup_steps=9) == pytest.approx([0.001, 0.002])


@pytest.mark.parametrize(
    ("precision", "freeze", "offload"),
    [
        (Precision.fp32, 1, False),
        (Precision.fp32, 0, True),
        (Precision.bf16, 1, False),
        (Precision.bf16, 0, True),
        (Precision.fp16, 0, False),
    ],
)
def test_state_comes_back(
    layout: ParallelLayout, precision: Precision, freeze: int, offload: bool, tmp_path: Path
) -> None:
    """From one optimizer to a new one, by a checkpoint."""
    first = build(layout, precision, freeze, warmup_steps=0)
    second = build(layout, precision, freeze, cpu_offload=offload, warmup_steps=0)
    for _ in range(2):
        step(*first)
    checkpoints = RunCheckpoints(tmp_path)
    checkpoints.save(RunState(2, 2), first[0].module, first[1])
    checkpoints.load(checkpoints.list_saved()[-1], second[0].module, second[1])
    assert second[1].lr == first[1].lr
    for _ in range(2):
        assert step(*second) == step(*first)
    for loaded, saved in zip(second[0].parameters(), first[0].parameters(), strict=True):
        assert torch.equal(loaded, saved)


def change_bytes(name: str, at: float, count: int = 4000) -> Callable[[Path], None]:
    """Damage so many bytes of a file, from a share of its length on."""

    def damage(folder: Path) -> None:
        content = bytearray((folder / name).read_bytes())
        start = int(at * len(content))
        content[start : start + count] = bytes(
            byte ^ 0x10 for byte in content[start : start + count]
        )
        (folder / name).write_bytes(content)

    return damage


def test_damaged_checkpoint_is_refused_and_names_the_complete_ones(
    layout: ParallelLayout, tmp_path: Path
) -> None:
    wrapped, optimizer = build(layout)
    checkpoints = RunCheckpoints(tmp_path, "one/accuracy", save_top_k=4)
    for number in (1, 2, 3, 4):
        metrics = {"one/accuracy": 1.0 / number}
        checkpoints.save(RunState(number, 8 * number, metrics), wrapped.module, optimizer)
    steps = [saved.path for saved in checkpoints.list_saved()]
    shards = "state/__0_0.distcp"
    os.truncate(steps[0] / shards, 9000)  # which must not be named

    def resume(folder: Path) -> None:
        latest = checkpoints.latest()
        assert latest is not None
        checkpoints.load(latest, wrapped.module, optimizer)

    advice = (
        rf"\. .* step_00000003, step_00000002 are complete: move {steps[3]} to another folder, "
        ".* resumes from step_00000003$"
    )
    damages = [
        *((change_bytes(shards, at), f"damaged: .*{advice}") for at in (0.1, 0.5, 0.9)),
        (change_bytes("state/common.pt", 0.2, 300), rf"common\.pt: .*{advice}"),
        (change_bytes("state/.metadata", 0.5, 300), rf"\.metadata: .*{advice}"),
        (lambda folder: os.truncate(folder / shards, 9000), f"the file ends at 9000, .*{advice}"),
        (lambda folder: (folder / shards).unlink(), f"no such file, .*{advice}"),
        (
            lambda folder: (folder / "run_state.json").unlink(),
            rf"run_state\.json: there is no such file, .*{advice}",
        ),
    ]
    check_damages(steps[3], damages, resume)
    resume(steps[3])
    # Another one without its state would stop the run again, so it is named, too.
    state = steps[1] / "run_state.json"
    state.rename(tmp_path / "state")
    with pytest.raises(CheckpointError, match=rf"complete: move {steps[1]}(, | to another)"):
        checkpoints.latest()
    (steps[3] / "run_state.json").rename(tmp_path / "newest")
    both = {f"move {steps[1]}, {steps[3]} to", f"move {steps[3]}, {steps[1]} to"}
    with pytest.raises(CheckpointError) as raised:
        checkpoints.latest()
    assert any(advice in str(raised.value) for advice in both)
    (tmp_path / "state").rename(state)
    (tmp_path / "newest").rename(steps[3] / "run_state.json")
    # The weights of the best are exported without the optimizer's state.
    change_bytes(shards, 0.1)(steps[1])
    saved = checkpoints.list_saved()
    with pytest.raises(CheckpointError, match="step_00000004, step_00000003 are complete: move "):
        checkpoints.load_model([saved[1]], wrapped.module)
    for path in steps[:3]:
        shutil.rmtree(path)
    change_bytes(shards, 0.5)(steps[3])
    with pytest.raises(CheckpointError, match="The run has no other complete checkpoint: restore"):
        resume(steps[3])


def test_settings_of_a_run_that_goes_on_are_its_own_and_not_its_checkpoints(
    layout: ParallelLayout, tmp_path: Path
) -> None:
    def settings(optimizer: Optimizer) -> list[dict[str, Any]]:
        names = ("max_lr", "min_lr", "weight_decay", "betas", "eps")
        return [{name: group[name] for name in names} for group in optimizer.param_groups]

    first = build(layout, warmup_steps=0)
    step(*first)
    config = OptimConfig(
        lr=0.02, weight_decay=0.3, betas=[0.5, 0.6], eps=1e-3, sched=SchedulerConfig(min_lr=0.001)
    )
    wrapped = build(layout)[0]
    second = build_optimizer(wrapped, config, 1.0, 10)
    previous = settings(second)
    checkpoints = RunCheckpoints(tmp_path)
    checkpoints.save(RunState(1, 1), first[0].module, first[1])
    checkpoints.load(checkpoints.list_saved()[-1], wrapped.module, second)
    assert settings(second) == previous
    assert {group["eps"] for group in previous} == {1e-3}
    assert {group["weight_decay"] for group in previous} == {0.0, 0.3}
    # Its schedule is where the other one's was.
    wrapped = build(layout)[0]
    anew = build_optimizer(wrapped, config, 1.0, 10)
    step(wrapped, anew)
    assert second.lr == anew.lr


@pytest.mark.parametrize("precision", [Precision.fp32, Precision.bf16])
@pytest.mark.parametrize("gradient", [math.nan, math.inf, 1e30])
def test_norm_that_is_not_finite_changes_nothing(
    layout: ParallelLayout, precision: Precision, gradient: float
) -> None:
    wrapped, optimizer = build(layout, precision)
    assert step(wrapped, optimizer).applied
    previous, lr = [parameter.clone() for parameter in wrapped.parameters()], optimizer.lr
    update = step(wrapped, optimizer, gradient)
    assert not update.applied
    assert not update.skipped
    assert not math.isfinite(update.grad_norm)
    assert optimizer.lr == lr
    after = wrapped.parameters()
    assert all(torch.equal(a, b) for a, b in zip(previous, after, strict=True))


def test_buckets_are_reduced_and_gathered_beside_the_computing(two_ranks: dict[str, Any]) -> None:
    """Many buckets train, save and resume as one does."""
    assert set(two_ranks["buckets"]) == {"fp32", "bf16"}
    for precision, results in two_ranks["buckets"].items():
        assert results["buckets"] > 3
        assert results["losses"]["many"] == results["losses"]["whole"], precision
        # The first step learns which gradients come; then all reductions begin in the backward
        # pass.
        assert results["reduced"] == [0, *[results["buckets"]] * 3], precision
        # Weights are gathered as they are needed, or for a checkpoint.
        assert results["gathered"] == [0, results["buckets"]], precision
        assert results["difference"] == 0, precision
        assert results["resumed_is_same"], precision
    assert "already been dispatched" not in two_ranks["stderr"]


def test_validation_gathers_the_weights_on_a_rank_without_records_too(
    two_ranks: dict[str, Any],
) -> None:
    """The others would wait for it in the middle of the model."""
    for result in two_ranks["validation"]:
        assert result["buckets"] > 3
        assert (result["gathered"], result["under_way"]) == (result["buckets"], 0)
        assert result["metrics"] == [two_ranks["validation"][0]["metrics"][1]] * 2


@pytest.mark.parametrize(
    ("precision", "offload"),
    [(Precision.fp32, False), (Precision.bf16, True), (Precision.fp16, False)],
)
def test_updates_wait_for_a_save_and_change_nothing_of_it(
    layout: ParallelLayout,
    precision: Precision,
    offload: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stream = play_late_copies(monkeypatch.setattr)
    wrapped, optimizer = build(layout, precision, cpu_offload=offload, warmup_steps=0)
    checkpoints = RunCheckpoints(tmp_path)
    checkpoints.reserve(wrapped.module, optimizer)
    num_flat = 3 * sum(len(buffer.buckets) for buffer in wrapped.buffers)
    for number in (1, 2):  # the second save has the memory of the first
        step(wrapped, optimizer, 0.01 * number)
        expected = [
            tensor.clone() for tensor in (*wrapped.parameters(), *optimizer.state_tensors())
        ]
        checkpoints.save(RunState(number, number), wrapped.module, optimizer)
        assert stream.num_left == len(list(wrapped.parameters())) + num_flat
        step(wrapped, optimizer, -0.5)
        assert stream.num_left == 0
    saved = checkpoints.latest()
    assert saved is not None
    assert saved.state.step == 2
    resumed, other = build(layout, precision, cpu_offload=offload, warmup_steps=0)
    checkpoints.load(saved, resumed.module, other)
    loaded = [*resumed.parameters(), *other.state_tensors()]
    assert all(map(torch.equal, loaded, expected))


def test_resume_of_two_ranks_reads_of_the_state_what_each_has(two_ranks: dict[str, Any]) -> None:
    """Not all of it on each; a shard's rows may have numbers of the other rank's, too.

    It is read twice: first the ranks compare all of it with its checksums, each an equal part.
    """
    for result in two_ranks["resume"]:
        assert result["same"]
        assert result["own"] > 10**7
        assert result["allocated"] < 1.1 * result["own"], two_ranks["resume"]
        assert result["read"] < 2.3 * result["own"], two_ranks["resume"]  # every piece has an index


def test_layers_and_head_have_rates_of_their_own(layout: ParallelLayout, tmp_path: Path) -> None:
    """Adam's first step is as long as the rate; a checkpoint of such a run is loaded again."""
    model = build_reward_model(poisoned.SHAPE, layout, num_attributes=1, precision=Precision.fp32)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    model.decoder.final_layernorm.weight.is_of_objective = True
    wrapped = wrap_for_training(model)
    config = OptimConfig(
        lr=0.01, weight_decay=0.0, head_lr_mult=10.0, layer_lr_decay=0.1,
        sched=SchedulerConfig(warmup_steps=1),
    )  # fmt: skip
    optimizer = build_optimizer(wrapped, config, 0.0, 10)
    previous = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    step(wrapped, optimizer)
    multiples = {"embedding.": 0.01, "decoder.layers.0.": 0.1, "rm_head.": 10.0}
    multiples["decoder.final_layernorm."] = 100.0  # also in the warm-up
    for name, parameter in model.named_parameters():
        multiple = next((multiples[key] for key in multiples if name.startswith(key)), 1.0)
        moved = (parameter - previous[name]).abs()
        torch.testing.assert_close(
            moved, torch.full_like(moved, 0.005 * multiple), rtol=1e-3, atol=1e-6
        )
    assert optimizer.lr == pytest.approx(0.01)
    checkpoints = RunCheckpoints(tmp_path)
    checkpoints.save(RunState(1, 1), model, optimizer)
    checkpoints.load(checkpoints.list_saved()[-1], model, optimizer)
    rates = {group["lr"] for group in optimizer.param_groups}
    assert sorted(rates) == pytest.approx([0.0001, 0.001, 0.01, 0.1, 1.0])


def test_embeddings_of_gemma_4s_layers_have_the_rate_of_the_other_embeddings(
    layout: ParallelLayout, tmp_path: Path
) -> None:
    path = families.write_base_nemo(tmp_path / "base.nemo", "gemma4_small")
    model = load_pretrained(path, layout, num_attributes=1, precision=Precision.fp32).model
    multiples = _lr_multiples(model, OptimConfig(lr=0.01, layer_lr_decay=0.5))
    rates = {
        name: multiples[parameter]
        for name, parameter in model.named_parameters()
        if "embedding" in name
    }
    assert {name.rpartition(".weight")[0] for name in rates} == {
        "embedding.word_embeddings",
        *(f"per_layer_embedding.{part}" for part in ("table", "projection", "norm")),
    }
    assert set(rates.values()) == {0.5**4}


class MegatronOptimizer:
    """megatron-core's distributed optimizer, which earlier versions trained and saved with."""

    def __init__(self, wrapped: Any) -> None:
        settings = OptimizerConfig(
            optimizer="adam", lr=0.01, min_lr=0.0, weight_decay=0.1, adam_beta2=0.98,
            params_dtype=torch.float32, use_distributed_optimizer=True, clip_grad=1.0,
        )  # fmt: skip
        overrides = get_standard_config_overrides(settings)
        self.inner = get_megatron_optimizer(settings, [wrapped], overrides)
        for group in self.inner.param_groups:  # as its scheduler does
            group["weight_decay"] *= group["wd_mult"]

    def finish_update(self) -> None:
        """Its update is finished when its step returns."""

    def sharded_state_dict(
        self, model_state: dict[str, Any], is_loading: bool = False
    ) -> dict[str, Any]:
        kind = {"distrib_optim_sharding_type": "fully_reshardable"}
        return self.inner.sharded_state_dict(model_state, is_loading=is_loading, metadata=kind)

    def load_state_dict(self, state: dict[str, Any], step: int) -> None:
        self.inner.load_state_dict(state)


def test_state_and_updates_are_those_of_megatron_cores_optimizer(
    layout: ParallelLayout, two_ranks: dict[str, Any], tmp_path: Path
) -> None:
    """Of a mixture of experts, whose state is saved apart; ours goes on from theirs."""
    archive = Path(two_ranks["experts"])
    models = [wrap_for_training(layouts.load(archive, layout)) for _ in range(2)]
    config = OptimConfig(
        lr=0.01, weight_decay=0.1, betas=[0.9, 0.98], eps=1e-8,
        sched=SchedulerConfig(name=Schedule.constant, warmup_steps=0),
    )  # fmt: skip
    theirs, ours = MegatronOptimizer(models[0]), build_optimizer(models[1], config, 1.0, 10)
    checkpoints = RunCheckpoints(tmp_path)
    for number in (1, 2):
        torch.manual_seed(number)
        for parameter, twin in zip(*(model.parameters() for model in models), strict=True):
            parameter.main_grad.normal_()
            twin.main_grad.copy_(parameter.main_grad)
        norm = theirs.inner.step()[1]
        if number == 1:
            checkpoints.save(RunState(1, 1), models[0].module, theirs)
            (saved,) = checkpoints.list_saved()
            stored_by_megatron = open_weights(saved.path / STATE_NAME).tensors
            checkpoints.load(saved, models[1].module, ours)
        else:
            assert ours.step().grad_norm == pytest.approx(norm, rel=1e-6)
        for parameter, twin in zip(*(model.parameters() for model in models), strict=True):
            torch.testing.assert_close(twin, parameter, rtol=2**-23, atol=1e-7)
    checkpoints.save(RunState(2, 2), models[1].module, ours)
    stored = open_weights(checkpoints.list_saved()[-1].path / STATE_NAME).tensors
    assert stored == stored_by_megatron
    assert {name.partition(".")[0] for name in stored} == {"model", "chained_0", "chained_1"}
