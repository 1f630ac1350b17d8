"""The content of a prefix cache after random calls, and the tokens that it saves."""

from __future__ import annotations

import random
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch

from nemo_aligner.batch.packed import PackedBatch
from nemo_aligner.config.evaluation import RewardEnvironmentConfig
from nemo_aligner.config.serving import CriticServerConfig, ServerConfig
from nemo_aligner.distributed.layout import ParallelLayout
from nemo_aligner.serving.engine.prefix_cache import BLOCK_TOKENS, BlockManager, PrefixCache, as_key
from nemo_aligner.utils.errors import SettingsError
from tests.serving.engine.batch_invariance import draw, traffic

BUDGET = 512


def key(tokens: list[int]) -> bytes:
    return as_key(np.array(tokens))


def layout(dp: int = 1, dp_rank: int = 0) -> ParallelLayout:
    return ParallelLayout(dp=dp, tp_rank=0, pp_rank=0, dp_rank=dp_rank)


def test_prefix_index_has_a_block_in_one_place_and_after_the_one_that_it_follows() -> None:
    for capacity in (1, 2, 5, 20, 1000):
        put_under(traffic(random.Random(capacity), 60), capacity)
        put_under(traffic(random.Random(capacity), 60), capacity, states=3)


def put_under(calls: list[list[list[int]]], capacity: int, states: int | None = None) -> None:
    """Check the rules of an index of ``capacity`` blocks in every call."""
    index, blocks_of = BlockManager(capacity, states), {}  # what a pool would hold in each block
    snapshots: dict[int, list[int]] = {}  # and in each slot of a snapshot
    for call in calls:
        keys = [key(text) for text in call]
        before = [index.find(each) for each in keys]
        uses = index.allocate(keys)
        assert [use.cached for use in uses] == before
        written: set[int] = set()
        for text, use in zip(call, uses, strict=True):
            assert len(use.cached) <= (len(text) - 1) // BLOCK_TOKENS
            for number, block in enumerate(use.cached):
                assert blocks_of[block] == text[: (number + 1) * BLOCK_TOKENS]
            assert not use.new or use.first_new >= len(use.cached)
            for number, block in enumerate(use.new, use.first_new):
                assert (number + 1) * BLOCK_TOKENS <= len(text)
                assert block not in written  # by another sequence of this call
                written.add(block)
        new_states = {slot for use in uses for _, slot in use.new_states}
        assert len(new_states) == sum(len(use.new_states) for use in uses)
        assert not new_states & {use.state for use in uses}
        for text, use in zip(call, uses, strict=True):
            assert (use.state is None) == (not use.cached or states is None)
            assert use.state is None or snapshots[use.state] == text[: 16 * len(use.cached)]
            for tokens, slot in use.new_states:
                assert 16 * len(use.cached) < tokens <= len(text)
                assert tokens % 64 == 0
                snapshots[slot] = text[:tokens]
        slots = [*index._states.values(), *index._free_states]
        assert sorted(slots) == list(range(states or 0))
        # The call overwrites nothing that it reads.
        assert not written & {block for use in uses for block in use.cached}
        for text, use in zip(call, uses, strict=True):
            for number, block in enumerate(use.new, use.first_new):
                blocks_of[block] = text[: (number + 1) * BLOCK_TOKENS]
        check(index, capacity, blocks_of)


def check(index: BlockManager, capacity: int, blocks_of: dict[int, list[int]]) -> None:
    order = list(index._keys)
    assert len(order) == len(set(order)) == len(index._blocks) == len(index)
    assert len(index) + len(index._free) == capacity
    assert not set(order) & set(index._free)
    assert {index._blocks[index._keys[block]] for block in order} == set(order)
    age = {block: number for number, block in enumerate(order)}
    for block in order:
        parent, tokens = index._keys[block]
        assert (parent == -1) == (len(blocks_of[block]) == BLOCK_TOKENS)
        assert tokens == key(blocks_of[block][-BLOCK_TOKENS:])
        assert parent == -1 or age[parent] > age[block]
    texts = [tuple(blocks_of[block]) for block in order]
    assert len(set(texts)) == len(texts)


def test_prefix_index_has_a_snapshot_where_sequences_end_and_branch() -> None:
    index = BlockManager(100, states=3)
    prompt, random_tokens = [1] * 130, [[2, *range(100)], [3, *range(100)], [4] * 20]
    (first,) = index.allocate([key(prompt + random_tokens[0])])
    assert [tokens for tokens, _ in first.new_states] == [192]
    assert (first.state, index.find(key(prompt + [9] * 70))) == (None, ())
    (second,) = index.allocate([key(prompt + random_tokens[1])])
    # The blocks of the prompt are there, but no snapshot: it is computed again, up to the branch.
    assert (second.cached, second.first_new) == ((), 8)
    assert [tokens for tokens, _ in second.new_states] == [128, 192]
    (third,) = index.allocate([key(prompt + random_tokens[2])])
    assert (len(third.cached), third.new_states) == (8, ())
    assert third.state == dict(second.new_states)[128]
    assert len(index.find(key([*prompt, *random_tokens[0], 5]))) == 12
    # Another sequence takes the slot of the least recently used snapshot, that of the first one.
    (other,) = index.allocate([key([7] * 70)])
    assert other.new_states == ((64, first.new_states[0][1]),)
    assert len(index.find(key([*prompt, *random_tokens[0], 5]))) == 8
    # A snapshot goes with its block.
    (longest,) = index.allocate([key([8] * 1600)])
    assert [tokens for tokens, _ in longest.new_states] == [1536, 1600]
    assert (len(index), len(index._states)) == (100, 2)
    assert [len(index.find(key([8] * count))) for count in (1600, 1601)] == [96, 100]


def test_prefix_index_branches_come_before_ends() -> None:
    index = BlockManager(100, states=2)
    uses = index.allocate([key([1] * 64 + [number] * 70) for number in range(2, 5)])
    assert [[tokens for tokens, _ in use.new_states] for use in uses] == [[128], [64], []]
    # The call uses both snapshots that there are, so it places none.
    longer = [[1] * 64 + [2] * 70 + [5] * 64, [1] * 64 + [6] * 70]
    again = index.allocate([key(text) for text in longer])
    assert [(len(use.cached), use.new_states) for use in again] == [(8, ()), (4, ())]
    index.clear()
    assert index.find(key(longer[0])) == ()


def test_prefix_index_needs_one_snapshot_for_each_dialogue_and_one_more() -> None:
    """The snapshot of a turn goes before those of other dialogues as soon as it is continued."""
    index, rng = BlockManager(1000, states=5), random.Random(0)
    dialogues = [draw(rng, 70) for _ in range(4)]
    for turn in range(6):
        for number, text in enumerate(dialogues):
            (use,) = index.allocate([key(text)])
            assert len(use.cached) == (4 * ((len(text) - 70) // 64) if turn else 0)
            dialogues[number] = text + draw(rng, 70)
    # A prompt that is used again and again stays.
    index, prompt = BlockManager(1000, states=3), [1] * 64
    for _ in range(6):
        uses = index.allocate([key(prompt + draw(rng, 70)) for _ in range(2)])
    assert [len(use.cached) for use in uses] == [4, 4]


def test_prefix_index_keeps_whole_blocks_but_never_the_last_token() -> None:
    index = BlockManager(10)
    text = list(range(48))
    (use,) = index.allocate([key(text)])
    assert (use.cached, len(use.new)) == ((), 3)
    assert [len(index.find(key(text[:n]))) for n in (1, 16, 17, 32, 33, 48)] == [0, 0, 1, 1, 2, 2]
    assert len(index.find(key([*text, 5]))) == 3
    index.clear()
    assert (index.find(key(text)), len(index)) == ((), 0)
    assert len(index.allocate([key([2] * 160)])[0].new) == 10


def test_prefix_index_that_is_full() -> None:
    """Least recently used blocks go first; of a call that is too large, prefixes are kept."""
    index, texts = BlockManager(3), [[n] * 17 for n in range(4)]
    for text in (*texts[:3], texts[0], texts[3]):
        index.allocate([key(text)])
    assert [bool(index.find(key(text))) for text in texts] == [True, False, True, True]
    index = BlockManager(5)
    texts = [[n] * 160 for n in range(4)]
    uses = index.allocate([key(text) for text in texts])
    assert [(use.first_new, len(use.new)) for use in uses] == [(0, 2), (0, 1), (0, 1), (0, 1)]
    # The next call uses all of these blocks, so there is no room for new ones.
    again = index.allocate([key([*text, 1]) for text in texts] + [key([9] * 20)])
    assert [len(use.cached) for use in again] == [2, 1, 1, 1, 0]
    assert not any(use.new for use in again)


def tokens_of(packs: list[PackedBatch]) -> int:
    return sum(pack.num_tokens for pack in packs)


def test_prefix_cache_plan_counts_what_is_asked_once() -> None:
    cache = PrefixCache(1000, layout(), BUDGET)
    rng = random.Random(0)
    prompt = draw(rng, 100)
    texts = [np.array(prompt + draw(rng, 20)) for _ in range(3)]
    first = cache.plan(texts[:1])
    assert (first.num_computed, first.num_cached, tokens_of(first.packs)) == (120, 0, 120)
    later = cache.plan(texts[1:])
    # 96 tokens of the prompt are whole blocks; the other 4 are too few for a shared segment.
    assert (later.num_computed, later.num_cached, tokens_of(later.packs)) == (48, 192, 48)
    cache.reset_cache()
    assert cache.plan(texts[1:]).num_computed == 140


def test_prefix_cache_packs_stay_within_their_budget_of_tokens_and_of_keys() -> None:
    rng = random.Random(0)
    cache = PrefixCache(4096, layout(), BUDGET)
    prompt = draw(rng, 400)
    cache.plan([np.array(prompt)])
    plan = cache.plan([np.array([*prompt, *draw(rng, rng.randint(1, 3))]) for _ in range(200)])
    assert plan.num_cached == 200 * 400
    for pack in plan.packs:
        assert pack.num_tokens <= BUDGET
        keys = pack.position_ids[pack.scored_tokens].sum() + pack.scored_tokens.numel()
        assert keys <= 8 * BUDGET
    rows = torch.cat([pack.rows for pack in plan.packs])
    assert sorted(rows.tolist()) == list(range(200))


def test_prefix_cache_replicas_agree_on_who_does_what() -> None:
    caches = [PrefixCache(640, layout(2, rank), BUDGET) for rank in range(2)]
    calls = traffic(random.Random(0), 90)
    for call in calls:
        plans = [cache.plan([np.array(text) for text in call]) for cache in caches]
        assert plans[0].num_computed == plans[1].num_computed
        assert plans[0].num_cached == plans[1].num_cached
        assert sum(tokens_of(plan.packs) for plan in plans) == plans[0].num_computed
        rows = [row for plan in plans for pack in plan.packs for row in pack.rows.tolist()]
        assert sorted(rows) == list(range(len(call)))
    # The traffic has dialogues and repeats; otherwise the test would show little.
    texts = [tuple(text) for call in calls for text in call]
    assert len(set(texts)) < len(texts)
    assert any(b[: len(a)] == a and len(a) > 16 for a, b in pairwise(texts))


def test_prefix_cache_sends_a_text_to_the_replica_that_has_its_beginning() -> None:
    rng = random.Random(0)
    caches = [PrefixCache(640, layout(2, rank), BUDGET) for rank in range(2)]
    prompts = [draw(rng, 64) for _ in range(4)]
    owners = []
    for prompt in prompts * 3:
        text = np.array(prompt + draw(rng, 10))
        plans = [cache.plan([text]) for cache in caches]
        owners.append([bool(plan.packs) for plan in plans])
        assert sum(owners[-1]) == 1
    # New prompts are spread over replicas, and each stays on its replica.
    assert owners[:4] == [[True, False], [False, True]] * 2
    assert owners == owners[:4] * 3
    # A large group is split: a third is the largest part that is at most half of its tokens.
    prompt = draw(rng, 40)
    texts = [np.array(prompt + draw(rng, 30)) for _ in range(8)]
    plans = [PrefixCache(640, layout(2, rank), BUDGET).plan(texts) for rank in range(2)]
    assert sorted(sum(len(pack.rows) for pack in plan.packs) for plan in plans) == [3, 5]


def test_cache_below_one_block_is_refused_by_the_settings() -> None:
    """Such a cache would silently be empty."""
    made: tuple[Any, ...] = (ServerConfig, CriticServerConfig, RewardEnvironmentConfig)
    for config in made:
        for tokens in (1, BLOCK_TOKENS - 1, -1):
            with pytest.raises(SettingsError, match=rf"got {tokens}, wanted 0 .*at least 16"):
                config(prefix_cache_tokens=tokens)
        for tokens in (0, BLOCK_TOKENS):
            assert config(prefix_cache_tokens=tokens).prefix_cache_tokens == tokens
