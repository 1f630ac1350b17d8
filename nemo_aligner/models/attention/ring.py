"""Attention that passes keys and values around a ring of ranks (RingAttention, Liu et al. 2023).

Context parallelism splits a pack over the ranks of a group, and each rank computes the queries of
its part. The parts' keys and values travel around the ring: while a rank computes with those of one
part, those of the next part arrive. A query's results for all parts are merged by their
log-sum-exp. In the backward pass the keys and values travel around once more, together with their
gradients, to which each rank adds its contribution. In the code a rank's part of the pack is called
its share.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor
from torch.autograd import Function

from nemo_aligner.cpu.training_attention import Block, add_block, add_gradients, as_heads
from nemo_aligner.models.attention.segments import PackedSegments, queries_of
from nemo_aligner.models.internals import gpu_flash_attention, gpu_flash_attention_backward
from nemo_aligner.utils.host_transfer import to_device
from nemo_aligner.utils.sinks import join_sinks, sink_gradients


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    sinks: Tensor | None,
    plan: RingPlan,
    scale: float | None,
) -> Tensor:
    """Attend this rank's ``query [n, heads, c]`` to the keys of all ranks -> ``[n, heads, c]``.

    Args:
        key, value: ``[n, groups, c]`` of this rank's tokens; RoPE is already applied to queries
            and keys.
        sinks: logits ``[heads]`` of attention sinks; None if there are none. They join the softmax
            once, when the results for all ranks' keys are merged.
        plan: the pack's plan from ``plan_ring``.
        scale: factor of the scores; None means ``c ** -0.5``.
    """
    attended: Tensor = _Ring.apply(query, key, value, sinks, plan, scale)
    return attended


class _Ring(Function):
    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        sinks: Tensor | None,
        plan: RingPlan,
        scale: float | None,
    ) -> Tensor:
        query, local = query.contiguous(), torch.stack([key, value])
        precise = torch.promote_types(query.dtype, torch.float32)
        out = torch.zeros_like(query, dtype=precise)
        lse = out.new_full(query.shape[:2], -torch.inf)
        add = _add_on_cpu if query.is_cpu else _add_on_gpu
        for number, arrived in _pass_around(local):
            add(plan[number], (query, *arrived), out, lse, scale)
        if sinks is not None:
            join_sinks(out, lse, sinks)
        out = out.to(query.dtype)
        ctx.save_for_backward(query, local, sinks, out, lse)
        ctx.plan, ctx.scale = plan, scale
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        query, local, sinks, out, lse = ctx.saved_tensors
        to_query = torch.zeros_like(query, dtype=lse.dtype)
        grad = grads[0].contiguous()
        add = _add_gradients_on_cpu if query.is_cpu else _add_gradients_on_gpu
        arriving: Callable[[], Tensor] | None = None
        for number, arrived in _pass_around(local):
            to_arrived = torch.zeros_like(arrived)
            add(
                ctx.plan[number],
                (grad, query, *arrived, out),
                lse,
                (to_query, *to_arrived),
                ctx.scale,
            )
            if arriving is not None:
                to_arrived += arriving()
                del arriving  # frees the gradients that this rank has sent
            arriving = _pass_on(to_arrived, _GRADIENTS)
        assert arriving is not None
        to_key, to_value = arriving()
        to_sinks = None if sinks is None else sink_gradients(grad, out, lse, sinks).sum(0)
        return to_query.to(query.dtype), to_key, to_value, to_sinks, None, None


# Communication around the ring.

_KEYS, _GRADIENTS = 0, 1


def _pass_around(local: Tensor) -> Iterator[tuple[int, Tensor]]:
    """Pass each rank's ``local`` tensor around the ring; yield (rank, its tensor).

    This rank's own tensor comes first. The next tensor arrives while the caller works on the
    current one.
    """
    group = parallel_state.get_context_parallel_group()
    ranks, rank = group.size(), group.rank()
    current, previous = local, None
    for step in range(ranks):
        arriving = None
        if step + 1 < ranks:
            # The previous tensor has been read and sent, so the next one can be received into its
            # memory.
            arriving = _pass_on(current, _KEYS, previous)
        yield (rank - step) % ranks, current
        if arriving is not None:
            current, previous = arriving(), None if current is local else current


def _pass_on(current: Tensor, tag: int, received: Tensor | None = None) -> Callable[[], Tensor]:
    """Start to send ``current`` to the next rank, and to receive from the previous one.

    Args:
        tag: tag of the messages, which tells keys from gradients.
        received: memory to receive into; None allocates it.

    Returns:
        A function that waits for both transfers, and returns the received tensor.
    """
    group = parallel_state.get_context_parallel_group()
    ranks, rank = dist.get_process_group_ranks(group), group.rank()
    if received is None:
        received = torch.empty_like(current)
    requests = dist.batch_isend_irecv(
        [
            dist.P2POp(dist.isend, current, ranks[(rank + 1) % len(ranks)], group, tag),
            dist.P2POp(dist.irecv, received, ranks[rank - 1], group, tag),
        ]
    )
    return partial(_wait_for_arrival, requests, current, received)


def _wait_for_arrival(requests: Sequence[dist.Work], current: Tensor, received: Tensor) -> Tensor:
    for request in requests:
        request.wait()
    return received


# Planning: which keys of each rank the queries of this rank see.


@dataclass(frozen=True)
class _Piece:
    """A run of adjacent tokens of one segment, all of them in the same rank's share of the pack.

    Attributes:
        segment: index of the segment in the pack.
        row: index of the run's first token among all tokens of that rank.
        position: index of the first token in its whole sequence, which begins with the segment's
            prefixes.
        length: number of tokens.
    """

    segment: int
    row: int
    position: int
    length: int

    @property
    def rows(self) -> slice:
        return slice(self.row, self.row + self.length)

    @property
    def end(self) -> int:
        """Index in the whole sequence of the token that follows the piece's last one."""
        return self.position + self.length


RingPlan: TypeAlias = Sequence[Sequence[Any]]
"""One list for each rank: how this rank's queries attend to that rank's keys.

The entries are ``Block`` on a CPU and ``_Call`` on a GPU.
"""


def plan_ring(segments: PackedSegments, window: int | None) -> RingPlan:
    """List which of each rank's keys this rank's queries attend to, once for a whole pack.

    The pack must be split by context parallelism (``segments.share``), without cached tokens.

    Args:
        window: sliding window of the layers, in tokens; None if they have none.
    """
    device = segments.cu_seqlens.device
    if window is not None and window >= segments.max_kv_length:
        window = None
    assert segments.share is not None
    share, local_pieces = segments.share, list(_list_pieces(segments, segments.share.rank, window))
    blocks = [
        _list_blocks(local_pieces, _list_pieces(segments, rank, window), segments.chains, window)
        for rank in range(len(share.chunks))
    ]
    if device.type == "cpu":
        return blocks
    return [[_Call.of(group, device) for group in _group_disjoint(of_share)] for of_share in blocks]


def _list_pieces(segments: PackedSegments, rank: int, longest: int | None) -> Iterator[_Piece]:
    """Cut a rank's tokens into pieces of one segment each.

    Args:
        longest: most tokens of a piece; None means no limit.
    """
    assert segments.share is not None
    row = 0
    for part in queries_of(segments.lengths, 0, replace(segments.share, rank=rank)):
        prefix_length = sum(segments.lengths[number] for number in segments.chains[part.segment])
        for start in range(part.start, part.end, longest or part.length):
            length = min(longest or part.length, part.end - start)
            yield _Piece(part.segment, row, prefix_length + start, length)
            row += length


def _list_blocks(
    local: Sequence[_Piece],
    pieces: Iterator[_Piece],
    chains: Sequence[tuple[int, ...]],
    window: int | None,
) -> list[Block]:
    """List blocks, each a range of this rank's queries and the range of keys that they see.

    The keys are those of one rank, which may be this rank.

    Args:
        local: pieces of this rank's tokens.
        pieces: pieces of the tokens of the rank that the keys come from.
        chains: the prefixes of every segment, as segment numbers.
        window: sliding window in tokens; None means no window.

    Returns:
        First the causal blocks, of a piece's queries on its own keys, then blocks where every query
        sees every key, then blocks where the window hides some keys from some queries.
    """
    of_segment = defaultdict(list)
    for key in pieces:
        of_segment[key.segment].append(key)
    causal, partial_blocks = [], []
    seen_by: dict[_Piece, list[_Piece]] = defaultdict(list)
    for query in local:
        for key in (
            key
            for segment in (*chains[query.segment], query.segment)
            for key in of_segment[segment]
        ):
            if key == query:
                causal.append(Block(query.rows, key.rows, is_causal=True))
            elif key.end > query.position:
                continue  # the query cannot see keys that come after it
            elif window is None or query.end - key.position <= window:
                seen_by[key].append(query)
            elif query.position - key.end + 1 < window:
                partial_blocks.append(_window_block(query, key, window))
    full_blocks = [
        Block(rows, key.rows, is_causal=False)
        for key, queries in seen_by.items()
        for rows in _join_runs(queries)
    ]
    return causal + full_blocks + partial_blocks


def _window_block(query: _Piece, key: _Piece, window: int) -> Block:
    """Return the block of the queries and keys of two pieces that are within ``window`` tokens."""
    distance = query.position - key.end + 1
    queries = min(query.length, window - distance)
    keys = min(key.length, window - distance)
    end = key.row + key.length
    return Block(
        slice(query.row, query.row + queries),
        slice(end - keys, end),
        is_causal=False,
        window_left=window - distance - queries,
    )


def _join_runs(pieces: Sequence[_Piece]) -> Iterator[slice]:
    """Merge the row ranges of adjacent pieces, and yield the merged ranges in order."""
    start, end = pieces[0].row, pieces[0].row
    for piece in pieces:
        if piece.row != end:
            yield slice(start, end)
            start = piece.row
        end = piece.row + piece.length
    yield slice(start, end)


# Computation on a CPU, block by block.


def _add_on_cpu(
    blocks: Sequence[Block],
    inputs: Sequence[Tensor],
    out: Tensor,
    lse: Tensor,
    scale: float | None,
) -> None:
    """Merge attention to one rank's keys into the results so far, ``out`` and ``lse``.

    Args:
        blocks: which queries see which of these keys.
        inputs: queries ``[n, heads, c]``, and that rank's keys and values ``[m, groups, c]``.
        out, lse: ``[n, heads, c]`` attention to the keys of earlier ranks, and ``[n, heads]`` its
            log-sum-exp.
    """
    groups = inputs[1].size(1)
    *heads, o = (as_heads(x, groups) for x in (*inputs, out))
    for block in blocks:
        add_block(block, heads, o, _view_by_groups(lse, groups), scale)


def _add_gradients_on_cpu(
    blocks: Sequence[Block],
    saved: Sequence[Tensor],
    lse: Tensor,
    gradients: Sequence[Tensor],
    scale: float | None,
) -> None:
    """Add what one rank's keys contribute to the gradients of queries, keys and values.

    Args:
        blocks: which queries see which of these keys.
        saved: the output's gradient, queries, keys, values, and the output.
        gradients: gradients of queries, keys and values, to which this function adds.
    """
    groups = saved[2].size(1)
    heads, to = ([as_heads(x, groups) for x in tensors] for tensors in (saved, gradients))
    for block in blocks:
        add_gradients(block, heads, _view_by_groups(lse, groups), to, scale)


def _view_by_groups(lse: Tensor, groups: int) -> Tensor:
    """View a log-sum-exp ``[n, heads]`` as ``[repeats, groups, n]``, the layout of ``as_heads``."""
    return lse.unflatten(1, (groups, -1)).permute(2, 1, 0)


# Computation on a GPU, many blocks in one kernel call.


@dataclass(frozen=True)
class _Call:
    """B blocks that one kernel call computes: all or none of them causal, and with one window.

    Attributes:
        queries, keys: rows of the blocks' queries and keys.
        bounds: ``[B + 1]`` int32 offsets of the blocks in the queries, and in the keys (the
            kernel's ``cu_seqlens``).
        longest: upper bounds of a block's number of queries and of keys.
        is_causal, window_left: the mask of every block, with the meaning that ``Block`` describes.
    """

    queries: Tensor | slice
    keys: Tensor | slice
    bounds: tuple[Tensor, Tensor]
    longest: tuple[int, int]
    is_causal: bool
    window_left: int | None

    @classmethod
    def of(cls, blocks: Sequence[Block], device: torch.device) -> _Call:
        queries, first, longest_queries = _lay_out([block.queries for block in blocks], device)
        keys, second, longest_keys = _lay_out([block.keys for block in blocks], device)
        if blocks[0].window_left is not None:
            # The kernel clamps the number of keys that a query sees after its own position to the
            # longest length (flash_api.cpp, set_params_fprop). In these blocks a query sees all
            # later keys, and its position is below 0 if there are more queries than keys. So raise
            # the longest length.
            longest_keys += longest_queries
        kind = blocks[0].is_causal, blocks[0].window_left
        return cls(queries, keys, (first, second), (longest_queries, longest_keys), *kind)

    @property
    def arguments(self) -> tuple[Any, ...]:
        return *self.bounds, *self.longest, 0.0, self.is_causal


def _lay_out(slices: Sequence[slice], device: torch.device) -> tuple[Tensor | slice, Tensor, int]:
    """Concatenate slices of rows for a kernel call.

    Returns:
        The rows of all slices, the int32 offsets of the slices in them, and an upper bound of a
        slice's length.
    """
    sizes = [span.stop - span.start for span in slices]
    bounds = to_device(torch.tensor([0, *sizes]).cumsum(0).int(), device)
    longest = max(2, *sizes)  # 1 would select another kernel, which sums in another order
    if len(slices) == 1:
        return slices[0], bounds, longest
    index = torch.cat([torch.arange(span.start, span.stop) for span in slices])
    return to_device(index, device), bounds, longest


def _group_disjoint(blocks: Sequence[Block]) -> list[list[Block]]:
    """Group blocks of the same kind so that no two in a group share a query or a key.

    One kernel call computes a group. Its results are added in place, so no row may occur twice.
    """
    rounds: list[tuple[list[Block], set[int]]] = []
    for block in sorted(blocks, key=lambda block: block.queries.start):
        kind = block.is_causal, block.window_left
        for members, ends in rounds:
            last = members[-1]
            if (
                (last.is_causal, last.window_left) == kind
                and last.queries.stop <= block.queries.start
                # blocks share keys only if these are of the same piece, and then end at the same
                # row
                and block.keys.stop not in ends
            ):
                members.append(block)
                ends.add(block.keys.stop)
                break
        else:
            rounds.append(([block], {block.keys.stop}))
    return [members for members, _ in rounds]


def _add_on_gpu(
    calls: Sequence[_Call],
    inputs: Sequence[Tensor],
    out: Tensor,
    lse: Tensor,
    scale: float | None,
) -> None:
    query, key, value = inputs
    for call in calls:
        added, added_lse, *_ = gpu_flash_attention(
            query[call.queries],
            key[call.keys],
            value[call.keys],
            *call.arguments,
            return_debug_mask=False,
            scale=scale,
            window_size_left=call.window_left,
        )
        added_lse = added_lse.transpose(0, 1)
        previous_lse = lse[call.queries]
        total = torch.logaddexp(previous_lse, added_lse)
        merged = out[call.queries].mul_(torch.exp(previous_lse - total).unsqueeze(-1))
        merged.addcmul_(added, torch.exp(added_lse - total).unsqueeze(-1))
        lse[call.queries] = total
        if not isinstance(call.queries, slice):  # indexing by a tensor has made a copy of ``out``
            out[call.queries] = merged


def _add_gradients_on_gpu(
    calls: Sequence[_Call],
    saved: Sequence[Tensor],
    lse: Tensor,
    gradients: Sequence[Tensor],
    scale: float | None,
) -> None:
    grad, query, key, value, out = saved
    # seed of the kernel's dropout, which is off
    no_seed = torch.empty(2, dtype=torch.uint64, device=query.device)
    for call in calls:
        added_gradients = gpu_flash_attention_backward(
            grad[call.queries],
            query[call.queries],
            key[call.keys],
            value[call.keys],
            out[call.queries],
            lse[call.queries].transpose(0, 1).contiguous(),
            *call.arguments,
            no_seed,
            no_seed,
            scale=scale,
            window_size_left=call.window_left,
        )
        rows = call.queries, call.keys, call.keys
        for to, which, added in zip(gradients, rows, added_gradients, strict=True):
            to[which] += added
