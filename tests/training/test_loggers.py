"""Where metrics of a run go: files, services, a terminal of 80 columns; and the GPU's gauges."""

from __future__ import annotations

import csv
import errno
import math
from contextlib import suppress
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch

from nemo_aligner.checkpoint.run import RunState, Saved
from nemo_aligner.config.common import Precision
from nemo_aligner.config.training import ExpManagerConfig
from nemo_aligner.distributed.launch import launch
from nemo_aligner.training import loggers
from nemo_aligner.training.gauges import Gauges
from nemo_aligner.training.loggers import MetricLoggers, build_loggers, check_loggers
from nemo_aligner.training.metric_files import MetricsFile, read_metrics
from nemo_aligner.training.progress import StepProgress, render_best, render_validation
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
    # A run that has ended measures its model again.
    for accuracy in (0.5, 0.75):
        test = (3, {"test-pairs/accuracy": accuracy})
        log(tmp_path, 3, [test])
        check_logged(tmp_path, [*ROWS[:4], *LATER, test])
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


def test_loggers_of_a_run_on_a_full_disk_are_closed_as_failed(tmp_path: Path) -> None:
    """The file's text is written again when it is closed, and the first error is the run's."""
    logger, file = Mock(), MetricsFile(tmp_path / "metrics.jsonl", 0)
    file._lines.close()
    file._lines = Path("/dev/full").open("a", encoding="utf-8")  # noqa: SIM115 - the file closes it
    with (
        pytest.raises(CheckpointError, match=r"the metrics of step 1 cannot be written"),
        MetricLoggers(file, {"service": logger}) as loggers,
    ):
        loggers.log({"train/loss": 1.0}, 1)
    logger.finalize.assert_called_once_with("failed")


def test_services_are_closed_if_another_logger_cannot_be_opened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    service = Mock()
    monkeypatch.setattr(loggers, "build_tracked_loggers", lambda *arguments: {"wandb": service})
    failing = Mock(side_effect=OSError("the disk is full"))
    monkeypatch.setattr(loggers, "CsvFile", failing)
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


# What a terminal shows.

STEP = {
    "train/loss": 0.693147,
    "train/accuracy": 0.875,
    "train/grad_norm": 12.3456,
    "train/lr": 1.97e-05,
    "train/tokens_per_second": 123456.7,
}


def steps_shown(total: int, output: str) -> list[int]:
    lines = [line for line in output.splitlines() if line.startswith("step ")]
    assert all(f"/{total}" in line for line in lines)
    return [int(line.split()[1].partition("/")[0]) for line in lines]


def test_steps_of_a_short_run_are_shown_each(capsys: pytest.CaptureFixture[str]) -> None:
    for total, start, shown in (
        (5, 0, [1, 2, 3, 4, 5]),
        (100, 95, [96, 97, 98, 99, 100]),
        (100, 0, [1, 100]),
        (100, 40, [41, 100]),
    ):
        progress = StepProgress(total, start, 10)
        for step in range(start + 1, total + 1):
            progress.show(step, STEP)
        progress.close()
        assert steps_shown(total, capsys.readouterr().out) == shown


def test_line_of_a_step_wraps_and_loses_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    saved = Saved(Path("step_00000500"), RunState(500, 4000, {"validation-heldout/accuracy": 0.71}))
    best = render_best(saved, "validation-heldout/accuracy")
    gauges = {"train/mfu": 0.4123, "train/gpu_memory_gb": 61.23, "train/gpu_power_watts": 652.4}
    for more, ending in (
        (({},), ""),
        (({**gauges}, best), " MFU 41.2% GPU 61.2 GB 652 W best accuracy 0.71 at step 500"),
    ):
        StepProgress(1000, 0, 10).show(1, {**STEP, **more[0]}, *more[1:])
        lines = capsys.readouterr().out.splitlines()
        assert max(map(len, lines)) <= 80
        assert lines[0].startswith("step 1/1000  ")
        assert lines[1].startswith("  ")
        shown = " ".join(" ".join(lines).split())
        fields = "left loss 0.6931 accuracy 0.875 grad_norm 12.35 lr 1.97e-05 123457 tokens/s"
        assert shown.endswith(fields + ending)
    assert render_best(None, "validation-heldout/accuracy") is None


def test_time_left_counts_steps_and_validations() -> None:
    """Also one before the first step."""
    now = 100.0
    progress = StepProgress(10, 0, 4)
    progress._clock = lambda: now
    progress.begin()
    now += 4.0
    assert progress.seconds_left(2) == 16.0
    now += 4.0 + 30.0  # two steps, and a validation
    progress.add_validation(30.0)
    assert progress.seconds_left(4) == 6 * 2.0 + 2 * 30.0
    progress = StepProgress(10, 0, None)
    progress._clock = lambda: now
    now += 30.0
    progress.add_validation(30.0)
    progress.begin()
    now += 5.0
    assert progress.seconds_left(5) == 5.0 + 30.0


def test_validation_is_told_set_by_set() -> None:
    names = ("loss", "accuracy", "ties", "reward_margin", "ece", "brier")
    lengths = ("accuracy_longer_chosen", "accuracy_shorter_chosen")
    metrics = {f"validation-pairs/{name}": 0.25 for name in (*names, *lengths)}
    metrics |= {f"validation-pairs/by_source/source {n}/accuracy": 0.5 for n in range(5)}
    metrics |= {"validation-pairs/by_source/source 1/loss": 0.1, "validation-more/loss": 0.75}
    assert render_validation(24, metrics).splitlines() == [
        "step 24: validation-pairs",
        "  loss 0.25  accuracy 0.25  ties 0.25  reward_margin 0.25  ece 0.25",
        "  accuracy_longer_chosen 0.25  accuracy_shorter_chosen 0.25",
        "  accuracy by source:  source 0 0.500  source 1 0.500  source 2 0.500",
        "    source 3 0.500  source 4 0.500",
        "step 24: validation-more",
        "  loss 0.75",
    ]


# Gauges of the GPU.


def pretend(monkeypatch: pytest.MonkeyPatch, name: str, power: int | Exception) -> None:
    def power_draw(device: torch.device) -> int:
        if isinstance(power, Exception):
            raise power
        return power

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (60e9, 141e9))
    monkeypatch.setattr(torch.cuda, "power_draw", power_draw)


def test_gauges_of_a_known_gpu_an_unknown_one_and_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """By a stand-in for a GPU; what it does not say is left out."""
    with launch():
        assert Gauges.of("cpu", Precision.fp32).read(1e12, 1.0) == {}
        pretend(monkeypatch, "NVIDIA H200", 652_000)
        assert Gauges.of("cuda:0", Precision.bf16).read(989e12, 4.0) == {
            "mfu": pytest.approx(0.25),
            "gpu_memory_gb": 81.0,
            "gpu_power_watts": 652.0,
        }
        pretend(monkeypatch, "NVIDIA something new", ModuleNotFoundError("pynvml"))
        assert Gauges.of("cuda:0", Precision.bf16).read(1e12, 1.0) == {"gpu_memory_gb": 81.0}


def test_gauge_that_fails_in_a_run_is_told_once_and_ends_nothing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with launch():
        pretend(monkeypatch, "NVIDIA something new", 652_000)
        gauges = Gauges.of("cuda:0", Precision.bf16)
        assert set(gauges.read(None, 1.0)) == {"gpu_memory_gb", "gpu_power_watts"}
        pretend(monkeypatch, "NVIDIA something new", RuntimeError("NVMLError_Unknown"))
        assert [set(gauges.read(None, 1.0)) for _ in range(2)] == [{"gpu_memory_gb"}] * 2
    output = capsys.readouterr().out
    assert output.count("gpu_power_watts: measuring stopped (RuntimeError: NVMLError_Unknown)") == 1
