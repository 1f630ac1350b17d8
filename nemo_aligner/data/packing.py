"""Records into PackedBatches under a token budget; a record is never split.

Best fit, longest record first: of the packs with room enough, the one with the least. The result
depends on nothing but the arguments.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence

from torch import Tensor

from nemo_aligner.batch import PackedBatch
from nemo_aligner.data.datasets import TokenizedDataset
from nemo_aligner.errors import DataError


def pack_records(
    dataset: TokenizedDataset, record_ids: Sequence[int], micro_batch_tokens: int
) -> list[PackedBatch]:
    """Packs of at most ``micro_batch_tokens`` tokens that hold every record of ``record_ids`` once.

    Labels are minus the dataset's ``label_means``. Records keep their order inside a pack.

    Raises:
        DataError: a record alone is larger than the budget.
    """
    sizes = [dataset.num_tokens(record) for record in record_ids]
    for record, size in zip(record_ids, sizes, strict=True):
        if size > micro_batch_tokens:
            raise DataError(
                f"{dataset.origins[record]}: got a record of {size} tokens, wanted at most "
                f"model.micro_batch_tokens ({micro_batch_tokens})"
            )
    packs = []
    for members in _assign(sizes, micro_batch_tokens):
        records = [record_ids[member] for member in members]
        packs.append(
            PackedBatch.pack(
                [sequence for record in records for sequence in dataset.record(record)],
                records,
                dataset.sequences_per_record,
                dataset.centred_labels(records),
            )
        )
    return packs


def pack_sequences(
    sequences: Sequence[Sequence[int] | Tensor], micro_batch_tokens: int
) -> list[PackedBatch]:
    """Packs of single sequences to score; ``record_ids`` are positions in ``sequences``.

    Raises:
        DataError: a sequence alone is larger than the budget, or empty.
    """
    sizes = [len(sequence) for sequence in sequences]
    for index, size in enumerate(sizes):
        if not 0 < size <= micro_batch_tokens:
            raise DataError(
                f"sequence {index}: got {size} tokens, wanted 1 to model.micro_batch_tokens "
                f"({micro_batch_tokens})"
            )
    return [
        PackedBatch.pack([sequences[member] for member in members], members, 1)
        for members in _assign(sizes, micro_batch_tokens)
    ]


def _assign(sizes: Sequence[int], budget: int) -> list[list[int]]:
    """Indices into ``sizes``, grouped so that no group's sum exceeds ``budget``."""
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
