"""Run each collective of ``one_rank.py`` on a group of one rank, in a separate process."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _coalescing_manager

from nemo_aligner.distributed.collectives import barrier
from nemo_aligner.distributed.launch import launch
from nemo_aligner.distributed.one_rank import OneRankGroup


def main() -> None:
    with launch():
        group = dist.new_group([0])
        assert isinstance(group, OneRankGroup)
        for where in (None, group):
            on_tensors(where)
            on_lists(where)
            on_objects(where)
        barrier()
    assert not dist.is_initialized()
    print("all collectives ran")


def on_tensors(group: dist.ProcessGroup | None) -> None:
    given = torch.arange(6.0)
    for op in (dist.ReduceOp.SUM, dist.ReduceOp.MAX, dist.ReduceOp.AVG):
        same = given.clone()
        dist.all_reduce(same, op, group=group)
        assert same.equal(given)
    work = dist.all_reduce(same, group=group, async_op=True)
    work.wait()
    assert work.is_completed()
    dist.broadcast(same, src=0, group=group)
    dist.reduce(same, dst=0, group=group)
    assert same.equal(given)
    for function in (
        dist.all_gather_into_tensor,
        dist.reduce_scatter_tensor,
        dist.all_to_all_single,
    ):
        received = torch.zeros(6)
        function(received, given, group=group)
        assert received.equal(given), function
        # Like megatron-core, for the gradients of a data parallel group.
        received, other = torch.zeros(6), torch.zeros(6)
        if function is not dist.all_to_all_single:
            with _coalescing_manager(group or dist.group.WORLD, async_ops=True) as works:
                function(received, given, group=group)
                function(other, given + 1, group=group)
            works.wait()
            assert received.equal(given), function
            assert other.equal(given + 1), function
    # A part of a buffer, scattered onto itself.
    dist.reduce_scatter_tensor(same, same, group=group)
    assert same.equal(given)


def on_lists(group: dist.ProcessGroup | None) -> None:
    given, received = torch.arange(3), [torch.zeros(3, dtype=torch.int64)]
    dist.all_gather(received, given, group=group)
    assert received[0].equal(given)
    dist.gather(given + 1, received, dst=0, group=group)
    assert received[0].equal(given + 1)
    dist.all_to_all(received, [given], group=group)
    assert received[0].equal(given)
    dist.scatter(received[0], [given + 2], src=0, group=group)
    assert received[0].equal(given + 2)
    dist.reduce_scatter(received[0], [given], group=group)
    assert received[0].equal(given)


def on_objects(group: dist.ProcessGroup | None) -> None:
    given = {"a": [1, "b"]}
    received: list[object] = [None]
    dist.all_gather_object(received, given, group=group)
    assert received == [given]
    received = [None]
    dist.gather_object(given, received, dst=0, group=group)
    assert received == [given]
    received = [given]
    dist.broadcast_object_list(received, src=0, group=group)
    assert received == [given]
    received = [None]
    dist.scatter_object_list(received, [given], src=0, group=group)
    assert received == [given]


if __name__ == "__main__":
    main()
