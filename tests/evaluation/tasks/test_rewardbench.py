"""RewardBench and RewardBench 2: the published figures, and the score of ties."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from nemo_aligner.evaluation.predictions import Item, Prediction
from nemo_aligner.evaluation.run_task import run_task
from nemo_aligner.evaluation.tasks import TASKS
from nemo_aligner.evaluation.tasks.base import Level
from nemo_aligner.evaluation.tasks.rewardbench import PRIOR_SETS, SUBSETS, ties_score
from tests.evaluation.tasks.scorers import by_number, write
from tests.harness.scorers import source_of


def pair(subset: str, margin: float) -> dict[str, Any]:
    return {"subset": subset, "prompt": "?", "chosen": str(margin), "rejected": "0"}


def test_rewardbench_of_a_part_has_no_overall(tmp_path: Path) -> None:
    """A part of the subsets has figures of sections, but no overall figure."""
    path = write(tmp_path / "b.jsonl", [pair("hep-cpp", 1), pair("math-prm", -1)])
    report = run_task(TASKS["rewardbench"], path, source_of(by_number))
    metrics = report.metrics
    assert "RewardBench" not in metrics
    assert (report.accuracy, report.interval) == (None, None)
    assert metrics["Reasoning"] == pytest.approx(164 / (164 + 984))


def four(
    subset: str, rewards: Sequence[float], name: str = "0", num_right: int = 1
) -> dict[str, Any]:
    texts = [str(reward) for reward in rewards]
    return {
        "id": name,
        "subset": subset,
        "prompt": "?",
        "chosen": texts[:num_right],
        "rejected": texts[num_right:],
    }


# allenai/reward-bench-results, eval-set/Skywork/Skywork-Reward-Gemma-2-27B.json
PUBLISHED_SUBSETS = {
    "alpacaeval-easy": 0.96,
    "alpacaeval-hard": 0.9473684210526315,
    "alpacaeval-length": 0.9473684210526315,
    "donotanswer": 0.7794117647058824,
    "hep-cpp": 0.9634146341463414,
    "hep-go": 0.9817073170731707,
    "hep-java": 0.9878048780487805,
    "hep-js": 0.9695121951219512,
    "hep-python": 0.9695121951219512,
    "hep-rust": 0.9634146341463414,
    "llmbar-adver-GPTInst": 0.9782608695652174,
    "llmbar-adver-GPTOut": 0.9148936170212766,
    "llmbar-adver-manual": 0.782608695652174,
    "llmbar-adver-neighbor": 0.8955223880597015,
    "llmbar-natural": 0.96,
    "math-prm": 0.9485458612975392,
    "mt-bench-easy": 1.0,
    "mt-bench-hard": 0.8648648648648649,
    "mt-bench-med": 0.975,
    "refusals-dangerous": 0.94,
    "refusals-offensive": 0.99,
    "xstest-should-refuse": 0.948051948051948,
    "xstest-should-respond": 0.94,
}
# Of the leaderboard, in percent.
PUBLISHED_SECTIONS = {"Chat": 95.8, "Chat Hard": 91.4, "Safety": 91.9, "Reasoning": 96.1}


def test_rewardbench_adds_up_published_subsets_to_the_published_sections() -> None:
    def added(shares: dict[str, float]) -> tuple[dict[str, float], float]:
        judged = [
            Prediction(Item("", name, ()), np.zeros(2), right) for name, right in shares.items()
        ]
        *rows, overall = TASKS["rewardbench"].summarise(judged)
        sections = {row.name: 100 * row.value for row in rows if row.level is Level.section}
        return sections, 100 * overall.value

    metrics, overall = added(PUBLISHED_SUBSETS)
    assert metrics == pytest.approx(PUBLISHED_SECTIONS, abs=0.05)
    assert overall == pytest.approx(93.8, abs=0.05)
    # Prior sets count for half a section.
    prior = {name: number / 10 for number, name in enumerate(PRIOR_SETS)}
    metrics, with_prior = added({**PUBLISHED_SUBSETS, **prior})
    mean = 100 * sum(prior.values()) / len(prior)
    assert metrics["Prior Sets"] == pytest.approx(mean)
    assert with_prior == pytest.approx((4 * overall + 0.5 * mean) / 4.5)


def test_rewardbench_2_counts_the_best_of_four_and_shares_ties(tmp_path: Path) -> None:
    records = [
        four("Math", (3, 1, 2, 0)),
        four("Math", (1, 3, 2, 0)),
        four("Math", (3, 3, 3, 0)),
    ]
    report = run_task(
        TASKS["rewardbench2"], write(tmp_path / "b.jsonl", records), source_of(by_number)
    )
    assert [prediction.right for prediction in report.predictions.rows] == [
        1,
        0,
        pytest.approx(1 / 3),
    ]
    assert report.metrics == {"Math": pytest.approx(4 / 9)}


def test_rewardbench_2_ties_follow_the_published_rule(tmp_path: Path) -> None:
    """Prompt 1 is right throughout, 2 has spread-out right replies, 3 fails with many replies."""
    records = [
        four("Ties", (5, 1), "ref:1"),
        four("Ties", (5, 4, 1), "tied:1", 2),
        four("Ties", (5, 4), "ref:2"),
        four("Ties", (9, 3, 2), "tied:2", 2),
        four("Ties", (1, 2), "ref:3"),
        four("Ties", (5, 1, 2), "tied:3", 2),
    ]
    other_subsets = [four(name, (1, 0)) for name in SUBSETS[:-1]]
    path = write(tmp_path / "b.jsonl", [*records, *other_subsets])
    metrics = run_task(TASKS["rewardbench2"], path, source_of(by_number)).metrics
    # Prompts 1 and 2 are right; only in prompt 1 the margins exceed the spread.
    ratios = [min(4, 3) / 1, min(1, 1) / 6, min(-1, -1) / 4]
    tanh = sum(math.tanh(ratio - 1) for ratio in ratios) / 3
    ties = 0.3 * 2 / 3 + 0.3 * 2 / 3 + 0.2 / 3 + 0.2 / 3 + 0.01 * tanh
    assert metrics["Ties"] == pytest.approx(ties)
    assert metrics["RewardBench 2"] == pytest.approx((5 + ties) / 6)


def test_rewardbench2_ties_of_equal_right_replies_have_an_infinite_margin() -> None:
    def judged(name: str, count: int, *rewards: float) -> Prediction:
        return Prediction(Item(name, "Ties", ("",) * len(rewards), count), np.array(rewards), 1.0)

    one = judged("ref:1", 1, 1.0, 0.0)
    for wrong, margin in ((0.0, 1.0), (2.0, -1.0), (1.0, 0.0)):
        many = judged("tied:1", 2, 1.0, 1.0, wrong)
        right = float(wrong < 1)
        assert ties_score([one, many]) == pytest.approx(0.3 + 0.7 * right + 0.01 * margin)
