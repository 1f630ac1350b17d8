"""Packs hold every record once, whole, under the budget."""

from __future__ import annotations

import random

import pytest
import torch

from nemo_aligner.data.datasets import TokenizedDataset
from nemo_aligner.data.packing import pack_records, pack_sequences
from nemo_aligner.data.records import Origin
from nemo_aligner.errors import DataError


def dataset(lengths: list[int], kind: str = "comparison") -> TokenizedDataset:
    per_record = 2 if kind == "comparison" else 1
    count = len(lengths) // per_record
    return TokenizedDataset(
        kind=kind,
        name="train",
        sequences=[[index] * length for index, length in enumerate(lengths)],
        labels=None if kind == "comparison" else torch.arange(2.0 * count).reshape(count, 2),
        origins=[Origin("a.jsonl", index + 1) for index in range(count)],
        reply_lengths=torch.ones(count, per_record),
        sources=[""] * count,
        reports=[],
        label_means=() if kind == "comparison" else (1.0, 0.5),
    )


@pytest.mark.parametrize("seed", range(5))
def test_every_record_is_packed_once_and_whole(seed: int) -> None:
    rng = random.Random(seed)
    data = dataset([rng.randint(1, 50) for _ in range(200)])
    wanted = rng.sample(range(100), 70)
    packs = pack_records(data, wanted, 120)
    assert sorted(i for pack in packs for i in pack.record_ids.tolist()) == sorted(wanted)
    for pack in packs:
        assert pack.num_tokens <= 120
        assert pack.num_sequences == 2 * pack.num_records
        for place, record in enumerate(pack.record_ids.tolist()):
            for side in (0, 1):
                start, end = pack.cu_seqlens[2 * place + side : 2 * place + side + 2].tolist()
                assert pack.tokens[start:end].tolist() == list(data.record(record)[side])
    assert len(packs) <= sum(data.num_tokens(i) for i in wanted) / 120 / 0.9 + 1
    again = pack_records(data, wanted, 120)
    assert [pack.record_ids.tolist() for pack in again] == [p.record_ids.tolist() for p in packs]


def test_labels_travel_with_their_records_and_are_centred() -> None:
    data = dataset([3, 9, 5, 2], "rating")
    packs = pack_records(data, [3, 0, 1, 2], 10)
    for pack in packs:
        assert pack.labels is not None
        expected = [[2 * i - 1.0, 2 * i + 0.5] for i in pack.record_ids.tolist()]
        assert pack.labels.tolist() == expected


def test_a_record_beyond_the_budget_is_named() -> None:
    with pytest.raises(DataError, match=r"a.jsonl:2: got a record of 11 tokens.*\(10\)"):
        pack_records(dataset([1, 2, 5, 6]), [0, 1], 10)


def test_sequences_know_their_place() -> None:
    sequences = [[7] * length for length in (4, 9, 1, 6, 5)]
    packs = pack_sequences(sequences, 10)
    assert sorted(i for pack in packs for i in pack.record_ids.tolist()) == [0, 1, 2, 3, 4]
    assert [pack.num_tokens for pack in packs] == [10, 10, 5]
    assert pack_sequences([], 10) == []
    for bad in ([7] * 11, []):
        with pytest.raises(DataError, match="sequence 1: got"):
            pack_sequences([[7], bad], 10)
