"""The command check: which pairs it scores, and what it prints and writes."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from nemo_aligner.checkpoint.nemo.reward_model import read_text_rules
from nemo_aligner.serving.client import RewardClient
from nemo_aligner.tools import check
from nemo_aligner.tools.check import Check, choose_samples, run_check
from nemo_aligner.tools.invariance import (
    Scored,
)
from nemo_aligner.utils.errors import ConfigError
from tests.harness import tiny

# Rewards of two pairs, with two attributes.
REFERENCE = np.array([[2.0, 1.0], [1.0, 1.0], [0.5, 0.0], [0.5, 1e-6]])


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
    rules = read_text_rules(model)
    texts = choose_samples(Check(str(model), data=str(pairs)), *rules)  # type: ignore[arg-type]
    assert len(texts) == 8
    shown = capsys.readouterr().out
    assert "4 pairs, 2 left out as malformed, 1 left out as too long; scoring contract" in shown
    best, worst = choose_samples(Check(str(model), data=str(several)), *rules)  # type: ignore[arg-type]
    assert (best[-1]["content"], worst[-1]["content"]) == ("a", "aaa")


@pytest.mark.parametrize(("seq_length", "tokens"), [(64, 8192), (9000, 9000)])
def test_server_of_a_check_takes_the_longest_sample_and_any_number_of_samples(
    seq_length: int, tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[str] = []

    @contextmanager
    def running(settings: list[str], log: Path) -> Iterator[str]:
        started.extend(settings)
        yield "http://127.0.0.1:1"

    def score(client: RewardClient, texts: list[str]) -> np.ndarray:
        assert client._timeout_s is None
        return np.zeros((len(texts), 1))

    monkeypatch.setattr(check, "running_server", running)
    monkeypatch.setattr(RewardClient, "score", score)
    check.score_over_http("rm.nemo", "fp32", ["a", "b"], seq_length)
    assert f"model.micro_batch_tokens={tokens}" in started


def test_check_says_once_what_does_not_fit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    rewards = {"TP=1": {"alone": REFERENCE, "all together": REFERENCE + 1}}
    scored = Scored(rewards, REFERENCE, ["TP=4: why not", "TP=4: why not"])
    monkeypatch.setattr(check, "run_world", lambda job, size: scored)
    model = tiny.write_reward_nemo(tmp_path / "rm.nemo")
    output = tmp_path / "new/table.json"
    assert not run_check(Check(str(model), pairs=1, processes=1), output)
    shown = capsys.readouterr().out
    assert shown.count("TP=4: why not\n") == 1
    table = json.loads(output.read_text())
    assert [row["ok"] for row in table["rows"]] == [True, False]
    assert table["summary"] in shown
    with pytest.raises(ConfigError, match=r"^output: pairs\.jsonl is the file of --data"):
        run_check(Check(str(model), data="pairs.jsonl"), Path("pairs.jsonl"))
