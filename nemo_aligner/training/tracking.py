"""Weights & Biases and MLflow: a resumed run continues as the same run there.

Lightning's loggers resume a run by its id; ``tracking.json`` in the run's folder keeps the id at
each service. A service takes nothing back: steps that are computed again after a checkpoint are
logged again there.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterator, Mapping
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


def _open_wandb(
    folder: Path, options: Mapping[str, Any], run_id: str | None, settings: Mapping[str, Any]
) -> tuple[Any, str]:
    """Lightning's logger of a W&B run, online or offline, with its files in ``wandb/``; its id."""
    from lightning.pytorch.loggers import WandbLogger

    class OneRunLogger(WandbLogger):
        def finalize(self, status: str) -> None:
            super().finalize(status)
            # Else a second run of this process would be logged as a part of the first.
            self.experiment.finish()

    logger = OneRunLogger(**{"name": folder.name, "save_dir": str(folder), "id": run_id, **options})
    logger.log_hyperparams(dict(settings))
    return logger, str(logger.experiment.id)


def _open_mlflow(
    folder: Path, options: Mapping[str, Any], run_id: str | None, settings: Mapping[str, Any]
) -> tuple[Any, str]:
    """Lightning's logger of a run at an MLflow server, or in ``mlflow.db``; its id."""
    from lightning.pytorch.loggers import MLFlowLogger

    arguments: dict[str, Any] = {"run_name": folder.name, "run_id": run_id}
    has_server = {"tracking_uri", "save_dir"} & {*options} or "MLFLOW_TRACKING_URI" in os.environ
    if not has_server:
        path = folder.resolve()
        # MLflow 3 refuses to write plain files.
        arguments["tracking_uri"] = f"sqlite:///{path / 'mlflow.db'}"
        arguments["artifact_location"] = (path / "mlflow_artifacts").as_uri()
    arguments.update(options)
    logger = MLFlowLogger(**arguments)
    if arguments["run_id"] is None:
        logger.log_hyperparams(flatten(settings))
    else:
        # MLflow forbids to change parameters; those of the run's start stay.
        logger.experiment.update_run(arguments["run_id"], status="RUNNING")
    return logger, str(logger.run_id)


_SERVICES: dict[str, Open] = {"wandb": _open_wandb, "mlflow": _open_mlflow}


def build_tracked_loggers(
    config: RunFolderConfig, settings: Mapping[str, Any], start_step: int
) -> dict[str, Any]:
    """Open the services asked for, each in its existing run, or in a new one at step 0.

    Returns:
        Lightning's loggers by the names of the services.

    Raises:
        ConfigError: a service does not take the run.
        CheckpointError: the folder's ``tracking.json`` is not what was written.
    """
    folder = Path(config.explicit_log_dir)
    path = folder / TRACKING_NAME
    previous_ids = _read_ids(path) if start_step > 0 else {}
    loggers, ids = {}, {}
    for name, options in _options_by_service(config).items():
        folder.mkdir(parents=True, exist_ok=True)
        try:
            loggers[name], ids[name] = _SERVICES[name](
                folder, options, previous_ids.get(name), settings
            )
        # The services' packages raise what they like, and a setting may be none of theirs.
        except Exception as error:
            raise ConfigError(
                f"exp_manager.create_{name}_logger: got true, but the run cannot be logged there "
                f"({type(error).__name__}: {one_line(error)}); settings of that logger are "
                f"exp_manager.{name}_logger_kwargs"
            ) from error
    if ids or path.is_file():
        content = {name: {"id": run_id} for name, run_id in ids.items()}
        write_lines(path, [json.dumps(content, indent=2)])
    return loggers


def _options_by_service(config: RunFolderConfig) -> dict[str, dict[str, Any]]:
    """Arguments of each logger that is asked for, by the name of its service."""
    services = {
        "wandb": (config.create_wandb_logger, config.wandb_logger_kwargs),
        "mlflow": (config.create_mlflow_logger, config.mlflow_logger_kwargs),
    }
    return {name: options for name, (is_wanted, options) in services.items() if is_wanted}


def _read_ids(path: Path) -> dict[str, str]:
    """Read the id of the run at each service; empty without a file.

    Raises:
        CheckpointError: it is not what ``build_tracked_loggers`` writes.
    """
    if not path.is_file():
        return {}
    try:
        return {name: str(run["id"]) for name, run in read_json(path, str(path)).items()}
    except (TypeError, KeyError, AttributeError) as error:
        raise CheckpointError(
            f"{path}: got {type(error).__name__}: {error}, wanted the id of the run at each "
            "service; without the file a new run begins there"
        ) from error


# ``metrics.jsonl`` in the folder of a run: every number that is logged, a JSON object a line.


class MetricsFile:
    """Appends to the file of a run; a line is on its way to the disk before ``log`` returns.

    What a run before this one had logged after ``start_step`` is cut off; at 0 that is all.
    """

    def __init__(self, path: Path, start_step: int) -> None:
        _forget_after(path, start_step)
        self._path, self._lines = path, path.open("a", encoding="utf-8")

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """A line of ``step`` and the metrics; null for NaN and infinity, which JSON has not.

        Raises:
            CheckpointError: it cannot be written.
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
        self._lines.close()


def read_metrics(path: Path) -> Iterator[dict[str, Any]]:
    """Read every whole line, in the order of the file; the last one may be half of one.

    A step has one line of its training, and others of its validation and of its checkpoint.
    """
    if not path.is_file():
        return
    with path.open(encoding="utf-8", errors="replace") as lines:
        for line in lines:
            row = _as_row(line)
            if row is not None:
                yield row


def _as_row(line: str) -> dict[str, Any] | None:
    try:
        row = json.loads(line)
    except ValueError:
        return None
    return row if isinstance(row, dict) and isinstance(row.get("step"), int) else None


def _forget_after(path: Path, last_step: int) -> None:
    kept = (row for row in read_metrics(path) if last_step > 0 and row["step"] <= last_step)
    write_lines(path, map(json.dumps, kept))


def _finite(value: float) -> float | None:
    number = float(value)
    return number if math.isfinite(number) else None
