"""Token rows of an MoE layer: how many each expert computes, and their exchange between ranks."""

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
    """Number of rows of each expert; the rows are sorted by expert.

    ``on_host`` copies the counts to the host at its first call. It is called only where the counts
    are needed there, because the copy makes the host wait for the GPU.

    Attributes:
        per_expert: ``[experts]`` int64 on the device; None for a single expert, which has all rows.
        on_host_counts: the same counts on the host, once ``on_host`` was called.
    """

    per_expert: Tensor | None
    on_host_counts: list[int] | None = None

    def on_host(self) -> list[int]:
        """Return the counts on the host; the first call waits for the device."""
        if self.on_host_counts is None:
            assert self.per_expert is not None
            self.on_host_counts = self.per_expert.tolist()
        return self.on_host_counts

    def group_ends(self, rows: Tensor, matrices: Tensor) -> Tensor | None:
        """Return where each expert's rows end, for ``grouped_mm``; None if a loop is used instead.

        torch has ``grouped_mm``, one kernel for all experts, from 2.10 on. It takes bf16, and rows
        and columns have to begin at multiples of 16 bytes. On a CPU it is slower than a loop over
        the experts.
        """
        if self.per_expert is None or not (rows.is_cuda and rows.dtype is torch.bfloat16):
            return None
        if not hasattr(F, "grouped_mm") or any(size % 8 for size in matrices.shape[1:]):
            return None
        return self.per_expert.cumsum(0).to(torch.int32)


class AddBiases(Function):
    """Add to each row of ``[N, o]`` its expert's row of ``biases [E, o]``, if ``is_added``.

    ``is_added`` is False where another TP rank adds the biases to the sum over the ranks. Every
    rank computes the gradient of the biases, in fp32.
    """

    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, biases: Tensor, counts: RowCounts, is_added: bool
    ) -> Tensor:
        ctx.counts, ctx.dtype = counts, biases.dtype
        if not is_added:
            return rows.view_as(rows)
        per_expert = counts.per_expert
        assert per_expert is not None, "a shared expert has no biases"
        return rows + biases.repeat_interleave(per_expert, dim=0, output_size=len(rows))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor | None, None, None]:
        (grad,), counts, to_biases = grads, ctx.counts, None
        if ctx.needs_input_grad[1] and grad.is_cpu:
            rows_of_experts = grad.split(counts.on_host())
            to_biases = torch.stack([rows.float().sum(0) for rows in rows_of_experts])
        elif ctx.needs_input_grad[1]:
            # On a GPU, this sums in the same order in every run, and the host does not wait.
            # It would read the lengths on the host to check them, which "unsafe" leaves out.
            to_biases = torch.segment_reduce(
                grad.float(), "sum", lengths=counts.per_expert, axis=0, unsafe=True
            )
        return grad, None if to_biases is None else to_biases.to(ctx.dtype), None, None


@dataclass(frozen=True)
class Exchange:
    """An exchange in ``group``: every rank sends rows to the ranks that have their experts.

    Attributes:
        sent, received: number of rows sent to and received from each rank.
        counts: number of received rows for each of this rank's experts.
        order, inverse: index that sorts the received rows by expert, and the index that undoes it.
    """

    sent: list[int]
    received: list[int]
    counts: RowCounts
    order: Tensor
    inverse: Tensor
    group: Any

    @classmethod
    def of(cls, counts: Tensor, group: Any) -> Exchange:
        """Plan an exchange from ``counts [E]``, this rank's rows for each expert; collective."""
        ranks = group.size()
        received_counts = torch.empty_like(counts)
        dist.all_to_all_single(received_counts, counts, group=group)
        local_counts, received_counts = counts.view(ranks, -1), received_counts.view(ranks, -1)
        expert = torch.arange(local_counts.size(1), device=counts.device).repeat(ranks)
        order = expert.repeat_interleave(received_counts.flatten()).sort(stable=True).indices
        inverse = torch.empty_like(order)
        inverse[order] = torch.arange(len(order), device=order.device)
        # Copy all counts to the host at once, so that it waits for the GPU once rather than three
        # times.
        sent, received, per_expert = (
            torch.cat([local_counts.sum(1), received_counts.sum(1), received_counts.sum(0)])
            .cpu()
            .split([ranks, ranks, local_counts.size(1)])
        )
        own_counts = RowCounts(received_counts.sum(0), per_expert.tolist())
        return cls(sent.tolist(), received.tolist(), own_counts, order, inverse, group)

    def send(self, rows: Tensor) -> Tensor:
        """Send rows to the ranks of their experts; return the received rows, sorted by expert."""
        arrived = _AllToAll.apply(rows, self.sent, self.received, self.group)
        return _Permute.apply(arrived, self.order, self.inverse)

    def send_back(self, rows: Tensor) -> Tensor:
        """Send the experts' outputs back to the ranks that sent the rows, in the original order."""
        sorted_back = _Permute.apply(rows, self.inverse, self.order)
        return _AllToAll.apply(sorted_back, self.received, self.sent, self.group)


class _Permute(Function):
    """Autograd function that permutes rows by ``order``, and their gradients by ``inverse``."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, order: Tensor, inverse: Tensor) -> Tensor:
        ctx.save_for_backward(inverse)
        return rows[order]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return grads[0][ctx.saved_tensors[0]], None, None


class _AllToAll(Function):
    """Autograd function that exchanges rows: rank r gets the next ``sent[r]`` of ``rows [N, c]``.

    The result has the received rows in rank order, ``received[r]`` of them from rank r. The
    backward pass sends the gradients back.
    """

    @staticmethod
    def forward(ctx: Any, rows: Tensor, sent: list[int], received: list[int], group: Any) -> Tensor:
        ctx.sizes, ctx.group = (sent, received), group
        return _exchange_rows(rows, sent, received, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        sent, received = ctx.sizes
        return _exchange_rows(grads[0], received, sent, ctx.group), None, None, None


def _exchange_rows(rows: Tensor, sent: list[int], received: list[int], group: Any) -> Tensor:
    received_rows = rows.new_empty(sum(received), rows.size(1))
    dist.all_to_all_single(received_rows, rows.contiguous(), received, sent, group=group)
    return received_rows
