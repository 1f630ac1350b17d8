"""Preference data in memory: comparisons and ratings, each knowing the file and line it came from.

What is an error, and what is a counted drop:

=============================================================================  =====================
malformed JSON or text, a missing key, a value of the wrong type, two formats  DataError, file:line
in one file, an odd number of comparison lines, a label that is not finite
chosen and rejected are the same (``identical``)                               dropped and counted
the reply is empty or blank (``empty_reply``)                                  dropped and counted
a rating without any label (``no_label``)                                      dropped and counted
chosen and rejected answer different prompts (``different_prompts``)           kept and counted
=============================================================================  =====================

Empty lines are skipped. A dropped record is never replaced by another one. What only tokens can
show (too long, the same tokens on both sides) is dropped and counted by ``datasets.py``.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

from nemo_aligner.data.sources import read_lines
from nemo_aligner.errors import DataError
from nemo_aligner.text.messages import Text, prompt_of, reply_of


@dataclass(frozen=True)
class Origin:
    """Where a record begins; lines count from 1."""

    path: str
    line: int

    def __str__(self) -> str:
        return f"{self.path}:{self.line}"


@dataclass(frozen=True)
class Comparison:
    """Two texts of which people, or a rule, preferred ``chosen``; ``source`` is "" if unknown."""

    chosen: Text
    rejected: Text
    origin: Origin
    source: str = ""

    @property
    def texts(self) -> tuple[Text, ...]:
        return (self.chosen, self.rejected)


@dataclass(frozen=True)
class Rating:
    """A text with one label per attribute, None where it is missing; ``source`` may be ""."""

    response: Text
    labels: tuple[float | None, ...]
    origin: Origin
    source: str = ""

    @property
    def texts(self) -> tuple[Text, ...]:
        return (self.response,)


Record: TypeAlias = Comparison | Rating


@dataclass(frozen=True)
class RecordFile:
    """The records of one file; ``counts`` has ``read``, ``kept`` and every reason that occurred."""

    path: str
    kind: str
    format: str
    records: list[Any]
    counts: dict[str, int] = field(default_factory=dict)


def read_records(
    path: str | Path,
    kind: str | None,
    fmt: str = "auto",
    attributes: Sequence[str] = (),
    loss_mask_val: float | None = None,
) -> RecordFile:
    """Read one file of pairs (``kind="comparison"``) or ratings (``"rating"``); None takes either.

    ``attributes`` names the labels of ratings, in order; without it ratings come with no labels.
    ``loss_mask_val`` is the number that, like null, stands for a missing label.

    Raises:
        DataError: see the table above; a file with nothing left to use is one, too.
    """
    # Here, because formats.py is built on the types of this file.
    from nemo_aligner.data.formats import choose_format

    lines = read_lines(path)
    chosen_format = choose_format(fmt, kind, lines, str(path))
    counts: Counter[str] = Counter()
    records: list[Record] = []
    for record in chosen_format.read(lines, str(path), attributes, loss_mask_val):
        counts["read"] += 1
        reason = _why_drop(record, bool(attributes))
        if reason is not None:
            counts[reason] += 1
            continue
        if isinstance(record, Comparison) and prompt_of(record.chosen) != prompt_of(
            record.rejected
        ):
            counts["different_prompts"] += 1
        records.append(record)
    counts["kept"] = len(records)
    if not records:
        raise DataError(f"{path}: no usable record in it: {_describe(counts)}")
    return RecordFile(str(path), chosen_format.kind, chosen_format.name, records, dict(counts))


def _describe(counts: Counter[str]) -> str:
    return ", ".join(f"{count} {name}" for name, count in counts.items()) or "it is empty"


def _why_drop(record: Record, labelled: bool) -> str | None:
    if any(not reply_of(text).strip() for text in record.texts):
        return "empty_reply"
    if isinstance(record, Comparison):
        return "identical" if record.chosen == record.rejected else None
    if labelled and all(label is None for label in record.labels):
        return "no_label"
    return None


def prompt_key(record: Record) -> str:
    """What two records of the same prompt have in common, whatever its case and white space.

    Raw text does not say where its prompt ends: a pair's is what both texts begin with, up to a
    line's end if there is one; a rated text stands for itself.
    """
    first = record.texts[0]
    if isinstance(first, str):
        return _normal(_shared_start(record))
    return "\n".join(f"{turn['role']}: {_normal(turn['content'])}" for turn in prompt_of(first))


def _shared_start(record: Record) -> str:
    texts = [str(text) for text in record.texts]
    start = os.path.commonprefix(texts)  # noqa: RUF071 - of texts, not of paths
    if len(texts) == 1:
        return start
    return start[: start.rfind("\n") + 1] or start or texts[0]


def _normal(text: str) -> str:
    return " ".join(text.casefold().split())
