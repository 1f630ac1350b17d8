"""A run that is only looked at."""

from __future__ import annotations

import re
import shutil
import tarfile
from pathlib import Path

import pytest
import torch.distributed as dist

from nemo_aligner.batch.packed import Group, PackedBatch, Records
from nemo_aligner.config.common import Overlong, Precision
from nemo_aligner.config.load import load_config
from nemo_aligner.config.training import TrainConfig
from nemo_aligner.distributed.layout import LayoutSizes
from nemo_aligner.training.dry_run import _keys_per_token, check_run
from nemo_aligner.training.prepare import prepare_run
from nemo_aligner.utils.cache import VARIABLE
from nemo_aligner.utils.errors import AlignerError, ConfigError, DataError
from tests.data.hubs import FakeHub
from tests.harness import tiny


@pytest.fixture(scope="module")
def folder(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("dry")
    (folder / "base.nemo").symlink_to(base)
    tiny.write_pairs(folder / "pairs.jsonl", 37)
    tiny.write_pairs(folder / "more.jsonl", 9, seed=1)
    return folder


def settings(folder: Path, *more: str) -> list[str]:
    files = (folder / "base.nemo", folder / "run", folder / "pairs.jsonl", folder / "more.jsonl")
    return [*tiny.training(*files), "trainer.rm.max_epochs=2", *more]


def check(folder: Path, *more: str, processes: int = 1) -> str:
    return check_run(load_config(TrainConfig, settings(folder, *more)), processes)


def test_dry_run_says_what_a_run_would_do_and_writes_nothing(folder: Path) -> None:
    previous = sorted(folder.rglob("*"))
    output = check(folder, "model.tensor_model_parallel_size=2", processes=4)
    for part in (
        "train: ",
        "  records                   37",
        "validation-more: ",
        "model: 0.2M parameters, 4 layers of 64, a new head, fp32, TP=2 PP=1 DP=2",
        "run: 9 steps of 8 records (2 of 74 fill no step), learning rate ",
        "best checkpoint by: validation-more/accuracy",
        "estimated memory of the fullest rank: 2.39 MiB (weights 0.35, ",
        "begins: a new run, at step 1",
        "The run can begin, on 4 processes. This dry run read no weights and wrote nothing.",
    ):
        assert part in output
    assert sorted(folder.rglob("*")) == previous
    assert not dist.is_initialized()


def test_dry_run_finds_what_would_end_a_run(folder: Path, tmp_path: Path) -> None:
    """It and a run refuse by the same checks; what is malformed: ../data/test_dataset.py."""
    bad = tiny.write_pairs(tmp_path / "bad.jsonl", 24)
    with bad.open("a") as lines:
        lines.write('{"chosen": "cut of')
    cases = {
        ("model.tensor_model_parallel_size=2", 3): "got 3 processes, wanted a multiple of 2",
        ("model.tensor_model_parallel_size=4", 4): "divisor of the model's 2 query groups",
        ("model.pipeline_model_parallel_size=3", 3): "divisor of the model's 4 layers",
        ("model.freeze_layers=4", 1): "model.freeze_layers: got 4, wanted less than 4",
        ("model.global_batch_size=4", 5): "model.global_batch_size: got 4, wanted at least 5",
        ("model.global_batch_size=99", 1): "model.global_batch_size: got 99, wanted at most 74",
        ("model.micro_batch_tokens=50", 1): "model.micro_batch_tokens: got 50, wanted at least",
        ("exp_manager.checkpoint_callback_params.monitor=val_f1", 1): (
            "monitor: got 'val_f1', wanted one of validation-more/loss"
        ),
        ("model.data.template=nowhere", 1): "nowhere",
        ("model.linear_attention_kernels=flash_linear_attention", 1): (
            "cannot be used: the model has no Gated DeltaNet layers. Choose torch."
        ),
        (f"model.data.data_prefix.train=[{bad}]", 1): (
            f"{bad}: 1 of its 25 records (4.00%) are malformed\n  {bad}:25: "
        ),
        (
            f"exp_manager.explicit_log_dir={folder}/pairs.jsonl/run",
            1,
        ): "pairs.jsonl is not a folder",
    }
    wrong = {}
    for (change, processes), expected in cases.items():
        try:
            # Without a learning rate, whose default reads the base checkpoint's config.
            wrong[change] = check(folder, "model.optim.lr=null", change, processes=processes)
        except AlignerError as error:
            if expected not in str(error):
                wrong[change] = str(error)
    assert not wrong, wrong


def test_data_sets_of_the_hub_are_read_from_the_cache(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VARIABLE, str(tmp_path))
    monkeypatch.chdir(tmp_path)
    hub = FakeHub(folder / "pairs.jsonl").put_into(monkeypatch)
    prefix = "model.data.data_prefix"
    named = [
        f"{prefix}.train=[owner/pairs,{folder}/more.jsonl]",
        f"{prefix}.validation=owner/pairs:test",
    ]
    for _ in range(2):
        output = check(folder, *named)
    assert output.count("  records                   37") == 2
    assert "validation-owner--pairs--test: " in output
    assert hub.requests == [("owner/pairs", "train"), ("owner/pairs", "test")]
    # The run saves the names of the hub, which mean the same on another machine.
    run = prepare_run(load_config(TrainConfig, settings(folder, *named)), LayoutSizes())
    kept = run.config.model.data.data_prefix
    assert (kept.train[0], kept.validation) == ("owner/pairs", ["owner/pairs:test"])
    names = run.data.names_given(kept)
    assert names[f"{tmp_path}/data/owner--pairs--test.jsonl"] == "owner/pairs:test"
    hub.problem = OSError("no route to host")
    message = r"owner/lost, split train: .*no route to host\. .*nemo-aligner data fetch"
    with pytest.raises(DataError, match=message):
        check(folder, f"{prefix}.train=owner/lost")
    assert sorted(path.name for path in (tmp_path / "data").glob("*.jsonl")) == [
        "owner--pairs--test.jsonl",
        "owner--pairs--train.jsonl",
    ]


def test_dry_run_says_where_a_run_goes_on_and_what_has_changed(
    folder: Path, tmp_path: Path
) -> None:
    run = f"exp_manager.explicit_log_dir={tmp_path}"
    two = "trainer.rm.max_steps=2"
    tiny.run_verb("train", *settings(folder, run, two))
    output = check(folder, run, "model.optim.lr=1e-2")
    assert (
        f"begins: after step 2 of {tmp_path}/checkpoints/step_00000002, with 7 steps left" in output
    )
    assert "changed since: model.optim.lr: 0.001 -> 0.01" in output
    assert ", and up to 3 exist at once; " in output
    output = check(folder, run, two, "exp_manager.checkpoint_callback_params.monitor=loss")
    assert "the last step; only the model will be written" in output
    assert ", and up to 4 exist at once; " in output  # the best one by accuracy stays
    with pytest.raises(AlignerError, match=r"model\.seed: the checkpoint has 1234, this run 5"):
        check(folder, run, "model.seed=5")
    with pytest.raises(AlignerError, match="resume_if_exists: got false"):
        check(folder, run, "exp_manager.resume_if_exists=false")


def test_run_from_a_reward_model_keeps_its_length_unless_it_is_set(
    folder: Path, tmp_path: Path
) -> None:
    start = tiny.write_reward_nemo(
        tmp_path / "rm.nemo", seq_length=99, overlong=Overlong.truncate_left
    )
    ratings = tiny.write_ratings(tmp_path / "rated.jsonl", 9, ("helpfulness", "verbosity"))
    arguments = [
        f"pretrained_checkpoint.restore_from_path={start}",
        "model.reward_model_type=regression",
        "model.regression.attributes=[helpfulness,verbosity]",
        "model.global_batch_size=8",
        f"model.data.data_prefix.train={ratings}",
        f"exp_manager.explicit_log_dir={tmp_path / 'run'}",
    ]
    run = prepare_run(load_config(TrainConfig, arguments), LayoutSizes())
    contract, data = run.data.contract, run.config.model.data
    assert (contract.seq_length, contract.overlong) == (99, "truncate_left")
    assert (data.seq_length, data.overlong) == (99, Overlong.truncate_left)
    line = "samples: up to 99 tokens, as the reward model to start from (model.data.seq_length)"
    assert line in check_run(load_config(TrainConfig, arguments), 1)
    with pytest.raises(ConfigError, match=r"set model\.data\.seq_length=99\. Or set pretrained"):
        check_run(load_config(TrainConfig, [*arguments, "model.data.seq_length=98"]), 1)


def test_a_quantized_base_is_named_and_its_weights_are_counted(folder: Path) -> None:
    lora = ["model.lora.rank=2", "model.lora.targets=[linear_qkv]"]
    quantized = check(folder, *lora, "model.lora.base_precision=int8")
    assert "trained: LoRA of rank 2, alpha 32, on linear_qkv, on a base in int8" in quantized
    pattern = re.compile(r"fullest rank: [\d.]+ MiB \(weights ([\d.]+), ")
    small, large = (pattern.findall(output) for output in (quantized, check(folder, *lora)))
    assert float(small[0]) < 0.5 * float(large[0])


def test_learning_rate_goes_by_the_models_width_unless_it_is_given(
    folder: Path, tmp_path: Path
) -> None:
    """The run's settings name the number, not null."""
    width, null = tiny.SHAPE["hidden_size"], "model.optim.lr=null"
    assert f", learning rate {0.05 / width:.3g}\n" in check(folder, null)
    lora = check(folder, null, "model.lora.rank=2")
    assert f", learning rate {0.5 / width:.3g}\n" in lora
    with pytest.raises(AlignerError, match=r"min_lr: got 0.1, wanted at most model\.optim\.lr \("):
        check(folder, null, "model.optim.sched.min_lr=0.1")
    run = f"exp_manager.explicit_log_dir={tmp_path}"
    tiny.run_verb("train", *settings(folder, run, null, "trainer.rm.max_steps=1"))
    stored = load_config(TrainConfig, file=tmp_path / "config.yaml")
    assert stored.model.optim.lr == 0.05 / width
    assert "changed since: model.optim.lr" not in check(folder, run, null)


def test_precision_is_that_of_the_device_unless_a_model_or_a_run_has_one(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def precision(*more: str) -> Precision | None:
        config = load_config(TrainConfig, settings(folder, *more))
        return prepare_run(config, LayoutSizes()).config.trainer.precision

    run, null = f"exp_manager.explicit_log_dir={tmp_path / 'run'}", "trainer.precision=null"
    assert precision(run) is Precision.fp32
    assert "precision: fp32, because this machine has no GPU" in check(folder, run, null)
    tiny.run_verb("train", *settings(folder, run, null, "trainer.rm.max_steps=1"))
    assert load_config(TrainConfig, file=tmp_path / "run/config.yaml").precision is Precision.fp32
    monkeypatch.setattr("nemo_aligner.training.prepare.gpu_computes_bf16", lambda: True)
    assert precision() is Precision.bf16
    assert precision("trainer.precision=fp16") is Precision.fp16
    assert precision(run) is Precision.fp32  # resumed on another machine
    model = tmp_path / "run/checkpoints/megatron_gpt.nemo"
    assert precision(f"pretrained_checkpoint.restore_from_path={model}") is Precision.fp32


def test_samples_longer_than_the_bases_positions_are_noted(folder: Path) -> None:
    positions = tiny.SHAPE["max_position_embeddings"]
    for length, notes in ((positions, 0), (positions + 1, 1)):
        length_setting = f"model.data.seq_length={length}"
        output = check(folder, length_setting, f"model.micro_batch_tokens={2 * length}")
        assert output.count(f"the base model was trained on {positions} positions") == notes


def test_run_that_cannot_begin_ends_before_the_weights_are_read(
    folder: Path, tmp_path: Path
) -> None:
    """The base has none here, so that reading them would be another error."""
    with tarfile.open(folder / "base.nemo") as archive:
        archive.extractall(tmp_path / "base", filter="data")
    shutil.rmtree(tmp_path / "base/model_weights")
    for change, message in (
        ("model.freeze_layers=4", "model.freeze_layers: got 4, wanted less than 4"),
        ("model.global_batch_size=99", "model.global_batch_size: got 99, wanted at most 74"),
        ("model.optim.sched.constant_steps=99", "model.optim.sched.constant_steps: got 99"),
    ):
        base = f"pretrained_checkpoint.restore_from_path={tmp_path / 'base'}"
        done = tiny.run_verb("train", *settings(folder, base, change), check=False)
        assert done.stderr.startswith(f"ConfigError: {message}"), done.stderr


def test_dry_run_of_the_verb_is_for_as_many_processes_as_it_is_asked_about(folder: Path) -> None:
    """A base that is not there is named by its path, as are settings that are not set."""
    layout = "model.tensor_model_parallel_size=2"
    done = tiny.run_verb("train", "--dry-run", "--processes=2", *settings(folder, layout))
    assert "TP=2 PP=1 DP=1" in done.stdout
    assert done.stdout.endswith("This dry run read no weights and wrote nothing.\n")
    assert not (folder / "run").exists()
    wrong = settings(folder, "pretrained_checkpoint.restore_from_path=nowhere.nemo")
    done = tiny.run_verb("train", "--dry-run", *wrong, check=False)
    assert done.stderr == (
        "CheckpointError: nowhere.nemo: there is no checkpoint. Pass a .nemo file, the folder that "
        "it unpacks to, a Hugging Face folder, or a .gguf file\n"
    )
    done = tiny.run_verb("train", "model.seed=3", check=False)
    first, *keys = done.stderr.splitlines()
    assert first.startswith("SettingsError: ")
    assert [key.partition(": it is not set. Set it to the ")[0].strip() for key in keys] == [
        "pretrained_checkpoint.restore_from_path",
        "model.data.data_prefix.train",
    ]


def test_keys_of_a_common_beginning_are_counted_with_each_that_has_it() -> None:
    for prefix, keys in ((0, 60), (20, 20 + 30 + 30)):
        pack = PackedBatch.pack([[1] * 30] * 2, Records.of([0], [2]), groups=[Group(2, prefix)])
        assert _keys_per_token(pack) == keys / pack.num_tokens
