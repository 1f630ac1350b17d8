"""What a report says of how far verdicts and rewards follow the style of replies."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from nemo_aligner.console import show_number
from nemo_aligner.evaluation.html.reported import Reported
from nemo_aligner.evaluation.html.sections import PageSection, PageTable
from nemo_aligner.evaluation.robustness import BOTH, REJECTED, Robustness, RobustnessRow
from nemo_aligner.evaluation.robustness_report import robustness_note

_HEADER = (
    "change",
    "pairs",
    "verdicts that turn (95%)",
    "rewards move by",
    "in sd of margins",
    "absolute",
    "unchanged",
    "too long",
)


def robustness(reported: Sequence[Reported]) -> PageSection:
    """What changes of style did, to both replies and to the rejected one alone."""
    tables: list[PageTable] = []
    notes = []
    for each in reported:
        if each.robustness is not None:
            prefix = f"{each.name}: " * (len(reported) > 1)
            notes.append(prefix + robustness_note(each.robustness))
            tables += _tables(prefix, each.robustness)
    nothing = "It was not checked: evaluate's robustness_pairs does."
    return PageSection("robustness", "Robustness", (), tables, (), notes, nothing)


def _tables(prefix: str, found: Robustness) -> Iterator[PageTable]:
    for side, title in (
        (BOTH, "Both replies changed: no verdict should turn"),
        (REJECTED, "The rejected reply alone changed: verdicts that turn in its favour"),
    ):
        rows = [_cells(row) for row in found.rows if row.changed == side]
        yield PageTable(_HEADER, rows, prefix + title)
    best = [
        [f"best of {row.n}", show_number(row.reward), f"{row.characters:.1f}"]
        for row in found.best_of
    ]
    yield PageTable(["", "reward", "characters"], best, f"{prefix}The best by reward of a pair")


def _cells(row: RobustnessRow) -> list[str]:
    share = "" if row.share is None else f"{row.share:.3f} ({row.low:.3f} to {row.high:.3f})"
    shifts = (row.shift, row.shift_in_std, row.absolute_shift)
    shown = ["" if shift is None else show_number(shift) for shift in shifts]
    return [row.change, str(row.pairs), share, *shown, str(row.unchanged), str(row.too_long)]
