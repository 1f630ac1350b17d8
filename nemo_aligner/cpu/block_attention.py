"""Blockwise attention for scoring on a CPU; a token's output is bit-identical in every batch.

Queries are processed in blocks of 32 positions, which are counted from the start of the *sequence*,
even if its first tokens are in a shared or cached prefix. Which keys a block sees in one kernel
call depends only on the block's position. Positions of a block whose tokens are not in the pack are
padded. No kernel mixes the rows of a matmul, so a token's arithmetic depends only on its sequence.

A block attends first to distant keys, in spans of 512 positions. All queries after a span see all
of its keys. So all sequences that share the span (in a shared prefix) compute their queries in one
call, with one copy of its keys. The results for the spans and for the remaining keys are merged by
their log-sum-exp, in order of position.

The query heads of a group are adjacent in a block, because they share keys. Blocks with the same
number of keys share a call. The dtype is fp32: in narrower dtypes, torch's kernel chooses between
two matmuls by the size of the whole call, so results would depend on the batch.

``plan_blocks`` plans a pack once, and ``attend_in_blocks`` computes each layer from that plan.
Where ``kernels.c`` compiles, ``kernel_attention.py`` is faster and is used instead.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from nemo_aligner.cpu.flash_attention import add_attended, cpu_flash_attention
from nemo_aligner.utils.explicit_scores import explicit_attention

# torch computes up to this many elements in one thread (at::internal::GRAIN_SIZE). With several
# threads, the last elements of each thread that do not fill a vector get a slightly different exp,
# so results would depend on the number of elements.
_GRAIN = 2**15


def attend_in_blocks(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    plan: BlockPlan,
    scale: float | None,
    soft_cap: float | None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Attend each token of a pack causally to its own sequence.

    The pack has T tokens, and C tokens are cached; a head has c channels.

    Args:
        query: ``[T, groups, repeats, c]``, contiguous: for each group its query heads, after RoPE.
        key, value: ``[C + T, groups, c]`` of the cached tokens and of the pack's tokens.
        plan: the pack's plan for layers with these heads and this window.
        scale: factor of the scores; None means ``c ** -0.5``.
        soft_cap: limit of the scores (Gemma 2); None means no limit.
        sinks: logits ``[heads]`` of attention sinks; None if there are none.

    Returns:
        ``[T, heads, c]`` in the dtype of ``query``.
    """
    tokens, groups, repeats, channels = query.shape
    heads = groups * repeats
    precise = torch.promote_types(query.dtype, torch.float32)
    queries = query.view(-1, channels).index_select(0, plan.queries.view(-1)).to(precise)
    queries = queries.view(len(plan.queries), groups, -1, channels)
    outputs = _Outputs(tokens * heads + 1, channels, precise)
    # With a soft cap, the scores include the sinks already.
    joined_sinks = None if soft_cap is not None else sinks
    of_rows = None if sinks is None else sinks.view(groups, -1).repeat_interleave(BLOCK, dim=1)
    complete: list[Tensor] = []
    ends: list[tuple[Tensor, Tensor]] = []
    first = 0
    for step in plan.steps:
        for part in step.parts(key, value, precise):
            last = first + len(part.keys)
            mask = plan.mask[:, -part.keys.size(2) :] if part.is_last else None
            output, lse = _attend_part(queries[first:last], part, mask, scale, soft_cap, of_rows)
            # The kernel returns a view of memory in the order [n, rows, groups, c].
            rows = output.transpose(1, 2).reshape(-1, channels)
            if part.is_first and part.is_last and joined_sinks is None:
                complete.append(rows)
            elif part.is_last and not part.is_first:
                ends.append((rows, lse.transpose(1, 2).flatten()))
            else:
                put = outputs.put if part.is_first else outputs.add
                put(plan.targets[first:last].view(-1), rows, lse.transpose(1, 2).flatten())
            first = last
    if complete:
        outputs.out.index_copy_(0, plan.complete, _join(complete))
    if ends:
        outputs.add(plan.ends, *(_join(pieces) for pieces in zip(*ends, strict=True)))
    if joined_sinks is not None:
        outputs.join_sinks(torch.cat([plan.complete, plan.ends]), joined_sinks)
    return outputs.out[:-1].view(tokens, heads, channels).to(query.dtype)


def _join(pieces: Sequence[Tensor]) -> Tensor:
    return pieces[0] if len(pieces) == 1 else torch.cat(list(pieces))


def _attend_part(
    query: Tensor,
    part: Part,
    mask: Tensor | None,
    scale: float | None,
    soft_cap: float | None,
    sinks: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Attend n blocks of queries ``[n, groups, rows, c]`` to the keys of ``part``.

    Args:
        sinks: logits ``[groups, rows]`` of attention sinks, included only with a soft cap; None if
            there are none.

    Returns:
        The output, and its log-sum-exp.
    """
    keys, values = part.keys, part.values
    if soft_cap is None:
        output: tuple[Tensor, Tensor] = cpu_flash_attention(
            query, keys, values, 0.0, False, attn_mask=mask, scale=scale
        )
        return output
    assert mask is not None
    sinks = None if sinks is None else sinks[:, None, :, None]
    # Compute one block at a time, so that the batch size does not select a kernel.
    blocks = zip(query.split(1), keys.split(1), values.split(1), strict=True)
    capped = torch.cat(
        [explicit_attention(*block, mask == 0, scale, soft_cap, sinks) for block in blocks]
    )
    # With a soft cap, a block sees all its keys in one call. Nothing is merged by log-sum-exp.
    return capped, capped.new_zeros(capped.shape[:-1])


class _Outputs:
    """Attention outputs ``out [rows, c]`` and their log-sum-exp, merged key range by key range."""

    def __init__(self, rows: int, channels: int, dtype: torch.dtype) -> None:
        self.out = torch.empty(rows, channels, dtype=dtype)
        self._lse = torch.empty(rows, dtype=dtype)

    def put(self, targets: Tensor, rows: Tensor, lse: Tensor) -> None:
        """Set the output rows ``targets [m]`` to ``rows [m, c]``, attention to the first keys."""
        self.out.index_copy_(0, targets, rows)
        self._lse.index_copy_(0, targets, lse)

    def add(self, targets: Tensor, rows: Tensor, lse: Tensor) -> None:
        """Merge ``rows [m, c]``, attention to the next keys, into the output rows ``targets``."""
        for chunk in zip(*(x.split(_GRAIN) for x in (targets, rows, lse)), strict=True):
            self._add(*chunk)

    def join_sinks(self, targets: Tensor, sinks: Tensor) -> None:
        """Merge the sinks ``[heads]`` into the output rows ``targets``, which are whole blocks.

        A sink is one more key with a value of zeros. Because the rows are whole blocks, torch
        computes each row with the same exponential in every pack.
        """
        zeros = self.out.new_zeros(1, 1).expand(len(targets), self.out.size(1))
        self.add(targets, zeros, sinks.to(self.out.dtype)[targets % len(sinks)])

    def _add(self, targets: Tensor, rows: Tensor, lse: Tensor) -> None:
        merged, merged_lse = self.out.index_select(0, targets), self._lse.index_select(0, targets)
        add_attended(merged, merged_lse, rows, lse)
        self.put(targets, merged, merged_lse)


# Planning: which queries and keys of a pack are computed in one call.

# Tokens of a block of queries, and of a span of keys before the block.
BLOCK, SPAN = 32, 512


@dataclass(frozen=True)
class Part:
    """Keys and values ``[n, groups, k, c]`` that n blocks of queries see in one call.

    Attributes:
        is_first: no earlier call attends to other keys, so there is no result to merge with.
        is_last: these keys end with the block's own positions, so the causal mask applies.
    """

    keys: Tensor
    values: Tensor
    is_first: bool
    is_last: bool


@dataclass(frozen=True)
class _Span:
    """SPAN successive keys, and the number of query blocks after them, which see all these keys.

    Attributes:
        keys: ``[SPAN]`` int64 rows of the keys.
        blocks: number of blocks. Their queries may belong to several sequences, which share these
            keys.
        is_first: the keys begin at position 0.
    """

    keys: Tensor
    blocks: int
    is_first: bool

    def parts(self, key: Tensor, value: Tensor, dtype: torch.dtype) -> Iterator[Part]:
        gathered = (x.index_select(0, self.keys).to(dtype).transpose(0, 1) for x in (key, value))
        keys, values = (x.expand(self.blocks, -1, -1, -1) for x in gathered)
        yield Part(keys, values, self.is_first, is_last=False)


@dataclass(frozen=True)
class _Run:
    """n segments that start in the same block of their sequences, the longest first.

    A block has BLOCK successive positions. Blocks of these segments at the same position share a
    call.

    Attributes:
        keys: ``[n, K]`` int64 rows of each segment's keys after the last span, padded.
        blocks: a tuple for each block position: how many segments reach the position (the first
            ones in ``keys``), the slice of ``keys`` that a block at the position sees, and whether
            these are all keys that the block sees (no span precedes them).
    """

    keys: Tensor
    blocks: tuple[tuple[int, slice, bool], ...]

    def parts(self, key: Tensor, value: Tensor, dtype: torch.dtype) -> Iterator[Part]:
        rows, shape = self.keys.flatten(), self.keys.shape
        gathered = (x.index_select(0, rows).to(dtype).unflatten(0, shape) for x in (key, value))
        keys, values = (x.transpose(1, 2) for x in gathered)
        for count, keys_of_block, is_first in self.blocks:
            its_keys, its_values = (x[:count, :, keys_of_block] for x in (keys, values))
            yield Part(its_keys, its_values, is_first, is_last=True)


@dataclass(frozen=True)
class BlockPlan:
    """The kernel calls that compute a pack, for ``groups`` of ``repeats`` query heads each.

    The pack has T tokens and N blocks of queries; a block that sees several spans counts once for
    each call.

    Attributes:
        steps: the keys of the calls: first the spans in order of position, then the runs.
        queries: ``[N, groups * repeats * BLOCK]`` int64 row indices of the pack's queries ``[T *
            heads, c]``, block by block in the order of the steps.
        targets: the output row of each query, same size, but in the kernel's order of outputs, for
            a block ``[repeats * BLOCK, groups]``; ``T * heads`` is a dummy row for padding.
        complete: targets, flattened, of the blocks that see all their keys in one call.
        ends: targets, flattened, of the last calls of all other blocks, which see spans before.
        mask: ``[repeats * BLOCK, K]``, the causal mask, added to the scores in a block's last call.
    """

    steps: tuple[_Span | _Run, ...]
    queries: Tensor
    targets: Tensor
    complete: Tensor
    ends: Tensor
    mask: Tensor


@dataclass(frozen=True)
class ScoreShape:
    """The properties of a layer's attention scores on which a ``BlockPlan`` depends.

    Attributes:
        window: keys that a query sees, its own included; None is all before it.
        is_capped: scores have a soft cap. ``soft_capped_attention`` returns no log-sum-exp, so a
            block must see all keys in one call.
    """

    window: int | None
    is_capped: bool

    @property
    def takes_spans(self) -> bool:
        """True if blocks attend to distant keys in spans; False with a window or a soft cap."""
        return self.window is None and not self.is_capped


def plan_blocks(
    segments: Sequence[SegmentKeys],
    heads: int,
    groups: int,
    scores: ScoreShape,
    dtype: torch.dtype,
) -> BlockPlan:
    """Plan the kernel calls of a pack.

    A token's calls depend only on its position in its sequence. So it gets bit-identical results
    however the sequence is cut into segments, for example by a cached prefix.

    Args:
        segments: the pack's segments from ``list_segment_keys``.
        dtype: dtype of the scores, fp32 or wider.
    """
    steps: list[_Span | _Run] = []
    rows: list[np.ndarray] = []
    for number, keys, seeing in _list_spans(segments) if scores.takes_spans else ():
        blocks = np.pad(seeing, (0, -len(seeing) % BLOCK), constant_values=-1).reshape(-1, BLOCK)
        rows += list(blocks)
        steps.append(_Span(torch.from_numpy(keys), len(blocks), is_first=number == 0))
    ends = len(rows)
    is_complete: list[bool] = []
    for members in _group_runs(segments):
        run, its_rows = _plan_run(members, scores)
        rows += its_rows
        steps.append(run)
        for count, _, is_first in run.blocks:
            is_complete += [is_first] * count
    mask = _causal_mask(max(segment.num_blocks for segment in segments) * BLOCK, scores.window)
    tokens = sum(segment.end - segment.start for segment in segments)
    queries, targets = _place_heads(np.stack(rows), tokens, heads, groups)
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
class SegmentKeys:
    """A segment of a pack, and the keys of its sequence from the first token to the segment's end.

    A segment is a shared prefix, or the rest of a sequence.

    Attributes:
        row: index of its first token in the pack.
        start, end: positions of its tokens in their sequence.
        keys: ``[end]`` int64 rows of all keys of the sequence, in order of position.
    """

    row: int
    start: int
    end: int
    keys: np.ndarray

    @property
    def first_block(self) -> int:
        return self.start // BLOCK

    @property
    def num_blocks(self) -> int:
        """Number of blocks (of BLOCK positions) from the sequence's start to the segment's end."""
        return -(-self.end // BLOCK)

    def rows_of(self, block: int) -> np.ndarray:
        """Return the pack rows ``[BLOCK]`` of the positions of a block; -1 outside the segment."""
        positions = np.arange(block * BLOCK, (block + 1) * BLOCK)
        is_own = (positions >= self.start) & (positions < self.end)
        return np.where(is_own, positions + self.row - self.start, -1)

    def rows_from(self, position: int) -> np.ndarray:
        """Return the pack rows of the segment's queries from a position in the sequence on."""
        return np.arange(max(position, self.start), self.end) + self.row - self.start


def list_segment_keys(
    query_bounds: Tensor, key_bounds: Tensor, key_index: Tensor | None
) -> list[SegmentKeys]:
    """List a pack's G segments, each with the rows of its sequence's keys.

    Args:
        query_bounds: ``[G + 1]`` bounds of the segments' tokens in the pack.
        key_bounds: ``[G + 1]`` bounds of their keys, prefixes included, in ``key_index``.
        key_index: ``[K]`` int64 row of every key; None if the keys are the tokens in their order.
    """
    rows, bounds = query_bounds.tolist(), key_bounds.tolist()
    key_rows = np.arange(rows[-1]) if key_index is None else key_index.numpy()
    segments = []
    for (row, stop), (first, end) in zip(pairwise(rows), pairwise(bounds), strict=True):
        size = end - first
        segments.append(SegmentKeys(row, size - (stop - row), size, key_rows[first:end]))
    return segments


def _list_spans(segments: Iterable[SegmentKeys]) -> Iterator[tuple[int, np.ndarray, np.ndarray]]:
    """Yield for each span its number in the sequence, its key rows, and the rows of its queries.

    Its queries are those of all positions after the span, in all sequences that share it.
    """
    rows_of_spans: dict[tuple[int, bytes], list[np.ndarray]] = defaultdict(list)
    for segment in segments:
        # A segment's last block may see only a part of the span that it is in, so that span is not
        # listed.
        for number in range((segment.num_blocks - 1) * BLOCK // SPAN):
            end = (number + 1) * SPAN
            rows_of_spans[number, segment.keys[end - SPAN : end].tobytes()].append(
                segment.rows_from(end)
            )
    for (number, keys), rows in sorted(rows_of_spans.items(), key=lambda item: item[0][0]):
        yield number, np.frombuffer(keys, np.int64).copy(), np.concatenate(rows)


def _group_runs(segments: Iterable[SegmentKeys]) -> Iterator[list[SegmentKeys]]:
    """Group segments into runs: they start at the same block position, and differ little in length.

    The number of blocks of the longest is less than twice that of the shortest, to limit padding.
    """
    by_size: dict[tuple[int, int], list[SegmentKeys]] = defaultdict(list)
    for segment in segments:
        by_size[segment.first_block, segment.num_blocks.bit_length()].append(segment)
    for members in by_size.values():
        yield sorted(members, key=lambda segment: -segment.num_blocks)


def _plan_run(members: Sequence[SegmentKeys], scores: ScoreShape) -> tuple[_Run, list[np.ndarray]]:
    """Plan the calls of the segments ``members`` of a run (``_Run``).

    Returns:
        The run, and for each of its blocks the rows ``[BLOCK]`` of the queries in the pack.
    """
    numbers = range(members[0].first_block, members[0].num_blocks)
    start = _first_key(numbers[0], scores)
    rows, blocks = [], []
    for block in numbers:
        reaching = [segment for segment in members if segment.num_blocks > block]
        rows += [segment.rows_of(block) for segment in reaching]
        first = _first_key(block, scores)
        keys_of_block = slice(first - start, (block + 1) * BLOCK - start)
        blocks.append((len(reaching), keys_of_block, first == 0 or not scores.takes_spans))
    keys = _stack_keys(
        [segment.keys[start:] for segment in members], numbers[-1] * BLOCK + BLOCK - start
    )
    return _Run(torch.from_numpy(keys), tuple(blocks)), rows


def _first_key(block: int, scores: ScoreShape) -> int:
    """Return the position of the first key that a block of queries sees in its last kernel call.

    A block's last call has the keys of its own positions and those before it. If earlier calls
    attend to distant keys in spans of SPAN positions, the last call begins after the last whole
    span. Otherwise it begins where the window begins, rounded down to a multiple of BLOCK.
    """
    if scores.takes_spans:
        return block * BLOCK // SPAN * SPAN
    if scores.window is None:
        return 0
    return max(0, block * BLOCK - scores.window + 1) // BLOCK * BLOCK


def _causal_mask(keys: int, window: int | None) -> Tensor:
    """Make the causal mask ``[BLOCK, keys]``: -inf for keys that a query does not see, else 0."""
    behind = keys - BLOCK
    hidden = torch.ones(BLOCK, keys, dtype=torch.bool).triu(behind + 1)
    if window is not None:
        hidden |= torch.ones(BLOCK, keys, dtype=torch.bool).tril(behind - window)
    return torch.zeros(BLOCK, keys).masked_fill_(hidden, float("-inf"))


def _stack_keys(keys: Sequence[np.ndarray], length: int) -> np.ndarray:
    """Stack the key rows of n segments to ``[n, length]``.

    Shorter ones are padded by repeating their last row; the causal mask hides the copies.
    """
    filled = [np.pad(row, (0, length - len(row)), mode="edge") for row in keys]
    return np.stack(filled)


def _place_heads(rows: np.ndarray, tokens: int, heads: int, groups: int) -> tuple[Tensor, Tensor]:
    """Convert the token rows ``[N, BLOCK]`` to ``BlockPlan.queries`` and ``BlockPlan.targets``."""
    # Head number g * repeats + i is the i-th query head of group g.
    head = np.arange(heads).reshape(groups, -1)
    queries = np.maximum(rows, 0)[:, None, None, :] * heads + head[:, :, None]
    targets = np.where(rows < 0, tokens, rows)[:, None, :, None] * heads + head.T[:, None, :]
    nowhere = np.minimum(targets, tokens * heads)
    blocks = len(rows)
    return torch.from_numpy(queries.reshape(blocks, -1)), torch.from_numpy(
        nowhere.reshape(blocks, -1)
    )
