"""Weights & Biases and MLflow: a run that goes on stays the one run that it is there.

A service takes nothing back. So ``tracking.json`` in the run's folder has the id of the run there,
and how far it was logged: steps that are computed again after a checkpoint are not told twice.
"""

from __future__ import annotations

import json
import math
import os
import secrets
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from nemo_aligner.checkpoint.run_folder import METRICS_NAME, TRACKING_NAME
from nemo_aligner.checkpoint.safe_load import read_json
from nemo_aligner.config.load import flatten
from nemo_aligner.config.training import RunFolderConfig
from nemo_aligner.data.records import write_lines
from nemo_aligner.utils.errors import CheckpointError, ConfigError, one_line
from nemo_aligner.utils.writing import write_problem

_LONGEST_PARAMETER = 250  # what Lightning cuts MLflow's to
_WANDB_ID_BYTES = 4


@dataclass(frozen=True)
class Logged:
    """Progress of a log: everything before ``step``, and at ``step`` the metrics ``names``."""

    step: int = -1
    names: frozenset[str] = frozenset()

    def has(self, name: str, step: int) -> bool:
        return step < self.step or (step == self.step and name in self.names)

    def and_also(self, other: Logged) -> Logged:
        """The later of the two, or the metrics of both at the same step."""
        if self.step != other.step:
            return max(self, other, key=lambda each: each.step)
        return Logged(self.step, self.names | other.names)


class TrackedRun(Protocol):
    """A run at one service."""

    @property
    def id(self) -> str: ...

    def log_settings(self, settings: Mapping[str, Any], start_step: int) -> None: ...

    def log(self, metrics: Mapping[str, float], step: int) -> None: ...

    def close(self) -> None: ...


class WandbRun:
    """A run at W&B, online or offline; its files are in ``wandb/`` of the run's folder."""

    def __init__(self, folder: Path, options: Mapping[str, Any], run_id: str | None) -> None:
        from lightning.pytorch.loggers import WandbLogger

        folder.mkdir(parents=True, exist_ok=True)
        ours = {
            "name": folder.name,
            "save_dir": str(folder),
            "id": run_id or secrets.token_hex(_WANDB_ID_BYTES),
        }
        self._logger = WandbLogger(**{**ours, **options})

    @property
    def id(self) -> str:
        return str(self._logger.experiment.id)

    def log_settings(self, settings: Mapping[str, Any], start_step: int) -> None:
        self._logger.log_hyperparams(dict(settings))

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        self._logger.log_metrics(metrics, step)

    def close(self) -> None:
        # Else a second run of this process would be logged as the first.
        self._logger.experiment.finish()


class MlflowRun:
    """A run at an MLflow server; without one in ``mlflow.db`` of the run's folder."""

    def __init__(self, folder: Path, options: Mapping[str, Any], run_id: str | None) -> None:
        from lightning.pytorch.loggers import MLFlowLogger

        folder.mkdir(parents=True, exist_ok=True)
        ours: dict[str, Any] = {"run_name": folder.name, "run_id": run_id}
        is_told = {"tracking_uri", "save_dir"} & {*options}
        if not is_told and "MLFLOW_TRACKING_URI" not in os.environ:
            path = folder.resolve()
            # MLflow 3 refuses to write plain files.
            ours["tracking_uri"] = f"sqlite:///{path / 'mlflow.db'}"
            ours["artifact_location"] = (path / "mlflow_artifacts").as_uri()
        self._logger = MLFlowLogger(**{**ours, **options})

    @property
    def id(self) -> str:
        return str(self._logger.run_id)

    def log_settings(self, settings: Mapping[str, Any], start_step: int) -> None:
        """Log settings as parameters; MLflow forbids changes, so later ones become tags."""
        client = self._logger.experiment
        client.update_run(self.id, status="RUNNING")
        before = client.get_run(self.id).data.params
        now = {key: str(value)[:_LONGEST_PARAMETER] for key, value in flatten(settings).items()}
        self._logger.log_hyperparams({key: now[key] for key in now if key not in before})
        for key, value in now.items():
            if before.get(key, value) != value:
                client.set_tag(self.id, f"from step {start_step + 1}/{key}", value)

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        self._logger.log_metrics(metrics, step)

    def close(self) -> None:
        self._logger.finalize("success")


@dataclass(frozen=True)
class KnownRun:
    """A run's id at a service, and how far it is logged there.

    That is at least so far; and not farther, though ``metrics.jsonl`` is, if the service was lost.
    """

    id: str
    logged: Logged
    is_lost: bool = False


class TrackedLogger:
    """Tells a service what it has not been told; one that fails in a step is noted as lost."""

    def __init__(
        self, name: str, run: TrackedRun, logged: Logged, note_loss: Callable[[KnownRun], None]
    ) -> None:
        self.name, self._run, self._logged, self._note_loss = name, run, logged, note_loss

    def log_metrics(self, metrics: Mapping[str, float], step: int) -> None:
        fresh = {name: metrics[name] for name in metrics if not self._logged.has(name, step)}
        if not fresh:
            return
        try:
            self._run.log(fresh, step)
        except Exception:
            told = Logged(step).and_also(self._logged)
            self._note_loss(KnownRun(self._run.id, told, is_lost=True))
            raise

    def finalize(self, status: str) -> None:
        self._run.close()


_SERVICES: dict[str, Callable[[Path, Mapping[str, Any], str | None], TrackedRun]] = {
    "wandb": WandbRun,
    "mlflow": MlflowRun,
}


def build_tracked_loggers(
    config: RunFolderConfig, settings: Mapping[str, Any], start_step: int
) -> list[TrackedLogger]:
    """Open the services asked for, each in its existing run, or in a new one at step 0.

    To be called while ``metrics.jsonl`` still has what the run before logged after its checkpoint.

    Raises:
        ConfigError: a service does not take the run.
        CheckpointError: the folder's ``tracking.json`` is not what was written.
    """
    folder = Path(config.explicit_log_dir)
    path = folder / TRACKING_NAME
    known = _read_known(path) if start_step > 0 else {}
    newest = _last_logged(folder / METRICS_NAME)
    now: dict[str, KnownRun] = {}

    def note(name: str, run: KnownRun) -> None:
        now[name] = run
        _write_known(path, now)

    loggers = []
    for name, options in _wanted(config).items():
        before = known.get(name)
        try:
            run = _SERVICES[name](folder, options, before.id if before else None)
            run.log_settings(settings, start_step)
        # The services' packages raise what they like, and a setting may be none of theirs.
        except Exception as error:
            raise ConfigError(
                f"exp_manager.create_{name}_logger: got true, but the run cannot be logged there "
                f"({type(error).__name__}: {one_line(error)}); settings of that logger are "
                f"exp_manager.{name}_logger_kwargs"
            ) from error
        now[name] = KnownRun(run.id, _how_far(before, newest))
        loggers.append(TrackedLogger(name, run, now[name].logged, partial(note, name)))
    if now or path.is_file():
        _write_known(path, now)
    return loggers


def _wanted(config: RunFolderConfig) -> dict[str, dict[str, Any]]:
    """Settings of each logger, by the name of its service."""
    services = {
        "wandb": (config.create_wandb_logger, config.wandb_logger_kwargs),
        "mlflow": (config.create_mlflow_logger, config.mlflow_logger_kwargs),
    }
    return {name: options for name, (is_wanted, options) in services.items() if is_wanted}


def _how_far(before: KnownRun | None, newest: Logged) -> Logged:
    if before is None:
        return Logged()
    return before.logged if before.is_lost else before.logged.and_also(newest)


def _last_logged(path: Path) -> Logged:
    """Metrics of the newest step of a ``metrics.jsonl``."""
    logged = Logged()
    for row in read_metrics(path):
        logged = logged.and_also(Logged(row.pop("step"), frozenset(row)))
    return logged


def _read_known(path: Path) -> dict[str, KnownRun]:
    """Read the known runs, by the name of their service; without a file there are none."""
    if not path.is_file():
        return {}
    try:
        return {
            name: KnownRun(
                str(run["id"]),
                Logged(int(run["step"]), frozenset(run["metrics"])),
                bool(run["is_lost"]),
            )
            for name, run in read_json(path, str(path)).items()
        }
    except (TypeError, KeyError, ValueError) as error:
        raise CheckpointError(
            f"{path}: got {type(error).__name__}: {error}, wanted id, step and metrics of the run "
            "at each service; without the file a new run begins there"
        ) from error


def _write_known(path: Path, runs: Mapping[str, KnownRun]) -> None:
    content = {
        name: {
            "id": run.id,
            "step": run.logged.step,
            "metrics": sorted(run.logged.names),
            "is_lost": run.is_lost,
        }
        for name, run in runs.items()
    }
    write_lines(path, [json.dumps(content, indent=2)])


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
