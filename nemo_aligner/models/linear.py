"""Linear layers of megatron-core that can give a row the same bits in whatever company.

A product chooses its kernel, and with it the order of its sums, by the number of its rows; so in a
batch invariant model they are computed in products of a fixed number of rows, the last one filled
up. Tensor parallel partial results are summed in the order of the ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from torch import Tensor

from nemo_aligner.parallel.cpu.products import invariant_linear_on_cpu


def invariant_linear(input: Tensor, weight: Tensor, bias: Tensor | None, rows: int) -> Tensor:
    """``input [..., i]`` by ``weight [o, i]`` -> ``[..., o]`` in products of ``rows`` rows.

    On a CPU also of other numbers, where they were found to give the same bits.
    """
    if input.is_cpu:
        return invariant_linear_on_cpu(input, weight, bias, rows)
    return in_pieces(lambda piece: F.linear(piece, weight, bias), input, rows)


def in_pieces(function: Callable[[Tensor], Tensor], input: Tensor, rows: int) -> Tensor:
    """``function`` of ``input [T, ..., i]``, ``rows`` of T at a time, the last ones filled up."""
    count = input.size(0)
    fill = (0, 0) * (input.dim() - 1) + (0, -count % rows)
    pieces = [function(piece) for piece in F.pad(input, fill).split(rows)]
    return torch.cat(pieces)[:count]


class _InvariantProduct:
    """Of a linear layer: ``invariant_rows`` rows make a product; None is as megatron-core has it.

    Only in evaluation mode: training takes the products as they come.
    """

    invariant_rows: int | None = None

    def _forward_impl(self: Any, input: Tensor, weight: Tensor, *args: Any, **options: Any) -> Any:
        rows = self.rows_now()
        if rows is None:
            return super()._forward_impl(input, weight, *args, **options)  # type: ignore[misc]
        if options["sequence_parallel"]:
            input = gather_from_sequence_parallel_region(input, group=options["tp_group"])
        return invariant_linear(input, weight, options["bias"], rows)

    def rows_now(self: Any) -> int | None:
        """``invariant_rows`` where they count now."""
        learns = self.training or torch.is_grad_enabled()
        return None if learns else self.invariant_rows


class ColumnLinear(_InvariantProduct, ColumnParallelLinear):
    """A linear layer that tensor parallelism splits by its outputs."""


class RowLinear(_InvariantProduct, RowParallelLinear):
    """A linear layer that tensor parallelism splits by its inputs."""

    def forward(self, input_: Tensor) -> tuple[Tensor, Tensor | None]:
        # Of two numbers both sums are the same; of more, the order is the algorithm's.
        rows = self.rows_now()
        if rows is None or self.tp_group.size() <= 2:
            return super().forward(input_)
        partial = invariant_linear(input_, self.weight, None, rows)
        return sum_in_rank_order(partial, self.tp_group, self.sequence_parallel), None


def sum_in_rank_order(partial: Tensor, group: Any, is_scattered: bool) -> Tensor:
    """The sum of all ranks' ``partial [T, ...]``, in fp32 and in the order of the ranks.

    ``[T, ...]``, or ``[T / ranks, ...]`` of it where it ``is_scattered`` over them. No ring or tree
    has a say in it: each rank sums a share of the rows.
    """
    ranks, rows = group.size(), partial.size(0)
    fill = (0, 0) * (partial.dim() - 1) + (0, -rows % ranks)
    sent = F.pad(partial, fill).contiguous()
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent, group=group)
    first, *others = received.chunk(ranks)
    total = first.float()
    for other in others:
        total = total + other
    share = total.to(partial.dtype)
    if is_scattered:
        return share
    dist.all_gather_into_tensor(sent, share, group=group)
    return sent[:rows]
