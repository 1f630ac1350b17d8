"""Settings of objectives that are not what they must be, in one sentence."""

from __future__ import annotations

import math
from collections.abc import Sequence


def check_number(objective: object, name: str, low: float, below: float = math.inf) -> None:
    """Refuse a setting that is no finite number from ``low`` on, and less than ``below``.

    Raises:
        ValueError: it says what was got, and what was wanted.
    """
    less = "" if below == math.inf else f" and less than {below:g}"
    fits = low <= _as_number(objective, name) < below
    _require(objective, name, fits, f"a number of {low:g} or more{less}")


def check_above(objective: object, name: str, low: float) -> None:
    """Refuse a setting that is no finite number above ``low``.

    Raises:
        ValueError: it says what was got, and what was wanted.
    """
    value = _as_number(objective, name)
    _require(objective, name, low < value < math.inf, f"a number above {low:g}")


def check_flag(objective: object, name: str) -> None:
    """Refuse a setting that is neither true nor false.

    Raises:
        ValueError: it says what was got, and what was wanted.
    """
    _require(objective, name, isinstance(getattr(objective, name), bool), "true or false")


def check_whole(objective: object, name: str, low: int) -> None:
    """Refuse a setting that is no whole number from ``low`` on.

    Raises:
        ValueError: it says what was got, and what was wanted.
    """
    value = getattr(objective, name)
    _require(objective, name, type(value) is int and value >= low, f"a whole number from {low} on")


def check_choice(objective: object, name: str, choices: Sequence[str]) -> None:
    """Refuse a setting that is none of ``choices``.

    Raises:
        ValueError: it says what was got, and what was wanted.
    """
    fits = getattr(objective, name) in choices
    _require(objective, name, fits, f"one of {', '.join(choices)}")


def _as_number(objective: object, name: str) -> float:
    """The setting, or NaN, which lies within no bounds, where it is no number."""
    value = getattr(objective, name)
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return float(value) if is_number else math.nan


def _require(objective: object, name: str, fits: bool, wanted: str) -> None:
    if not fits:
        raise ValueError(f"{name}: got {getattr(objective, name)!r}, wanted {wanted}")
