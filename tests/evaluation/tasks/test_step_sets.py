"""ProcessBench and PRMBench: verdicts on steps, their figures, and the chosen threshold."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from nemo_aligner.config.evaluation import EvaluateConfig
from nemo_aligner.config.load import load_config
from nemo_aligner.contract.messages import Text
from nemo_aligner.contract.steps import StepTextError
from nemo_aligner.evaluation.run import evaluate_source
from nemo_aligner.evaluation.run_task import TaskResult, choose_threshold, run_task
from nemo_aligner.evaluation.tasks import find_task
from nemo_aligner.serving.protocols import StepRewards
from nemo_aligner.utils.errors import ConfigError, DataError
from tests.evaluation.refusals import refusal
from tests.evaluation.tasks.scorers import by_last_letter, by_length, write
from tests.harness.scorers import source_of


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
    metrics = {row.name: row.value for row in report.rows}
    assert metrics["gsm8k, with an error"] == 0.5
    assert metrics["gsm8k, without"] == 1.0
    figures = [metrics[f"{name}, F1"] for name in ("gsm8k", "math", "olympiadbench", "omnimath")]
    assert figures == [pytest.approx(2 * 0.5 / 1.5), 0.0, 1.0, 0.0]
    assert report.accuracy == metrics["ProcessBench"] == pytest.approx(sum(figures) / 4)
    # The name of a file of one set says which set it is.
    one = [{**row, "id": "7"} for row in rows[:3]]
    path = write(tmp_path / "gsm8k.jsonl", one)
    report = run_task(task, path, source_of(by_length, by_last_letter), threshold=5.0)
    assert report.metrics["gsm8k, F1"] == figures[0]
    assert report.accuracy is None
    assert "model.head.reads" in refusal(ConfigError, run_task, task, path, source_of(by_length))
    for change, message in (({"label": 3}, "label: got 3"), ({"steps": []}, "steps: got")):
        write(path, [{**rows[0], **change}])
        assert message in refusal(DataError, run_task, task, path, source_of(by_length))


def test_step_with_the_reward_of_the_threshold_that_is_set_is_right(tmp_path: Path) -> None:
    """0.9 in float32, as rewards are, is below 0.9 in float64."""

    def score_steps(texts: Sequence[Text]) -> list[StepRewards]:
        return [StepRewards(np.array([[0.9]], dtype=np.float32)) for _ in texts]

    record = {"id": "gsm8k-0", "problem": "why", "steps": ["so"], "label": -1}
    path = write(tmp_path / "one.jsonl", [record])
    settings = [f"data.path={path}", "task=processbench", "threshold=0.9"]
    config = load_config(EvaluateConfig, settings)
    (row,) = evaluate_source(config, source_of(by_length, score_steps)).rows
    assert row["right"] == 1


def test_processbench_threshold_is_the_best_of_a_heldout_file(tmp_path: Path) -> None:
    """Compared with all thresholds between two rewards, some of which are equal."""
    rng, task = random.Random(3), find_task("processbench")
    rows = []
    for number in range(60):
        rewards = [rng.randint(0, 9) for _ in range(rng.randint(1, 5))]
        label = rng.choice([-1, rng.randrange(len(rewards))])
        name = f"{('gsm8k', 'math')[number % 2]}-{number}"
        written = [f"step {number} gets {reward}" for reward in rewards]
        rows.append({"id": name, "problem": "why", "steps": written, "label": label})
    heldout, other = (
        write(tmp_path / "held.jsonl", rows[:40]),
        write(tmp_path / "b.jsonl", rows[30:]),
    )

    def figure(threshold: float) -> float:
        result = run_task(task, heldout, source_of(by_length, by_last_letter), threshold=threshold)
        return float(np.mean([result.metrics[f"{name}, F1"] for name in ("gsm8k", "math")]))

    chosen = choose_threshold(
        task, heldout, source_of(by_length, by_last_letter if task.reads_steps else None)
    )
    best = max(figure(number / 2) for number in range(-1, 20))
    assert chosen.figure == pytest.approx(best)
    assert figure(chosen.value) == pytest.approx(best)
    measured = run_task(task, other, source_of(by_length, by_last_letter), threshold=chosen.value)
    description = f"{chosen.value:g}, the best of held ({best:.4f} there, 40 items, 10 of them"
    assert chosen.describe("held", measured).startswith(description)
    write(heldout, [{**rows[0], "label": -1}])
    assert f"{heldout}: no set has both" in refusal(
        DataError, choose_threshold, task, heldout, source_of(by_length, by_last_letter)
    )
    path = write(tmp_path / "c.jsonl", CHANGED)
    assert f"threshold_from: got {path}, but prmbench" in refusal(
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
    metrics = report.metrics
    assert metrics["redundency, PRMScore"] == 1
    circular = (f1(1, 2, 1) + f1(1, 1, 2)) / 2
    assert metrics["circular, PRMScore"] == pytest.approx(circular)
    assert metrics["simplicity, PRMScore"] == pytest.approx((1 + circular) / 2)
    # Without wrong steps it is F1 only.
    assert metrics["multi_solutions, PRMScore"] == pytest.approx(f1(1, 0, 1))
    assert metrics["all, F1"] == pytest.approx(f1(4, 2, 2))
    assert metrics["all, negative F1"] == pytest.approx(f1(2, 2, 2))
    assert metrics["all, PRMScore"] == pytest.approx((f1(4, 2, 2) + f1(2, 2, 2)) / 2)
    assert metrics["all, step accuracy"] == pytest.approx(6 / 10)
    assert metrics["all, right steps judged right"] == pytest.approx(4 / 6)
    assert metrics["all, wrong steps judged wrong"] == pytest.approx(2 / 4)
    assert metrics["all, first error judged wrong"] == pytest.approx(2 / 3)
    assert metrics["all, similarity"] == pytest.approx((abs(2 / 3 - 3 / 4) + abs(1 - 3 / 4)) / 2)
    assert metrics["unchanged, steps judged right"] == 3 / 4
    assert not [name for name in metrics if name.startswith(("sensitivity", "correct"))]
    assert report.accuracy is None
    class_names = (
        "counterfactual step_contradiction domain_inconsistency confidence missing_condition"
    )
    other_classes = [
        changed(kind, "q9", [9, 2], [2]) for kind in (*class_names.split(), "deception")
    ]
    assert measured(*CHANGED, *other_classes).accuracy == pytest.approx(
        (f1(10, 2, 2) + f1(8, 2, 2)) / 2
    )
    # A ratio with a denominator of 0 is -1, and no score is below 0.
    undefined = measured(changed("confidence", "q4", [9, 2], [1])).metrics
    assert (undefined["confidence, F1"], undefined["confidence, PRMScore"]) == (-1, 0)


def test_solution_without_a_reward_of_each_step_is_counted(tmp_path: Path) -> None:
    def encode(text: Text) -> None:
        if "so 9" in str(text):
            raise StepTextError("it holds the separator")

    def cut(texts: Sequence[Text]) -> list[StepRewards]:
        first, *remaining = by_last_letter(texts)
        return [StepRewards(first.rewards[1:]), *remaining]

    path = write(tmp_path / "all.jsonl", CHANGED)
    report = run_task(find_task("prmbench"), path, source_of(by_length, cut, encoding=encode))
    reasons = {"with a blank step, or the separator in one": 1, "without a reward of each step": 1}
    assert report.counts == {"kept": 4, **reasons}
