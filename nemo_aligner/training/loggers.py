"""Who is told of a run's metrics: files, tracking services and the person at the terminal."""

from __future__ import annotations

import csv
import re
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
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
from nemo_aligner.training.tracking import MetricsFile, build_tracked_loggers
from nemo_aligner.utils.console import Progress, join_fields, say, show_number
from nemo_aligner.utils.errors import ConfigError, one_line
from nemo_aligner.utils.processes import is_main


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
    """Argument of a run's callback: the metrics that were logged after ``step``.

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
    """The run's own file and Lightning's loggers by their names on rank 0; nothing on the others.

    A logger that fails, be it that its service or a disk is gone, hears no more of the run; that
    is said, and does not end it. What a callback raises does end the run: it is its caller's.
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
        for name, logger in list(self._loggers.items()):
            try:
                tell(logger)
            except Exception as error:  # whatever its package raises
                del self._loggers[name]
                cause = error.__cause__ or error
                say(
                    f"{name}: logging stopped ({type(cause).__name__}: "
                    f"{one_line(cause)}); {METRICS_NAME} has every number"
                )


def build_loggers(
    config: RunFolderConfig,
    settings: Mapping[str, Any],
    start_step: int,
    callback: Callback | None = None,
    total_steps: int = 0,
) -> MetricLoggers:
    """``metrics.jsonl`` and the loggers asked for, in ``explicit_log_dir``; and the callback.

    ``settings`` is the run's resolved config.
    A resumed run keeps what was logged up to ``start_step``; later steps are logged anew. Services
    keep both, as they take nothing back.

    Raises:
        ConfigError, CheckpointError: see ``build_tracked_loggers``.
    """
    if not is_main():
        return MetricLoggers()
    folder = Path(config.explicit_log_dir)
    tracked = build_tracked_loggers(config, settings, start_step)
    file = MetricsFile(folder / METRICS_NAME, start_step)
    loggers: dict[str, Any] = {}
    if config.create_tensorboard_logger:
        loggers["tensorboard"] = _tensorboard_logger(folder, start_step)
    if config.create_csv_logger:
        loggers["csv"] = _csv_logger(folder, start_step)
    for logger in loggers.values():
        logger.log_hyperparams(dict(settings))
    return MetricLoggers(file, loggers | tracked, callback, total_steps)


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


# Console lines of a run: its steps and validations.

# Runs of so few steps show every step, however fast.
_FEW_STEPS = 20
# Fields with a unit or a name of their own; others are ``name number``.
_SHOWN_AS: dict[str, Callable[[float], str]] = {
    "tokens_per_second": lambda rate: f"{show_number(rate)} tokens/s",
    "mfu": lambda share: f"MFU {share:.1%}",
    "gpu_memory_gb": lambda size: f"GPU {size:.1f} GB",
    "gpu_power_watts": lambda power: f"{power:.0f} W",
}


class StepProgress(Progress):
    """A line for the first step, the last, and one every few seconds; a bar below on a terminal.

    There is a validation after every ``interval`` of steps, and after the last.
    """

    def __init__(self, total: int, start: int, interval: int | None) -> None:
        interval = interval or total
        self._validations = -(-total // interval) - start // interval
        self._validated, self._validating_seconds = 0, 0.0
        super().__init__("train", total, start)
        self._always = {start + 1, total} if total - start > _FEW_STEPS else range(total + 1)

    def begin(self) -> None:
        """Count the time of steps from now on; a validation before them is one more."""
        super().begin()
        self._since -= self._validating_seconds
        self._validations += self._validated

    def show(self, step: int, metrics: Mapping[str, float], best: str | None = None) -> None:
        """Come to ``step``, counted from 1; ``best`` says which checkpoint is the best so far."""
        if self.line_is_due() or step in self._always:
            fields = [f"step {step}/{self._total}", self.time_left(step), *_fields(metrics), best]
            self.say(join_fields(field for field in fields if field))
        self.move(step)

    def add_validation(self, seconds: float) -> None:
        """Say how long a validation took, which is not of the steps."""
        self._validated += 1
        self._validating_seconds += seconds

    def seconds_left(self, done: int) -> float:
        """Time left at the pace of the steps, and of validations once there was one."""
        steps = self._now() - self._since - self._validating_seconds
        per_step = steps / (done - self._start)
        per_validation = self._validating_seconds / max(1, self._validated)
        left = self._validations - self._validated
        return per_step * (self._total - done) + per_validation * left


def _fields(metrics: Mapping[str, float]) -> list[str]:
    return [_field(name.partition("/")[2], value) for name, value in metrics.items()]


def _field(name: str, value: float) -> str:
    shown_as = _SHOWN_AS.get(name)
    return f"{name} {show_number(value)}" if shown_as is None else shown_as(value)


def render_best(saved: Saved | None, monitor: str | None) -> str | None:
    """The best checkpoint so far, as a field of a line; None where there is none."""
    if saved is None or monitor is None:
        return None
    value = show_number(saved.state.metrics[monitor])
    return f"best {monitor.partition('/')[2]} {value} at step {saved.state.step}"


def render_validation(step: int, metrics: Mapping[str, float]) -> str:
    """Render every set's metrics for people, and below them those of its sources."""
    sets: dict[str, list[str]] = {}
    sources: dict[str, dict[str, list[str]]] = {}
    for name, value in metrics.items():
        prefix, _, rest = name.partition("/")
        shown = sets.setdefault(prefix, [])
        if not rest.startswith(BY_SOURCE):
            if is_shown(rest, Shown.validation):
                shown.append(f"{rest} {show_number(value)}")
            continue
        for metric in _of_sources():
            if rest.endswith(f"/{metric}"):
                source = rest.removeprefix(BY_SOURCE).removesuffix(f"/{metric}")
                of_set = sources.setdefault(prefix, {}).setdefault(metric, [])
                of_set.append(f"{source} {value:.3f}")
    lines = []
    for prefix, shown in sets.items():
        lines += [f"step {step}: {prefix}", join_fields(shown, first="  ")]
        for metric, values in sources.get(prefix, {}).items():
            lines.append(join_fields([f"{metric} by source:", *values], "  ", "    "))
    return "\n".join(lines)


def _of_sources() -> list[str]:
    return [metric.name for metric in all_metrics() if Shown.source in metric.shown]


# Gauges of the GPU that a step ran on: share of its peak FLOPS, memory, power.


@dataclass(frozen=True)
class Gauges:
    """The gauges of this rank's GPU; without one, or where it does not say, there is none.

    Attributes:
        peak: FLOP/s of all ranks' GPUs together, which are taken to be alike.
        used_bytes: of the GPU's memory, by whomever.
        watts: that the GPU draws now.
    """

    peak: float | None = None
    used_bytes: Callable[[], int] | None = None
    watts: Callable[[], float] | None = None

    @classmethod
    def of(cls, device: torch.device | str, precision: Precision) -> Gauges:
        """Gauges of a device; power needs the package nvidia-ml-py."""
        device = torch.device(device)
        if not _is_gpu(device):
            return cls()
        peak = known_peak(device, precision)

        def used_bytes() -> int:
            free, total = torch.cuda.mem_get_info(device)
            return total - free

        def watts() -> float:
            return torch.cuda.power_draw(device) / 1e3

        return cls(
            None if peak is None else peak * dist.get_world_size(),
            used_bytes,
            watts if _answers(watts) else None,
        )

    def read(self, flops: float | None, seconds: float) -> dict[str, float]:
        """``mfu`` of a step of so many ``flops``, ``gpu_memory_gb`` and ``gpu_power_watts``.

        Model FLOPs utilization (Chowdhery et al. 2022, appendix B): what is recomputed is no work.
        """
        found: dict[str, float] = {}
        if self.peak is not None and flops is not None:
            found["mfu"] = flops / seconds / self.peak
        if self.used_bytes is not None:
            found["gpu_memory_gb"] = self.used_bytes() / 1e9
        if self.watts is not None:
            found["gpu_power_watts"] = self.watts()
        return found


def describe_gpu_memory(device: torch.device | str) -> str | None:
    """Describe what holds a GPU's memory, tensors or all else; None for a CPU."""
    device = torch.device(device)
    if not _is_gpu(device):
        return None
    free, total = torch.cuda.mem_get_info(device)
    reserved, most = torch.cuda.memory_reserved(device), torch.cuda.max_memory_allocated(device)
    outside = total - free - reserved
    return (
        f"GPU memory: {reserved / GIB:.1f} GiB held by torch, of which tensors took at most "
        f"{most / GIB:.1f}; {outside / GIB:.1f} GiB outside of it (CUDA, its libraries, NCCL, and "
        "other processes)"
    )


def known_peak(device: torch.device | str, precision: Precision) -> float | None:
    """FLOP/s of a device, where a share of them can be told."""
    if not _is_gpu(torch.device(device)):
        return None
    return peak_flops(torch.cuda.get_device_name(device), precision)


def _is_gpu(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.is_available()


def _answers(gauge: Callable[[], float]) -> bool:
    """True if it can be read: NVML may be missing, or not know this of the GPU."""
    try:
        gauge()
    except Exception:
        # Among them pynvml's own, whose classes are there only where it is; a run goes on without.
        return False
    return True


# The run's wall clock: a time limit, and how long each part of a step takes.

_MAX_TIME = re.compile(r"(\d+):([01]?\d|2[0-3]):([0-5]?\d):([0-5]?\d)")


def parse_max_time(text: str) -> float:
    """Seconds of ``DD:HH:MM:SS``.

    Raises:
        ConfigError: another form.
    """
    match = _MAX_TIME.fullmatch(str(text).strip())
    if match is None:
        raise ConfigError(f"trainer.max_time: got {text!r}, wanted DD:HH:MM:SS, as in 00:03:45:00")
    days, hours, minutes, seconds = (int(part) for part in match.groups())
    return ((days * 24 + hours) * 60 + minutes) * 60.0 + seconds


class Timers:
    """Seconds spent in named parts, since they were last taken."""

    def __init__(self) -> None:
        self._seconds: dict[str, float] = {}

    @contextmanager
    def measure(self, name: str) -> Iterator[None]:
        """Add the time of the block to ``name``."""
        start = time.perf_counter()
        yield
        self.add_since(start, name)

    def add_since(self, start: float, name: str) -> None:
        """Add the time since ``start``, of ``time.perf_counter``, to ``name``."""
        self._seconds[name] = self._seconds.get(name, 0.0) + time.perf_counter() - start

    def take(self) -> dict[str, float]:
        """``timing/<name>`` -> seconds, and start anew."""
        taken = {f"timing/{name}": seconds for name, seconds in self._seconds.items()}
        self._seconds.clear()
        return taken
