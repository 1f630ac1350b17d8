"""Attention whose keys and values go round a ring of ranks (RingAttention, Liu et al. 2023).

Of a pack each rank of a context parallel group has the queries of its share, and the keys and
values of one share at a time, while those of the next arrive. What a query finds in the shares is
merged by its log-sum-exp. In the backward pass the shares go round once more, and with them the
gradients of their keys and values, to which each rank adds its own.
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


def attend(
    query: Tensor, key: Tensor, value: Tensor, plan: RingPlan, scale: float | None
) -> Tensor:
    """Attend ``query [n, heads, c]`` of this rank's share to its sequences -> ``[n, heads, c]``.

    Args:
        key, value: ``[n, groups, c]`` of the same tokens, rotated to their positions.
        plan: the pack's, see ``plan_ring``.
        scale: factor of the scores; None is ``c ** -0.5``.
    """
    attended: Tensor = _Ring.apply(query, key, value, plan, scale)
    return attended


class _Ring(Function):
    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, plan: RingPlan, scale: float | None
    ) -> Tensor:
        query, own = query.contiguous(), torch.stack([key, value])
        precise = torch.promote_types(query.dtype, torch.float32)
        out = torch.zeros_like(query, dtype=precise)
        lse = out.new_full(query.shape[:2], -torch.inf)
        add = _add_on_cpu if query.is_cpu else _add_on_gpu
        for number, held in _around(own):
            add(plan[number], (query, *held), out, lse, scale)
        out = out.to(query.dtype)
        ctx.save_for_backward(query, own, out, lse)
        ctx.plan, ctx.scale = plan, scale
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None]:
        query, own, out, lse = ctx.saved_tensors
        to_query = torch.zeros_like(query, dtype=lse.dtype)
        given = grads[0].contiguous()
        add = _add_gradients_on_cpu if query.is_cpu else _add_gradients_on_gpu
        arriving: Callable[[], Tensor] | None = None
        for number, held in _around(own):
            to_held = torch.zeros_like(held)
            add(
                ctx.plan[number],
                (given, query, *held, out),
                lse,
                (to_query, *to_held),
                ctx.scale,
            )
            if arriving is not None:
                to_held += arriving()
                del arriving  # and with it what was sent
            arriving = _pass_on(to_held, _GRADIENTS)
        assert arriving is not None
        to_key, to_value = arriving()
        return to_query.to(query.dtype), to_key, to_value, None, None


# What goes round.

_KEYS, _GRADIENTS = 0, 1


def _around(own: Tensor) -> Iterator[tuple[int, Tensor]]:
    """Yield each rank with what is ``own [...]`` there, this rank first; the next is on its way."""
    group = parallel_state.get_context_parallel_group()
    ranks, rank = group.size(), group.rank()
    held, before = own, None
    for step in range(ranks):
        arriving = None
        if step + 1 < ranks:
            # What was held before has been read, and been sent.
            arriving = _pass_on(held, _KEYS, before)
        yield (rank - step) % ranks, held
        if arriving is not None:
            held, before = arriving(), None if held is own else held


def _pass_on(held: Tensor, tag: int, received: Tensor | None = None) -> Callable[[], Tensor]:
    """Start sending ``held`` to the next rank; returns what waits for the last one's."""
    group = parallel_state.get_context_parallel_group()
    ranks, own = dist.get_process_group_ranks(group), group.rank()
    if received is None:
        received = torch.empty_like(held)
    requests = dist.batch_isend_irecv(
        [
            dist.P2POp(dist.isend, held, ranks[(own + 1) % len(ranks)], group, tag),
            dist.P2POp(dist.irecv, received, ranks[own - 1], group, tag),
        ]
    )
    return partial(_arrived, requests, held, received)


def _arrived(requests: Sequence[dist.Work], held: Tensor, received: Tensor) -> Tensor:
    for request in requests:
        request.wait()
    return received


# Which keys of a share the queries of this rank see.


@dataclass(frozen=True)
class _Piece:
    """Tokens of a share: their segment, the first one's row in it and position in its sequence."""

    segment: int
    row: int
    position: int
    length: int

    @property
    def rows(self) -> slice:
        return slice(self.row, self.row + self.length)

    @property
    def end(self) -> int:
        """Position behind the last one."""
        return self.position + self.length


RingPlan: TypeAlias = Sequence[Sequence[Any]]
"""For each rank's share the calls on it: a ``Block`` each on a CPU, a ``_Call`` each on a GPU."""


def plan_ring(segments: PackedSegments, window: int | None) -> RingPlan:
    """Plan a pack with a ``share`` and without cached tokens, for layers with this ``window``."""
    device = segments.cu_seqlens.device
    if window is not None and window >= segments.max_kv_length:
        window = None
    assert segments.share is not None
    share, own = segments.share, list(_pieces(segments, segments.share.rank, window))
    blocks = [
        _blocks(own, _pieces(segments, rank, window), segments.chains, window)
        for rank in range(len(share.chunks))
    ]
    if device.type == "cpu":
        return blocks
    return [[_Call.of(each, device) for each in _rounds(of_share)] for of_share in blocks]


def _pieces(segments: PackedSegments, rank: int, longest: int | None) -> Iterator[_Piece]:
    """Yield the chunks of a rank, cut to the ``longest`` pieces that a window allows."""
    assert segments.share is not None
    row = 0
    for part in queries_of(segments.lengths, 0, replace(segments.share, rank=rank)):
        before = sum(segments.lengths[number] for number in segments.chains[part.segment])
        for start in range(part.start, part.end, longest or part.length):
            length = min(longest or part.length, part.end - start)
            yield _Piece(part.segment, row, before + start, length)
            row += length


def _blocks(
    own: Sequence[_Piece],
    others: Iterator[_Piece],
    chains: Sequence[tuple[int, ...]],
    window: int | None,
) -> list[Block]:
    """List what queries of this rank's ``own`` pieces see of a share: first, of it, themselves."""
    of_segment = defaultdict(list)
    for key in others:
        of_segment[key.segment].append(key)
    causal, some = [], []
    seen_by: dict[_Piece, list[_Piece]] = defaultdict(list)
    for query in own:
        for key in (
            key for each in (*chains[query.segment], query.segment) for key in of_segment[each]
        ):
            if key == query:
                causal.append(Block(query.rows, key.rows, is_causal=True))
            elif key.end > query.position:
                continue  # behind it in its segment
            elif window is None or query.end - key.position <= window:
                seen_by[key].append(query)
            elif query.position - key.end + 1 < window:
                some.append(_in_window(query, key, window))
    whole = [
        Block(rows, key.rows, is_causal=False)
        for key, queries in seen_by.items()
        for rows in _runs(queries)
    ]
    return causal + whole + some


def _in_window(query: _Piece, key: _Piece, window: int) -> Block:
    """Queries that see keys of a piece, not all of them each, and keys that are seen by any."""
    distance = query.position - key.end + 1
    queries = min(query.length, window - distance)
    keys = min(key.length, window - distance)
    end = key.row + key.length
    return Block(
        slice(query.row, query.row + queries),
        slice(end - keys, end),
        is_causal=False,
        before=window - distance - queries,
    )


def _runs(pieces: Sequence[_Piece]) -> Iterator[slice]:
    """Yield the rows of pieces that lie one behind the other, in their order."""
    start, end = pieces[0].row, pieces[0].row
    for piece in pieces:
        if piece.row != end:
            yield slice(start, end)
            start = piece.row
        end = piece.row + piece.length
    yield slice(start, end)


# On a CPU, block by block.


def _add_on_cpu(
    blocks: Sequence[Block],
    given: Sequence[Tensor],
    out: Tensor,
    lse: Tensor,
    scale: float | None,
) -> None:
    """Add what queries ``[n, heads, c]`` find in keys and values to ``out``, ``lse [n, heads]``."""
    groups = given[1].size(1)
    *heads, o = (as_heads(x, groups) for x in (*given, out))
    for block in blocks:
        add_block(block, heads, o, _of_groups(lse, groups), scale)


def _add_gradients_on_cpu(
    blocks: Sequence[Block],
    saved: Sequence[Tensor],
    lse: Tensor,
    gradients: Sequence[Tensor],
    scale: float | None,
) -> None:
    """Add gradients of queries, keys and values, given the output's, these three and the output."""
    groups = saved[2].size(1)
    heads, to = ([as_heads(x, groups) for x in each] for each in (saved, gradients))
    for block in blocks:
        add_gradients(block, heads, _of_groups(lse, groups), to, scale)


def _of_groups(lse: Tensor, groups: int) -> Tensor:
    """View ``[n, heads]`` as ``[repeats, groups, n]``."""
    return lse.unflatten(1, (groups, -1)).permute(2, 1, 0)


# On a GPU, many blocks by one call of its kernel.


@dataclass(frozen=True)
class _Call:
    """B blocks of one kind: rows of queries and keys, their bounds ``[B + 1]`` int32, and most."""

    queries: Tensor | slice
    keys: Tensor | slice
    bounds: tuple[Tensor, Tensor]
    most: tuple[int, int]
    is_causal: bool
    before: int | None

    @classmethod
    def of(cls, blocks: Sequence[Block], device: torch.device) -> _Call:
        queries, first, most = _laid_out([each.queries for each in blocks], device)
        keys, second, longest = _laid_out([each.keys for each in blocks], device)
        if blocks[0].before is not None:
            # Behind a window all keys are seen, but no more than most of them past a query's place
            # (flash_api.cpp, set_params_fprop), which with more queries than keys can be below 0.
            longest += most
        kind = blocks[0].is_causal, blocks[0].before
        return cls(queries, keys, (first, second), (most, longest), *kind)

    @property
    def arguments(self) -> tuple[Any, ...]:
        return *self.bounds, *self.most, 0.0, self.is_causal


def _laid_out(slices: Sequence[slice], device: torch.device) -> tuple[Tensor | slice, Tensor, int]:
    """Rows of the slices, the bounds of each among them, and the length of the longest."""
    sizes = [each.stop - each.start for each in slices]
    bounds = to_device(torch.tensor([0, *sizes]).cumsum(0).int(), device)
    longest = max(2, *sizes)  # with one query the kernel splits the keys
    if len(slices) == 1:
        return slices[0], bounds, longest
    index = torch.cat([torch.arange(each.start, each.stop) for each in slices])
    return to_device(index, device), bounds, longest


def _rounds(blocks: Sequence[Block]) -> list[list[Block]]:
    """Group blocks of one kind of which no two have a query or a key in common."""
    found: list[tuple[list[Block], set[int]]] = []
    for block in sorted(blocks, key=lambda each: each.queries.start):
        kind = block.is_causal, block.before
        for members, ends in found:
            last = members[-1]
            if (
                (last.is_causal, last.before) == kind
                and last.queries.stop <= block.queries.start
                and block.keys.stop not in ends  # blocks of a piece of keys have its end in common
            ):
                members.append(block)
                ends.add(block.keys.stop)
                break
        else:
            found.append(([block], {block.keys.stop}))
    return [members for members, _ in found]


def _add_on_gpu(
    calls: Sequence[_Call],
    given: Sequence[Tensor],
    out: Tensor,
    lse: Tensor,
    scale: float | None,
) -> None:
    query, key, value = given
    for call in calls:
        some, its_lse, *_ = gpu_flash_attention(
            query[call.queries],
            key[call.keys],
            value[call.keys],
            *call.arguments,
            return_debug_mask=False,
            scale=scale,
            window_size_left=call.before,
        )
        its_lse = its_lse.transpose(0, 1)
        before = lse[call.queries]
        total = torch.logaddexp(before, its_lse)
        merged = out[call.queries].mul_(torch.exp(before - total).unsqueeze(-1))
        merged.addcmul_(some, torch.exp(its_lse - total).unsqueeze(-1))
        lse[call.queries] = total
        if not isinstance(call.queries, slice):  # not a view
            out[call.queries] = merged


def _add_gradients_on_gpu(
    calls: Sequence[_Call],
    saved: Sequence[Tensor],
    lse: Tensor,
    gradients: Sequence[Tensor],
    scale: float | None,
) -> None:
    given, query, key, value, out = saved
    nothing = torch.empty(2, dtype=torch.uint64, device=query.device)  # drawn for dropout
    for call in calls:
        found = gpu_flash_attention_backward(
            given[call.queries],
            query[call.queries],
            key[call.keys],
            value[call.keys],
            out[call.queries],
            lse[call.queries].transpose(0, 1).contiguous(),
            *call.arguments,
            nothing,
            nothing,
            scale=scale,
            window_size_left=call.before,
        )
        rows = call.queries, call.keys, call.keys
        for to, which, some in zip(gradients, rows, found, strict=True):
            to[which] += some
