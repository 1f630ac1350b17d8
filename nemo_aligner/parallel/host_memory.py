"""Host memory that a GPU reads and writes by itself, beside the kernels that it runs."""

from __future__ import annotations

import mmap
import sys
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

_ALIGNMENT = 64


def host_zeros(like: Sequence[Tensor]) -> list[Tensor]:
    """Zeros in host memory, of the shapes and dtypes of ``like``.

    Where there is a GPU they lie in one page-locked piece, which is let go with the last of them.
    torch's own page-locked memory comes in powers of two: up to twice as much.

    Raises:
        RuntimeError: the system does not lock so much memory.
    """
    if torch.cuda.is_available() and any(each.nbytes for each in like):
        return pieces_of(_page_locked(room_for(like)), like)
    return [torch.zeros(each.shape, dtype=each.dtype) for each in like]


def room_for(like: Sequence[Tensor]) -> int:
    """Bytes that ``pieces_of`` takes."""
    return sum(map(_aligned_bytes, like))


def pieces_of(memory: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    """``memory [bytes]`` uint8, cut into tensors of the shapes and dtypes of ``like``."""
    pieces, start = [], 0
    for each in like:
        piece = memory[start : start + each.nbytes]
        pieces.append(piece.view(each.dtype).view(each.shape))
        start += _aligned_bytes(each)
    return pieces


def _aligned_bytes(tensor: Tensor) -> int:
    return -(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT


class _Pages(mmap.mmap):
    """Memory that is let go by ``unlock`` before it is unmapped.

    A ``weakref.finalize`` would come too late: mmap unmaps before it tells its weak references.
    """

    unlock: Callable[[], object] | None = None

    def __del__(self) -> None:
        if self.unlock is not None and not sys.is_finalizing():
            self.unlock()


def _page_locked(num_bytes: int) -> Tensor:
    """``[num_bytes]`` uint8 zeros."""
    pages = _Pages(-1, num_bytes)
    memory = torch.frombuffer(pages, dtype=torch.uint8)
    runtime, address = torch.cuda.cudart(), memory.data_ptr()
    code = int(runtime.cudaHostRegister(address, num_bytes, 0))
    if code != 0:
        raise RuntimeError(
            f"CUDA error {code}: {num_bytes / 2**30:.1f} GiB of host memory could not be "
            "page-locked; look at ulimit -l, and at how much memory is free"
        )
    # The tensor holds the pages.
    pages.unlock = partial(runtime.cudaHostUnregister, address)
    return memory
