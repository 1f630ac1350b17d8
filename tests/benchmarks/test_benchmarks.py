"""The benchmarks run, on a tiny model, and compare the same computations."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests import tiny

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With a Hugging Face checkpoint in ``hf/`` and ``pairs.jsonl``."""
    folder = tmp_path_factory.mktemp("benchmark")
    tiny.write_hf_checkpoint(folder / "hf", max_position_embeddings=2048)
    tiny.write_pairs(folder / "pairs.jsonl", 12)
    return folder


def run(script: str, folder: Path, *arguments: str) -> list[dict]:
    """The rows of the benchmark's table."""
    output = folder / "rows.json"
    done = tiny.run_script(
        script,
        f"--model={folder / 'hf'}",
        f"--data={folder / 'pairs.jsonl'}",
        f"--work={folder / 'work'}",
        f"--output={output}",
        *arguments,
    )
    assert "machine: " in done.stdout
    return json.loads(output.read_text())["rows"]


def test_scoring_gives_the_rewards_of_transformers(folder: Path) -> None:
    rows = run("benchmarks/scoring.py", folder, "--pairs=6", "--turns=1", "--threads=1")
    assert [row["scorer"] for row in rows] == ["nemo_aligner", "transformers"] * 3
    assert all(row["rewards/s"] > 0 for row in rows)
    assert all(row["largest |difference|"] < 1e-5 for row in rows[1::2])


def test_training_has_the_loss_of_trl(folder: Path, trl_python: Path) -> None:
    rows = run(
        "benchmarks/training.py",
        folder,
        f"--trl-python={trl_python}",
        "--trl-batch=2",
        "--global-batch=4",
        "--turns=1",
        "--threads=1",
    )
    assert [row["trainer"] for row in rows] == ["nemo_aligner", "TRL, batch 2"]


def test_scaling_measures_what_the_cost_model_says(tmp_path: Path) -> None:
    output = tmp_path / "scaling.json"
    done = tiny.run_script(
        "benchmarks/scaling.py",
        *("--tables", "ranks"),
        *("--ranks=2", "--layers=2", "--hidden=128", "--seq-length=64", "--pairs=4", "--steps=1"),
        f"--output={output}",
    )
    assert "expected/measured" in done.stdout
    rows = json.loads(output.read_text())["tables"]["ranks"]
    assert [row["ranks"] for row in rows] == ["one rank", "DP=2", "TP=2", "TP=2+SP", "PP=2"]
    for row in rows:
        seconds = row["seconds"]
        parts = ("data", "forward", "backward", "reduce", "optimizer", "other")
        assert sum(seconds[part] for part in parts) == pytest.approx(seconds["step"])
        assert all(seconds[part] > 0 for part in (*parts, "save", "written"))
        assert row["tokens"] == 4 * 2 * 64
        assert row["expected"]["total"] == pytest.approx(row["measured"]["total"], rel=0.1)
