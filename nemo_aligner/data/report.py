"""What became of one data file, told before the first step."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from nemo_aligner.batch import LabelColumns
from nemo_aligner.config.common import RecordKind
from nemo_aligner.console import fit_row
from nemo_aligner.data.labels import FarLabel, label_range
from nemo_aligner.data.malformed import list_first, malformed_fraction
from nemo_aligner.data.records import MalformedRecord, Origin
from nemo_aligner.metrics.by_source import MAX_SOURCES

_DROPPED = ("malformed", "identical", "same_tokens", "tied", "empty_reply", "no_label", "overlong")
_TIES = ("identical", "same_tokens", "tied")
_SHOWN = 3
_PERCENT = (0, 5, 50, 95, 100)


@dataclass(frozen=True)
class FileReport:
    """One file's N records that were kept, and the others.

    Attributes:
        name: what the file is for, as logs call it.
        path, kind, format: the file, what it holds, and how it is written.
        counts: ``read``, ``kept``, and every reason that occurred.
        lengths: ``[S]`` int64 length of every sequence.
        reply_lengths: ``[S]`` int64 length of every reply.
        sources: records of every source; "" for those that name none.
        labels: of the records, in columns that may be none.
        longer_chosen: how often the better one of two completions is the longer; None where there
            are none.
        prefixes: tokens that all texts of each record begin with, ``[N]`` int64; None where nobody
            counted.
        prompts: prompt -> the first record with it, by the hash of ``records.prompt_key``.
        unit: what lengths count, tokens unless there is no tokenizer.
        prompts_in_training: prompts that stand in the training files, too; None of a training file.
        malformed: what stands where a record should, in the file's order.
        far_labels: labels that are far out, the farthest first.
    """

    name: str
    path: str
    kind: RecordKind
    format: str
    counts: Mapping[str, int]
    lengths: Tensor
    reply_lengths: Tensor
    sources: Mapping[str, int]
    labels: LabelColumns
    longer_chosen: float | None = None
    prefixes: Tensor | None = None
    prompts: Mapping[int, Origin] = field(default_factory=dict)
    unit: str = "tokens"
    prompts_in_training: int | None = None
    malformed: Sequence[MalformedRecord] = ()
    far_labels: Sequence[FarLabel] = ()

    def table(self, most_malformed: int = _SHOWN) -> str:
        """Two columns under the file's name, and under them the first malformed and far out."""
        lines = [f"{self.name}: {self.path} ({self.format})"]
        lines += [fit_row(f"  {name}", value, 28) for name, value in self._rows()]
        lines += _listed("malformed", self.malformed, most_malformed)
        lines += _listed("labels that are far out", self.far_labels, _SHOWN)
        return "\n".join(lines)

    def _rows(self) -> Iterable[tuple[str, object]]:
        counts, is_pairs = self.counts, self.kind is RecordKind.comparison
        dropped = {name: counts[name] for name in _DROPPED if counts.get(name)}
        yield "records", counts["read"]
        yield "kept", counts["kept"]
        yield "dropped", _with_parts(sum(dropped.values()), dropped)
        if self.malformed:
            yield "malformed", f"{len(self.malformed)} ({malformed_fraction(self):.2%})"
        yield "truncated", counts.get("truncated", 0)
        if is_pairs:
            yield "exact ties (dropped)", sum(counts.get(name, 0) for name in _TIES)
            if counts.get("all_tied"):
                yield "all tied (kept)", counts["all_tied"]
            if counts.get("some_tied"):
                yield "some tied", counts["some_tied"]
            yield "different prompts in pair", counts.get("different_prompts", 0)
        yield "duplicate records", counts.get("duplicates", 0)
        yield "prompts", f"{len(self.prompts)}, {counts['kept'] - len(self.prompts)} repeated"
        if self.prompts_in_training is not None:
            yield "prompts also in training", self.prompts_in_training
        yield self.unit, int(self.lengths.sum())
        if is_pairs and self.prefixes is not None and self.lengths.numel():
            fraction = float(self.prefixes.sum() / self.lengths.sum())
            alone = int((self.prefixes == 0).sum())
            yield "computed once for all", f"{fraction:.1%}; nothing in {alone} records"
        yield f"{self.unit} of a sequence", _quantiles(self.lengths)
        yield f"{self.unit} of a reply", _quantiles(self.reply_lengths)
        if self.longer_chosen is not None:
            yield "chosen is the longer", f"{self.longer_chosen:.1%}"
        if not torch.isnan(self.labels.values).all():
            missing = torch.isnan(self.labels.values).sum(0).tolist()
            yield "labels missing", " ".join(map(str, missing))
            means = self.labels.measured_means()
            yield "label means", " ".join(f"{mean:.4g}" for mean in means)
            lows, highs = label_range(self.labels)
            yield "labels from", " ".join(f"{low:.4g}" for low in lows)
            yield "labels to", " ".join(f"{high:.4g}" for high in highs)
        if set(self.sources) != {""}:
            yield "sources", _sources(self.sources)


def _listed(what: str, items: Sequence[object], most: int) -> list[str]:
    return [f"  {what}:", *(f"  {line}" for line in list_first(items, most))] if items else []


def _with_parts(total: int, parts: Mapping[str, int]) -> str:
    listed = ", ".join(f"{count} {name}" for name, count in parts.items())
    return f"{total} ({listed})" if parts else str(total)


def _quantiles(lengths: Tensor) -> str:
    if lengths.numel() == 0:
        return "none"
    at = torch.tensor(_PERCENT, dtype=torch.float64) / 100
    # By hand: torch.quantile takes no more than 2**24 values.
    ordered = lengths.flatten().sort().values
    found = ordered[(at * (len(ordered) - 1)).round().long()].tolist()
    low, p5, middle, p95, high = found
    return f"{low} to {high}, median {middle}, 90% within {p5} to {p95}"


def _sources(sources: Mapping[str, int]) -> str:
    if len(sources) > MAX_SOURCES:
        return f"{len(sources)}, too many for metrics of their own"
    ordered = sorted(sources.items(), key=lambda item: (-item[1], item[0]))
    return ", ".join(f"{name or 'none'} {count}" for name, count in ordered)
