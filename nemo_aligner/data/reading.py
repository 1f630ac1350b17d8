"""A data file to records, in any of the formats.

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
show (too long, the same tokens on both sides) is dropped and counted by ``dataset.py``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from nemo_aligner.config.common import RecordKind
from nemo_aligner.data.formats import choose_format, parse_lines
from nemo_aligner.data.formats.base import WantedLabels
from nemo_aligner.data.records import Comparison, Record
from nemo_aligner.data.sources import read_lines
from nemo_aligner.errors import DataError
from nemo_aligner.text.messages import prompt_of, reply_of


@dataclass(frozen=True)
class RecordFile:
    """The records of one file; ``counts`` has ``read``, ``kept`` and every reason that occurred.

    ``columns`` are what the records' labels are called.
    """

    path: str
    kind: RecordKind
    format: str
    records: list[Any]
    columns: tuple[str, ...]
    counts: dict[str, int] = field(default_factory=dict)


def read_records(
    path: str | Path,
    kind: RecordKind | None,
    fmt: str = "auto",
    attributes: Sequence[str] = (),
    loss_mask_val: float | None = None,
    pair_columns: Sequence[str] = (),
) -> RecordFile:
    """Read one file of comparisons or ratings, whichever ``kind`` says; None takes either.

    ``attributes`` names the labels of ratings, ``pair_columns`` those of comparisons, in order;
    without them records come with no labels. ``loss_mask_val`` is the number that, like null,
    stands for a missing label.

    Raises:
        DataError: see the table above; a file with nothing left to use is one, too.
    """
    lines = read_lines(path)
    chosen_format = choose_format(fmt, kind, lines, str(path))
    is_rating = chosen_format.kind is RecordKind.rating
    wanted = WantedLabels(attributes if is_rating else pair_columns, loss_mask_val)
    counts: Counter[str] = Counter()
    records: list[Record] = []
    for record in parse_lines(chosen_format, lines, str(path), wanted):
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
    return RecordFile(
        path=str(path),
        kind=chosen_format.kind,
        format=chosen_format.name,
        records=records,
        columns=tuple(wanted.names),
        counts=dict(counts),
    )


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
