"""Cached and stored tokens of packs, and outputs that are bit-identical in every batch."""

from __future__ import annotations

import shutil
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from nemo_aligner.batch.cache_use import CachedPrefix, Stored
from nemo_aligner.batch.packed import Group, PackedBatch
from nemo_aligner.models.attention.backends import BACKENDS, C_FILE, Backend, Case, Heads
from nemo_aligner.models.attention.segments import KeyValuePool, PackedSegments, Scores
from tests.models.attention.backend_packs import LAYER, at, draw_tables, rows_of

GENERATOR = torch.Generator().manual_seed(0)
SLOTS, GROUPS, CHANNELS = 100, 2, 8
BLOCKS, TRAINING = (
    next(backend for backend in BACKENDS if backend.name == name)
    for name in ("CPU blocks", "CPU training")
)


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


TABLES = draw_tables(GROUPS, CHANNELS)


def pool(dtype: torch.dtype = torch.float64) -> KeyValuePool:
    """One layer, number 3, that has the two beginnings."""
    made = KeyValuePool({3: (GROUPS, CHANNELS)}, SLOTS, dtype, "cpu")
    for tokens, slots in ((FIRST, FIRST_SLOTS), (SECOND, SECOND_SLOTS)):
        for kept, table in zip(made.layer(3), TABLES[1:], strict=True):
            kept[slots] = at(table, tokens).to(dtype)
    return made


NO_COMPILER = "there is no C compiler, so none of it is compiled"
needs_compiler = pytest.mark.skipif(shutil.which("cc") is None, reason=NO_COMPILER)


def attended(
    backend: Backend, scores: Scores, batch: PackedBatch, inputs: Sequence[Tensor], learns: bool
) -> Tensor:
    """The output ``[T, heads, c]`` of queries, keys and values, which have no cached prefix."""
    query, key, value = inputs
    kind = "cpu", query.dtype, query.size(1), key.size(1), query.size(2)
    case = Case(*kind, scores, learns)
    segments = PackedSegments.of(batch, "cpu")
    sinks = torch.linspace(-2, 3, query.size(1)) if scores.has_sinks else None
    with torch.set_grad_enabled(learns):
        assert backend.fits(case)
        return backend.attend(Heads(LAYER, (query, key), value, sinks), segments, case)


def test_pack_keeps_a_nan_in_its_sequence() -> None:
    batch = PackedBatch.pack(SEQUENCES, groups=UNCACHED)
    last = int(batch.scored_tokens[3])
    others = torch.ones(batch.num_tokens, dtype=torch.bool)
    others[last + 1 - len(SEQUENCES[3]) : last + 1] = False
    inputs = [table[batch.tokens, batch.position_ids] for table in TABLES]
    inputs[2][last] = float("nan")
    query, key, value = (each.requires_grad_() for each in inputs)
    for backend, learns in ((C_FILE, False), (BLOCKS, False), (TRAINING, True)):
        if backend is C_FILE and shutil.which("cc") is None:
            continue
        tensors = [x if learns else x.detach().float() for x in (query, key, value)]
        out = attended(backend, Scores(), batch, tensors, learns)
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
    kept = pool()
    segments = PackedSegments.of(batch, "cpu", kept)
    segments.store(3, *(table[batch.tokens, batch.position_ids] for table in TABLES[1:]))
    for pooled, table in zip(kept.layer(3), TABLES[1:], strict=True):
        assert torch.equal(pooled[3:11], at(table, SEQUENCES[1])[36:44])


def test_pool_is_of_no_use_without_cached_tokens_and_asked_for_with_them() -> None:
    batch = PackedBatch.pack(SEQUENCES[5:], groups=[Group(2, 11)])
    assert batch.cached is None
    segments = PackedSegments.of(batch, "cpu", pool())
    key, value = torch.zeros(4, GROUPS, CHANNELS), torch.ones(4, GROUPS, CHANNELS)
    assert segments.with_cached(3, key, value) == (key, value)
    with pytest.raises(ValueError, match="no pool"):
        PackedSegments.of(PackedBatch.pack(SEQUENCES, groups=PACKED), "cpu")


TOKENS = 230
ALL_SCORES = [
    Scores(),
    Scores(0.4, 40),
    Scores(None, 1),
    Scores(0.4, 70, 2.0),
    Scores(None, None, 2.0),
    Scores(has_sinks=True),
    Scores(0.4, 40, has_sinks=True),
]
# Of several sequences with these tokens' numbers as their tokens; and a longer and a shorter one.
OTHERS = [[*range(TOKENS, 2 * TOKENS)], [*range(TOKENS, TOKENS + 3)]]


def of_second(
    tables: list[Tensor],
    batch: PackedBatch,
    scores: Scores,
    backend: Backend = BLOCKS,
) -> Tensor:
    """``[TOKENS, heads, c]`` of the second sequence."""
    out = attended(backend, scores, batch, [table[batch.tokens] for table in tables], False)
    return out[rows_of(batch, 1)]


def check_any_company(
    scores: Scores,
    dtype: torch.dtype,
    heads: tuple[int, int],
    backend: Backend = BLOCKS,
) -> list[Tensor]:
    """A sequence has the same bits alone, beside others, and where a prefix of it is shared."""
    sizes = (heads[0], heads[1], heads[1])
    drawn = (torch.randn(2 * TOKENS, size, 16, generator=GENERATOR) for size in sizes)
    tables = [each.to(dtype) for each in drawn]
    own = [*range(TOKENS)]
    wanted = of_second(tables, PackedBatch.pack([[5], own]), scores, backend)
    assert wanted.shape == (TOKENS, heads[0], 16)
    assert torch.isfinite(wanted).all()
    many = PackedBatch.pack([OTHERS[0], own, *OTHERS] * 3)
    assert torch.equal(of_second(tables, many, scores, backend), wanted), (scores, heads)
    for cut in (1, 31, 32, 33, 64, 100, TOKENS - 1):
        group = [Group(1, 0), Group(3, cut)]
        likes = [own[:cut] + [7, 8, 9] * 9, own[:cut] + OTHERS[0]]
        batch = PackedBatch.pack([OTHERS[0], own, *likes], groups=group)
        assert torch.equal(of_second(tables, batch, scores, backend), wanted), (scores, heads, cut)
    return tables


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_blocks_give_a_token_the_same_bits_in_any_company(dtype: torch.dtype) -> None:
    for scores in ALL_SCORES:
        for heads in ((4, 4), (6, 2), (16, 1)):
            check_any_company(scores, dtype, heads)


@needs_compiler
def test_kernel_gives_a_token_the_same_bits_in_any_company_and_those_of_the_definition() -> None:
    for scores in (Scores(), Scores(0.4, 40), Scores(None, 1), Scores(0.4, 40, has_sinks=True)):
        for heads in ((4, 4), (6, 2), (16, 1)):
            tables = check_any_company(scores, torch.float32, heads, C_FILE)
            batch = PackedBatch.pack([[5], [*range(TOKENS)]])
            got = of_second(tables, batch, scores, C_FILE)
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
                patch.setattr("nemo_aligner.cpu.block_attention.SPAN", span)
                tables = check_any_company(Scores(), dtype, heads)
                got = of_second(tables, batch, Scores())
            exact = of_second([each.double() for each in tables], batch, Scores())
            torch.testing.assert_close(got.double(), exact, rtol=0, atol=near)
