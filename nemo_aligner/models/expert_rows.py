"""Rows of experts: how many each has, and their way between the ranks that share experts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function


@dataclass
class RowCounts:
    """Rows of each expert, one expert's behind the other's.

    The host learns the numbers only where it needs them, as it has to wait for the GPU.

    Attributes:
        each: of the experts, on the device; None of one alone, which has all rows.
        known: the same on the host, once it has asked.
    """

    each: Tensor | None
    known: list[int] | None = None

    def on_host(self) -> list[int]:
        if self.known is None:
            assert self.each is not None
            self.known = self.each.tolist()
        return self.known

    def ends(self, rows: Tensor, matrices: Tensor) -> Tensor | None:
        """Tell ``grouped_mm`` where each expert's rows end; None where it is not used.

        One kernel for all experts, from torch 2.10 on. It is for bf16, and rows and columns have to
        begin at multiples of 16 bytes. On a CPU it is a loop over products slower than ours.
        """
        if self.each is None or not (rows.is_cuda and rows.dtype is torch.bfloat16):
            return None
        if not hasattr(F, "grouped_mm") or any(size % 8 for size in matrices.shape[1:]):
            return None
        return self.each.cumsum(0).to(torch.int32)


@dataclass(frozen=True)
class Exchange:
    """Rows that the ranks of ``group`` send each other, sorted by expert on both sides.

    Attributes:
        sent, received: rows to and from each rank.
        counts: rows of each of this rank's experts.
        order: places of the received rows by expert; ``inverse`` undoes it.
    """

    sent: list[int]
    received: list[int]
    counts: RowCounts
    order: Tensor
    inverse: Tensor
    group: Any

    @classmethod
    def of(cls, counts: Tensor, group: Any) -> Exchange:
        """Tell the others ``counts [E]``, of rows for all experts."""
        ranks = group.size()
        theirs = torch.empty_like(counts)
        dist.all_to_all_single(theirs, counts, group=group)
        mine, theirs = counts.view(ranks, -1), theirs.view(ranks, -1)
        own = torch.arange(mine.size(1), device=counts.device).repeat(ranks)
        order = own.repeat_interleave(theirs.flatten()).sort(stable=True).indices
        inverse = torch.empty_like(order)
        inverse[order] = torch.arange(len(order), device=order.device)
        # One wait for the GPU instead of three.
        sent, received, each = (
            torch.cat([mine.sum(1), theirs.sum(1), theirs.sum(0)])
            .cpu()
            .split([ranks, ranks, mine.size(1)])
        )
        own_counts = RowCounts(theirs.sum(0), each.tolist())
        return cls(sent.tolist(), received.tolist(), own_counts, order, inverse, group)

    def there(self, rows: Tensor) -> Tensor:
        """Send rows to the ranks of their experts."""
        arrived = _AllToAll.apply(rows, self.sent, self.received, self.group)
        return _Permute.apply(arrived, self.order, self.inverse)

    def back(self, rows: Tensor) -> Tensor:
        """Send the experts' outputs back."""
        sorted_back = _Permute.apply(rows, self.inverse, self.order)
        return _AllToAll.apply(sorted_back, self.received, self.sent, self.group)


class _Permute(Function):
    """Rows in another ``order``, which ``inverse`` undoes."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, order: Tensor, inverse: Tensor) -> Tensor:
        ctx.save_for_backward(inverse)
        return rows[order]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return grads[0][ctx.saved_tensors[0]], None, None


class _AllToAll(Function):
    """Send so many ``[N, c]`` rows to each rank of ``group``, and receive so many from each."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, sent: list[int], received: list[int], group: Any) -> Tensor:
        ctx.sizes, ctx.group = (sent, received), group
        return _exchanged(rows, sent, received, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        sent, received = ctx.sizes
        return _exchanged(grads[0], received, sent, ctx.group), None, None, None


def _exchanged(rows: Tensor, sent: list[int], received: list[int], group: Any) -> Tensor:
    found = rows.new_empty(sum(received), rows.size(1))
    dist.all_to_all_single(found, rows.contiguous(), received, sent, group=group)
    return found
