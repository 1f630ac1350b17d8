"""Attention of packs that begin with cached keys, against softmax over each whole sequence."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise, product

import pytest
import torch
from torch import Tensor

from nemo_aligner.batch import Group, PackedBatch
from nemo_aligner.cache_use import CachedPrefix, CacheUse, Stored
from nemo_aligner.models.attention import blocks
from nemo_aligner.models.attention.packed import _attend_on_cpu, _attend_one_by_one
from nemo_aligner.models.attention.pool import KeyValuePool
from nemo_aligner.models.attention.segments import PackedSegments, Scores

# All keys; a window that ends in a cached beginning, one before it, and one key.
WINDOWS = (None, 12, 40, 1)
GENERATOR = torch.Generator().manual_seed(0)
SLOTS, HEADS, GROUPS, CHANNELS = 100, 6, 2, 8


def draw(count: int) -> list[int]:
    return torch.randint(0, 50, (count,), generator=GENERATOR).tolist()


FIRST, SECOND, BETWEEN = draw(32), draw(16), draw(11)
FIRST_SLOTS = torch.arange(60, 92)
SECOND_SLOTS = torch.tensor([*range(8, 16), *range(8)])  # in another order than its tokens
KNOWN = [CachedPrefix(FIRST_SLOTS), CachedPrefix(SECOND_SLOTS)]
# A cached beginning, a prefix after it, and two ends; one sequence on the same beginning alone; two
# without any; one on another; and two with a prefix that is not cached.
SEQUENCES = [
    FIRST + BETWEEN + draw(5),
    FIRST + BETWEEN + draw(1),
    FIRST + draw(20),
    draw(9),
    SECOND + draw(1),
    BETWEEN + draw(7),
    BETWEEN + draw(2),
]
PACKED = [Group(2, 43, KNOWN[0]), Group(1, 32, KNOWN[0]), Group(1, 0), Group(1, 16, KNOWN[1])]
PACKED.append(Group(2, 11))
# By token and position, so that equal beginnings have equal ones.
QUERIES = torch.randn(50, 80, HEADS, CHANNELS, dtype=torch.float64, generator=GENERATOR)
KEYS = torch.randn(50, 80, GROUPS, CHANNELS, dtype=torch.float64, generator=GENERATOR)
VALUES = torch.randn(50, 80, GROUPS, CHANNELS, dtype=torch.float64, generator=GENERATOR)


def at(table: Tensor, tokens: list[int]) -> Tensor:
    return table[torch.tensor(tokens), torch.arange(len(tokens))]


def plain(tokens: list[int], scores: Scores) -> Tensor:
    """``[n, heads, c]`` by the definition."""
    query, key, value = (at(table, tokens) for table in (QUERIES, KEYS, VALUES))
    key, value = (x.repeat_interleave(HEADS // GROUPS, dim=1) for x in (key, value))
    products = torch.einsum("qhc,khc->hqk", query, key) * (scores.scale or CHANNELS**-0.5)
    if scores.soft_cap is not None:
        products = scores.soft_cap * torch.tanh(products / scores.soft_cap)
    indices = torch.arange(len(tokens))
    behind = indices[:, None] - indices
    hidden = (behind < 0) | (behind >= (scores.window or len(tokens)))
    weights = products.masked_fill(hidden, float("-inf")).softmax(-1)
    return torch.einsum("hqk,khc->qhc", weights, value)


def attend_as_the_kernel(
    query: Tensor, key: Tensor, value: Tensor, segments: PackedSegments, scores: Scores
) -> Tensor:
    """What varlen.py asks of a GPU: of gathered keys, a mask that counts from their end."""
    assert segments.kv_index is not None
    key, value = (
        x[segments.kv_index].repeat_interleave(HEADS // GROUPS, dim=1) for x in (key, value)
    )
    found = []
    for (start, end), (first, last) in zip(
        pairwise(segments.cu_seqlens.tolist()),
        pairwise(segments.kv_cu_seqlens.tolist()),
        strict=True,
    ):
        assert end - start <= segments.max_length
        assert last - first <= segments.max_kv_length
        products = torch.einsum("qhc,khc->hqk", query[start:end], key[first:last])
        behind = torch.arange(last - first - (end - start), last - first)[:, None]
        behind = behind - torch.arange(last - first)
        hidden = (behind < 0) | (behind >= (scores.window or last))
        products = (products * (scores.scale or CHANNELS**-0.5)).masked_fill(hidden, -torch.inf)
        found.append(torch.einsum("hqk,khc->qhc", products.softmax(-1), value[first:last]))
    return torch.cat(found)


def pool() -> KeyValuePool:
    """One layer, number 3, that has the two beginnings."""
    made = KeyValuePool([3], SLOTS, GROUPS, CHANNELS, torch.float64, "cpu")
    none = torch.zeros(0, dtype=torch.int64)
    for tokens, slots in ((FIRST, FIRST_SLOTS), (SECOND, SECOND_SLOTS)):
        use = CacheUse((), none, torch.arange(len(tokens)), slots)
        made.exchange(3, at(KEYS, tokens), at(VALUES, tokens), use)
    return made


def attended(batch: PackedBatch, attend: Callable[..., Tensor], scores: Scores) -> list[Tensor]:
    """Of each sequence, the outputs of its last segment."""
    none = torch.zeros(0)
    segments = PackedSegments.of(batch, none, none, none, pool())
    where = batch.tokens, batch.position_ids
    key, value = segments.with_cached(3, KEYS[where], VALUES[where])
    out = attend(QUERIES[where], key, value, segments, scores)
    ends = batch.scored_tokens.tolist()
    lengths = [segments.lengths[batch.cu_seqlens.tolist().index(end + 1) - 1] for end in ends]
    return [out[end + 1 - length : end + 1] for end, length in zip(ends, lengths, strict=True)]


# With what windows and caps.
WAYS: dict[str, tuple[Callable[..., Tensor], tuple[int | None, ...], tuple[float | None, ...]]] = {
    "on_cpu": (_attend_on_cpu, (None,), (None,)),
    "one_by_one": (_attend_one_by_one, WINDOWS, (None, 1.5)),
    "blocks": (blocks.attend, WINDOWS, (None, 1.5)),
    "as_the_kernel": (attend_as_the_kernel, WINDOWS, (None,)),
}


@pytest.mark.parametrize("way", WAYS)
def test_cached_beginning_is_seen_like_a_computed_one(way: str) -> None:
    attend, windows, caps = WAYS[way]
    plain_batch = PackedBatch.pack(SEQUENCES, groups=PACKED)
    for batch in (plain_batch, plain_batch.padded_to_multiple(64)):
        for window, cap in product(windows, caps):
            scores = Scores(0.5, window, cap)
            found = attended(batch, attend, scores)
            for tokens, ours in zip(SEQUENCES, found, strict=True):
                wanted = plain(tokens, scores)[-len(ours) :]
                torch.testing.assert_close(ours, wanted, atol=1e-12, rtol=0, msg=str(scores))


def test_cached_tokens_are_not_in_the_pack() -> None:
    batch = PackedBatch.pack(SEQUENCES, groups=PACKED)
    assert batch.num_tokens == (11 + 5 + 1) + 20 + 9 + 1 + (11 + 7 + 2)
    assert batch.cached is not None
    assert batch.cached.lengths == (32, 16)  # each of them once
    # The cached ones are 0 and 1; then come the prefix after the first, and what stands on it.
    assert batch.prefixes.tolist() == [0, 2, 2, 0, -1, 1, -1, 8, 8]
    assert batch.position_ids[:11].tolist() == list(range(32, 43))
    assert batch.cached.stored.numel() == 0


def test_stored_tokens_can_be_in_the_prefix_and_the_rest_of_a_sequence() -> None:
    stored = [None, Stored(36, torch.tensor([3, 4, 5, 6, 7, 8, 9, 10])), *[None] * 4]
    batch = PackedBatch.pack(SEQUENCES, groups=PACKED, stored=[*stored, Stored(0, torch.arange(2))])
    assert batch.cached is not None
    tokens, positions = (x[batch.cached.stored] for x in (batch.tokens, batch.position_ids))
    assert tokens.tolist() == SEQUENCES[1][36:44] + SEQUENCES[6][:2]
    assert positions.tolist() == [*range(36, 44), 0, 1]
    kept, none = pool(), torch.zeros(0)
    segments = PackedSegments.of(batch, none, none, none, kept)
    segments.with_cached(3, *(table[batch.tokens, batch.position_ids] for table in (KEYS, VALUES)))
    use = CacheUse((8,), torch.arange(3, 11), *[torch.zeros(0, dtype=torch.int64)] * 2)
    key, value = kept.exchange(3, KEYS[:0, 0], VALUES[:0, 0], use)
    assert torch.equal(key, at(KEYS, SEQUENCES[1])[36:44])
    assert torch.equal(value, at(VALUES, SEQUENCES[1])[36:44])


def test_pool_is_of_no_use_without_cached_tokens_and_asked_for_with_them() -> None:
    batch = PackedBatch.pack(SEQUENCES[5:], groups=[Group(2, 11)])
    assert batch.cached is None
    segments = PackedSegments.of(batch, *[torch.zeros(0)] * 3, pool())
    key, value = torch.zeros(4, GROUPS, CHANNELS), torch.ones(4, GROUPS, CHANNELS)
    assert segments.with_cached(3, key, value) == (key, value)
    with pytest.raises(ValueError, match="its model has no pool"):
        PackedSegments.of(PackedBatch.pack(SEQUENCES, groups=PACKED), *[torch.zeros(0)] * 3)
