"""PackedBatch: positions, bounds, last tokens, filler, and what it refuses."""

from __future__ import annotations

import pytest
import torch

from nemo_aligner.batch import Group, LabelColumns, PackedBatch, Records, common_prefix


def test_pack_lays_sequences_end_to_end() -> None:
    batch = PackedBatch.pack([[7, 8, 9], [5], [6, 6], [4]], Records.of([10, 11], [2, 2]))
    assert batch.tokens.tolist() == [7, 8, 9, 5, 6, 6, 4]
    assert batch.position_ids.tolist() == [0, 1, 2, 0, 0, 1, 0]
    assert batch.cu_seqlens.tolist() == [0, 3, 4, 6, 7]
    assert batch.cu_seqlens.dtype == torch.int32
    assert batch.scored_tokens.tolist() == [2, 3, 5, 6]
    assert (batch.num_tokens, batch.records.num_rewards, len(batch.records)) == (7, 4, 2)
    assert batch.rows.tolist() == [0, 1, 2, 3]
    assert batch.prefixes.tolist() == [-1] * 4


def test_filler_is_a_segment_that_no_record_owns() -> None:
    batch = PackedBatch.pack([[1, 2, 3]])
    padded = batch.padded_to_multiple(4)
    assert padded.tokens.tolist() == [1, 2, 3, 0]
    assert padded.position_ids.tolist() == [0, 1, 2, 0]
    assert padded.cu_seqlens.tolist() == [0, 3, 4]
    assert padded.scored_tokens.tolist() == [2]
    assert padded.prefixes.tolist() == [-1, -1]
    assert batch.padded_to_multiple(3) is batch


@pytest.mark.parametrize("sequences", [[], [[1], []]])
def test_empty_packs_and_sequences_are_refused(sequences: list[list[int]]) -> None:
    with pytest.raises(ValueError, match="no sequence may be empty"):
        PackedBatch.pack(sequences)


def test_a_split_record_is_refused() -> None:
    with pytest.raises(ValueError, match="got 3 sequences, wanted 4, those of 2 records"):
        PackedBatch.pack([[1], [2], [3]], Records.of([0, 1], [2, 2]))


def test_a_common_prefix_is_there_once() -> None:
    sequences = [[1, 2, 3, 4], [1, 2, 5], [9, 9], [7]]
    batch = PackedBatch.pack(
        sequences, Records.of([0, 1], [2, 2]), groups=[Group(2, 2), Group(2, 0)]
    )
    assert batch.tokens.tolist() == [1, 2, 3, 4, 5, 9, 9, 7]
    assert batch.position_ids.tolist() == [0, 1, 2, 3, 2, 0, 1, 0]
    assert batch.cu_seqlens.tolist() == [0, 2, 4, 5, 7, 8]
    assert batch.prefixes.tolist() == [-1, 0, 0, -1, -1]
    assert batch.scored_tokens.tolist() == [3, 4, 6, 7]
    with pytest.raises(ValueError, match="a prefix of 3 tokens leaves no last token"):
        PackedBatch.pack(sequences[:2], Records.of([0], [2]), groups=[Group(2, 3)])


def test_a_prefix_is_worth_a_segment_and_leaves_a_last_token() -> None:
    begin = list(range(10))
    assert common_prefix([*begin, 1], [*begin, 2, 3]) == 10
    assert common_prefix(begin, [*begin, 2]) == 9
    assert common_prefix(begin, begin) == 9
    assert common_prefix([*begin[:7], 1], [*begin[:7], 2]) == 0
    assert common_prefix([1], begin) == 0
    assert common_prefix(torch.tensor([*begin, 1], dtype=torch.int32), [*begin, 2]) == 10


def test_records_own_any_number_of_rewards() -> None:
    labels = LabelColumns.of(["a"], torch.tensor([[1.0], [2.0], [3.0]]))
    records = Records.of([7, 8, 9], [2, 1, 3], labels)
    assert records.bounds.tolist() == [0, 2, 3, 6]
    assert (len(records), records.num_rewards) == (3, 6)
    assert records.rows([2, 0]).tolist() == [3, 4, 5, 0, 1]
    assert records.rows([]).tolist() == []
    chosen = records.select([2, 0])
    assert (chosen.ids.tolist(), chosen.bounds.tolist()) == ([9, 7], [0, 3, 5])
    assert chosen.labels.values.tolist() == [[3.0], [1.0]]


def test_pairs_and_single_texts_are_two_cases_of_records() -> None:
    rewards = torch.arange(4.0)[:, None]
    pairs = Records.of([0, 1], [2, 2])
    assert pairs.as_pairs(rewards)[:, :, 0].tolist() == [[0, 1], [2, 3]]
    assert Records.of(range(4), [1] * 4).as_single(rewards) is not None
    for sizes, read in (([3, 1], pairs.as_pairs), ([2, 2], pairs.as_single)):
        records = Records.of([0, 1], sizes)
        with pytest.raises(ValueError, match=r"got records of .* rewards, wanted"):
            getattr(records, read.__name__)(rewards)


def test_label_columns_know_their_names_and_whether_they_are_centred() -> None:
    values = torch.tensor([[1.0, 10.0], [float("nan"), 30.0]])
    labels = LabelColumns.of(["help", "margin"], values).centred_on({"help": 0.5})
    assert labels.means == (0.5, None)
    assert labels.targets(["margin", "help"])[0].tolist() == [10.0, 0.5]
    assert labels.targets(["margin"]).tolist() == [[10.0], [30.0]]
    assert bool(labels.targets(["help"])[1].isnan())
    assert labels.measured_means() == (1.0, 20.0)
    with pytest.raises(KeyError, match="wanted 'length'"):
        labels.targets(["length"])
    assert LabelColumns.none(3).values.shape == (3, 0)


def test_a_pack_knows_where_its_rewards_belong() -> None:
    records = Records.of([4, 2], [2, 1])
    batch = PackedBatch.pack([[1], [2], [3]], records, rows=[5, 6, 0])
    assert batch.rows.tolist() == [5, 6, 0]
    assert batch.to("cpu").records.ids.tolist() == [4, 2]
