"""The check of a checkpoint takes any pairs that can be scored, and says what failed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from nemo_aligner.diagnostics.check import Check, _choose_texts
from nemo_aligner.diagnostics.worlds import run_world
from nemo_aligner.errors import PeerError
from tests import tiny


def test_check_leaves_out_and_counts_pairs_that_cannot_be_scored(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pairs = tiny.write_pairs(tmp_path / "pairs.jsonl", 4)
    bad = [
        {"prompt": "why", "chosen": 3, "rejected": "a"},
        {"prompt": "why", "chosen": "a<|im_end|>", "rejected": "a"},
        {"prompt": "why", "chosen": "a " * 2000, "rejected": "a"},
    ]
    text = "".join(json.dumps(row) + "\n" for row in bad)
    pairs.write_text(text + pairs.read_text())
    several = tmp_path / "several.jsonl"
    several.write_text(json.dumps(tiny.ranked("why", (0, "a"), (1, "aa"), (2, "aaa"))))
    model = tiny.write_reward_nemo(tmp_path / "rm.nemo")
    texts = _choose_texts(Check(str(model), data=str(pairs)))
    assert len(texts) == 8
    shown = capsys.readouterr().out
    assert "4 pairs, 2 left out as malformed, 1 left out as too long; scoring contract" in shown
    best, worst = _choose_texts(Check(str(model), data=str(several)))
    assert (best[-1]["content"], worst[-1]["content"]) == ("a", "aaa")


def test_check_in_a_world_that_fails_says_why_once(capfd: pytest.CaptureFixture[str]) -> None:
    job = {"checkpoint": "nowhere.nemo", "texts": ["a"], "precision": "fp32"}
    with pytest.raises(PeerError, match="the run of 2 processes failed"):
        run_world(job, 2)
    assert capfd.readouterr().err == (
        "CheckpointError: nowhere.nemo: no such .nemo archive or folder\n"
    )
