"""Blockwise attention on a CPU for inference, with the same bits for a token in any batch.

Queries are processed in blocks of 32 positions of their *sequence*, however its beginning is
provided: with it, as a shared prefix, or from the cache. The keys that a block sees in one call
follow from its position alone, and queries that the pack lacks are padded. No kernel mixes the rows
of a product, so a token's arithmetic is a function of its sequence.

Distant keys come first, in spans of 512 positions. All queries past a span see all of it, so those
of every text that begins with it share one call and one copy of its keys. Partial results of the
spans and of the remaining keys are merged in order of position by their log-sum-exp.

The query heads of a group lie one after the other in a block, because they share keys. Blocks with
equally many keys share a call, in fp32: for narrower types torch's kernel chooses between two
products by the size of the whole call.

Where kernels.c could be compiled it attends instead, to a sequence's keys in one pass.
"""

from __future__ import annotations

import ctypes
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from nemo_aligner.cpu import kernels
from nemo_aligner.models.attention.segments import (
    PackedSegments,
    Scores,
    add_attended,
    attend_by_scores,
)
from nemo_aligner.models.internals import cpu_flash_attention

# Up to so many elements (at::internal::GRAIN_SIZE) one thread computes all of them, in whole
# vectors. Beyond, the remainder of a thread's share goes through a different exponential.
_GRAIN = 2**15


def attend(
    turned: Tensor, value: Tensor, layer_number: int, segments: PackedSegments, scores: Scores
) -> Tensor:
    """Attend each token to its own sequence up to itself.

    Args:
        turned: ``[T, groups, repeats + 1, c]``, contiguous: of each group its query heads and then
            its key, all rotated to their positions.
        value: ``[T, groups, c]``.
        layer_number: whose keys and values in the segments' pool are read and written.

    Returns:
        ``[T, heads, c]``.
    """
    tokens, groups, width, channels = turned.shape
    heads = groups * (width - 1)
    precise = torch.promote_types(turned.dtype, torch.float32)
    plan = segments.remembered(
        (heads, groups, scores, precise),
        lambda: plan_blocks(segments, heads, groups, scores, precise),
    )
    key, value = segments.gathered(turned[:, :, -1], value)
    key, value = segments.with_cached(layer_number, key, value)
    queries = turned.view(-1, channels).index_select(0, plan.queries.view(-1)).to(precise)
    queries = queries.view(len(plan.queries), groups, -1, channels)
    outputs = _Outputs(tokens * heads + 1, channels, precise)
    complete: list[Tensor] = []
    ends: list[tuple[Tensor, Tensor]] = []
    first = 0
    for step in plan.steps:
        for part in step.parts(key, value, precise):
            last = first + len(part.keys)
            mask = plan.mask[:, -part.keys.size(2) :] if part.is_last else None
            found, lse = _attend_part(queries[first:last], part, mask, scores)
            # The kernel's own layout is [n, rows, groups, c].
            rows = found.transpose(1, 2).reshape(-1, channels)
            if part.is_first and part.is_last:
                complete.append(rows)
            elif part.is_last:
                ends.append((rows, lse.transpose(1, 2).flatten()))
            else:
                put = outputs.put if part.is_first else outputs.add
                put(plan.targets[first:last].view(-1), rows, lse.transpose(1, 2).flatten())
            first = last
    if complete:
        outputs.out.index_copy_(0, plan.complete, _joined(complete))
    if ends:
        outputs.add(plan.ends, *(_joined(each) for each in zip(*ends, strict=True)))
    return outputs.out[:-1].view(tokens, heads, channels).to(turned.dtype)


def _joined(pieces: Sequence[Tensor]) -> Tensor:
    return pieces[0] if len(pieces) == 1 else torch.cat(list(pieces))


def _attend_part(
    query: Tensor, part: Part, mask: Tensor | None, scores: Scores
) -> tuple[Tensor, Tensor]:
    """Attend ``query [n, groups, rows, c]`` batchwise; returns output and log-sum-exp."""
    keys, values = part.keys, part.values
    if scores.soft_cap is None:
        output: tuple[Tensor, Tensor] = cpu_flash_attention(
            query, keys, values, 0.0, False, attn_mask=mask, scale=scores.scale
        )
        return output
    assert mask is not None
    # One matrix at a time: the batch size must not select a kernel.
    each = zip(query.split(1), keys.split(1), values.split(1), strict=True)
    found = torch.cat([attend_by_scores(*one, mask == 0, scores) for one in each])
    return found, found.new_zeros(found.shape[:-1])  # soft-capped blocks have a single part


class _Outputs:
    """Running result ``out [rows, c]`` of queries that see their keys part by part."""

    def __init__(self, rows: int, channels: int, dtype: torch.dtype) -> None:
        self.out = torch.empty(rows, channels, dtype=dtype)
        self._lse = torch.empty(rows, dtype=dtype)

    def put(self, targets: Tensor, found: Tensor, lse: Tensor) -> None:
        """Set the rows ``targets [m]`` to the result of their first keys."""
        self.out.index_copy_(0, targets, found)
        self._lse.index_copy_(0, targets, lse)

    def add(self, targets: Tensor, found: Tensor, lse: Tensor) -> None:
        """Merge the result of the next keys into the rows ``targets``."""
        for some in zip(*(x.split(_GRAIN) for x in (targets, found, lse)), strict=True):
            self._add(*some)

    def _add(self, targets: Tensor, found: Tensor, lse: Tensor) -> None:
        seen, its_lse = self.out.index_select(0, targets), self._lse.index_select(0, targets)
        add_attended(seen, its_lse, found, lse)
        self.put(targets, seen, its_lse)


# Planning: which queries and keys of a pack share a call.

BLOCK, SPAN = 32, 512


@dataclass(frozen=True)
class Part:
    """``keys`` and ``values [n, groups, k, c]`` that n blocks of queries see.

    ``is_first``: these keys begin their sequences. ``is_last``: they end with the block itself, and
    the causal mask applies.
    """

    keys: Tensor
    values: Tensor
    is_first: bool
    is_last: bool


@dataclass(frozen=True)
class _Span:
    """``keys [SPAN]``, int64 rows that all queries of ``blocks`` see, of any sequences."""

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
        keys: ``[n, K]`` int64 rows of their keys behind the spans, padded.
        blocks: for each block the number of segments that reach it (the first ones), the slice of
            keys that it sees, and whether it sees none before them.
    """

    keys: Tensor
    blocks: tuple[tuple[int, slice, bool], ...]

    def parts(self, key: Tensor, value: Tensor, dtype: torch.dtype) -> Iterator[Part]:
        rows, shape = self.keys.flatten(), self.keys.shape
        seen = (x.index_select(0, rows).to(dtype).unflatten(0, shape) for x in (key, value))
        keys, values = (x.transpose(1, 2) for x in seen)
        for count, seen_by_block, is_first in self.blocks:
            its_keys, its_values = (x[:count, :, seen_by_block] for x in (keys, values))
            yield Part(its_keys, its_values, is_first, is_last=True)


@dataclass(frozen=True)
class BlockPlan:
    """Order of all queries of a pack, for ``groups`` of ``repeats`` heads.

    Attributes:
        steps: the spans in order of position, then the runs.
        queries: ``[N, groups * repeats * BLOCK]`` int64 rows of ``T * groups * (repeats + 1)``,
            block by block in the order of the steps.
        targets: same size: the row of each output, in the order in which the kernel returns it,
            ``[repeats * BLOCK, groups]`` of a block; ``T * heads`` is a dummy row.
        complete: those of the blocks whose keys are one part, in one row.
        ends: those of the blocks that end what spans began, in one row.
        mask: ``[repeats * BLOCK, K]`` added to the scores of keys that end with the block.
    """

    steps: tuple[_Span | _Run, ...]
    queries: Tensor
    targets: Tensor
    complete: Tensor
    ends: Tensor
    mask: Tensor


def plan_blocks(
    segments: PackedSegments, heads: int, groups: int, scores: Scores, dtype: torch.dtype
) -> BlockPlan:
    """Plan a pack so that cutting a sequence into other segments changes no arithmetic."""
    own = list(own_segments(segments))
    steps: list[_Span | _Run] = []
    rows: list[np.ndarray] = []
    for number, keys, seeing in _spans(own) if _takes_spans(scores) else ():
        blocks = np.pad(seeing, (0, -len(seeing) % BLOCK), constant_values=-1).reshape(-1, BLOCK)
        rows += list(blocks)
        steps.append(_Span(torch.from_numpy(keys), len(blocks), is_first=number == 0))
    ends = len(rows)
    is_complete: list[bool] = []
    for members in _runs(own):
        run, its_rows = _plan_run(members, scores)
        rows += its_rows
        steps.append(run)
        for count, _, is_first in run.blocks:
            is_complete += [is_first] * count
    mask = _mask(max(each.num_blocks for each in own) * BLOCK, scores.window)
    queries, targets = _of_heads(np.stack(rows), int(segments.cu_seqlens[-1]), heads, groups)
    complete = torch.tensor(is_complete)
    return BlockPlan(
        tuple(steps),
        queries,
        targets,
        complete=targets[ends:][complete].flatten(),
        ends=targets[ends:][~complete].flatten(),
        mask=mask.repeat(heads // groups, 1).to(dtype),
    )


@dataclass(frozen=True)
class _Segment:
    """A segment's first row in the pack, its positions in its sequence, and its keys' rows."""

    row: int
    start: int
    end: int
    keys: np.ndarray

    @property
    def first_block(self) -> int:
        return self.start // BLOCK

    @property
    def num_blocks(self) -> int:
        """Blocks of the sequence up to the segment's end."""
        return -(-self.end // BLOCK)

    def rows_of(self, block: int) -> np.ndarray:
        """Rows ``[BLOCK]`` of a block's queries; -1 where the segment has none."""
        positions = np.arange(block * BLOCK, (block + 1) * BLOCK)
        is_own = (positions >= self.start) & (positions < self.end)
        return np.where(is_own, positions + self.row - self.start, -1)

    def rows_from(self, position: int) -> np.ndarray:
        """Rows of its queries from a position on."""
        return np.arange(max(position, self.start), self.end) + self.row - self.start


def own_segments(segments: PackedSegments) -> Iterator[_Segment]:
    """Yield the pack's own segments, each with the rows of all keys of its sequence."""
    rows, bounds = (each.tolist() for each in (segments.cu_seqlens, segments.kv_cu_seqlens))
    index = segments.kv_index
    every = np.arange(rows[-1]) if index is None else index.numpy()
    for (row, stop), (first, end) in zip(pairwise(rows), pairwise(bounds), strict=True):
        size = end - first
        yield _Segment(row, size - (stop - row), size, every[first:end])


def _takes_spans(scores: Scores) -> bool:
    """False with a window or soft cap, where a block sees all its keys in one call."""
    return scores.window is None and scores.soft_cap is None


def _spans(segments: Iterable[_Segment]) -> Iterator[tuple[int, np.ndarray, np.ndarray]]:
    """Yield each span's number in its sequence, its keys, and the rows of all queries past it."""
    found: dict[tuple[int, bytes], list[np.ndarray]] = defaultdict(list)
    for each in segments:
        # The span of the last block is incomplete.
        for number in range((each.num_blocks - 1) * BLOCK // SPAN):
            end = (number + 1) * SPAN
            found[number, each.keys[end - SPAN : end].tobytes()].append(each.rows_from(end))
    for (number, keys), rows in sorted(found.items(), key=lambda item: item[0][0]):
        yield number, np.frombuffer(keys, np.int64).copy(), np.concatenate(rows)


def _runs(segments: Iterable[_Segment]) -> Iterator[list[_Segment]]:
    """Group segments that start in one block, none more than twice as long as another."""
    alike: dict[tuple[int, int], list[_Segment]] = defaultdict(list)
    for each in segments:
        alike[each.first_block, each.num_blocks.bit_length()].append(each)
    for members in alike.values():
        yield sorted(members, key=lambda each: -each.num_blocks)


def _plan_run(members: Sequence[_Segment], scores: Scores) -> tuple[_Run, list[np.ndarray]]:
    """Plan the run of ``members``; returns it with the rows of its blocks."""
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
    return _Run(torch.from_numpy(keys), tuple(blocks)), rows


def _first_key(block: int, scores: Scores) -> int:
    """First key, aligned to a block, that a block's queries see in their last step."""
    if _takes_spans(scores):
        return block * BLOCK // SPAN * SPAN
    if scores.window is None:
        return 0
    return max(0, block * BLOCK - scores.window + 1) // BLOCK * BLOCK


def _mask(keys: int, window: int | None) -> Tensor:
    """Causal mask ``[BLOCK, keys]``: -inf for keys that a query does not see, else 0."""
    behind = keys - BLOCK
    hidden = torch.ones(BLOCK, keys, dtype=torch.bool).triu(behind + 1)
    if window is not None:
        hidden |= torch.ones(BLOCK, keys, dtype=torch.bool).tril(behind - window)
    return torch.zeros(BLOCK, keys).masked_fill_(hidden, float("-inf"))


def _filled(keys: Sequence[np.ndarray], length: int) -> np.ndarray:
    """Stack to ``[n, length]``, padding with a sequence's own last key, which the mask hides."""
    filled = [np.pad(each, (0, length - len(each)), mode="edge") for each in keys]
    return np.stack(filled)


def _of_heads(rows: np.ndarray, tokens: int, heads: int, groups: int) -> tuple[Tensor, Tensor]:
    """Compute ``BlockPlan.queries`` and ``targets`` of ``rows [N, BLOCK]``."""
    # Head g * repeats + i is the i-th query head of group g, behind which its key lies.
    repeats = heads // groups
    head = np.arange(heads).reshape(groups, repeats)
    place = np.arange(groups * (repeats + 1)).reshape(groups, repeats + 1)[:, :-1]
    queries = np.maximum(rows, 0)[:, None, None, :] * (heads + groups) + place[:, :, None]
    targets = np.where(rows < 0, tokens, rows)[:, None, :, None] * heads + head.T[:, None, :]
    nowhere = np.minimum(targets, tokens * heads)
    blocks = len(rows)
    return torch.from_numpy(queries.reshape(blocks, -1)), torch.from_numpy(
        nowhere.reshape(blocks, -1)
    )


# Attention by kernels.c, which needs no spans, no padded blocks and no merging.


# As in kernels.c: rows that are computed together, channels at most, and in steps.
_ROWS, _MOST_CHANNELS, _CHANNELS = 96, 256, 4
_NO_WINDOW = 2**30


def can_attend(dtype: torch.dtype, channels: int, repeats: int) -> bool:
    """Tell if the kernel can be had, and computes groups of so many query heads of a key head."""
    fits = channels <= _MOST_CHANNELS and repeats <= _ROWS
    return fits and kernels.can_take(dtype, channels, _CHANNELS)


def attend_by_kernel(
    turned: Tensor, value: Tensor, layer_number: int, segments: PackedSegments, scores: Scores
) -> Tensor:
    """Attend each token to its own sequence up to itself; as ``attend``, in any strides."""
    tokens, groups, width, channels = turned.shape
    repeats = width - 1
    key, value = segments.gathered(turned[:, :, -1], value)
    use, pool = segments.cached, segments.pool
    kept: Tensor | tuple[None, None] = (None, None)
    stored: tuple[int | None, int | None, int] = (None, None, 0)
    if use is not None and pool is not None:
        kept = pool.layer(layer_number)
        stored = (use.stored.data_ptr(), use.slots.data_ptr(), len(use.stored))
    items, rows = segments.remembered(("items", repeats), lambda: _plan(segments, repeats))
    keys, values = (_Source.of(*each) for each in zip(kept, (key, value), strict=True))
    out = turned.new_empty(tokens, groups * repeats, channels)
    kernels.call(
        "attend",
        turned.dtype is torch.bfloat16,
        turned.data_ptr(),
        *turned.stride()[:2],
        ctypes.byref(keys),
        ctypes.byref(values),
        out.data_ptr(),
        groups,
        repeats,
        channels,
        channels**-0.5 if scores.scale is None else scores.scale,
        scores.window or _NO_WINDOW,
        items.data_ptr(),
        len(items),
        rows.data_ptr(),
        *stored,
    )
    return out


class _Source(ctypes.Structure):
    """Addresses and strides of a layer's keys, or values: the pool's, and the pack's own."""

    _fields_ = (
        ("pool", ctypes.c_void_p),
        ("own", ctypes.c_void_p),
        ("pool_token", ctypes.c_int64),
        ("pool_group", ctypes.c_int64),
        ("own_token", ctypes.c_int64),
        ("own_group", ctypes.c_int64),
    )

    @classmethod
    def of(cls, pool: Tensor | None, own: Tensor) -> _Source:
        """Of ``[slots, groups, c]``, and of ``[T, groups, c]``."""
        address, strides = (None, (0, 0)) if pool is None else (pool.data_ptr(), pool.stride()[:2])
        return cls(address, own.data_ptr(), *strides, *own.stride()[:2])


def _plan(segments: PackedSegments, repeats: int) -> tuple[Tensor, Tensor]:
    """Plan what is computed together, the most expensive first.

    Returns:
        ``[n, 4]`` int32: an item's first row in the pack, its tokens, the position of the first,
        and where its sequence's keys begin in the second array: ``[K]`` int32 rows of keys. They
        are of the pack, or of the pool as ``-1 - slot``.
    """
    use = segments.cached
    row_of = np.arange(sum(segments.lengths))
    if use is not None:
        row_of = np.concatenate([-1 - use.taken.numpy(), row_of])
    rows, items, begin, most = [], [], 0, _ROWS // repeats
    for each in own_segments(segments):
        rows.append(row_of[each.keys])
        own = each.end - each.start
        size = -(-own // -(-own // most))  # of about equal items, as few as can be
        for position in range(each.start, each.end, size):
            count = min(size, each.end - position)
            items.append((each.row + position - each.start, count, position, begin))
        begin += len(each.keys)
    items.sort(key=lambda item: -item[2])
    return torch.tensor(items, dtype=torch.int32), torch.from_numpy(
        np.concatenate(rows).astype(np.int32)
    )
