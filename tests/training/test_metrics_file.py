from __future__ import annotations

import json
import math
from pathlib import Path

from nemo_aligner.training.metrics_file import MetricsFile, read_metrics


def write(path: Path, start_step: int, *rows: tuple[int, dict[str, float]]) -> None:
    file = MetricsFile(path, start_step)
    for step, metrics in rows:
        file.log(metrics, step)
    file.close()


def test_a_line_has_its_step_and_the_numbers(tmp_path: Path) -> None:
    path = tmp_path / "run" / "metrics.jsonl"
    write(path, 0, (1, {"train/loss": 0.5}), (1, {"validation/accuracy": 1}))
    assert [json.loads(line) for line in path.read_text().splitlines()] == [
        {"step": 1, "train/loss": 0.5},
        {"step": 1, "validation/accuracy": 1.0},
    ]


def test_numbers_that_are_not_finite_are_null(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    write(path, 0, (1, {"a": math.nan, "b": math.inf, "c": -math.inf, "d": 2.0}))
    assert path.read_text() == '{"step": 1, "a": null, "b": null, "c": null, "d": 2.0}\n'


def test_a_line_is_there_while_the_run_goes_on(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    file = MetricsFile(path, 0)
    file.log({"train/loss": 0.5}, 1)
    assert list(read_metrics(path)) == [{"step": 1, "train/loss": 0.5}]
    file.close()


def test_a_resumed_run_drops_what_came_after_its_checkpoint(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    rows = [(step, {"train/loss": step / 10}) for step in (1, 2, 3)]
    write(path, 0, (0, {"validation/loss": 0.7}), *rows, (3, {"validation/loss": 0.3}))
    with path.open("a") as lines:
        lines.write('{"step": 4, "train/lo')  # killed while it wrote
    write(path, 2, (3, {"train/loss": 0.33}))
    assert list(read_metrics(path)) == [
        {"step": 0, "validation/loss": 0.7},
        {"step": 1, "train/loss": 0.1},
        {"step": 2, "train/loss": 0.2},
        {"step": 3, "train/loss": 0.33},
    ]


def test_a_new_run_begins_a_new_file(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    for value in (1.0, 2.0):
        write(path, 0, (0, {"validation/loss": value}), (1, {"train/loss": value}))
    assert list(read_metrics(path)) == [
        {"step": 0, "validation/loss": 2.0},
        {"step": 1, "train/loss": 2.0},
    ]


def test_there_may_be_no_file(tmp_path: Path) -> None:
    assert list(read_metrics(tmp_path / "metrics.jsonl")) == []
