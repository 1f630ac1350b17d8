"""Packing: which records, or sequences to score, share a PackedBatch.

Training, validation and evaluation pack the records of a data set (``pack_records``), a server
packs sequences (``pack_sequences``, ``pack_groups``), a critic packs rollouts (``TokenPacking``).

A pack has at most ``model.micro_batch_tokens`` tokens, and a record is never split. Best fit
decreasing (longest record first, into the fullest pack with enough space) gives the number of
packs. The packs are then filled anew, so that each takes about the same work. The result depends
only on the arguments.

A prefix that samples share is stored and computed once in a pack: attention is causal, so its
tokens have the same hidden states in each sample. Prefixes are found by comparing token ids, which
works with every chat template and with raw text.
"""

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

from nemo_aligner.batch.cache_use import CachedPrefix, Stored
from nemo_aligner.batch.packed import Group, LabelColumns, PackedBatch, Records, Tokens
from nemo_aligner.data.dataset import TokenizedDataset
from nemo_aligner.data.tokenize import common_prefix
from nemo_aligner.distributed.collectives import current_device
from nemo_aligner.utils.errors import DataError

# Upper limit of the keys in a pack with cached prefixes, as a multiple of its token budget. It
# bounds the time of attention, where a GPU kernel reads these keys one after the other.
_KEYS_PER_TOKEN = 8
# The same limit without cached prefixes, on GPUs, for memory: attention copies the keys and values
# of a shared prefix for each sample: 4 KiB a key (8 groups of 128 channels, bf16). It is larger,
# because every pack that a group is split into computes the prefix. Up to 31 samples are not split,
# and neither are the samples of a record (``pack_records``).
_UNCACHED_KEYS_PER_TOKEN = 32
# Number of records that ``largest_record`` compares at a time, to bound its memory.
_RECORDS_AT_ONCE = 1 << 18


class RecordSize(NamedTuple):
    """Size of one record in a pack, where the shared prefix of its samples is computed once.

    Attributes:
        tokens: number of tokens, with the prefix counted once.
        rewards: number of rewards of all its samples.
        query_keys: number of (query, key) pairs in causal attention, with the prefix counted once.
    """

    tokens: int
    rewards: int
    query_keys: float


def measure_record(dataset: TokenizedDataset, record: int) -> RecordSize:
    """Measure tokens, rewards and attention of the record at index ``record`` of a data set."""
    lengths, prefix = dataset.lengths(record), int(dataset.prefixes[record])
    copies_saved = len(lengths) - 1
    # Every token attends to itself and to all tokens before it. The prefix is computed once.
    query_keys = sum(length * (length + 1) for length in lengths) / 2
    return RecordSize(
        tokens=sum(lengths) - copies_saved * prefix,
        rewards=dataset.num_rewards(record),
        query_keys=query_keys - copies_saved * prefix * (prefix + 1) / 2,
    )


def packed_size(dataset: TokenizedDataset, record: int) -> int:
    """Count the tokens of one record in a pack, where samples store their shared prefix once."""
    return measure_record(dataset, record).tokens


def largest_record(dataset: TokenizedDataset) -> tuple[int, int]:
    """Find the record with the largest ``packed_size``, the first one if several are equal.

    Returns:
        The index of the record, and its size in tokens; (0, 0) without records.
    """
    # Lengths are differences of offsets, so that the tokens of a memory-mapped file are not read.
    largest = (0, 0)
    bounds, prefixes = dataset.records.sample_bounds.numpy(), dataset.prefixes.numpy()
    for start in range(0, len(dataset), _RECORDS_AT_ONCE):
        part = bounds[start : start + _RECORDS_AT_ONCE + 1]
        totals = np.add.reduceat(dataset.sequences.lengths(part[0], part[-1]), part[:-1] - part[0])
        sizes = totals - (np.diff(part) - 1) * prefixes[start : start + _RECORDS_AT_ONCE]
        index = int(sizes.argmax())
        if sizes[index] > largest[1]:
            largest = start + index, int(sizes[index])
    return largest


def record_cost(dataset: TokenizedDataset, record: int, query_key_cost: float) -> float:
    """Estimate the work of one record, in units of one token's linear layers.

    ``query_key_cost`` is the work of attention between one query and one key, in the same units
    (``ModelShape.query_key_cost``).
    """
    size = measure_record(dataset, record)
    return size.tokens + query_key_cost * size.query_keys


def share_out(costs: Sequence[float], count: int) -> list[list[int]]:
    """Split the indices of ``costs`` into ``count`` parts of about equal sums.

    The largest cost is assigned first, and each cost goes to the part with the smallest sum so far
    (Graham 1969). No part is empty if there are at least ``count`` costs.
    """
    return _fill_groups([0] * len(costs), costs, 0, count) or []


def pack_records(
    dataset: TokenizedDataset,
    record_ids: Sequence[int],
    micro_batch_tokens: int,
    query_key_cost: float = 0.0,
    first_rows: Sequence[int] | None = None,
) -> list[PackedBatch]:
    """Pack records of a data set into packs of at most ``micro_batch_tokens`` tokens.

    Best fit determines the number of packs, and the work (``record_cost``) is balanced over them.
    Records keep their order inside a pack. The largest pack comes first, so that the later ones fit
    into the memory that it used.

    Args:
        first_rows: for each of ``record_ids``, position of its first reward among the rewards of
            the global batch or data set (see ``PackedBatch.rows``); by default the rewards are
            numbered from 0 in the order of ``record_ids``.

    Raises:
        DataError: one record is larger than the budget.
    """
    sizes = [packed_size(dataset, record) for record in record_ids]
    for record, size in zip(record_ids, sizes, strict=True):
        if size > micro_batch_tokens:
            raise DataError(
                f"{dataset.origins[record]}: a record of {size} tokens does not fit into a "
                f"micro-batch of {micro_batch_tokens}. Raise model.micro_batch_tokens, or lower "
                "model.data.seq_length"
            )
    if first_rows is None:
        first_rows = dataset.records.select(record_ids).record_bounds.tolist()
    costs = [record_cost(dataset, record, query_key_cost) for record in record_ids]
    packs = []
    for members in assign(sizes, costs, micro_batch_tokens):
        chosen = [record_ids[member] for member in members]
        packs.append(_pack_chosen(dataset, chosen, [first_rows[member] for member in members]))
    return sorted(packs, key=lambda pack: -pack.num_tokens)


def _pack_chosen(
    dataset: TokenizedDataset, record_ids: Sequence[int], first_rows: Sequence[int]
) -> PackedBatch:
    sequences = [dataset.record(record) for record in record_ids]
    records = dataset.records.select(record_ids)
    counts = records.record_bounds.diff().tolist()
    return PackedBatch.pack(
        [sequence for of_record in sequences for sequence in of_record],
        records,
        [row + n for row, count in zip(first_rows, counts, strict=True) for n in range(count)],
        [
            Group(len(of_record), int(dataset.prefixes[record]))
            for record, of_record in zip(record_ids, sequences, strict=True)
        ],
        reads=[places for record in record_ids for places in dataset.reads(record)],
    )


class SequenceReads(NamedTuple):
    """The tokens of a sequence that the head reads, each of which has one reward.

    Attributes:
        places: ``[s]`` int64 positions of these tokens in the sequence.
        rows: index of each reward among the rewards of all sequences (see ``PackedBatch.rows``).
    """

    places: Tensor
    rows: list[int]

    @classmethod
    def number(cls, places: Sequence[Sequence[int]]) -> list[SequenceReads]:
        """Build a ``SequenceReads`` for each sequence from the token positions that the head reads.

        The rewards of all sequences are numbered from 0, in order; these numbers are their
        ``rows``.
        """
        rows = iter(range(sum(map(len, places))))
        return [
            cls(torch.tensor(positions, dtype=torch.int64), [next(rows) for _ in positions])
            for positions in places
        ]


def uniform_rope(tokens: int) -> int:
    """Return 0 for every length: the default if a model has the same RoPE for all lengths.

    It stands in for ``ModelShape.length_dependent_rope``, which numbers the RoPEs of other models.
    """
    return 0


def pack_sequences(
    sequences: Sequence[Tokens],
    micro_batch_tokens: int,
    reads: Sequence[SequenceReads] | None = None,
    length_dependent_rope: Callable[[int], int] = uniform_rope,
) -> list[PackedBatch]:
    """Pack sequences to score, sharing their common prefixes.

    Args:
        reads: for each sequence, which tokens are read and the rows of their rewards; by default
            the last token, whose row is the index of the sequence.
        length_dependent_rope: maps the length of a sequence to the number of its RoPE; only
            sequences with the same RoPE share a prefix.

    Raises:
        DataError: a sequence is empty or larger than the budget.
    """
    for index, sequence in enumerate(sequences):
        if not 0 < len(sequence) <= micro_batch_tokens:
            raise DataError(
                f"sequence {index} has {len(sequence)} tokens; a micro-batch takes 1 to "
                f"{micro_batch_tokens} (model.micro_batch_tokens)"
            )
    groups = find_prefix_groups(
        sequences, micro_batch_tokens, None, length_dependent_rope, attention_copies_keys()
    )
    return pack_groups(sequences, groups, micro_batch_tokens, reads=reads)


def attention_copies_keys() -> bool:
    """Tell if attention copies the keys of a shared prefix for each sample, as it does on GPUs."""
    return current_device().type == "cuda"


def pack_groups(
    sequences: Sequence[Tokens],
    groups: Sequence[PrefixGroup],
    micro_batch_tokens: int,
    stored: Mapping[int, Stored | None] | None = None,
    reads: Sequence[SequenceReads] | None = None,
) -> list[PackedBatch]:
    """Pack groups of sequences; the sequences of a group are in one pack and share their prefix.

    Args:
        groups: their members are indices of ``sequences``.
        stored: for each member, the tokens whose keys and values to keep in the prefix cache; by
            default none.
        reads: for each sequence, which tokens the head reads; by default only the last one.
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
    """Sequences that share a prefix in a pack.

    Attributes:
        members: indices of the sequences.
        prefix: number of tokens that all sequences share, not counting cached tokens.
        size: number of tokens to compute, with the prefix counted once.
        cached: tokens before the prefix whose keys and values an earlier batch has left in the
            cache; None if there are none.
        weight: number of tokens that the group takes from a pack's budget (``_measure_weight``).
    """

    members: list[int]
    prefix: int
    size: int
    cached: CachedPrefix | None
    weight: int

    @property
    def in_pack(self) -> Group:
        """The group in the form that ``PackedBatch.pack`` takes.

        The prefix of a ``Group`` begins with the cached tokens; ``prefix`` does not count them.
        """
        return Group(len(self.members), _count_cached(self.cached) + self.prefix, self.cached)


def _count_cached(cached: CachedPrefix | None) -> int:
    return 0 if cached is None else len(cached.slots)


def _measure_weight(size: int, members: int, prefix: int, cached: int, copies_keys: bool) -> int:
    """Measure how much of a pack's budget a group takes, in tokens.

    The result is the number of tokens to compute, ``size``. Attention also gathers the keys of the
    prefix for each of the ``members``, so with ``cached`` tokens the result is at least the number
    of keys divided by ``_KEYS_PER_TOKEN``, and without, if it ``copies_keys``, divided by
    ``_UNCACHED_KEYS_PER_TOKEN``.
    """
    if not cached and not copies_keys:
        return size
    keys = size + members * (cached + prefix) + cached
    return max(size, keys // (_KEYS_PER_TOKEN if cached else _UNCACHED_KEYS_PER_TOKEN))


def find_prefix_groups(
    sequences: Sequence[Tokens],
    budget: int,
    cached: Mapping[int, CachedPrefix | None] | None = None,
    length_dependent_rope: Callable[[int], int] = uniform_rope,
    copies_keys: bool = False,
) -> list[PrefixGroup]:
    """Group sequences with long common prefixes, with at most ``budget`` tokens in a group.

    Sequences are sorted by their tokens, so that neighbours share the longest prefixes. A sequence
    joins the group of its left neighbour if that saves tokens.

    Args:
        cached: cached prefix, or None, of each sequence to group, by the index of the sequence. By
            default all sequences are grouped, and none has a cached prefix. The members of a group
            have the same cached prefix.
        length_dependent_rope: maps the length of a sequence to the number of its RoPE
            (``ModelShape``), for models such as LongRoPE. The members of a group have the same
            RoPE, because hidden states of a shared prefix depend on it.
        copies_keys: True to also limit the keys of groups without a cached prefix, for packs whose
            attention copies them.
    """
    ordered = _Ordered.of(sequences, cached, length_dependent_rope)
    groups = []
    for members, prefix, size in ordered.runs(budget, len(sequences), copies_keys):
        stored = ordered.cached[members[0]]
        weight = _measure_weight(size, len(members), prefix, _count_cached(stored), copies_keys)
        groups.append(PrefixGroup(members, prefix, size, stored, weight))
    return groups


@dataclass(frozen=True)
class _Ordered:
    """Sequences sorted by cached prefix, RoPE and tokens.

    Attributes:
        positions: index of each sequence before sorting.
        lengths: number of tokens of each sequence that are not cached.
        common: how many of these tokens each sequence shares with its left neighbour; 0 for the
            first sequence.
        cached: cached prefix of each sequence, by its index before sorting.
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
        length_dependent_rope: Callable[[int], int] = uniform_rope,
    ) -> _Ordered:
        if cached is None:
            cached = dict.fromkeys(range(len(sequences)))
        uncached = {
            position: np.asarray(sequences[position])[_count_cached(prefix) :]
            for position, prefix in cached.items()
        }
        # Sort by the bytes of the tokens, big-endian, so that bytes have the order of the tokens.
        keys = {position: tokens.astype(">i4").tobytes() for position, tokens in uncached.items()}
        positions = sorted(cached, key=keys.__getitem__)
        kinds = {
            position: (prefix, length_dependent_rope(len(sequences[position])))
            for position, prefix in cached.items()
        }
        numbers = {kind: number for number, kind in enumerate(dict.fromkeys(kinds.values()))}
        if len(numbers) > 1:
            # The sort is stable: sequences with the same cached prefix and RoPE stay in the order
            # of their tokens.
            positions.sort(key=lambda position: numbers[kinds[position]])
        # The first sequence shares nothing, because it has no left neighbour. The list stays empty
        # if there are no sequences.
        common = [0][: len(positions)]
        for left, right in pairwise(positions):
            is_same = kinds[left] == kinds[right]
            common.append(common_prefix(uncached[left], uncached[right]) if is_same else 0)
        lengths = [len(uncached[position]) for position in positions]
        return cls(positions, lengths, common, cached)

    def runs(
        self, budget: int, end: int, copies_keys: bool = False
    ) -> Iterator[tuple[list[int], int, int]]:
        """Group neighbours with a shared prefix, among the sequences with an index below ``end``.

        Yields:
            For each group: the indices of its members; the tokens of its shared prefix; and the
            tokens to compute, at most ``budget`` if it has several members. The two numbers of
            tokens do not include cached tokens.
        """
        members: list[int] = []
        prefix = size = 0
        common = 0  # tokens that the next sequence shares with the last member
        for position, length, with_left in zip(
            self.positions, self.lengths, self.common, strict=True
        ):
            common = min(common, with_left)
            if position >= end:
                continue
            count = len(members)
            joined = min(common, prefix) if count > 1 else common
            if count * joined > (count - 1) * prefix:
                total = size + (count - 1) * prefix + length - count * joined
                cached = _count_cached(self.cached[position])
                if _measure_weight(total, count + 1, joined, cached, copies_keys) <= budget:
                    members.append(position)
                    prefix, size, common = joined, total, length
                    continue
            if members:
                yield members, prefix, size
            members, prefix, size, common = [position], 0, length, length
        if members:
            yield members, prefix, size

    def fits(self, budget: int, end: int) -> bool:
        """True if the sequences with an index below ``end`` fit into a pack of ``budget`` tokens.

        Shared prefixes are counted once.
        """
        total = 0
        for _, _, size in self.runs(budget, end):
            total += size
            if total > budget:
                return False
        return True


def count_fitting(sequences: Sequence[Tokens], budget: int) -> int:
    """Count how many of the first sequences fit into one pack of ``budget`` tokens, at least one.

    Tokens of shared prefixes are counted once. The search multiplies the number of sequences by
    four until they do not fit, and then bisects. Sequences are compared faster as arrays than as
    lists.
    """
    lengths = list(accumulate(map(len, sequences)))
    fitting = min(len(sequences), max(1, bisect_right(lengths, budget)))
    # At most ``budget`` sequences fit, as each has a token outside shared prefixes.
    limit = min(len(sequences), budget)
    while fitting < limit:
        tried = min(4 * fitting, limit)
        ordered = _Ordered.of(sequences[:tried])
        if not ordered.fits(budget, tried):
            counts = range(fitting + 1, tried)
            return fitting + bisect_left(counts, True, key=lambda n: not ordered.fits(budget, n))
        fitting = tried
    return fitting


def packed_tokens(sequences: Sequence[Tokens]) -> int:
    """Count the tokens of sequences in one pack, where shared prefixes are stored once."""
    lengths = [len(sequence) for sequence in sequences]
    if len(lengths) < 2:
        return sum(lengths)
    return sum(size for _, _, size in _Ordered.of(sequences).runs(sum(lengths), len(lengths)))


def assign(sizes: Sequence[int], costs: Sequence[float], budget: int) -> list[list[int]]:
    """Distribute items over groups; the sizes in a group add up to at most ``budget``.

    Best fit decreasing determines the number of groups. The items are then distributed anew, so
    that the groups have about the same sum of ``costs``; if that does not fit, the groups of best
    fit are returned.

    Args:
        sizes: size of each item in tokens. An item larger than ``budget`` is alone in its group.
        costs: work of each item, in any unit.

    Returns:
        The indices of the items of each group, ascending.
    """
    packs = _pack_best_fit(sizes, budget)
    return _fill_groups(sizes, costs, budget, len(packs)) or packs


def _pack_best_fit(sizes: Sequence[int], budget: int) -> list[list[int]]:
    packs: list[list[int]] = []
    # (free tokens, index of the pack) of every pack, in ascending order.
    space: list[tuple[int, int]] = []
    for index in sorted(range(len(sizes)), key=lambda index: (-sizes[index], index)):
        # Find the fullest pack with enough space. -1 sorts before all pack numbers.
        fitting = bisect_left(space, (sizes[index], -1))
        if fitting == len(space):
            packs.append([])
            free, pack = budget, len(packs) - 1
        else:
            free, pack = space.pop(fitting)
        packs[pack].append(index)
        insort(space, (free - sizes[index], pack))
    return [sorted(members) for members in packs]


def _fill_groups(
    sizes: Sequence[int], costs: Sequence[float], budget: int, count: int
) -> list[list[int]] | None:
    """Put each index into the cheapest of ``count`` groups that has space left for it.

    Returns:
        The groups; None if no group has space left for one of the indices.
    """
    groups: list[list[int]] = [[] for _ in range(count)]
    filled = [0] * count
    spent = [(0.0, group) for group in range(count)]  # a heap of (cost so far, index of the group)
    for index in sorted(range(len(costs)), key=lambda index: (-costs[index], index)):
        full = []
        while spent and filled[spent[0][1]] + sizes[index] > budget:
            full.append(heappop(spent))
        if not spent:
            return None
        cost, group = heappop(spent)
        groups[group].append(index)
        filled[group] += sizes[index]
        # Groups that were too full for this index may have space for a smaller one.
        for entry in (*full, (cost + costs[index], group)):
            heappush(spent, entry)
    return [sorted(members) for members in groups]


# Packs for a critic, where every token is a record with one reward.


@dataclass(frozen=True)
class TokenPacking:
    """Splits a critic's sequences over ranks, and packs them; every token has a reward, its value.

    A pack has at most ``micro_batch_tokens`` tokens. ``query_key_cost`` is the work of attention
    between one query and one key, in units of one token's linear layers
    (``ModelShape.query_key_cost``).
    """

    micro_batch_tokens: int
    query_key_cost: float = 0.0

    def share(self, lengths: Sequence[int], count: int) -> list[list[int]]:
        """Split sequences with these ``lengths`` over ``count`` ranks, with about equal work.

        Returns:
            For each rank, the indices of its sequences.
        """
        return share_out([self._get_cost(length) for length in lengths], count)

    def pack(
        self,
        sequences: Sequence[np.ndarray],
        members: Sequence[int],
        labels: LabelColumns | None = None,
    ) -> list[PackedBatch]:
        """Pack the sequences at the indices ``members``, none of which exceeds the budget.

        All tokens of all ``sequences`` are numbered in order: these numbers are the ``rows`` of the
        packs, and ``labels`` has a row for each. The largest pack comes first.
        """
        lengths = [len(sequence) for sequence in sequences]
        starts = np.cumsum([0, *lengths])
        sizes = [lengths[member] for member in members]
        packs = []
        for chosen in assign(
            sizes, [self._get_cost(size) for size in sizes], self.micro_batch_tokens
        ):
            packed = [members[index] for index in chosen]
            rows = np.concatenate([np.arange(starts[n], starts[n + 1]) for n in packed])
            pack = PackedBatch.pack([sequences[member] for member in packed])
            packs.append(_score_every_token(pack, torch.from_numpy(rows), labels))
        return sorted(packs, key=lambda pack: -pack.num_tokens)

    def _get_cost(self, length: int) -> float:
        return length + self.query_key_cost * length * (length + 1) / 2


def _score_every_token(pack: PackedBatch, rows: Tensor, labels: LabelColumns | None) -> PackedBatch:
    count = pack.num_tokens
    bounds = torch.arange(count + 1)
    labels = LabelColumns.none(count) if labels is None else labels.select(rows)
    ranks, lengths = torch.zeros_like(rows), torch.full_like(rows, -1)
    records = Records(rows, bounds, bounds, labels, ranks, lengths)
    return replace(pack, scored_tokens=bounds[:-1], rows=rows, records=records)
