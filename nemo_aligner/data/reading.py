"""A data file to records, in any of the formats.

What is an error, what is malformed, and what is a counted drop:

=============================================================================  ====================
no file, no UTF-8, no JSON object in it, a broken JSON list, an odd number of  DataError
comparison lines, no record that fits a format
malformed JSON on a line, a missing key, a value of the wrong type, a          malformed: DataError,
conversation that does not end with the reply, a label that is not finite, a   or dropped and
record of another format than the others                                       counted
chosen and rejected are the same (``identical``)                               dropped and counted
the reply is empty or blank (``empty_reply``)                                  dropped and counted
a rating without any label (``no_label``)                                      dropped and counted
all completions are tied (``tied``)                                            dropped and counted,
                                                                               kept where the
                                                                               objective learns
                                                                               from ties
chosen and rejected answer different prompts (``different_prompts``)           kept and counted
a cell of a table has lines that look like rows (``rows_in_cells``)            kept and counted
=============================================================================  ====================

Which of the two a malformed record is, ``malformed.py`` decides; with an error, all files are read
before it. Empty lines are skipped. A dropped record is never replaced by another one. What only
tokens can show (too long, refused by the chat template, the same tokens on both sides) is told by
``dataset.py``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from nemo_aligner.config.common import RecordKind
from nemo_aligner.data.formats import check_lines_are_whole, choose_format, parse_lines
from nemo_aligner.data.formats.base import PairKeys, WantedLabels
from nemo_aligner.data.malformed import MalformedRule, check_malformed
from nemo_aligner.data.prompts import PromptWrapping
from nemo_aligner.data.records import Comparison, MalformedRecord, Record
from nemo_aligner.data.sources import Line, count_swallowed, read_lines
from nemo_aligner.errors import DataError
from nemo_aligner.text.messages import question_of, reply_of


@dataclass(frozen=True)
class Reading:
    """How files are read.

    Attributes:
        kind: what their records are; None takes either.
        format: ``auto``, or a name of ``formats/``.
        attributes: the labels of ratings, in order; without them ratings come with no labels.
        loss_mask_val: the number that, like null, stands for a missing label.
        pair_columns: the labels of comparisons, in order.
        pair_keys: which fields of pairs have their texts, where they have other names.
        prompts: what is put around them.
        rule: what becomes of malformed records.
        ties: keep comparisons whose completions are all tied.
    """

    kind: RecordKind | None = None
    format: str = "auto"
    attributes: Sequence[str] = ()
    loss_mask_val: float | None = None
    pair_columns: Sequence[str] = ()
    pair_keys: PairKeys | None = None
    prompts: PromptWrapping | None = None
    rule: MalformedRule = field(default_factory=MalformedRule)
    ties: bool = False

    def columns_of(self, kind: RecordKind) -> tuple[str, ...]:
        """What the labels of such records are called."""
        return tuple(self.attributes if kind is RecordKind.rating else self.pair_columns)

    def set_columns_of(self, kind: RecordKind) -> tuple[str, ...]:
        """The same of a data set that they may be in beside others, where both kinds are taken."""
        return self.columns_of(kind if self.kind is not None else RecordKind.rating)


@dataclass(frozen=True)
class RecordFile:
    """The records of one file; ``counts`` has ``read``, ``kept`` and every reason that occurred.

    ``columns`` are what the records' labels are called; where files of both kinds are taken, what
    those of ratings are.
    """

    path: str
    kind: RecordKind
    format: str
    records: list[Any]
    columns: tuple[str, ...]
    counts: dict[str, int] = field(default_factory=dict)
    malformed: list[MalformedRecord] = field(default_factory=list)


def read_files(paths: Sequence[str | Path], how: Reading) -> list[RecordFile]:
    """Read files of comparisons or ratings.

    Raises:
        ConfigError: there is no format of that name.
        DataError: see the table above; a file with nothing left to use is one, too.
    """
    files = [parse_file(path, how) for path in paths]
    check_malformed(files, how.rule)
    for file in files:
        if not file.records:
            raise nothing_left(file.path, file.counts)
    return files


def read_records(path: str | Path, how: Reading) -> RecordFile:
    """``read_files`` for one file."""
    return read_files([path], how)[0]


def parse_file(path: str | Path, how: Reading) -> RecordFile:
    """Read one file, whatever number of its records is malformed, or left to use.

    Raises:
        ConfigError: there is no format of that name.
        DataError: the file as a whole cannot be read; see the table above.
    """
    lines = read_lines(path)
    objects = [line for line in lines if isinstance(line, Line)]
    chosen_format = choose_format(how.format, how.kind, objects, str(path), how.pair_keys)
    check_lines_are_whole(chosen_format, lines, str(path))
    columns = how.columns_of(chosen_format.kind)
    of_set = how.set_columns_of(chosen_format.kind)
    file = RecordFile(str(path), chosen_format.kind, chosen_format.name, [], of_set)
    parsed = parse_lines(chosen_format, lines, str(path), WantedLabels(columns, how.loss_mask_val))
    counts = Counter({"rows_in_cells": count_swallowed(lines)})
    file.records.extend(usable_records(parsed, how, bool(columns), counts, file.malformed))
    file.counts.update(+counts, kept=len(file.records))
    return file


def usable_records(
    parsed: Iterable[Record | MalformedRecord],
    how: Reading,
    labelled: bool,
    counts: Counter[str],
    malformed: list[MalformedRecord],
) -> Iterator[Record]:
    """The records that are not dropped; the others are counted, or put into ``malformed``."""
    for each in parsed:
        record = _with_prompts(each, how.prompts)
        counts["read"] += 1
        if isinstance(record, MalformedRecord):
            counts["malformed"] += 1
            malformed.append(record)
            continue
        reason = _why_drop(record, labelled, how.ties)
        if reason is not None:
            counts[reason] += 1
            continue
        if isinstance(record, Comparison) and _have_different_prompts(record):
            counts["different_prompts"] += 1
        yield record


def _with_prompts(
    record: Record | MalformedRecord, prompts: PromptWrapping | None
) -> Record | MalformedRecord:
    if prompts is None or isinstance(record, MalformedRecord):
        return record
    try:
        return prompts.put_around(record)
    except DataError as error:
        return MalformedRecord(record.origin, str(error))


def _have_different_prompts(record: Comparison) -> bool:
    first, *others = map(question_of, record.texts)
    return any(other != first for other in others)


def nothing_left(path: str, counts: Mapping[str, int]) -> DataError:
    """Build the error of a file that has no record to use."""
    advice = (
        "; they are longer than model.data.seq_length: raise it, or set "
        "model.data.overlong=truncate_left"
    ) * bool(counts.get("overlong"))
    return DataError(f"{path}: no usable record in it: {_describe(counts)}{advice}")


def _describe(counts: Mapping[str, int]) -> str:
    found = (f"{count} {name}" for name, count in counts.items() if count)
    return ", ".join(found) or "it is empty"


def _why_drop(record: Record, labelled: bool, ties: bool) -> str | None:
    if any(not reply_of(text).strip() for text in record.texts):
        return "empty_reply"
    if isinstance(record, Comparison):
        if all(text == record.texts[0] for text in record.texts):
            return "identical"
        return "tied" if record.is_tied and not ties else None
    if labelled and all(label is None for label in record.labels):
        return "no_label"
    return None
