"""PackedBatch: the one form in which data reaches a model; Records: which rewards belong to which
record.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from nemo_aligner.batch.context import ContextShare
from nemo_aligner.batch.pairs import PairRows, pair_rows
from nemo_aligner.utils.host_transfer import all_to_device, to_device

# Sequences and packs that use a pool of keys and values computed before.


@dataclass(frozen=True, eq=False)
class CachedPrefix:
    """A beginning whose keys and values lie in ``slots [h]`` int64 of a pool.

    Sequences that begin with it have the same object.
    """

    slots: Tensor


@dataclass(frozen=True)
class Stored:
    """A sequence's tokens from ``start`` on, whose keys and values are to lie in ``slots [n]``."""

    start: int
    slots: Tensor


@dataclass(frozen=True)
class CacheUse:
    """Keys and values that a pack takes from a pool, and those that it stores there.

    Attributes:
        lengths: tokens of the pack's P cached segments, C in all.
        taken: ``[C]`` int64 slots of their tokens, segment by segment.
        stored: ``[M]`` int64 index of the pack's own tokens whose keys and values are to be stored.
        slots: ``[M]`` int64, where; none of them is in ``taken``.
    """

    lengths: tuple[int, ...]
    taken: Tensor
    stored: Tensor
    slots: Tensor

    def tensors(self) -> list[Tensor]:
        """``taken``, ``stored`` and ``slots``."""
        return [self.taken, self.stored, self.slots]


# Records own rewards and labels; a PackedBatch is the one form in which data reaches a model.

Tokens = Sequence[int] | np.ndarray | Tensor


@dataclass(frozen=True)
class LabelColumns:
    """Labels in L rows and C named columns; ``Records`` says which rows a record has.

    Attributes:
        names: C names.
        values: ``[L, C]`` float32 as in the data, NaN where a label is missing.
        means: of every column the number that ``targets`` subtracts; None for a column that is not
            centred.
    """

    names: tuple[str, ...]
    values: Tensor
    means: tuple[float | None, ...]

    @classmethod
    def of(cls, names: Sequence[str], values: Tensor) -> LabelColumns:
        """Columns that are not centred."""
        return cls(tuple(names), values, (None,) * len(names))

    @classmethod
    def none(cls, rows: int) -> LabelColumns:
        """Labels with ``rows`` rows and no column."""
        return cls.of((), torch.zeros(rows, 0))

    def centred_on(self, means: Mapping[str, float]) -> LabelColumns:
        """The same columns, of which those named are centred on these means."""
        return replace(self, means=tuple(means.get(name) for name in self.names))

    def select(self, rows: Tensor) -> LabelColumns:
        """The labels in ``rows [l]``."""
        return replace(self, values=self.values[rows])

    def measured_means(self) -> tuple[float, ...]:
        """The mean of every column over the labels that are there; NaN where none is."""
        return tuple(torch.nanmean(self.values.double(), dim=0).tolist())

    def offsets(self, names: Sequence[str]) -> list[float]:
        """What ``targets`` subtracts from the columns called ``names``; 0 for one not centred."""
        known = dict(zip(self.names, self.means, strict=True))
        return [known.get(name) or 0.0 for name in names]

    def targets(self, names: Sequence[str]) -> Tensor:
        """``[L, len(names)]`` float32: the columns called ``names``, centred ones minus their mean.

        Raises:
            KeyError: there is no column of a name.
        """
        missing = [name for name in names if name not in self.names]
        if missing:
            raise KeyError(f"got the label columns {self.names}, wanted {missing[0]!r}")
        # Column by column: an index or a row of means would first have to come to the device.
        columns = [self.names.index(name) for name in names]
        return torch.stack([self._centred(column) for column in columns], dim=1)

    def _centred(self, column: int) -> Tensor:
        values, mean = self.values[:, column], self.means[column]
        return values if mean is None else (values.double() - mean).float()


def count_label_rows(sample_bounds: Tensor, reward_bounds: Tensor) -> Tensor:
    """Count the rows of labels of each record, ``[R]`` int64: see ``Records.labels``."""
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
    """

    ids: Tensor
    sample_bounds: Tensor
    reward_bounds: Tensor
    labels: LabelColumns
    ranks: Tensor
    reply_lengths: Tensor

    @classmethod
    def of(
        cls,
        ids: Sequence[int],
        sample_counts: Sequence[int],
        labels: LabelColumns | None = None,
        ranks: Tensor | None = None,
        reward_counts: Sequence[int] | None = None,
        reply_lengths: Tensor | None = None,
    ) -> Records:
        """Build records with ``sample_counts [R]`` samples each.

        By default a sample has one reward (else ``reward_counts [Q]``), the best sample is the
        first one, and there are no labels.
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
        ids = torch.as_tensor(ids, dtype=torch.int64)
        return cls(ids, samples, rewards, labels, ranks, reply_lengths)

    def __len__(self) -> int:
        return self.ids.numel()

    @property
    def num_samples(self) -> int:
        """Q."""
        return len(self.reward_bounds) - 1

    @property
    def num_rewards(self) -> int:
        """S."""
        return int(self.reward_bounds[-1])

    @property
    def record_bounds(self) -> Tensor:
        """``[R + 1]`` int64, from 0 to S: bounds of the rewards of each record."""
        return self.reward_bounds[self.sample_bounds]

    @cached_property
    def label_bounds(self) -> Tensor:
        """``[R + 1]`` int64 bounds of the rows of labels of each record."""
        # Cached: a step selects a few of millions of records.
        return _as_bounds(count_label_rows(self.sample_bounds, self.reward_bounds))

    def sample_rows(self, indices: Sequence[int] | Tensor) -> Tensor:
        """Indices ``[q]`` int64 of the samples of the records at ``indices``, record by record."""
        return _within(self.sample_bounds, torch.as_tensor(indices, dtype=torch.int64))[1]

    def rows(self, indices: Sequence[int] | Tensor) -> Tensor:
        """Indices ``[s]`` int64 of the rewards of the records at ``indices``, record by record."""
        return _within(self.reward_bounds, self.sample_rows(indices))[1]

    def select(self, indices: Sequence[int] | Tensor) -> Records:
        """The records at ``indices``, in that order, as if there were no others."""
        chosen = torch.as_tensor(indices, dtype=torch.int64)
        sample_counts, samples = _within(self.sample_bounds, chosen)
        reward_counts, rewards = _within(self.reward_bounds, samples)
        return Records(
            self.ids[chosen],
            _as_bounds(sample_counts),
            _as_bounds(reward_counts),
            self.labels.select(_within(self.label_bounds, chosen)[1]),
            self.ranks[samples],
            self.reply_lengths[rewards],
        )

    def pairs(self, with_ties: bool = False) -> PairRows:
        """All pairs of samples of one record of which one is better, and the tied ones, too."""
        return pair_rows(self.sample_bounds, self.ranks, with_ties)

    def as_single(self, rewards: Tensor) -> Tensor:
        """``rewards [S, ...]`` unchanged, after a check that each has a row of labels.

        Raises:
            ValueError: a record is a comparison, which has one row of labels for all its rewards.
        """
        if len(self.labels.values) != self.num_rewards:
            counts = self.sample_bounds.diff().unique().tolist()
            raise ValueError(f"got records of {counts} samples, wanted one of each")
        return rewards


def _as_bounds(counts: Tensor) -> Tensor:
    """``[n + 1]`` int64 bounds of adjacent parts with ``counts [n]`` items."""
    return torch.cat([counts.new_zeros(1), counts.cumsum(0)])


def _within(bounds: Tensor, parts: Tensor) -> tuple[Tensor, Tensor]:
    """Counts ``[p]`` and indices ``[i]``, int64, of the items of ``parts [p]``, part by part.

    Part n has the items from ``bounds[n]`` up to ``bounds[n + 1]``.
    """
    starts = bounds[parts]
    counts = bounds[parts + 1] - starts
    offsets = (starts - counts.cumsum(0) + counts).repeat_interleave(counts)
    return counts, offsets + torch.arange(offsets.numel())


@dataclass(frozen=True)
class Group:
    """``size`` adjacent sequences that begin with the same ``prefix`` tokens.

    Those of ``cached`` are the first of them, and need no computing.
    """

    size: int
    prefix: int
    cached: CachedPrefix | None = None


class _Segments:
    """The segments of a pack in the making; cached ones are numbered before its own."""

    def __init__(self, groups: Sequence[Group]) -> None:
        self.cached = list(dict.fromkeys(g.cached for g in groups if g.cached is not None))
        self._numbers = {cached: number for number, cached in enumerate(self.cached)}
        self.tokens: list[Tensor] = []
        # Arrays, not tensors, of what is made for each segment: a server packs hundreds in a call,
        # and torch takes ten times as long for a few numbers, letting go of the interpreter at
        # each step.
        self._positions: list[np.ndarray] = []
        self.lengths: list[int] = []
        self.prefixes: list[int] = []
        self.num_tokens = 0
        self.reads: list[int] = []
        self._stored: list[np.ndarray] = []
        self._slots: list[Tensor] = []

    def add_group(
        self,
        sequences: Sequence[Tokens],
        group: Group,
        stored: Sequence[Stored | None],
        reads: Sequence[Sequence[int]],
    ) -> None:
        if group.prefix >= min(map(len, sequences)):
            raise ValueError(
                f"a prefix of {group.prefix} tokens leaves no last token to a sequence"
            )
        segment, known = -1, 0
        if group.cached is not None:
            segment, known = self._numbers[group.cached], len(group.cached.slots)
        # What stands before ``prefix`` is there once, what follows for each sequence.
        first = self.num_tokens - known
        if group.prefix > known:
            self._add(sequences[0], known, group.prefix, segment)
            segment = len(self.cached) + len(self.lengths) - 1
        for sequence, its, places in zip(sequences, stored, reads, strict=True):
            own = self.num_tokens - group.prefix
            self.reads += [place + (first if place < group.prefix else own) for place in places]
            self._add(sequence, group.prefix, len(sequence), segment)
            if its is not None:
                positions = np.arange(its.start, its.start + len(its.slots))
                is_shared = positions < group.prefix
                self._stored.append(positions + np.where(is_shared, first, own))
                self._slots.append(its.slots)

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
        none = torch.zeros(0, dtype=torch.int64)
        return CacheUse(
            tuple(len(cached.slots) for cached in self.cached),
            torch.cat([none, *(cached.slots for cached in self.cached)]),
            torch.from_numpy(np.concatenate([none.numpy(), *self._stored])),
            torch.cat([none, *self._slots]),
        )


@dataclass(frozen=True)
class ReplyRows:
    """The tokens that a head reads which takes the mean of every reply.

    Attributes:
        index: ``[M]`` int64 into a pack's tokens, reply after reply; a token may be of several.
        lengths: of the S replies.
        whole: of the S replies on all ranks of a context parallel group, of which this one has
            parts; None is that it has all.
        places: ``[M]`` int64, where these tokens are among those of all ranks.
    """

    index: Tensor
    lengths: tuple[int, ...]
    whole: tuple[int, ...] | None = None
    places: Tensor | None = None

    def to(self, device: torch.device | str) -> ReplyRows:
        places = None if self.places is None else to_device(self.places, device)
        return replace(self, index=to_device(self.index, device), places=places)

    def shared(self, share: ContextShare) -> ReplyRows:
        """The parts that a rank has, ``index`` into its own tokens."""
        mine, rows = share.own(self.index)
        owner = torch.arange(len(self.lengths)).repeat_interleave(torch.tensor(self.lengths))
        lengths = owner[mine].bincount(minlength=len(self.lengths)).tolist()
        return ReplyRows(rows, tuple(lengths), self.lengths, mine)


@dataclass(frozen=True)
class FixedSizes:
    """Sizes that a pack has in common with others, for kernels with shapes that do not change.

    Attributes:
        segments: how many there are in attention, those without a token included.
        keys: of all segments, where some begin with others; None where none does.
        length: upper bound of the queries, and of the keys, of a segment.
    """

    segments: int
    keys: int | None
    length: int


@dataclass(frozen=True)
class PackedBatch:
    """Sequences laid end to end, without padding between them; a common prefix is there once.

    T counts tokens, S scored tokens and so rewards, R records, C label columns.

    The pack is made of G segments. A sequence is one segment, or two: a prefix that adjacent
    sequences begin with, too, and the rest of its own. In attention a segment sees itself,
    causally, and the whole of its prefix; so every token has the hidden state that it has in its
    sequence. A beginning whose keys and values were kept is one more segment, which others have as
    their prefix, and of which no token is in the pack.

    Attributes:
        tokens: ``[T]`` int64 token ids.
        position_ids: ``[T]`` int64 positions in the sequences, counted from 0.
        cu_seqlens: ``[G + 1]`` int32 bounds of the segments, from 0 to T.
        prefixes: ``[G]`` int64, the segment that a segment begins with, -1 for none. P cached
            segments, if there are any, are counted first: the pack's own begin with number P.
        scored_tokens: ``[S]`` int64 index into ``tokens`` of every token that the head reads,
            record by record.
        rows: ``[S]`` int64, where their rewards belong among those of the step, the data set or
            the request that the pack is a part of.
        records: the records that own them.
        cached: what is taken from a pool of keys and values, and stored there; None is nothing.
        replies: what is read of each sequence instead of its last token; None is that alone.
        share: the tokens that this rank of a context parallel group computes; None is all of them.
        filled: tokens of filler segments at the tail.
        sizes: those that attention is filled up to; None is as many as there are.
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
        """Lay ``sequences`` (in record order, none empty) end to end.

        The last token of each is scored, or the tokens at its ``reads``, which are not cached.
        Without ``records`` every sequence is one; without ``rows`` the rewards belong where they
        stand. ``groups`` says which of the sequences have a common prefix; without it none
        do. ``stored`` says of each which of its tokens' keys and values are to be kept, and where;
        these are tokens that are not cached.

        Raises:
            ValueError: the records have other samples or rewards, rows are not of as many rewards,
                or a sequence is empty.
        """
        if reads is None:
            reads = [[len(sequence) - 1] for sequence in sequences]
        counts = [*map(len, reads)]
        count = sum(counts)
        if records is None:
            records = Records.of(range(len(sequences)), [1] * len(sequences), reward_counts=counts)
        if counts != records.reward_bounds.diff().tolist():
            raise ValueError(
                f"got {len(sequences)} sequences and {count} rewards, wanted {records.num_samples} "
                f"and {records.num_rewards}, those of {len(records)} records"
            )
        rows = torch.as_tensor(range(count) if rows is None else rows, dtype=torch.int64)
        if len(rows) != count:
            raise ValueError(f"got {len(rows)} rows, wanted {count}, one for each reward")
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
        """T."""
        return self.tokens.numel()

    @property
    def num_own_tokens(self) -> int:
        """How many of them this rank of a context parallel group computes."""
        return self.num_tokens if self.share is None else self.share.rows.numel()

    @property
    def num_own_filled(self) -> int:
        """How many of these, the last of them, are of the filler segment."""
        if self.share is None:
            return self.filled
        first = self.num_tokens - self.filled
        own = self.share.chunks[self.share.rank]
        return sum(end - start for start, end in own if start >= first)

    def of_own(self, values: Tensor) -> Tensor:
        """``values [T, ...]`` of the tokens that this rank computes."""
        return values if self.share is None else values[self.share.rows]

    def padded_to_multiple(self, multiple: int) -> PackedBatch:
        """The same batch with a filler segment at the tail, so that T divides by ``multiple``."""
        return self._filled(-self.num_tokens % multiple)

    def filled_to(self, tokens: int, longest: int) -> PackedBatch:
        """The same batch with filler segments of at most ``longest`` tokens, so that T is
        ``tokens``.
        """
        return self._filled(tokens - self.num_tokens, longest)

    def shared(
        self, rank: int, ranks: int, multiple: int, every_token: bool = False
    ) -> PackedBatch:
        """The same batch with the ``share`` of one of the ``ranks`` of a context parallel group.

        A filler segment makes up for uneven shares; each has a ``multiple`` of tokens. The head
        reads ``scored_tokens``, or ``every_token``.
        """
        bounds = self.cu_seqlens.tolist()
        reads = torch.arange(self.num_tokens) if every_token else self.scored_tokens
        share = ContextShare.of(bounds, reads, rank, ranks, multiple)
        filled = self._filled(share.gathered.numel() - self.num_tokens)
        replies = None if self.replies is None else self.replies.shared(share)
        return replace(filled, share=share, replies=replies)

    def _filled(self, fill: int, longest: int | None = None) -> PackedBatch:
        """The same batch with ``fill`` more tokens, in segments of at most ``longest``."""
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
        """Move what the model and the loss compute with.

        What the host plans by stays: the bounds and beginnings of the segments, the rows, and which
        rewards a record owns.
        """
        labels, cached = self.records.labels, self.cached
        given = [self.tokens, self.position_ids, self.scored_tokens, labels.values]
        indices = [] if cached is None else cached.tensors()
        tokens, positions, scored, values, *moved = all_to_device([*given, *indices], device)
        return replace(
            self,
            tokens=tokens,
            position_ids=positions,
            scored_tokens=scored,
            records=replace(self.records, labels=replace(labels, values=values)),
            cached=None if cached is None else CacheUse(cached.lengths, *moved),
            replies=None if self.replies is None else self.replies.to(device),
            share=None if self.share is None else self.share.to(device),
        )
