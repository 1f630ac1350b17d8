"""Verdict by verdict: rewardbench's own command on an export, and our tasks on its archive.

Each side reads the benchmarks by itself: ours as their authors published them, rewardbench as
RewardBench has them on the hub. The command is unchanged: text by the tokenizer's template, batches
of eight, padded on the left, never truncated. It is told to use fp32, since its default, 8-bit
weights in fp16, needs a GPU.
"""

from __future__ import annotations

import dataclasses
import gzip
import json
import subprocess
from collections.abc import Callable, Sequence
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from nemo_aligner.contract.messages import Text
from nemo_aligner.contract.scorer import score_all
from nemo_aligner.contract.tokenizer import load_tokenizer
from nemo_aligner.evaluation.run_task import TaskResult, run_task
from nemo_aligner.evaluation.tasks import find_task
from tests.data.files import published, rows_of, write
from tests.harness import tiny
from tests.harness.once import Once
from tests.harness.scorers import source_of

LLMBAR = {
    "Natural": "llmbar-natural",
    "Adversarial-Neighbor": "llmbar-adver-neighbor",
    "Adversarial-GPTInst": "llmbar-adver-GPTInst",
    "Adversarial-GPTOut": "llmbar-adver-GPTOut",
    "Adversarial-Manual": "llmbar-adver-manual",
}
PAIRS = 6  # records of every subset
LANGUAGES = ("cpp", "go", "java", "js", "python", "rust")


Values = list[dict[str, Any]]


class Part(NamedTuple):
    """Some records of a benchmark, as published and in rewardbench's form."""

    task: str
    published: Values
    theirs: Values


def llmbar(name: str, count: int) -> Part:
    values = json.loads(published(f"eval/llmbar/{name}.json").read_text())[:count]
    theirs = []
    for value in values:
        outputs = [value["output_1"], value["output_2"]]
        right = outputs.pop(value["label"] - 1)
        theirs.append({"prompt": value["input"], "chosen": right, "rejected": outputs[0]})
    return Part("llmbar", values, theirs)


def humanevalpack(language: str, count: int) -> Part:
    with gzip.open(published(f"eval/humanevalpack/{language}.jsonl.gz"), "rt") as lines:
        values = list(islice(map(json.loads, lines), count))
    sides = {"chosen": "canonical_solution", "rejected": "buggy_solution"}
    theirs = [
        {
            "prompt": value["instruction"],
            **{side: value["prompt"] + value[key] for side, key in sides.items()},
        }
        for value in values
    ]
    return Part("humanevalpack", values, theirs)


def core_parts(count: int) -> dict[str, Part]:
    """The records by RewardBench's subset."""
    parts = {subset: llmbar(name, count) for name, subset in LLMBAR.items()}
    return {**parts, **{f"hep-{name}": humanevalpack(name, count) for name in LANGUAGES}}


def rewardbench(python: Path, export: Path, folder: Path) -> list[dict[str, Any]]:
    """The scores that the command writes for every pair; ``folder`` is its working directory."""
    offline = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "WANDB_MODE": "disabled"}
    (folder / "model").symlink_to(export)
    done = subprocess.run(
        [
            *(python, tiny.ROOT / "tests/paths/readers/rewardbench_cli.py", "--model=model"),
            *("--torch_dtype=float32", "--not_quantized", "--output_dir=out/"),
        ],
        cwd=folder,
        env={**tiny.environment(), **offline, "HF_HOME": str(folder / "hub")},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return rows_of(folder / "out/model_outputs.jsonl")


Score = Callable[[Sequence[Text]], np.ndarray]


def ours_of(score: Score, folder: Path, part: Part) -> TaskResult:
    path = write(folder / f"{part.task}.jsonl", *part.published)
    report = run_task(find_task(part.task), path, source_of(score))
    assert len(report.predictions.rows) == len(part.published)
    return report


def differing(ours: TaskResult, theirs: list[dict[str, Any]]) -> list[int]:
    """The pairs with different verdicts."""
    assert len(ours.predictions.rows) == len(theirs)
    return [
        number
        for number, (our, their) in enumerate(zip(ours.predictions.rows, theirs, strict=True))
        if our.right != their["results"]
    ]


def check_rewards(ours: TaskResult, theirs: list[dict[str, Any]], atol: float) -> None:
    their_rewards = [[line["scores_chosen"], line["scores_rejected"]] for line in theirs]
    np.testing.assert_allclose(
        [row.rewards for row in ours.predictions.rows], their_rewards, atol=atol
    )


@pytest.fixture(scope="module")
def tiny_model(once: Once) -> Path:
    """``rm.nemo``, whose contract allows 8192 tokens, and its ``export/``."""

    def make(folder: Path) -> None:
        long = {"max_position_embeddings": 8192, "num_hidden_layers": 2}
        tiny.write_hf_reward_model(folder / "trained", **long)
        convert = ("--seq-length=8192", f"--input={folder / 'trained'}")
        tiny.run_verb("convert", *convert, f"--output={folder / 'rm.nemo'}")
        export = f"--input={folder / 'rm.nemo'}", f"--output={folder / 'export'}"
        tiny.run_verb("export", *export)

    return once("rewardbench", make)


def test_rewardbench_verdicts_on_its_default_data_set(
    tiny_model: Path, rewardbench_python: Path, layout: Any, tmp_path: Path
) -> None:
    from nemo_aligner.serving.engine.scorer import RewardScorer, load_scorer

    parts = core_parts(PAIRS)
    scorer = load_scorer(tiny_model / "rm.nemo", layout, micro_batch_tokens=8192)
    # The command's default data set, read from a local folder.
    rows = [
        {"id": number, "subset": subset, **value}
        for subset, part in parts.items()
        for number, value in enumerate(part.theirs)
    ]
    folder = tmp_path / "core/allenai/reward-bench/data"
    folder.mkdir(parents=True)
    write(folder / "filtered-00000-of-00001.jsonl", *rows)
    lines = rewardbench(rewardbench_python, tiny_model / "export", tmp_path / "core")
    theirs = {name: [line for line in lines if line["subset"] == name] for name in parts}
    figures = json.loads((tmp_path / "core/out/model.json").read_text())["extra_results"]
    for subset, part in parts.items():
        ours = ours_of(partial(score_all, scorer), tmp_path, part)
        assert differing(ours, theirs[subset]) == []
        check_rewards(ours, theirs[subset], atol=1e-4)
        assert ours.rows[-1].value == pytest.approx(figures[subset])
    assert 0 < np.mean(list(figures.values())) < 1

    # The only cause of a different verdict: the command never truncates, and a contract may.
    contract = dataclasses.replace(scorer.contract, seq_length=512, overlong="truncate_left")
    tokenizer = load_tokenizer(tiny_model / "export")
    cuts = RewardScorer(scorer.model, contract, tokenizer, layout, 8192)
    num_cut = 0
    for subset, part in parts.items():
        ours = ours_of(partial(score_all, cuts), tmp_path, part)
        complete = [
            number
            for number, row in enumerate(ours.predictions.rows)
            if not any(cuts.encode(text).truncated for text in row.item.texts)
        ]
        assert not {*differing(ours, theirs[subset])} & {*complete}
        num_cut += len(part.published) - len(complete)
    assert num_cut > 0
