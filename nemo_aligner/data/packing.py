"""Records into PackedBatches under a token budget; a record is never split.

As few packs as best fit makes (longest record first: of the packs with room enough, the one with
the least), then filled anew so that each is the same work. The result depends on nothing but the
arguments.

What the two sides of a comparison begin with, or several texts to score, is in a pack once: as
attention is causal, those tokens have the same states in each. Equal token ids decide, so it holds
for every template and for raw text.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heappop, heappush

import numpy as np
from torch import Tensor

from nemo_aligner.batch import Group, PackedBatch, shared_tokens
from nemo_aligner.data.dataset import TokenizedDataset
from nemo_aligner.errors import DataError


def packed_size(dataset: TokenizedDataset, record: int) -> int:
    """Tokens of one record in a pack, with what its sides share counted once."""
    return dataset.num_tokens(record) - int(dataset.shared[record])


def record_cost(dataset: TokenizedDataset, record: int, pair_cost: float) -> float:
    """The work of one record, in tokens through the linear layers.

    ``pair_cost`` is that of attention between one query and one key (``ModelShape.pair_cost``).
    """
    lengths = [len(sequence) for sequence in dataset.record(record)]
    shared = int(dataset.shared[record])
    # Every token sees itself and all before it; what is shared looks but once.
    pairs = sum(length * (length + 1) for length in lengths) / 2
    pairs -= (len(lengths) - 1) * shared * (shared + 1) / 2
    return packed_size(dataset, record) + pair_cost * pairs


def share_out(costs: Sequence[float], shares: int) -> list[list[int]]:
    """Indices into ``costs``, split so that the shares' sums are near each other.

    Largest first, each to the share that has least (Graham 1969); none is empty where there are
    costs enough.
    """
    return _fill([0] * len(costs), costs, 0, shares) or []


def pack_records(
    dataset: TokenizedDataset,
    record_ids: Sequence[int],
    micro_batch_tokens: int,
    pair_cost: float = 0.0,
) -> list[PackedBatch]:
    """Packs of at most ``micro_batch_tokens`` tokens that hold every record of ``record_ids`` once.

    No more packs than best fit needs, with work as even as ``record_cost`` tells. Labels are minus
    the dataset's ``label_means``. Records keep their order inside a pack. The largest pack is the
    first: the next ones fit into the memory that it leaves.

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
    costs = [record_cost(dataset, record, pair_cost) for record in record_ids]
    packs = []
    for members in _assign(sizes, costs, micro_batch_tokens):
        records = [record_ids[member] for member in members]
        packs.append(
            PackedBatch.pack(
                [sequence for record in records for sequence in dataset.record(record)],
                records,
                dataset.sequences_per_record,
                dataset.centred_labels(records),
                [Group(dataset.sequences_per_record, int(dataset.shared[id])) for id in records],
            )
        )
    return sorted(packs, key=lambda pack: -pack.num_tokens)


def pack_sequences(
    sequences: Sequence[Sequence[int] | Tensor], micro_batch_tokens: int
) -> list[PackedBatch]:
    """Packs of single sequences to score; ``record_ids`` are positions in ``sequences``.

    Raises:
        DataError: a sequence alone is larger than the budget, or empty.
    """
    for index, sequence in enumerate(sequences):
        if not 0 < len(sequence) <= micro_batch_tokens:
            raise DataError(
                f"sequence {index}: got {len(sequence)} tokens, wanted 1 to "
                f"model.micro_batch_tokens ({micro_batch_tokens})"
            )
    families = _find_families(sequences, micro_batch_tokens)
    packs = []
    sizes = [family.size for family in families]
    for chosen in _assign(sizes, sizes, micro_batch_tokens):
        members = [member for place in chosen for member in families[place].members]
        groups = [Group(len(families[place].members), families[place].shared) for place in chosen]
        packs.append(
            PackedBatch.pack([sequences[member] for member in members], members, 1, None, groups)
        )
    return packs


@dataclass(frozen=True)
class _Family:
    """Sequences that share a beginning of ``shared`` tokens, and their tokens in a pack."""

    members: list[int]
    shared: int
    size: int


def _find_families(sequences: Sequence[Sequence[int] | Tensor], budget: int) -> list[_Family]:
    """All sequences, those with much in common together; no family is larger than ``budget``.

    In the order of their tokens, neighbours have the most in common. One joins the family before it
    if that saves tokens.
    """
    # Big-endian, so that bytes are in the order of the tokens.
    keys = [np.asarray(sequence).astype(">i4").tobytes() for sequence in sequences]
    families: list[_Family] = []
    for index in sorted(range(len(sequences)), key=lambda index: keys[index]):
        joined = _join(families[-1], index, sequences) if families else None
        if joined is not None and joined.size <= budget:
            families[-1] = joined
        else:
            families.append(_Family([index], 0, len(sequences[index])))
    return families


def _join(
    family: _Family, index: int, sequences: Sequence[Sequence[int] | Tensor]
) -> _Family | None:
    """The family with one more member, or None if that saves nothing."""
    size, own = len(family.members), sequences[index]
    shared = shared_tokens(sequences[family.members[0]], own)
    if size > 1:
        shared = min(shared, family.shared)
    if size * shared <= (size - 1) * family.shared:
        return None
    total = family.size + (size - 1) * family.shared + len(own) - size * shared
    return _Family([*family.members, index], shared, total)


def _assign(sizes: Sequence[int], costs: Sequence[float], budget: int) -> list[list[int]]:
    """Indices into ``sizes``, grouped so that no group's sum exceeds ``budget``.

    As few groups as best fit makes, and of even cost where that can be had.
    """
    packs = _best_fit(sizes, budget)
    return _fill(sizes, costs, budget, len(packs)) or packs


def _best_fit(sizes: Sequence[int], budget: int) -> list[list[int]]:
    packs: list[list[int]] = []
    room: list[tuple[int, int]] = []  # (free tokens, pack), sorted
    for index in sorted(range(len(sizes)), key=lambda index: (-sizes[index], index)):
        place = bisect_left(room, (sizes[index], -1))
        if place == len(room):
            packs.append([])
            free, pack = budget, len(packs) - 1
        else:
            free, pack = room.pop(place)
        packs[pack].append(index)
        insort(room, (free - sizes[index], pack))
    return [sorted(members) for members in packs]


def _fill(
    sizes: Sequence[int], costs: Sequence[float], budget: int, count: int
) -> list[list[int]] | None:
    """``count`` groups, each index where cost is least and room is left; None if there is none."""
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
