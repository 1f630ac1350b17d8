"""Column- and row-parallel linear layers that can give a row the same bits in any batch.

A GEMM chooses its kernel, and with it the order of its sums, by the number of rows. A batch
invariant model therefore computes chunks of a fixed number of rows, the last one padded, and sums
tensor parallel partial results in rank order. The layers also hold LoRA's adapters.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core.tensor_parallel import (
    gather_from_sequence_parallel_region,
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.mlp import apply_swiglu_sharded_factory
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint
from torch import Tensor

from nemo_aligner.distributed.cpu_products import invariant_linear_on_cpu
from nemo_aligner.models.layers import learns
from nemo_aligner.models.shape import LORA_A, LORA_B


def invariant_linear(input: Tensor, weight: Tensor, bias: Tensor | None, rows: int) -> Tensor:
    """Compute ``input [..., i]`` by ``weight [o, i]`` -> ``[..., o]`` in chunks of ``rows`` rows.

    On a CPU other chunk sizes are used where a trial gave the same bits.
    """
    if input.is_cpu:
        return invariant_linear_on_cpu(input, weight, bias, rows)
    return in_chunks(lambda piece: F.linear(piece, weight, bias), input, rows)


def in_chunks(function: Callable[[Tensor], Tensor], input: Tensor, rows: int) -> Tensor:
    """Apply ``function`` to ``input [T, ..., i]`` in chunks of ``rows`` rows, the last padded."""
    found = [function(_filled(piece, rows)) for piece in input.split(rows)]
    return torch.cat(found)[: input.size(0)]


def _filled(rows: Tensor, multiple: int) -> Tensor:
    """Pad ``[T, ...]`` with zero rows until ``multiple`` divides T."""
    missing = -rows.size(0) % multiple
    return F.pad(rows, (0, 0) * (rows.dim() - 1) + (0, missing)) if missing else rows


class ColumnLinear(ColumnParallelLinear):
    """Linear layer whose outputs tensor parallelism splits.

    Attributes:
        invariant_rows: rows of a product in evaluation mode; None leaves it to megatron-core.
        adapter: LoRA's adapter, whose output is added; None without LoRA.
    """

    invariant_rows: int | None = None

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.register_module("adapter", None)

    def forward(self, input_: Tensor, *args: Any, **options: Any) -> tuple[Tensor, Tensor | None]:
        if rows_now(self) is not None:
            return self.infer(input_), None
        output, bias = super().forward(input_, *args, **options)
        return output if self.adapter is None else output + self.adapter(input_, None), bias

    def infer(self, input_: Tensor) -> Tensor:
        """Compute ``[T, 1, i] -> [T, 1, o]`` without gradients, batch invariant if it is to be.

        A call of the module would cost as much as 10 rows of a product.
        """
        rows = self.invariant_rows
        if rows is None:
            return ColumnLinear.forward(self, input_)[0]
        given = input_
        if self.sequence_parallel:
            given = gather_from_sequence_parallel_region(given, group=self.tp_group)
        output = invariant_linear(given, self.weight, self.bias, rows)
        return output if self.adapter is None else output + self.adapter(input_, rows)

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple = (), metadata: dict | None = None
    ) -> dict[str, Any]:
        entries = super().sharded_state_dict(prefix, sharded_offsets, metadata)
        if self.adapter is not None:
            entries |= _sharded(self, LORA_B, 0, prefix, sharded_offsets, metadata)
        return entries


class RowLinear(RowParallelLinear):
    """Linear layer whose inputs tensor parallelism splits; attributes as in ``ColumnLinear``."""

    invariant_rows: int | None = None

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.register_module("adapter", None)

    def forward(self, input_: Tensor) -> tuple[Tensor, Tensor | None]:
        if rows_now(self) is not None:
            return self.infer(input_), None
        output, bias = super().forward(input_)
        return output if self.adapter is None else output + self.adapter(input_, None), bias

    def infer(self, input_: Tensor) -> Tensor:
        """Compute as ``ColumnLinear.infer``."""
        rows = self.invariant_rows
        if rows is None:
            return RowLinear.forward(self, input_)[0]
        output = invariant_linear(input_, self.weight, None, rows)
        output = sum_partial(output, self.tp_group, self.sequence_parallel, rows)
        return output if self.adapter is None else output + self.adapter(input_, rows)

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple = (), metadata: dict | None = None
    ) -> dict[str, Any]:
        entries = super().sharded_state_dict(prefix, sharded_offsets, metadata)
        if self.adapter is not None:
            entries |= _sharded(self, LORA_A, 1, prefix, sharded_offsets, metadata)
        return entries


def _sharded(
    layer: Any,
    name: str,
    axis: int,
    prefix: str,
    offsets: tuple,
    metadata: dict | None,
) -> dict[str, Any]:
    """Checkpoint entry of an adapter's tensor, sharded along ``axis``.

    megatron-core's layers know the axes of their own tensors only, and its MLP does not know that
    the gated fc1 of an adapter is two matrices in one.
    """
    entries = make_sharded_tensors_for_checkpoint(
        {name: layer.get_parameter(name)},
        prefix,
        {name: axis},
        offsets,
        tp_group=layer.tp_group,
        dp_cp_group=(metadata or {})["dp_cp_group"],
    )
    if prefix.endswith("linear_fc1.") and layer.config.gated_linear_unit:
        return {key: apply_swiglu_sharded_factory(entry, offsets) for key, entry in entries.items()}
    return entries


def sum_partial(partial: Tensor, group: Any, is_scattered: bool, rows: int | None) -> Tensor:
    """Sum all ranks' ``partial``; with ``is_scattered`` each keeps its share of the tokens.

    In rank order for a batch invariant product (``rows`` is not None).
    """
    if group.size() == 1:
        return partial
    # a + b == b + a, so two ranks need nothing; with more, NCCL's algorithm picks the order.
    if rows is not None and group.size() > 2:
        return sum_in_rank_order(partial, group, is_scattered)
    if is_scattered:
        return reduce_scatter_to_sequence_parallel_region(partial, group=group)
    return reduce_from_tensor_model_parallel_region(partial, group=group)


def rows_now(layer: Any) -> int | None:
    """Rows of a product of ``layer`` now; None in training, which is not batch invariant."""
    return None if learns(layer) else layer.invariant_rows


def sum_in_rank_order(partial: Tensor, group: Any, is_scattered: bool) -> Tensor:
    """Sum all ranks' ``partial [T, ...]`` in fp32 and in rank order.

    Each rank sums a share of the rows, so no ring or tree decides the order.

    Returns:
        ``[T, ...]``, or this rank's ``[T / ranks, ...]`` if ``is_scattered``.
    """
    ranks, rows = group.size(), partial.size(0)
    sent = _filled(partial, ranks).contiguous()
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent, group=group)
    first, *others = received.chunk(ranks)
    total = first.float()
    for other in others:
        total = total + other
    share = total.to(partial.dtype)
    if is_scattered:
        return share
    # Not into ``sent``, which may be the caller's ``partial``.
    dist.all_gather_into_tensor(received, share, group=group)
    return received[:rows]
