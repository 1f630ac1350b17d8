"""Benchmarks on hand-made rewards: what is read, which verdict is right, how they add up."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Sequence
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from nemo_aligner.contract.contract import OverlongError
from nemo_aligner.contract.messages import Text, reply_of
from nemo_aligner.contract.steps import StepTextError
from nemo_aligner.evaluation.predictions import Item, Prediction
from nemo_aligner.evaluation.run_task import TaskResult, choose_threshold, run_task
from nemo_aligner.evaluation.tasks import TASKS, find_task
from nemo_aligner.evaluation.tasks.base import Level
from nemo_aligner.evaluation.tasks.best_of_n import best_of
from nemo_aligner.evaluation.tasks.rewardbench import PRIOR_SETS, SUBSETS, ties_score
from nemo_aligner.serving.protocols import StepRewards
from nemo_aligner.utils.errors import ConfigError, DataError
from tests.data.files import published
from tests.evaluation.refusals import refusal
from tests.harness.scorers import source_of


def write(path: Path, records: Sequence[dict[str, Any]]) -> Path:
    path.write_text("".join(f"{json.dumps(record)}\n" for record in records))
    return path


def by_number(texts: Sequence[Text]) -> np.ndarray:
    """A scorer to which a reply is a number."""
    return np.array([[float(reply_of(text))] for text in texts])


def by_length(texts: Sequence[Text]) -> np.ndarray:
    return np.array([[float(len(reply_of(text)))] for text in texts])


def by_last_letter(texts: Sequence[Text]) -> list[StepRewards]:
    """The reward of a step is the number that it ends with."""
    contents = [text[-1]["content"] for text in texts]  # type: ignore[index]
    return [
        StepRewards(np.array([[float(step["text"][-1])] for step in steps], dtype=np.float32))
        for steps in contents
    ]


def test_every_task_reads_and_scores_its_sample(tmp_path: Path) -> None:
    """Its table, its report and its verdicts, and the line of a record that it cannot read."""
    for name in TASKS:
        task = find_task(name)
        path = write(tmp_path / "sample.jsonl", [task.sample])
        report = run_task(
            task, path, source_of(by_length, by_last_letter if task.reads_steps else None)
        )
        (judged,) = report.predictions.rows
        of_steps = len(judged.item.texts[0][-1]["content"]) if task.reads_steps else None
        assert (of_steps or len(judged.item.texts)) == len(judged.rewards) >= 2, name
        assert report.rows, name
        assert f"task          {name}" in report.render({"data": str(path)})
        report.write(tmp_path / "report.json", {})
        assert json.loads((tmp_path / "report.json").read_text())["task"] == name
        report.predictions.write(tmp_path / "verdicts.jsonl")
        (line,) = (tmp_path / "verdicts.jsonl").read_text().splitlines()
        verdict = json.loads(line)
        assert sum(map(len, verdict["rewards"].values())) == len(judged.rewards), name
        write(path, [task.sample, {"text": "x"}])
        assert "sample.jsonl:2: missing key" in refusal(
            DataError, run_task, task, path, source_of(by_length)
        )


def test_task_that_is_not_there_is_named() -> None:
    with pytest.raises(ConfigError, match="did you mean rewardbench"):
        find_task("reward_bench")


# By task and key: values that are none of the benchmark's, and what is said of them.
NO_VALUES: tuple[tuple[str, str, Any, str], ...] = (
    ("llmbar", "label", 3, "got 3, wanted 1 or 2"),
    ("llmbar", "label", [1], "got [1], wanted 1 or 2"),
    ("autoj", "label", 4, "got 4, wanted 0, 1 or 2"),
    ("judgebench", "label", "A=B", "got 'A=B', wanted A>B or B>A"),
    ("rewardbench2", "rejected", [], "got [], wanted a list of replies"),
    ("rm_bench", "chosen", ["4"], "got ['4'], wanted a list of 3 replies"),
    ("rewardbench", "chosen", None, "got None to '2+2?', wanted a reply"),
    ("humanevalpack", "prompt", 1, "got 1, wanted a string"),
    ("ppe_correctness", "scores", ["True"], "got ['True'], wanted a list of true"),
    ("ppe_correctness", "scores", [2], "got [2], wanted a list of true and false"),
    ("ppe_correctness", "sampled_conflict_pairs", [[0, 1.0]], "a right reply and a wrong one"),
    ("ppe_correctness", "sampled_conflict_pairs", [[0, 3]], "a right reply and a wrong one"),
    ("ppe_correctness", "sampled_conflict_pairs", [[0, 9]], "from 0 to 3"),
    ("ppe_correctness", "sampled_conflict_pairs", [], "got [], wanted a list of pairs"),
    ("prmbench", "error_steps", [0], "got [0], wanted numbers of steps, from 1"),
    ("prmbench", "error_steps", None, "got None, wanted numbers of steps"),
    ("prmbench", "modified_process", [], "got [], wanted a list of steps"),
    ("hhh", "input", None, "got None, wanted a string"),
    ("hhh", "targets", ["4"], "got ['4'], wanted two choices"),
    ("hhh", "targets", {"choices": ["4", "5"], "labels": [1, 1]}, "wanted two"),
    ("hhh", "targets", {"choices": ["4"], "labels": [1, 0]}, "wanted two"),
)


def test_value_that_is_none_of_the_benchmarks_is_named(tmp_path: Path) -> None:
    wrong = {}
    for name, key, value, message in NO_VALUES:
        path = write(tmp_path / "other.jsonl", [{**find_task(name).sample, key: value}])
        said = refusal(DataError, run_task, find_task(name), path, source_of(by_length))
        if not (f"other.jsonl:1: {key}: " in said and message in said):
            wrong[name, key, str(value)] = said
    assert not wrong, wrong


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


def pair(subset: str, margin: float) -> dict[str, Any]:
    return {"subset": subset, "prompt": "?", "chosen": str(margin), "rejected": "0"}


def test_rewardbench_of_a_part_has_no_overall(tmp_path: Path) -> None:
    """How subsets add up: the published figures below."""
    path = write(tmp_path / "b.jsonl", [pair("hep-cpp", 1), pair("math-prm", -1)])
    report = run_task(TASKS["rewardbench"], path, source_of(by_number))
    found = report.metrics
    assert "RewardBench" not in found
    assert (report.accuracy, report.interval) == (None, None)
    assert found["Reasoning"] == pytest.approx(164 / (164 + 984))


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

    found, overall = added(PUBLISHED_SUBSETS)
    assert found == pytest.approx(PUBLISHED_SECTIONS, abs=0.05)
    assert overall == pytest.approx(93.8, abs=0.05)
    # Prior sets count for half a section.
    prior = {name: number / 10 for number, name in enumerate(PRIOR_SETS)}
    found, with_prior = added({**PUBLISHED_SUBSETS, **prior})
    mean = 100 * sum(prior.values()) / len(prior)
    assert found["Prior Sets"] == pytest.approx(mean)
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
    assert [each.right for each in report.predictions.rows] == [1, 0, pytest.approx(1 / 3)]
    assert report.metrics == {"Math": pytest.approx(4 / 9)}


def test_rewardbench_2_ties_follow_the_published_rule(tmp_path: Path) -> None:
    """By hand: prompt 1 is right throughout, 2 is right but spreads, 3 is wrong where many are."""
    records = [
        four("Ties", (5, 1), "ref:1"),
        four("Ties", (5, 4, 1), "tied:1", 2),
        four("Ties", (5, 4), "ref:2"),
        four("Ties", (9, 3, 2), "tied:2", 2),
        four("Ties", (1, 2), "ref:3"),
        four("Ties", (5, 1, 2), "tied:3", 2),
    ]
    others = [four(name, (1, 0)) for name in SUBSETS[:-1]]
    path = write(tmp_path / "b.jsonl", [*records, *others])
    found = run_task(TASKS["rewardbench2"], path, source_of(by_number)).metrics
    # Tied and ref: 1 and 2 are right; the margin beats the spread in 1 alone, with ref's, too.
    ratios = [min(4, 3) / 1, min(1, 1) / 6, min(-1, -1) / 4]
    tanh = sum(math.tanh(ratio - 1) for ratio in ratios) / 3
    ties = 0.3 * 2 / 3 + 0.3 * 2 / 3 + 0.2 / 3 + 0.2 / 3 + 0.01 * tanh
    assert found["Ties"] == pytest.approx(ties)
    assert found["RewardBench 2"] == pytest.approx((5 + ties) / 6)


def test_rm_bench_file_of_one_domain_has_it_in_its_name(tmp_path: Path) -> None:
    task = TASKS["rm_bench"]
    record = {key: value for key, value in task.sample.items() if key != "domain"}
    report = run_task(
        task, write(tmp_path / "safety-refuse_filtered.json", [record]), source_of(by_length)
    )
    assert {"safety-refuse", "safety-refuse, hard", "safety"} <= report.metrics.keys()
    path = write(tmp_path / "other_filtered.json", [record])
    assert "other_filtered.json:1: missing key 'domain'" in refusal(
        DataError, run_task, task, path, source_of(by_length)
    )


def official_rm_bench(items: Sequence[tuple[str, np.ndarray]]) -> dict[str, float]:
    """What ``compute_accuracy`` of THU-KEG/RM-Bench does, in other words."""
    found: dict[str, list[float]] = {}
    for domain in ("chat", "math", "code", "safety"):
        of_domain = [rewards for name, rewards in items if name.startswith(domain)]
        wins = np.mean([r[:3, None] > r[None, 3:] for r in of_domain], axis=0)
        easy, hard = wins[np.tril_indices(3, -1)].mean(), wins[np.triu_indices(3, 1)].mean()
        found[domain] = [easy, np.diag(wins).mean(), hard]
    every = {**found, "all": np.mean(list(found.values()), axis=0)}
    kinds = ("easy", "normal", "hard")
    named = {
        f"{n}, {kind}": v for n, of in every.items() for kind, v in zip(kinds, of, strict=True)
    }
    domains = {name: float(np.mean(shares)) for name, shares in found.items()}
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
        wanted = official_rm_bench(items)
        assert {name: rows[name] for name in wanted} == pytest.approx(wanted)


def test_rewardbench2_ties_of_equal_right_replies_have_an_infinite_margin() -> None:
    def judged(name: str, count: int, *rewards: float) -> Prediction:
        return Prediction(Item(name, "Ties", ("",) * len(rewards), count), np.array(rewards), 1.0)

    one = judged("ref:1", 1, 1.0, 0.0)
    for wrong, margin in ((0.0, 1.0), (2.0, -1.0), (1.0, 0.0)):
        many = judged("tied:1", 2, 1.0, 1.0, wrong)
        right = float(wrong < 1)
        assert ties_score([one, many]) == pytest.approx(0.3 + 0.7 * right + 0.01 * margin)


def ppe(number: int, right: set[int], pairs: list[list[int]], **more: Any) -> dict[str, Any]:
    """A record as PPE publishes it: 32 replies, the later the longer."""
    replies = {f"response_{reply}": str(reply) for reply in range(1, 33)}
    scores = [index in right for index in range(32)]
    known = {"question_id": number, "prompt": "?", "model_name": "m", "scores": scores}
    return {**known, **replies, "sampled_conflict_pairs": pairs, **more}


def test_ppe_counts_its_pairs_and_the_best_of_k(tmp_path: Path) -> None:
    """The reward is the number of the reply: the last one of any k is taken."""
    records = [
        ppe(1, {31}, [[31, 0], [0, 31]], category="law"),
        ppe(2, {0, 1}, [[0, 31], [1, 2], [30, 1], [1, 3]], category="math"),
    ]
    report = run_task(
        TASKS["ppe_correctness"], write(tmp_path / "p.jsonl", records), source_of(by_number)
    )
    found = report.metrics
    assert (found["law"], found["math"], found["pairs"]) == (1, 0, 2 / 6)
    assert [row.count for row in report.rows if row.name in ("law", "pairs")] == [2, 6]
    # Of the first prompt k of 32 have the last reply; of the second only both first ones do well.
    shares = {
        k: [k / 32, math.comb(2, k) / math.comb(32, k) if k > 1 else 2 / 32] for k in range(1, 33)
    }
    for k in (1, 2, 4, 8, 16, 32):
        assert found[f"best of {k}"] == pytest.approx(sum(shares[k]) / 2)
    area = sum(sum(each) for each in shares.values()) / 64
    assert found["area under best of k"] == pytest.approx(area)
    best = [[k / 32, 1 - math.comb(30, k) / math.comb(32, k)] for k in range(1, 33)]
    assert found["loss of best of k"] == pytest.approx(sum(map(sum, best)) / 64 - area)
    assert [each.right for each in report.predictions.rows] == [1, 0]


def test_best_of_n_is_the_mean_over_every_choice_and_over_equal_rewards() -> None:
    rng = np.random.RandomState(0)
    rewards, scores = rng.randn(7), rng.randn(7)
    for n in (1, 2, 4, 7):
        every = [max(some, key=rewards.__getitem__) for some in combinations(range(7), n)]
        assert best_of(n, rewards, scores) == pytest.approx(scores[every].mean())
    rewards, scores = np.array([1.0, 1.0, 0.0]), np.array([4.0, 2.0, 0.0])
    found = [best_of(n, rewards, scores) for n in (1, 2, 3)]
    assert found == pytest.approx([2, (3 + 4 + 2) / 3, 3])
    # Of thousands; the mean of the larger of two of 0 ... K - 1 is (2 K - 1) / 3.
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
    found = report.metrics
    # Of six pairs of the rewards 3, 2, 1, 0 three have the 3 as their best, two the 2, one the 1.
    rewards = [found.pop(f"best of {n}, its reward") for n in (1, 2, 4)]
    assert rewards == pytest.approx([1.5, (3 * 3 + 2 * 2 + 1) / 6, 3])
    characters = [found.pop(f"best of {n}, its characters") for n in (1, 2, 4)]
    assert characters == pytest.approx([1, 1, 1])
    assert found == {
        "best of 1": 1.5,
        "best of 2": 2,
        "best of 4": 3,
        "the highest score of every prompt": 3,
    }
    last = report.rows[2]
    assert (last.low, last.high) == (1, 5)


def test_texts_too_long_and_ties_of_people_are_left_out(tmp_path: Path) -> None:
    def encode(text: Text) -> None:
        if len(reply_of(text)) > 3:
            raise OverlongError("too long", 4)

    task = find_task("autoj")
    records = [
        task.sample,
        {**task.sample, "response 1": "four"},
        {**task.sample, "label": 2},
    ]
    report = run_task(
        task, write(tmp_path / "b.jsonl", records), source_of(by_length, encoding=encode)
    )
    assert report.left_out == {"too long": 1, "without a verdict": 1}
    assert "1 scored, 1 too long: left out, 1 without a verdict: left out" in report.render({})


# Files of the published benchmarks: how many items are scored, and how many are left out.
REAL = (
    ("llmbar", "llmbar/Natural.json", 100, 0),
    ("llmbar", "llmbar/Adversarial-GPTOut.json", 47, 0),
    *(("humanevalpack", f"humanevalpack/{n}.jsonl.gz", 164, 0) for n in ("python", "cpp", "rust")),
    ("autoj", "autoj_pairwise.jsonl.gz", 1392 - 373, 373),
    ("rewardbench", "hhh/hhh_pairs.jsonl", 221, 0),
)


def test_real_files_are_read_whole() -> None:
    for name, file, count, left_out in REAL:
        report = run_task(find_task(name), published(f"eval/{file}"), source_of(by_length))
        found = len(report.predictions.rows), sum(report.left_out.values())
        assert found == (count, left_out), file
        assert 0 < report.rows[-1].value < 1, file


def test_processbench_is_the_mean_over_sets_of_a_harmonic_mean(tmp_path: Path) -> None:
    task = find_task("processbench")

    def record(name: str, label: int, *steps: int) -> dict[str, Any]:
        written = [f"step {reward}" for reward in steps]
        return {"id": name, "problem": "why", "steps": written, "label": label}

    rows = [
        record("gsm8k-0", 1, 9, 2, 1),  # the first below 5 is the one
        record("gsm8k-1", 0, 9, 2, 1),  # is not the one
        record("gsm8k-2", -1, 9, 5),  # none is below
        *(record(f"{name}-{n + 1}", n, 2, 9) for name in ("math", "omnimath") for n in (0, -1)),
        record("olympiadbench-0", 0, 2),
        record("olympiadbench-1", -1, 6),
    ]
    path = write(tmp_path / "all.jsonl", rows)
    report = run_task(task, path, source_of(by_length, by_last_letter), threshold=5.0)
    found = {row.name: row.value for row in report.rows}
    assert found["gsm8k, with an error"] == 0.5
    assert found["gsm8k, without"] == 1.0
    figures = [found[f"{name}, F1"] for name in ("gsm8k", "math", "olympiadbench", "omnimath")]
    assert figures == [pytest.approx(2 * 0.5 / 1.5), 0.0, 1.0, 0.0]
    assert report.accuracy == found["ProcessBench"] == pytest.approx(sum(figures) / 4)
    # A file of one set says by its name which it is.
    one = [{**row, "id": "7"} for row in rows[:3]]
    path = write(tmp_path / "gsm8k.jsonl", one)
    report = run_task(task, path, source_of(by_length, by_last_letter), threshold=5.0)
    assert report.metrics["gsm8k, F1"] == figures[0]
    assert report.accuracy is None
    assert "wanted a model that has a reward for each" in refusal(
        ConfigError, run_task, task, path, source_of(by_length)
    )
    for change, said in (({"label": 3}, "label: got 3, wanted the"), ({"steps": []}, "steps: got")):
        write(path, [{**rows[0], **change}])
        assert said in refusal(DataError, run_task, task, path, source_of(by_length))


def test_processbench_threshold_is_the_best_of_a_heldout_file(tmp_path: Path) -> None:
    """Beside all thresholds between two rewards, with some of them alike."""
    rng, task = random.Random(3), find_task("processbench")
    rows = []
    for number in range(60):
        rewards = [rng.randint(0, 9) for _ in range(rng.randint(1, 5))]
        label = rng.choice([-1, rng.randrange(len(rewards))])
        name = f"{('gsm8k', 'math')[number % 2]}-{number}"
        written = [f"step {number} gets {reward}" for reward in rewards]
        rows.append({"id": name, "problem": "why", "steps": written, "label": label})
    held, other = write(tmp_path / "held.jsonl", rows[:40]), write(tmp_path / "b.jsonl", rows[30:])

    def figure(threshold: float) -> float:
        found = run_task(task, held, source_of(by_length, by_last_letter), threshold=threshold)
        return float(np.mean([found.metrics[f"{name}, F1"] for name in ("gsm8k", "math")]))

    chosen = choose_threshold(
        task, held, source_of(by_length, by_last_letter if task.reads_steps else None)
    )
    best = max(figure(number / 2) for number in range(-1, 20))
    assert chosen.figure == pytest.approx(best)
    assert figure(chosen.value) == pytest.approx(best)
    measured = run_task(task, other, source_of(by_length, by_last_letter), threshold=chosen.value)
    said = f"{chosen.value:g}, the best of held ({best:.4f} there, 40 items, 10 of them measured"
    assert chosen.about("held", measured).startswith(said)
    write(held, [{**rows[0], "label": -1}])
    assert "of both kinds" in refusal(
        DataError, choose_threshold, task, held, source_of(by_length, by_last_letter)
    )
    path = write(tmp_path / "c.jsonl", CHANGED)
    assert "prmbench has no rule to choose by" in refusal(
        ConfigError,
        choose_threshold,
        find_task("prmbench"),
        path,
        source_of(by_length, by_last_letter),
    )


def changed(kind: str, name: str, steps: Sequence[int], wrong: Sequence[int]) -> dict[str, Any]:
    """A record of PRMBench; the solution before the change gets the rewards 9, 9, 2 and 9."""
    return {
        "classification": kind,
        "idx": name,
        "original_question": "why",
        "modified_question": "why not",
        "original_process": ["step 9", "so 9", "step 2", "step 9"],
        "modified_process": [f"step {reward}" for reward in steps],
        "error_steps": wrong,
    }


CHANGED = (
    changed("redundency", "q1", [9, 5, 7], [2]),  # right, wrong, right: 5 is not above 5
    changed("circular", "q1", [9, 9], [1, 2, 7]),  # it has no step 7
    changed("circular", "q1", [1, 1], [1, 2]),  # came before
    changed("circular", "q2", [2, 9, 3], [3]),  # of no solution that is there
    changed("multi_solutions", "q3", [9, 2], []),
)


def test_prmbench_is_over_all_steps(tmp_path: Path) -> None:
    """Right steps judged right, wrong ones judged right, and so on, are counted by hand."""

    def measured(*records: dict[str, Any]) -> TaskResult:
        path = write(tmp_path / "all.jsonl", records)
        task = find_task("prmbench")
        return run_task(task, path, source_of(by_length, by_last_letter), threshold=5.0)

    def f1(hits: int, false: int, missed: int) -> float:
        return 2 * hits / (2 * hits + false + missed)

    report = measured(*CHANGED)
    found = report.metrics
    assert found["redundency, PRMScore"] == 1
    circular = (f1(1, 2, 1) + f1(1, 1, 2)) / 2
    assert found["circular, PRMScore"] == pytest.approx(circular)
    assert found["simplicity, PRMScore"] == pytest.approx((1 + circular) / 2)
    # Without wrong steps it is F1 alone.
    assert found["multi_solutions, PRMScore"] == pytest.approx(f1(1, 0, 1))
    assert found["all, F1"] == pytest.approx(f1(4, 2, 2))
    assert found["all, negative F1"] == pytest.approx(f1(2, 2, 2))
    assert found["all, PRMScore"] == pytest.approx((f1(4, 2, 2) + f1(2, 2, 2)) / 2)
    assert found["all, step accuracy"] == pytest.approx(6 / 10)
    assert found["all, right steps judged right"] == pytest.approx(4 / 6)
    assert found["all, wrong steps judged wrong"] == pytest.approx(2 / 4)
    assert found["all, first error judged wrong"] == pytest.approx(2 / 3)
    assert found["all, similarity"] == pytest.approx((abs(2 / 3 - 3 / 4) + abs(1 - 3 / 4)) / 2)
    assert found["unchanged, steps judged right"] == 3 / 4
    assert not [name for name in found if name.startswith(("sensitivity", "correct"))]
    assert report.accuracy is None
    others = "counterfactual step_contradiction domain_inconsistency confidence missing_condition"
    rest = [changed(kind, "q9", [9, 2], [2]) for kind in (*others.split(), "deception")]
    assert measured(*CHANGED, *rest).accuracy == pytest.approx((f1(10, 2, 2) + f1(8, 2, 2)) / 2)
    # A ratio of nothing is -1, and no score is below 0.
    none = measured(changed("confidence", "q4", [9, 2], [1])).metrics
    assert (none["confidence, F1"], none["confidence, PRMScore"]) == (-1, 0)


def test_solution_without_a_reward_of_each_step_is_counted(tmp_path: Path) -> None:
    def encode(text: Text) -> None:
        if "so 9" in str(text):
            raise StepTextError("it holds the separator")

    def cut(texts: Sequence[Text]) -> list[StepRewards]:
        first, *others = by_last_letter(texts)
        return [StepRewards(first.rewards[1:]), *others]

    path = write(tmp_path / "all.jsonl", CHANGED)
    report = run_task(find_task("prmbench"), path, source_of(by_length, cut, encoding=encode))
    why = {"with a blank step, or the separator in one": 1, "without a reward of each step": 1}
    assert report.counts == {"kept": 4, **why}
