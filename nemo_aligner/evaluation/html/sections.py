"""What a page is made of: sections with figures, tables and texts, each a plain value."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from nemo_aligner.evaluation.html.figures import Drawing, LegendKey
from nemo_aligner.evaluation.html.judged import HeldoutSet, JudgedPairs, Mistake
from nemo_aligner.evaluation.html.reported import Reported
from nemo_aligner.metrics import length

_MOST_ROWS = 40


@dataclass(frozen=True)
class PageTable:
    """Cells as text."""

    header: Sequence[str]
    rows: Sequence[Sequence[str]]
    title: str = ""

    @property
    def is_folded(self) -> bool:
        """Whether a screen shows it on demand; in print it is always there."""
        return len(self.rows) > _MOST_ROWS


@dataclass(frozen=True)
class Headline:
    """The result of one model on one held-out set, at a glance.

    Attributes:
        name: of both, empty where the page has one.
        figures: numbers as text, each with what it is.
        verdict: the result in a sentence.
        mistakes: the worst of them, on a line each.
    """

    name: str
    figures: Sequence[tuple[str, str]]
    verdict: str
    mistakes: Sequence[str] = ()


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
    headlines: Sequence[Headline] = ()

    @property
    def is_empty(self) -> bool:
        return not (self.headlines or self.drawings or self.tables or self.mistakes)


@dataclass(frozen=True)
class Heldout:
    """A held-out set of a run or an evaluation, and how figures show it."""

    key: LegendKey
    reported: Reported
    name: str
    judged: HeldoutSet

    def metric(self, name: str) -> float | None:
        """Return a metric that the run or the evaluation recorded for this set; None if it did not.

        Of a run it is that of the last validation.
        """
        _, values = self.reported.curves.get(f"{self.name}/{name}", ((), ()))
        return values[-1] if values else self.reported.metrics.get(name)

    def longer_baseline(self) -> tuple[float, str] | None:
        """Return the accuracy of always taking the longer reply, and the unit of its lengths.

        That is tokens, as in logs and evaluations, where one recorded it; else characters.
        """
        if not isinstance(self.judged, JudgedPairs):
            return None
        recorded = self.metric("longer_reply_accuracy")
        if recorded is not None:
            return recorded, "tokens"
        return length.longer_reply_accuracy(self.judged.as_metrics()), "characters"


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
