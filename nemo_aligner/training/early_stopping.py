"""When a run should end: it diverges (``DivergenceWatch``), or no longer improves."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, replace

from nemo_aligner.checkpoint.run_state import RunState
from nemo_aligner.config.training import MonitorMode


class DivergenceWatch:
    """Warns once if the training loss of a new run grows instead of falling.

    Even if the learning rate is far too high, losses may stay finite, so that no check for NaN ends
    the run. Training is considered to diverge if each of the last ten losses exceeds three times
    the loss of the first step. A few hard batches may exceed it, but not ten in a row.
    """

    _STEPS, _FACTOR = 10, 3.0

    def __init__(self) -> None:
        self._first_loss: float | None = None
        self._recent_losses: deque[float] = deque(maxlen=self._STEPS)
        self._has_warned = False

    def add(self, loss: float) -> str | None:
        """Record the loss of a step.

        Returns:
            A warning, when divergence is detected for the first time; otherwise None.
        """
        if self._first_loss is None:
            self._first_loss = loss
        self._recent_losses.append(loss)
        is_full = len(self._recent_losses) == self._STEPS
        limit = self._FACTOR * abs(self._first_loss)
        # If no record of the first batch has a label, the first loss is 0, and there is nothing to
        # compare with.
        if self._has_warned or not is_full or not limit or min(self._recent_losses) <= limit:
            return None
        self._has_warned = True
        mean = sum(self._recent_losses) / self._STEPS
        return (
            f"warning: training diverges: the mean loss of the last {self._STEPS} steps is "
            f"{mean:.3g}, compared with {self._first_loss:.3g} at the first step\n"
            "  stop the run and lower model.optim.lr"
        )


@dataclass
class EarlyStopping:
    """Ends a run after several validations without an improvement.

    See Prechelt 1998, "Early stopping - but when?".

    Attributes:
        monitor, mode: the metric to watch, and whether smaller or larger values are better.
        patience: the run ends after this many validations in a row without an improvement; None
            never ends it.
        min_delta: only a larger change than this counts as an improvement.
        best: best value so far; None before the first validation.
        validations_since_best: number of validations since the one with the best value.
    """

    monitor: str | None = None
    mode: MonitorMode = MonitorMode.max
    patience: int | None = None
    min_delta: float = 0.0
    best: float | None = None
    validations_since_best: int = 0

    def restore(self, state: RunState) -> None:
        """Continue with the best value and the count of a saved state, when its run resumes."""
        self.best = state.best_value
        self.validations_since_best = state.validations_since_best

    def store_in(self, state: RunState) -> RunState:
        """Return ``state`` with the best value and the count, so that a checkpoint keeps them."""
        return replace(
            state, best_value=self.best, validations_since_best=self.validations_since_best
        )

    def count_validation(self, metrics: Mapping[str, float], step: int) -> None:
        """Record a validation: update the best value, or count one more without an improvement.

        NaN is no improvement. ``metrics`` without the watched metric are ignored. A validation at
        step 0 is not counted: the untrained model cannot have failed to improve.
        """
        if self.monitor is None or self.monitor not in metrics:
            return
        value = metrics[self.monitor]
        if not math.isnan(value) and self._is_better(value):
            self.best, self.validations_since_best = value, 0
        elif step > 0:
            self.validations_since_best += 1

    def _is_better(self, value: float) -> bool:
        if self.best is None:
            return True
        gain = value - self.best if self.mode is MonitorMode.max else self.best - value
        return gain > self.min_delta

    @property
    def is_over(self) -> bool:
        """True if ``patience`` validations in a row were no improvement, so the run must end."""
        return self.patience is not None and self.validations_since_best >= self.patience

    def describe(self) -> str:
        """Describe for people why early stopping has ended the run."""
        best = "none" if self.best is None else f"{self.best:.4f}"
        count = self.validations_since_best
        return f"{count} validations in a row without a better {self.monitor} than {best}"
