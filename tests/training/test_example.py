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


def column(folder: Path, name: str) -> list[float]:
    with (folder / "csv" / "metrics.csv").open(newline="") as lines:
        return [float(row[name]) for row in csv.DictReader(lines) if row.get(name)]


@pytest.mark.slow(seconds=6)
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


@pytest.mark.slow(seconds=10)
@pytest.mark.parametrize("lora", [(), ("model.lora.rank=2", "model.lora.alpha=4")])
def test_the_model_may_be_the_mean_of_the_best(
    base: Path, tmp_path: Path, lora: tuple[str, ...]
) -> None:
    pairs = tiny.write_pairs(tmp_path / "pairs.jsonl", 24)
    done = tiny.run_script(
        EXAMPLE,
        *common(base, tmp_path / "run", pairs, pairs),
        *lora,
        "trainer.rm.max_steps=8",
        "exp_manager.checkpoint_callback_params.save_top_k=3",
        "exp_manager.checkpoint_callback_params.average_best=2",
    )
    assert done.stdout.count("(chosen)") == 2
    told = re.search(r"the mean of the weights of steps (\d+), (\d+): .*/accuracy", done.stdout)
    assert told is not None
    checkpoints = tmp_path / "run/checkpoints"
    steps = [open_weights(checkpoints / f"step_{int(step):08d}/state") for step in told.groups()]
    with open_nemo(checkpoints / "megatron_gpt.nemo") as folder:
        adapters = [n for n in steps[0].tensors if is_of_adapter(n) and not is_optimizer_state(n)]
        assert bool(adapters) == bool(lora)
        for name in (*adapters, "model.rm_head.weight"):
            first, second = (state.read(name) for state in steps)
            assert not torch.equal(first, second), name
            # An archive has all layers in one tensor.
            layer = re.search(r"layers\.(\d+)\.", name)
            stacked = name if layer is None else name.replace(layer[0], "layers.")
            mean = folder.store.read(stacked, None if layer is None else int(layer[1]))
            torch.testing.assert_close(mean, (first + second) / 2, rtol=0, atol=1e-8)


@pytest.mark.slow(seconds=4)
@pytest.mark.parametrize(
    ("label", "number"), [(1e38, "a loss that is not finite"), (1e19, "a gradient norm of inf")]
)
def test_the_record_whose_label_is_far_out_is_named_first(
    base: Path, tmp_path: Path, label: float, number: str
) -> None:
    ratings = tiny.write_ratings(tmp_path / "ratings.jsonl", 8, ("helpful",))
    rows = [json.loads(line) for line in ratings.read_text().splitlines()]
    rows[6]["helpful"] = label
    ratings.write_text("".join(json.dumps(row) + "\n" for row in rows))
    done = tiny.run_script(
        EXAMPLE,
        *common(base, tmp_path / "run", ratings, ratings),
        "model.reward_model_type=regression",
        "model.regression.attributes=[helpful]",
        "model.global_batch_size=6",
        check=False,
    )
    assert done.returncode == 1
    assert f"    {ratings}:7: helpful is {label:g}, the median " in done.stdout
    assert f"step 1: got {number}, on rank 0, from {ratings}:7, {ratings}:" in done.stderr


@pytest.mark.slow(seconds=5)
def test_malformed_records_are_left_out_and_counted(base: Path, tmp_path: Path) -> None:
    pairs = tiny.write_pairs(tmp_path / "pairs.jsonl", 24)
    with pairs.open("a") as lines:
        lines.write('{"chosen": "cut of')
    settings = [*common(base, tmp_path / "run", pairs, pairs), "trainer.rm.max_steps=1"]
    refused = tiny.run_script(EXAMPLE, *settings, check=False)
    assert refused.returncode == 1
    assert f"{pairs}: 1 of its 25 records (4.00%) are malformed\n  {pairs}:25: " in refused.stderr
    settings += ["model.data.malformed=drop", "model.data.max_malformed=0.05"]
    done = tiny.run_script(EXAMPLE, *settings)
    assert "  dropped                   1 (1 malformed)\n" in done.stdout
    assert f"  malformed:\n    {pairs}:25: malformed JSON" in done.stdout


@pytest.mark.slow(seconds=18)
def test_training_on_keeps_the_contract_unless_told_otherwise(base: Path, tmp_path: Path) -> None:
    ratings = tiny.write_ratings(tmp_path / "ratings.jsonl", 17, ("helpful", "clear"))
    others = tiny.write_ratings(tmp_path / "others.jsonl", 17, ("helpful", "clear"), seed=1)
    kind = [
        "model.reward_model_type=regression",
        "model.regression.attributes=[helpful,clear]",
        "trainer.rm.max_steps=2",
    ]
    first = common(base, tmp_path / "first", ratings, ratings)
    tiny.run_script(EXAMPLE, *first, *kind, "model.data.template=plain")
    plain = [*kind, "model.data.template=plain", "model.data.seq_length=96"]
    resumed = tiny.run_script(EXAMPLE, *first, *plain, check=False)
    assert resumed.returncode == 1
    assert "scoring contract: the checkpoint has" in resumed.stderr
    assert "model.data.seq_length: 128 -> 96" in resumed.stderr
    start = tmp_path / "first" / "checkpoints" / "megatron_gpt.nemo"
    settings = [*common(start, tmp_path / "second", others, others), *kind]
    done = tiny.run_script(EXAMPLE, *settings, "model.data.seq_length=96", check=False)
    assert done.returncode == 1
    assert "model.data.seq_length: 128 -> 96" in done.stderr
    assert "Traceback" not in done.stderr
    done = tiny.run_script(EXAMPLE, *settings)
    assert "its own head" in done.stdout
    contracts = [
        read_contract(tmp_path / name / "checkpoints" / "megatron_gpt.nemo")
        for name in ("first", "second")
    ]
    assert contracts[0]["hash"] == contracts[1]["hash"]
    assert contracts[0]["label_means"] == contracts[1]["label_means"]
    settings = [*common(start, tmp_path / "third", others, others), *kind]
    allow = "pretrained_checkpoint.allow_contract_change=true"
    tiny.run_script(EXAMPLE, *settings, "model.data.seq_length=96", allow)
    third = read_contract(tmp_path / "third" / "checkpoints" / "megatron_gpt.nemo")
    assert (third["seq_length"], third["label_means"]) == (96, contracts[0]["label_means"])


@pytest.mark.slow(seconds=11)
def test_a_new_head_on_the_body_of_a_reward_model(tmp_path: Path) -> None:
    pairs = tiny.write_pairs(tmp_path / "pairs.jsonl", 17)
    start = tiny.write_reward_nemo(tmp_path / "rated.nemo")
    before = read_contract(start)
    settings = [
        *common(start, tmp_path / "run", pairs, pairs),
        "trainer.rm.max_steps=1",
        f"model.data.seq_length={before['seq_length']}",
        "model.micro_batch_tokens=2048",
    ]
    refused = tiny.run_script(EXAMPLE, *settings, check=False)
    assert refused.returncode == 1
    advice = "pretrained_checkpoint.new_head=true"
    assert f"set {advice} to train another model" in refused.stderr
    assert "allow_contract_change" not in refused.stderr
    done = tiny.run_script(EXAMPLE, *settings, advice)
    assert "a new head" in done.stdout
    after = read_contract(tmp_path / "run" / "checkpoints" / "megatron_gpt.nemo")
    assert (after["attributes"], after["label_means"]) == (["reward"], [0.0])
    assert after["reward_model_type"] == "binary_ranking"
    for kept in ("template", "add_bos", "add_eos", "tokenizer_fingerprint"):
        assert after[kept] == before[kept]


def read_contract(path: Path) -> dict:
    with tarfile.open(path) as archive:
        return json.load(archive.extractfile("./scoring_contract.json"))  # type: ignore[arg-type]


@pytest.mark.slow(seconds=8)
def test_refusals_are_one_line(base: Path, tmp_path: Path) -> None:
    pairs = tiny.write_pairs(tmp_path / "pairs.jsonl", 9)
    settings = common(base, tmp_path / "run", pairs, pairs)
    for wrong, message in (
        (["model.global_batch_size=99"], "model.global_batch_size: got 99, wanted at most 90"),
        (
            ["exp_manager.checkpoint_callback_params.monitor=val_f1"],
            "monitor: got 'val_f1', wanted one of validation-pairs/loss",
        ),
        (["model.freeze_layers=4"], "model.freeze_layers: got 4, wanted less than 4"),
    ):
        done = tiny.run_script(EXAMPLE, *settings, *wrong, check=False)
        assert done.returncode == 1
        assert message in done.stderr
        assert "Traceback" not in done.stderr
    assert not list((tmp_path / "run").rglob("step_*"))


@pytest.mark.slow
def test_a_stage_without_anything_to_train(base: Path, tmp_path: Path) -> None:
    """Frozen layers, on the first of two stages all, train and resume as in one process."""
    pairs = tiny.write_pairs(tmp_path / "pairs.jsonl", 37)
    runs = {name: common(base, tmp_path / name, pairs, pairs) for name in ("one", "four")}
    frozen = "model.freeze_layers=2"
    tiny.run_script(EXAMPLE, *runs["one"], frozen, "trainer.rm.max_steps=4")
    for steps in (2, 4):
        done = tiny.run_script(
            EXAMPLE,
            *runs["four"],
            frozen,
            f"trainer.rm.max_steps={steps}",
            "model.pipeline_model_parallel_size=2",
            processes=4,
        )
    assert "resumed from" in done.stdout
    for name in ("train/loss", "train/grad_norm"):
        wanted = column(tmp_path / "one", name)
        assert column(tmp_path / "four", name) == pytest.approx(wanted, rel=1e-5)


@pytest.mark.slow
def test_fp16_trains_resumes_and_scores(base: Path, tmp_path: Path) -> None:
    """On two stages, the first with nothing to train, as one process does."""
    pairs = tiny.write_pairs(tmp_path / "pairs.jsonl", 37)
    settings = ["trainer.precision=fp16", "model.freeze_layers=2"]
    runs = {name: [*common(base, tmp_path / name, pairs, pairs), *settings] for name in "12"}
    tiny.run_script(EXAMPLE, *runs["1"], "trainer.rm.max_steps=4")
    for steps in (2, 4):
        done = tiny.run_script(
            EXAMPLE,
            *runs["2"],
            f"trainer.rm.max_steps={steps}",
            "model.pipeline_model_parallel_size=2",
            processes=2,
        )
    assert "resumed from" in done.stdout
    for folder in (tmp_path / "1", tmp_path / "2"):
        assert column(folder, "train/loss_scale") == [2.0**16] * 4
        assert column(folder, "train/skipped_steps") == [0.0] * 4
    for name in ("train/loss", "train/grad_norm"):
        wanted = column(tmp_path / "1", name)
        assert column(tmp_path / "2", name) == pytest.approx(wanted, rel=1e-3)
    done = tiny.run_script(
        "examples/evaluate_reward_model.py",
        f"rm_model_file={tmp_path}/2/checkpoints/megatron_gpt.nemo",
        f"data.path={pairs}",
        f"output={tmp_path}/metrics.json",
    )
    metrics = json.loads((tmp_path / "metrics.json").read_text())
    assert metrics["metrics"]["accuracy"] == pytest.approx(
        column(tmp_path / "2", "validation-pairs/accuracy")[-1]
    )


@pytest.mark.slow(seconds=5)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_the_evaluation_gives_the_bits_of_the_last_validation(
    precision: str, base: Path, tmp_path: Path
) -> None:
    pairs = tiny.write_pairs(tmp_path / "pairs.jsonl", 24)
    heldout = tiny.write_pairs(tmp_path / "heldout.jsonl", 40, seed=1)
    done = tiny.run_script(
        "tests/training/same_bits.py",
        *common(base, tmp_path / "run", pairs, heldout),
        f"trainer.precision={precision}",
        "trainer.rm.max_steps=2",
    )
    rewards = json.loads(done.stdout.splitlines()[-1])
    assert len(rewards) == 80
    assert len({validated for validated, _ in rewards}) > 60
    assert all(validated == evaluated for validated, evaluated in rewards)


def test_files_are_mixed_by_weights_also_after_a_resume(base: Path, tmp_path: Path) -> None:
    files = [tiny.write_pairs(tmp_path / f"{n}.jsonl", count) for n, count in enumerate((8, 40))]
    listed = f"model.data.data_prefix.train=[{files[0]},{files[1]}]"
    weights = "model.data.data_prefix.train_weights=[3,1]"
    common_ = [*common(base, tmp_path / "run", files[0], files[0]), listed, weights]
    done = tiny.run_script(EXAMPLE, *common_, "trainer.rm.max_steps=2")
    said = done.stdout.replace("\n", " ")
    assert f"36 of 48 records of an epoch are of {files[0]}, which has 8 (4.50 passes)" in said
    other = [*common_[:-1], "model.data.data_prefix.train_weights=[1,1]"]
    refused = tiny.run_script(EXAMPLE, *other, "trainer.rm.max_steps=4", check=False)
    assert refused.returncode != 0
    assert "model.data.data_prefix.train_weights" in refused.stderr
    whole = tmp_path / "whole"
    tiny.run_script(
        EXAMPLE, *common_, f"exp_manager.explicit_log_dir={whole}", "trainer.rm.max_steps=4"
    )
    tiny.run_script(EXAMPLE, *common_, "trainer.rm.max_steps=4")
    assert column(tmp_path / "run", "train/loss") == column(whole, "train/loss")
