from __future__ import annotations

import csv
import errno
import math
from contextlib import suppress
from pathlib import Path
from unittest.mock import Mock

import pytest

from nemo_aligner.config.training import ExpManagerConfig
from nemo_aligner.training import loggers
from nemo_aligner.training.loggers import MetricLoggers, build_loggers, check_loggers
from nemo_aligner.training.tracking import MetricsFile, read_metrics
from nemo_aligner.utils.errors import CheckpointError, ConfigError


def scalars(folder: Path, name: str) -> list[tuple[int, float]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder / "tensorboard"))
    events.Reload()
    return [(event.step, round(event.value, 5)) for event in events.Scalars(name)]


ROWS = [
    (0, {"validation/loss": 0.7}),
    (1, {"train/loss": 0.1}),
    (2, {"train/loss": 0.2}),
    (2, {"validation/loss": 0.5}),
    (3, {"train/loss": 0.3}),
    (3, {"validation/loss": 0.3}),
]
LATER = [(3, {"train/loss": 0.33, "train/new": 1.0})]
Rows = list[tuple[int, dict[str, float]]]


def log(folder: Path, start: int, rows: Rows) -> None:
    logger = build_loggers(ExpManagerConfig(explicit_log_dir=str(folder)), {}, start)
    for step, metrics in rows:
        logger.log(metrics, step)
    logger.close()


def logged(folder: Path) -> dict[str, Rows]:
    """What each file has of a run; TensorBoard has its numbers by name."""
    with (folder / "csv" / "metrics.csv").open(newline="") as lines:
        rows = [{k: float(v) for k, v in row.items() if v} for row in csv.DictReader(lines)]
    files = {"csv": rows, "metrics.jsonl": list(read_metrics(folder / "metrics.jsonl"))}
    return {
        name: [(int(row.pop("step")), row) for row in file_rows]
        for name, file_rows in files.items()
    }


def check_logged(folder: Path, expected: Rows) -> None:
    assert logged(folder) == {"csv": expected, "metrics.jsonl": expected}
    for name in ("train/loss", "validation/loss"):
        of_name = [(step, row[name]) for step, row in expected if name in row]
        assert scalars(folder, name) == of_name


def test_logs_go_on_where_the_checkpoint_was_and_begin_anew_where_there_is_none(
    tmp_path: Path,
) -> None:
    log(tmp_path, 0, ROWS)
    # Killed while it wrote a line.
    for name, text in (("csv/metrics.csv", "4,0."), ("metrics.jsonl", '{"step": 4, "train/lo')):
        with (tmp_path / name).open("a") as lines:
            lines.write(text)
    log(tmp_path, 2, LATER)
    check_logged(tmp_path, [*ROWS[:4], *LATER])
    rows = [(0, {"validation/loss": 0.9}), (1, {"train/loss": 0.8})]
    log(tmp_path, 0, rows)
    check_logged(tmp_path, rows)


def test_logger_that_is_not_installed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loggers, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"create_wandb_logger: .* wandb is not installed"):
        check_loggers(ExpManagerConfig(create_tensorboard_logger=False, create_wandb_logger=True))
    check_loggers(ExpManagerConfig(create_tensorboard_logger=False))


def test_logger_that_fails_ends_no_run_and_is_told_no_more(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    failing, other = Mock(), Mock()
    full = ValueError("not supported")
    full.__cause__ = OSError("the disk is full")
    failing.log_metrics.side_effect = [None, full]
    both = {"failing": failing, "other": other}
    logger = MetricLoggers(MetricsFile(tmp_path / "metrics.jsonl", 0), both)
    for step in (1, 2, 3):
        logger.log({"train/loss": 0.5}, step)
    logger.close()
    assert failing.log_metrics.call_count == 2
    failing.finalize.assert_not_called()
    assert [call.args[1] for call in other.log_metrics.call_args_list] == [1, 2, 3]
    assert [row["step"] for row in read_metrics(tmp_path / "metrics.jsonl")] == [1, 2, 3]
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith("failing: logging stopped (OSError: the disk is full);")


def test_loggers_of_a_run_that_fails_are_closed_as_failed(tmp_path: Path) -> None:
    for error, status in ((None, "success"), (ValueError("no"), "failed")):
        logger = Mock()
        file = MetricsFile(tmp_path / "metrics.jsonl", 0)
        with suppress(ValueError), MetricLoggers(file, {"service": logger}):
            if error is not None:
                raise error
        logger.finalize.assert_called_once_with(status)
        with pytest.raises(ValueError, match="closed file"):
            file.log({"train/loss": 0.5}, 1)


def test_services_are_closed_if_another_logger_cannot_be_opened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    service = Mock()
    monkeypatch.setattr(loggers, "build_tracked_loggers", lambda *arguments: {"wandb": service})
    failing = Mock(side_effect=OSError("the disk is full"))
    monkeypatch.setattr(loggers, "_csv_logger", failing)
    config = ExpManagerConfig(explicit_log_dir=str(tmp_path), create_tensorboard_logger=False)
    with pytest.raises(OSError, match="the disk is full"):
        build_loggers(config, {}, 0)
    service.finalize.assert_called_once_with("failed")


def test_metrics_file_has_every_number_at_once_and_null_where_one_is_not_finite(
    tmp_path: Path,
) -> None:
    path = tmp_path / "run" / "metrics.jsonl"
    assert list(read_metrics(path)) == []
    file = MetricsFile(path, 0)
    file.log({"a": math.nan, "b": math.inf, "c": -math.inf, "d": 2}, 1)
    assert path.read_text() == '{"step": 1, "a": null, "b": null, "c": null, "d": 2.0}\n'
    file._lines = Mock(**{"flush.side_effect": OSError(errno.ENOSPC, "No space left on device")})
    with pytest.raises(CheckpointError, match=r"metrics of step 7 .*: the disk is full, with "):
        file.log({"train/loss": 0.5}, 7)
