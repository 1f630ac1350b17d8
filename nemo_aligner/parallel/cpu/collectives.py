"""Gathers and reductions of megatron-core's buffers in place, over gloo."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


class _Works(list):
    """Collectives that were begun."""

    def wait(self) -> None:
        for work in self:
            work.wait()


class _InPlaceCollectives:
    """What megatron-core gathers and reduces its buffers with, where gloo would copy them.

    Gloo gathers and scatters by way of memory of its own. Broadcasts and an all-reduce work on the
    buffer itself; that the reduction leaves every rank the sums of all, not of its shard, harms no
    one. Among one rank there is nothing to do.
    """

    def __init__(self) -> None:
        self._works = _Works()

    @contextmanager
    def together(self, group: Any, async_ops: bool = False) -> Iterator[_Works]:
        """What is begun inside; it is waited for at the end, unless ``async_ops``."""
        self._works = works = _Works()
        yield works
        if not async_ops:
            works.wait()

    def all_gather(self, output: Any, source: Any, *, group: Any, async_op: bool) -> None:
        """Fill ``output``, of which ``source`` is this rank's shard."""
        import torch.distributed as dist

        if group.size() == 1:
            return
        for rank, shard in enumerate(output.chunk(group.size())):
            self._works.append(dist.broadcast(shard, group=group, group_src=rank, async_op=True))

    def reduce_scatter(
        self, output: Any, source: Any, *, op: Any, group: Any, async_op: bool
    ) -> None:
        """Sum ``source``, of which ``output`` is this rank's shard."""
        import torch.distributed as dist

        if group.size() > 1:
            self._works.append(dist.all_reduce(source, op=op, group=group, async_op=True))


def work_in_place(buffers: Any) -> None:
    collectives = _InPlaceCollectives()
    buffers._coalescing_manager = collectives.together
    buffers.dist_all_gather_func = collectives.all_gather
    buffers.dist_reduce_scatter_func = collectives.reduce_scatter
