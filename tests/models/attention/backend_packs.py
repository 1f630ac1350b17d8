"""Random packs that every attention backend computes, and attention by its definition."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise, product

import torch
from torch import Tensor

from nemo_aligner.batch.cache_use import CachedPrefix
from nemo_aligner.batch.packed import Group, PackedBatch
from nemo_aligner.config.kernels import AttentionChoice
from nemo_aligner.models.attention.backends import RING, Backend, Case, Heads
from nemo_aligner.models.attention.segments import KeyValuePool, PackedSegments, Scores
from tests.models.attention.rings import attend_in_ring

LAYER, SLOTS, VOCABULARY, LONGEST, QUERY_HEADS = 3, 100, 50, 110, 6
# All keys; windows that end in a cached or shared prefix, before it, in no sequence; and one key.
WINDOWS = (None, 12, 40, 71, 1)
SOFT_CAPS = (None, 1.5)
# Logits of attention sinks: smaller and larger than the scores, which are about 1.
SINKS = torch.tensor([-3.0, 0.5, 4.0, 1.0, -0.5, 2.0], dtype=torch.float64)
KEY_HEADS = ((1, None), (2, 0.5), (6, None))


@dataclass(frozen=True)
class RandomPack:
    """Sequences of random tokens, how they are packed, and the prefixes that are cached."""

    sequences: list[list[int]]
    groups: list[Group]
    cached: list[tuple[list[int], CachedPrefix]]

    @classmethod
    def draw(cls, seed: int, with_cache: bool) -> RandomPack:
        """Draw groups of one to three sequences with a shared prefix, a cached one, both, or none.

        The first two groups are always such: one on a cached prefix if there are any.
        """
        draw = random.Random(seed)

        def tokens(shortest: int, longest: int) -> list[int]:
            return [draw.randrange(VOCABULARY) for _ in range(draw.randint(shortest, longest))]

        slots = draw.sample(range(SLOTS), SLOTS)  # in another order than the tokens
        cached = []
        for _ in range(2):
            prefix = tokens(8, 40)
            cached.append((prefix, CachedPrefix(torch.tensor(slots[: len(prefix)]))))
            del slots[: len(prefix)]
        sequences, groups = [], []
        for number in range(draw.randint(4, 6)):
            is_cached = with_cache and (number == 0 or draw.random() < 0.5)
            prefix, use = draw.choice(cached) if is_cached else ([], None)
            count = 2 if number < 2 else draw.randint(1, 3)
            shared = prefix + (tokens(1, 25) if count > 1 else [])
            sequences += [shared + tokens(1, 30) for _ in range(count)]
            groups.append(Group(count, len(shared), use) if use else Group(count, len(shared)))
        return cls(sequences, groups, cached)

    def batch(self) -> PackedBatch:
        return PackedBatch.pack(self.sequences, groups=self.groups)


def draw_tables(
    key_heads: int, channels: int, dtype: torch.dtype = torch.float64, seed: int = 0
) -> list[Tensor]:
    """Queries, keys and values by token and position: equal prefixes have equal ones."""
    generator = torch.Generator().manual_seed(seed)
    return [
        torch.randn(VOCABULARY, LONGEST, heads, channels, generator=generator).to(dtype)
        for heads in (QUERY_HEADS, key_heads, key_heads)
    ]


def at(table: Tensor, tokens: Sequence[int]) -> Tensor:
    """The rows ``[n, heads, c]`` of a sequence."""
    return table[torch.tensor(tokens), torch.arange(len(tokens))]


def by_definition(
    tables: Sequence[Tensor], tokens: Sequence[int], scores: Scores, sinks: Tensor | None = None
) -> Tensor:
    """Attention ``[n, heads, c]`` of one sequence, by explicit scores of all its pairs."""
    query, key, value = (at(table, tokens) for table in tables)
    key, value = (x.repeat_interleave(query.size(1) // x.size(1), dim=1) for x in (key, value))
    products = torch.einsum("qhc,khc->hqk", query, key) * (scores.scale or query.size(-1) ** -0.5)
    if scores.soft_cap is not None:
        products = scores.soft_cap * torch.tanh(products / scores.soft_cap)
    indices = torch.arange(len(tokens))
    behind = indices[:, None] - indices
    hidden = (behind < 0) | (behind >= (scores.window or len(tokens)))
    products = products.masked_fill(hidden, float("-inf"))
    if sinks is not None:
        ends = sinks[:, None, None].expand(-1, len(tokens), 1)
        products = torch.cat([products, ends], dim=-1)
    weights = products.softmax(-1)[..., : len(tokens)]
    return torch.einsum("hqk,khc->qhc", weights, value)


def rows_of(batch: PackedBatch, sequence: int) -> Tensor:
    """Rows in the pack of a sequence's tokens: a shared prefix is packed once, a cached one not."""
    bounds = list(pairwise(batch.cu_seqlens.tolist()))
    cached = len(batch.cached.lengths) if batch.cached is not None else 0
    end = int(batch.scored_tokens[sequence]) + 1
    number = cached + next(n for n, (_, last) in enumerate(bounds) if last == end)
    pieces = []
    while number >= cached:
        pieces.append(torch.arange(*bounds[number - cached]))
        number = int(batch.prefixes[number - cached])
    return torch.cat(pieces[::-1])


def rows_with_text(pack: RandomPack, batch: PackedBatch) -> Tensor:
    """Mask ``[T]`` of the rows that are no padding."""
    is_text = torch.zeros(batch.num_tokens, dtype=torch.bool)
    for sequence in range(len(pack.sequences)):
        is_text[rows_of(batch, sequence)] = True
    return is_text


def expected_output(
    pack: RandomPack,
    batch: PackedBatch,
    tables: Sequence[Tensor],
    scores: Scores,
    sinks: Tensor | None = None,
) -> Tensor:
    """The output ``[T, heads, c]`` of a pack by the definition; padding has zeros."""
    query = tables[0]
    output = query.new_zeros(batch.num_tokens, *query.shape[2:])
    for number, tokens in enumerate(pack.sequences):
        rows = rows_of(batch, number)
        attended = by_definition(tables, tokens, scores, sinks)
        output = output.index_copy(0, rows, attended[-len(rows) :])
    return output


def cases_of(
    backend: Backend, device: str, dtypes: Sequence[torch.dtype], channels: int
) -> Iterator[Case]:
    """Yield the cases that a backend fits, each in the first of ``dtypes`` that it computes."""
    learning = (True,) if backend is RING else (True, False)
    kinds = product(learning, KEY_HEADS, WINDOWS, SOFT_CAPS, (False, True))
    for learns, (key_heads, scale), window, cap, has_sinks in kinds:
        scores = Scores(scale, window, cap, has_sinks)
        heads, rest = (QUERY_HEADS, key_heads, channels), (learns, backend is RING)
        library = backend.library or AttentionChoice.torch
        with torch.set_grad_enabled(learns):
            fitting = (
                case
                for dtype in dtypes
                for case in [Case(device, dtype, *heads, scores, *rest, library=library)]
                if backend.fits(case)
            )
            case = next(fitting, None)
        if case is not None:
            yield case


def new_pool(pack: RandomPack, tables: Sequence[Tensor], case: Case) -> KeyValuePool:
    """Make the pool of one layer that has the keys and values of the pack's cached prefixes."""
    sizes = {LAYER: (case.key_heads, case.channels)}
    pool = KeyValuePool(sizes, SLOTS, case.dtype, case.device)
    pooled = torch.zeros(2, SLOTS, case.key_heads, case.channels, dtype=case.dtype)
    for tokens, prefix in pack.cached:
        for rows, table in zip(pooled, tables[1:], strict=True):
            rows[prefix.slots] = at(table, tokens).to(case.dtype)
    pool.layer(LAYER).copy_(pooled)
    return pool


def run_backend(
    backend: Backend, case: Case, pack: RandomPack, batch: PackedBatch, tables: Sequence[Tensor]
) -> list[Tensor]:
    """Compute a pack by a backend.

    Returns:
        The output ``[T, heads, c]``, and in training the gradients of queries, keys and values, and
        of the sinks if there are any, for an output's gradient that is the queries themselves, and
        0 of padding.
    """
    # With an index: a rehearsal's fake GPU knows no other.
    device = torch.device(case.device, 0)
    inputs = [table[batch.tokens, batch.position_ids].to(device, case.dtype) for table in tables]
    if not case.learns:  # a layer that is scored has them between others
        value = inputs[2]
        inputs[2] = torch.stack([value, torch.full_like(value, torch.nan)], dim=2)[:, :, 0]
    is_text = rows_with_text(pack, batch).to(device)
    grad = inputs[0] * is_text[:, None, None]
    sinks = None
    if case.scores.has_sinks:
        sinks = SINKS.to(device, torch.promote_types(case.dtype, torch.float32))
    if case.uses_ring:
        return attend_in_ring(3, batch, inputs, sinks, grad, case.scores)
    pool = new_pool(pack, tables, case)
    segments = PackedSegments.of(batch.to(device), device, pool)
    with torch.set_grad_enabled(case.learns):
        query, key, value = (x.requires_grad_(case.learns) for x in inputs)
        if sinks is not None:
            inputs.append(sinks.requires_grad_(case.learns))
        output = backend.attend(Heads(LAYER, (query, key), value, sinks), segments, case)
    if not case.learns:
        return [output]
    return [output.detach(), *torch.autograd.grad(output, inputs, grad)]


def check_backend(
    backend: Backend, case: Case, pack: RandomPack, batch: PackedBatch, tolerance: float
) -> None:
    """Compare a backend's output and gradients with those of the definition in float64.

    Args:
        tolerance: of each value, times the largest expected one if that is above 1.
    """
    tables = draw_tables(case.key_heads, case.channels, case.dtype)
    precise = [table.double().clone().requires_grad_() for table in tables]
    sinks = SINKS.clone().requires_grad_() if case.scores.has_sinks else None
    expected = expected_output(pack, batch, precise, case.scores, sinks)
    rows = batch.tokens, batch.position_ids
    grad = precise[0].detach()[rows]
    results = run_backend(backend, case, pack, batch, tables)
    compared = [(results[0].cpu().double(), expected.detach())]
    leaves = precise if sinks is None else [*precise, sinks]
    gradients = list(torch.autograd.grad(expected, leaves, grad) if case.learns else ())
    if sinks is not None and case.learns:
        compared.append((results.pop().cpu().double(), gradients.pop()))
    for gradient, expected_gradient in zip(results[1:], gradients, strict=True):
        added = torch.zeros_like(expected_gradient)
        added.index_put_(rows, gradient.cpu().double(), accumulate=True)
        compared.append((added, expected_gradient))
    is_text = rows_with_text(pack, batch)
    compared[0] = (compared[0][0][is_text], compared[0][1][is_text])
    for result, reference in compared:
        limit = tolerance * max(1.0, float(reference.abs().max()))
        torch.testing.assert_close(
            result, reference, atol=limit, rtol=0, msg=lambda text: f"{case}: {text}"
        )
