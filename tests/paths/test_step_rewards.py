"""Rewards of turns and steps in the Python API, and their evaluation."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import nemo_aligner as na
from nemo_aligner.api.reward_model import release_models
from nemo_aligner.checkpoint.nemo.reward_model import load_reward_model, save_reward_model
from nemo_aligner.config.common import Aggregate
from nemo_aligner.contract.from_settings import with_aggregate
from nemo_aligner.contract.steps import StepSpan
from nemo_aligner.distributed.launch import single_process
from nemo_aligner.distributed.layout import initialize_layout
from nemo_aligner.integrations.in_process import InProcessScorer
from nemo_aligner.serving.engine.scorer import load_scorer
from nemo_aligner.utils.errors import ConfigError, DataError, SettingsError
from tests.data.files import write
from tests.harness import tiny
from tests.harness.scorers import score_tokens

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
        shown = "".join(table.split())  # lines are as wide as in a log
        assert f",thebestof{held}(" in shown
        assert "2items,2ofthemalsomeasuredhere)" in shown
        assert "0.5, the default" in model.evaluate(other, task="processbench").table
        with pytest.raises(
            SettingsError, match=r"threshold_from: got .*another file than data.path"
        ):
            model.evaluate(held, task="processbench", threshold_from=str(held))
    plain = tiny.write_reward_nemo(tmp_path / "plain.nemo", seq_length=64)
    with na.RewardModel.from_pretrained(plain) as model:
        with pytest.raises(ConfigError, match=r"one reward for each sample; wanted .*turns"):
            model.score(TEXTS, steps=True)
        with pytest.raises(ConfigError, match=r"aggregate: got min, but .* one reward for each"):
            model.evaluate(best, task="best_of_n", aggregate="min")
        with pytest.raises(ConfigError, match=r"threshold_from: got x"):
            model.evaluate(best, task="best_of_n", threshold_from="x")


def write_rules(stepped: Path) -> dict[str, Path]:
    """Write the pair model once for each rule that combines the rewards of steps."""
    paths = {}
    with single_process():
        made = load_reward_model(stepped, initialize_layout())
        pairs = dataclasses.replace(made.contract, reward_model_type="binary_ranking")
        for how in Aggregate:
            paths[how.value] = path = stepped.with_suffix(f".{how.value}.nemo")
            contract = with_aggregate(pairs, how.value)
            save_reward_model(path, made.model, made.config, made.tokenizer, contract)
    return paths


def merge(rewards: np.ndarray, how: str) -> np.ndarray:
    """A plain implementation of the rule, for the rewards ``[S, A]`` of one sample."""
    exact = rewards.astype(np.float64)
    merged = {
        "last": exact[-1],
        "min": exact.min(axis=0),
        "mean": exact.sum(axis=0) / len(exact),
        "product": np.log(np.prod(1 / (1 + np.exp(-exact)), axis=0)),
    }
    return merged[how]


def test_rule_of_the_contract_makes_one_reward_of_a_text_everywhere(tmp_path: Path) -> None:
    paths = write_rules(tiny.write_reward_nemo(tmp_path / "rm.nemo", "step_ends", seq_length=64))
    good, bad = (text[-1]["content"] for text in TEXTS)
    record = {"prompt": "why", "chosen": bad, "rejected": f"{good}\n\nno"}
    pairs = [tiny.chat("why", record[side]) for side in ("chosen", "rejected")]
    hashes = set()
    for how, path in paths.items():
        with na.RewardModel.from_pretrained(path) as model:
            contract = model.contract()
            hashes.add(contract.hash)
            steps = [text.rewards for text in model.score([*TEXTS, *pairs], steps=True)]
            assert [*map(len, steps)] == [2, 1, 1, 3]
            expected_by_rule = {
                rule: np.stack([merge(of_text, rule) for of_text in steps]) for rule in paths
            }
            rewards = model.score([*TEXTS, *pairs])
            np.testing.assert_allclose(rewards, expected_by_rule[how], rtol=1e-6, atol=1e-7)
            rows = model.score_rows([*TEXTS, "", *pairs]).rewards
            assert rows[[0, 1, 3, 4]].tobytes() == rewards.tobytes()
            weights = np.array(contract.attribute_weights)
            for setting in (None, *paths):  # pairs, by the contract's rule or another one
                more: dict[str, Any] = {} if setting is None else {"aggregate": setting}
                measured = model.evaluate([record], **more)
                row = measured.rows[0]["rewards"]
                expected = expected_by_rule[setting or how][2:] @ weights
                assert [row["chosen"], row["rejected"]] == pytest.approx(expected, rel=1e-5)
                assert measured.accuracy == float(expected[0] > expected[1])
                is_other = setting not in (None, how)
                assert ("as set" in measured.table) == is_other, (how, setting)
        release_models()
        with single_process():
            scorer = load_scorer(path, initialize_layout())
            in_process = InProcessScorer(scorer).score_rows([*TEXTS, *pairs]).rewards
            assert in_process.tobytes() == rewards.tobytes()
            ids = scorer.encode(TEXTS[0]).token_ids
            if how == "last":
                assert score_tokens(scorer, [ids]).tobytes() == rewards[:1].tobytes()
            else:
                with pytest.raises(DataError, match=f"is the {how} over its steps"):
                    score_tokens(scorer, [ids])
    assert len(hashes) == len(paths)


def test_rule_for_pairs_is_none_for_ratings(tmp_path: Path) -> None:
    path = tiny.write_reward_nemo(tmp_path / "rm.nemo", "step_ends", seq_length=64)
    record = {"prompt": "why", "completions": ["the cat"], "labels": [[0, 1]]}
    with (
        na.RewardModel.from_pretrained(path) as model,
        pytest.raises(ConfigError, match=r"aggregate: got min, but .*ratings"),
    ):
        model.evaluate([record], aggregate="min")
