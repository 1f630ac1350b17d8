"""A backend for process groups of one rank, whose collectives copy tensors or do nothing.

It saves GPU memory. megatron-core runs collectives even in groups of one rank. NCCL would create a
communicator for each of these groups, and each communicator takes some 230 MiB of the GPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

ONE_RANK = "one_rank"
"""Name of the backend for ``init_process_group``; groups that are created later inherit it."""


class _Done(dist.Work):
    """The handle of a collective that is finished, or whose copy is queued on the current stream.

    Its ``wait`` returns at once.
    """

    def wait(self, *timeout: Any) -> bool:
        return True

    def is_completed(self) -> bool:
        return True


# Typed as Any, because mypy rejects Python methods that override C++ overloads.
_ProcessGroup: Any = dist.ProcessGroup


class OneRankGroup(_ProcessGroup):  # type: ignore[misc]
    """A process group of one rank, with the methods that ``torch.distributed`` calls.

    Newer versions of torch call some of them by new names (``all_gather_single`` instead of
    ``_allgather_base``), so both names are defined.
    """

    def size(self) -> int:
        return 1

    def rank(self) -> int:
        return 0

    def getBackendName(self) -> str:
        return ONE_RANK

    def shutdown(self) -> None:
        """Do nothing: the group holds no resources that ``destroy_process_group`` must free."""

    # In-place collectives have nothing to do: the sum over one rank, or a broadcast from this rank,
    # is the tensor itself.

    def _do_nothing(self, *unused: Any, **more: Any) -> dist.Work:
        return _Done()

    allreduce = allreduce_coalesced = reduce = broadcast = barrier = _do_nothing

    # Collectives from an input to an output tensor, which with one rank are a copy.

    def _copy(self, output: Tensor, input: Tensor, *unused: Any, **more: Any) -> dist.Work:
        return _copy_tensors([output], [input])

    _allgather_base = all_gather_single = _copy
    _reduce_scatter_base = reduce_scatter_single = _copy
    alltoall_base = all_to_all_single = _copy

    def _copy_all(
        self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], *unused: Any, **more: Any
    ) -> dist.Work:
        return _copy_tensors(outputs, inputs)

    allgather_into_tensor_coalesced = all_gather_single_coalesced = _copy_all
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced = _copy_all
    alltoall = _copy_all

    # Collectives whose inputs or outputs are lists with a tensor of each rank. Here each list has
    # one tensor.

    def _to_lists(
        self, outputs: Sequence[Sequence[Tensor]], inputs: Sequence[Tensor], *unused: Any
    ) -> dist.Work:
        return _copy_tensors([tensors[0] for tensors in outputs], inputs)

    allgather = gather = _to_lists

    def _from_lists(
        self, outputs: Sequence[Tensor], inputs: Sequence[Sequence[Tensor]], *unused: Any
    ) -> dist.Work:
        return _copy_tensors(outputs, [tensors[0] for tensors in inputs])

    scatter = reduce_scatter = _from_lists


@torch.no_grad()
def _copy_tensors(outputs: Sequence[Tensor], inputs: Sequence[Tensor]) -> dist.Work:
    for output, input in zip(outputs, inputs, strict=True):
        # megatron-core scatters gradients into a part of the same buffer. With one rank the part
        # is the whole buffer, and there is nothing to copy.
        if _memory_location(output) != _memory_location(input):
            output.copy_(input.view_as(output))
    return _Done()


def _memory_location(tensor: Tensor) -> tuple[int, int]:
    return tensor.untyped_storage().data_ptr(), int(tensor.storage_offset())


def _create_group(store: Any, rank: int, size: int, timeout: Any) -> OneRankGroup:
    if size != 1:
        raise ValueError(f"{ONE_RANK}: got a group of {size} ranks, wanted 1")
    return OneRankGroup(rank, size)


dist.Backend.register_backend(ONE_RANK, _create_group, devices=["cpu", "cuda"])
