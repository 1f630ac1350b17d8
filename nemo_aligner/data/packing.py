"""Pack records into PackedBatches under a token budget; a record is never split."""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from heapq import heappop, heappush
from itertools import accumulate, pairwise
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from nemo_aligner.batch.packed import (
    CachedPrefix,
    Group,
    LabelColumns,
    PackedBatch,
    Records,
    Stored,
    Tokens,
)
from nemo_aligner.data.dataset import TokenizedDataset
from nemo_aligner.data.tokenize import common_prefix
from nemo_aligner.utils.errors import DataError

# Records into PackedBatches under a token budget; a record is never split.
#
# Best fit decreasing (longest record first, into the fullest pack with enough space) gives the
# number of packs, which are then refilled so that each is the same work. The result depends on the
# arguments alone.
#
# A common prefix of a record's texts, or of several texts to score, is in a pack once: attention is
# causal, so its tokens have the same states in each text. Token ids are compared, so this holds for
# every template and for raw text.

# With cached prefixes, the most keys of a pack as a multiple of its budget: a GPU's kernel reads
# them one after the other.
_KEYS_PER_TOKEN = 8
# A fixed window, so that the time to search it does not grow with the data.
_RECORDS_AT_ONCE = 1 << 18


class RecordSize(NamedTuple):
    """Size of one record in a pack, where the prefix of its sequences is computed once.

    Attributes:
        tokens: with those of the prefix once.
        rewards: of all its samples.
        query_keys: pairs of a query and a key that it attends to.
    """

    tokens: int
    rewards: int
    query_keys: float


def measure_record(dataset: TokenizedDataset, record: int) -> RecordSize:
    """The size of one record."""
    lengths, prefix = dataset.lengths(record), int(dataset.prefixes[record])
    again = len(lengths) - 1
    # Every token sees itself and all before it; the prefix attends once.
    seen = sum(length * (length + 1) for length in lengths) / 2
    return RecordSize(
        tokens=sum(lengths) - again * prefix,
        rewards=dataset.num_rewards(record),
        query_keys=seen - again * prefix * (prefix + 1) / 2,
    )


def packed_size(dataset: TokenizedDataset, record: int) -> int:
    """Tokens of one record in a pack, with the prefix of its sequences counted once."""
    return measure_record(dataset, record).tokens


def largest_record(dataset: TokenizedDataset) -> tuple[int, int]:
    """The first of the largest records by ``packed_size``, and that size."""
    # Counted on the offsets alone: a mapped file's tokens are not read for it.
    best = (0, 0)
    bounds, prefixes = dataset.records.sample_bounds.numpy(), dataset.prefixes.numpy()
    for start in range(0, len(dataset), _RECORDS_AT_ONCE):
        own = bounds[start : start + _RECORDS_AT_ONCE + 1]
        totals = np.add.reduceat(dataset.sequences.lengths(own[0], own[-1]), own[:-1] - own[0])
        sizes = totals - (np.diff(own) - 1) * prefixes[start : start + _RECORDS_AT_ONCE]
        at = int(sizes.argmax())
        if sizes[at] > best[1]:
            best = start + at, int(sizes[at])
    return best


def record_cost(dataset: TokenizedDataset, record: int, query_key_cost: float) -> float:
    """The work of one record, in tokens through the linear layers.

    ``query_key_cost`` is that of attention between one query and one key
    (``ModelShape.query_key_cost``).
    """
    size = measure_record(dataset, record)
    return size.tokens + query_key_cost * size.query_keys


def share_out(costs: Sequence[float], count: int) -> list[list[int]]:
    """Indices into ``costs``, split into ``count`` parts of about the same sum.

    Largest first, each to the part that has least (Graham 1969); none is empty where there are
    costs enough.
    """
    return _fill([0] * len(costs), costs, 0, count) or []


def pack_records(
    dataset: TokenizedDataset,
    record_ids: Sequence[int],
    micro_batch_tokens: int,
    query_key_cost: float = 0.0,
    first_rows: Sequence[int] | None = None,
) -> list[PackedBatch]:
    """Packs of at most ``micro_batch_tokens`` tokens that hold every record of ``record_ids`` once.

    No more packs than best fit needs, with work as even as ``record_cost`` tells. Records keep
    their order inside a pack. The largest pack is the first: the next ones fit into the memory that
    it leaves. ``first_rows`` says for each of ``record_ids`` where the first of its rewards belongs
    (see ``PackedBatch.rows``); without it they follow each other.

    Raises:
        DataError: a record alone is larger than the budget.
    """
    sizes = [packed_size(dataset, record) for record in record_ids]
    for record, size in zip(record_ids, sizes, strict=True):
        if size > micro_batch_tokens:
            raise DataError(
                f"{dataset.origins[record]}: got a record of {size} tokens, wanted at most "
                f"model.micro_batch_tokens ({micro_batch_tokens})"
            )
    if first_rows is None:
        first_rows = dataset.records.select(record_ids).record_bounds.tolist()
    costs = [record_cost(dataset, record, query_key_cost) for record in record_ids]
    packs = []
    for members in assign(sizes, costs, micro_batch_tokens):
        chosen = [record_ids[member] for member in members]
        packs.append(_pack(dataset, chosen, [first_rows[member] for member in members]))
    return sorted(packs, key=lambda pack: -pack.num_tokens)


def _pack(
    dataset: TokenizedDataset, record_ids: Sequence[int], first_rows: Sequence[int]
) -> PackedBatch:
    of_record = [dataset.record(record) for record in record_ids]
    records = dataset.records.select(record_ids)
    sizes = records.record_bounds.diff().tolist()
    return PackedBatch.pack(
        [sequence for sequences in of_record for sequence in sequences],
        records,
        [row + n for row, size in zip(first_rows, sizes, strict=True) for n in range(size)],
        [
            Group(len(own), int(dataset.prefixes[record]))
            for record, own in zip(record_ids, of_record, strict=True)
        ],
        reads=[places for record in record_ids for places in dataset.reads(record)],
    )


class SequenceReads(NamedTuple):
    """Places ``[s]`` int64 that are read in a sequence, and where each reward belongs."""

    places: Tensor
    rows: list[int]

    @classmethod
    def number(cls, places: Sequence[Sequence[int]]) -> list[SequenceReads]:
        """What is read in each sequence, its rewards one after the other."""
        rows = iter(range(sum(map(len, places))))
        return [
            cls(torch.tensor(own, dtype=torch.int64), [next(rows) for _ in own]) for own in places
        ]


def one_rotation(tokens: int) -> int:
    """``ModelShape.rotation_by_length`` of a model whose texts are all rotated alike."""
    return 0


def pack_sequences(
    sequences: Sequence[Tokens],
    micro_batch_tokens: int,
    reads: Sequence[SequenceReads] | None = None,
    rotation_by_length: Callable[[int], int] = one_rotation,
) -> list[PackedBatch]:
    """Packs of single sequences to score; ``rows`` are positions in ``sequences``, or of ``reads``.

    ``rotation_by_length`` is the model's; see ``find_prefix_groups``.

    Raises:
        DataError: a sequence alone is larger than the budget, or empty.
    """
    for index, sequence in enumerate(sequences):
        if not 0 < len(sequence) <= micro_batch_tokens:
            raise DataError(
                f"sequence {index}: got {len(sequence)} tokens, wanted 1 to "
                f"model.micro_batch_tokens ({micro_batch_tokens})"
            )
    groups = find_prefix_groups(sequences, micro_batch_tokens, None, rotation_by_length)
    return pack_groups(sequences, groups, micro_batch_tokens, reads=reads)


def pack_groups(
    sequences: Sequence[Tokens],
    groups: Sequence[PrefixGroup],
    micro_batch_tokens: int,
    stored: Mapping[int, Stored | None] | None = None,
    reads: Sequence[SequenceReads] | None = None,
) -> list[PackedBatch]:
    """Packs of ``groups``, whose members are positions in ``sequences``, as ``rows`` are.

    ``stored`` says of each member what of it is kept, ``reads`` of each what is read of it instead
    of its last token.
    """
    packs = []
    weights = [group.weight for group in groups]
    for chosen in assign(weights, weights, micro_batch_tokens):
        members = [member for index in chosen for member in groups[index].members]
        packs.append(
            PackedBatch.pack(
                [sequences[member] for member in members],
                rows=members
                if reads is None
                else [row for member in members for row in reads[member].rows],
                reads=None
                if reads is None
                else [reads[member].places.tolist() for member in members],
                groups=[groups[index].in_pack for index in chosen],
                stored=None if stored is None else [stored[member] for member in members],
            )
        )
    return packs


@dataclass(frozen=True)
class PrefixGroup:
    """Sequences with a common prefix of ``prefix`` tokens, and what they are in a pack.

    Attributes:
        members: indices of the sequences.
        prefix: tokens that all of them begin with, after what is cached.
        size: tokens to compute.
        cached: cached tokens before the prefix, which are not computed again.
    """

    members: list[int]
    prefix: int
    size: int
    cached: CachedPrefix | None = None

    @property
    def weight(self) -> int:
        """Tokens that it takes of a pack's budget."""
        return _weight(self.size, len(self.members), self.prefix, _length(self.cached))

    @property
    def in_pack(self) -> Group:
        return Group(len(self.members), _length(self.cached) + self.prefix, self.cached)


def _length(cached: CachedPrefix | None) -> int:
    return 0 if cached is None else len(cached.slots)


def _weight(size: int, members: int, prefix: int, known: int) -> int:
    """Tokens to compute, or a share of the keys that are gathered for them, if that is more.

    Only where some are cached: without, keys are bounded by the tokens.
    """
    if not known:
        return size
    keys = size + (members + 1) * (known + prefix)
    return max(size, keys // _KEYS_PER_TOKEN)


def find_prefix_groups(
    sequences: Sequence[Tokens],
    budget: int,
    cached: Mapping[int, CachedPrefix | None] | None = None,
    rotation_by_length: Callable[[int], int] = one_rotation,
) -> list[PrefixGroup]:
    """Group sequences with long common prefixes, at most ``budget`` tokens to a group.

    In the order of their tokens, adjacent ones have the longest prefix in common. One joins the
    group before it if that saves tokens. Of ``cached``, the keys are the positions to group, which
    is all without it, the values what those begin with: groups have one and the same. They also
    have the same ``rotation_by_length``, which is the model's (of ``ModelShape``).
    """
    ordered = _Ordered.of(sequences, cached, rotation_by_length)
    return [
        PrefixGroup(members, prefix, size, ordered.cached[members[0]])
        for members, prefix, size in ordered.runs(budget, len(sequences))
    ]


@dataclass(frozen=True)
class _Ordered:
    """Sequences in the order of what they begin with and of their tokens.

    Attributes:
        positions: where each stood.
        lengths: its tokens that are not cached.
        common: how many of them the one before it begins with, too.
        cached: by position.
    """

    positions: list[int]
    lengths: list[int]
    common: list[int]
    cached: Mapping[int, CachedPrefix | None]

    @classmethod
    def of(
        cls,
        sequences: Sequence[Tokens],
        cached: Mapping[int, CachedPrefix | None] | None = None,
        rotation_by_length: Callable[[int], int] = one_rotation,
    ) -> _Ordered:
        if cached is None:
            cached = dict.fromkeys(range(len(sequences)))
        rests = {
            position: np.asarray(sequences[position])[_length(prefix) :]
            for position, prefix in cached.items()
        }
        # Big-endian, so that bytes are in the order of the tokens.
        keys = {position: rest.astype(">i4").tobytes() for position, rest in rests.items()}
        positions = sorted(cached, key=keys.__getitem__)
        kinds = {
            position: (prefix, rotation_by_length(len(sequences[position])))
            for position, prefix in cached.items()
        }
        beginnings = {kind: number for number, kind in enumerate(dict.fromkeys(kinds.values()))}
        if len(beginnings) > 1:
            # sort is stable: of one beginning they stay in the order of their tokens.
            positions.sort(key=lambda position: beginnings[kinds[position]])
        # Nothing stands before the first; of no sequences there is no first.
        common = [0][: len(positions)]
        for before, own in pairwise(positions):
            is_same = kinds[before] == kinds[own]
            common.append(common_prefix(rests[before], rests[own]) if is_same else 0)
        lengths = [len(rests[position]) for position in positions]
        return cls(positions, lengths, common, cached)

    def runs(self, budget: int, end: int) -> Iterator[tuple[list[int], int, int]]:
        """Members, prefix and size of each group of those before position ``end``.

        Neither counts what is cached.
        """
        members: list[int] = []
        prefix = size = 0
        common = 0  # with the last of the members
        for position, length, with_before in zip(
            self.positions, self.lengths, self.common, strict=True
        ):
            common = min(common, with_before)
            if position >= end:
                continue
            count = len(members)
            joined = min(common, prefix) if count > 1 else common
            if count * joined > (count - 1) * prefix:
                total = size + (count - 1) * prefix + length - count * joined
                known = _length(self.cached[position])
                if _weight(total, count + 1, joined, known) <= budget:
                    members.append(position)
                    prefix, size, common = joined, total, length
                    continue
            if members:
                yield members, prefix, size
            members, prefix, size, common = [position], 0, length, length
        if members:
            yield members, prefix, size

    def fits(self, budget: int, end: int) -> bool:
        """True if the records before position ``end`` fit into one pack."""
        total = 0
        for _, _, size in self.runs(budget, end):
            total += size
            if total > budget:
                return False
        return True


def take_oldest(sequences: Sequence[Tokens], budget: int) -> int:
    """Count the first sequences that fit ``budget`` tokens, common prefixes counted once.

    At least one, and as many as can be found to fit by trying four times as many, then halves.
    Arrays are looked at faster than lists.
    """
    lengths = list(accumulate(map(len, sequences)))
    least = min(len(sequences), max(1, bisect_right(lengths, budget)))
    most = min(len(sequences), budget)  # each has a token of its own
    while least < most:
        tried = min(4 * least, most)
        ordered = _Ordered.of(sequences[:tried])
        if not ordered.fits(budget, tried):
            # Of the first counts above ``least``, so many fit.
            counts = range(least + 1, tried)
            return least + bisect_left(counts, True, key=lambda n: not ordered.fits(budget, n))
        least = tried
    return least


def packed_tokens(sequences: Sequence[Tokens]) -> int:
    """Count the tokens of sequences in one pack, common prefixes counted once."""
    lengths = [len(sequence) for sequence in sequences]
    if len(lengths) < 2:
        return sum(lengths)
    return sum(size for _, _, size in _Ordered.of(sequences).runs(sum(lengths), len(lengths)))


def assign(sizes: Sequence[int], costs: Sequence[float], budget: int) -> list[list[int]]:
    """Indices into ``sizes``, grouped so that no group's sum exceeds ``budget``.

    As few groups as best fit makes, and of even cost where that can be had.
    """
    packs = _best_fit(sizes, budget)
    return _fill(sizes, costs, budget, len(packs)) or packs


def _best_fit(sizes: Sequence[int], budget: int) -> list[list[int]]:
    packs: list[list[int]] = []
    space: list[tuple[int, int]] = []  # (free tokens, pack), sorted
    for index in sorted(range(len(sizes)), key=lambda index: (-sizes[index], index)):
        # The fullest pack with enough space: -1 comes before the number of any.
        fitting = bisect_left(space, (sizes[index], -1))
        if fitting == len(space):
            packs.append([])
            free, pack = budget, len(packs) - 1
        else:
            free, pack = space.pop(fitting)
        packs[pack].append(index)
        insort(space, (free - sizes[index], pack))
    return [sorted(members) for members in packs]


def _fill(
    sizes: Sequence[int], costs: Sequence[float], budget: int, count: int
) -> list[list[int]] | None:
    """``count`` groups, each index where cost is least and space is left; None if there is none."""
    groups: list[list[int]] = [[] for _ in range(count)]
    filled = [0] * count
    spent = [(0.0, group) for group in range(count)]  # a heap
    for index in sorted(range(len(costs)), key=lambda index: (-costs[index], index)):
        full = []
        while spent and filled[spent[0][1]] + sizes[index] > budget:
            full.append(heappop(spent))
        if not spent:
            return None
        cost, group = heappop(spent)
        groups[group].append(index)
        filled[group] += sizes[index]
        # Packs that were too full for this one may have space for a smaller one.
        for entry in (*full, (cost + costs[index], group)):
            heappush(spent, entry)
    return [sorted(members) for members in groups]


# Packs for a critic, in which every token is a record.


@dataclass(frozen=True)
class TokenPacking:
    """Rules by which sequences become packs of at most ``micro_batch_tokens`` tokens, of even work.

    ``query_key_cost`` is that of attention between one query and one key
    (``ModelShape.query_key_cost``).
    """

    micro_batch_tokens: int
    query_key_cost: float = 0.0

    def share(self, lengths: Sequence[int], count: int) -> list[list[int]]:
        """Sequences of each of ``count`` ranks."""
        return share_out([self._cost(length) for length in lengths], count)

    def pack(
        self,
        sequences: Sequence[np.ndarray],
        members: Sequence[int],
        labels: LabelColumns | None = None,
    ) -> list[PackedBatch]:
        """Packs of the sequences that are ``members``; none may exceed the budget.

        Tokens are counted through all ``sequences``: ``rows`` are their numbers, and ``labels`` has
        as many records. The largest pack is the first.
        """
        lengths = [len(sequence) for sequence in sequences]
        starts = np.cumsum([0, *lengths])
        sizes = [lengths[member] for member in members]
        packs = []
        for chosen in assign(sizes, [self._cost(size) for size in sizes], self.micro_batch_tokens):
            own = [members[index] for index in chosen]
            rows = np.concatenate([np.arange(starts[each], starts[each + 1]) for each in own])
            pack = PackedBatch.pack([sequences[each] for each in own])
            packs.append(_with_every_token(pack, torch.from_numpy(rows), labels))
        return sorted(packs, key=lambda pack: -pack.num_tokens)

    def _cost(self, length: int) -> float:
        return length + self.query_key_cost * length * (length + 1) / 2


def _with_every_token(pack: PackedBatch, rows: Tensor, labels: LabelColumns | None) -> PackedBatch:
    count = pack.num_tokens
    every = torch.arange(count + 1)
    own = LabelColumns.none(count) if labels is None else labels.select(rows)
    records = Records(rows, every, every, own, torch.zeros_like(rows), torch.full_like(rows, -1))
    return replace(pack, scored_tokens=every[:-1], rows=rows, records=records)
