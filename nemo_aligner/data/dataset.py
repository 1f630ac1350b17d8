"""TokenizedDataset, the token indexes of files as one data set; and EpochOrder.

``training_data.py`` joins the indexes of the files of ``model.data.data_prefix`` (``join_indexes``)
to one data set for training and one for each validation and test file. ``packing.py`` packs its
records. ``EpochOrder`` is the order in which a run goes through the records.
"""

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
from nemo_aligner.data.formats.teacher import teacher_rewards
from nemo_aligner.data.records import Origin, Record, hash_principle, label_rows
from nemo_aligner.data.report import FileReport, find_contradicted, find_members
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
        name: name of the data set in logs.
        sequences: token ids of the Q samples, in record order.
        records: which samples belong to each record and which rewards to each sample, as index
            bounds; and labels and ranks.
        places: ``[S]`` int32, for each reward the position in its sample of the token that the head
            reads.
        origins: file and line of each record.
        sources: the ``source`` field of each record, "" if it has none.
        reports: one report for each file.
        prefixes: ``[N]`` int32 number of tokens that all samples of a record share at the
            beginning; 0 for a single sample.
        principles: the principle of each record, "" if it has none; empty if there are none, or too
            many for metrics by principle.
        line_positions: the value of ``find_line_positions`` if it does not follow from
            ``origins``, because records were drawn; else None.
        known_digest: the value of ``digest`` if it follows from the digests of the indexes; None
            if records were selected, so that ``digest`` has to be computed from the tokens.
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
    principles: Sequence[str] = ()
    line_positions: np.ndarray | None = None
    known_digest: str | None = None

    def __len__(self) -> int:
        return len(self.origins)

    @property
    def file_sizes(self) -> tuple[int, ...]:
        """Number of records of each file that were kept, in the order of the files."""
        return tuple(report.counts["kept"] for report in self.reports)

    @property
    def counts(self) -> dict[str, int]:
        """Numbers of records over all files: ``read``, ``kept``, and dropped for each reason."""
        total: Counter[str] = Counter()
        for report in self.reports:
            total.update(report.counts)
        return dict(total)

    def record(self, index: int) -> list[np.ndarray]:
        """Read the token ids of each sample of the record ``index``, as arrays ``[L]`` int32."""
        return self.sequences[slice(*self._find_samples(index))]

    def lengths(self, index: int) -> list[int]:
        """Count the tokens of each sample of the record ``index``, without reading their ids."""
        return self.sequences.lengths(*self._find_samples(index)).tolist()

    def num_tokens(self, index: int) -> int:
        """Count the tokens of the record ``index``; a shared prefix counts once for each sample."""
        return sum(self.lengths(index))

    @property
    def total_tokens(self) -> int:
        """Number of tokens of all samples."""
        return self.sequences.num_tokens

    def _find_samples(self, index: int) -> tuple[int, int]:
        bounds = self.records.sample_bounds.numpy()
        return int(bounds[index]), int(bounds[index + 1])

    def _find_reward_bounds(self, index: int) -> list[int]:
        first, end = self._find_samples(index)
        return self.records.reward_bounds.numpy()[first : end + 1].tolist()

    def num_rewards(self, index: int) -> int:
        """Count the rewards of the record ``index``: one a sample, or one a turn or step."""
        bounds = self._find_reward_bounds(index)
        return bounds[-1] - bounds[0]

    def reads(self, index: int) -> list[list[int]]:
        """List the positions at which the reward head reads each sample of the record ``index``.

        A position counts the sample's tokens from 0.
        """
        bounds = self._find_reward_bounds(index)
        return [self.places[start:end].tolist() for start, end in pairwise(bounds)]

    @property
    def label_origins(self) -> Sequence[Origin]:
        """For each row of ``records.labels``, the file and line of its record."""
        counts = self.records.label_bounds.diff().tolist()
        return [self.origins[record] for record, count in enumerate(counts) for _ in range(count)]

    def find_line_positions(self) -> np.ndarray:
        """Number each record among the records of its line in the file.

        Returns:
            ``[N, 2]`` int32: for each record its number, from 0, and how many records its line has.
            If records were drawn, the others count, too.
        """
        if self.line_positions is not None:
            return self.line_positions
        counts: Counter[Origin] = Counter()
        numbers = []
        for origin in self.origins:
            numbers.append(counts[origin])
            counts[origin] += 1
        sizes = [counts[origin] for origin in self.origins]
        return np.array([numbers, sizes], dtype=np.int32).T

    @property
    def digest(self) -> str:
        """sha256 (hex) that identifies the data, from which a resumed run detects a change.

        The hash covers token ids, labels and ranks; for several files, it covers their digests.
        """
        return self.known_digest or self.measure_digest()

    def measure_digest(self) -> str:
        """Compute the sha256 (hex) of all token ids, labels and ranks (see ``end_digest``)."""
        digest, records = hashlib.sha256(), self.records
        for sequence in self.sequences:
            add_sequence(digest, sequence)
        end_digest(
            digest,
            records.labels.values.numpy(),
            records.ranks.numpy(),
            records.sample_bounds.numpy(),
            records.reward_bounds.numpy(),
            # The count ``steps`` exists only if each turn or step has a reward. Otherwise places
            # are not hashed, so that the digest equals that of earlier versions.
            self.places.numpy() if "steps" in self.counts else None,
            None if records.teacher_rewards is None else records.teacher_rewards.numpy(),
        )
        return digest.hexdigest()

    @property
    def reply_lengths(self) -> Tensor:
        """Length in tokens, before truncation, of the text that each reward scores: ``[S]`` int32.

        The text is the whole reply or, if turns or steps are scored, one of them.
        """
        return self.records.reply_lengths

    def first(self, count: int) -> TokenizedDataset:
        """Select the first ``count`` records, or all if there are fewer.

        The result has no ``reports``, because those describe whole files.
        """
        return replace(self.select(range(min(count, len(self)))), reports=[])

    def draw(self, count: int, seed: int) -> TokenizedDataset:
        """Draw ``count`` records at random with ``seed``; keep all if there are fewer.

        The drawn records keep their order. The reports still describe all records of the files.
        """
        if count >= len(self):
            return self
        numbered = replace(self, line_positions=self.find_line_positions())
        return numbered.select(sorted(random.Random(seed).sample(range(len(self)), count)))

    def select(self, indices: Sequence[int]) -> TokenizedDataset:
        """Select the records at ``indices``, and number them from 0.

        The reports still describe all records of the files.
        """
        samples, chosen = self.records.sample_rows(indices), self.records.select(indices)
        positions = self.line_positions
        return replace(
            self,
            sequences=TokenSequences.of([self.sequences[sample] for sample in samples.tolist()]),
            records=replace(chosen, ids=torch.arange(len(chosen))),
            places=self.places[self.records.rows(indices)],
            known_digest=None,
            origins=[self.origins[index] for index in indices],
            line_positions=None if positions is None else positions[list(indices)],
            sources=[self.sources[index] for index in indices],
            principles=[self.principles[index] for index in indices] if self.principles else (),
            prefixes=self.prefixes[torch.as_tensor(indices, dtype=torch.int64)],
        )

    def centred_on(self, means: Mapping[str, float]) -> TokenizedDataset:
        """Return the same data with these label ``means``, by attribute (``LabelColumns``)."""
        labels = self.records.labels.centred_on(means)
        return replace(self, records=replace(self.records, labels=labels))

    def sharing_by(self, length_dependent_rope: Callable[[int], int]) -> TokenizedDataset:
        """Return the same data, where samples of a record share a prefix only if RoPE allows it.

        With LongRoPE, long samples have different RoPE frequencies, and so different hidden states,
        from their first token on. Samples can share a prefix only if ``length_dependent_rope``,
        which maps a length to the number of its RoPE (``ModelShape``), gives the same number for
        all of them.
        """
        lengths, numbers = np.unique(
            self.sequences.lengths(0, len(self.sequences)), return_inverse=True
        )
        rotations = np.array([length_dependent_rope(int(length)) for length in lengths])[numbers]
        starts = self.records.sample_bounds[:-1].numpy()
        # reduceat reduces from each start to the next one. It needs at least one sample in every
        # record, which holds for all kinds of records.
        is_same = np.maximum.reduceat(rotations, starts) == np.minimum.reduceat(rotations, starts)
        return replace(self, prefixes=self.prefixes * torch.from_numpy(is_same))

    def table(self) -> str:
        """Render a table for each file, with the numbers of records read, kept and dropped."""
        return "\n".join(report.table() for report in self.reports)

    def overview(self) -> str:
        """Render the report that a run prints on each file at its start, shorter than ``table``."""
        return "\n".join(report.overview() for report in self.reports)


def check_indexes(indexes: Sequence[FileIndex], rule: MalformedRule) -> None:
    """Check that ``rule`` allows the files' malformed records, and that each file has usable ones.

    Raises:
        DataError: a file has too many malformed records, or none to tokenize. One error names the
            malformed records of all files.
    """
    summaries = [index.facts.summary for index in indexes]
    check_malformed(summaries, rule)
    for index in indexes:
        if not index.facts.parsed:
            raise nothing_left(index.facts.summary.path, index.facts.summary.counts)


def join_indexes(indexes: Sequence[FileIndex], name: str) -> TokenizedDataset:
    """Join the token indexes of files, which have one kind of records and the same label columns.

    Raises:
        DataError: no file has a usable record.
    """
    reports = report_on(indexes, name)
    if not any(map(len, indexes)):
        errors = (nothing_left(report.path, report.counts) for report in reports)
        raise DataError("\n".join(map(str, errors)))
    return TokenizedDataset(
        kind=indexes[0].facts.summary.kind,
        name=name,
        sequences=TokenSequences([(index.tokens, index.offsets) for index in indexes]),
        records=_join_records(indexes),
        places=_join([index.places for index in indexes]),
        origins=Origins([(index.facts.summary.path, index.lines) for index in indexes]),
        sources=Sources([(list(index.facts.summary.sources), index.sources) for index in indexes]),
        reports=reports,
        prefixes=_join([index.prefixes for index in indexes]),
        principles=_join_principles(indexes),
        known_digest=_join_digests([index.facts.digest for index in indexes]),
    )


def _join_principles(indexes: Sequence[FileIndex]) -> Sequence[str]:
    names = [index.facts.principles for index in indexes]
    if None in names or not any(names):
        return ()
    parts = []
    for index in indexes:
        by_key = {hash_principle(name): name for name in ("", *(index.facts.principles or ()))}
        keys = np.array(sorted(by_key), dtype=np.uint64)
        codes = np.searchsorted(keys, index.principle_keys)
        parts.append(([by_key[int(key)] for key in keys], codes))
    return Sources(parts)


def _join_digests(digests: Sequence[str]) -> str:
    if len(digests) == 1:
        return digests[0]
    return hashlib.sha256("\n".join(digests).encode()).hexdigest()


def report_on(indexes: Sequence[FileIndex], name: str) -> list[FileReport]:
    """Report on the files of a data set, in their order.

    A record that occurs in an earlier file, with the same tokens and labels, is kept and counted in
    ``duplicates``. A comparison with the opposite verdict of an earlier one is counted in
    ``contradicted``.
    """
    reports: list[FileReport] = []
    # Sorted verdicts of each file so far, with which the next files are compared.
    earlier_verdicts: list[np.ndarray] = []
    for number, index in enumerate(indexes):
        summary, keys = index.facts.summary, index.record_keys
        repeated = int(
            find_members(keys, [earlier.record_keys for earlier in indexes[:number]]).sum()
        )
        counts = {**summary.counts}
        if len(indexes) > 1:
            earlier_verdicts.append(np.unique(index.verdict_keys))
        if number:
            verdicts, verdict_counts = index.verdict_keys, index.verdict_counts
            opposed = find_contradicted(verdicts, verdict_counts, earlier_verdicts)
            counts |= {"contradicted": int(opposed.sum())} if opposed.any() else {}
        if repeated:
            counts["duplicates"] = counts.get("duplicates", 0) + repeated
        report = FileReport(name, summary, counts, index.prompts, columns=index.facts.columns)
        reports.append(replace(report, content_digest=index.content_digest))
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
        _join_teacher_rewards(indexes),
    )


def _join_teacher_rewards(indexes: Sequence[FileIndex]) -> Tensor | None:
    """Join the teacher's rewards of all files; None if no file has any.

    A file without them has NaN for each of its samples.
    """
    if not any(len(index.teacher_rewards) for index in indexes):
        return None
    parts = [
        index.teacher_rewards
        if len(index.teacher_rewards)
        else np.full(len(index.ranks), np.nan, dtype=np.float32)
        for index in indexes
    ]
    return _join(parts)


def _join_bounds(parts: Sequence[np.ndarray]) -> Tensor:
    """Join the start offsets of the items of several files, as if the files were one.

    Each array is ``[n + 1]``, from 0 to the file's total.
    """
    bounds = parts[0]
    for part in parts[1:]:
        bounds = np.concatenate([bounds, bounds[-1] + part[1:]])
    return torch.from_numpy(bounds)


def _join(arrays: Sequence[np.ndarray]) -> Tensor:
    """Concatenate the arrays of several files to one tensor.

    A single array is not copied, because it may be memory-mapped.
    """
    return torch.from_numpy(arrays[0] if len(arrays) == 1 else np.concatenate(arrays))


def last_places(sequences: TokenSequences) -> Tensor:
    """Return the position of the last token of each of Q sequences, ``[Q]`` int64.

    These are the ``places`` of a data set in which only the last token of a sample has a reward.
    """
    return torch.from_numpy(sequences.lengths(0, len(sequences)) - 1)


def as_records(records: Sequence[Record], columns: Sequence[str]) -> Records:
    """Build ``Records`` with one reward for each sample, and labels that are not centred.

    ``columns`` names the label columns, in the order of each record's ``labels``.
    """
    rewards = teacher_rewards(records)
    return Records.of(
        range(len(records)),
        [len(record.texts) for record in records],
        label_columns(records, columns),
        torch.tensor([rank for record in records for rank in record.ranks], dtype=torch.int32),
        teacher_rewards=torch.from_numpy(rewards) if not np.isnan(rewards).all() else None,
    )


def label_columns(records: Sequence[Record], columns: Sequence[str]) -> LabelColumns:
    """Build the label columns of ``records``, not centred, with NaN where a label is missing.

    ``columns`` names the columns, in the order of each record's ``labels``.
    """
    missing = float("nan")
    # Comparisons in a data set of ratings have no labels (an empty row), which become NaN.
    rows = [row or (None,) * len(columns) for record in records for row in label_rows(record)]
    numbers = [[missing if label is None else label for label in row] for row in rows]
    values = torch.tensor(numbers, dtype=torch.float32).view(len(rows), len(columns))
    return LabelColumns.of(columns, values)


# The order of the records in an epoch: each record once, or files in proportion to their weights.


@dataclass(frozen=True)
class EpochOrder:
    """The order of the records in each epoch, which depends on these attributes alone.

    An epoch has as many records as all files together. Without weights it has each record once.
    With weights it has a number of records of each file that is in proportion to the file's weight.
    These records come from shuffled passes through the file. An epoch continues the pass in which
    the previous epoch stopped, so every record is used once before the next pass begins.

    Attributes:
        sizes: number of records of each file, in the order of the files in the data set.
        seed: seed of all orders.
        weights: weight of each file, in any unit; empty if every record has the same weight.
    """

    sizes: tuple[int, ...]
    seed: int
    weights: tuple[float, ...] = ()

    @property
    def size(self) -> int:
        """Number of records in an epoch."""
        return sum(self.sizes)

    def record(self, position: int) -> int:
        """Return the index, in the data set, of the record at ``position`` of the training run.

        Positions count from 0 over all epochs.
        """
        epoch, place = divmod(position, self.size)
        return int(_order_epoch(self, epoch)[place])

    def shares(self) -> list[int]:
        """Return the number of records that an epoch takes from each file, in file order."""
        if not self.weights:
            return list(self.sizes)
        exact = np.array(self.weights) * (self.size / sum(self.weights))
        shares = np.floor(exact).astype(int)
        # Rounding down leaves a few records of the epoch unassigned. Assign one each to the files
        # that lost the largest fractions.
        rounded_most = np.argsort(shares - exact, kind="stable")[: self.size - shares.sum()]
        shares[rounded_most] += 1
        return shares.tolist()


def weighted_order(sizes: Sequence[int], seed: int, weights: Sequence[float]) -> EpochOrder:
    """Build the order over files of these ``sizes``, after checking the weights.

    Raises:
        ConfigError: the number of weights is not the number of files, a file has no record, or an
            epoch has no record of a file.
    """
    order = EpochOrder(tuple(sizes), seed, tuple(weights))
    if not weights:
        return order
    if len(weights) != len(sizes):
        raise ConfigError(
            f"model.data.data_prefix.train_weights: {len(weights)} weights for {len(sizes)} "
            "training files. Give one weight for each file"
        )
    for number, (size, share) in enumerate(zip(sizes, order.shares(), strict=True), start=1):
        if size == 0:
            raise ConfigError(
                f"model.data.data_prefix.train_weights: no record of file {number} is kept, so an "
                "epoch cannot take any. The file's table above says why. Remove the file"
            )
        if share == 0:
            raise ConfigError(
                f"model.data.data_prefix.train_weights: with the weights {list(weights)}, an epoch "
                f"of {order.size} records has none of file {number}. Raise its weight, or leave "
                "the file out"
            )
    return order


# Cache the order of two epochs: a batch may contain the end of one and the start of the next.
@lru_cache(maxsize=2)
def _order_epoch(order: EpochOrder, epoch: int) -> np.ndarray:
    if not order.weights:
        return _permute(order.size, order.seed, epoch)
    first = np.cumsum([0, *order.sizes[:-1]])
    of_files = [
        start + _take_from_passes(size, share, order.seed + number, epoch)
        for number, (start, size, share) in enumerate(
            zip(first, order.sizes, order.shares(), strict=True), start=1
        )
    ]
    return np.concatenate(of_files)[_permute(order.size, order.seed, epoch)]


def _take_from_passes(size: int, share: int, seed: int, epoch: int) -> np.ndarray:
    """Return the records that epoch number ``epoch`` takes from a file of ``size`` records.

    The file is read in passes, each in a new random order; an epoch takes the next ``share``
    records, from wherever the previous epoch stopped.

    Returns:
        ``[share]`` indices of records in the file.
    """
    begin, end = epoch * share, (epoch + 1) * share
    passes = range(begin // size, -(-end // size))
    records = np.concatenate([_permute(size, seed, number) for number in passes])
    return records[begin - passes.start * size :][:share]


def _permute(size: int, seed: int, number: int) -> np.ndarray:
    # RandomState, not default_rng: numpy guarantees that its stream never changes.
    order = np.random.RandomState([seed % 2**32, seed // 2**32, number]).permutation(size)
    return order.astype(np.uint32) if size <= 2**32 else order
