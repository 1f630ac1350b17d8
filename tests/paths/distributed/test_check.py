"""``nemo-aligner check`` on a tiny model: equal rewards at every layout and in any batch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.distributed.layouts import archive
from tests.harness import tiny


def check(
    plain: Path, inputs: Path, folder: Path, *arguments: str, **how: Any
) -> tuple[str, list[dict]]:
    """Run the check; return its output and the rows of its table."""
    output = folder / "table.json"
    done = tiny.run_verb(
        "check",
        f"--checkpoint={archive(plain / 'ranking')}",
        f"--data={inputs / 'pairs.jsonl'}",
        f"--output={output}",
        *arguments,
        timeout=500,
        **how,
    )
    return done.stdout, json.loads(output.read_text())["rows"]


def test_check_of_every_layout_batch_and_the_server(
    plain: Path, inputs: Path, tmp_path: Path
) -> None:
    shown, rows = check(plain, inputs, tmp_path, "--pairs=3", "--processes=2")
    assert "the same everywhere" in shown
    assert max(row["difference"] for row in rows) < 1e-5
    assert sum(row["flips"] for row in rows) == 0
    assert {row["texts"] for row in rows} == {6}
    assert {row["compared"] for row in rows} == {"company", "layout", "training"}
    layouts = {row["layout"] for row in rows}
    assert {
        "TP=1 PP=1 DP=1",
        "TP=2 PP=1 DP=1",
        "TP=2+SP PP=1 DP=1",
        "TP=1 PP=2 DP=1",
        "TP=1 PP=1 DP=2",
        "TP=1 CP=2 PP=1 DP=1",
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


def test_check_in_a_world_of_torchrun_takes_its_layouts_and_keeps_the_verdicts_of_bf16(
    plain: Path, inputs: Path, tmp_path: Path
) -> None:
    """Its ranks are forks, with torchrun's variables."""
    in_bf16 = ("--pairs=3", "--precision=bf16")
    shown, rows = check(plain, inputs, tmp_path, *in_bf16, processes=2)
    layouts = (
        "TP=1 PP=1 DP=2",
        "TP=2 PP=1 DP=1",
        "TP=2+SP PP=1 DP=1",
        "TP=1 PP=2 DP=1",
        "TP=1 CP=2 PP=1 DP=1",
    )
    assert {row["layout"] for row in rows} == {*layouts}
    assert all(layout in shown for layout in layouts)
    assert shown.count("bf16: the same everywhere") == 1
    worst = {
        row["compared"]: row["difference"] for row in sorted(rows, key=lambda r: r["difference"])
    }
    assert worst["precision"] > 1e-5, "bf16 has to differ from fp32"
    assert worst["company"] == 0
    assert all(row["flips"] == 0 and row["ok"] for row in rows)
