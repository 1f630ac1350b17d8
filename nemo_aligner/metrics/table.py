"""Every metric's meaning: which direction is better."""

from __future__ import annotations

_LOWER_IS_BETTER = ("loss", "ties", "brier", "ece")


def lower_is_better(metric: str) -> bool:
    """Whether a smaller value of a metric (the last part of its name) is a better one."""
    return metric.rpartition("/")[2] in _LOWER_IS_BETTER
