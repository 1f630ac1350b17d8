"""What a person sees of a run: its steps, and its validations."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from nemo_aligner.checkpoint.runs import Saved
from nemo_aligner.console import Progress, join_fields, show_number
from nemo_aligner.metrics.by_source import BY_SOURCE
from nemo_aligner.metrics.table import Shown, all_metrics, is_shown

# So few are all shown, however fast they are.
_FEW_STEPS = 20
# Of what has a unit or a name of its own; others are ``name number``.
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
        """At the pace of the steps, and of the validations as soon as there was one."""
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
    """Every set's metrics that are for people, and below them those of its sources."""
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
