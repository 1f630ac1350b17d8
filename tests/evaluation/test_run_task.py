"""Running benchmarks: which items are read, dropped and scored, for every benchmark."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from nemo_aligner.contract.contract import NoTemplateError, OverlongError
from nemo_aligner.contract.messages import Conversation, Text, messages_of, reply_of
from nemo_aligner.contract.scorer import StepRewards
from nemo_aligner.evaluation.predictions import Item, Prediction, Predictions
from nemo_aligner.evaluation.run_task import TaskResult, run_task
from nemo_aligner.evaluation.tasks import TASKS, find_task
from nemo_aligner.evaluation.tasks.base import Level, TaskRow, read_items
from nemo_aligner.utils.errors import ConfigError, DataError
from tests.data.files import published
from tests.evaluation.refusals import refusal
from tests.evaluation.tasks.scorers import by_last_letter, by_length, write
from tests.harness.scorers import source_of


def test_every_task_reads_and_scores_its_sample(tmp_path: Path) -> None:
    """It has a table, a report and verdicts; a record that it cannot read is an error by line."""
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
        error = refusal(DataError, run_task, task, path, source_of(by_length))
        assert "sample.jsonl:2: " in error
        assert "'text'" in error, error


def test_task_that_is_not_there_is_named() -> None:
    with pytest.raises(ConfigError, match="did you mean rewardbench"):
        find_task("reward_bench")


# By task and key: values that the benchmark does not have, and what the error says of them.
NO_VALUES: tuple[tuple[str, str, Any, str], ...] = (
    ("llmbar", "label", 3, "got 3, wanted 1 or 2"),
    ("llmbar", "label", [1], "got [1], wanted 1 or 2"),
    ("autoj", "label", 4, "got 4, wanted 0, 1 or 2"),
    ("judgebench", "label", "A=B", "got 'A=B', wanted A>B or B>A"),
    ("rewardbench2", "rejected", [], "got [], wanted a list of replies"),
    ("rm_bench", "chosen", ["4"], "got ['4'], wanted a list of 3 replies"),
    ("rewardbench", "chosen", None, "got None"),
    ("humanevalpack", "prompt", 1, "got 1, wanted a string"),
    ("ppe_correctness", "scores", ["True"], "got ['True'], wanted a list of true"),
    ("ppe_correctness", "scores", [2], "got [2], wanted a list of true and false"),
    ("ppe_correctness", "sampled_conflict_pairs", [[0, 1.0]], "got [0, 1.0]"),
    ("ppe_correctness", "sampled_conflict_pairs", [[0, 3]], "got [0, 3]"),
    ("ppe_correctness", "sampled_conflict_pairs", [[0, 9]], "from 0 to 3"),
    ("ppe_correctness", "sampled_conflict_pairs", [], "got [], wanted a list of pairs"),
    ("prmbench", "error_steps", [0], "got [0]"),
    ("prmbench", "error_steps", None, "got None"),
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
        error = refusal(DataError, run_task, find_task(name), path, source_of(by_length))
        if not (f"other.jsonl:1: {key}: " in error and message in error):
            wrong[name, key, str(value)] = error
    assert not wrong, wrong


def test_samples_of_every_task_have_the_prompt_columns(tmp_path: Path) -> None:
    """System prompts, tools and documents are in the prompt, or the column is refused by name."""
    system = {"role": "system", "content": "Be brief."}
    tool = {"type": "function", "function": {"name": "add", "parameters": {}}}
    documents = [{"title": "t", "text": "2+2=4"}]
    for name in TASKS:
        task = find_task(name)
        for key in ("system", "system_prompt"):
            items = read_items(task, {**task.sample, key: "Be brief."})
            assert all(messages_of(text)[0] == system for item in items for text in item.texts)
        for key, value in (("tools", [tool]), ("documents", documents)):
            if key in task.sample or ("tools" in task.sample and key == "documents"):
                continue
            for item in read_items(task, {**task.sample, key: value}):
                for text in item.texts:
                    assert isinstance(text, Conversation)
                    assert getattr(text, key) == value
        for key in ("system", "documents", "history"):
            path = write(tmp_path / "other.jsonl", [{**task.sample, key: {"a": 1}}])
            error = refusal(DataError, run_task, task, path, source_of(by_length))
            assert f"other.jsonl:1: {key}: got {{'a': 1}}" in error, name


def test_texts_too_long_or_refused_and_ties_of_people_are_left_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def encode(text: Text) -> None:
        if reply_of(text) == "<t>":
            raise DataError("the chat template refuses it")
        if len(reply_of(text)) > 3:
            raise OverlongError("too long", 4)

    task = find_task("autoj")
    records = [
        task.sample,
        {**task.sample, "response 1": "four"},
        {**task.sample, "label": 2},
        {**task.sample, "response 2": "<t>"},
    ]
    report = run_task(
        task, write(tmp_path / "b.jsonl", records), source_of(by_length, encoding=encode)
    )
    refused = "refused by the chat template"
    assert report.left_out == {"too long": 1, "without a verdict": 1, refused: 1}
    assert "1 scored, 1 too long: left out, 1 without a verdict: left out" in report.render({})
    assert "b.jsonl:4: left out (later ones are only counted): the chat" in capsys.readouterr().out

    def encode_without_template(text: Text) -> None:
        raise NoTemplateError("there is no chat template")

    source = source_of(by_length, encoding=encode_without_template)
    with pytest.raises(DataError, match=r"b\.jsonl:1: there is no chat template"):
        run_task(task, tmp_path / "b.jsonl", source)


def test_reward_that_is_not_finite_is_an_error_by_line(tmp_path: Path) -> None:
    """As for a file of pairs, and also if its attribute weighs 0 or it is that of a step."""

    def overflow(texts: Sequence[Text]) -> np.ndarray:
        return np.array([[np.inf if "4" in reply_of(text) else 1.0] for text in texts])

    def overflow_in_both(texts: Sequence[Text]) -> np.ndarray:
        return np.hstack([overflow(texts), -overflow(texts)])

    def overflow_in_steps(texts: Sequence[Text]) -> list[StepRewards]:
        return [StepRewards(-overflow([text] * 2)) for text in texts]

    pair, steps = find_task("autoj"), find_task("processbench")
    cases = (
        (pair, source_of(overflow), "1 of 4"),
        (pair, source_of(overflow_in_both, attributes=("a", "b")), "1 of 4"),
        (steps, source_of(by_length, overflow_in_steps), "2 of 2"),
    )
    for task, source, count in cases:
        records = [task.sample, {**task.sample, "response 1": "1", "response 2": "2"}]
        path = write(tmp_path / "b.jsonl", records[::-1])
        error = refusal(DataError, run_task, task, path, source)
        place = "b.jsonl:2" if task is pair else "b.jsonl:1"
        assert f"{place}: the model's reward is not finite ({count} rewards are not)" in error


def test_files_of_results_hold_null_for_what_is_not_finite(tmp_path: Path) -> None:
    item = Item("1", "s", ("a", "b"))
    verdicts = Predictions([Prediction(item, np.array([np.inf, 0]), np.nan)], is_benchmark=True)
    rows = [TaskRow(Level.overall, "all", np.inf, 1)]
    report = TaskResult("best_of_n", rows, verdicts, {})
    report.write(tmp_path / "report.json", {"margin": np.nan})
    content = json.loads((tmp_path / "report.json").read_text())
    assert (content["margin"], content["rows"][0]["value"]) == (None, None)
    verdicts.write(tmp_path / "verdicts.jsonl")
    verdict = json.loads((tmp_path / "verdicts.jsonl").read_text())
    assert (verdict["right"], verdict["rewards"]) == (None, {"right": [None], "wrong": [0.0]})
    error = refusal(ConfigError, verdicts.write, tmp_path / "report.json" / "verdicts.jsonl")
    assert error.startswith("output_rewards: ")


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
        counts = len(report.predictions.rows), sum(report.left_out.values())
        assert counts == (count, left_out), file
        assert 0 < report.rows[-1].value < 1, file
