"""Log the metrics of a run, show them in the terminal, and measure the GPU and the time.

``MetricLoggers`` sends metrics to ``metrics.jsonl``, to TensorBoard, CSV, W&B and MLflow, and to a
callback. ``StepProgress`` and the ``render_*`` functions write the lines in the terminal.
``Gauges`` measures MFU, memory and power of a GPU. ``Timers`` measures the parts of a step.
"""

from __future__ import annotations

import csv
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TypeAlias

import torch
import torch.distributed as dist

from nemo_aligner.checkpoint.run import Saved
from nemo_aligner.checkpoint.run_folder import METRICS_NAME
from nemo_aligner.config.common import Precision
from nemo_aligner.config.training import RunFolderConfig
from nemo_aligner.metrics.table import BY_SOURCE, Shown, all_metrics, is_shown
from nemo_aligner.planning.memory import GIB
from nemo_aligner.planning.step_time import peak_flops
from nemo_aligner.training.side_outputs import attempt_output
from nemo_aligner.training.tracking import (
    FAILED,
    SUCCESS,
    MetricsFile,
    build_tracked_loggers,
    close_loggers,
)
from nemo_aligner.utils.console import Progress, join_fields, show_number
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
    """Sends metrics to ``metrics.jsonl``, to Lightning's loggers, and to the callback.

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
            if kind is None:  # otherwise the error of the block says more
                raise

    def close(self, status: str = SUCCESS) -> None:
        """Close all loggers and the file.

        ``status``, ``SUCCESS`` or ``FAILED``, is the outcome of the run that W&B and MLflow show.

        Raises:
            CheckpointError: the last lines of ``metrics.jsonl`` cannot be written.
        """
        # Close the file last: on a full disk it raises, and the services must be told all the same.
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
        callback: function of the user that is called with all metrics that are logged; None for
            none.

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
            loggers["tensorboard"] = _tensorboard_logger(folder, start_step)
        if config.create_csv_logger:
            loggers["csv"] = _csv_logger(folder, start_step)
        for logger in loggers.values():
            logger.log_hyperparams(dict(settings))
    except BaseException:
        close_loggers(tracked.values(), FAILED)
        raise
    return MetricLoggers(file, loggers | tracked, callback, total_steps)


def _tensorboard_logger(folder: Path, start_step: int) -> Any:
    from lightning.pytorch.loggers import TensorBoardLogger

    return TensorBoardLogger(
        save_dir=str(folder),
        name="tensorboard",
        version="",
        default_hp_metric=False,
        # A run that starts from step 0 purges all entries, because an earlier run in this folder
        # may have been killed before its first checkpoint.
        purge_step=start_step + 1 if start_step else 0,
    )


def _csv_logger(folder: Path, start_step: int) -> Any:
    from lightning.pytorch.loggers import CSVLogger

    logger = CSVLogger(save_dir=str(folder), name="csv", version="", flush_logs_every_n_steps=1)
    rows = _rows_until(Path(logger.log_dir) / "metrics.csv", start_step)
    with warnings.catch_warnings():
        # Lightning deletes an existing file and warns about it. Ignore the warning: the rows to
        # keep are written again below.
        warnings.filterwarnings("ignore", message="Experiment logs directory")
        experiment = logger.experiment
    for step, row in rows:
        experiment.log_metrics(row, step)
    experiment.save()
    return logger


def _rows_until(path: Path, last_step: int) -> list[tuple[int, dict[str, float]]]:
    """Read the step and the metrics of every complete row up to ``last_step``.

    If ``last_step`` is 0, the run starts from the beginning and keeps no row.
    """
    if last_step == 0 or not path.is_file():
        return []
    rows = []
    with path.open(newline="") as lines:
        for row in csv.DictReader(lines):
            step = row.pop("step", None)
            if step is not None and step.isdigit() and int(step) <= last_step:
                rows.append((int(step), _parse_numbers(row)))
    return rows


def _parse_numbers(row: Mapping[str, str | None]) -> dict[str, float]:
    """Parse the cells that hold a number, and drop the others.

    A row has empty cells for metrics of other steps, and a killed run may have left half a line.
    """
    numbers = {}
    for key, value in row.items():
        with suppress(TypeError, ValueError):
            numbers[key] = float(value)  # type: ignore[arg-type]
    return numbers


# The second part writes lines in the terminal about steps and validations.

# A run with at most this many steps left shows every step, even if steps are fast.
_FEW_STEPS = 20
# How to show metrics that have a unit or a special name. The other metrics are shown as ``name
# number``.
_FORMATS: dict[str, Callable[[float], str]] = {
    "tokens_per_second": lambda rate: f"{show_number(rate)} tokens/s",
    "mfu": lambda share: f"MFU {share:.1%}",
    "gpu_memory_gb": lambda size: f"GPU {size:.1f} GB",
    "gpu_power_watts": lambda power: f"{power:.0f} W",
}


class StepProgress(Progress):
    """Shows the progress of training: the first step, the last, and one every ten seconds.

    A terminal also gets a progress bar.

    Args:
        total: number of steps of the run.
        start: number of steps that are done already.
        interval: steps between validations; None means one validation, after the last step.
    """

    def __init__(self, total: int, start: int, interval: int | None) -> None:
        interval = interval or total
        self._validations = -(-total // interval) - start // interval
        self._validated, self._validating_seconds = 0, 0.0
        super().__init__("train", total, start)
        self._always = {start + 1, total} if total - start > _FEW_STEPS else range(total + 1)

    def begin(self) -> None:
        """Start the clock from which the time per step is computed.

        After a validation before the first step, call it again: ``__init__`` did not count this
        validation, so its time must not count, either.
        """
        super().begin()
        self._since -= self._validating_seconds
        self._validations += self._validated

    def show(self, step: int, metrics: Mapping[str, float], best: str | None = None) -> None:
        """Print a line for ``step``, counted from 1, if it is time for one, and update the bar.

        ``best`` describes the best checkpoint so far.
        """
        if self.line_is_due() or step in self._always:
            numbers = _format_metrics(metrics)
            fields = [f"step {step}/{self._total}", self.time_left(step), *numbers, best]
            self.say(join_fields(field for field in fields if field))
        self.move(step)

    def add_validation(self, seconds: float) -> None:
        """Record how long a validation took, so that the time per step does not include it."""
        self._validated += 1
        self._validating_seconds += seconds

    def seconds_left(self, done: int) -> float:
        """Estimate the time left for the remaining steps and validations.

        Before the first validation it is unknown how long one takes, so they count as 0.
        """
        steps = self._now() - self._since - self._validating_seconds
        per_step = steps / (done - self._start)
        per_validation = self._validating_seconds / max(1, self._validated)
        left = self._validations - self._validated
        return per_step * (self._total - done) + per_validation * left


def _format_metrics(metrics: Mapping[str, float]) -> list[str]:
    """Format each metric for people, by its name without a prefix such as ``train/``."""
    return [_format_metric(name.partition("/")[2], value) for name, value in metrics.items()]


def _format_metric(name: str, value: float) -> str:
    """Format one metric for people, such as ``loss 0.69``."""
    format_value = _FORMATS.get(name)
    return f"{name} {show_number(value)}" if format_value is None else format_value(value)


def render_best(saved: Saved | None, monitor: str | None) -> str | None:
    """Describe the best checkpoint so far, for the line that shows a step.

    ``monitor`` is the metric that ranks checkpoints. None if there is no checkpoint or no metric.
    """
    if saved is None or monitor is None:
        return None
    value = show_number(saved.state.metrics[monitor])
    return f"best {monitor.partition('/')[2]} {value} at step {saved.state.step}"


def render_validation(step: int, metrics: Mapping[str, float]) -> str:
    """Render the metrics of each validation set for people, and of each source of its records."""
    sets: dict[str, list[str]] = {}
    sources: dict[str, dict[str, list[str]]] = {}
    for full_name, value in metrics.items():
        prefix, _, name = full_name.partition("/")
        set_fields = sets.setdefault(prefix, [])
        if not name.startswith(BY_SOURCE):
            if is_shown(name, Shown.validation):
                set_fields.append(f"{name} {show_number(value)}")
            continue
        for metric in _metrics_by_source():
            if name.endswith(f"/{metric}"):
                source = name.removeprefix(BY_SOURCE).removesuffix(f"/{metric}")
                by_source = sources.setdefault(prefix, {}).setdefault(metric, [])
                by_source.append(f"{source} {value:.3f}")
    lines = []
    for prefix, shown in sets.items():
        lines += [f"step {step}: {prefix}", join_fields(shown, first="  ")]
        for metric, values in sources.get(prefix, {}).items():
            lines.append(join_fields([f"{metric} by source:", *values], "  ", "    "))
    return "\n".join(lines)


def _metrics_by_source() -> list[str]:
    """List the metrics that the terminal shows for each source as well as for the whole set."""
    return [metric.name for metric in all_metrics() if Shown.source in metric.shown]


# The third part measures the GPU: MFU, memory and power.


@dataclass(frozen=True)
class Gauges:
    """Measures this rank's GPU.

    If a function fails during the run, as NVML may, a message is printed, and its metric is not
    measured any more.

    Attributes:
        peak: peak FLOP/s of all ranks' GPUs together, which are assumed to be of one kind; None if
            it is unknown.
        functions: the functions that read the GPU, by the names of their metrics.
    """

    peak: float | None = None
    functions: dict[str, Callable[[], float]] = field(default_factory=dict)

    @classmethod
    def of(cls, device: torch.device | str, precision: Precision) -> Gauges:
        """Find out which values can be measured on ``device``.

        ``precision`` selects the peak FLOP/s. Reading the power needs the package nvidia-ml-py.
        """
        device = torch.device(device)
        if not _is_gpu(device):
            return cls()
        peak = known_peak(device, precision)

        def memory_gb() -> float:
            """Read how much of the GPU's memory all processes use."""
            free, total = torch.cuda.mem_get_info(device)
            return (total - free) / 1e9

        def power_watts() -> float:
            """Read the power that the GPU draws."""
            return torch.cuda.power_draw(device) / 1e3

        functions: dict[str, Callable[[], float]] = {"gpu_memory_gb": memory_gb}
        if _is_readable(power_watts):
            functions["gpu_power_watts"] = power_watts
        return cls(None if peak is None else peak * dist.get_world_size(), functions)

    def read(self, flops: float | None, seconds: float) -> dict[str, float]:
        """Measure MFU, memory and power after a step.

        Args:
            flops: FLOPs of the step on all ranks; None if they were not counted.
            seconds: time that the step took.

        Returns:
            ``mfu``, ``gpu_memory_gb`` and ``gpu_power_watts``, without those that cannot be
            measured. MFU (model FLOPs utilization) does not count recomputation (Chowdhery et al.
            2022, appendix B).
        """
        values: dict[str, float] = {}
        if self.peak is not None and flops is not None:
            values["mfu"] = flops / seconds / self.peak

        def measure(name: str) -> None:
            values[name] = self.functions[name]()

        for name in list(self.functions):
            if not attempt_output(partial(measure, name), name, "measuring", "the run goes on"):
                del self.functions[name]
        return values


def describe_gpu_memory(device: torch.device | str) -> str | None:
    """Describe how much of a GPU's memory torch and other users hold; None if it is not a GPU."""
    device = torch.device(device)
    if not _is_gpu(device):
        return None
    free, total = torch.cuda.mem_get_info(device)
    reserved, peak = torch.cuda.memory_reserved(device), torch.cuda.max_memory_allocated(device)
    outside = total - free - reserved
    return (
        f"GPU memory: torch holds {reserved / GIB:.1f} GiB, in which tensors took at most "
        f"{peak / GIB:.1f} GiB; CUDA, its libraries, NCCL and other processes hold "
        f"{outside / GIB:.1f} GiB"
    )


def known_peak(device: torch.device | str, precision: Precision) -> float | None:
    """Return the peak FLOP/s of a device; None if it is a CPU or not in the table of peaks."""
    if not _is_gpu(torch.device(device)):
        return None
    return peak_flops(torch.cuda.get_device_name(device), precision)


def _is_gpu(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.is_available()


def _is_readable(gauge: Callable[[], float]) -> bool:
    """True if ``gauge`` can be read on this machine.

    Reading fails if NVIDIA's library NVML is missing, or if this GPU does not support the value.
    """
    try:
        gauge()
    except Exception:
        # Catch every exception: pynvml's error classes cannot be named here, because it may not be
        # installed.
        return False
    return True


# The fourth part has the time that each part of a step takes.


class Timers:
    """Sums up the seconds spent in each named part of a step, until ``take`` returns the sums."""

    def __init__(self) -> None:
        self._seconds: dict[str, float] = {}

    @contextmanager
    def measure(self, name: str) -> Iterator[None]:
        """Add the time that the block takes to the part ``name``."""
        start = time.perf_counter()
        yield
        self.add_since(start, name)

    def add_since(self, start: float, name: str) -> None:
        """Add the time since ``start`` (by ``time.perf_counter()``) to the part ``name``."""
        self._seconds[name] = self._seconds.get(name, 0.0) + time.perf_counter() - start

    def take(self) -> dict[str, float]:
        """Return the seconds of each part as ``timing/<name>``, and reset them to zero."""
        timings = {f"timing/{name}": seconds for name, seconds in self._seconds.items()}
        self._seconds.clear()
        return timings
