"""Tokenized records, ready to be packed: a view of their files' indexes (``token_index.py``)."""

from __future__ import annotations

import hashlib
import random
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import pairwise

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
class TokenizedDataset:
    """N records of one kind with Q samples and S rewards, as token ids.

    Attributes:
        kind: comparison or rating.
        name: name of the set in logs.
        sequences: token ids of the Q samples, in record order.
        records: the samples of each record, their rewards, and labels.
        places: ``[S]`` int32, of the token in its sequence that each reward is read at.
        origins: file and line of every record.
        sources: where every record says it is from; "" where it says nothing.
        reports: one for each file.
        prefixes: ``[N]`` int32 tokens that all sequences of a record begin with; 0 for a lone one.
        known_digest: ``digest`` where the indexes have it.
    """

    kind: RecordKind
    name: str
    sequences: TokenSequences
    records: Records
    places: Tensor
    origins: Sequence[Origin]
    sources: Sequence[str]
    reports: Sequence[FileReport]
    prefixes: Tensor
    known_digest: str | None = None

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
        return self.sequences[slice(*self._samples(index))]

    def lengths(self, index: int) -> list[int]:
        """The tokens of each sequence of one record."""
        return self.sequences.lengths(*self._samples(index)).tolist()

    def num_tokens(self, index: int) -> int:
        """Tokens of one record, all its sequences together."""
        return sum(self.lengths(index))

    @property
    def total_tokens(self) -> int:
        """T, of all sequences."""
        return self.sequences.num_tokens

    def _samples(self, index: int) -> tuple[int, int]:
        bounds = self.records.sample_bounds.numpy()
        return int(bounds[index]), int(bounds[index + 1])

    def _reward_bounds(self, index: int) -> list[int]:
        first, end = self._samples(index)
        return self.records.reward_bounds.numpy()[first : end + 1].tolist()

    def num_rewards(self, index: int) -> int:
        """Rewards of one record, all its samples together."""
        bounds = self._reward_bounds(index)
        return bounds[-1] - bounds[0]

    def reads(self, index: int) -> list[list[int]]:
        """Places of the tokens that are read in each sequence of one record."""
        bounds = self._reward_bounds(index)
        return [self.places[start:end].tolist() for start, end in pairwise(bounds)]

    @property
    def label_origins(self) -> Sequence[Origin]:
        """File and line of each row of labels."""
        counts = self.records.label_bounds.diff().tolist()
        return [self.origins[record] for record, count in enumerate(counts) for _ in range(count)]

    @property
    def digest(self) -> str:
        """sha256 (hex) of the data: ``measure_digest`` of one file, or a digest of several."""
        return self.known_digest or self.measure_digest()

    def measure_digest(self) -> str:
        """sha256 (hex) of all token ids and labels, in order, and of ranks that it does not say."""
        digest, records = hashlib.sha256(), self.records
        for sequence in self.sequences:
            add_sequence(digest, sequence)
        end_digest(
            digest,
            records.labels.values.numpy(),
            records.ranks.numpy(),
            records.sample_bounds.numpy(),
            records.reward_bounds.numpy(),
            # Only files with turns or steps count those.
            self.places.numpy() if "steps" in self.counts else None,
        )
        return digest.hexdigest()

    @property
    def reply_lengths(self) -> Tensor:
        """``[S]`` int32 tokens of every reply, turn or step, before any cut."""
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
        samples, chosen = self.records.sample_rows(indices), self.records.select(indices)
        return replace(
            self,
            sequences=TokenSequences.of([self.sequences[sample] for sample in samples.tolist()]),
            records=replace(chosen, ids=torch.arange(len(chosen))),
            places=self.places[self.records.rows(indices)],
            known_digest=None,
            origins=[self.origins[index] for index in indices],
            sources=[self.sources[index] for index in indices],
            prefixes=self.prefixes[torch.as_tensor(indices, dtype=torch.int64)],
        )

    def centred_on(self, means: Mapping[str, float]) -> TokenizedDataset:
        """The same data, whose label columns of these names are learned minus their means."""
        labels = self.records.labels.centred_on(means)
        return replace(self, records=replace(self.records, labels=labels))

    def sharing_by(self, rotation_by_length: Callable[[int], int]) -> TokenizedDataset:
        """The same data; a record's texts share their beginning if they are rotated alike.

        ``rotation_by_length`` is the model's (of ``ModelShape``).
        """
        lengths, numbers = np.unique(
            self.sequences.lengths(0, len(self.sequences)), return_inverse=True
        )
        rotations = np.array([rotation_by_length(int(length)) for length in lengths])[numbers]
        starts = self.records.sample_bounds[:-1].numpy()
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
    return TokenizedDataset(
        kind=indexes[0].facts.summary.kind,
        name=name,
        sequences=TokenSequences([(index.tokens, index.offsets) for index in indexes]),
        records=_join_records(indexes),
        places=_join([index.places for index in indexes]),
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


def _join_records(indexes: Sequence[FileIndex]) -> Records:
    sample_bounds = _join_bounds([index.sample_bounds for index in indexes])
    labels = _join([index.labels for index in indexes])
    return Records(
        torch.arange(len(sample_bounds) - 1),
        sample_bounds,
        _join_bounds([index.reward_bounds for index in indexes]),
        LabelColumns.of(indexes[0].facts.columns, labels),
        _join([index.ranks for index in indexes]),
        _join([index.reply_lengths for index in indexes]),
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


def last_places(sequences: TokenSequences) -> Tensor:
    """``[Q]`` place of the last token of each sequence, where its only reward is read."""
    return torch.from_numpy(sequences.lengths(0, len(sequences)) - 1)


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
    return LabelColumns.of(columns, values)


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
