"""The training example, as a user runs it: what it says, writes and refuses."""

from __future__ import annotations

import json
import re
import tarfile
from pathlib import Path

import pytest
import torch

from nemo_aligner.checkpoint.nemo.archive import open_nemo
from nemo_aligner.checkpoint.weights import open_weights
from nemo_aligner.checkpoint.weights.store import is_optimizer_state
from nemo_aligner.models.shapes.lora import is_of_adapter
from tests.config.nemo_aligner_files import write_file
from tests.harness import tiny
from tests.training import jobs

EXAMPLE = "examples/train_reward_model.py"


def common(base: Path, folder: Path, train: Path, validation: Path) -> list[str]:
    more = ("model.optim.sched.name=constant", "trainer.rm.val_check_interval=2")
    return [*tiny.training(base, folder, train, validation), *more]


def train(*settings: str, fails: bool = False) -> jobs.Job:
    return jobs.Job("train", settings, fails=fails)


@pytest.mark.smoke
def test_regression_learns_and_writes_its_contract(base: Path, tmp_path: Path) -> None:
    ratings = tiny.write_ratings(tmp_path / "ratings.jsonl", 37, ("helpful", "clear"))
    done = tiny.run_script(
        EXAMPLE,
        *common(base, tmp_path / "run", ratings, ratings),
        "model.reward_model_type=regression",
        "model.regression.attributes=[helpful,clear]",
        "trainer.rm.max_steps=16",
    )
    logged = tiny.logged(tmp_path / "run")
    losses = list(logged["train/loss"].values())
    assert len(losses) == 16
    assert sum(losses[-4:]) < sum(losses[:4])
    validated = logged["validation-ratings/pearson_mean"]
    assert len(validated) == 8
    assert f"best validation-ratings/pearson_mean, {max(validated.values()):.4g}" in done.stdout
    assert "labels missing" in done.stdout

    contract = read_contract(tmp_path / "run/checkpoints/megatron_gpt.nemo")
    assert contract["attributes"] == ["helpful", "clear"]
    assert all(mean > 0.5 for mean in contract["label_means"])
    assert contract["measured_on"] == "validation-ratings"
    assert len(contract["reward_mean"]) == len(contract["reward_std"]) == 2


def test_average_of_the_best_checkpoints_is_the_model(base: Path, tmp_path: Path) -> None:
    pairs = tiny.write_pairs(tmp_path / "pairs.jsonl", 24)
    kinds = {"all": (), "lora": ("model.lora.rank=2", "model.lora.alpha=4")}
    callback = "exp_manager.checkpoint_callback_params"
    averaged = ("trainer.rm.max_steps=8", f"{callback}.save_top_k=3", f"{callback}.average_best=2")
    results = jobs.run(
        [
            train(*common(base, tmp_path / name, pairs, pairs), *lora, *averaged)
            for name, lora in kinds.items()
        ]
    )
    for name, done in zip(kinds, results, strict=True):
        check_average(tmp_path / name / "checkpoints", done.stdout, is_lora=name == "lora")


def check_average(checkpoints: Path, output: str, is_lora: bool) -> None:
    assert output.count("(chosen)") == 2
    match = re.search(r"the mean of the weights of steps (\d+), (\d+): .*/accuracy", output)
    assert match is not None
    steps = [open_weights(checkpoints / f"step_{int(step):08d}/state") for step in match.groups()]
    with open_nemo(checkpoints / "megatron_gpt.nemo") as folder:
        adapters = [n for n in steps[0].tensors if is_of_adapter(n) and not is_optimizer_state(n)]
        assert bool(adapters) == is_lora
        for name in (*adapters, "model.rm_head.weight"):
            first, second = (state.read(name) for state in steps)
            assert not torch.equal(first, second), name
            # An archive has all layers in one tensor.
            layer = re.search(r"layers\.(\d+)\.", name)
            stacked = name if layer is None else name.replace(layer[0], "layers.")
            mean = folder.store.read(stacked, None if layer is None else int(layer[1]))
            torch.testing.assert_close(mean, (first + second) / 2, rtol=0, atol=1e-8)


def test_training_on_keeps_the_contract_unless_told_otherwise(base: Path, tmp_path: Path) -> None:
    ratings = tiny.write_ratings(tmp_path / "ratings.jsonl", 17, ("helpful", "clear"))
    other_ratings = tiny.write_ratings(tmp_path / "others.jsonl", 17, ("helpful", "clear"), seed=1)
    kind = [
        "model.reward_model_type=regression",
        "model.regression.attributes=[helpful,clear]",
        "trainer.rm.max_steps=2",
    ]
    names = ("first", "second", "third")
    models = [tmp_path / name / "checkpoints" / "megatron_gpt.nemo" for name in names]
    first = [
        *common(base, tmp_path / "first", ratings, ratings),
        *kind,
        "model.data.template=plain",
    ]
    second, third = (
        [*common(models[0], tmp_path / name, other_ratings, other_ratings), *kind]
        for name in names[1:]
    )
    allow = "pretrained_checkpoint.allow_contract_change=true"
    shorter = "model.data.seq_length=96"
    _, resumed, refused, done, _ = jobs.run(
        [
            train(*first),
            train(*first, shorter, fails=True),
            train(*second, shorter, fails=True),
            train(*second),
            train(*third, shorter, allow),
        ]
    )
    assert "model.data.seq_length: the checkpoint has 128, this run 96. Set " in resumed.stderr
    assert "training data: the checkpoint has" not in resumed.stderr
    assert "model.data.seq_length: 128 -> 96" in refused.stderr
    for failed in (resumed, refused):
        assert failed.returncode == 1
        assert "Traceback" not in failed.stderr
    assert "its own head" in done.stdout
    start, same, changed = map(read_contract, models)
    assert (start["hash"], start["label_means"]) == (same["hash"], same["label_means"])
    assert (changed["seq_length"], changed["label_means"]) == (96, start["label_means"])


def test_new_head_on_the_body_of_a_reward_model(tmp_path: Path) -> None:
    pairs = tiny.write_pairs(tmp_path / "pairs.jsonl", 17)
    start = tiny.write_reward_nemo(tmp_path / "rated.nemo")
    base_contract = read_contract(start)
    settings = [
        *common(start, tmp_path / "run", pairs, pairs),
        "trainer.rm.max_steps=1",
        f"model.data.seq_length={base_contract['seq_length']}",
        "model.micro_batch_tokens=2048",
    ]
    advice = "pretrained_checkpoint.new_head=true"
    refused, done = jobs.run([train(*settings, fails=True), train(*settings, advice)])
    assert refused.returncode == 1
    assert f"set {advice} to train another model" in refused.stderr
    assert "allow_contract_change" not in refused.stderr
    assert "a new head" in done.stdout
    after = read_contract(tmp_path / "run" / "checkpoints" / "megatron_gpt.nemo")
    assert (after["attributes"], after["label_means"]) == (["reward"], [0.0])
    assert after["reward_model_type"] == "binary_ranking"
    for field in ("template", "add_bos", "add_eos", "tokenizer_fingerprint"):
        assert after[field] == base_contract[field]


def read_contract(path: Path) -> dict:
    with tarfile.open(path) as archive:
        return json.load(archive.extractfile("./scoring_contract.json"))  # type: ignore[arg-type]


def test_files_are_mixed_by_weights_also_after_a_resume(base: Path, tmp_path: Path) -> None:
    files = [tiny.write_pairs(tmp_path / f"{n}.jsonl", count) for n, count in enumerate((8, 40))]
    listed = f"model.data.data_prefix.train=[{files[0]},{files[1]}]"
    weights = "model.data.data_prefix.train_weights"
    run, uninterrupted = (
        [*common(base, tmp_path / name, files[0], files[0]), listed, f"{weights}=[3,1]"]
        for name in ("run", "whole")
    )
    four = "trainer.rm.max_steps=4"
    done, refused, _, _ = jobs.run(
        [
            train(*run, "trainer.rm.max_steps=2"),
            train(*run, four, f"{weights}=[1,1]", fails=True),
            train(*run, four),
            train(*uninterrupted, four),
        ]
    )
    output = done.stdout.replace("\n", " ")
    assert f"36 of 48 records of an epoch come from {files[0]}, which has 8 (4.50 passes)" in output
    assert refused.returncode == 1
    assert weights in refused.stderr
    losses = [tiny.logged(tmp_path / name)["train/loss"] for name in ("run", "whole")]
    assert losses[0] == losses[1]


def test_file_of_nemo_aligner_trains_and_measures_its_test_set(base: Path, tmp_path: Path) -> None:
    """All its keys, and the test set that it names."""
    pairs, validation, other, test = (
        tiny.write_pairs(tmp_path / f"{name}.jsonl", count, seed)
        for seed, (name, count) in enumerate({"a": 24, "b": 8, "c": 8, "d": 9}.items())
    )
    prefix = (
        f"train: [{pairs}], validation: [{validation}], validation_c: [{other}], test: [{test}]"
    )
    command = [
        "--config",
        str(write_file(tmp_path, "training_rm.yaml")),
        f"pretrained_checkpoint.restore_from_path={base}",
        f"model.data.data_prefix={{{prefix}}}",
        f"exp_manager.explicit_log_dir={tmp_path / 'run'}",
        "model.encoder_seq_length=64",
        "model.global_batch_size=8",
        "trainer.precision=32",
        "model.data.allow_prompt_overlap=true",
    ]
    model = tmp_path / "run/checkpoints/megatron_gpt.nemo"
    evaluated = [f"rm_model_file={model}", f"data.path={test}", f"output={tmp_path / 'found.json'}"]
    refused, done, _ = jobs.run(
        [
            train(*command, fails=True),
            train(*command, "model.optim.sched.constant_steps=0"),
            jobs.Job("evaluate", evaluated),
        ]
    )
    assert "model.optim.sched.constant_steps: got 1000, wanted at most 0" in refused.stderr
    assert "trainer.devices, trainer.num_nodes: ignored: the launcher says" in done.stdout
    assert "best checkpoint by: validation-b/loss" in done.stdout
    assert "held out: test-d" in done.stdout

    logged = tiny.logged(tmp_path / "run")
    assert list(logged["test-d/accuracy"]) == [max(logged["train/loss"])]
    (loss,) = logged["test-d/loss"].values()
    result = json.loads((tmp_path / "found.json").read_text())
    assert result["metrics"]["loss"] == pytest.approx(loss, rel=1e-6)
