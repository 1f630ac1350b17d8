"""Context parallelism: what the ranks of a group, each with a part of a pack, send to each other."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor
from torch.autograd import Function


def gather_keys(key: Tensor, value: Tensor, index: Tensor) -> tuple[Tensor, Tensor]:
    """Gather a layer's keys and values, ``[n, groups, c]`` on each rank, at ``index [K]``.

    ``index`` counts the tokens of all ranks, rank by rank. Returns ``[K, groups, c]`` of both; the
    gradient is the sum over the ranks, each of which has other queries.
    """
    found: tuple[Tensor, Tensor] = _GatherKeys.apply(key, value, index)
    return found


class _GatherKeys(Function):
    @staticmethod
    def forward(ctx: Any, key: Tensor, value: Tensor, index: Tensor) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(index)
        own = torch.stack([key, value], dim=1)
        group = parallel_state.get_context_parallel_group()
        every = own.new_empty(group.size() * own.size(0), *own.shape[1:])
        dist.all_gather_into_tensor(every, own, group=group)
        keys, values = every.unbind(dim=1)
        return keys[index], values[index]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None]:
        (index,) = ctx.saved_tensors
        group = parallel_state.get_context_parallel_group()
        every = torch.stack(grads, dim=1)
        # Every row is there once, so that the inverse of the permutation is one pass.
        own = every.new_empty(every.size(0) // group.size(), *every.shape[1:])
        dist.reduce_scatter_tensor(own, every[index.argsort()], group=group)
        key, value = own.unbind(dim=1)
        return key, value, None


def sum_of_group(own: Tensor, rows: Tensor, count: int) -> Tensor:
    """Lay the rows ``own [r, A]`` of each rank at ``rows [r]`` of ``[count, A]``, the same on all.

    The gradient is that of a rank's own rows: each computes the same loss of all of them.
    """
    laid = own.new_zeros(count, own.size(1)).index_copy(0, rows, own)
    found: Tensor = _Sum.apply(laid)
    return found


class _Sum(Function):
    @staticmethod
    def forward(ctx: Any, laid: Tensor) -> Tensor:
        total = laid.clone()
        dist.all_reduce(total, group=parallel_state.get_context_parallel_group())
        return total

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return grads[0]
