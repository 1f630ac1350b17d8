"""A critic's loss and weights are those of a value loss written out, at any layout; and go on."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import LlamaForSequenceClassification

from nemo_aligner.checkpoint.hf.convert import convert_hf_to_nemo
from nemo_aligner.checkpoint.hf.export import export_to_hf
from nemo_aligner.checkpoint.hf.reward_archive import ExportOptions
from nemo_aligner.checkpoint.nemo.fingerprint import read_fingerprint
from nemo_aligner.checkpoint.nemo.reward_model import (
    load_pretrained,
    load_reward_model,
    read_text_rules,
    save_reward_model,
)
from nemo_aligner.config.common import Precision
from nemo_aligner.config.model import LORA_TARGETS, BasePrecision
from nemo_aligner.data.rollout import Rollout
from nemo_aligner.models.shapes.lora import LoraShape, read_lora
from nemo_aligner.training.critic import CriticRun
from nemo_aligner.utils.errors import CheckpointError, ConfigError, TrainingError
from tests.harness import families, tiny
from tests.harness.once import Once
from tests.training.critic_steps import PROBES, open_run, rollouts

LR, CLIP, EPS, DECAY, MAX_NORM, BATCH = 0.01, 0.3, 1e-3, 0.05, 0.5, 4
CLOSE = {"rtol": 0, "atol": 2e-5}


def values_of(model: Any, tokens: torch.Tensor) -> torch.Tensor:
    """``[N, S]`` by transformers."""
    return model.score(model.model(tokens).last_hidden_state)[..., 0]


class WrittenOut:
    """PPO's value loss and AdamW with padded tensors, as any book has them."""

    def __init__(self, folder: Path) -> None:
        self.model = LlamaForSequenceClassification.from_pretrained(folder).float()
        parameters = list(self.model.parameters())
        groups = [
            {"params": [p for p in parameters if p.ndim > 1], "weight_decay": DECAY},
            {"params": [p for p in parameters if p.ndim == 1], "weight_decay": 0.0},
        ]
        self.adam = torch.optim.AdamW(groups, lr=LR, betas=(0.9, 0.98), eps=EPS)
        self.steps: list[tuple[float, ...]] = []

    def train(self, rollout: Rollout) -> None:
        for start in range(0, len(rollout), BATCH):
            rows = slice(start, start + BATCH)
            self.train_step(*(torch.tensor(array[rows]) for array in vars(rollout).values()))

    def train_step(
        self, tokens: torch.Tensor, returns: torch.Tensor, old: torch.Tensor, mask: torch.Tensor
    ) -> None:
        values = values_of(self.model, tokens)[:, :-1]
        clipped = torch.clamp(values, old - CLIP, old + CLIP)
        worst = torch.maximum((values - returns) ** 2, (clipped - returns) ** 2)
        loss = 0.5 * (worst * mask).sum() / mask.sum()
        self.adam.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), MAX_NORM)
        number = len(self.steps) + 1
        lr = LR * min(1.0, number / 3)
        for group in self.adam.param_groups:
            group["lr"] = lr
        self.adam.step()
        self.steps.append((number, loss.item(), mask.sum().item(), norm.item(), lr))


@pytest.fixture(scope="module")
def model_folder(once: Once) -> Path:
    def build(folder: Path) -> None:
        tiny.write_hf_reward_model(folder / "hf", max_position_embeddings=32)
        convert_hf_to_nemo(folder / "hf", folder / "rm.nemo")

    return once("critic_model", build)


@pytest.fixture(scope="module")
def written_out(model_folder: Path) -> WrittenOut:
    reference = WrittenOut(model_folder / "hf")
    for rollout in rollouts():
        reference.train(rollout)
    return reference


def run_layouts(names: str, processes: int, model: Path, folder: Path) -> dict[str, list[dict]]:
    script = "tests/training/critic_steps.py"
    tiny.run_script(script, str(model / "rm.nemo"), str(folder), names, processes=processes)
    return {
        name: torch.load(folder / f"{name}.pt", weights_only=False) for name in names.split(",")
    }


@pytest.mark.parametrize(("names", "processes"), [("one", 1), ("tp2_sp,pp2,dp2,cp2", 2)])
def test_critic_losses_and_weights_are_those_written_out(
    names: str,
    processes: int,
    model_folder: Path,
    written_out: WrittenOut,
    layout: Any,
    tmp_path: Path,
) -> None:
    expected = written_out.model.state_dict()
    first = LlamaForSequenceClassification.from_pretrained(model_folder / "hf").state_dict()
    for name, runs in run_layouts(names, processes, model_folder, tmp_path).items():
        uninterrupted, restarted = runs
        assert uninterrupted["samples"] == 3 * 7
        np.testing.assert_allclose(
            uninterrupted["steps"], written_out.steps, rtol=1e-4, err_msg=name
        )
        with torch.no_grad():
            for probe, values in zip(PROBES, uninterrupted["after"], strict=True):
                assert values.dtype == np.float32
                expected_values = values_of(written_out.model, torch.tensor([probe]))[0]
                np.testing.assert_allclose(values, expected_values, **CLOSE, err_msg=name)
        # Also where the other rank has no sequence, and a step was not finite.
        assert np.array_equal(uninterrupted["after_error"][0], uninterrupted["after"][0]), name
        export_to_hf(uninterrupted["path"], tmp_path / f"{name}_hf", layout, ExportOptions())
        exported = LlamaForSequenceClassification.from_pretrained(
            tmp_path / f"{name}_hf"
        ).state_dict()
        for key, tensor in expected.items():
            torch.testing.assert_close(
                exported[key], tensor, rtol=0, atol=2e-5, msg=f"{name}: {key}"
            )
            assert (tensor - first[key]).abs().max() > 1e-3, key
        # A run that was saved and opened again has the same bits.
        assert restarted["steps"] == uninterrupted["steps"], name
        for one, other in zip(uninterrupted["after"], restarted["after"], strict=True):
            assert np.array_equal(one, other), name


def test_critic_of_a_mixture_learns_alike_where_its_experts_are_shared_out(tmp_path: Path) -> None:
    families.write_reward_model(tmp_path / "hf", "qwen3_moe", torch.float32)
    convert_hf_to_nemo(tmp_path / "hf", tmp_path / "rm.nemo", seq_length=32)
    (one, _) = run_layouts("one", 1, tmp_path, tmp_path)["one"]
    (uninterrupted, restarted) = run_layouts("ep2", 2, tmp_path, tmp_path)["ep2"]
    np.testing.assert_allclose(uninterrupted["steps"], one["steps"], rtol=1e-4)
    assert restarted["steps"] == uninterrupted["steps"]
    for values, again, expected, previous in zip(
        uninterrupted["after"], restarted["after"], one["after"], one["before"], strict=True
    ):
        np.testing.assert_allclose(values, expected, rtol=0, atol=1e-4)
        assert np.array_equal(values, again)
        assert np.abs(expected - previous).max() > 1e-3


def test_critic_of_a_mixture_whose_contract_has_fp16_is_rejected(
    layout: Any, tmp_path: Path
) -> None:
    families.write_reward_model(tmp_path / "hf", "qwen3_moe", torch.float16)
    convert_hf_to_nemo(tmp_path / "hf", tmp_path / "rm.nemo", seq_length=32)
    with pytest.raises(ConfigError, match=r"trainer.precision: got fp16, .* Set it to bf16"):
        open_run(str(tmp_path / "rm.nemo"), tmp_path / "run", layout)


@pytest.fixture(scope="module")
def opened(model_folder: Path, layout: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A run that has learned and was saved, and how to open others in its folder."""
    folder = tmp_path_factory.mktemp("run")

    def open_again(*more: str, archive: Path = model_folder / "rm.nemo") -> CriticRun:
        return open_run(str(archive), folder, layout, *more)

    run = open_again()
    run.learner.train(rollouts()[0])
    run.save()
    return run, open_again


def test_critic_of_a_quantized_base_is_dense_and_goes_on_from_its_own_archive(
    model_folder: Path, layout: Any, tmp_path: Path
) -> None:
    archive, lora = tmp_path / "rm.nemo", LoraShape(2, 4.0, LORA_TARGETS, BasePrecision.nf4)
    loaded = load_pretrained(
        model_folder / "rm.nemo", layout, num_attributes=1, precision=Precision.fp32, lora=lora
    )
    tokenizer, contract = read_text_rules(model_folder / "rm.nemo")
    dense, contract = contract, replace(contract, base_precision="nf4")
    save_reward_model(archive, loaded.model, loaded.config, tokenizer, contract)
    # The contract that is expected is the one that the server publishes: that of dense weights.
    published, in_bf16 = dense.hash, dense.with_dtype(Precision.bf16).hash
    unlike = rf"^expect_contract: got .* {in_bf16}, wanted {published}\."
    expected = f"expect_contract={published}"
    with pytest.raises(ConfigError, match=unlike):
        open_run(str(archive), tmp_path / "run", layout, expected, "trainer.precision=bf16")
    path = open_run(str(archive), tmp_path / "run", layout, expected).save()
    assert read_lora(load_reward_model(path, layout).config) is None
    assert read_text_rules(path)[1].base_precision is None
    open_run(str(path), tmp_path / "run", layout)


def test_critic_step_that_is_not_finite_leaves_the_weights_and_the_next_one_learns(
    opened: Any,
) -> None:
    run, _ = opened
    bad, good = rollouts()[1], rollouts()[2]
    bad = replace(bad, returns=np.full_like(bad.returns, 3e38))
    previous = [parameter.clone() for parameter in run.learner.model.parameters()]
    step = run.learner.step
    with pytest.raises(TrainingError, match=f"^step {step + 1}: got a gradient norm of (nan|inf)"):
        run.learner.train(bad)
    assert all(map(torch.equal, previous, run.learner.model.parameters()))
    assert run.learner.step == step
    # The steps before it are told.
    noted: list[Any] = []
    late_returns = np.concatenate([good.returns[:BATCH], bad.returns[BATCH:]])
    with pytest.raises(TrainingError, match=f"^step {step + 2}: "):
        run.learner.train(replace(good, returns=late_returns), noted.append)
    step += 1
    assert [value_step.step for value_step in noted] == [step] == [run.learner.step]
    steps = run.learner.train(good)
    assert [value_step.step for value_step in steps] == [step + 1, step + 2]
    assert not any(map(torch.equal, previous, run.learner.model.parameters()))


def test_critic_that_is_saved_twice_is_saved_once_and_the_newest_is_kept(opened: Any) -> None:
    run, open_again = opened
    run.learner.train(rollouts()[1])
    path = run.save()
    assert run.save() == path
    assert len(run.checkpoints.list_saved()) == 1
    again = open_again()
    assert again.learner.step == run.learner.step
    probes = [np.array(probe) for probe in PROBES]
    values = zip(run.learner.values(probes), again.learner.values(probes), strict=True)
    assert all(np.array_equal(one, other) for one, other in values)


def test_critic_of_another_run_or_of_no_reward_model_is_refused(opened: Any, base: Path) -> None:
    _, open_again = opened
    with pytest.raises(CheckpointError, match=r"model\.freeze_layers: the checkpoint has 0"):
        open_again("model.freeze_layers=1")
    with pytest.raises(ConfigError, match=r"exp_manager\.resume_if_exists: got false"):
        open_again("exp_manager.resume_if_exists=false")
    with pytest.raises(ConfigError, match=r"model\.micro_batch_tokens: got 31, wanted at least"):
        open_again("model.micro_batch_tokens=31")
    with pytest.raises(ConfigError, match=r"expect_fingerprint: got .*, wanted 0000"):
        open_again(f"expect_fingerprint={'0' * 32}")
    with pytest.raises(CheckpointError, match="no scoring contract"):
        open_again(archive=base)


def test_reward_model_beside_the_critic_is_the_one_that_is_expected(
    opened: Any, model_folder: Path, tmp_path: Path
) -> None:
    _, open_again = opened
    tiny.write_hf_reward_model(tmp_path / "hf", max_position_embeddings=16)
    convert_hf_to_nemo(tmp_path / "hf", tmp_path / "other.nemo")
    combined = "trainer.ppo.combine_rm_and_critic_server=true"

    def expectations(archive: Path) -> list[str]:
        _, contract = read_text_rules(archive)
        assert contract is not None
        fingerprint = read_fingerprint(archive)
        return [f"expect_contract={contract.hash}", f"expect_fingerprint={fingerprint}"]

    beside = (combined, f"rm_model_file={tmp_path / 'other.nemo'}")
    open_again(*beside, *expectations(tmp_path / "other.nemo"))
    for expected in expectations(model_folder / "rm.nemo"):
        open_again(combined, expected)
        with pytest.raises(ConfigError, match=f"^{expected.split('=')[0]}: got "):
            open_again(*beside, expected)


def test_critic_resumes_only_from_the_reward_model_that_it_began_with(
    opened: Any, model_folder: Path, tmp_path: Path
) -> None:
    run, open_again = opened
    tiny.write_hf_reward_model(tmp_path / "hf", max_position_embeddings=32, initializer_range=0.2)
    convert_hf_to_nemo(tmp_path / "hf", tmp_path / "other.nemo")
    with pytest.raises(CheckpointError, match=r"fingerprint of pretrained_checkpoint: the chec"):
        open_again(archive=tmp_path / "other.nemo")
    # The archive that this run has saved belongs to it, whatever it has learned.
    own = open_again(archive=run.save())
    assert own.learner.step == run.learner.step
    own.learner.train(rollouts()[2])
    own.save()
    again = open_again()
    assert again.learner.step == own.learner.step
    # An earlier version did not write from which model a run began.
    latest = again.checkpoints.latest()
    state = json.loads((latest.path / "run_state.json").read_text())
    state["fingerprint"].pop("fingerprint of pretrained_checkpoint")
    (latest.path / "run_state.json").write_text(json.dumps(state))
    assert open_again(archive=tmp_path / "other.nemo").learner.step == own.learner.step
