"""Attention without a backward on a CPU, the same bits for a token in whatever company.

Queries are taken by blocks of 32 positions of their *sequence*, however its beginning came about:
with it, for a neighbour, or from a pool of keys. A block's shape follows from its position alone:
its queries (those that the pack has not, are filled up) on all keys up to its end, by one mask. So
a token's arithmetic is a function of its sequence, as no kernel mixes the rows of a product.

The query heads of a group stand one after the other in a block, as they have the same keys. Blocks
at one position are computed in one call, in fp32: of narrower types torch's kernel takes one of two
products by the size of the whole call.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from nemo_aligner.models.attention.segments import PackedSegments, Scores, attend_by_scores
from nemo_aligner.models.internals import cpu_flash_attention

BLOCK = 32


@dataclass(frozen=True)
class _Segment:
    """One of the pack: its tokens' rows, their positions in the sequence, and its keys' rows."""

    row: int
    start: int
    end: int
    keys: np.ndarray

    @property
    def first_block(self) -> int:
        return self.start // BLOCK

    @property
    def num_blocks(self) -> int:
        """Of the sequence up to the segment's end."""
        return -(-self.end // BLOCK)

    def rows_of(self, block: int) -> np.ndarray:
        """``[BLOCK]`` rows of a block's queries; -1 for those that the segment has not."""
        positions = np.arange(block * BLOCK, (block + 1) * BLOCK)
        is_own = (positions >= self.start) & (positions < self.end)
        return np.where(is_own, positions + self.row - self.start, -1)


@dataclass(frozen=True)
class _Run:
    """Segments that start in the same block, the longest first.

    Attributes:
        keys: ``[n, K]`` int64 rows of their keys, filled up; ``K`` is a multiple of BLOCK.
        blocks: of every block's number how many of the segments have it, the first ones.
    """

    keys: Tensor
    blocks: tuple[tuple[int, int], ...]

    def gather(self, x: Tensor) -> Tensor:
        """``[C + T, groups, c]`` -> ``[n, K, groups, c]``."""
        return x.index_select(0, self.keys.flatten()).view(*self.keys.shape, *x.shape[1:])


@dataclass(frozen=True)
class BlockPlan:
    """Which queries are computed together, for ``groups`` of ``repeats`` heads.

    Attributes:
        queries: ``[N * groups * repeats * BLOCK]`` int64, which of the ``T * heads`` rows, block
            by block.
        targets: the same number, where their output belongs, in the order in which the kernel
            leaves it: ``[repeats * BLOCK, groups]`` of a block; ``T * heads`` is nowhere.
    """

    runs: tuple[_Run, ...]
    queries: Tensor
    targets: Tensor


def attend(
    query: Tensor, key: Tensor, value: Tensor, segments: PackedSegments, scores: Scores
) -> Tensor:
    """``query [T, heads, c]``, ``key`` and ``value [C + T, groups, c]`` -> ``[T, heads, c]``."""
    (tokens, heads, channels), groups = query.shape, key.size(1)
    repeats, precise = heads // groups, torch.promote_types(query.dtype, torch.float32)
    plan = segments.remembered((heads, groups), lambda: plan_blocks(segments, heads, groups))
    mask = segments.remembered(
        (repeats, scores.window, precise), lambda: _mask(plan, repeats, scores.window).to(precise)
    )
    queries = query.reshape(-1, channels).index_select(0, plan.queries).to(precise)
    queries = queries.view(-1, groups, repeats * BLOCK, channels)
    targets = plan.targets.view(len(queries), -1)
    out = query.new_empty(tokens * heads + 1, channels)
    first = 0
    for run in plan.runs:
        keys, values = (run.gather(x).to(precise) for x in (key, value))
        for block, count in run.blocks:
            seen = slice(_first_key(block, scores.window), (block + 1) * BLOCK)
            found = _attend_block(
                queries[first : first + count],
                keys[:count, seen].transpose(1, 2),
                values[:count, seen].transpose(1, 2),
                mask[:, seen.start - seen.stop :],
                scores,
            )
            found = found.transpose(1, 2).reshape(-1, channels).to(out.dtype)
            out.index_copy_(0, targets[first : first + count].flatten(), found)
            first += count
    return out[:-1].view(tokens, heads, channels)


def _attend_block(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scores: Scores) -> Tensor:
    """``q [n, groups, rows, c]`` on ``k`` and ``v [n, groups, keys, c]``, each of n by itself."""
    if scores.soft_cap is None:
        return cpu_flash_attention(q, k, v, 0.0, False, attn_mask=mask, scale=scores.scale)[0]
    # How many matrices there are must not matter: one by one.
    seen = mask == 0
    each = zip(q.split(1), k.split(1), v.split(1), strict=True)
    return torch.cat([attend_by_scores(*one, seen, scores) for one in each])


def _first_key(block: int, window: int | None) -> int:
    """The first key that a block's queries may see, at a block's beginning."""
    return 0 if window is None else max(0, block * BLOCK - window + 1) // BLOCK * BLOCK


def _mask(plan: BlockPlan, repeats: int, window: int | None) -> Tensor:
    """``[repeats * BLOCK, K]``: of keys that end where the block does, what is added to scores."""
    keys = max(run.keys.size(1) for run in plan.runs)
    behind = keys - BLOCK
    hidden = torch.ones(BLOCK, keys, dtype=torch.bool).triu(behind + 1)
    if window is not None:
        hidden |= torch.ones(BLOCK, keys, dtype=torch.bool).tril(behind - window)
    return torch.zeros(BLOCK, keys).masked_fill_(hidden, float("-inf")).repeat(repeats, 1)


def plan_blocks(segments: PackedSegments, heads: int, groups: int) -> BlockPlan:
    """Every query of the pack once, in blocks at fixed positions of the sequences."""
    runs, rows = [], []
    for members in _runs(_own_segments(segments)):
        blocks = range(members[0].first_block, members[0].num_blocks)
        having = {b: [each for each in members if each.num_blocks > b] for b in blocks}
        rows += [each.rows_of(block) for block, them in having.items() for each in them]
        keys = _filled([each.keys for each in members], members[0].num_blocks * BLOCK)
        runs.append(_Run(keys, tuple((block, len(them)) for block, them in having.items())))
    return BlockPlan(tuple(runs), *_of_heads(np.stack(rows), sum(segments.lengths), heads, groups))


def _own_segments(segments: PackedSegments) -> Iterator[_Segment]:
    rows, bounds = (each.tolist() for each in (segments.cu_seqlens, segments.kv_cu_seqlens))
    index = segments.kv_index
    every = np.arange(rows[-1]) if index is None else index.numpy()
    for row, length, (first, end) in zip(rows, segments.lengths, pairwise(bounds), strict=False):
        yield _Segment(row, end - first - length, end - first, every[first:end])


def _runs(segments: Iterator[_Segment]) -> Iterator[list[_Segment]]:
    """Those that start in one block together, if none is more than twice as long as another."""
    alike: dict[tuple[int, int], list[_Segment]] = defaultdict(list)
    for each in segments:
        alike[each.first_block, each.num_blocks.bit_length()].append(each)
    for members in alike.values():
        yield sorted(members, key=lambda each: -each.num_blocks)


def _filled(keys: Sequence[np.ndarray], length: int) -> Tensor:
    """``[n, length]``; filled up by a sequence's own key, which no mask lets pass."""
    filled = [np.pad(each, (0, length - len(each)), mode="edge") for each in keys]
    return torch.from_numpy(np.stack(filled))


def _of_heads(rows: np.ndarray, tokens: int, heads: int, groups: int) -> tuple[Tensor, Tensor]:
    """BlockPlan's ``queries`` and ``targets`` of ``rows [N, BLOCK]``."""
    # Head g * repeats + i is the i-th of group g.
    head = np.arange(heads).reshape(groups, heads // groups)
    queries = np.maximum(rows, 0)[:, None, None, :] * heads + head[:, :, None]
    targets = np.where(rows < 0, tokens, rows)[:, None, :, None] * heads + head.T[:, None, :]
    nowhere = np.minimum(targets, tokens * heads)
    return torch.from_numpy(queries.reshape(-1)), torch.from_numpy(nowhere.reshape(-1))
