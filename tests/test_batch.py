"""PackedBatch: positions, bounds, last tokens, filler, and what it refuses."""

from __future__ import annotations

import pytest
import torch

from nemo_aligner.batch import Group, PackedBatch, shared_tokens


def test_pack_lays_sequences_end_to_end() -> None:
    batch = PackedBatch.pack([[7, 8, 9], [5], [6, 6], [4]], [10, 11], 2)
    assert batch.tokens.tolist() == [7, 8, 9, 5, 6, 6, 4]
    assert batch.position_ids.tolist() == [0, 1, 2, 0, 0, 1, 0]
    assert batch.cu_seqlens.tolist() == [0, 3, 4, 6, 7]
    assert batch.cu_seqlens.dtype == torch.int32
    assert batch.last_token.tolist() == [2, 3, 5, 6]
    assert (batch.num_tokens, batch.num_sequences, batch.num_records) == (7, 4, 2)
    assert batch.prefixes.tolist() == [-1] * 4


def test_filler_is_a_segment_that_no_record_owns() -> None:
    batch = PackedBatch.pack([[1, 2, 3]], [0], 1)
    padded = batch.padded_to_multiple(4)
    assert padded.tokens.tolist() == [1, 2, 3, 0]
    assert padded.position_ids.tolist() == [0, 1, 2, 0]
    assert padded.cu_seqlens.tolist() == [0, 3, 4]
    assert padded.last_token.tolist() == [2]
    assert padded.prefixes.tolist() == [-1, -1]
    assert batch.padded_to_multiple(3) is batch


@pytest.mark.parametrize("sequences", [[], [[1], []]])
def test_empty_packs_and_sequences_are_refused(sequences: list[list[int]]) -> None:
    with pytest.raises(ValueError, match="no sequence may be empty"):
        PackedBatch.pack(sequences, range(len(sequences)), 1)


def test_a_split_record_is_refused() -> None:
    with pytest.raises(ValueError, match="3 sequences for 2 records of 2"):
        PackedBatch.pack([[1], [2], [3]], [0, 1], 2)


def test_a_shared_beginning_is_there_once() -> None:
    sequences = [[1, 2, 3, 4], [1, 2, 5], [9, 9], [7]]
    batch = PackedBatch.pack(sequences, [0, 1], 2, groups=[Group(2, 2), Group(2, 0)])
    assert batch.tokens.tolist() == [1, 2, 3, 4, 5, 9, 9, 7]
    assert batch.position_ids.tolist() == [0, 1, 2, 3, 2, 0, 1, 0]
    assert batch.cu_seqlens.tolist() == [0, 2, 4, 5, 7, 8]
    assert batch.prefixes.tolist() == [-1, 0, 0, -1, -1]
    assert batch.last_token.tolist() == [3, 4, 6, 7]
    with pytest.raises(ValueError, match="3 shared tokens leave no last token"):
        PackedBatch.pack(sequences[:2], [0], 2, groups=[Group(2, 3)])


def test_what_is_shared_is_worth_it_and_leaves_a_last_token() -> None:
    begin = list(range(10))
    assert shared_tokens([*begin, 1], [*begin, 2, 3]) == 10
    assert shared_tokens(begin, [*begin, 2]) == 9
    assert shared_tokens(begin, begin) == 9
    assert shared_tokens([*begin[:7], 1], [*begin[:7], 2]) == 0
    assert shared_tokens([1], begin) == 0
    assert shared_tokens(torch.tensor([*begin, 1], dtype=torch.int32), [*begin, 2]) == 10
