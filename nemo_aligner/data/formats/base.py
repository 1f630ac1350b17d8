"""What a format is: how its records are known, and how one is read."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from nemo_aligner.config.common import RecordKind
from nemo_aligner.data.records import Origin, Record


@dataclass(frozen=True)
class WantedLabels:
    """The label columns that a reader has to find.

    Attributes:
        names: of the columns, in order; none are read where it is empty.
        missing: the number that, like null, stands for a missing label.
    """

    names: Sequence[str] = ()
    missing: float | None = None


@dataclass(frozen=True)
class PairKeys:
    """Which fields of a pair have its prompt, its chosen and its rejected reply."""

    prompt: str = "prompt"
    chosen: str = "chosen"
    rejected: str = "rejected"

    @classmethod
    def of(cls, prompt: str | None, chosen: str | None, rejected: str | None) -> PairKeys | None:
        """The usual one where one is None; None if all are."""
        if all(key is None for key in (prompt, chosen, rejected)):
            return None
        return cls(prompt or cls.prompt, chosen or cls.chosen, rejected or cls.rejected)


@dataclass(frozen=True)
class Format:
    """A public format.

    Attributes:
        name: as ``model.data.format`` has it.
        kind: what its records are.
        matches: whether an object of a file is a record of it, or a line of one.
        wanted: the keys by which it is known, for errors.
        parse: a record of the objects that it is made of; raises DataError without file and
            line, which the caller knows.
        sample: the objects of one record.
        lines_per_record: objects that make a record.
    """

    name: str
    kind: RecordKind
    matches: Callable[[dict[str, Any]], bool]
    wanted: str
    parse: Callable[[list[dict[str, Any]], Origin, WantedLabels], Record]
    sample: tuple[dict[str, Any], ...]
    lines_per_record: int = 1


def has(*keys: str) -> Callable[[dict[str, Any]], bool]:
    """Whether an object has all of ``keys``."""
    return lambda value: set(keys) <= set(value)
