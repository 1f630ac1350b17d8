"""What became of one data file, told before the first step."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from nemo_aligner.config.common import RecordKind
from nemo_aligner.console import fit_row
from nemo_aligner.data.malformed import list_first, malformed_fraction
from nemo_aligner.data.overlap import Prompts
from nemo_aligner.data.records import MalformedRecord
from nemo_aligner.data.summary import FileSummary
from nemo_aligner.metrics.by_source import MAX_SOURCES

_DROPPED = ("malformed", "identical", "same_tokens", "tied", "empty_reply", "no_label", "overlong")
_TIES = ("identical", "same_tokens", "tied")
_SHOWN = 3


@dataclass(frozen=True)
class FileReport:
    """One file's records as a part of the data.

    Attributes:
        name: what the file is for, as logs call it.
        summary: what is told of it.
        counts: those of the summary, with ``duplicates`` of files before it, too.
        prompts: of its records.
        unit: what lengths count, tokens unless there is no tokenizer.
        prompts_in_training: prompts that stand in the training files, too; None of a training file.
    """

    name: str
    summary: FileSummary
    counts: Mapping[str, int]
    prompts: Prompts
    unit: str = "tokens"
    prompts_in_training: int | None = None

    @property
    def path(self) -> str:
        return self.summary.path

    @property
    def malformed(self) -> Sequence[MalformedRecord]:
        """The first of them, in the file's order."""
        return self.summary.malformed

    def table(self, most_malformed: int = _SHOWN) -> str:
        """Two columns under the file's name, and under them the first malformed and far out."""
        summary = self.summary
        lines = [f"{self.name}: {self.path} ({summary.format})"]
        lines += [fit_row(f"  {name}", value, 28) for name, value in self.rows()]
        count = self.counts.get("malformed", 0)
        lines += _listed("malformed", self.malformed, most_malformed, count)
        far = summary.far_labels
        lines += _listed("labels that are far out", far, _SHOWN, len(far))
        return "\n".join(lines)

    def rows(self) -> Iterable[tuple[str, object]]:
        """The two columns."""
        counts, summary = self.counts, self.summary
        is_pairs = summary.kind is RecordKind.comparison
        dropped = {name: counts[name] for name in _DROPPED if counts.get(name)}
        yield "records", counts["read"]
        yield "kept", counts["kept"]
        yield "dropped", _with_parts(sum(dropped.values()), dropped)
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
        yield "duplicate records", counts.get("duplicates", 0)
        yield "prompts", f"{len(self.prompts)}, {counts['kept'] - len(self.prompts)} repeated"
        if self.prompts_in_training is not None:
            yield "prompts also in training", self.prompts_in_training
        yield from self._content_rows()

    def _content_rows(self) -> Iterable[tuple[str, object]]:
        summary = self.summary
        total, prefixes = summary.lengths.total, summary.prefixes
        yield self.unit, total
        if summary.kind is RecordKind.comparison and prefixes is not None and total:
            alone = f"; {prefixes.alone} records share none" if prefixes.alone else ""
            yield "shared beginnings", f"{prefixes.saved / total:.1%} of {self.unit} saved{alone}"
        yield f"{self.unit} of a sequence", summary.lengths
        yield f"{self.unit} of a reply", summary.reply_lengths
        if summary.longer_chosen is not None:
            yield "chosen is the longer", f"{summary.longer_chosen:.1%}"
        labels = summary.labels
        if any(map(math.isfinite, labels.means)):
            yield "labels missing", " ".join(map(str, labels.missing))
            yield "label means", _numbers(labels.means)
            yield "labels from", _numbers(labels.lows)
            yield "labels to", _numbers(labels.highs)
        if set(summary.sources) != {""}:
            yield "sources", _sources(summary.sources)


def _numbers(values: Sequence[float]) -> str:
    return " ".join(f"{value:.4g}" for value in values)


def _listed(what: str, items: Sequence[object], most: int, total: int) -> list[str]:
    if not items:
        return []
    return [f"  {what}:", *(f"  {line}" for line in list_first(items, most, total))]


def _with_parts(total: int, parts: Mapping[str, int]) -> str:
    listed = ", ".join(f"{count} {name}" for name, count in parts.items())
    return f"{total} ({listed})" if parts else str(total)


def _sources(sources: Mapping[str, int]) -> str:
    if len(sources) > MAX_SOURCES:
        return f"{len(sources)}, too many for metrics of their own"
    ordered = sorted(sources.items(), key=lambda item: (-item[1], item[0]))
    return ", ".join(f"{name or 'none'} {count}" for name, count in ordered)
