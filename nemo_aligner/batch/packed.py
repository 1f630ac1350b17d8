"""PackedBatch: the one form in which data reaches a model; Records: which rewards belong to which
record.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

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
    """Labels of R records in C named columns.

    Attributes:
        names: C names.
        values: ``[R, C]`` float32 as in the data, NaN where a label is missing; ``[S, C]`` where
            every reward has labels of its own (``of_rewards``).
        means: of every column the number that ``targets`` subtracts; None for a column that is not
            centred.
    """

    names: tuple[str, ...]
    values: Tensor
    means: tuple[float | None, ...]
    of_rewards: bool = False

    @classmethod
    def of(cls, names: Sequence[str], values: Tensor, of_rewards: bool = False) -> LabelColumns:
        """Columns that are not centred."""
        return cls(tuple(names), values, (None,) * len(names), of_rewards)

    @classmethod
    def none(cls, records: int) -> LabelColumns:
        """Labels without a column, for ``records`` records."""
        return cls.of((), torch.zeros(records, 0))

    def centred_on(self, means: Mapping[str, float]) -> LabelColumns:
        """The same columns, of which those named are centred on these means."""
        return replace(self, means=tuple(means.get(name) for name in self.names))

    def select(self, indices: Tensor) -> LabelColumns:
        """The labels of the records, or rewards, at ``indices [r]``."""
        return replace(self, values=self.values[indices])

    def measured_means(self) -> tuple[float, ...]:
        """The mean of every column over the labels that are there; NaN where none is."""
        return tuple(torch.nanmean(self.values.double(), dim=0).tolist())

    def offsets(self, names: Sequence[str]) -> list[float]:
        """What ``targets`` subtracts from the columns called ``names``; 0 for one not centred."""
        known = dict(zip(self.names, self.means, strict=True))
        return [known.get(name) or 0.0 for name in names]

    def targets(self, names: Sequence[str]) -> Tensor:
        """``[R, len(names)]`` float32: the columns called ``names``, centred ones minus their mean.

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


@dataclass(frozen=True)
class Records:
    """R records, and which of S rewards each owns.

    A record owns any number of adjacent scored tokens, and so of rewards: 2 or more for a
    comparison, 1 for a rated reply or a text to score, and of each text one for every turn or step
    where these are scored.

    Attributes:
        ids: ``[R]`` int64 index of each record in its data set (or request).
        bounds: ``[R + 1]`` int64, from 0 to S: record r owns rewards ``bounds[r]`` up to
            ``bounds[r + 1]``.
        labels: what people said of the records.
        ranks: ``[S]`` integer of completions among those of their record: a lower one is better,
            equal ones are tied.
        texts: ``[S]`` integer, which of its record's texts each reward is of, where turns or steps
            are scored; None where every reward is of a text of its own.
        reply_lengths: ``[S]`` integer tokens of every reply, or of its turn or step, on the host
            (``lengths_of_rewards`` in data/records.py); None where nobody counted.
    """

    ids: Tensor
    bounds: Tensor
    labels: LabelColumns
    ranks: Tensor
    texts: Tensor | None = None
    reply_lengths: Tensor | None = None

    @classmethod
    def of(
        cls,
        ids: Sequence[int],
        sizes: Sequence[int],
        labels: LabelColumns | None = None,
        ranks: Tensor | None = None,
        texts: Tensor | None = None,
        reply_lengths: Tensor | None = None,
    ) -> Records:
        """Records with ``sizes`` rewards each, by default without labels, the best one first."""
        bounds = torch.tensor([0, *sizes], dtype=torch.int64).cumsum(0)
        if ranks is None:  # in the order in which a record has them
            ranks = torch.arange(int(bounds[-1])) - bounds[:-1].repeat_interleave(bounds.diff())
        return cls(
            torch.as_tensor(ids, dtype=torch.int64),
            bounds,
            LabelColumns.none(len(ids)) if labels is None else labels,
            ranks,
            texts,
            reply_lengths,
        )

    def __len__(self) -> int:
        return self.ids.numel()

    @property
    def num_rewards(self) -> int:
        """S."""
        return int(self.bounds[-1])

    @property
    def sizes(self) -> Tensor:
        """``[R]`` int64 rewards of each record."""
        return self.bounds.diff()

    def _sizes_of(self, chosen: Tensor) -> Tensor:
        # Of these alone: a step's few records are not worth a pass over millions.
        return self.bounds[chosen + 1] - self.bounds[chosen]

    def rows(self, indices: Sequence[int] | Tensor) -> Tensor:
        """The rewards that the records at ``indices`` own, as int64 indices, record by record."""
        chosen = torch.as_tensor(indices, dtype=torch.int64)
        sizes = self._sizes_of(chosen)
        ends = sizes.cumsum(0)
        before = (self.bounds[chosen] - ends + sizes).repeat_interleave(sizes)
        return before + torch.arange(before.numel())

    def select(self, indices: Sequence[int] | Tensor) -> Records:
        """The records at ``indices``, in that order, as if there were no others."""
        chosen = torch.as_tensor(indices, dtype=torch.int64)
        sizes, rows = self._sizes_of(chosen).tolist(), self.rows(chosen)
        labels = self.labels.select(rows if self.labels.of_rewards else chosen)
        texts, lengths = (
            None if each is None else each[rows] for each in (self.texts, self.reply_lengths)
        )
        ids = self.ids[chosen].tolist()
        return Records.of(ids, sizes, labels, self.ranks[rows], texts, lengths)

    def text_bounds(self) -> Tensor:
        """``[Q + 1]`` int64 bounds of the rewards of each of Q texts, record by record."""
        if self.texts is None:
            return torch.arange(self.num_rewards + 1)
        owner = torch.arange(len(self)).repeat_interleave(self.sizes)
        begins = (owner.diff() != 0) | (self.texts.diff() != 0)
        inner = begins.nonzero().flatten() + 1
        return torch.cat([self.bounds[:1], inner, self.bounds[-1:]])

    def of_texts(self) -> Records:
        """The same records with one reward for each text, that of its last step."""
        if self.texts is None:
            return self
        last, lengths = self.text_bounds()[1:] - 1, self.reply_lengths
        if lengths is not None:
            lengths = lengths[last]
        sizes = torch.bincount(torch.bucketize(last, self.bounds[1:], right=True))
        labels = self.labels
        if labels.of_rewards:
            labels = replace(labels.select(last), of_rewards=False)
        ids = self.ids.tolist()
        return Records.of(ids, sizes.tolist(), labels, self.ranks[last], reply_lengths=lengths)

    def pairs(self, with_ties: bool = False) -> PairRows:
        """All pairs of completions of one record of which one is better, and the tied ones, too."""
        return pair_rows(self.bounds, self.ranks, with_ties)

    def as_single(self, rewards: Tensor) -> Tensor:
        """``rewards [S, ...]`` as they are, once each is found to have labels of its own.

        Raises:
            ValueError: a record owns several rewards, and not the labels of each.
        """
        if not self.labels.of_rewards and bool((self.sizes != 1).any()):
            sizes = self.sizes.unique().tolist()
            raise ValueError(f"got records of {sizes} rewards, wanted one of each")
        return rewards


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
        self.ends: list[int] = []  # the segment that each sequence ends with
        self.num_tokens = 0
        self.reads: list[Tensor] = []
        self._stored: list[np.ndarray] = []
        self._slots: list[Tensor] = []

    def add_group(
        self,
        sequences: Sequence[Tokens],
        group: Group,
        stored: Sequence[Stored | None],
        reads: Sequence[Tensor] | None,
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
        for number, (sequence, its) in enumerate(zip(sequences, stored, strict=True)):
            own = self.num_tokens - group.prefix
            if reads is not None:
                offsets = torch.where(reads[number] < group.prefix, first, own)
                self.reads.append(reads[number] + offsets)
            self.ends.append(len(self.lengths))
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
        reads: Sequence[Tensor] | None = None,
    ) -> PackedBatch:
        """Lay ``sequences`` (in record order, none empty) end to end.

        The last token of each is scored, or the tokens at its ``reads [s]`` int64, which are not
        cached. Without ``records`` every sequence is one; without ``rows`` the rewards belong where
        they stand. ``groups`` says which of the sequences have a common prefix; without it none
        do. ``stored`` says of each which of its tokens' keys and values are to be kept, and where;
        these are tokens that are not cached.

        Raises:
            ValueError: records or rows are not of as many rewards, or a sequence is empty.
        """
        sizes = [1] * len(sequences) if reads is None else [*map(len, reads)]
        count = sum(sizes)
        if records is None:
            records = Records.of(range(len(sequences)), sizes)
        if count != records.num_rewards:
            kind = "sequences" if reads is None else "rewards"
            wanted = f"{records.num_rewards}, those of {len(records)} records"
            raise ValueError(f"got {count} {kind}, wanted {wanted}")
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
            its = None if reads is None else reads[start:end]
            segments.add_group(sequences[start:end], group, stored[start:end], its)
        bounds = torch.tensor([0, *segments.lengths], dtype=torch.int32).cumsum(0).int()
        return cls(
            tokens=torch.cat(segments.tokens),
            position_ids=segments.position_ids,
            cu_seqlens=bounds,
            prefixes=torch.tensor(segments.prefixes),
            scored_tokens=bounds[1:][torch.tensor(segments.ends)].long() - 1
            if reads is None
            else torch.cat(segments.reads),
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
