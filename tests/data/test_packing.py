"""Packs contain every record once, never split, within the token budget."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import chain, pairwise

import numpy as np
import pytest
import torch

from nemo_aligner.batch.cache_use import CachedPrefix
from nemo_aligner.batch.packed import LabelColumns, PackedBatch, Records
from nemo_aligner.config.common import RecordKind
from nemo_aligner.data.dataset import TokenizedDataset, last_places
from nemo_aligner.data.packing import (
    TokenPacking,
    count_fitting,
    find_prefix_groups,
    largest_record,
    pack_records,
    pack_sequences,
    packed_size,
    record_cost,
    share_out,
)
from nemo_aligner.data.records import Origin
from nemo_aligner.data.token_index import TokenSequences
from nemo_aligner.data.tokenize import common_prefix, prefix_of_all
from nemo_aligner.utils.errors import DataError


def dataset(lengths: list[int], kind: RecordKind = RecordKind.comparison) -> TokenizedDataset:
    per_record = 2 if kind is RecordKind.comparison else 1
    count = len(lengths) // per_record
    labels = LabelColumns.none(count)
    if kind is RecordKind.rating:
        labels = LabelColumns.of(["x", "y"], torch.arange(2.0 * count).reshape(count, 2))
        labels = labels.centred_on({"x": 1.0, "y": 0.5})
    sequences = TokenSequences.of([[index] * length for index, length in enumerate(lengths)])
    return TokenizedDataset(
        kind=kind,
        name="train",
        sequences=sequences,
        places=last_places(sequences),
        records=Records.of(
            range(count),
            [per_record] * count,
            labels,
            reply_lengths=torch.ones(len(lengths), dtype=torch.int64),
        ),
        origins=[Origin("a.jsonl", index + 1) for index in range(count)],
        sources=[""] * count,
        reports=[],
        # The two samples have different tokens.
        prefixes=torch.zeros(count, dtype=torch.int64),
    )


def ids_of(packs: list[PackedBatch]) -> list[list[int]]:
    return [pack.records.ids.tolist() for pack in packs]


def laid_out(pack: PackedBatch) -> list[list[int]]:
    """The pack's sequences, each with its prefix."""
    bounds = pack.cu_seqlens.tolist()
    segments = [pack.tokens[start:end].tolist() for start, end in pairwise(bounds)]
    owners = {end - 1: index for index, end in enumerate(bounds[1:])}
    found = []
    for last in pack.scored_tokens.tolist():
        own = owners[last]
        prefix = int(pack.prefixes[own])
        found.append((segments[prefix] if prefix >= 0 else []) + segments[own])
    return found


def test_packs_have_every_record_once_and_whole() -> None:
    for seed in range(5):
        rng = random.Random(seed)
        data = dataset([rng.randint(1, 50) for _ in range(200)])
        wanted = rng.sample(range(100), 70)
        packs = pack_records(data, wanted, 120)
        assert sorted(chain(*ids_of(packs))) == sorted(wanted)
        for pack in packs:
            assert pack.num_tokens <= 120
            assert pack.records.record_bounds.diff().tolist() == [2] * len(pack.records)
            for index, record in enumerate(pack.records.ids.tolist()):
                for side in (0, 1):
                    assert laid_out(pack)[2 * index + side] == list(data.record(record)[side])
                    # The rows of a record's rewards follow its position in the request.
                    assert pack.rows[2 * index + side] == 2 * wanted.index(record) + side
        assert len(packs) <= sum(data.num_tokens(i) for i in wanted) / 120 / 0.9 + 1
        assert ids_of(pack_records(data, wanted, 120)) == ids_of(packs)
    for pack in pack_records(dataset([3, 9, 5, 2], RecordKind.rating), [3, 0, 1, 2], 10):
        expected = [[2 * i - 1.0, 2 * i + 0.5] for i in pack.records.ids.tolist()]
        assert pack.records.labels.targets(["x", "y"]).tolist() == expected  # centred


def test_packs_use_the_budget_to_the_last_token_and_refuse_what_is_larger() -> None:
    assert [pack.num_tokens for pack in pack_records(dataset([4, 6, 7, 3]), [0, 1], 10)] == [10, 10]
    assert [pack.num_tokens for pack in pack_records(dataset([4, 6, 7, 3]), [0, 1], 20)] == [20]
    assert [pack.num_tokens for pack in pack_sequences([[1] * 10], 10)] == [10]
    assert pack_sequences([], 10) == []
    with pytest.raises(DataError, match=r"a.jsonl:2: .* 11 tokens .* micro-batch of 10"):
        pack_records(dataset([1, 2, 5, 6]), [0, 1], 10)
    for bad in ([7] * 11, []):
        with pytest.raises(DataError, match="sequence 1 has"):
            pack_sequences([[7], bad], 10)


def test_packs_have_the_common_prefix_of_a_pair_once() -> None:
    for seed in range(5):
        rng = random.Random(seed)
        sequences = []
        for _ in range(30):
            prompt = [rng.randrange(50) for _ in range(rng.choice([0, 3, 20, 60]))]
            sequences += [[*prompt, *rng.choices(range(50), k=rng.randint(1, 9))] for _ in range(2)]
        pairs = [sequences[start : start + 2] for start in range(0, 60, 2)]
        prefixes = torch.tensor([prefix_of_all(pair) for pair in pairs])
        whole = TokenSequences.of(sequences)
        places = last_places(whole)
        data = replace(dataset([1, 1] * 30), sequences=whole, places=places, prefixes=prefixes)
        packs = pack_records(data, range(30), 100)
        for pack in packs:
            assert pack.num_tokens <= 100
            records = pack.records.ids.tolist()
            assert laid_out(pack) == [s.tolist() for record in records for s in data.record(record)]
        packed = sum(pack.num_tokens for pack in packs)
        assert packed == sum(packed_size(data, record) for record in range(30))
        assert sum(map(len, sequences)) > 1.3 * packed


def test_packs_have_a_prompt_once_for_all_its_replies_however_they_come() -> None:
    rng = random.Random(0)
    prompts = [[rng.randrange(90) for _ in range(size)] for size in (40, 40, 25)]
    prompts.append([*prompts[0][:20], *prompts[1][20:]])
    sequences = [[*prompt, 100 + n, n] for prompt in prompts for n in range(6)]
    sequences += [[1], [2, 3], sequences[0], prompts[1]]
    rng.shuffle(sequences)
    packs = pack_sequences(sequences, 1000)
    assert len(packs) == 1
    assert laid_out(packs[0]) == [sequences[row] for row in packs[0].rows.tolist()]
    assert sorted(packs[0].rows.tolist()) == list(range(len(sequences)))
    # Four prompts, two tokens for each reply, and the sequences that share nothing.
    assert packs[0].num_tokens <= 40 + 40 + 25 + 40 + 24 * 2 + 3 + 2 + 40
    small = pack_sequences(sequences, 50)
    assert max(pack.num_tokens for pack in small) <= 50
    found = {
        row: tokens
        for pack in small
        for row, tokens in zip(pack.rows.tolist(), laid_out(pack), strict=True)
    }
    assert [found[row] for row in range(len(sequences))] == sequences


def test_record_cost_counts_what_is_computed() -> None:
    for prefix in (0, 10):
        data = replace(dataset([30, 20]), prefixes=torch.tensor([prefix]))
        # Counted one by one: each token that is computed, and each key that it attends to.
        wanted = sum(1 + 0.5 * (position + 1) for position in range(30))
        wanted += sum(1 + 0.5 * (position + 1) for position in range(prefix, 20))
        assert record_cost(data, 0, 0.5) == pytest.approx(wanted)


def test_shares_are_even_and_hold_everything_once() -> None:
    rng = random.Random(0)
    costs = [rng.lognormvariate(0, 1) for _ in range(200)]
    parts = share_out(costs, 7)
    assert sorted(index for part in parts for index in part) == list(range(200))
    work = [sum(costs[index] for index in part) for part in parts]
    assert max(work) / min(work) < 1.02
    assert all(share_out([1.0] * 7, 7))
    assert share_out([], 2) == [[], []]
    # Equal costs are distributed in turn.
    assert share_out([1.0] * 5, 2) == [[0, 2, 4], [1, 3]]
    assert share_out([1.0, 5.0, 3.0], 5) == [[1], [2], [0], [], []]
    assert share_out([2.0, 5.0, 3.0, 1.0], 2) == [[1, 3], [0, 2]]


def test_packs_are_of_even_work_and_no_more_than_needed_the_largest_first() -> None:
    for seed, count, budget in ((0, 100, 500), (1, 30, 110)):
        rng = random.Random(seed)
        data = dataset([rng.randint(1, 50) for _ in range(2 * count)])
        sizes = [pack.num_tokens for pack in pack_records(data, range(count), budget)]
        assert sizes == sorted(sizes, reverse=True)
        assert len(sizes) > 3
        if budget == 500:
            assert len(sizes) == -(-sum(sizes) // budget)
            assert max(sizes) - min(sizes) < 0.02 * max(sizes)
    # Best fit makes 5 + 5 and 4 + 3 + 3. Filling the cheaper pack in turn, the last 3 fits nowhere.
    packs = pack_sequences([[size, *range(size - 1)] for size in (5, 4, 3, 5, 3)], 10)
    assert [pack.num_tokens for pack in packs] == [10, 10]
    assert [sorted(pack.rows.tolist()) for pack in packs] == [[0, 3], [1, 2, 4]]


def test_packs_of_records_with_more_than_two_sequences() -> None:
    prompt = list(range(100, 120))
    sequences = [[*prompt, 1], [*prompt, 2, 2], [*prompt, 3], [5, 6]]
    data = replace(
        dataset([1, 1]),
        sequences=TokenSequences.of(sequences),
        records=Records.of([0, 1], [3, 1]),
        places=last_places(TokenSequences.of(sequences)),
        origins=[Origin("a.jsonl", 1)] * 2,
        prefixes=torch.tensor([prefix_of_all(each) for each in (sequences[:3], sequences[3:])]),
    )
    assert [packed_size(data, record) for record in (0, 1)] == [24, 2]
    (pack,) = pack_records(data, [1, 0], 30)
    assert laid_out(pack) == [sequences[3], *sequences[:3]]
    assert pack.records.record_bounds.tolist() == [0, 1, 4]
    assert pack.rows.tolist() == [0, 1, 2, 3]


def test_prefix_groups_are_made_where_that_saves_tokens_and_fits() -> None:
    prompt = list(range(100, 120))
    replies = [[*prompt, reply, reply] for reply in range(3)]
    for budget, sizes in ((27, [26]), (26, [26]), (25, [22, 24]), (22, [22] * 3)):
        packs = pack_sequences(replies, budget)
        assert sorted(pack.num_tokens for pack in packs) == sizes, budget
    long, short = list(range(100, 130)), list(range(100, 108))
    # The third shares 8 tokens with the others, which share 30: two groups have fewer tokens.
    sequences = [[*long, 1], [*long, 2], [*short, 200, 200]]
    (pack,) = pack_sequences(sequences, 100)
    assert pack.num_tokens == 30 + 1 + 1 + 10
    # Three replies share their prompt, also if the prefix with one of them is shorter.
    (pack,) = pack_sequences([[*long, 1], [*long, 2], [*long, 3, 3], [*long[:29], 4]], 100)
    assert pack.num_tokens == 29 + 2 + 2 + 3 + 1
    # A prefix of 8 tokens is worth a segment, one of 7 is not.
    (pack,) = pack_sequences([[*short, 1], [*short, 2]], 100)
    assert pack.num_tokens == 8 + 1 + 1
    (pack,) = pack_sequences([[*short[:7], 1], [*short[:7], 2]], 100)
    assert pack.num_tokens == 8 + 8


def grouped_size(sequences: list[list[int]], budget: int) -> int:
    return sum(group.size for group in find_prefix_groups(sequences, budget))


def test_taken_are_as_many_of_the_oldest_as_fit() -> None:
    for seed in range(12):
        rng = random.Random(seed)
        prompts = [rng.choices(range(90), k=rng.choice([9, 40, 100])) for _ in range(5)]
        waiting = [
            [*rng.choice(prompts), *rng.choices(range(90), k=rng.randint(1, 30))]
            for _ in range(100)
        ]
        for budget in (150, 400, 1000, 2500):
            count = count_fitting(waiting, budget)
            assert grouped_size(waiting[:count], budget) <= budget
            # One more sequence can change the groups, and with them a few tokens.
            assert count == 100 or grouped_size(waiting[: count + 1], budget) > budget - 10
            assert len(pack_sequences(waiting[:count], budget)) == 1
        assert count_fitting(waiting, 10**6) == 100
        # At least one sequence is taken, whatever its size.
        assert count_fitting(waiting, 3) == count_fitting(waiting[:1], 3) == 1
    assert count_fitting([], 3) == 0
    assert count_fitting([[1, 2], [3, 4], [5]], 4) == 2
    # The shared prompt is counted once.
    waiting = [[*range(100), 200 + n] for n in range(50)]
    assert (count_fitting(waiting, 120), count_fitting(waiting, 150)) == (20, 50)


def test_prefix_groups_stand_on_one_cached_beginning_each() -> None:
    first, second = (CachedPrefix(torch.arange(start, start + 16)) for start in (0, 16))
    beginnings = {first: list(range(16)), second: list(range(20, 36)), None: []}
    common = list(range(50, 60))
    cached = dict(enumerate([first, None, second, first, None, second, first]))
    sequences = [[*beginnings[cached[n]], *common, 100 + n] for n in range(7)]
    groups = find_prefix_groups(sequences, 1000, cached)
    found = {frozenset(group.members): (group.cached, group.prefix, group.size) for group in groups}
    assert found == {
        frozenset({0, 3, 6}): (first, 10, 13),
        frozenset({1, 4}): (None, 10, 12),
        frozenset({2, 5}): (second, 10, 12),
    }


def test_prefix_groups_read_no_more_cached_keys_than_a_pack_may() -> None:
    """At most eight times the budget, even if few tokens are computed."""
    beginning = CachedPrefix(torch.arange(200))
    sequences = [[*range(200), *range(500, 510), 600 + n] for n in range(12)]
    groups = find_prefix_groups(sequences, 100, dict.fromkeys(range(12), beginning))
    assert [len(group.members) for group in groups] == [2] * 6
    assert [len(group.members) for group in find_prefix_groups(sequences, 300)] == [12]


def test_many_samples_of_an_uncached_prefix_are_split_by_the_keys_that_are_copied(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """At most 32 times the budget. Up to 31 samples stay together, whatever their prefix."""
    short = [[*range(200), 300 + n] for n in range(100)]
    assert [len(pack.rows) for pack in pack_sequences(short, 400)] == [100]  # a CPU copies none
    monkeypatch.setattr("nemo_aligner.data.packing.attention_copies_keys", lambda: True)
    for count, budget, members in ((31, 231, [31]), (100, 400, [62, 38])):
        sequences = [[*range(200), 300 + n] for n in range(count)]
        groups = find_prefix_groups(sequences, budget, copies_keys=True)
        assert [len(group.members) for group in groups] == members
        packs = pack_sequences(sequences, budget)
        assert sorted((len(pack.rows) for pack in packs), reverse=True) == members


def test_largest_record_is_the_first_of_most_tokens() -> None:
    lengths, prefixes = [3, 1, 9, 8, 9, 9, 2, 2, 9, 9], [0, 8, 2, 1, 2]
    data = replace(dataset(lengths), prefixes=torch.tensor(prefixes))
    assert [packed_size(data, record) for record in range(5)] == [4, 9, 16, 3, 16]
    assert largest_record(data) == (2, 16)


def test_drawn_records_are_the_same_ones_every_time() -> None:
    whole = dataset([*range(2, 42)])
    some = whole.draw(5, seed=3)
    assert len(some) == 5
    assert some.records.ids.tolist() == [*range(5)]
    numbers = [origin.line - 1 for origin in some.origins]
    assert numbers == sorted(set(numbers))
    lengths = [len(sequence) for sequence in some.sequences]
    assert lengths == [length for n in numbers for length in (2 * n + 2, 2 * n + 3)]
    assert some.records.record_bounds.tolist() == [0, 2, 4, 6, 8, 10]
    assert whole.draw(5, seed=3).origins == some.origins
    assert whole.draw(5, seed=4).origins != some.origins
    assert whole.draw(20, seed=3) is whole


ROLLOUTS = [np.arange(10 * n, 10 * n + length) for n, length in enumerate((3, 9, 1, 5, 4))]
ROLLOUT_TOKENS = 22


def test_token_packs_have_every_token_as_a_record_with_its_labels() -> None:
    labels = LabelColumns.of(("number",), torch.arange(float(ROLLOUT_TOKENS))[:, None])
    packs = TokenPacking(micro_batch_tokens=10).pack(ROLLOUTS, [0, 1, 3, 4], labels)
    assert [pack.num_tokens for pack in packs] == sorted(
        (p.num_tokens for p in packs), reverse=True
    )
    assert max(pack.num_tokens for pack in packs) <= 10
    tokens = np.concatenate(ROLLOUTS)
    for pack in packs:
        assert len(pack.records) == pack.records.num_rewards == pack.num_tokens
        assert pack.scored_tokens.tolist() == list(range(pack.num_tokens))
        assert pack.tokens.tolist() == tokens[pack.rows].tolist()
        assert pack.records.labels.targets(("number",))[:, 0].tolist() == pack.rows.tolist()
    rows = sorted(row for pack in packs for row in pack.rows.tolist())
    assert rows == [*range(12), *range(13, ROLLOUT_TOKENS)]
    # Ranks split them, and may get none.
    packing = TokenPacking(micro_batch_tokens=10, query_key_cost=0.1)
    shares = packing.share([len(each) for each in ROLLOUTS], 2)
    assert sorted(index for share in shares for index in share) == [0, 1, 2, 3, 4]
    assert all(shares)
    assert packing.share([4], 2) == [[0], []]
    assert packing.pack(ROLLOUTS, []) == []
    # 21 tokens are less work than two times 11 if attention costs less than 1 / 99.
    for query_key_cost, wanted in ((1 / 120, [[0, 3], [1, 2]]), (1 / 80, [[0], [1, 2, 3]])):
        packing = TokenPacking(micro_batch_tokens=100, query_key_cost=query_key_cost)
        assert packing.share([21, 11, 11, 1], 2) == wanted


def test_common_prefix_is_worth_a_segment_and_leaves_a_last_token() -> None:
    begin, eight = list(range(10)), list(range(8))
    cases: list[tuple[list[int], list[int], int]] = [
        ([*begin, 1], [*begin, 2, 3], 10),
        (begin, [*begin, 2], 9),
        (begin, begin, 9),
        ([*begin[:7], 1], [*begin[:7], 2], 0),
        ([1], begin, 0),
        ([*eight, 1], [*eight, 2], 8),
        ([*eight, 1], [*eight, 1], 8),
        (eight, [*eight, 1], 0),
        ([*eight, 5, 1], [*eight, 6, 1, 1], 8),
    ]
    for one, other, wanted in cases:
        assert common_prefix(one, other) == wanted, (one, other)
    assert common_prefix(torch.tensor([*begin, 1], dtype=torch.int32), [*begin, 2]) == 10
