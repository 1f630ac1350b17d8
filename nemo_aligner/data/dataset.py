"""Tokenized records, ready to be packed: a view of their files' indexes (``token_index.py``)."""

from __future__ import annotations

import hashlib
import random
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from nemo_aligner.batch.packed import LabelColumns, Records
from nemo_aligner.config.common import RecordKind
from nemo_aligner.data.clean import MalformedRule, check_malformed, nothing_left
from nemo_aligner.data.records import Origin, Record, label_rows
from nemo_aligner.data.report import FileReport, find_contradicted, find_in
from nemo_aligner.data.token_index import (
    FileIndex,
    Origins,
    Sources,
    TokenSequences,
    add_sequence,
    end_digest,
)
from nemo_aligner.utils.errors import ConfigError, DataError


@dataclass(frozen=True)
class StepReads:
    """S rewards in Q sequences that have one for each of their turns or steps.

    Attributes:
        records: ``[N + 1]`` int64 bounds of the sequences of each record.
        sequences: ``[Q + 1]`` int64 bounds of the rewards of each sequence.
        places: ``[S]`` int32, of the token in its sequence that each is read at.
    """

    records: Tensor
    sequences: Tensor
    places: Tensor

    def of(self, first: int, end: int) -> list[Tensor]:
        """Places of the sequences from ``first`` to ``end``, int64."""
        bounds = self.sequences[first : end + 1]
        sizes = bounds.diff().tolist()
        return list(self.places[int(bounds[0]) : int(bounds[-1])].long().split(sizes))

    def texts(self) -> Tensor:
        """``[S]`` int32, which of its record's sequences each reward is of."""
        count = len(self.sequences) - 1
        number = torch.arange(count, dtype=torch.int32)
        first = number[self.records[:-1]].repeat_interleave(self.records.diff())
        return (number - first).repeat_interleave(self.sequences.diff())

    def select(self, sequences: Tensor, counts: Tensor) -> StepReads:
        """Those of ``sequences [q]``, of which each record has ``counts [n]``."""
        places = [self.of(number, number + 1)[0] for number in sequences.tolist()]
        return StepReads.build(counts.tolist(), [own.tolist() for own in places])

    @classmethod
    def build(cls, counts: Sequence[int], places: Sequence[Sequence[int]]) -> StepReads:
        """Of the ``places`` in each sequence, of which each record has ``counts [N]``."""
        sizes = torch.tensor([0, *map(len, places)], dtype=torch.int64)
        flat = [place for own in places for place in own]
        return cls(
            torch.tensor([0, *counts], dtype=torch.int64).cumsum(0),
            sizes.cumsum(0),
            torch.tensor(flat, dtype=torch.int32),
        )


@dataclass(frozen=True)
class TokenizedDataset:
    """N records of one kind with S sequences, as token ids.

    Attributes:
        kind: comparison or rating.
        name: name of the set in logs.
        sequences: S of them, in record order; fewer where ``steps`` says so.
        records: the rewards that each record owns, and its labels.
        origins: file and line of every record.
        sources: where every record says it is from; "" where it says nothing.
        reports: one for each file.
        prefixes: ``[N]`` int32 tokens that all sequences of a record begin with; 0 for a lone one.
        known_digest: ``digest`` where the indexes have it.
        steps: which rewards a sequence has; None is one, at its last token.
    """

    kind: RecordKind
    name: str
    sequences: TokenSequences
    records: Records
    origins: Sequence[Origin]
    sources: Sequence[str]
    reports: Sequence[FileReport]
    prefixes: Tensor
    known_digest: str | None = None
    steps: StepReads | None = None

    def __len__(self) -> int:
        return len(self.origins)

    @property
    def file_sizes(self) -> tuple[int, ...]:
        """Records that were kept of every file, in their order."""
        return tuple(report.counts["kept"] for report in self.reports)

    @property
    def counts(self) -> dict[str, int]:
        """``read``, ``kept``, and every reason that occurred, over all files."""
        total: Counter[str] = Counter()
        for report in self.reports:
            total.update(report.counts)
        return dict(total)

    def record(self, index: int) -> list[np.ndarray]:
        """The sequences of one record, ``[L]`` int32 each."""
        return self.sequences[slice(*self._rows(index))]

    def lengths(self, index: int) -> list[int]:
        """The tokens of each sequence of one record."""
        return self.sequences.lengths(*self._rows(index)).tolist()

    def num_tokens(self, index: int) -> int:
        """Tokens of one record, all its sequences together."""
        return sum(self.lengths(index))

    @property
    def total_tokens(self) -> int:
        """T, of all sequences."""
        return self.sequences.num_tokens

    @property
    def sequence_bounds(self) -> Tensor:
        """``[N + 1]`` int64 sequences of the records, from 0 on."""
        return self.records.bounds if self.steps is None else self.steps.records

    def _rows(self, index: int) -> tuple[int, int]:
        bounds = self.sequence_bounds
        return int(bounds[index]), int(bounds[index + 1])

    def reads(self, index: int) -> list[Tensor] | None:
        """Places that are read in each sequence of one record, int64; None is the last of each."""
        return None if self.steps is None else self.steps.of(*self._rows(index))

    @property
    def label_origins(self) -> Sequence[Origin]:
        """File and line of each row of labels."""
        if not self.records.labels.of_rewards:
            return self.origins
        sizes = self.records.sizes.tolist()
        return [self.origins[record] for record, size in enumerate(sizes) for _ in range(size)]

    @property
    def digest(self) -> str:
        """sha256 (hex) of the data: ``measure_digest`` of one file, or a digest of several."""
        return self.known_digest or self.measure_digest()

    def measure_digest(self) -> str:
        """sha256 (hex) of all token ids and labels, in order, and of ranks that it does not say."""
        digest, records = hashlib.sha256(), self.records
        for sequence in self.sequences:
            add_sequence(digest, sequence)
        labels, ranks = records.labels.values.numpy(), records.ranks.numpy()
        reads = None if self.steps is None else self.steps.places.numpy()
        end_digest(digest, labels, ranks, records.bounds.numpy(), reads)
        return digest.hexdigest()

    @property
    def reply_lengths(self) -> Tensor:
        """``[S]`` int32 tokens of every reply, before any cut."""
        assert self.records.reply_lengths is not None  # the indexes of files have them
        return self.records.reply_lengths

    def first(self, count: int) -> TokenizedDataset:
        """The first ``count`` records, without the reports of files."""
        return replace(self.select(range(min(count, len(self)))), reports=[])

    def draw(self, count: int, seed: int) -> TokenizedDataset:
        """``count`` records, the same ones for the same seed, in their order; all if it has less.

        The reports are still of whole files.
        """
        if count >= len(self):
            return self
        return self.select(sorted(random.Random(seed).sample(range(len(self)), count)))

    def select(self, indices: Sequence[int]) -> TokenizedDataset:
        """The records at ``indices``, numbered anew in that order, with the reports of all."""
        texts, chosen = self.records.rows(indices), self.records.select(indices)
        steps = self.steps
        if steps is not None:
            parts = [torch.arange(*self._rows(index)) for index in indices]
            texts = torch.cat([torch.zeros(0, dtype=torch.int64), *parts])
            steps = steps.select(texts, torch.tensor([len(part) for part in parts]))
        return replace(
            self,
            steps=steps,
            sequences=TokenSequences.of([self.sequences[row] for row in texts.tolist()]),
            records=replace(chosen, ids=torch.arange(len(chosen))),
            known_digest=None,
            origins=[self.origins[index] for index in indices],
            sources=[self.sources[index] for index in indices],
            prefixes=self.prefixes[torch.as_tensor(indices, dtype=torch.int64)],
        )

    def centred_on(self, means: Mapping[str, float]) -> TokenizedDataset:
        """The same data, whose label columns of these names are learned minus their means."""
        labels = self.records.labels.centred_on(means)
        return replace(self, records=replace(self.records, labels=labels))

    def sharing_by(self, length_dependent_rope: Callable[[int], int]) -> TokenizedDataset:
        """The same data; a record's texts share their beginning if they are rotated alike.

        ``length_dependent_rope`` is the model's (of ``ModelShape``).
        """
        lengths, numbers = np.unique(
            self.sequences.lengths(0, len(self.sequences)), return_inverse=True
        )
        rotations = np.array([length_dependent_rope(int(length)) for length in lengths])[numbers]
        starts = self.sequence_bounds[:-1].numpy()
        # reduceat goes from each start to the next; no record is without a sequence.
        alike = np.maximum.reduceat(rotations, starts) == np.minimum.reduceat(rotations, starts)
        return replace(self, prefixes=self.prefixes * torch.from_numpy(alike))

    def table(self) -> str:
        """A table for each file: records read, kept and dropped."""
        return "\n".join(report.table() for report in self.reports)


def check_indexes(indexes: Sequence[FileIndex], rule: MalformedRule) -> None:
    """Refuse files with more malformed records than ``rule`` allows, or without any to tokenize.

    Raises:
        DataError: one error names the malformed records of all files.
    """
    summaries = [index.facts.summary for index in indexes]
    check_malformed(summaries, rule)
    for index in indexes:
        if not index.facts.parsed:
            raise nothing_left(index.facts.summary.path, index.facts.summary.counts)


def join_indexes(indexes: Sequence[FileIndex], name: str) -> TokenizedDataset:
    """The dataset of files of one kind, and with the same label columns.

    Raises:
        DataError: there is no record.
    """
    reports = report_on(indexes, name)
    if not any(map(len, indexes)):
        raise DataError("\n".join(str(nothing_left(each.path, each.counts)) for each in reports))
    facts = indexes[0].facts
    steps = _join_steps(indexes) if facts.has_steps else None
    return TokenizedDataset(
        steps=steps,
        kind=facts.summary.kind,
        name=name,
        sequences=TokenSequences([(index.tokens, index.offsets) for index in indexes]),
        records=_join_records(indexes, steps),
        origins=Origins([(index.facts.summary.path, index.lines) for index in indexes]),
        sources=Sources([(list(each.facts.summary.sources), each.sources) for each in indexes]),
        reports=reports,
        prefixes=_join([index.prefixes for index in indexes]),
        known_digest=_join_digests([index.facts.digest for index in indexes]),
    )


def _join_digests(digests: Sequence[str]) -> str:
    if len(digests) == 1:
        return digests[0]
    return hashlib.sha256("\n".join(digests).encode()).hexdigest()


def report_on(indexes: Sequence[FileIndex], name: str) -> list[FileReport]:
    """Report on files that are read one after the other.

    A record that stands in a file before it, token for token and label for label, is kept, and
    counted as one of ``duplicates``; one that says the opposite of a record before it is
    ``contradicted``.
    """
    reports: list[FileReport] = []
    earlier_verdicts: list[np.ndarray] = []  # sorted once, and not again for each later file
    for number, index in enumerate(indexes):
        summary, keys = index.facts.summary, index.record_keys
        again = int(find_in(keys, [each.record_keys for each in indexes[:number]]).sum())
        counts = {**summary.counts}
        if len(indexes) > 1:
            earlier_verdicts.append(np.unique(index.verdict_keys))
        if number:
            verdicts, verdict_counts = index.verdict_keys, index.verdict_counts
            opposed = find_contradicted(verdicts, verdict_counts, earlier_verdicts)
            counts |= {"contradicted": int(opposed.sum())} if opposed.any() else {}
        if again:
            counts["duplicates"] = counts.get("duplicates", 0) + again
        reports.append(
            FileReport(name, summary, counts, index.prompts, columns=index.facts.columns)
        )
    return reports


def _join_records(indexes: Sequence[FileIndex], steps: StepReads | None) -> Records:
    bounds, facts = _join_bounds([index.bounds for index in indexes]), indexes[0].facts
    of_rewards = steps is not None and facts.summary.kind is RecordKind.rating
    labels = LabelColumns.of(facts.columns, _join([each.labels for each in indexes]), of_rewards)
    ids, ranks = torch.arange(len(bounds) - 1), _join([each.ranks for each in indexes])
    lengths = _join([each.reply_lengths for each in indexes])
    if steps is None:
        return Records(ids, bounds, labels, ranks, reply_lengths=lengths)
    return Records(ids, steps.sequences[bounds], labels, ranks, steps.texts(), lengths)


def _join_steps(indexes: Sequence[FileIndex]) -> StepReads:
    reads = [(index.reads, index.read_bounds) for index in indexes]
    return StepReads(
        _join_bounds([index.bounds for index in indexes]),
        _join_bounds([bounds for _, bounds in reads if bounds is not None]),
        _join([places for places, _ in reads if places is not None]),
    )


def _join_bounds(parts: Sequence[np.ndarray]) -> Tensor:
    """Bounds ``[n + 1]`` of files that follow on each other."""
    bounds = parts[0]
    for part in parts[1:]:
        bounds = np.concatenate([bounds, bounds[-1] + part[1:]])
    return torch.from_numpy(bounds)


def _join(arrays: Sequence[np.ndarray]) -> Tensor:
    """Concatenate arrays; a single one stays as it is, and may be memory-mapped."""
    return torch.from_numpy(arrays[0] if len(arrays) == 1 else np.concatenate(arrays))


def as_records(records: Sequence[Record], columns: Sequence[str]) -> Records:
    """``Records`` of these records, with labels that are not centred."""
    return Records.of(
        range(len(records)),
        [len(record.texts) for record in records],
        label_columns(records, columns),
        torch.tensor([rank for record in records for rank in record.ranks], dtype=torch.int32),
    )


def label_columns(records: Sequence[Record], columns: Sequence[str]) -> LabelColumns:
    """The labels of ``records`` as ``columns``, not centred, NaN where one is missing."""
    missing = float("nan")
    # Comparisons among ratings have none at all.
    labels = [own or (None,) * len(columns) for record in records for own in label_rows(record)]
    rows = [[missing if label is None else label for label in own] for own in labels]
    values = torch.tensor(rows, dtype=torch.float32).view(len(rows), len(columns))
    return LabelColumns.of(columns, values, of_rewards=len(rows) > len(records))


# The order of an epoch: every record once, or each file by its weight.


@dataclass(frozen=True)
class EpochOrder:
    """The order of every epoch, a function of its number alone.

    An epoch is as long as all files together. Without weights it has every record once. With them
    a file has its share of it, to the record: its records come in passes through the file, each
    pass in an order of its own, and an epoch goes on in them where the one before ended.

    Attributes:
        sizes: records of every file, which follow on each other.
        seed: seed of every order.
        weights: weight of every file, in any unit; without any, every record counts the same.
    """

    sizes: tuple[int, ...]
    seed: int
    weights: tuple[float, ...] = ()

    @property
    def size(self) -> int:
        """Records of an epoch."""
        return sum(self.sizes)

    def record(self, position: int) -> int:
        """The record at ``position`` of the endless stream of epochs, from 0."""
        epoch, place = divmod(position, self.size)
        return int(_order(self, epoch)[place])

    def shares(self) -> list[int]:
        """Records of an epoch from each file."""
        if not self.weights:
            return list(self.sizes)
        exact = np.array(self.weights) * (self.size / sum(self.weights))
        shares = np.floor(exact).astype(int)
        # What is left over goes to those that lost most by the rounding.
        most = np.argsort(shares - exact, kind="stable")[: self.size - shares.sum()]
        shares[most] += 1
        return shares.tolist()


def weighted_order(sizes: Sequence[int], seed: int, weights: Sequence[float]) -> EpochOrder:
    """The order over files of these ``sizes``, checked.

    Raises:
        ConfigError: there is not one weight for every file, or a file gets no record.
    """
    order = EpochOrder(tuple(sizes), seed, tuple(weights))
    if weights and len(weights) != len(sizes):
        raise ConfigError(
            f"model.data.data_prefix.train_weights: got {len(weights)} weights, wanted one for "
            f"each of the {len(sizes)} training files"
        )
    for number, share in enumerate(order.shares(), start=1):
        if share == 0:
            raise ConfigError(
                f"model.data.data_prefix.train_weights: got {list(weights)}, which gives file "
                f"{number} none of an epoch's {order.size} records; wanted at least one for each"
            )
    return order


# A batch may hold the end of one epoch and the start of the next.
@lru_cache(maxsize=2)
def _order(order: EpochOrder, epoch: int) -> np.ndarray:
    if not order.weights:
        return _permutation(order.size, order.seed, epoch)
    first = np.cumsum([0, *order.sizes[:-1]])
    of_files = [
        start + _from_passes(size, share, order.seed + number, epoch)
        for number, (start, size, share) in enumerate(
            zip(first, order.sizes, order.shares(), strict=True), start=1
        )
    ]
    return np.concatenate(of_files)[_permutation(order.size, order.seed, epoch)]


def _from_passes(size: int, share: int, seed: int, epoch: int) -> np.ndarray:
    """The records of a file that an epoch takes, by the file's own numbers."""
    begin, end = epoch * share, (epoch + 1) * share
    passes = range(begin // size, -(-end // size))
    records = np.concatenate([_permutation(size, seed, number) for number in passes])
    return records[begin - passes.start * size :][:share]


def _permutation(size: int, seed: int, number: int) -> np.ndarray:
    # RandomState and not default_rng: numpy promises that its stream never changes.
    order = np.random.RandomState([seed % 2**32, seed // 2**32, number]).permutation(size)
    return order.astype(np.uint32) if size <= 2**32 else order
