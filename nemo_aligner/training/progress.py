"""Show a training run in the terminal: a line for steps, validations and the best checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from nemo_aligner.checkpoint.run_state import Saved
from nemo_aligner.metrics.table import BY_SOURCE, Shown, all_metrics, is_shown, split_name
from nemo_aligner.utils.console import Progress, join_fields, show_number

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
        steps = self._clock() - self._since - self._validating_seconds
        per_step = steps / (done - self._start)
        per_validation = self._validating_seconds / max(1, self._validated)
        remaining = self._validations - self._validated
        return per_step * (self._total - done) + per_validation * remaining


def _format_metrics(metrics: Mapping[str, float]) -> list[str]:
    """Format each metric for people, by its name without a prefix such as ``train/``."""
    return [_format_metric(split_name(name).metric, value) for name, value in metrics.items()]


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
    return f"best {split_name(monitor).metric} {value} at step {saved.state.step}"


def render_validation(step: int, metrics: Mapping[str, float]) -> str:
    """Render the metrics of each validation set for people, and of each source of its records."""
    sets: dict[str, list[str]] = {}
    sources: dict[str, dict[str, list[str]]] = {}
    for full_name, value in metrics.items():
        set_name, name = split_name(full_name)
        set_fields = sets.setdefault(set_name, [])
        if not name.startswith(BY_SOURCE):
            if is_shown(name, Shown.validation):
                set_fields.append(f"{name} {show_number(value)}")
            continue
        for metric in _metrics_by_source():
            if name.endswith(f"/{metric}"):
                source = name.removeprefix(BY_SOURCE).removesuffix(f"/{metric}")
                by_source = sources.setdefault(set_name, {}).setdefault(metric, [])
                by_source.append(f"{source} {value:.3f}")
    lines = []
    for set_name, fields in sets.items():
        lines += [f"step {step}: {set_name}", join_fields(fields, first="  ")]
        for metric, values in sources.get(set_name, {}).items():
            lines.append(join_fields([f"{metric} by source:", *values], "  ", "    "))
    return "\n".join(lines)


def _metrics_by_source() -> list[str]:
    """List the metrics that the terminal shows for each source as well as for the whole set."""
    return [metric.name for metric in all_metrics() if Shown.source in metric.shown]
