"""Weights & Biases, MLflow, and the file ``metrics.jsonl`` in the folder of a run.

Lightning's loggers resume a run at a service by its id. ``tracking.json`` in the run's folder keeps
the id at each service, so a resumed training run continues as the same run there. A service cannot
delete numbers: steps that are computed again after a checkpoint are logged there a second time.
``metrics.jsonl`` has each step once.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from nemo_aligner.checkpoint.run_folder import TRACKING_NAME
from nemo_aligner.checkpoint.safe_load import read_json
from nemo_aligner.config.load import flatten
from nemo_aligner.config.training import RunFolderConfig
from nemo_aligner.data.records import write_lines
from nemo_aligner.utils.errors import CheckpointError, ConfigError, one_line
from nemo_aligner.utils.writing import write_problem

Open = Callable[[Path, Mapping[str, Any], "str | None", Mapping[str, Any]], tuple[Any, str]]
"""Opens a service's logger for the run's folder, the user's arguments of the logger, the id of the
run that continues there (None for a new one), and the settings. Returns the logger and the id."""
# Outcomes of a run, as Lightning's loggers name them.
SUCCESS, FAILED = "success", "failed"


def _open_wandb(
    folder: Path, options: Mapping[str, Any], run_id: str | None, settings: Mapping[str, Any]
) -> tuple[Any, str]:
    """Open Lightning's logger of a W&B run, online or offline, with its files in ``wandb/``."""
    from lightning.pytorch.loggers import WandbLogger

    class OneRunLogger(WandbLogger):
        """Ends the W&B run with the training run, even if that failed.

        Otherwise the next training run of this process would be logged as a part of it.
        """

        def finalize(self, status: str) -> None:
            super().finalize(status)
            self.experiment.finish(exit_code=0 if status == SUCCESS else 1)

    logger = OneRunLogger(**{"name": folder.name, "save_dir": str(folder), "id": run_id, **options})
    logger.log_hyperparams(dict(settings))
    return logger, str(logger.experiment.id)


def _open_mlflow(
    folder: Path, options: Mapping[str, Any], run_id: str | None, settings: Mapping[str, Any]
) -> tuple[Any, str]:
    """Open Lightning's logger of a run at an MLflow server, or in ``mlflow.db``."""
    from lightning.pytorch.loggers import MLFlowLogger

    arguments: dict[str, Any] = {"run_name": folder.name, "run_id": run_id}
    has_server = {"tracking_uri", "save_dir"} & {*options} or "MLFLOW_TRACKING_URI" in os.environ
    if not has_server:
        path = folder.resolve()
        # MLflow 3 does not support plain files any more.
        arguments["tracking_uri"] = f"sqlite:///{path / 'mlflow.db'}"
        arguments["artifact_location"] = (path / "mlflow_artifacts").as_uri()
    arguments.update(options)
    logger = MLFlowLogger(**arguments)
    logger.log_hyperparams(_new_parameters(logger, arguments["run_id"], flatten(settings)))
    return logger, str(logger.run_id)


def _new_parameters(logger: Any, run_id: str | None, parameters: dict[str, Any]) -> dict[str, Any]:
    """Select the parameters that an MLflow run does not have yet, and mark the run as running.

    MLflow forbids to change parameters, so a run that continues keeps those of its start. A run
    that the user names by its id may have some already, too.
    """
    if run_id is None:
        return parameters
    logger.experiment.update_run(run_id, status="RUNNING")
    existing = logger.experiment.get_run(run_id).data.params
    return {key: value for key, value in parameters.items() if key not in existing}


_SERVICES: dict[str, Open] = {"wandb": _open_wandb, "mlflow": _open_mlflow}


def build_tracked_loggers(
    config: RunFolderConfig, settings: Mapping[str, Any], start_step: int
) -> dict[str, Any]:
    """Open the services that the settings name: the existing run at each, or a new one at step 0.

    Args:
        settings: the run's resolved settings, which become its parameters.
        start_step: steps that the run has done already.

    Returns:
        Lightning's loggers by the names of the services.

    Raises:
        ConfigError: a service rejects the run; the others are closed.
        CheckpointError: ``tracking.json`` in the folder is damaged.
    """
    folder = Path(config.explicit_log_dir)
    path = folder / TRACKING_NAME
    previous_ids = _read_ids(path) if start_step > 0 else {}
    loggers: dict[str, Any] = {}
    ids: dict[str, str] = {}
    try:
        for name, options in _options_by_service(config).items():
            folder.mkdir(parents=True, exist_ok=True)
            loggers[name], ids[name] = _open_service(
                name, folder, options, previous_ids.get(name), settings
            )
        if ids or path.is_file():
            content = {name: {"id": run_id} for name, run_id in ids.items()}
            write_lines(path, [json.dumps(content, indent=2)])
    except BaseException:
        close_loggers(loggers.values(), FAILED)
        raise
    return loggers


def _open_service(name: str, *arguments: Any) -> tuple[Any, str]:
    """Open a service's logger; a ConfigError that names its settings if the service rejects it."""
    try:
        return _SERVICES[name](*arguments)
    # The services' packages raise all kinds of errors, and an argument may not exist there.
    except Exception as error:
        raise ConfigError(
            f"exp_manager.create_{name}_logger: got true, but the run cannot be logged there "
            f"({type(error).__name__}: {one_line(error)}). Change "
            f"exp_manager.{name}_logger_kwargs, or set exp_manager.create_{name}_logger=false"
        ) from error


def close_loggers(loggers: Iterable[Any], status: str) -> None:
    """Close Lightning's loggers after an error, whatever their packages raise meanwhile."""
    for logger in loggers:
        with suppress(Exception):
            logger.finalize(status)


def _options_by_service(config: RunFolderConfig) -> dict[str, dict[str, Any]]:
    """Arguments of each logger that the settings enable, by the name of its service."""
    services = {
        "wandb": (config.create_wandb_logger, config.wandb_logger_kwargs),
        "mlflow": (config.create_mlflow_logger, config.mlflow_logger_kwargs),
    }
    return {name: options for name, (is_enabled, options) in services.items() if is_enabled}


def _read_ids(path: Path) -> dict[str, str]:
    """Read the id of the run at each service; empty without a file.

    Raises:
        CheckpointError: the file does not have the form that ``build_tracked_loggers`` writes.
    """
    if not path.is_file():
        return {}
    try:
        return {name: str(run["id"]) for name, run in read_json(path, str(path)).items()}
    except (TypeError, KeyError, AttributeError) as error:
        raise CheckpointError(
            f"{path}: got {type(error).__name__}: {error}, wanted the id of the run at each "
            "service. Delete the file to begin a new run there"
        ) from error


# ``metrics.jsonl`` in the folder of a run: all logged numbers, one JSON object per line.


class MetricsFile:
    """Appends lines to a run's metrics file; ``log`` returns when the line is in the file.

    A resumed run first cuts off the lines of steps after ``start_step``; 0 cuts off all.
    """

    def __init__(self, path: Path, start_step: int) -> None:
        _cut_after(path, start_step)
        self._path, self._lines = path, path.open("a", encoding="utf-8")

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Write a line of ``step`` and the metrics; NaN and infinity, which JSON lacks, are null.

        Raises:
            CheckpointError: the line cannot be written.
        """
        row = {"step": step, **{name: _finite(value) for name, value in metrics.items()}}
        try:
            self._lines.write(json.dumps(row, allow_nan=False) + "\n")
            self._lines.flush()
        except OSError as error:
            raise CheckpointError(
                f"{self._path}: the metrics of step {step} cannot be written: "
                f"{write_problem(self._path, error)}"
            ) from error

    def close(self) -> None:
        """Close the file."""
        self._lines.close()


def read_metrics(path: Path) -> Iterator[dict[str, Any]]:
    """Read every complete line, in the order of the file; the last one may be incomplete.

    Training, validation and saving each write their own line for a step.
    """
    if not path.is_file():
        return
    with path.open(encoding="utf-8", errors="replace") as lines:
        for line in lines:
            row = _parse_row(line)
            if row is not None:
                yield row


def _parse_row(line: str) -> dict[str, Any] | None:
    """Parse a line of metrics; None if it is damaged."""
    try:
        row = json.loads(line)
    except ValueError:
        return None
    return row if isinstance(row, dict) and isinstance(row.get("step"), int) else None


def _cut_after(path: Path, last_step: int) -> None:
    """Rewrite the file with the lines of steps up to ``last_step``; with none if that is 0."""
    rows = (row for row in read_metrics(path) if last_step > 0 and row["step"] <= last_step)
    write_lines(path, map(json.dumps, rows))


def _finite(value: float) -> float | None:
    """Return the number, or None for NaN and infinity."""
    number = float(value)
    return number if math.isfinite(number) else None
