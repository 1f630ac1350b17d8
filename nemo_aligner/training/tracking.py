"""Log metrics to Weights & Biases and MLflow, through Lightning's loggers.

W&B and MLflow give each run an id. ``tracking.json`` in the run's folder keeps these ids, so that a
resumed training run continues the same run at each service. A resumed run repeats the steps after
its checkpoint. The services cannot delete the old values of these steps, so these steps appear
twice there. The files in the run's folder have each step once (``metric_files.py``).
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from nemo_aligner.checkpoint.run_folder import TRACKING_NAME
from nemo_aligner.checkpoint.safe_load import read_json
from nemo_aligner.config.load import flatten
from nemo_aligner.config.training import RunFolderConfig
from nemo_aligner.training.side_outputs import RUN_FOLDER, attempt_output
from nemo_aligner.utils.errors import CheckpointError, ConfigError, one_line
from nemo_aligner.utils.writing import write_lines

Open = Callable[[Path, Mapping[str, Any], "str | None", Mapping[str, Any]], tuple[Any, str]]
"""A function that opens Lightning's logger of a service.

Its arguments are the run's folder, the user's arguments for the logger, the id of the run to
continue (None for a new run), and the settings. It returns the logger and the run's id."""
# Characters of a metric's name that are escaped for MLflow: those that MLflow rejects, or Lightning
# removes; a slash or dot that makes an empty, ``.`` or ``..`` part; and the start of an escape.
_MLFLOW_ESCAPED = re.compile(
    r"[^a-zA-Z0-9_/. -]|^/|/(?=/|$)|(?<![^/])\.(?=\.?(?:/|$))|_(?=X[0-9a-f])"
)
# MLflow allows 250 characters, and the user's ``prefix`` takes some of them.
_MLFLOW_LENGTH, _MLFLOW_END = 200, 60
# Outcomes of a run, under the names that ``finalize`` of Lightning's loggers expects.
SUCCESS, FAILED = "success", "failed"


def _open_wandb(
    folder: Path, options: Mapping[str, Any], run_id: str | None, settings: Mapping[str, Any]
) -> tuple[Any, str]:
    """Open a W&B run through Lightning's logger, online or offline; its files are in ``wandb/``."""
    from lightning.pytorch.loggers import WandbLogger

    class OneRunLogger(WandbLogger):
        """A W&B logger of Lightning that ends the W&B run when training ends or fails.

        Otherwise the next training run in the same process would log to the same W&B run.
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
    """Open an MLflow run through Lightning's logger, on a server or in the file ``mlflow.db``."""
    from lightning.pytorch.loggers import MLFlowLogger

    class EscapingLogger(MLFlowLogger):
        """An MLflow logger of Lightning that MLflow rejects no metric of, whatever its name."""

        def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
            super().log_metrics({mlflow_name(key): metrics[key] for key in metrics}, step)

    arguments: dict[str, Any] = {"run_name": folder.name, "run_id": run_id}
    has_server = {"tracking_uri", "save_dir"} & {*options} or "MLFLOW_TRACKING_URI" in os.environ
    if not has_server:
        path = folder.resolve()
        # SQLite, because MLflow 3 can no longer log to plain files.
        arguments["tracking_uri"] = f"sqlite:///{path / 'mlflow.db'}"
        arguments["artifact_location"] = (path / "mlflow_artifacts").as_uri()
    arguments.update(options)
    logger = EscapingLogger(**arguments)
    logger.log_hyperparams(_new_parameters(logger, arguments["run_id"], flatten(settings)))
    return logger, str(logger.run_id)


def mlflow_name(name: str) -> str:
    """Escape the name of a metric for MLflow; different names stay different.

    The name may contain a source or a principle, which are any texts. A character that MLflow does
    not take becomes ``_X<code point in hex>_``, and a hash replaces the middle of a long name.
    """
    escaped = _MLFLOW_ESCAPED.sub(lambda match: f"_X{ord(match[0]):x}_", name)
    if len(escaped) <= _MLFLOW_LENGTH:
        return escaped
    middle = f"_{hashlib.sha256(escaped.encode()).hexdigest()[:16]}_"
    start = _MLFLOW_LENGTH - _MLFLOW_END - len(middle)
    return escaped[:start] + middle + escaped[-_MLFLOW_END:]


def _new_parameters(logger: Any, run_id: str | None, parameters: dict[str, Any]) -> dict[str, Any]:
    """Select the parameters that an MLflow run does not have yet, and mark the run as running.

    MLflow does not allow parameters to be changed. So a resumed run, or a run that the user selects
    by ``run_id``, keeps the values that were logged at its start.
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
    """Open a run at each service that the settings enable, and write its id to ``tracking.json``.

    A resumed training run continues its run at the service; one from step 0 gets a new run.

    Args:
        settings: the training run's resolved settings, which are logged as parameters.
        start_step: number of steps that the training run has done already.

    Returns:
        Lightning's loggers by the names of the services.

    Raises:
        ConfigError: a service rejects the run. Loggers that are open already are closed.
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
            # Keep the id of a service that is off in this part of the run.
            all_ids = {**previous_ids, **ids}
            content = {name: {"id": run_id} for name, run_id in all_ids.items()}
            write = partial(write_lines, path, [json.dumps(content, indent=2)], RUN_FOLDER)
            consequence = "if this run is resumed, each service will show it as a new run"
            attempt_output(write, TRACKING_NAME, "writing", consequence)
    except BaseException:
        close_loggers(loggers.values(), FAILED)
        raise
    return loggers


def _open_service(name: str, *arguments: Any) -> tuple[Any, str]:
    """Open the logger of the service ``name``.

    Raises:
        ConfigError: the service rejects the run; the message names the settings to change.
    """
    try:
        return _SERVICES[name](*arguments)
    # Catch every exception: the services' packages raise all kinds, also for a wrong argument of
    # the user.
    except Exception as error:
        raise ConfigError(
            f"exp_manager.create_{name}_logger: got true, but the run cannot be logged there "
            f"({type(error).__name__}: {one_line(error)}). Change "
            f"exp_manager.{name}_logger_kwargs, or set exp_manager.create_{name}_logger=false"
        ) from error


def close_loggers(loggers: Iterable[Any], status: str) -> None:
    """Close Lightning's loggers after an error; errors while closing are ignored."""
    for logger in loggers:
        with suppress(Exception):
            logger.finalize(status)


def _options_by_service(config: RunFolderConfig) -> dict[str, dict[str, Any]]:
    """Return the user's arguments for each enabled logger, by the name of its service."""
    services = {
        "wandb": (config.create_wandb_logger, config.wandb_logger_kwargs),
        "mlflow": (config.create_mlflow_logger, config.mlflow_logger_kwargs),
    }
    return {name: options for name, (is_enabled, options) in services.items() if is_enabled}


def _read_ids(path: Path) -> dict[str, str]:
    """Read the id of the run at each service from ``tracking.json``; empty if it does not exist.

    Raises:
        CheckpointError: the file does not have the form that ``build_tracked_loggers`` writes.
    """
    if not path.is_file():
        return {}
    try:
        return {name: str(run["id"]) for name, run in read_json(path, str(path)).items()}
    except (TypeError, KeyError, AttributeError) as error:
        raise CheckpointError(
            f"{path}: the file does not have the id of the run at each service "
            f"({type(error).__name__}: {error}). Delete the file to start a new run at each service"
        ) from error
