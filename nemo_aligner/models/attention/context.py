"""Context parallelism: what ranks that have parts of one pack send to each other."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor
from torch.autograd import Function
from torch.multiprocessing.reductions import StorageWeakRef


def gather_keys(key: Tensor, value: Tensor, index: Tensor) -> tuple[Tensor, Tensor]:
    """Gather a layer's keys and values, ``[n, groups, c]`` on each rank, at ``index [K]``.

    ``index`` counts the tokens of all ranks, rank by rank. Returns ``[K, groups, c]`` of both; the
    gradient is the sum over the ranks, each of which has other queries.
    """
    return _gathered(torch.stack([key, value], dim=1), index)


@contextmanager
def gathering_again(key: Tensor, value: Tensor, index: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield what ``gather_keys`` does; what autograd keeps of it in this context is a rank's own.

    The backward pass gathers it again, so that a rank keeps ``1 / ranks`` of a layer's keys.
    """
    own = torch.stack([key, value], dim=1)
    gathered = _gathered(own, index)
    numbers = {_storage(each): number for number, each in enumerate(gathered)}
    shape, own, again = gathered[0].shape, own.detach(), dict[int, Tensor]()

    def keep(tensor: Tensor) -> Tensor | int:
        return numbers.get(_storage(tensor), tensor) if tensor.shape == shape else tensor

    def give(kept: Tensor | int) -> Tensor:
        if isinstance(kept, Tensor):
            return kept
        if kept not in again:
            again.update(enumerate(_gathered(own, index)))
        return again.pop(kept)

    with torch.autograd.graph.saved_tensors_hooks(keep, give):
        yield gathered


def _storage(tensor: Tensor) -> StorageWeakRef:
    """The storage of ``tensor``, compared by identity."""
    return StorageWeakRef(tensor.untyped_storage())


def _gathered(own: Tensor, index: Tensor) -> tuple[Tensor, Tensor]:
    found: tuple[Tensor, Tensor] = _Gather.apply(own, index)
    return found


class _Gather(Function):
    """``own [n, 2, groups, c]`` of every rank, and ``index [K]`` -> two of ``[K, groups, c]``."""

    @staticmethod
    def forward(ctx: Any, own: Tensor, index: Tensor) -> tuple[Tensor, Tensor]:
        group = parallel_state.get_context_parallel_group()
        ctx.save_for_backward(index)
        every = own.new_empty(group.size() * own.size(0), *own.shape[1:])
        ctx.shape = every.shape
        dist.all_gather_into_tensor(every, own, group=group)
        keys, values = every.unbind(dim=1)
        return keys[index], values[index]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        (index,) = ctx.saved_tensors
        group = parallel_state.get_context_parallel_group()
        has_each_once = index.numel() == ctx.shape[0]
        every = (torch.empty if has_each_once else torch.zeros)(
            ctx.shape, dtype=grads[0].dtype, device=index.device
        )
        for some, grad in zip(every.unbind(dim=1), grads, strict=True):
            some.index_put_((index,), grad, accumulate=not has_each_once)
        own = every.new_empty(every.size(0) // group.size(), *every.shape[1:])
        dist.reduce_scatter_tensor(own, every, group=group)
        return own, None


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
