"""Process groups of one rank: collectives that copy, or do nothing, without a communicator.

NCCL makes a communicator for each group that a collective runs on, also for groups of one rank, and
each takes some 230 MiB of a GPU. megatron-core runs collectives whatever a group's size.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

ONE_RANK = "one_rank"
"""Name of the backend, for ``init_process_group``; groups made later have it, too."""


class _Done(dist.Work):
    """A collective that is over. Work on a GPU was queued on the current stream."""

    def wait(self, *timeout: Any) -> bool:
        return True

    def is_completed(self) -> bool:
        return True


# Its methods are declared as C++ overloads, which none in Python can match.
_ProcessGroup: Any = dist.ProcessGroup


class OneRankGroup(_ProcessGroup):  # type: ignore[misc]
    """The collectives of one rank, as ``torch.distributed`` calls them.

    torch renames those on single tensors in 2.12 or 2.13; both names are here.
    """

    def size(self) -> int:
        return 1

    def rank(self) -> int:
        return 0

    def getBackendName(self) -> str:
        return ONE_RANK

    def shutdown(self) -> None:
        """There is nothing to release."""

    # In place: the sum over one rank, and what its only rank sends.

    def _nothing(self, *unused: Any, **more: Any) -> dist.Work:
        return _Done()

    allreduce = allreduce_coalesced = reduce = broadcast = barrier = _nothing

    # From one tensor to another.

    def _copy(self, output: Tensor, input: Tensor, *unused: Any, **more: Any) -> dist.Work:
        return _copied([output], [input])

    _allgather_base = all_gather_single = _copy
    _reduce_scatter_base = reduce_scatter_single = _copy
    alltoall_base = all_to_all_single = _copy

    def _copy_all(
        self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], *unused: Any, **more: Any
    ) -> dist.Work:
        return _copied(outputs, inputs)

    allgather_into_tensor_coalesced = all_gather_single_coalesced = _copy_all
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced = _copy_all
    alltoall = _copy_all

    # With a list of the tensors of all ranks, of which there is one.

    def _to_lists(
        self, outputs: Sequence[Sequence[Tensor]], inputs: Sequence[Tensor], *unused: Any
    ) -> dist.Work:
        return _copied([each[0] for each in outputs], inputs)

    allgather = gather = _to_lists

    def _from_lists(
        self, outputs: Sequence[Tensor], inputs: Sequence[Sequence[Tensor]], *unused: Any
    ) -> dist.Work:
        return _copied(outputs, [each[0] for each in inputs])

    scatter = reduce_scatter = _from_lists


@torch.no_grad()
def _copied(outputs: Sequence[Tensor], inputs: Sequence[Tensor]) -> dist.Work:
    for output, input in zip(outputs, inputs, strict=True):
        # megatron-core scatters gradients into a part of their own buffer, which here is all of it.
        if _place(output) != _place(input):
            output.copy_(input.view_as(output))
    return _Done()


def _place(tensor: Tensor) -> tuple[int, int]:
    return tensor.untyped_storage().data_ptr(), int(tensor.storage_offset())


def _create(store: Any, rank: int, size: int, timeout: Any) -> OneRankGroup:
    if size != 1:
        raise ValueError(f"{ONE_RANK}: got a group of {size} ranks, wanted 1")
    return OneRankGroup(rank, size)


dist.Backend.register_backend(ONE_RANK, _create, devices=["cpu", "cuda"])
