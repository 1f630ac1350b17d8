"""Rewards of turns and steps for programs, and their evaluation."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import nemo_aligner as na
from nemo_aligner.contract.steps import StepSpan
from nemo_aligner.utils.errors import ConfigError, SettingsError
from tests import tiny
from tests.data.files import write

QUESTION = {"role": "user", "content": "why"}
TEXTS = [
    [QUESTION, {"role": "assistant", "content": "the cat\n\nsings"}],
    [QUESTION, {"role": "assistant", "content": "no"}],
]


def test_program_gets_rewards_of_steps_and_measures_them(tmp_path: Path) -> None:
    path = tiny.write_reward_nemo(tmp_path / "rm.nemo", "step_ends", seq_length=64)
    with na.RewardModel.from_pretrained(path) as model:
        found = model.score(TEXTS, steps=True)
        assert [each.rewards.shape for each in found] == [(2, 2), (1, 2)]
        assert found[0].spans == (StepSpan(1, 0, 7), StepSpan(1, 9, 14))
        last = np.stack([each.rewards[-1] for each in found])
        assert model.score(TEXTS).tobytes() == last.tobytes()
        both = {"helpfulness": True, "verbosity": None}
        record = {"prompt": "why", "completions": ["the cat", "sings"], "labels": [both, [0, 1]]}
        metrics = model.evaluate([record]).metrics
        (helpful, _), (second, verbose) = found[0].rewards.astype(float).tolist()
        squares = (helpful - 1) ** 2 + second**2 + (verbose - 1) ** 2
        assert metrics["loss"] == pytest.approx(squares / 3)
        judged = [[helpful >= 0.5, second < 0.5], [verbose >= 0.5]]
        assert metrics["step_accuracy"] == np.mean([np.mean(each) for each in judged])
        replies = {"responses": [text[-1]["content"] for text in TEXTS], "scores": [0, 1]}
        best = write(tmp_path / "best.jsonl", {"prompt": "why", **replies})
        weights = np.array(model.contract().attribute_weights)
        for how, make in (("last", lambda own: own[-1]), ("min", np.min), ("mean", np.mean)):
            texts = [
                np.array([make(column) for column in each.rewards.T], np.float32) @ weights
                for each in found
            ]
            measured = model.evaluate(best, task="best_of_n", aggregate=how).metrics
            assert measured["best of 2, its reward"] == pytest.approx(max(texts), rel=1e-6), how
            assert measured["best of 2"] == np.argmax(texts)
        judged = {"id": "gsm8k-0", "problem": "why", "steps": ["the cat", "sings"], "label": 1}
        rows = [judged, {**judged, "label": -1}]
        held, other = (write(tmp_path / f"{name}.jsonl", *rows) for name in ("held", "other"))
        table = model.evaluate(other, task="processbench", threshold_from=str(held)).table
        shown = "".join(table.split())  # lines are as wide as a log's
        assert f",thebestof{held}(" in shown
        assert "2items,2ofthemmeasuredhere,too)" in shown
        assert "0.5, the default" in model.evaluate(other, task="processbench").table
        with pytest.raises(
            SettingsError, match=r"threshold_from: got .*another file than data.path"
        ):
            model.evaluate(held, task="processbench", threshold_from=str(held))
    plain = tiny.write_reward_nemo(tmp_path / "plain.nemo", seq_length=64)
    with na.RewardModel.from_pretrained(plain) as model:
        with pytest.raises(ConfigError, match=r"one reward for each text, wanted .*turns"):
            model.score(TEXTS, steps=True)
        with pytest.raises(ConfigError, match=r"aggregate: got min, wanted last: .* one reward"):
            model.evaluate(best, task="best_of_n", aggregate="min")
        with pytest.raises(ConfigError, match=r"threshold_from: got x, wanted null: no steps"):
            model.evaluate(best, task="best_of_n", threshold_from="x")
