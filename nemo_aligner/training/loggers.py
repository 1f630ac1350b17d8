"""Who is told of a run's metrics: files, tracking services and the person at the terminal."""

from __future__ import annotations

import csv
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TypeAlias

from nemo_aligner.checkpoint.run_folder import METRICS_NAME
from nemo_aligner.config.training import RunFolderConfig
from nemo_aligner.console import say
from nemo_aligner.errors import ConfigError, one_line
from nemo_aligner.processes import is_main
from nemo_aligner.training.metrics_file import MetricsFile
from nemo_aligner.training.tracking import build_tracked_loggers


def check_loggers(config: RunFolderConfig) -> None:
    """Refuse, before anything is built, a logger whose package is not there.

    Raises:
        ConfigError: it is not installed.
    """
    for key, wanted, module in (
        ("create_tensorboard_logger", config.create_tensorboard_logger, "tensorboard"),
        ("create_wandb_logger", config.create_wandb_logger, "wandb"),
        ("create_mlflow_logger", config.create_mlflow_logger, "mlflow"),
    ):
        if wanted and find_spec(module) is None:
            raise ConfigError(
                f"exp_manager.{key}: got true, but the package {module} is not installed "
                f"(pip install {module})"
            )


@dataclass(frozen=True)
class TrainingProgress:
    """What a callback of a run is told: the metrics that were logged after ``step``.

    Attributes:
        step: counted from 1; 0 is before the first.
        total_steps: the last one, if nothing ends the run before.
        metrics: by the names of ``metrics.jsonl``, as ``train/loss``.
    """

    step: int
    total_steps: int
    metrics: dict[str, float]


Callback: TypeAlias = Callable[[TrainingProgress], object]


class MetricLoggers:
    """The run's own file and loggers as Lightning has them on rank 0; nothing on the others.

    A logger that fails, be it that its service or a disk is gone, hears no more of the run; that
    is said, and does not end it. What a callback raises does end the run: it is its caller's.
    """

    def __init__(self, file: MetricsFile | None = None, loggers: Sequence[Any] = ()) -> None:
        self._file, self._loggers = file, list(loggers)
        self._callback: Callback | None = None
        self._total_steps = 0

    def call(self, callback: Callback, total_steps: int) -> None:
        """Tell ``callback``, too, on rank 0; before the first ``log``."""
        if self._file is not None:
            self._callback, self._total_steps = callback, total_steps

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Write the metrics of a step, counted from 1.

        Raises:
            CheckpointError: the run's own file cannot be written.
        """
        if self._file is not None:
            self._file.log(metrics, step)
        self._tell(lambda logger: logger.log_metrics(dict(metrics), step))
        if self._callback is not None:
            self._callback(TrainingProgress(step, self._total_steps, dict(metrics)))

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
        self._tell(lambda logger: logger.finalize("success"))

    def _tell(self, tell: Callable[[Any], None]) -> None:
        for logger in list(self._loggers):
            try:
                tell(logger)
            except Exception as error:  # whatever its package raises
                self._loggers.remove(logger)
                cause = error.__cause__ or error
                say(
                    f"{logger.name}: it hears no more of this run ({type(cause).__name__}: "
                    f"{one_line(cause)}); {METRICS_NAME} has every number"
                )


def build_loggers(
    config: RunFolderConfig, settings: Mapping[str, Any], start_step: int
) -> MetricLoggers:
    """``metrics.jsonl`` and the loggers asked for, in ``explicit_log_dir``.

    ``settings`` is the run's resolved config.
    A run that goes on keeps what was logged up to ``start_step``; later steps are logged anew, but
    not by services that take nothing back.

    Raises:
        ConfigError, CheckpointError: see ``build_tracked_loggers``.
    """
    if not is_main():
        return MetricLoggers()
    folder = Path(config.explicit_log_dir)
    # They ask the file of the run before, which the next line cuts.
    tracked = build_tracked_loggers(config, settings, start_step)
    file = MetricsFile(folder / METRICS_NAME, start_step)
    loggers: list[Any] = []
    if config.create_tensorboard_logger:
        loggers.append(_tensorboard_logger(folder, start_step))
    if config.create_csv_logger:
        loggers.append(_csv_logger(folder, start_step))
    for logger in loggers:
        logger.log_hyperparams(dict(settings))
    return MetricLoggers(file, [*loggers, *tracked])


def _tensorboard_logger(folder: Path, start_step: int) -> Any:
    from lightning.pytorch.loggers import TensorBoardLogger

    return TensorBoardLogger(
        save_dir=str(folder),
        name="tensorboard",
        version="",
        default_hp_metric=False,
        # Of a run that was killed before its first checkpoint nothing is kept.
        purge_step=start_step + 1 if start_step else 0,
    )


def _csv_logger(folder: Path, start_step: int) -> Any:
    from lightning.pytorch.loggers import CSVLogger

    logger = CSVLogger(save_dir=str(folder), name="csv", version="", flush_logs_every_n_steps=1)
    kept = _rows_until(Path(logger.log_dir) / "metrics.csv", start_step)
    with warnings.catch_warnings():
        # Lightning deletes the file of the run before; its rows are written again below.
        warnings.filterwarnings("ignore", message="Experiment logs directory")
        experiment = logger.experiment
    for step, row in kept:
        experiment.log_metrics(row, step)
    experiment.save()
    return logger


def _rows_until(path: Path, last_step: int) -> list[tuple[int, dict[str, float]]]:
    """Step and metrics of every whole row up to ``last_step``; none of a run that begins anew."""
    if last_step == 0 or not path.is_file():
        return []
    rows = []
    with path.open(newline="") as lines:
        for row in csv.DictReader(lines):
            step = row.pop("step", None)
            if step is not None and step.isdigit() and int(step) <= last_step:
                rows.append((int(step), _numbers(row)))
    return rows


def _numbers(row: Mapping[str, str | None]) -> dict[str, float]:
    """The cells that hold a number: a run that was killed may have left half a line."""
    values = {}
    for key, value in row.items():
        with suppress(TypeError, ValueError):
            values[key] = float(value)  # type: ignore[arg-type]
    return values
