"""Send the metrics of a run to its files, to W&B and MLflow, and to the user's callback."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TypeAlias

from nemo_aligner.checkpoint.run_folder import METRICS_NAME
from nemo_aligner.config.training import RunFolderConfig
from nemo_aligner.training.metric_files import CsvFile, MetricsFile, TensorBoardFile
from nemo_aligner.training.side_outputs import attempt_output
from nemo_aligner.training.tracking import (
    FAILED,
    SUCCESS,
    build_tracked_loggers,
    close_loggers,
)
from nemo_aligner.utils.errors import CheckpointError, ConfigError
from nemo_aligner.utils.processes import is_main


def check_loggers(config: RunFolderConfig) -> None:
    """Check that the packages of all enabled loggers are installed, before anything is built.

    Raises:
        ConfigError: the package of an enabled logger is not installed.
    """
    for key, is_enabled, module in (
        ("create_tensorboard_logger", config.create_tensorboard_logger, "tensorboard"),
        ("create_wandb_logger", config.create_wandb_logger, "wandb"),
        ("create_mlflow_logger", config.create_mlflow_logger, "mlflow"),
    ):
        if is_enabled and find_spec(module) is None:
            raise ConfigError(
                f"exp_manager.{key}: got true, but the package {module} is not installed. Install "
                f"it (pip install {module}), or set exp_manager.{key}=false"
            )


@dataclass(frozen=True)
class TrainingProgress:
    """The argument of the callback of ``nemo_aligner.train``: metrics that were just logged.

    Attributes:
        step: number of steps done; 0 for a validation before the first step.
        total_steps: last step of the run if nothing ends it earlier.
        metrics: values by their names in ``metrics.jsonl``, such as ``train/loss``.
    """

    step: int
    total_steps: int
    metrics: dict[str, float]


Callback: TypeAlias = Callable[[TrainingProgress], object]


class MetricLoggers:
    """Sends metrics to ``metrics.jsonl``, to the loggers, and to the callback.

    Only rank 0 logs; on all other ranks every method does nothing.

    A logger may fail because its service or a disk is unreachable. Then a message is printed, the
    logger gets no more metrics, and the run continues. An error of the callback ends the run,
    because the callback is the caller's own code.

    As a context manager it closes everything at the end. If the block raises, the services show the
    run as failed.
    """

    def __init__(
        self,
        file: MetricsFile | None = None,
        loggers: Mapping[str, Any] | None = None,
        callback: Callback | None = None,
        total_steps: int = 0,
    ) -> None:
        self._file, self._loggers = file, dict(loggers or {})
        self._callback, self._total_steps = callback, total_steps

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Log metrics after ``step``, the number of steps done.

        Raises:
            CheckpointError: ``metrics.jsonl`` cannot be written.
        """
        if self._file is not None:
            self._file.log(metrics, step)
        self._for_each_logger(lambda logger: logger.log_metrics(dict(metrics), step))
        if self._callback is not None:
            self._callback(TrainingProgress(step, self._total_steps, dict(metrics)))

    def __enter__(self) -> MetricLoggers:
        return self

    def __exit__(self, kind: type[BaseException] | None, *unused: object) -> None:
        try:
            self.close(SUCCESS if kind is None else FAILED)
        except CheckpointError:
            if kind is None:  # otherwise the error of the block is the one to raise
                raise

    def close(self, status: str = SUCCESS) -> None:
        """Close all loggers and the file.

        ``status``, ``SUCCESS`` or ``FAILED``, is the outcome of the run that W&B and MLflow show.

        Raises:
            CheckpointError: the last lines of ``metrics.jsonl`` cannot be written.
        """
        # Close the file last: on a full disk it raises, and the services must still get the status.
        try:
            self._for_each_logger(lambda logger: logger.finalize(status))
        finally:
            if self._file is not None:
                self._file.close()

    def _for_each_logger(self, call: Callable[[Any], None]) -> None:
        """Pass every logger to ``call``; after an error, print a message and drop that logger."""
        consequence = f"{METRICS_NAME} still gets every number"
        for name, logger in list(self._loggers.items()):
            if not attempt_output(partial(call, logger), name, "logging", consequence):
                del self._loggers[name]


def build_loggers(
    config: RunFolderConfig,
    settings: Mapping[str, Any],
    start_step: int,
    callback: Callback | None = None,
    total_steps: int = 0,
) -> MetricLoggers:
    """Open ``metrics.jsonl`` and the loggers that the settings enable, in ``explicit_log_dir``.

    A resumed run deletes the entries of steps after ``start_step``, because it computes these steps
    again. W&B and MLflow cannot delete entries, so they get these steps twice.

    Args:
        settings: the run's resolved settings, which are logged with the metrics.
        start_step: number of steps that the run has done already.
        callback: the user's function, which is called with all metrics that are logged; None if
            there is none.

    Raises:
        ConfigError: W&B or MLflow rejects the run, or ``metrics.jsonl`` cannot be written.
        CheckpointError: ``tracking.json`` in the folder is damaged.
    """
    if not is_main():
        return MetricLoggers()
    folder = Path(config.explicit_log_dir)
    tracked = build_tracked_loggers(config, settings, start_step)
    try:
        file = MetricsFile(folder / METRICS_NAME, start_step)
        loggers: dict[str, Any] = {}
        if config.create_tensorboard_logger:
            loggers["tensorboard"] = TensorBoardFile(folder / "tensorboard", start_step)
        if config.create_csv_logger:
            loggers["csv"] = CsvFile(folder / "csv" / "metrics.csv", start_step)
    except BaseException:
        close_loggers(tracked.values(), FAILED)
        raise
    return MetricLoggers(file, loggers | tracked, callback, total_steps)
