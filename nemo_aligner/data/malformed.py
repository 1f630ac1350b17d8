"""What becomes of malformed records: the one place that decides whether a run goes on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from nemo_aligner.config.common import Malformed
from nemo_aligner.config.data import DataConfig
from nemo_aligner.data.records import MalformedRecord
from nemo_aligner.errors import DataError

MOST_LISTED = 10


class ReadFile(Protocol):
    """A file that was read, whose ``counts`` have ``read``; at least its first ``malformed``."""

    @property
    def path(self) -> str: ...

    @property
    def counts(self) -> Mapping[str, int]: ...

    @property
    def malformed(self) -> Sequence[MalformedRecord]: ...


@dataclass(frozen=True)
class MalformedRule:
    """``action`` says whether malformed records are left out, ``most`` how many of a file's.

    ``section`` is where the two settings stand, as errors name them: ``model.data.`` in training.
    """

    action: Malformed = DataConfig.malformed
    most: float = DataConfig.max_malformed
    section: str = "model.data."

    def allows(self, file: ReadFile) -> bool:
        """Whether the records that are left of the file are good to use."""
        if self.action is Malformed.error:
            return not file.malformed
        return malformed_fraction(file) <= self.most


def check_malformed(files: Sequence[ReadFile], rule: MalformedRule) -> None:
    """Refuse files with more malformed records than the rule allows, all of them in one error.

    Raises:
        DataError: it lists the first malformed records of every such file, and how many there are.
    """
    # A file may be given twice, to train and to validate on.
    bad = {file.path: file for file in files if not rule.allows(file)}
    if not bad:
        return
    lines = []
    for file in bad.values():
        listed = list_first(file.malformed, MOST_LISTED, _count(file))
        lines += [f"{file.path}: {_how_many(file)}", *listed]
    raise DataError("\n".join([*lines, _advice(list(bad.values()), rule)]))


def list_first(items: Sequence[object], most: int, total: int | None = None) -> list[str]:
    """A line for each of the first ``most`` items, and how many more there are.

    ``total`` is their number where not all of them are in ``items``.
    """
    lines = [f"  {item}" for item in items[:most]]
    rest = (len(items) if total is None else total) - most
    return [*lines, f"  and {rest} more"] if rest > 0 else lines


def malformed_fraction(file: ReadFile) -> float:
    """How much of the file's records is malformed."""
    return _count(file) / max(file.counts.get("read", 0), 1)


def _count(file: ReadFile) -> int:
    # Of many, only the first are at hand.
    return max(len(file.malformed), file.counts.get("malformed", 0))


def _how_many(file: ReadFile) -> str:
    return (
        f"{_count(file)} of its {file.counts['read']} records "
        f"({malformed_fraction(file):.2%}) are malformed"
    )


def _advice(files: Sequence[ReadFile], rule: MalformedRule) -> str:
    allowed = f"{rule.section}max_malformed={rule.most:g}"
    if rule.action is Malformed.drop:
        return f"{allowed} allows {rule.most:.2%} of a file; mend the data, or raise it"
    advice = f"{rule.section}malformed=drop would leave them out"
    if max(map(malformed_fraction, files)) > rule.most:
        return f"{advice}, but {allowed} allows {rule.most:.2%} of a file"
    return advice
