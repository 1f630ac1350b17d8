"""The records of a step depend on its number alone, with any layout and file weights."""

from __future__ import annotations

import random
from collections import Counter
from itertools import chain
from typing import Any

import pytest

from nemo_aligner.data.dataset import EpochOrder, weighted_order
from nemo_aligner.data.packing import pack_records
from nemo_aligner.data.training_data import TrainLoader, validation_batches
from nemo_aligner.utils.errors import ConfigError
from tests.data.test_packing import dataset, ids_of

DATA = dataset([3] * 20)


def loader(rank: int = 0, size: int = 1, gbs: int = 4, seed: int = 5) -> TrainLoader:
    return TrainLoader(DATA, gbs, 30, seed, rank, size)


def test_order_of_every_epoch_is_a_permutation_of_its_own() -> None:
    stream = [record for step in range(15) for record in loader().global_batch(step)]
    epochs = [stream[start : start + 10] for start in range(0, 60, 10)]
    assert all(sorted(epoch) == list(range(10)) for epoch in epochs)
    assert len(set(map(tuple, epochs))) == 6
    other = [record for step in range(15) for record in loader(seed=6).global_batch(step)]
    assert other != stream


def test_order_never_changes() -> None:
    """A run of an earlier version continues with the same records."""
    assert loader().global_batch(0) == [2, 6, 5, 9]
    assert loader().global_batch(3) == [8, 1, 6, 2]
    assert loader(seed=2**32 + 5).global_batch(0) == [8, 5, 2, 1]
    assert loader(seed=2**40).global_batch(5) == [0, 6, 9, 2]
    assert loader(seed=2**31 + 5).global_batch(0) == [8, 3, 2, 9]


def test_step_is_shared_by_ranks_without_overlap() -> None:
    for step in range(6):
        rank_shares = [list(chain(*ids_of(loader(rank, 3).plan(step).packs))) for rank in range(3)]
        assert all(rank_shares)
        assert Counter(chain(*rank_shares)) == Counter(loader().global_batch(step))
    # Each rank needs one record.
    plans = [loader(rank, 4).plan(0) for rank in range(4)]
    assert sorted(plans[0].owners) == [0, 1, 2, 3]
    assert all(len(plan.packs) == 1 for plan in plans)
    with pytest.raises(ConfigError, match="global_batch_size: got 4, wanted at least 5"):
        loader(0, 5)


def test_step_needs_no_history_and_packs_made_ahead_are_its_own() -> None:
    ahead, anew = loader(), [loader().plan(step) for step in (3, 4, 5, 9)]
    for step, wanted in zip((3, 4, 5, 9), anew, strict=True):
        assert ids_of(ahead.plan(step).packs) == ids_of(wanted.packs)
        assert ahead.global_batch(step) == wanted.record_ids


def test_plan_has_the_packs_of_what_its_rank_owns_with_the_rows_of_the_step() -> None:
    """A record that occurs several times in a step has different rows each time."""
    rng = random.Random(0)
    data = dataset([rng.randint(1, 200) for _ in range(40)])
    plans = [TrainLoader(data, 64, 1000, 5, rank, 8, 0.01).plan(0) for rank in range(8)]
    assert Counter(plans[0].record_ids).most_common()[0][1] == 4
    for rank, plan in enumerate(plans):
        assert plan.owners == plans[0].owners
        assert plan.record_ids == plans[0].record_ids
        mine = [index for index, owner in enumerate(plan.owners) if owner == rank]
        rows = [row for pack in plan.packs for row in pack.rows.tolist()]
        assert sorted(rows) == [2 * index + side for index in mine for side in (0, 1)]
        for pack in plan.packs:
            records = [plan.record_ids[row // 2] for row in pack.rows.tolist()[::2]]
            assert records == pack.records.ids.tolist()
    assert plans[0].owners != [index % 8 for index in range(64)]


def test_total_steps_counts_full_batches() -> None:
    assert loader().total_steps(1) == 2
    assert loader().total_steps(2) == 5
    assert loader().total_steps(2, max_steps=3) == 3
    assert loader().total_steps(2, max_steps=30) == 5
    assert loader(gbs=20).total_steps(2) == loader(gbs=10).total_steps(1) == 1
    with pytest.raises(ConfigError, match="global_batch_size: got 20, wanted at most 10"):
        loader(gbs=20).total_steps(1)


def test_validation_sees_every_record_once() -> None:
    for size in (1, 3, 12):
        seen = [
            record
            for rank in range(size)
            for pack in validation_batches(DATA, 30, rank, size)
            for record in pack.records.ids.tolist()
        ]
        assert sorted(seen) == list(range(10))
    assert validation_batches(DATA, 30, 11, 12) == []


def test_imbalance_is_that_of_the_largest_part_to_the_mean_one() -> None:
    # Records of 10, 6, 4 and 4 tokens: 10 + 4 for one rank, 6 + 4 for the other.
    data = dataset([6, 4, 3, 3, 2, 2, 2, 2])
    found = TrainLoader(data, 4, 10, 5, 0, 2).imbalance(range(2))
    assert found.ranks == pytest.approx(14 / 12)
    # The first rank has packs of 10 and of 4, the second one of 10.
    assert found.micro_batches == pytest.approx((10 / 7 + 1) / 2)
    # Many records are balanced.
    rng = random.Random(0)
    many = dataset([rng.randint(1, 200) for _ in range(400)])
    even = TrainLoader(many, 64, 1000, 5, 0, 4, query_key_cost=0.01).imbalance(range(3))
    assert 1 <= even.ranks < 1.02
    assert 1 <= even.micro_batches < 1.1
    # With the cost of attention; both ranks compute the same value.
    looks = TrainLoader(data, 4, 24, 5, 1, 2, query_key_cost=0.5).imbalance(range(1))
    costs = [n + 0.5 * looked for n, looked in ((10, 31), (6, 12), (4, 6), (4, 6))]
    assert looks.ranks == pytest.approx(max(costs[0], sum(costs[1:])) / (sum(costs) / 2))
    assert looks.micro_batches == 1


def test_step_to_come_is_packed_once_and_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    packed, data = [], dataset([3] * 20)

    def counting(of: Any, record_ids: Any, *rest: Any) -> Any:
        # A thread of an earlier test's loader may still be packing.
        if of is data:
            packed.append(tuple(record_ids))
        return pack_records(of, record_ids, *rest)

    monkeypatch.setattr("nemo_aligner.data.training_data.pack_records", counting)
    ahead = TrainLoader(data, 4, 30, 5, 0, 1)
    for step in range(4):
        ahead.plan(step)
    ahead._packer.shutdown()
    assert packed == [tuple(loader().global_batch(step)) for step in range(5)]


def test_validation_is_packed_by_the_cost_of_its_records() -> None:
    # A long record has as many tokens as two of half its size, but more attention.
    data = dataset([30, 30, 15, 15, 15, 15, 1, 1])
    by_tokens = [validation_batches(data, 100, rank, 2) for rank in (0, 1)]
    by_query_keys = [validation_batches(data, 100, rank, 2, query_key_cost=1.0) for rank in (0, 1)]
    assert [sorted(chain(*ids_of(packs))) for packs in by_tokens] == [[0, 3], [1, 2]]
    assert [sorted(chain(*ids_of(packs))) for packs in by_query_keys] == [[0], [1, 2, 3]]
    for packs in (*by_tokens, *by_query_keys):
        for pack in packs:
            ids = pack.records.ids.tolist()
            assert pack.rows.tolist() == [2 * record + side for record in ids for side in (0, 1)]


SIZES = (10, 30, 5)


def stream(order: EpochOrder, epochs: int) -> list[int]:
    return [order.record(position) for position in range(epochs * order.size)]


def file_of(record: int) -> int:
    return 0 if record < 10 else 1 if record < 40 else 2


def test_weights_are_shares_of_every_epoch_and_files_are_gone_through_evenly() -> None:
    order = weighted_order(SIZES, 5, (2, 1, 1))
    assert order.shares() == [23, 11, 11]  # exactly 22.5, 11.25 and 11.25
    records = stream(order, 10)
    for epoch in range(10):
        found = Counter(map(file_of, records[45 * epoch :][:45]))
        assert [found[number] for number in range(3)] == order.shares()
    for number, size in enumerate(SIZES):
        found = Counter(record for record in records if file_of(record) == number)
        assert len(found) == size
        assert max(found.values()) - min(found.values()) <= 1
    # Weights have any unit, and what rounding leaves is distributed.
    assert weighted_order(SIZES, 5, (0.2, 0.1, 0.1)).shares() == [23, 11, 11]
    for weights in ((1, 1, 1), (3, 5, 7), (0.31, 0.11, 0.58)):
        assert sum(weighted_order(SIZES, 5, weights).shares()) == 45
    for weights, message in (
        ((1, 2), "2 weights for 3 training files"),
        ((1, 1, 1e-6), "none of file 3"),
    ):
        with pytest.raises(ConfigError, match=message):
            weighted_order(SIZES, 5, weights)
    with pytest.raises(ConfigError, match="no record of file 2 is kept, so an epoch cannot take"):
        weighted_order((10, 0), 5, (1, 1))
    assert weighted_order((10, 0), 5, ()).shares() == [10, 0]


def test_weights_mix_files_and_epochs_differ() -> None:
    order = weighted_order((100, 100), 5, (1, 3))
    records = stream(order, 2)
    assert records[:200] != records[200:]
    firsts = sum(record < 100 for record in records[:100])
    assert 10 < firsts < 40  # out of 50 in the epoch
