"""Benchmarks of pairs: turns of an HHH query, and the figures of RM-Bench."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from nemo_aligner.contract.messages import Text, messages_of
from nemo_aligner.evaluation.predictions import Item, Prediction
from nemo_aligner.evaluation.run_task import run_task
from nemo_aligner.evaluation.tasks import TASKS, find_task
from nemo_aligner.utils.errors import DataError
from tests.evaluation.refusals import refusal
from tests.evaluation.tasks.scorers import by_length, by_number, write
from tests.harness.scorers import source_of


def test_hhh_query_has_its_turns(tmp_path: Path) -> None:
    query = "Hi.\n\nAssistant:  Hello?\n\nHuman: 2+2?"
    path = write(tmp_path / "b.jsonl", [{**find_task("hhh").sample, "input": query}])
    (judged,) = run_task(find_task("hhh"), path, source_of(by_number)).predictions.rows
    turns = [("user", "Hi."), ("assistant", "Hello?"), ("user", "2+2?")]
    texts = [
        [{"role": role, "content": text} for role, text in (*turns, ("assistant", reply))]
        for reply in ("4", "5")
    ]
    assert [*judged.item.texts] == texts
    assert judged.right == 0


def test_rm_bench_file_of_one_domain_has_it_in_its_name(tmp_path: Path) -> None:
    task = TASKS["rm_bench"]
    record = {key: value for key, value in task.sample.items() if key != "domain"}
    path = write(tmp_path / "safety-refuse_filtered.json", [record])
    packed = path.with_suffix(".json.gz")
    packed.write_bytes(gzip.compress(path.read_bytes()))
    for file in (path, packed):
        report = run_task(task, file, source_of(by_length))
        assert {"safety-refuse", "safety-refuse, hard", "safety"} <= report.metrics.keys()
    path = write(tmp_path / "other_filtered.json", [record])
    error = refusal(DataError, run_task, task, path, source_of(by_length))
    assert "other_filtered.json:1: " in error
    assert "'domain'" in error


def official_rm_bench(items: Sequence[tuple[str, np.ndarray]]) -> dict[str, float]:
    """Compute the figures as ``compute_accuracy`` of THU-KEG/RM-Bench does."""
    figures: dict[str, list[float]] = {}
    for domain in ("chat", "math", "code", "safety"):
        domain_rewards = [rewards for name, rewards in items if name.startswith(domain)]
        wins = np.mean([r[:3, None] > r[None, 3:] for r in domain_rewards], axis=0)
        easy, hard = wins[np.tril_indices(3, -1)].mean(), wins[np.triu_indices(3, 1)].mean()
        figures[domain] = [easy, np.diag(wins).mean(), hard]
    with_all = {**figures, "all": np.mean(list(figures.values()), axis=0)}
    kinds = ("easy", "normal", "hard")
    named = {
        f"{name}, {kind}": value
        for name, values in with_all.items()
        for kind, value in zip(kinds, values, strict=True)
    }
    domains = {name: float(np.mean(shares)) for name, shares in figures.items()}
    return {**named, **domains, "RM-Bench": float(np.mean(list(domains.values())))}


def test_rm_bench_equals_its_own_rule_with_unequal_halves_of_safety() -> None:
    rng = np.random.default_rng(0)
    task = TASKS["rm_bench"]
    names = ["chat", "math", "code", *["safety-refuse"] * 3, "safety-response", "math"]
    for _ in range(200):
        items = [(name, rng.integers(0, 4, 6).astype(float)) for name in names]
        judged = [
            Prediction(Item("1", name, ("",) * 6, 3), rewards, task.judge(None, rewards))  # type: ignore[arg-type]
            for name, rewards in items
        ]
        rows = {row.name: row.value for row in task.summarise(judged)}
        expected = official_rm_bench(items)
        assert {name: rows[name] for name in expected} == pytest.approx(expected)


def test_ppe_preference_counts_votes_without_ties_on_50_items(tmp_path: Path) -> None:
    """A vote is right if the winner's response has the higher reward; ties are dropped.

    Copies of PPE's code for human_preference_v1 also keep only rows whose winner is model_a or
    model_b.
    """
    winners = ("model_a", "model_b", "tie", "tie (bothbad)", "model_b")
    records = [
        {
            "question_id": str(n), "winner": winners[n % 5], "prompt": "?",
            "response_1": str(n % 3), "response_2": str(n * 5 % 4),
            "language": ("English", "German", "Russian")[n % 3],
        }
        for n in range(50)
    ]  # fmt: skip
    task = TASKS["ppe_preference"]
    report = run_task(task, write(tmp_path / "p.jsonl", records), source_of(by_number))
    votes = [record for record in records if "tie" not in record["winner"]]
    right = [
        int(vote["response_1"]) > int(vote["response_2"])
        if vote["winner"] == "model_a"
        else int(vote["response_2"]) > int(vote["response_1"])
        for vote in votes
    ]
    assert [bool(row.right) for row in report.predictions.rows] == right
    assert report.accuracy == pytest.approx(sum(right) / 30)
    assert report.counts == {"kept": 30, "without a verdict": 20}
    english = [
        right for right, vote in zip(right, votes, strict=True) if vote["language"][0] == "E"
    ]
    assert report.metrics["English"] == pytest.approx(np.mean(english))


def by_sum(texts: Sequence[Text]) -> np.ndarray:
    """Score a call by the sum of its arguments, and text by 2.5."""
    rewards = []
    for text in texts:
        turn = messages_of(text)[-1]
        calls = turn.get("tool_calls", [])
        rewards.append(sum(sum(call["function"]["arguments"].values()) for call in calls) or 2.5)
    return np.array(rewards, dtype=float)[:, None]


def test_fc_rewardbench_scores_calls_as_calls_on_50_items(tmp_path: Path) -> None:
    """Outputs as BFCL writes them, as OpenAI does, as JSON; one that is no call is text."""
    shapes: list[Callable[[int], Any]] = [
        lambda a: [{"add": {"a": a}}],
        lambda a: [{"name": "add", "arguments": {"a": a}}],
        lambda a: json.dumps([{"add": {"a": a}}]),
        lambda a: [{"type": "function", "function": {"name": "add", "arguments": {"a": a}}}],
        lambda a: f"add(a={a}",
    ]
    sample = TASKS["fc_rewardbench"].sample
    tools = [{"name": "add", "description": "Add.", "parameters": {"type": "dict"}}]
    records, right = [], []
    for n in range(50):
        chosen, rejected = 1 + n % 4, 1 + n * 3 % 5
        shape = shapes[n % 5]
        outputs = {"chosen_output": shapes[n % 4](chosen), "rejected_output": shape(rejected)}
        kinds = {"error_type": "Parsing error" if n % 5 == 4 else "Parameter value error"}
        records.append({**sample, "test_id": str(n), **outputs, **kinds})
        records[-1]["tools"] = json.dumps(tools) if n % 2 else tools
        right.append(chosen > (2.5 if n % 5 == 4 else rejected))
    path = write(tmp_path / "f.jsonl", records)
    report = run_task(TASKS["fc_rewardbench"], path, source_of(by_sum))
    assert [bool(row.right) for row in report.predictions.rows] == right
    assert report.accuracy == pytest.approx(np.mean(right))
    (text,) = {str(row.item.texts[0].tools) for row in report.predictions.rows}  # type: ignore[union-attr]
    assert text == str([{"type": "function", "function": tools[0]}])
    assert {row.name for row in report.rows} == {"Parsing error", "Parameter value error", "all"}
