"""Records into PackedBatches under a token budget; a record is never split.

As few packs as best fit makes (longest record first: of the packs with space enough, the one with
the least), then filled anew so that each is the same work. The result depends on nothing but the
arguments.

What the replies of a record begin with, or several texts to score, is in a pack once: as attention
is causal, the tokens of a common prefix have the same states in each. Equal token ids decide, so it
holds for every template and for raw text.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heappop, heappush

import numpy as np
from torch import Tensor

from nemo_aligner.batch import Group, PackedBatch, common_prefix
from nemo_aligner.data.dataset import TokenizedDataset
from nemo_aligner.errors import DataError


def packed_size(dataset: TokenizedDataset, record: int) -> int:
    """Tokens of one record in a pack, with the prefix of its sequences counted once."""
    repeats = len(dataset.record(record)) - 1
    return dataset.num_tokens(record) - repeats * int(dataset.prefixes[record])


def record_cost(dataset: TokenizedDataset, record: int, query_key_cost: float) -> float:
    """The work of one record, in tokens through the linear layers.

    ``query_key_cost`` is that of attention between one query and one key
    (``ModelShape.query_key_cost``).
    """
    lengths = [len(sequence) for sequence in dataset.record(record)]
    prefix = int(dataset.prefixes[record])
    # Every token sees itself and all before it; the prefix attends once.
    query_keys = sum(length * (length + 1) for length in lengths) / 2
    query_keys -= (len(lengths) - 1) * prefix * (prefix + 1) / 2
    return packed_size(dataset, record) + query_key_cost * query_keys


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
        first_rows = dataset.records.select(record_ids).bounds.tolist()
    costs = [record_cost(dataset, record, query_key_cost) for record in record_ids]
    packs = []
    for members in _assign(sizes, costs, micro_batch_tokens):
        chosen = [record_ids[member] for member in members]
        packs.append(_pack(dataset, chosen, [first_rows[member] for member in members]))
    return sorted(packs, key=lambda pack: -pack.num_tokens)


def _pack(
    dataset: TokenizedDataset, record_ids: Sequence[int], first_rows: Sequence[int]
) -> PackedBatch:
    of_record = [dataset.record(record) for record in record_ids]
    return PackedBatch.pack(
        [sequence for sequences in of_record for sequence in sequences],
        dataset.records.select(record_ids),
        [row + n for row, own in zip(first_rows, of_record, strict=True) for n in range(len(own))],
        [
            Group(len(own), int(dataset.prefixes[record]))
            for record, own in zip(record_ids, of_record, strict=True)
        ],
    )


def pack_sequences(
    sequences: Sequence[Sequence[int] | Tensor], micro_batch_tokens: int
) -> list[PackedBatch]:
    """Packs of single sequences to score; ``rows`` are positions in ``sequences``.

    Raises:
        DataError: a sequence alone is larger than the budget, or empty.
    """
    for index, sequence in enumerate(sequences):
        if not 0 < len(sequence) <= micro_batch_tokens:
            raise DataError(
                f"sequence {index}: got {len(sequence)} tokens, wanted 1 to "
                f"model.micro_batch_tokens ({micro_batch_tokens})"
            )
    found = _find_prefix_groups(sequences, micro_batch_tokens)
    packs = []
    sizes = [each.size for each in found]
    for chosen in _assign(sizes, sizes, micro_batch_tokens):
        members = [member for index in chosen for member in found[index].members]
        groups = [Group(len(found[index].members), found[index].prefix) for index in chosen]
        packs.append(PackedBatch.pack([sequences[m] for m in members], rows=members, groups=groups))
    return packs


def take_oldest(sequences: Sequence[Sequence[int]], budget: int) -> int:
    total = 0
    for count, sequence in enumerate(sequences):
        total += len(sequence)
        if total > budget:
            return max(1, count)
    return len(sequences)


@dataclass(frozen=True)
class _PrefixGroup:
    """Sequences with a common prefix of ``prefix`` tokens, and their tokens in a pack."""

    members: list[int]
    prefix: int
    size: int


def _find_prefix_groups(
    sequences: Sequence[Sequence[int] | Tensor], budget: int
) -> list[_PrefixGroup]:
    """All sequences, those with a long common prefix together, in groups of at most ``budget``.

    In the order of their tokens, adjacent ones have the longest prefix in common. One joins the
    group before it if that saves tokens.
    """
    # Big-endian, so that bytes are in the order of the tokens.
    keys = [np.asarray(sequence).astype(">i4").tobytes() for sequence in sequences]
    groups: list[_PrefixGroup] = []
    for index in sorted(range(len(sequences)), key=lambda index: keys[index]):
        joined = _join(groups[-1], index, sequences) if groups else None
        if joined is not None and joined.size <= budget:
            groups[-1] = joined
        else:
            groups.append(_PrefixGroup([index], 0, len(sequences[index])))
    return groups


def _join(
    group: _PrefixGroup, index: int, sequences: Sequence[Sequence[int] | Tensor]
) -> _PrefixGroup | None:
    """The group with one more member, or None if that saves nothing."""
    size, own = len(group.members), sequences[index]
    prefix = common_prefix(sequences[group.members[0]], own)
    if size > 1:
        prefix = min(prefix, group.prefix)
    if size * prefix <= (size - 1) * group.prefix:
        return None
    total = group.size + (size - 1) * group.prefix + len(own) - size * prefix
    return _PrefixGroup([*group.members, index], prefix, total)


def _assign(sizes: Sequence[int], costs: Sequence[float], budget: int) -> list[list[int]]:
    """Indices into ``sizes``, grouped so that no group's sum exceeds ``budget``.

    As few groups as best fit makes, and of even cost where that can be had.
    """
    packs = _best_fit(sizes, budget)
    return _fill(sizes, costs, budget, len(packs)) or packs


def _best_fit(sizes: Sequence[int], budget: int) -> list[list[int]]:
    packs: list[list[int]] = []
    space: list[tuple[int, int]] = []  # (free tokens, pack), sorted
    for index in sorted(range(len(sizes)), key=lambda index: (-sizes[index], index)):
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
        for entry in (*full, (cost + costs[index], group)):
            heappush(spent, entry)
    return [sorted(members) for members in groups]
