"""Attention of packs against softmax over each whole sequence, and bits that no company changes."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from itertools import pairwise, product

import pytest
import torch
from torch import Tensor

from nemo_aligner.batch.packed import CachedPrefix, Group, PackedBatch, Stored
from nemo_aligner.models.attention import cpu_inference
from nemo_aligner.models.attention.packed import _attend_on_cpu, _attend_one_by_one
from nemo_aligner.models.attention.segments import KeyValuePool, PackedSegments, Scores
from tests.models.attention.rings import attend_in_ring

# All keys; a window that ends in a cached beginning, one before it, one that is longer than all
# sequences, and one key.
WINDOWS = (None, 12, 40, 71, 1)
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
# The same without a cache.
UNCACHED = [Group(2, 43), Group(1, 0), Group(1, 0), Group(1, 0), Group(2, 11)]


def draw_tables(groups: int) -> list[Tensor]:
    """Queries, keys and values by token and position, so that equal beginnings have equal ones."""
    sizes = (HEADS, groups, groups)
    drawn = (torch.randn(50, 80, size, CHANNELS, generator=GENERATOR) for size in sizes)
    return [each.double() for each in drawn]


TABLES = draw_tables(GROUPS)


def at(table: Tensor, tokens: list[int]) -> Tensor:
    return table[torch.tensor(tokens), torch.arange(len(tokens))]


def plain(tables: list[Tensor], tokens: list[int], scores: Scores) -> Tensor:
    """``[n, heads, c]`` by the definition."""
    query, key, value = (at(table, tokens) for table in tables)
    key, value = (x.repeat_interleave(HEADS // x.size(1), dim=1) for x in (key, value))
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
    """What a kernel of whole packs is asked: gathered keys, a mask that counts from their end."""
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


def pool(dtype: torch.dtype = torch.float64) -> KeyValuePool:
    """One layer, number 3, that has the two beginnings."""
    made = KeyValuePool([3], SLOTS, GROUPS, CHANNELS, dtype, "cpu")
    for tokens, slots in ((FIRST, FIRST_SLOTS), (SECOND, SECOND_SLOTS)):
        for kept, table in zip(made.layer(3), TABLES[1:], strict=True):
            kept[slots] = at(table, tokens).to(dtype)
    return made


def by_blocks(
    query: Tensor, key: Tensor, value: Tensor, segments: PackedSegments, scores: Scores
) -> Tensor:
    """What a layer asks of attention in blocks, which reads cached keys in the pool itself."""
    return cpu_inference.attend(turned(query, key), value, 3, segments, scores)


@torch.no_grad()
def by_kernel(
    query: Tensor, key: Tensor, value: Tensor, segments: PackedSegments, scores: Scores
) -> Tensor:
    """What a layer asks of the compiled kernel, of values that lie between others, in fp32."""
    heads = turned(query, key).float()
    assert cpu_inference.can_attend(heads, scores)
    value = torch.stack([value.float(), torch.full_like(value, torch.nan, dtype=torch.float)], 2)
    return cpu_inference.attend_by_kernel(heads, value[:, :, 0], 3, segments, scores)


def turned(query: Tensor, key: Tensor) -> Tensor:
    """``[T, groups, repeats + 1, c]``: the queries of each group, and its key."""
    return torch.cat([query.unflatten(1, (key.size(1), -1)), key[:, :, None]], 2)


def whole(out: Tensor, batch: PackedBatch, sequence: int) -> Tensor:
    """What is in the pack of the outputs of a sequence: its prefix is packed once, or is cached."""
    bounds = list(pairwise(batch.cu_seqlens.tolist()))
    cached = len(batch.cached.lengths) if batch.cached is not None else 0
    end = int(batch.scored_tokens[sequence]) + 1
    number = cached + next(n for n, (_, last) in enumerate(bounds) if last == end)
    pieces = []
    while number >= cached:
        pieces.append(out[slice(*bounds[number - cached])])
        number = int(batch.prefixes[number - cached])
    return torch.cat(pieces[::-1])


def attended(
    batch: PackedBatch, attend: Callable[..., Tensor], scores: Scores, tables: list[Tensor] = TABLES
) -> list[Tensor]:
    """The outputs of each sequence that are in the pack."""
    none = torch.zeros(0)
    dtype = torch.float32 if attend is by_kernel else torch.float64
    segments = PackedSegments.of(batch, (), none, pool(dtype))
    query, key, value = (table[batch.tokens, batch.position_ids] for table in tables)
    if attend not in (by_blocks, by_kernel):
        key, value = segments.with_cached(3, key, value)
    out = attend(query, key, value, segments, scores)
    return [whole(out, batch, sequence) for sequence in range(len(SEQUENCES))]


# With what windows and caps, and whether it has a backward.
WAYS: dict[
    str, tuple[Callable[..., Tensor], tuple[int | None, ...], tuple[float | None, ...], bool]
] = {
    "on_cpu": (_attend_on_cpu, (None,), (None,), True),
    "one_by_one": (_attend_one_by_one, WINDOWS, (None, 1.5), True),
    "blocks": (by_blocks, WINDOWS, (None, 1.5), False),
    "by_kernel": (by_kernel, WINDOWS, (None,), False),
    "as_the_kernel": (attend_as_the_kernel, WINDOWS, (None,), False),
}


NO_COMPILER = "there is no C compiler, so none of it is compiled"
needs_compiler = pytest.mark.skipif(shutil.which("cc") is None, reason=NO_COMPILER)
KERNEL = pytest.param("by_kernel", marks=needs_compiler)


@pytest.mark.parametrize("way", [KERNEL, *(way for way in WAYS if way != "by_kernel")])
def test_pack_with_cached_beginnings_has_outputs_of_the_definition(way: str) -> None:
    attend, windows, caps, _ = WAYS[way]
    plain_batch = PackedBatch.pack(SEQUENCES, groups=PACKED)
    for batch in (plain_batch, plain_batch.padded_to_multiple(64)):
        for window, cap in product(windows, caps):
            scores = Scores(0.5, window, cap)
            found = attended(batch, attend, scores)
            for tokens, ours in zip(SEQUENCES, found, strict=True):
                wanted = plain(TABLES, tokens, scores)[-len(ours) :]
                near = 1e-12 if ours.dtype is torch.float64 else 2e-6
                torch.testing.assert_close(ours.double(), wanted, atol=near, rtol=0)


@pytest.mark.parametrize("way", [way for way in WAYS if WAYS[way][-1]])
def test_pack_has_outputs_and_gradients_of_the_definition(way: str) -> None:
    attend, windows, caps, _ = WAYS[way]
    batch = PackedBatch.pack(SEQUENCES, groups=UNCACHED)
    for groups, scale in ((1, None), (2, 0.5), (6, None)):
        tables = [each.requires_grad_() for each in draw_tables(groups)]
        for window, cap in product(windows, caps):
            scores = Scores(scale, window, cap)
            found = torch.cat(attended(batch, attend, scores, tables))
            wanted = torch.cat([plain(tables, tokens, scores) for tokens in SEQUENCES])
            grad = torch.randn(wanted.shape, generator=GENERATOR).double()
            both = [[each, *torch.autograd.grad(each, tables, grad)] for each in (found, wanted)]
            for ours, theirs in zip(*both, strict=True):
                torch.testing.assert_close(ours, theirs, atol=1e-12, rtol=0, msg=str(scores))


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_ring_has_outputs_and_gradients_of_one_rank(ranks: int) -> None:
    """Where each has chunks of one token, and of none, and where some fill their share up."""
    batch = PackedBatch.pack(SEQUENCES, groups=UNCACHED)
    segments = PackedSegments.of(batch, (), torch.zeros(0))
    for groups, scale in ((1, None), (2, 0.5), (6, None)):
        tables = draw_tables(groups)
        inputs = [x[batch.tokens, batch.position_ids].requires_grad_() for x in tables]
        grad = torch.randn(inputs[0].shape, generator=GENERATOR).double()
        for window in WINDOWS:
            scores = Scores(scale, window)
            out = _attend_one_by_one(*inputs, segments, scores)
            wanted = [out, *torch.autograd.grad(out, inputs, grad)]
            found = attend_in_ring(ranks, batch, inputs, grad, scores)
            for ours, theirs in zip(found, wanted, strict=True):
                torch.testing.assert_close(ours, theirs, atol=1e-12, rtol=0, msg=str(scores))


def test_pack_keeps_a_nan_in_its_sequence() -> None:
    none = torch.zeros(0)
    batch = PackedBatch.pack(SEQUENCES, groups=UNCACHED)
    segments = PackedSegments.of(batch, (), none)
    last = int(batch.scored_tokens[3])
    others = torch.ones(batch.num_tokens, dtype=torch.bool)
    others[last + 1 - len(SEQUENCES[3]) : last + 1] = False
    inputs = [table[batch.tokens, batch.position_ids] for table in TABLES]
    inputs[2][last] = float("nan")
    query, key, value = (each.requires_grad_() for each in inputs)
    kernels = [by_kernel] if shutil.which("cc") else []
    for attend in (*kernels, by_blocks, _attend_on_cpu):
        out = attend(query, key, value, segments, Scores())
        assert out[others].isfinite().all()
        assert out[last].isnan().all()
    grads = torch.autograd.grad(out[others].sum(), (query, key, value))
    assert all(grad[others].isfinite().all() for grad in grads)


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
    segments = PackedSegments.of(batch, (), none, kept)
    segments.store(3, *(table[batch.tokens, batch.position_ids] for table in TABLES[1:]))
    for pooled, table in zip(kept.layer(3), TABLES[1:], strict=True):
        assert torch.equal(pooled[3:11], at(table, SEQUENCES[1])[36:44])


def test_pool_is_of_no_use_without_cached_tokens_and_asked_for_with_them() -> None:
    batch = PackedBatch.pack(SEQUENCES[5:], groups=[Group(2, 11)])
    assert batch.cached is None
    segments = PackedSegments.of(batch, (), torch.zeros(0), pool())
    key, value = torch.zeros(4, GROUPS, CHANNELS), torch.ones(4, GROUPS, CHANNELS)
    assert segments.with_cached(3, key, value) == (key, value)
    with pytest.raises(ValueError, match="its model has no pool"):
        PackedSegments.of(PackedBatch.pack(SEQUENCES, groups=PACKED), (), torch.zeros(0))


TOKENS = 230
ALL_SCORES = [
    Scores(),
    Scores(0.4, 40),
    Scores(None, 1),
    Scores(0.4, 70, 2.0),
    Scores(None, None, 2.0),
]
# Of several sequences with these tokens' numbers as their tokens; and a longer and a shorter one.
OTHERS = [[*range(TOKENS, 2 * TOKENS)], [*range(TOKENS, TOKENS + 3)]]


def of_second(
    tables: list[Tensor],
    batch: PackedBatch,
    scores: Scores,
    attend: Callable[..., Tensor] = by_blocks,
) -> Tensor:
    """``[TOKENS, heads, c]`` of the second sequence."""
    none = torch.zeros(0)
    segments = PackedSegments.of(batch, (), none)
    out = attend(*(table[batch.tokens] for table in tables), segments, scores)
    return whole(out, batch, 1)


def check_any_company(
    scores: Scores,
    dtype: torch.dtype,
    heads: tuple[int, int],
    attend: Callable[..., Tensor] = by_blocks,
) -> list[Tensor]:
    """A sequence has the same bits alone, beside others, and where a prefix of it is shared."""
    sizes = (heads[0], heads[1], heads[1])
    drawn = (torch.randn(2 * TOKENS, size, 16, generator=GENERATOR) for size in sizes)
    tables = [each.to(dtype) for each in drawn]
    own = [*range(TOKENS)]
    wanted = of_second(tables, PackedBatch.pack([[5], own]), scores, attend)
    assert wanted.shape == (TOKENS, heads[0], 16)
    assert torch.isfinite(wanted).all()
    many = PackedBatch.pack([OTHERS[0], own, *OTHERS] * 3)
    assert torch.equal(of_second(tables, many, scores, attend), wanted), (scores, heads)
    for cut in (1, 31, 32, 33, 64, 100, TOKENS - 1):
        group = [Group(1, 0), Group(3, cut)]
        likes = [own[:cut] + [7, 8, 9] * 9, own[:cut] + OTHERS[0]]
        batch = PackedBatch.pack([OTHERS[0], own, *likes], groups=group)
        assert torch.equal(of_second(tables, batch, scores, attend), wanted), (scores, heads, cut)
    return tables


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_blocks_give_a_token_the_same_bits_in_any_company(dtype: torch.dtype) -> None:
    for scores in ALL_SCORES:
        for heads in ((4, 4), (6, 2), (16, 1)):
            check_any_company(scores, dtype, heads)


@needs_compiler
def test_kernel_gives_a_token_the_same_bits_in_any_company_and_those_of_the_definition() -> None:
    for scores in (Scores(), Scores(0.4, 40), Scores(None, 1)):
        for heads in ((4, 4), (6, 2), (16, 1)):
            tables = check_any_company(scores, torch.float32, heads, by_kernel)
            batch = PackedBatch.pack([[5], [*range(TOKENS)]])
            got = of_second(tables, batch, scores, by_kernel)
            exact = of_second([each.double() for each in tables], batch, scores)
            torch.testing.assert_close(got.double(), exact, rtol=0, atol=2e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_blocks_by_spans_give_a_token_the_same_bits_in_any_company(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch = PackedBatch.pack([[5], [*range(TOKENS)]])
    near = {torch.float32: 2e-6, torch.bfloat16: 2e-2}[dtype]
    for span in (64, 96):
        for heads in ((4, 4), (6, 2)):
            with monkeypatch.context() as patch:
                patch.setattr("nemo_aligner.models.attention.cpu_inference.SPAN", span)
                tables = check_any_company(Scores(), dtype, heads)
                got = of_second(tables, batch, Scores())
            exact = of_second([each.double() for each in tables], batch, Scores())
            torch.testing.assert_close(got.double(), exact, rtol=0, atol=near)
