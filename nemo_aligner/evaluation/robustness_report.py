"""What was found of robustness, for people (a table) and for programs (JSON)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any, TypeVar

from nemo_aligner.console import show_number
from nemo_aligner.evaluation.robustness import (
    BOTH,
    REJECTED,
    BestOfLength,
    Robustness,
    RobustnessRow,
)

T = TypeVar("T")


def robustness_json(found: Robustness) -> dict[str, Any]:
    """As plain JSON values, see ``Robustness``."""
    return asdict(found)


def read_robustness(value: Mapping[str, Any]) -> Robustness:
    """What ``robustness_json`` has made.

    Raises:
        KeyError, TypeError, ValueError: it is something else.
    """
    return Robustness(
        pairs=int(value["pairs"]),
        pairs_read=int(value["pairs_read"]),
        pairs_of_code=int(value["pairs_of_code"]),
        margin_std=float(value["margin_std"]),
        rows=[_read_row(RobustnessRow, row) for row in value["rows"]],
        best_of=[_read_row(BestOfLength, row) for row in value["best_of"]],
    )


def _read_row(kind: type[T], row: Mapping[str, Any]) -> T:
    for name, number in row.items():
        is_name = name in ("change", "changed")
        if not isinstance(number, str if is_name else int | float | None):
            raise TypeError(f"{name}: got {number!r:.40}")
    return kind(**row)


def render_robustness(found: Robustness) -> str:
    """The tables, for people."""
    lines = [robustness_note(found)]
    for side, heading in ((BOTH, "both changed"), (REJECTED, "rejected changed")):
        lines += ["", f"{heading:<19}{_HEADER}"]
        lines += [_line(row) for row in found.rows if row.changed == side]
    lines += ["", "the best by reward      reward  characters"]
    lines += [
        f"  of {row.n:<15}{row.reward:>10.4f}{row.characters:>12.1f}" for row in found.best_of
    ]
    return "\n".join(lines)


def robustness_note(found: Robustness) -> str:
    """On how many pairs it was found, and the unit of shifts."""
    of_code = f", {found.pairs_of_code} of code left out" * (found.pairs_of_code > 0)
    return (
        f"robustness: {found.pairs} of {found.pairs_read} pairs{of_code}; the standard deviation "
        f"(sd) of their margins is {found.margin_std:.4f}"
    )


_HEADER = f"{'pairs':>6}  {'verdicts that turn':<22}{'shift':>9}{'in sd':>8}{'absolute':>10}"
_HEADER += f"{'unchanged':>11}{'too long':>10}"


def _line(row: RobustnessRow) -> str:
    turned = "" if row.share is None else f"{row.share:.3f} ({row.low:.3f} to {row.high:.3f})"
    shift, in_std = (_signed(value) for value in (row.shift, row.shift_in_std))
    absolute = "" if row.absolute_shift is None else show_number(row.absolute_shift)
    return (
        f"  {row.change:<17}{row.pairs:>6}  {turned:<22}{shift:>9}{in_std:>8}{absolute:>10}"
        f"{row.unchanged:>11}{row.too_long:>10}"
    )


def _signed(value: float | None) -> str:
    return "" if value is None else f"{'+' * (value > 0)}{show_number(value)}"
