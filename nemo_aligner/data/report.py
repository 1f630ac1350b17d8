"""Reports on data files: counts, lengths, labels, prompts that occur in several files.

``FileSummary`` is stored with a file's token index. ``FileReport`` is the table that training and
``nemo-aligner data inspect`` print.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from nemo_aligner.batch.packed import LabelColumns
from nemo_aligner.config.common import RecordKind
from nemo_aligner.config.describe import suggestion
from nemo_aligner.contract.messages import Text, reply_of
from nemo_aligner.contract.tokenizer import Tokenizer
from nemo_aligner.data.clean import list_first, list_malformed, malformed_fraction
from nemo_aligner.data.formats.prompts import COLUMN_COUNTS, looks_like_prompt
from nemo_aligner.data.label_summary import LabelSummary, SoftLabelSummary, select_present
from nemo_aligner.data.records import (
    MalformedRecord,
    Origin,
    Record,
    better_and_worse,
    prompt_hash,
)
from nemo_aligner.metrics.table import MAX_SOURCES
from nemo_aligner.utils.console import fit_row
from nemo_aligner.utils.errors import DataError, short

# Prompts in both training and validation files, and records in several files.
#
# Prompts and records are compared by 64-bit hashes. Among 10 million different hashed values, the
# probability that any two collide is 3 in a million (the birthday bound, n^2 / 2^65).

# Number of hashes that ``find_members`` looks up at once, so that memory does not grow with the
# data.
_KEYS_AT_ONCE = 1 << 18


@dataclass(frozen=True)
class Prompts:
    """The P different prompts of a file, each with the line of its first record.

    Attributes:
        path: the file.
        keys: ``[P]`` uint64 ``prompt_hash`` of each prompt, in ascending order.
        lines: ``[P]`` int64 line of the first record with this prompt.
    """

    path: str
    keys: np.ndarray
    lines: np.ndarray

    @classmethod
    def of(cls, path: str, records: Iterable[Record]) -> Prompts:
        """Collect the prompts of the records of a file."""
        pairs = [(prompt_hash(record), record.origin.line) for record in records]
        keys = np.array([key for key, _ in pairs], dtype=np.uint64)
        lines = np.array([line for _, line in pairs], dtype=np.int64)
        return cls(path, *find_first_lines(keys, lines))

    def __len__(self) -> int:
        return len(self.keys)


def find_first_lines(keys: np.ndarray, lines: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Find the different values of ``keys [N]``, where ``lines [N]`` has the line of each key.

    Returns:
        The D different keys in ascending order, and the first line that has each, both ``[D]``.
    """
    different, first = np.unique(keys, return_index=True)
    return different, lines[first]


def find_members(keys: np.ndarray, sorted_keys: Sequence[np.ndarray]) -> np.ndarray:
    """Find which of ``keys [P]`` occur in at least one of the arrays ``sorted_keys``.

    Each array is in ascending order. The result is ``[P]`` bool.
    """
    is_in = np.zeros(len(keys), dtype=bool)
    for start in range(0, len(keys), _KEYS_AT_ONCE):
        part = keys[start : start + _KEYS_AT_ONCE]
        for candidates in sorted_keys:
            if len(candidates):
                index = np.searchsorted(candidates, part).clip(max=len(candidates) - 1)
                is_in[start : start + _KEYS_AT_ONCE] |= candidates[index] == part
    return is_in


def find_contradicted(
    keys: np.ndarray, counts: np.ndarray, sorted_keys: Sequence[np.ndarray]
) -> np.ndarray:
    """Find the records that have the opposite of a verdict in ``sorted_keys``.

    Args:
        keys: ``[V]`` uint64 ``verdict_keys`` of all records.
        counts: ``[N]`` number of verdicts of each record, in the order of ``keys``.
        sorted_keys: verdicts to compare with, each array in ascending order.

    Returns:
        ``[N]`` bool, True for the records that are contradicted.
    """
    is_contradicted = np.zeros(len(counts), dtype=bool)
    opposed = find_members(keys ^ np.uint64(1), sorted_keys)
    is_contradicted[np.repeat(np.arange(len(counts)), counts)[opposed]] = True
    return is_contradicted


def check_overlap(validation: FileReport, training: Sequence[FileReport], allowed: bool) -> int:
    """Count the prompts of a validation file that are also in the training files.

    Raises:
        DataError: there are such prompts, and ``allowed`` is False.
    """
    prompts = validation.prompts
    is_common = find_members(prompts.keys, [report.prompts.keys for report in training])
    count = int(is_common.sum())
    if count and not allowed:
        common = np.flatnonzero(is_common)
        first = common[prompts.lines[common].argmin()]
        origin = _find_origin(prompts.keys[first], [report.prompts for report in training])
        raise DataError(
            f"{validation.path}: {count} of its {len(prompts)} prompts are also in the training "
            f"files, the first in {Origin(prompts.path, prompts.lines[first])} and in "
            f"{origin}: metrics on them say little about new prompts. Split by prompt "
            "(`nemo-aligner data split`), or set model.data.allow_prompt_overlap=true"
        )
    return count


def _find_origin(key: np.ndarray, training: Sequence[Prompts]) -> Origin:
    """Find the first record with the prompt ``key``, in the last training file that has one."""
    matching = [prompts for prompts in training if find_members(key.reshape(1), [prompts.keys])[0]]
    last = matching[-1]
    return Origin(last.path, int(last.lines[np.searchsorted(last.keys, key)]))


def count_principles(keys: np.ndarray) -> tuple[int, int]:
    """Count the records with a principle, and the different principles.

    ``keys [N]`` has the ``principle_key`` of each record.
    """
    present = keys[keys != 0]
    return len(present), len(np.unique(present))


# Lengths of replies, and how often the better reply of a pair is the longer one.


def measure_replies(texts: Sequence[Text], tokenizer: Tokenizer | None = None) -> list[int]:
    """Measure the replies of samples, in tokens, or in characters without a tokenizer.

    Text that the chat template adds is not counted, as in ``ScoringContract.count_reply_tokens``.
    """
    replies = [reply_of(text) for text in texts]
    if tokenizer is None:
        return [len(reply) for reply in replies]
    return [len(ids) for ids in tokenizer.encode_batch(replies)]


def unit_of_lengths(tokenizer: Tokenizer | None) -> str:
    """Return the unit in which ``measure_replies`` measures: "tokens" or "characters"."""
    return "characters" if tokenizer is None else "tokens"


def longer_chosen(records: Sequence[Record], lengths: Sequence[int]) -> float | None:
    """Compute the fraction of pairs whose better reply is the longer one; None without pairs.

    ``lengths`` has the length of the reply of each sample, record by record.
    """
    pairs = better_and_worse(records, lengths)
    return longer_wins(pairs) if pairs else None


def longer_wins(lengths: Sequence[tuple[int, ...]]) -> float:
    """Compute the fraction of pairs whose first reply is the longer one.

    ``lengths`` has two lengths for each pair. Equal lengths count one half.
    """
    return float(np.mean([0.5 if a == b else float(a > b) for a, b in lengths]))


# The range of a label column, and outliers among its labels.
#
# A label is an outlier if its distance from the median of its column is more than ten times each of
# two reference distances:
#
# * the largest distance from the median among the column's labels, after the farthest hundredth of
#   them is excluded (at least three labels, at most a quarter of all);
# * the distance of the median from zero. (If both reference distances are 0, 1 is used instead.)
#
# The first distance keeps outliers few: a long tail has none, and if every fiftieth label is at the
# other end of the scale, none of these is an outlier. Because of the second distance, ratings from
# 0 to 4 that are nearly all 4 have no outliers, but a 400 among them is one.

_MIN_RATIO = 10
_OUTLIER_FRACTION = 0.01
_MIN_OUTLIERS = 3


@dataclass(frozen=True)
class FarLabel:
    """An outlier: a label at least ten times farther from its column's median than usual labels.

    Attributes:
        origin: file and line of the record.
        name: label column.
        value: the label.
        median: median of the column.
        times: the label's distance from the median, divided by the distance of usual labels, which
            the comment above this class defines.
    """

    origin: Origin
    name: str
    value: float
    median: float
    times: float

    def __str__(self) -> str:
        return f"{self.origin}: {self.name} is {self.value:g}, the median {self.median:g}"


def far_labels(labels: LabelColumns, origins: Sequence[Origin]) -> list[FarLabel]:
    """Find labels at least ten times farther from their column's median than usual ones.

    The farthest comes first. The comment above ``FarLabel`` has the exact rule.

    ``origins`` has the file and line of each row of ``labels``.
    """
    columns = zip(labels.names, labels.values.double().unbind(1), strict=True)
    outliers = [label for name, column in columns for label in _find_far(name, column, origins)]
    return sorted(outliers, key=lambda label: -label.times)


def _find_far(name: str, column: Tensor, origins: Sequence[Origin]) -> Iterator[FarLabel]:
    present = select_present(column)
    if not present.numel():
        return
    median = float(present.median())
    ordered = (present - median).abs().sort().values
    excluded = min(max(_MIN_OUTLIERS, int(_OUTLIER_FRACTION * len(ordered))), len(ordered) // 4)
    reach = max(float(ordered[len(ordered) - 1 - excluded]), abs(median)) or 1.0
    # A missing label is NaN, and NaN > x is False, so it is not an outlier.
    for index in torch.nonzero((column - median).abs() > _MIN_RATIO * reach).flatten().tolist():
        value = float(column[index])
        yield FarLabel(origins[index], name, value, median, abs(value - median) / reach)


# Summary of a file's records, small enough for a JSON file.

# Largest number of malformed records that a summary lists.
MOST_KEPT = 100
_PERCENT = np.array([0, 5, 50, 95, 100])


@dataclass(frozen=True)
class LengthSummary:
    """Summary of lengths: their sum, and five quantiles.

    The quantiles are the smallest length, the 5th, 50th and 95th percentile, and the largest.
    """

    total: int
    quantiles: tuple[int, ...]

    @classmethod
    def of(cls, lengths: np.ndarray) -> LengthSummary:
        """Summarize the lengths ``[S]``; if there are none, the quantiles are empty."""
        if not len(lengths):
            return cls(0, ())
        # Each quantile is a length that occurs: nothing is interpolated between two lengths.
        at = np.rint(_PERCENT / 100 * (len(lengths) - 1)).astype(np.int64)
        return cls(int(lengths.sum()), tuple(np.sort(lengths)[at].tolist()))

    def __str__(self) -> str:
        if not self.quantiles:
            return "none"
        low, p5, middle, p95, high = self.quantiles
        return f"{low} to {high}, median {middle}, 90% within {p5} to {p95}"


@dataclass(frozen=True)
class PrefixSummary:
    """Tokens saved by computing the shared prefix of a record's samples once.

    Attributes:
        saved: number of tokens that need not be computed, because an earlier sample of the record
            has the same prefix.
        alone: number of records whose samples share no prefix.
    """

    saved: int
    alone: int


@dataclass(frozen=True)
class FileSummary:
    """Summary of the records of one file.

    Attributes:
        path, kind, format: the file, the kind of its records, and the name of its format.
        counts: ``read``, ``kept``, and the count of each reason in ``clean.py`` that occurred.
        lengths: lengths of all samples.
        reply_lengths: lengths of all replies; of turns or steps if these are rated.
        sources: number of records by source; "" for those without one.
        labels: summary of the label columns.
        longer_chosen: fraction of pairs whose better sample is longer; None without pairs.
        prefixes: tokens saved by shared prefixes; None if the file was not tokenized.
        malformed: the first malformed records.
        far_labels: outliers among the labels, the farthest first.
        unread: for each column that was not read, the number of lines that have it.
        principles: number of records with a principle, and number of different principles.
        soft_labels: summary of the teacher's rewards; None if no record has any.
        teachers: number of records by the JSON of their field ``teacher``.
    """

    path: str
    kind: RecordKind
    format: str
    counts: Mapping[str, int]
    lengths: LengthSummary
    reply_lengths: LengthSummary
    sources: Mapping[str, int]
    labels: LabelSummary
    longer_chosen: float | None = None
    prefixes: PrefixSummary | None = None
    malformed: Sequence[MalformedRecord] = ()
    far_labels: Sequence[FarLabel] = ()
    unread: Mapping[str, int] = field(default_factory=dict)
    principles: tuple[int, int] = (0, 0)
    soft_labels: SoftLabelSummary | None = None
    teachers: Mapping[str, int] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """Convert to JSON values, without the path, as a file may be moved with its token cache."""
        values = asdict(self)
        del values["path"]
        values["kind"] = self.kind.value
        values["malformed"] = [[bad.origin.line, bad.reason] for bad in self.malformed]
        values["far_labels"] = [
            [far.origin.line, far.name, far.value, far.median, far.times] for far in self.far_labels
        ]
        return values

    @classmethod
    def from_dict(cls, values: Mapping[str, Any], path: str) -> FileSummary:
        """Restore a summary from the result of ``to_dict``; ``path`` is where the file is now."""
        prefixes = values["prefixes"]
        parts: dict[str, Any] = {
            "path": path,
            "kind": RecordKind(values["kind"]),
            "lengths": _parse_lengths(values["lengths"]),
            "reply_lengths": _parse_lengths(values["reply_lengths"]),
            "principles": tuple(values["principles"]),
            "labels": LabelSummary.from_dict(values["labels"]),
            "soft_labels": SoftLabelSummary.from_dict(values["soft_labels"]),
            "prefixes": None if prefixes is None else PrefixSummary(**prefixes),
            "malformed": [
                MalformedRecord(Origin(path, line), reason) for line, reason in values["malformed"]
            ],
            "far_labels": [
                FarLabel(Origin(path, line), *fields) for line, *fields in values["far_labels"]
            ],
        }
        return cls(**{**values, **parts})


def _parse_lengths(values: Mapping[str, Any]) -> LengthSummary:
    return LengthSummary(values["total"], tuple(values["quantiles"]))


# FileReport: the table that is printed for one data file.

_DROPPED = (
    "malformed",
    "identical",
    "same_tokens",
    "tied",
    "empty_reply",
    "no_label",
    "contradicting",
    "overlong",
)
_TIES = ("identical", "same_tokens", "tied")
_SHOWN = 3
_COLUMNS_SHOWN = 12
# Columns of any format whose misspelt names are not read.
_COLUMNS_WITH_PROMPTS = (*COLUMN_COUNTS, "tools", "documents", "principle")


@dataclass(frozen=True)
class FileReport:
    """The records of one file as a part of a data set.

    Attributes:
        name: name of the data set, for example train.
        summary: summary of the file.
        counts: counts of the summary; ``duplicates`` and ``contradicted`` also count records that
            repeat or contradict those of earlier files.
        prompts: prompts of its records.
        unit: unit of lengths: tokens, or characters without a tokenizer.
        columns: names of the label columns.
        prompts_in_training: number of prompts that are also in the training files; None for a
            training file.
        content_digest: sha256 (hex) of the file's bytes when it was tokenized; None if it was not.
    """

    name: str
    summary: FileSummary
    counts: Mapping[str, int]
    prompts: Prompts
    unit: str = "tokens"
    columns: tuple[str, ...] = ()
    prompts_in_training: int | None = None
    content_digest: str | None = None

    @property
    def path(self) -> str:
        """Path of the file."""
        return self.summary.path

    @property
    def malformed(self) -> Sequence[MalformedRecord]:
        """The first malformed records, in the order of the file."""
        return self.summary.malformed

    def table(self, most_malformed: int = _SHOWN, *, with_zeros: bool = False) -> str:
        """Render the report: two columns, then the first malformed records and outliers.

        Counts of problems that are 0 are omitted, except for the number of dropped records, unless
        ``with_zeros`` is True.
        """
        always = ("kept", "prompts also in training")
        rows = [row for row in self.rows() if with_zeros or row[1] != 0 or row[0] in always]
        return self._render(rows, most_malformed)

    def overview(self) -> str:
        """Render the report with few rows, because a run prints one for every file at its start.

        Related facts share a row. Nothing that points to a problem in the data is omitted.
        """
        always = ("kept", "prompts also in training")
        rows = {name: value for name, value in self.rows() if value != 0 or name in always}
        num_read, num_used = rows["records"], rows.pop("kept")
        records = [str(num_read), "all kept" if num_used == num_read else f"{num_used} kept"]
        if num_used == num_read:
            del rows["dropped"]
        num_sources = sum(bool(name) for name in self.summary.sources)
        if num_sources:
            records.append(f"from {num_sources} source{'s' * (num_sources > 1)}")
            del rows["sources"]
        rows["records"] = ", ".join(records)
        if "shared prefixes" in rows:
            total, saved = rows[self.unit], rows.pop("shared prefixes")
            rows[self.unit] = f"{total}, shared prefixes: {saved}"
        rows.pop(f"{self.unit} of a reply", None)
        return self._render(list(rows.items()), _SHOWN)

    def _render(self, rows: Sequence[tuple[str, object]], most_malformed: int) -> str:
        summary = self.summary
        lines = [f"{self.name}: {self.path} ({summary.format})"]
        lines += [fit_row(f"  {name}", value, 28) for name, value in rows]
        count = self.counts.get("malformed", 0)
        lines += _indent("malformed", list_malformed(self.malformed, most_malformed, count))
        lines += _indent("labels that are far out", list_first(summary.far_labels, _SHOWN))
        return "\n".join(lines)

    def rows(self) -> Iterable[tuple[str, object]]:
        """Yield the name and the value of each row of the table."""
        counts, summary = self.counts, self.summary
        is_pairs = summary.kind is RecordKind.comparison
        dropped = {name: counts[name] for name in _DROPPED if counts.get(name)}
        yield "records", counts["read"]
        yield "kept", counts["kept"]
        yield "dropped", _format_parts(sum(dropped.values()), dropped)
        if self.malformed:
            yield "malformed", f"{counts['malformed']} ({malformed_fraction(self):.2%})"
        yield "truncated", counts.get("truncated", 0)
        if is_pairs:
            yield "exact ties (dropped)", sum(counts.get(name, 0) for name in _TIES)
            if counts.get("all_tied"):
                yield "all tied (kept)", counts["all_tied"]
            if counts.get("some_tied"):
                yield "some tied", counts["some_tied"]
            yield "different prompts in pair", counts.get("different_prompts", 0)
        if counts.get("rows_in_cells"):
            yield "cells with rows in them", f"{counts['rows_in_cells']}; is a quote missing?"
        if counts.get("steps"):
            yield "turns or steps", counts["steps"]
            yield "their labels cut off", counts.get("labels_cut_off", 0)
        yield "duplicate records", counts.get("duplicates", 0)
        if counts.get("contradicted"):
            yield "contradicting records", counts["contradicted"]
        yield "prompts", f"{len(self.prompts)}, {counts['kept'] - len(self.prompts)} repeated"
        if self.prompts_in_training is not None:
            yield "prompts also in training", self.prompts_in_training
        yield from self._content_rows()

    def _format_columns(self, values: Sequence[float]) -> str:
        named = zip(self.columns, values, strict=True)
        return ", ".join(
            f"{name} {value}" if isinstance(value, int) else f"{name} {value:.4g}"
            for name, value in named
        )

    def _content_rows(self) -> Iterable[tuple[str, object]]:
        summary, counts = self.summary, self.counts
        total, prefixes = summary.lengths.total, summary.prefixes
        yield self.unit, total
        if summary.kind is RecordKind.comparison and prefixes is not None and total:
            alone = f"; {prefixes.alone} records share none" if prefixes.alone else ""
            yield "shared prefixes", f"{prefixes.saved / total:.1%} of {self.unit} saved{alone}"
        yield f"{self.unit} of a sequence", summary.lengths
        if summary.kind is RecordKind.rating and self.counts.get("steps"):
            yield f"{self.unit} of a step", summary.reply_lengths
        else:
            yield f"{self.unit} of a reply", summary.reply_lengths
        if summary.longer_chosen is not None:
            yield "chosen is the longer", f"{summary.longer_chosen:.1%} (in {self.unit})"
        labels = summary.labels
        if any(map(math.isfinite, labels.means)):
            yield "labels missing", self._format_columns(labels.missing)
            yield "label means", self._format_columns(labels.means)
            yield "labels from", self._format_columns(labels.lows)
            yield "labels to", self._format_columns(labels.highs)
        if summary.soft_labels is not None:
            yield from summary.soft_labels.render_rows()
        if summary.principles[0]:
            yield "principles", "{} records, {} different".format(*summary.principles)
        if any(summary.sources):
            yield "sources", _list_sources(summary.sources)
        in_prompt = {name: counts.get(key, 0) for name, key in COLUMN_COUNTS.items()}
        if any(in_prompt.values()):
            parts = [f"{name} {count}" for name, count in in_prompt.items() if count]
            yield "columns in the prompt", ", ".join(parts)
        if summary.unread:
            yield "columns not read", _list_columns(summary.unread)


def _indent(heading: str, lines: Sequence[str]) -> list[str]:
    return [f"  {heading}:", *(f"  {line}" for line in lines)] if lines else []


def _format_parts(total: int, parts: Mapping[str, int]) -> str:
    listed = ", ".join(f"{count} {name}" for name, count in parts.items())
    return f"{total} ({listed})" if parts else str(total)


def _list_columns(unread: Mapping[str, int]) -> str:
    """List the columns that were not read, each with the number of lines that have it.

    Columns that may belong to the prompt come first, because a prompt column that is not read is
    often a mistake.
    """
    hints = {name: _hint_of_column(name) for name in unread}
    ordered = sorted(unread, key=lambda name: (not hints[name], -unread[name], name))
    parts = [f"{short(name)} {unread[name]}{hints[name]}" for name in ordered[:_COLUMNS_SHOWN]]
    more = len(ordered) - len(parts)
    return ", ".join(parts) + (f", and {more} more" if more else "")


def _hint_of_column(name: str) -> str:
    """Return what the name of a column that was not read may mean; empty if it tells nothing."""
    near = suggestion(name, _COLUMNS_WITH_PROMPTS)
    if near not in (None, name):
        return f" (did you mean {near}?)"
    return " (part of the prompt?)" if looks_like_prompt(name) else ""


def _list_sources(sources: Mapping[str, int]) -> str:
    if len(sources) > MAX_SOURCES:
        return f"{len(sources)}, too many for metrics by source"
    ordered = sorted(sources.items(), key=lambda item: (-item[1], item[0]))
    return ", ".join(f"{name or 'none'} {count}" for name, count in ordered)
