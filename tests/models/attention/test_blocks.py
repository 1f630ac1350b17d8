"""Attention by blocks: a token has the same bits wherever its sequence is cut, and beside whom."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from torch import Tensor

from nemo_aligner.batch import Group, PackedBatch
from nemo_aligner.models.attention import block_plan, blocks
from nemo_aligner.models.attention.segments import PackedSegments, Scores

GENERATOR = torch.Generator().manual_seed(0)
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


def table(heads: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(2 * TOKENS, heads, 16, generator=GENERATOR).to(dtype)


def attended(tables: list[Tensor], batch: PackedBatch, scores: Scores) -> Tensor:
    """``[TOKENS, heads, c]`` of the sequence that ends where the second scored token is."""
    none = torch.zeros(0)
    segments = PackedSegments.of(batch, none, none, none)
    out = blocks.attend(*(table[batch.tokens] for table in tables), segments, scores)
    last = int(batch.scored_tokens[1])
    bounds = list(pairwise(batch.cu_seqlens.tolist()))
    number = next(n for n, (_, end) in enumerate(bounds) if end == last + 1)
    pieces = []
    while number >= 0:
        pieces.append(out[slice(*bounds[number])])
        number = int(batch.prefixes[number])
    return torch.cat(pieces[::-1])


def check_any_company(scores: Scores, dtype: torch.dtype, heads: tuple[int, int]) -> list[Tensor]:
    """A sequence has the same bits alone, beside others, and where a prefix of it is shared."""
    tables = [table(heads[0], dtype), table(heads[1], dtype), table(heads[1], dtype)]
    own = [*range(TOKENS)]
    wanted = attended(tables, PackedBatch.pack([[5], own]), scores)
    assert wanted.shape == (TOKENS, heads[0], 16)
    assert torch.isfinite(wanted).all()
    many = PackedBatch.pack([OTHERS[0], own, *OTHERS] * 3)
    assert torch.equal(attended(tables, many, scores), wanted), (scores, heads)
    for cut in (1, 31, 32, 33, 64, 100, TOKENS - 1):
        group = [Group(1, 0), Group(3, cut)]
        likes = [own[:cut] + [7, 8, 9] * 9, own[:cut] + OTHERS[0]]
        batch = PackedBatch.pack([OTHERS[0], own, *likes], groups=group)
        assert torch.equal(attended(tables, batch, scores), wanted), (scores, heads, cut)
    return tables


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_blocks_give_a_token_the_same_bits_in_any_company(dtype: torch.dtype) -> None:
    for scores in ALL_SCORES:
        for heads in ((4, 4), (6, 2), (16, 1)):
            check_any_company(scores, dtype, heads)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_blocks_by_spans_give_a_token_the_same_bits_in_any_company(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch = PackedBatch.pack([[5], [*range(TOKENS)]])
    near = {torch.float32: 2e-6, torch.bfloat16: 2e-2}[dtype]
    for span in (64, 96):
        for heads in ((4, 4), (6, 2)):
            with monkeypatch.context() as patch:
                patch.setattr(block_plan, "SPAN", span)
                tables = check_any_company(Scores(), dtype, heads)
                got = attended(tables, batch, Scores())
            exact = attended([each.double() for each in tables], batch, Scores())
            torch.testing.assert_close(got.double(), exact, rtol=0, atol=near)


def test_blocks_keep_a_nan_in_its_sequence() -> None:
    tables = [table(4, torch.float32) for _ in range(3)]
    for each in tables:
        each[TOKENS:] = float("nan")
    batch = PackedBatch.pack([OTHERS[1], [*range(TOKENS)], OTHERS[0]])
    assert torch.isfinite(attended(tables, batch, Scores())).all()
