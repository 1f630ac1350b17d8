from __future__ import annotations

import csv
import errno
from pathlib import Path
from unittest.mock import Mock

import pytest

from nemo_aligner.config.training import ExpManagerConfig
from nemo_aligner.errors import CheckpointError, ConfigError
from nemo_aligner.training import loggers
from nemo_aligner.training.loggers import MetricLoggers, build_loggers, check_loggers
from nemo_aligner.training.metrics_file import MetricsFile, read_metrics


def read(folder: Path) -> list[dict[str, str]]:
    with (folder / "csv" / "metrics.csv").open(newline="") as lines:
        return [{k: v for k, v in row.items() if v} for row in csv.DictReader(lines)]


def scalars(folder: Path, name: str) -> list[tuple[int, float]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder / "tensorboard"))
    events.Reload()
    return [(event.step, round(event.value, 5)) for event in events.Scalars(name)]


def test_csv_goes_on_where_the_checkpoint_was(tmp_path: Path) -> None:
    config = ExpManagerConfig(explicit_log_dir=str(tmp_path), create_tensorboard_logger=False)
    first = build_loggers(config, {"model": {"seed": 1}}, 0)
    for step in (1, 2, 3):
        first.log({"train/loss": step / 10}, step)
    first.log({"validation/accuracy": 0.5}, 2)
    first.close()
    # Killed while it wrote a line.
    with (tmp_path / "csv" / "metrics.csv").open("a") as lines:
        lines.write("4,0.")
    second = build_loggers(config, {"model": {"seed": 1}}, 2)
    second.log({"train/loss": 0.33, "train/new": 1.0}, 3)
    second.close()
    assert read(tmp_path) == [
        {"step": "1", "train/loss": "0.1"},
        {"step": "2", "train/loss": "0.2"},
        {"step": "2", "validation/accuracy": "0.5"},
        {"step": "3", "train/loss": "0.33", "train/new": "1.0"},
    ]


def test_a_new_run_begins_a_new_file(tmp_path: Path) -> None:
    config = ExpManagerConfig(explicit_log_dir=str(tmp_path), create_tensorboard_logger=False)
    for value in (1.0, 2.0):
        logger = build_loggers(config, {}, 0)
        logger.log({"validation/loss": value}, 0)
        logger.log({"train/loss": value}, 1)
        logger.close()
    assert read(tmp_path) == [
        {"step": "0", "validation/loss": "2.0"},
        {"step": "1", "train/loss": "2.0"},
    ]


def test_a_new_run_takes_the_place_of_one_without_a_checkpoint(tmp_path: Path) -> None:
    config = ExpManagerConfig(explicit_log_dir=str(tmp_path), create_csv_logger=False)
    for value in (1.0, 2.0):
        logger = build_loggers(config, {}, 0)
        for step in (0, 1):
            logger.log({"validation/loss": value}, step)
        logger.close()
    assert scalars(tmp_path, "validation/loss") == [(0, 2.0), (1, 2.0)]
    assert [row["validation/loss"] for row in read_metrics(tmp_path / "metrics.jsonl")] == [2, 2]


def test_tensorboard_has_the_numbers(tmp_path: Path) -> None:
    config = ExpManagerConfig(explicit_log_dir=str(tmp_path), create_csv_logger=False)
    for start, values in ((0, (0.1, 0.2, 0.3)), (2, (0.33,))):
        logger = build_loggers(config, {}, start)
        for step, value in enumerate(values, start=start + 1):
            logger.log({"train/loss": value}, step)
        logger.close()
    assert scalars(tmp_path, "train/loss") == [(1, 0.1), (2, 0.2), (3, 0.33)]


def test_a_logger_that_is_not_installed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loggers, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"create_wandb_logger: .* wandb is not installed"):
        check_loggers(ExpManagerConfig(create_tensorboard_logger=False, create_wandb_logger=True))
    check_loggers(ExpManagerConfig(create_tensorboard_logger=False))


class Failing:
    """A logger whose disk is full from the second step on."""

    name = "failing"

    def __init__(self) -> None:
        self.steps: list[int] = []

    def log_metrics(self, metrics: dict[str, float], step: int) -> None:
        if step > 1:
            raise ValueError("not supported") from OSError("the disk is full")
        self.steps.append(step)

    def finalize(self, status: str) -> None:
        raise AssertionError("it is told no more")


def test_a_logger_that_fails_ends_no_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    failing, other = Failing(), Mock()
    logger = MetricLoggers(MetricsFile(tmp_path / "metrics.jsonl", 0), [failing, other])
    for step in (1, 2, 3):
        logger.log({"train/loss": 0.5}, step)
    logger.close()
    assert failing.steps == [1]
    assert [call.args[1] for call in other.log_metrics.call_args_list] == [1, 2, 3]
    assert [row["step"] for row in read_metrics(tmp_path / "metrics.jsonl")] == [1, 2, 3]
    assert capsys.readouterr().out.splitlines() == [
        "failing: it hears no more of this run (OSError: the disk is full); "
        "metrics.jsonl has every number"
    ]


def test_a_full_disk_is_named(tmp_path: Path) -> None:
    file = MetricsFile(tmp_path / "metrics.jsonl", 0)
    file._lines = Mock(**{"flush.side_effect": OSError(errno.ENOSPC, "No space left on device")})
    with pytest.raises(CheckpointError, match="metrics of step 7 cannot be written: No space"):
        file.log({"train/loss": 0.5}, 7)
