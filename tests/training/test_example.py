"""The training example, as a user runs it: what it says, writes and refuses."""

from __future__ import annotations

import csv
import json
import re
import tarfile
from pathlib import Path

import pytest
import torch

from nemo_aligner.checkpoint.nemo.open import open_nemo
from nemo_aligner.checkpoint.weights.store import open_weights
from nemo_aligner.checkpoint.weights.tensor_store import is_optimizer_state
from nemo_aligner.models.lora import is_of_adapter
from tests import tiny
from tests.training import jobs

EXAMPLE = "examples/train_reward_model.py"


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.write_base_nemo(tmp_path_factory.mktemp("base") / "base.nemo")


def common(base: Path, folder: Path, train: Path, validation: Path) -> list[str]:
    return [
        f"pretrained_checkpoint.restore_from_path={base}",
        f"model.data.data_prefix.train=[{train}]",
        f"model.data.data_prefix.validation=[{validation}]",
        "model.data.allow_prompt_overlap=true",
        f"exp_manager.explicit_log_dir={folder}",
        "exp_manager.create_tensorboard_logger=false",
        "model.data.seq_length=128",
        "model.micro_batch_tokens=160",
        "model.global_batch_size=8",
        "model.optim.lr=1e-3",
        "model.optim.sched.warmup_steps=2",
        "model.optim.sched.name=constant",
        "trainer.rm.max_epochs=10",
        "trainer.rm.val_check_interval=2",
    ]


def train(*settings: str, fails: bool = False) -> jobs.Job:
    return jobs.Job("train", settings, fails=fails)


def column(folder: Path, name: str) -> list[float]:
    with (folder / "csv" / "metrics.csv").open(newline="") as lines:
        return [float(row[name]) for row in csv.DictReader(lines) if row.get(name)]


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
    losses = column(tmp_path / "run", "train/loss")
    assert len(losses) == 16
    assert sum(losses[-4:]) < sum(losses[:4])
    validated = column(tmp_path / "run", "validation-ratings/pearson_mean")
    assert len(validated) == 8
    assert f"best validation-ratings/pearson_mean, {max(validated):.4g}" in done.stdout
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
    found = jobs.run(
        [
            train(*common(base, tmp_path / name, pairs, pairs), *lora, *averaged)
            for name, lora in kinds.items()
        ]
    )
    for name, done in zip(kinds, found, strict=True):
        check_average(tmp_path / name / "checkpoints", done.stdout, is_lora=name == "lora")


def check_average(checkpoints: Path, said: str, is_lora: bool) -> None:
    assert said.count("(chosen)") == 2
    told = re.search(r"the mean of the weights of steps (\d+), (\d+): .*/accuracy", said)
    assert told is not None
    steps = [open_weights(checkpoints / f"step_{int(step):08d}/state") for step in told.groups()]
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


def test_label_that_is_far_out_is_named_first(base: Path, tmp_path: Path) -> None:
    cases = {1e38: "a loss that is not finite", 1e19: "a gradient norm of inf"}
    regression = ("model.reward_model_type=regression", "model.regression.attributes=[helpful]")
    listed, files = [], {}
    for label in cases:
        ratings = tiny.write_ratings(tmp_path / f"{label}.jsonl", 8, ("helpful",))
        rows = [json.loads(line) for line in ratings.read_text().splitlines()]
        rows[6]["helpful"] = label
        ratings.write_text("".join(json.dumps(row) + "\n" for row in rows))
        files[label] = ratings
        settings = common(base, tmp_path / "run", ratings, ratings)
        listed.append(train(*settings, *regression, "model.global_batch_size=6", fails=True))
    for (label, number), done in zip(cases.items(), jobs.run(listed), strict=True):
        assert done.returncode == 1
        assert f"    {files[label]}:7: helpful is {label:g}, the median " in done.stdout
        assert f"step 1: got {number}, on rank 0, from {files[label]}:7, " in done.stderr


def test_refused_runs_say_why_in_one_line_and_leave_nothing(base: Path, tmp_path: Path) -> None:
    pairs = tiny.write_pairs(tmp_path / "pairs.jsonl", 9)
    malformed = tiny.write_pairs(tmp_path / "malformed.jsonl", 24)
    with malformed.open("a") as lines:
        lines.write('{"chosen": "cut of')
    wrong = {
        "model.global_batch_size=99": "model.global_batch_size: got 99, wanted at most 90",
        "exp_manager.checkpoint_callback_params.monitor=val_f1": "monitor: got 'val_f1', wanted on",
        "model.freeze_layers=4": "model.freeze_layers: got 4, wanted less than 4",
        f"model.data.data_prefix.train=[{malformed}]": (
            f"{malformed}: 1 of its 25 records (4.00%) are malformed\n  {malformed}:25: "
        ),
    }
    run = common(base, tmp_path / "run", pairs, pairs)
    dropped = [
        *common(base, tmp_path / "dropped", malformed, pairs),
        "model.data.malformed=drop",
        "model.data.max_malformed=0.05",
        "trainer.rm.max_steps=1",
    ]
    *found, done = jobs.run([*(train(*run, key, fails=True) for key in wrong), train(*dropped)])
    for message, refused in zip(wrong.values(), found, strict=True):
        assert refused.returncode == 1, message
        assert message in refused.stderr
        assert "Traceback" not in refused.stderr
    assert not list((tmp_path / "run").rglob("step_*"))
    assert "  dropped                   1 (1 malformed)\n" in done.stdout
    assert f"  malformed:\n    {malformed}:25: malformed JSON" in done.stdout


def test_training_on_keeps_the_contract_unless_told_otherwise(base: Path, tmp_path: Path) -> None:
    ratings = tiny.write_ratings(tmp_path / "ratings.jsonl", 17, ("helpful", "clear"))
    others = tiny.write_ratings(tmp_path / "others.jsonl", 17, ("helpful", "clear"), seed=1)
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
        [*common(models[0], tmp_path / name, others, others), *kind] for name in names[1:]
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
    assert "scoring contract: the checkpoint has" in resumed.stderr
    for each in (resumed, refused):
        assert each.returncode == 1
        assert "model.data.seq_length: 128 -> 96" in each.stderr
        assert "Traceback" not in each.stderr
    assert "its own head" in done.stdout
    before, after, changed = map(read_contract, models)
    assert (before["hash"], before["label_means"]) == (after["hash"], after["label_means"])
    assert (changed["seq_length"], changed["label_means"]) == (96, before["label_means"])


def test_new_head_on_the_body_of_a_reward_model(tmp_path: Path) -> None:
    pairs = tiny.write_pairs(tmp_path / "pairs.jsonl", 17)
    start = tiny.write_reward_nemo(tmp_path / "rated.nemo")
    before = read_contract(start)
    settings = [
        *common(start, tmp_path / "run", pairs, pairs),
        "trainer.rm.max_steps=1",
        f"model.data.seq_length={before['seq_length']}",
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
    for kept in ("template", "add_bos", "add_eos", "tokenizer_fingerprint"):
        assert after[kept] == before[kept]


def read_contract(path: Path) -> dict:
    with tarfile.open(path) as archive:
        return json.load(archive.extractfile("./scoring_contract.json"))  # type: ignore[arg-type]


@pytest.mark.smoke
def test_trained_model_is_evaluated_to_the_bits_of_its_validation_and_exported(
    base: Path, tmp_path: Path
) -> None:
    pairs = tiny.write_pairs(tmp_path / "pairs.jsonl", 24)
    heldout = tiny.write_pairs(tmp_path / "heldout.jsonl", 40, seed=1)
    listed = []
    for name in ("fp32", "bf16"):
        run, more = tmp_path / name, (f"trainer.precision={name}", "trainer.rm.max_steps=2")
        settings = [*common(base, run, pairs, heldout), *more]
        model = run / "checkpoints/megatron_gpt.nemo"
        files = [f"output={run}/report.json", f"output_rewards={run}/rewards.jsonl"]
        given = [f"rm_model_file={model}", f"data.path={heldout}", *files]
        listed += [train(*settings), jobs.Job("evaluate", given)]
    exported = ["--input", str(model), "--output", str(tmp_path / "hf")]
    *_, done = jobs.run([*listed, jobs.Job("export", exported)])
    for name in ("fp32", "bf16"):
        run = tmp_path / name
        lines = (run / "rewards.jsonl").read_text().splitlines()
        assert len(set(lines)) == 40
        assert (run / "heldout/validation-heldout.jsonl").read_text().splitlines() == lines
        rewards = [json.loads(line)["rewards"] for line in lines]
        assert len({value for pair in rewards for value in pair.values()}) > 60
        metrics = json.loads((run / "report.json").read_text())["metrics"]
        assert metrics["accuracy"] == column(run, "validation-heldout/accuracy")[-1]
    assert "checked: " in done.stdout
    assert (tmp_path / "hf/model.safetensors").is_file()


def test_files_are_mixed_by_weights_also_after_a_resume(base: Path, tmp_path: Path) -> None:
    files = [tiny.write_pairs(tmp_path / f"{n}.jsonl", count) for n, count in enumerate((8, 40))]
    listed = f"model.data.data_prefix.train=[{files[0]},{files[1]}]"
    weights = "model.data.data_prefix.train_weights"
    run, whole = (
        [*common(base, tmp_path / name, files[0], files[0]), listed, f"{weights}=[3,1]"]
        for name in ("run", "whole")
    )
    four = "trainer.rm.max_steps=4"
    done, refused, _, _ = jobs.run(
        [
            train(*run, "trainer.rm.max_steps=2"),
            train(*run, four, f"{weights}=[1,1]", fails=True),
            train(*run, four),
            train(*whole, four),
        ]
    )
    said = done.stdout.replace("\n", " ")
    assert f"36 of 48 records of an epoch are of {files[0]}, which has 8 (4.50 passes)" in said
    assert refused.returncode == 1
    assert weights in refused.stderr
    losses = [column(tmp_path / name, "train/loss") for name in ("run", "whole")]
    assert losses[0] == losses[1]
