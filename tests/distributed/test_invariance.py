"""``nemo-aligner check`` on a tiny model: one reward at every layout, in any batch."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests import tiny
from tests.once import Once

VERB = "check"


@pytest.fixture(scope="module")
def folder(once: Once) -> Path:
    """With ``rm.nemo`` and ``pairs.jsonl``."""
    return once("invariance", train)


def train(folder: Path) -> None:
    base = tiny.write_base_nemo(folder / "base.nemo")
    pairs = tiny.write_pairs(folder / "pairs.jsonl", 24)
    tiny.run_script(
        "examples/train_reward_model.py",
        f"pretrained_checkpoint.restore_from_path={base}",
        f"model.data.data_prefix.train=[{pairs}]",
        f"exp_manager.explicit_log_dir={folder / 'run'}",
        "model.data.seq_length=128",
        "model.micro_batch_tokens=300",
        "model.global_batch_size=8",
        "model.optim.lr=3e-3",
        "model.optim.sched.warmup_steps=1",
        "trainer.rm.max_steps=3",
    )
    (folder / "run/checkpoints/megatron_gpt.nemo").rename(folder / "rm.nemo")


def check(folder: Path, *arguments: str) -> tuple[str, list[dict]]:
    """What the script prints, and the rows of its table."""
    output = folder / "table.json"
    done = tiny.run_verb(
        VERB,
        f"--checkpoint={folder / 'rm.nemo'}",
        f"--data={folder / 'pairs.jsonl'}",
        f"--output={output}",
        *arguments,
        timeout=500,
    )
    return done.stdout, json.loads(output.read_text())["rows"]


def test_every_layout_batch_and_the_server(folder: Path) -> None:
    pytest.importorskip("pytriton")
    shown, rows = check(folder, "--pairs=5", "--processes=4")
    assert "the same everywhere" in shown
    assert "does not fit: TP=4 PP=1 DP=1: " in shown
    assert max(row["difference"] for row in rows) < 1e-5
    assert sum(row["flips"] for row in rows) == 0
    assert {row["texts"] for row in rows} == {10}
    assert {row["compared"] for row in rows} == {"company", "layout", "training"}
    layouts = {row["layout"] for row in rows}
    assert {
        "TP=1 PP=1 DP=1",
        "TP=2 PP=1 DP=1",
        "TP=2+SP PP=1 DP=1",
        "TP=1 PP=2 DP=1",
        "TP=1 PP=1 DP=2",
        "TP=2 PP=2 DP=1",
        "server",
    } <= layouts
    for layout in layouts - {"server"}:
        assert {row["variant"] for row in rows if row["layout"] == layout} == {
            "alone",
            "all together",
            "small packs, order 1",
            "small packs, order 2",
            "from a prefix cache",
            "training",
            "training, recompute",
        }
    company = [row for row in rows if row["compared"] == "company"]
    assert len(company) == 4 * len(layouts - {"server"}) + 2
    assert all(row["changed"] == 0 for row in company)


def test_bf16_keeps_the_verdicts_beyond_its_tolerance(folder: Path) -> None:
    shown, rows = check(folder, "--pairs=6", "--processes=1", "--precision=bf16", "--no-server")
    assert "bf16: the same everywhere" in shown
    worst = {
        row["compared"]: row["difference"] for row in sorted(rows, key=lambda r: r["difference"])
    }
    assert worst["precision"] > 1e-5, "bf16 has to differ from fp32"
    assert worst["company"] == 0
    assert all(row["flips"] == 0 and row["ok"] for row in rows)


def test_a_world_that_torchrun_started_takes_its_layouts(folder: Path) -> None:
    done = tiny.run_verb(
        VERB, f"--checkpoint={folder / 'rm.nemo'}", "--pairs=3", processes=2, fresh=True
    )
    layouts = ("TP=1 PP=1 DP=2", "TP=2 PP=1 DP=1", "TP=2+SP PP=1 DP=1", "TP=1 PP=2 DP=1")
    assert all(layout in done.stdout for layout in layouts)
    assert done.stdout.count("the same everywhere") == 1
    assert "server" not in done.stdout
