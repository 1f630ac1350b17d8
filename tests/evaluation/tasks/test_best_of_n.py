"""Best of n, and the correctness sets of PPE."""

from __future__ import annotations

import math
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from nemo_aligner.evaluation.run_task import run_task
from nemo_aligner.evaluation.tasks import TASKS
from nemo_aligner.evaluation.tasks.best_of_n import best_of
from tests.evaluation.tasks.scorers import by_number, write
from tests.harness.scorers import source_of


def ppe(number: int, right: set[int], pairs: list[list[int]], **more: Any) -> dict[str, Any]:
    """Build a record as PPE publishes it, with 32 replies; reply n is the number n."""
    replies = {f"response_{reply}": str(reply) for reply in range(1, 33)}
    scores = [index in right for index in range(32)]
    record = {"question_id": number, "prompt": "?", "model_name": "m", "scores": scores}
    return {**record, **replies, "sampled_conflict_pairs": pairs, **more}


def test_ppe_counts_its_pairs_and_the_best_of_k(tmp_path: Path) -> None:
    """The reward is the number of the reply, so the last one of any k is the best."""
    records = [
        ppe(1, {31}, [[31, 0], [0, 31]], category="law"),
        ppe(2, {0, 1}, [[0, 31], [1, 2], [30, 1], [1, 3]], category="math"),
    ]
    report = run_task(
        TASKS["ppe_correctness"], write(tmp_path / "p.jsonl", records), source_of(by_number)
    )
    metrics = report.metrics
    assert (metrics["law"], metrics["math"], metrics["pairs"]) == (1, 0, 2 / 6)
    assert [row.count for row in report.rows if row.name in ("law", "pairs")] == [2, 6]
    # For the first prompt a share k / 32 of the choices has the last, right reply. For the second
    # prompt a choice is right only if it consists of the first two replies.
    shares = {
        k: [k / 32, math.comb(2, k) / math.comb(32, k) if k > 1 else 2 / 32] for k in range(1, 33)
    }
    for k in (1, 2, 4, 8, 16, 32):
        assert metrics[f"best of {k}"] == pytest.approx(sum(shares[k]) / 2)
    area = sum(map(sum, shares.values())) / 64
    assert metrics["area under best of k"] == pytest.approx(area)
    best = [[k / 32, 1 - math.comb(30, k) / math.comb(32, k)] for k in range(1, 33)]
    assert metrics["loss of best of k"] == pytest.approx(sum(map(sum, best)) / 64 - area)
    assert [prediction.right for prediction in report.predictions.rows] == [1, 0]


def test_best_of_n_is_the_mean_over_every_choice_and_over_equal_rewards() -> None:
    rng = np.random.RandomState(0)
    rewards, scores = rng.randn(7), rng.randn(7)
    for n in (1, 2, 4, 7):
        every = [max(choice, key=rewards.__getitem__) for choice in combinations(range(7), n)]
        assert best_of(n, rewards, scores) == pytest.approx(scores[every].mean())
    rewards, scores = np.array([1.0, 1.0, 0.0]), np.array([4.0, 2.0, 0.0])
    expected_scores = [best_of(n, rewards, scores) for n in (1, 2, 3)]
    assert expected_scores == pytest.approx([2, (3 + 4 + 2) / 3, 3])
    # With thousands of replies. The mean of the larger of two of 0 ... K - 1 is (2 K - 1) / 3.
    many = np.arange(3000.0)
    assert best_of(1, many, many) == pytest.approx(1499.5)
    assert best_of(2, many, many) == pytest.approx((2 * 3000 - 1) / 3)
    assert best_of(1500, many, many) > 2997


def test_best_of_n_rows_have_intervals_over_prompts(tmp_path: Path) -> None:
    records = [
        {"prompt": "?", "responses": ["3", "2", "1", "0"], "scores": [first, 1, 1, 1]}
        for first in (5, 1)
    ]
    report = run_task(
        TASKS["best_of_n"], write(tmp_path / "b.jsonl", records), source_of(by_number)
    )
    metrics = report.metrics
    # Among the six pairs of the rewards 3, 2, 1, 0, the best is 3 in three, 2 in two, 1 in one.
    rewards = [metrics.pop(f"best of {n}, its reward") for n in (1, 2, 4)]
    assert rewards == pytest.approx([1.5, (3 * 3 + 2 * 2 + 1) / 6, 3])
    characters = [metrics.pop(f"best of {n}, its characters") for n in (1, 2, 4)]
    assert characters == pytest.approx([1, 1, 1])
    assert metrics == {
        "best of 1": 1.5,
        "best of 2": 2,
        "best of 4": 3,
        "the highest score of every prompt": 3,
    }
    last = report.rows[2]
    assert (last.low, last.high) == (1, 5)
    # The reward of the best of four is 3 for both prompts, of which no resample differs.
    (certain,) = (row for row in report.rows if row.name == "best of 4, its reward")
    assert (certain.value, certain.low, certain.high) == (3, None, None)


def digits(number: int, count: int) -> list[int]:
    """The rewards of an item's replies, with many equal ones."""
    return [(number * 7 + place * place * 3 + number * place) % 5 for place in range(count)]


def if_record(number: int) -> dict[str, Any]:
    """Build a record as IF-RewardBench publishes it; the reward of a reply is the reply itself."""
    count = 3 + number % 3
    edges = [(a, b) for a in range(count) for b in range(count) if (a * 2 + number) % 5 > b + 1]
    return {
        "id": number,
        "instruction_type": ("Single_Turn", "Multi_Turn", "System_Prompt")[number % 3],
        "messages": [{"role": "user", "content": "?"}],
        "checklist": [],
        "responses": [
            {"response_id": place, "response": str(digit)}
            for place, digit in enumerate(digits(number, count))
        ],
        "preference_graph": [
            {"chosen": {"response_id": a}, "rejected": {"response_id": b}}
            for a, b in edges or [(0, 1)]
        ],
    }


IF_FIGURES = {
    "Multi_Turn, Kendall's tau": 0.0223140985,
    "Multi_Turn, accuracy": 0.2705882353,
    "Single_Turn, Kendall's tau": 0.1429851053,
    "Single_Turn, accuracy": 0.3107843137,
    "System_Prompt, Kendall's tau": 0.1383617176,
    "System_Prompt, accuracy": 0.3541666667,
    "accuracy": 0.3118464052,
    "Kendall's tau": 0.1012203072,
}


def test_if_rewardbench_has_the_figures_of_its_script_on_50_items(tmp_path: Path) -> None:
    """The figures are those of both scripts in ``metrics/``, with the digits as scores.

    They were computed by ``calculate_pairwise_metrics`` and ``calculate_metric_stats`` of
    thu-coai/IF-RewardBench (8840f9c).
    """
    records = [if_record(number) for number in range(50)]
    path = write(tmp_path / "i.jsonl", records)
    report = run_task(TASKS["if_rewardbench"], path, source_of(by_number))
    assert report.metrics == pytest.approx(IF_FIGURES)
    assert report.accuracy == report.metrics["Kendall's tau"]
    assert len(report.predictions.rows) == 50


def rmb_record(number: int) -> dict[str, Any]:
    """Build a pair or a list of RMB; the reward of a reply is the reply itself."""
    best, *others = ({"llm_name": "m", "answer": str(digit)} for digit in digits(number, 4))
    goal = ("Helpfulness/Chat/Discussion", "Harmlessness/S1")[number // 2 % 2]
    turn = {"role": "user", "content": "?", "language": "English"}
    if number % 2:
        pair = {"pair_uid": str(number), "chosen": best, "reject": others[0]}
        return {**pair, "conversation_input": [turn], "category_path": f"Pairwise_set/{goal}"}
    listed = {"bon_uid": str(number), "bon_best": best, "loser_list": others[: 2 + number % 3 // 2]}
    return {**listed, "conversation_input": [turn], "category_path": f"BoN_set/{goal}"}


RMB_FIGURES = {
    "Pairwise_set/Helpfulness": 0.46153846153846156,
    "Pairwise_set/Harmlessness": 0.3333333333333333,
    "BoN_set/Helpfulness": 0.15384615384615385,
    "BoN_set/Harmlessness": 0.16666666666666666,
}


def test_rmb_has_the_figures_of_its_scripts_on_50_items(tmp_path: Path) -> None:
    """A pair is right if ``chosen > rejected``, a list if all its pairs are; ties are wrong.

    The figures are those that ``my_run_rm.py`` of Zhou-Zoey/RMB-Reward-Model-Benchmark (2be3180)
    prints for the two files of pairs, and ``run_rm_bestofn.py`` of RM-R1-UIUC/RM-R1 (d4c2542) for
    the two of lists, of which RMB's repository has no script. Both ran unchanged on these records,
    with a model whose reward is the digit. A random Llama reward model had the same rewards and
    verdicts there and here.
    """
    records = [rmb_record(number) for number in range(50)]
    report = run_task(TASKS["rmb"], write(tmp_path / "r.jsonl", records), source_of(by_number))
    assert {name: report.metrics[name] for name in RMB_FIGURES} == RMB_FIGURES
    categories = {name: report.metrics[name] for name in report.metrics if name.count("/") > 1}
    assert categories == {name: RMB_FIGURES["/".join(name.split("/")[:2])] for name in categories}
    assert len(categories) == 4
    assert report.accuracy == np.mean([*RMB_FIGURES.values()])
