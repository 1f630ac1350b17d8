"""Blockwise attention on a CPU for inference: the same bits for a token in any batch."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from nemo_aligner.models.attention.segments import (
    PackedSegments,
    Scores,
    add_attended,
    attend_by_scores,
)
from nemo_aligner.models.internals import cpu_flash_attention

# Attention without a backward on a CPU, the same bits for a token in whatever company.
#
# Queries are taken by blocks of 32 positions of their *sequence*, however its beginning came about:
# with it, for a neighbour, or from a pool of keys. Which keys a block sees at once follows from its
# position alone, and queries that the pack has not are filled up. So a token's arithmetic is a
# function of its sequence, as no kernel mixes the rows of a product.
#
# Keys far behind are seen first, by spans of 512 positions. All queries past a span see the whole
# of it, so those of all texts that begin with it are computed together, with one copy of its keys.
# What a query got from its spans, and from the keys between them and the end of its block, is put
# together by the log-sum-exp of its scores, in the order of the positions.
#
# The query heads of a group stand one after the other in a block, as they have the same keys.
# Blocks with as many keys are computed in one call, in fp32: of narrower types torch's kernel takes
# one of two products by the size of the whole call.

# Of at most so many numbers (at::internal::GRAIN_SIZE) one thread computes all, in whole vectors.
# Of more, what is left over of a thread's share has another exponential function.
_GRAIN = 2**15


def attend(
    query: Tensor, key: Tensor, value: Tensor, segments: PackedSegments, scores: Scores
) -> Tensor:
    """``query [T, heads, c]``, ``key`` and ``value [C + T, groups, c]`` -> ``[T, heads, c]``."""
    (tokens, heads, channels), groups = query.shape, key.size(1)
    precise = torch.promote_types(query.dtype, torch.float32)
    plan = segments.remembered(
        (heads, groups, scores, precise),
        lambda: plan_blocks(segments, heads, groups, scores, precise),
    )
    queries = query.reshape(-1, channels).index_select(0, plan.queries.flatten()).to(precise)
    queries = queries.view(len(plan.queries), groups, -1, channels)
    outputs = _Outputs(tokens * heads + 1, channels, precise)
    first = 0
    for step in plan.steps:
        for part in step.parts(key, value, precise):
            blocks = slice(first, first + len(part.keys))
            mask = plan.mask[:, -part.keys.size(2) :] if part.is_last else None
            found = _attend_part(queries[blocks], part, mask, scores)
            put = outputs.put if part.is_first else outputs.add
            put(plan.targets[blocks].flatten(), *(x.transpose(1, 2).flatten(0, 2) for x in found))
            first = blocks.stop
    return outputs.out[:-1].view(tokens, heads, channels).to(query.dtype)


def _attend_part(
    query: Tensor, part: Part, mask: Tensor | None, scores: Scores
) -> tuple[Tensor, Tensor]:
    """Of ``query [n, groups, rows, c]``, each of n by itself: the output, ``[n, groups, rows]``."""
    keys, values = part.keys, part.values
    if scores.soft_cap is None:
        output: tuple[Tensor, Tensor] = cpu_flash_attention(
            query, keys, values, 0.0, False, attn_mask=mask, scale=scores.scale
        )
        return output
    assert mask is not None
    # How many matrices there are must not matter: one by one.
    each = zip(query.split(1), keys.split(1), values.split(1), strict=True)
    found = torch.cat([attend_by_scores(*one, mask == 0, scores) for one in each])
    return found, found.new_zeros(found.shape[:-1])  # nothing is added to it


class _Outputs:
    """``out [rows, c]`` of queries that see their keys part by part."""

    def __init__(self, rows: int, channels: int, dtype: torch.dtype) -> None:
        self.out = torch.empty(rows, channels, dtype=dtype)
        self._lse = torch.empty(rows, dtype=dtype)

    def put(self, targets: Tensor, found: Tensor, lse: Tensor) -> None:
        """What the rows ``targets [m]`` got from their first keys."""
        self.out.index_copy_(0, targets, found)
        self._lse.index_copy_(0, targets, lse)

    def add(self, targets: Tensor, found: Tensor, lse: Tensor) -> None:
        """What they got from the keys that come next."""
        for some in zip(*(x.split(_GRAIN) for x in (targets, found, lse)), strict=True):
            self._add(*some)

    def _add(self, targets: Tensor, found: Tensor, lse: Tensor) -> None:
        seen, its_lse = self.out.index_select(0, targets), self._lse.index_select(0, targets)
        add_attended(seen, its_lse, found, lse)
        self.put(targets, seen, its_lse)


# Which queries and keys of a pack are computed together in attention by blocks.

BLOCK, SPAN = 32, 512


@dataclass(frozen=True)
class Part:
    """``keys`` and ``values [n, groups, k, c]`` that n blocks of queries see.

    ``is_first`` are those with which their sequences begin. Those that end where the block does are
    ``is_last``: of them a query sees the ones that a mask lets pass.
    """

    keys: Tensor
    values: Tensor
    is_first: bool
    is_last: bool


@dataclass(frozen=True)
class _Span:
    """``keys [SPAN]``, int64 rows, that all queries of ``blocks`` see, of whatever sequences."""

    keys: Tensor
    blocks: int
    is_first: bool

    def parts(self, key: Tensor, value: Tensor, dtype: torch.dtype) -> Iterator[Part]:
        seen = (x.index_select(0, self.keys).to(dtype).transpose(0, 1) for x in (key, value))
        keys, values = (x.expand(self.blocks, -1, -1, -1) for x in seen)
        yield Part(keys, values, self.is_first, is_last=False)


@dataclass(frozen=True)
class _Run:
    """Segments that start in the same block, the longest first.

    Attributes:
        keys: ``[n, K]`` int64 rows of their keys after those of spans, filled up.
        blocks: of every block how many of the segments have it, the first ones; which of the keys
            it sees; and whether it sees none before them.
    """

    keys: Tensor
    blocks: tuple[tuple[int, slice, bool], ...]

    def parts(self, key: Tensor, value: Tensor, dtype: torch.dtype) -> Iterator[Part]:
        keys, values = (
            x.index_select(0, self.keys.flatten()).view(*self.keys.shape, *x.shape[1:]).to(dtype)
            for x in (key, value)
        )
        for count, seen, is_first in self.blocks:
            its_keys, its_values = (x[:count, seen].transpose(1, 2) for x in (keys, values))
            yield Part(its_keys, its_values, is_first, is_last=True)


@dataclass(frozen=True)
class BlockPlan:
    """Every query of a pack, for ``groups`` of ``repeats`` heads.

    Attributes:
        steps: the spans in the order of their positions, then what comes after them.
        queries: ``[N, groups * repeats * BLOCK]`` int64, which of the ``T * heads`` rows, block
            by block, in the order of the steps.
        targets: the same number, where their output belongs, in the order in which the kernel
            leaves it: ``[repeats * BLOCK, groups]`` of a block; ``T * heads`` is nowhere.
        mask: ``[repeats * BLOCK, K]`` of keys that end where the block does, added to the scores.
    """

    steps: tuple[_Span | _Run, ...]
    queries: Tensor
    targets: Tensor
    mask: Tensor


def plan_blocks(
    segments: PackedSegments, heads: int, groups: int, scores: Scores, dtype: torch.dtype
) -> BlockPlan:
    """The same arithmetic for a query wherever its sequence is cut into segments."""
    own = list(_own_segments(segments))
    steps: list[_Span | _Run] = []
    rows: list[np.ndarray] = []
    for number, keys, seeing in _spans(own) if _takes_spans(scores) else ():
        blocks = np.pad(seeing, (0, -len(seeing) % BLOCK), constant_values=-1).reshape(-1, BLOCK)
        rows += list(blocks)
        steps.append(_Span(torch.from_numpy(keys), len(blocks), is_first=number == 0))
    for members in _runs(own):
        run, its_rows = _plan_run(members, scores)
        rows += its_rows
        steps.append(run)
    mask = _mask(max(each.num_blocks for each in own) * BLOCK, scores.window)
    queries, targets = _of_heads(np.stack(rows), sum(segments.lengths), heads, groups)
    return BlockPlan(tuple(steps), queries, targets, mask.repeat(heads // groups, 1).to(dtype))


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

    def rows_from(self, position: int) -> np.ndarray:
        """The rows of its queries from a position on."""
        return np.arange(max(position, self.start), self.end) + self.row - self.start


def _own_segments(segments: PackedSegments) -> Iterator[_Segment]:
    rows, bounds = (each.tolist() for each in (segments.cu_seqlens, segments.kv_cu_seqlens))
    index = segments.kv_index
    every = np.arange(rows[-1]) if index is None else index.numpy()
    for row, length, (first, end) in zip(rows, segments.lengths, pairwise(bounds), strict=False):
        yield _Segment(row, end - first - length, end - first, every[first:end])


def _takes_spans(scores: Scores) -> bool:
    """Else a block sees all its keys at once."""
    return scores.window is None and scores.soft_cap is None


def _spans(segments: Iterable[_Segment]) -> Iterator[tuple[int, np.ndarray, np.ndarray]]:
    """Each span's number in its sequence, its keys, and the rows of all queries past it."""
    found: dict[tuple[int, bytes], list[np.ndarray]] = defaultdict(list)
    for each in segments:
        # The last block's span is not over yet.
        for number in range((each.num_blocks - 1) * BLOCK // SPAN):
            end = (number + 1) * SPAN
            found[number, each.keys[end - SPAN : end].tobytes()].append(each.rows_from(end))
    for (number, keys), rows in sorted(found.items(), key=lambda item: item[0][0]):
        yield number, np.frombuffer(keys, np.int64).copy(), np.concatenate(rows)


def _runs(segments: Iterable[_Segment]) -> Iterator[list[_Segment]]:
    """Those that start in one block together, if none is more than twice as long as another."""
    alike: dict[tuple[int, int], list[_Segment]] = defaultdict(list)
    for each in segments:
        alike[each.first_block, each.num_blocks.bit_length()].append(each)
    for members in alike.values():
        yield sorted(members, key=lambda each: -each.num_blocks)


def _plan_run(members: Sequence[_Segment], scores: Scores) -> tuple[_Run, list[np.ndarray]]:
    """A run of ``members``, and the rows of its blocks."""
    numbers = range(members[0].first_block, members[0].num_blocks)
    start = _first_key(numbers[0], scores)
    rows, blocks = [], []
    for block in numbers:
        having = [each for each in members if each.num_blocks > block]
        rows += [each.rows_of(block) for each in having]
        first = _first_key(block, scores)
        seen = slice(first - start, (block + 1) * BLOCK - start)
        blocks.append((len(having), seen, first == 0 or not _takes_spans(scores)))
    keys = _filled([each.keys[start:] for each in members], numbers[-1] * BLOCK + BLOCK - start)
    return _Run(keys, tuple(blocks)), rows


def _first_key(block: int, scores: Scores) -> int:
    """The first key that a block's queries see in their last step, at a block's beginning."""
    if _takes_spans(scores):
        return block * BLOCK // SPAN * SPAN
    if scores.window is None:
        return 0
    return max(0, block * BLOCK - scores.window + 1) // BLOCK * BLOCK


def _mask(keys: int, window: int | None) -> Tensor:
    """``[BLOCK, keys]``: -inf for those that a query does not see."""
    behind = keys - BLOCK
    hidden = torch.ones(BLOCK, keys, dtype=torch.bool).triu(behind + 1)
    if window is not None:
        hidden |= torch.ones(BLOCK, keys, dtype=torch.bool).tril(behind - window)
    return torch.zeros(BLOCK, keys).masked_fill_(hidden, float("-inf"))


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
    blocks = len(rows)
    return torch.from_numpy(queries.reshape(blocks, -1)), torch.from_numpy(
        nowhere.reshape(blocks, -1)
    )
