"""Which pairs ranked completions make, and how much each of them counts."""

from __future__ import annotations

import pytest
import torch

from nemo_aligner.batch import Records
from nemo_aligner.pairs import PairRows


def ranked(*ranks: list[int]) -> Records:
    flat = torch.tensor([rank for own in ranks for rank in own])
    return Records.of(range(len(ranks)), [len(own) for own in ranks], ranks=flat)


def listed(pairs: PairRows, rewards: int) -> list[tuple[int, int]]:
    better, worse = pairs.of(torch.arange(rewards))
    return list(zip(better.tolist(), worse.tolist(), strict=True))


def test_pairs_in_order_are_seen_without_an_index() -> None:
    pairs = Records.of([5, 3], [2, 2]).pairs()
    assert isinstance(pairs.better, slice)
    assert listed(pairs, 4) == [(0, 1), (2, 3)]
    assert pairs.of_records(torch.tensor([7, 8])).tolist() == [7, 8]
    total, count = pairs.sum_and_count(torch.tensor([1.0, 5.0]))
    assert (float(total), int(count)) == (6.0, 2)


def test_all_pairs_of_a_record_count_as_one_record() -> None:
    pairs = ranked([0, 1, 2], [1, 0], [0]).pairs()
    assert listed(pairs, 6) == [(0, 1), (0, 2), (1, 2), (4, 3)]
    assert pairs.of_records(torch.tensor([7, 8, 9])).tolist() == [7, 7, 7, 8]
    total, count = pairs.sum_and_count(torch.tensor([1.0, 2.0, 6.0, 10.0]))
    assert (float(total), int(count)) == (pytest.approx(3.0 + 10.0), 2)


def test_tied_completions_are_a_pair_only_where_ties_are_wanted() -> None:
    records = ranked([1, 0, 1], [0, 0])
    assert listed(records.pairs(), 5) == [(1, 0), (1, 2)]
    assert records.pairs().num_records == 1
    pairs = records.pairs(with_ties=True)
    assert listed(pairs, 5) == [(1, 0), (0, 2), (1, 2), (3, 4)]
    assert pairs.are_ties is not None
    assert pairs.are_ties.tolist() == [False, True, False, True]
    assert pairs.shares is not None
    assert pairs.shares.tolist() == [pytest.approx(1 / 3)] * 3 + [1.0]


def test_records_that_were_selected_keep_their_ranks() -> None:
    records = ranked([0, 1], [2, 0, 1]).select([1])
    assert records.ranks.tolist() == [2, 0, 1]


def test_no_records_make_no_pairs() -> None:
    for records in (Records.of([], []), Records.of([0], [1])):
        pairs = records.pairs()
        assert listed(pairs, records.num_rewards) == []
        total, count = pairs.sum_and_count(torch.zeros(0))
        assert (float(total), int(count)) == (0.0, 0)
