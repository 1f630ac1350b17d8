"""The rotating log of the highest-rewarded samples."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from nemo_aligner.config.serving import FrontConfig
from nemo_aligner.contract.messages import Conversation
from nemo_aligner.serving import reward_log
from nemo_aligner.serving.protocols import ScoredRows
from nemo_aligner.serving.reward_log import RewardLog
from nemo_aligner.utils.errors import ConfigError


def lines(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]


def scored(rewards: list[float], **more: Any) -> ScoredRows:
    column = np.array(rewards, dtype=np.float32)[:, None]
    return ScoredRows(column, {}, np.zeros(len(rewards), dtype=bool), **more)


def add(log: RewardLog, rewards: list[float], samples: list[Any] | None = None) -> None:
    rows = scored(rewards)
    log.add(samples or [f"text {reward}" for reward in rewards], rows.rewards[:, 0], rows)


def test_each_window_has_its_highest_rewards_and_old_ones_are_dropped(tmp_path: Path) -> None:
    file = tmp_path / "top.jsonl"
    log = RewardLog(file, num_samples=3, window=10, num_old_files=2)
    generator = np.random.default_rng(5)
    windows = [generator.normal(size=10).round(2).tolist() for _ in range(4)]
    rewards = [reward for window in windows for reward in window]
    for first in range(0, 40, 7):  # requests of seven rows, across the ends of windows
        add(log, [float("nan"), *rewards[first : first + 7]])
    add(log, [2.0, 2.0, 2.0, 2.0])
    log.close()
    logged = [lines(path) for path in (tmp_path / "top.jsonl.2", tmp_path / "top.jsonl.1", file)]
    for window, entries in zip((*windows[2:], [2.0] * 4), logged, strict=True):
        highest = sorted(window, reverse=True)[:3]
        assert [entry["reward"] for entry in entries] == pytest.approx(highest)
        assert [entry["text"] for entry in entries] == [f"text {reward}" for reward in highest]
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "top.jsonl",
        "top.jsonl.1",
        "top.jsonl.2",
    ]
    RewardLog(file, 3, 10, 2).close()  # the next start keeps the last log as the first earlier one
    assert lines(tmp_path / "top.jsonl.1") == logged[2]
    assert lines(file) == []


def test_lines_have_the_parts_and_the_sample_in_its_form(tmp_path: Path) -> None:
    turns = [{"role": "user", "content": "\ud800é"}]
    tools = [{"type": "function", "function": {"name": "f"}}]
    samples = ["raw", [5, 6], turns, Conversation(turns, tools)]
    parts = np.array([[1.0, np.nan], [2.0, 1.0], [3.0, 1.0], [4.0, 1.0]])
    rows = scored([1, 2, 3, 4], parts=parts, part_names=("model", "judge"))
    log = RewardLog(tmp_path / "log", 10, 10, 0)
    log.add(samples, rows.rewards[:, 0], rows)
    log.close()
    entries = lines(tmp_path / "log")
    assert [entry["reward"] for entry in entries] == [4, 3, 2, 1]
    assert entries[0]["tools"] == tools
    assert (entries[2]["tokens"], entries[3]["text"]) == ([5, 6], "raw")
    assert entries[1]["messages"][0]["content"].endswith("é")
    assert entries[3]["parts"] == {"model": 1.0, "judge": None}
    assert entries[0]["time"].endswith("+00:00")


def test_unfinished_window_is_written_now_and_then_and_a_full_disk_only_logged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "top.jsonl"
    assert RewardLog.of(FrontConfig()) is None
    log = RewardLog.of(FrontConfig(top_rewards_file=str(file)))
    assert log is not None
    add(log, [1.0])
    monkeypatch.setattr(reward_log, "_WRITE_SECS", 0.0)
    add(log, [2.0])
    log._writer.submit(lambda: None).result()
    assert [entry["reward"] for entry in lines(file)] == [2.0, 1.0]

    def refuse(*arguments: Any, **named: Any) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched, caplog.at_level(logging.WARNING):
        patched.setattr(Path, "write_text", refuse)
        add(log, [3.0])
        log.close()
    assert "No space left on device" in caplog.text
    with pytest.raises(ConfigError, match=r"top_rewards_file: .*: it cannot be written: "):
        RewardLog(tmp_path / "none" / "log", 1, 1, 1)
