"""What a page is made of: sections with figures, tables and texts, each a plain value."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from nemo_aligner.evaluation.html.figures import Drawing, LegendKey
from nemo_aligner.evaluation.html.judged import HeldoutSet, JudgedPairs, Mistake
from nemo_aligner.evaluation.html.reported import Reported


@dataclass(frozen=True)
class PageTable:
    """Cells as text; ``is_long`` ones scroll on a screen, and are whole in print."""

    header: Sequence[str]
    rows: Sequence[Sequence[str]]
    title: str = ""
    is_long: bool = False


@dataclass(frozen=True)
class PageSection:
    """A part of the page; where there is nothing to show, ``nothing`` says why."""

    id: str
    title: str
    drawings: Sequence[Drawing] = ()
    tables: Sequence[PageTable] = ()
    mistakes: Sequence[tuple[str, Sequence[Mistake]]] = ()
    notes: Sequence[str] = ()
    nothing: str = ""

    @property
    def is_empty(self) -> bool:
        return not (self.drawings or self.tables or self.mistakes)


@dataclass(frozen=True)
class Heldout:
    """A held-out set of a run or an evaluation, and how figures show it."""

    key: LegendKey
    reported: Reported
    name: str
    judged: HeldoutSet


def heldout_sets(reported: Sequence[Reported]) -> list[Heldout]:
    """All of them; those of one run differ in dashes, or in colour where it is the only one."""
    found = []
    for number, each in enumerate(reported):
        for place, (name, judged) in enumerate(each.judged.items()):
            label = each.name if len(each.judged) == 1 else f"{each.name}, {name}"
            colour, dashes = (number, place) if len(reported) > 1 else (place, 0)
            found.append(Heldout(LegendKey(label, colour, dashes), each, name, judged))
    return found


def of_pairs(sets: Sequence[Heldout]) -> list[tuple[LegendKey, JudgedPairs]]:
    """Those of pairs."""
    return [(each.key, each.judged) for each in sets if isinstance(each.judged, JudgedPairs)]
