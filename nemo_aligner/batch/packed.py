"""PackedBatch: sequences packed for a model; Records: the samples, rewards and labels of records.

``cache_use.py`` describes what a pack reads from a server's prefix cache, and what it stores there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from nemo_aligner.batch.cache_use import CachedPrefix, CacheUse, StateUse, Stored
from nemo_aligner.batch.context import ContextShare
from nemo_aligner.batch.pairs import PairRows, pair_rows
from nemo_aligner.utils.host_transfer import all_to_device, to_device

# Records: samples, rewards and labels.

Tokens = Sequence[int] | np.ndarray | Tensor


@dataclass(frozen=True)
class LabelColumns:
    """Labels in L rows and C named columns; ``Records`` says which rows a record has.

    Attributes:
        names: C names.
        values: ``[L, C]`` float32 labels as they are in the data, NaN where a label is missing.
        means: the label means of the scoring contract, by name: ``targets`` subtracts them from
            labels, and they are added to rewards. A name need not be that of a column, because
            pairs have rewards but no labels of them; a column without a mean is not centred.
    """

    names: tuple[str, ...]
    values: Tensor
    means: Mapping[str, float]

    @classmethod
    def of(cls, names: Sequence[str], values: Tensor) -> LabelColumns:
        """Build columns from ``values [L, C]``, not centred."""
        return cls(tuple(names), values, {})

    @classmethod
    def none(cls, rows: int) -> LabelColumns:
        """Build labels without any column, for records that have ``rows`` rows but no labels."""
        return cls.of((), torch.zeros(rows, 0))

    def centred_on(self, means: Mapping[str, float]) -> LabelColumns:
        """Return the same labels with these ``means``, by the name of an attribute."""
        return replace(self, means=dict(means))

    def select(self, rows: Tensor) -> LabelColumns:
        """Select the labels in the rows with the indices ``rows`` (1-D, int64)."""
        return replace(self, values=self.values[rows])

    def measured_means(self) -> tuple[float, ...]:
        """Compute the mean of each column over its present labels; NaN if all are missing."""
        return tuple(torch.nanmean(self.values.double(), dim=0).tolist())

    def offsets(self, names: Sequence[str]) -> list[float]:
        """List the mean of each of ``names``, which is 0 if it has none."""
        return [self.means.get(name, 0.0) for name in names]

    def targets(self, names: Sequence[str]) -> Tensor:
        """Return the columns ``names``, ``[L, len(names)]`` float32, minus their ``means``.

        Raises:
            KeyError: one of ``names`` is not a column.
        """
        missing = [name for name in names if name not in self.names]
        if missing:
            raise KeyError(f"no label column {missing[0]!r}; the label columns are {self.names}")
        # Centre column by column, with Python numbers: a tensor of indices or of means would have
        # to be copied to the GPU, and the copy waits for the GPU.
        columns = [self.names.index(name) for name in names]
        return torch.stack([self._centre(column) for column in columns], dim=1)

    def _centre(self, column: int) -> Tensor:
        values, mean = self.values[:, column], self.means.get(self.names[column])
        return values if mean is None else (values.double() - mean).float()


def count_label_rows(sample_bounds: Tensor, reward_bounds: Tensor) -> Tensor:
    """Count each record's rows in ``Records.labels``: ``[R]`` int64."""
    samples, rewards = sample_bounds.diff(), reward_bounds[sample_bounds].diff()
    return torch.where(samples == 1, rewards, 1)


@dataclass(frozen=True)
class Records:
    """R records with Q samples, which have S rewards.

    A record has adjacent samples: 2 or more if it is a comparison, 1 if it is a rating or a sample
    to score. A sample has adjacent rewards: one for each turn or step if these are scored, else 1.

    Attributes:
        ids: ``[R]`` int64 index of each record in its data set (or request).
        sample_bounds: ``[R + 1]`` int64, from 0 to Q: record r has the samples from
            ``sample_bounds[r]`` up to ``sample_bounds[r + 1]``.
        reward_bounds: ``[Q + 1]`` int64, from 0 to S: sample q has the rewards from
            ``reward_bounds[q]`` up to ``reward_bounds[q + 1]``.
        labels: one row for each comparison, and one for each reward of a rating, record by record.
        ranks: ``[Q]`` integer ranks of the samples of each record: a lower one is better, equal
            ones are tied.
        reply_lengths: ``[S]`` integer tokens of the reply, turn or step that each reward belongs
            to, on the host (``lengths_of_rewards`` in data/records.py); -1 if not counted.
        teacher_rewards: ``[Q]`` float32 reward that a teacher gives each sample, NaN if none does;
            None if no record of the data set has any.
    """

    ids: Tensor
    sample_bounds: Tensor
    reward_bounds: Tensor
    labels: LabelColumns
    ranks: Tensor
    reply_lengths: Tensor
    teacher_rewards: Tensor | None = None

    @classmethod
    def of(
        cls,
        ids: Sequence[int],
        sample_counts: Sequence[int],
        labels: LabelColumns | None = None,
        ranks: Tensor | None = None,
        reward_counts: Sequence[int] | None = None,
        reply_lengths: Tensor | None = None,
        teacher_rewards: Tensor | None = None,
    ) -> Records:
        """Build records with ``sample_counts [R]`` samples each.

        By default each sample has one reward (else ``reward_counts [Q]``), the samples of a record
        are ranked in their order, the first one best, and there are no labels.
        """
        samples = torch.tensor([0, *sample_counts], dtype=torch.int64).cumsum(0)
        count = int(samples[-1])
        rewards = torch.arange(count + 1)
        if reward_counts is not None:
            rewards = torch.tensor([0, *reward_counts], dtype=torch.int64).cumsum(0)
        if ranks is None:
            ranks = torch.arange(count) - samples[:-1].repeat_interleave(samples.diff())
        if labels is None:
            labels = LabelColumns.none(int(count_label_rows(samples, rewards).sum()))
        if reply_lengths is None:
            reply_lengths = torch.full((int(rewards[-1]),), -1)
        record_ids = torch.as_tensor(ids, dtype=torch.int64)
        return cls(record_ids, samples, rewards, labels, ranks, reply_lengths, teacher_rewards)

    def __len__(self) -> int:
        return self.ids.numel()

    @property
    def num_samples(self) -> int:
        """Number of samples of all records."""
        return len(self.reward_bounds) - 1

    @property
    def num_rewards(self) -> int:
        """Number of rewards of all records."""
        return int(self.reward_bounds[-1])

    @property
    def record_bounds(self) -> Tensor:
        """Where the rewards of each of the R records begin and end: ``[R + 1]`` int64.

        Record r has the rewards from ``record_bounds[r]`` up to ``record_bounds[r + 1]``.
        """
        return self.reward_bounds[self.sample_bounds]

    @cached_property
    def label_bounds(self) -> Tensor:
        """Where the rows of ``labels`` of each of the R records begin and end: ``[R + 1]`` int64.

        Record r has the rows from ``label_bounds[r]`` up to ``label_bounds[r + 1]``.
        """
        # Compute the bounds only once: every training step needs them, and they are sums over all
        # records of the data set, possibly millions.
        return _as_bounds(count_label_rows(self.sample_bounds, self.reward_bounds))

    def sample_rows(self, indices: Sequence[int] | Tensor) -> Tensor:
        """Return the indices (1-D, int64) of all samples of the records ``indices``, in order."""
        return _find_items(self.sample_bounds, torch.as_tensor(indices, dtype=torch.int64))[1]

    def rows(self, indices: Sequence[int] | Tensor) -> Tensor:
        """Return the indices (1-D, int64) of all rewards of the records ``indices``, in order."""
        return _find_items(self.reward_bounds, self.sample_rows(indices))[1]

    def select(self, indices: Sequence[int] | Tensor) -> Records:
        """Select the records at ``indices``, in that order."""
        chosen = torch.as_tensor(indices, dtype=torch.int64)
        sample_counts, samples = _find_items(self.sample_bounds, chosen)
        reward_counts, rewards = _find_items(self.reward_bounds, samples)
        return Records(
            self.ids[chosen],
            _as_bounds(sample_counts),
            _as_bounds(reward_counts),
            self.labels.select(_find_items(self.label_bounds, chosen)[1]),
            self.ranks[samples],
            self.reply_lengths[rewards],
            None if self.teacher_rewards is None else self.teacher_rewards[samples],
        )

    def pairs(self, with_ties: bool = False) -> PairRows:
        """List the pairs of samples of each record; ``with_ties`` includes tied samples."""
        return pair_rows(self.sample_bounds, self.ranks, with_ties)

    def as_single(self, rewards: Tensor) -> Tensor:
        """Check that no record is a comparison, and return ``rewards [S, ...]`` unchanged.

        Losses on ratings call this, because they need a row of labels for each reward.

        Raises:
            ValueError: a record is a comparison, which has one row of labels for all its rewards.
        """
        if len(self.labels.values) != self.num_rewards:
            counts = self.sample_bounds.diff().unique().tolist()
            raise ValueError(
                f"a loss on ratings got records of {counts} samples; a rating has exactly one"
            )
        return rewards


def _as_bounds(counts: Tensor) -> Tensor:
    """Turn the sizes ``counts [n]`` of adjacent groups into start offsets, ``[n + 1]`` int64."""
    return torch.cat([counts.new_zeros(1), counts.cumsum(0)])


def _find_items(bounds: Tensor, parts: Tensor) -> tuple[Tensor, Tensor]:
    """Find the items of the p groups ``parts``, if group n has those from ``bounds[n]`` on.

    Returns:
        The number of items of each group, ``[p]`` int64, and all their indices, group after group,
        ``[i]`` int64.
    """
    starts = bounds[parts]
    counts = bounds[parts + 1] - starts
    offsets = (starts - counts.cumsum(0) + counts).repeat_interleave(counts)
    return counts, offsets + torch.arange(offsets.numel())


@dataclass(frozen=True)
class Group:
    """``size`` adjacent sequences of a pack, which share their first ``prefix`` tokens.

    ``cached`` is the beginning of the prefix whose keys and values are in a server's cache, so that
    the pack does not compute them; None if there is none.
    """

    size: int
    prefix: int
    cached: CachedPrefix | None = None


class _Segments:
    """Collects and numbers the segments of a pack (shared prefixes, and what follows them)."""

    def __init__(self, groups: Sequence[Group]) -> None:
        self.cached = list(dict.fromkeys(g.cached for g in groups if g.cached is not None))
        self._numbers = {cached: number for number, cached in enumerate(self.cached)}
        self.tokens: list[Tensor] = []
        # Numpy arrays, not tensors: a server packs hundreds of short segments in a call, and torch
        # takes ten times as long for a few elements, as it releases the interpreter's lock in each
        # operation.
        self._positions: list[np.ndarray] = []
        self.lengths: list[int] = []
        self.prefixes: list[int] = []
        self.num_tokens = 0
        self.reads: list[int] = []
        self._stored: list[np.ndarray] = []
        self._slots: list[Tensor] = []
        self._state_rows: list[int] = []
        self._state_slots: list[int] = []

    def add_group(
        self,
        sequences: Sequence[Tokens],
        group: Group,
        stored: Sequence[Stored | None],
        reads: Sequence[Sequence[int]],
    ) -> None:
        if group.prefix >= min(map(len, sequences)):
            raise ValueError(
                f"a prefix of {group.prefix} tokens is not shorter than all sequences that share "
                f"it, which have {[*map(len, sequences)]} tokens"
            )
        segment, num_cached = -1, 0
        if group.cached is not None:
            segment, num_cached = self._numbers[group.cached], len(group.cached.slots)
        # The pack has the prefix's tokens once, then each sequence's remaining tokens. So a token's
        # index in the pack is its position in the sequence plus ``shared_offset`` if it is in the
        # prefix, else plus ``offset``.
        shared_offset = self.num_tokens - num_cached
        if group.prefix > num_cached:
            self._add(sequences[0], num_cached, group.prefix, segment)
            segment = len(self.cached) + len(self.lengths) - 1
        for sequence, to_store, places in zip(sequences, stored, reads, strict=True):
            offset = self.num_tokens - group.prefix
            self.reads += [
                place + (shared_offset if place < group.prefix else offset) for place in places
            ]
            self._add(sequence, group.prefix, len(sequence), segment)
            if to_store is not None:
                positions = np.arange(to_store.start, to_store.start + len(to_store.slots))
                is_shared = positions < group.prefix
                self._stored.append(positions + np.where(is_shared, shared_offset, offset))
                self._slots.append(to_store.slots)
                for tokens, slot in to_store.states:
                    last = tokens - 1
                    self._state_rows.append(
                        last + (shared_offset if last < group.prefix else offset)
                    )
                    self._state_slots.append(slot)

    def _add(self, sequence: Tokens, start: int, stop: int, prefix: int) -> None:
        self.tokens.append(torch.as_tensor(sequence[start:stop], dtype=torch.int64))
        self._positions.append(np.arange(start, stop))
        self.lengths.append(stop - start)
        self.prefixes.append(prefix)
        self.num_tokens += stop - start

    @property
    def position_ids(self) -> Tensor:
        return torch.from_numpy(np.concatenate(self._positions))

    def cache_use(self) -> CacheUse | None:
        if not self.cached and not self._stored:
            return None
        empty = torch.zeros(0, dtype=torch.int64)
        return CacheUse(
            tuple(len(cached.slots) for cached in self.cached),
            torch.cat([empty, *(cached.slots for cached in self.cached)]),
            torch.from_numpy(np.concatenate([empty.numpy(), *self._stored])),
            torch.cat([empty, *self._slots]),
            states=StateUse(
                tuple(cached.state for cached in self.cached if cached.state is not None),
                tuple(self._state_rows),
                tuple(self._state_slots),
            ),
        )


@dataclass(frozen=True)
class ReplyRows:
    """The tokens that are read by a head that averages the hidden states of each reply.

    Attributes:
        index: ``[M]`` int64 indices of the replies' tokens in a pack, reply after reply. Replies
            with a shared prefix may share a token.
        lengths: number of tokens in ``index`` of each of the S replies; they add up to M.
        group_lengths: number of tokens in each reply over all ranks of a context parallel group, if
            this rank has only some of the replies' tokens; None without a context parallel group.
        places: ``[M]`` int64 positions of this rank's tokens among those of all ranks; None without
            a context parallel group.
    """

    index: Tensor
    lengths: tuple[int, ...]
    group_lengths: tuple[int, ...] | None = None
    places: Tensor | None = None

    def to(self, device: torch.device | str) -> ReplyRows:
        places = None if self.places is None else to_device(self.places, device)
        return replace(self, index=to_device(self.index, device), places=places)

    def shared(self, share: ContextShare) -> ReplyRows:
        """Keep the tokens that the rank of ``share`` computes, by their indices there."""
        local, rows = share.own(self.index)
        replies = torch.arange(len(self.lengths)).repeat_interleave(torch.tensor(self.lengths))
        lengths = replies[local].bincount(minlength=len(self.lengths)).tolist()
        return ReplyRows(rows, tuple(lengths), self.lengths, local)


@dataclass(frozen=True)
class FixedSizes:
    """Sizes to which attention pads several packs, so that CUDA graphs can be reused.

    Attributes:
        segments: number of segments, empty ones included.
        keys: number of keys of all segments, if some have a shared prefix; else None.
        length: upper bound of the number of queries, and of keys, of a segment.
    """

    segments: int
    keys: int | None
    length: int


@dataclass(frozen=True)
class PackedBatch:
    """Sequences laid end to end, without padding between them; a shared prefix is stored once.

    T counts tokens, and S the tokens that the head reads, each of which has one reward.

    A pack has G segments. A sequence is one segment, or two: a prefix that it shares with adjacent
    sequences, and its remaining tokens. In attention a segment sees itself, causally, and all of
    its prefix, so that each token has the same hidden state as in its sequence alone. A cached
    prefix is one more segment, without tokens in the pack, that other segments have as a prefix.

    Attributes:
        tokens: ``[T]`` int64 token ids.
        position_ids: ``[T]`` int64 positions in the sequences, counted from 0.
        cu_seqlens: ``[G + 1]`` int32 bounds of the segments, from 0 to T.
        prefixes: ``[G]`` int64, for each segment the number of the segment that is its prefix, or
            -1. The P cached segments have the numbers 0 to P - 1, the G segments of the pack have
            the numbers from P on.
        scored_tokens: ``[S]`` int64 index into ``tokens`` of the tokens that the head reads,
            record by record.
        rows: ``[S]`` int64 positions of the pack's rewards among all rewards of the step, data set
            or request that the pack is a part of.
        records: the records whose samples the pack has.
        cached: what the pack reads from a server's key-value cache, and stores there; None without
            a cache.
        replies: tokens over which the head averages; None if it reads ``scored_tokens``.
        share: the tokens that this rank of a context parallel group computes; None if it computes
            all.
        filled: number of tokens in filler segments, which come last and only raise T to the
            required size.
        sizes: sizes to which attention pads the pack; None if it does not pad.
    """

    tokens: Tensor
    position_ids: Tensor
    cu_seqlens: Tensor
    prefixes: Tensor
    scored_tokens: Tensor
    rows: Tensor
    records: Records
    cached: CacheUse | None = None
    replies: ReplyRows | None = None
    share: ContextShare | None = None
    filled: int = 0
    sizes: FixedSizes | None = None

    @classmethod
    def pack(
        cls,
        sequences: Sequence[Tokens],
        records: Records | None = None,
        rows: Sequence[int] | Tensor | None = None,
        groups: Sequence[Group] | None = None,
        stored: Sequence[Stored | None] | None = None,
        reads: Sequence[Sequence[int]] | None = None,
    ) -> PackedBatch:
        """Lay ``sequences`` end to end; they are in the order of their records, and none is empty.

        Args:
            records: the records of the sequences; by default each sequence is a record.
            rows: ``[S]`` positions of the rewards in the whole step or request; default 0 to S - 1.
            groups: adjacent sequences with a shared prefix; by default no two share one.
            stored: for each sequence, what to store of it in a server's cache (nothing that is
                already cached); None stores nothing.
            reads: for each sequence, positions of the tokens that the head reads, none of which is
                cached; by default its last token.

        Raises:
            ValueError: ``records`` or ``rows`` do not fit the sequences and ``reads``, or a
                sequence is empty.
        """
        if reads is None:
            reads = [[len(sequence) - 1] for sequence in sequences]
        counts = [*map(len, reads)]
        count = sum(counts)
        if records is None:
            records = Records.of(range(len(sequences)), [1] * len(sequences), reward_counts=counts)
        if counts != records.reward_bounds.diff().tolist():
            raise ValueError(
                f"{len(sequences)} sequences with {count} rewards do not fit {len(records)} "
                f"records with {records.num_samples} samples and {records.num_rewards} rewards"
            )
        rows = torch.as_tensor(range(count) if rows is None else rows, dtype=torch.int64)
        if len(rows) != count:
            raise ValueError(f"rows has {len(rows)} elements; {count} rewards need {count} rows")
        if len(sequences) == 0 or min(map(len, sequences)) < 1:
            raise ValueError("a pack needs at least one sequence, and no sequence may be empty")
        groups = groups or [Group(1, 0)] * len(sequences)
        stored = stored or [None] * len(sequences)
        segments, end = _Segments(groups), 0
        for group in groups:
            start, end = end, end + group.size
            segments.add_group(sequences[start:end], group, stored[start:end], reads[start:end])
        bounds = torch.tensor([0, *segments.lengths], dtype=torch.int32).cumsum(0).int()
        return cls(
            tokens=torch.cat(segments.tokens),
            position_ids=segments.position_ids,
            cu_seqlens=bounds,
            prefixes=torch.tensor(segments.prefixes),
            scored_tokens=torch.tensor(segments.reads, dtype=torch.int64),
            rows=rows,
            records=records,
            cached=segments.cache_use(),
        )

    @property
    def num_tokens(self) -> int:
        """Number of tokens, T."""
        return self.tokens.numel()

    @property
    def num_own_tokens(self) -> int:
        """Number of tokens that this rank of a context parallel group computes."""
        return self.num_tokens if self.share is None else self.share.rows.numel()

    @property
    def num_own_filled(self) -> int:
        """Number of filler tokens among those that this rank computes; they are its last ones."""
        if self.share is None:
            return self.filled
        first = self.num_tokens - self.filled
        chunks = self.share.chunks[self.share.rank]
        return sum(end - start for start, end in chunks if start >= first)

    def of_own(self, values: Tensor) -> Tensor:
        """Select from ``values [T, ...]`` the rows of the tokens that this rank computes."""
        return values if self.share is None else values[self.share.rows]

    def padded_to_multiple(self, multiple: int) -> PackedBatch:
        """Append a filler segment so that ``multiple`` divides T."""
        return self._append_filler(-self.num_tokens % multiple)

    def filled_to(self, tokens: int, longest: int) -> PackedBatch:
        """Append filler segments of at most ``longest`` tokens so that T is ``tokens``."""
        return self._append_filler(tokens - self.num_tokens, longest)

    def shared(
        self, rank: int, ranks: int, multiple: int, every_token: bool = False
    ) -> PackedBatch:
        """Split the batch over a context parallel group; return it with the ``share`` of ``rank``.

        A filler segment gives each rank the same number of tokens, a multiple of ``multiple``. The
        head reads ``scored_tokens``, or all tokens if ``every_token`` is True.
        """
        bounds = self.cu_seqlens.tolist()
        reads = torch.arange(self.num_tokens) if every_token else self.scored_tokens
        share = ContextShare.of(bounds, reads, rank, ranks, multiple)
        filled = self._append_filler(share.gathered.numel() - self.num_tokens)
        replies = None if self.replies is None else self.replies.shared(share)
        return replace(filled, share=share, replies=replies)

    def _append_filler(self, fill: int, longest: int | None = None) -> PackedBatch:
        """Append ``fill`` tokens of id 0, in segments of at most ``longest`` (None: in one)."""
        if fill == 0:
            return self
        longest = longest or fill
        lengths = [min(longest, fill - start) for start in range(0, fill, longest)]
        ends = self.cu_seqlens.new_tensor(lengths).cumsum(0) + self.num_tokens
        positions = torch.arange(fill, device=self.tokens.device) % longest
        return replace(
            self,
            tokens=torch.cat([self.tokens, self.tokens.new_zeros(fill)]),
            position_ids=torch.cat([self.position_ids, positions]),
            cu_seqlens=torch.cat([self.cu_seqlens, ends.to(self.cu_seqlens.dtype)]),
            prefixes=torch.cat([self.prefixes, self.prefixes.new_full((len(lengths),), -1)]),
            filled=fill,
        )

    def to(self, device: torch.device | str) -> PackedBatch:
        """Copy the pack, with the tensors that the model and the loss compute with on ``device``.

        Tensors that plan the work stay on the host: bounds and prefixes of the segments, ``rows``,
        and the bounds of the records.
        """
        labels, cached = self.records.labels, self.cached
        inputs = [self.tokens, self.position_ids, self.scored_tokens, labels.values]
        indices = [] if cached is None else cached.tensors()
        tokens, positions, scored, values, *moved = all_to_device([*inputs, *indices], device)
        teacher = self.records.teacher_rewards
        return replace(
            self,
            tokens=tokens,
            position_ids=positions,
            scored_tokens=scored,
            records=replace(
                self.records,
                labels=replace(labels, values=values),
                teacher_rewards=None if teacher is None else to_device(teacher, device),
            ),
            cached=None
            if cached is None
            else CacheUse(cached.lengths, *moved, states=cached.states),
            replies=None if self.replies is None else self.replies.to(device),
            share=None if self.share is None else self.share.to(device),
        )
