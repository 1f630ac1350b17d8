"""Transfers between host memory and GPU that do not block the GPU.

Host to device by page-locked memory (``to_device``); device to host on a second stream next to the
kernels (``start_host_copies``, ``to_host_later``); page-locked memory for both (``host_zeros``).
"""

from __future__ import annotations

import mmap
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Generic, TypeVar

import torch
from torch import Tensor

# Host to device, without waiting for queued work.


def to_device(host: Tensor, device: torch.device | str) -> Tensor:
    """Copy ``host`` to ``device``; a tensor that is there already is returned itself.

    A copy to a GPU goes through page-locked memory and is queued behind the GPU's work. From
    pageable memory the calling thread would block until the GPU gets to the copy.
    """
    if torch.device(device).type != "cuda" or not host.is_cpu:
        return host.to(device)
    return host.pin_memory().to(device, non_blocking=True)


def all_to_device(hosts: Sequence[Tensor], device: torch.device | str) -> list[Tensor]:
    """Copy several tensors to ``device``; to a GPU by one copy, into one shared buffer."""
    if torch.device(device).type != "cuda" or not all(host.is_cpu for host in hosts):
        return [to_device(host, device) for host in hosts]
    memory = torch.empty(room_for(hosts), dtype=torch.uint8, pin_memory=True)
    for piece, host in zip(pieces_of(memory, hosts), hosts, strict=True):
        piece.copy_(host)
    return pieces_of(memory.to(device, non_blocking=True), hosts)


# Device to host, on a second stream next to the kernels.
#
# A save thereby overlaps with training: the next step computes while tensors are copied, until its
# optimizer update. Three rules make this safe: a copy starts when its source is computed (the copy
# stream waits for the kernel stream); readers wait for the copy (``start_host_copies`` returns a
# function for that); and the update, the only writer, calls ``wait_for_host_copies``.

Wait = Callable[[], None]


def start_host_copies(copies: Iterable[tuple[Tensor, Tensor]]) -> Wait:
    """Start copying ``(host, source)`` pairs, behind the GPU work that is queued so far.

    ``host`` must be page-locked (``host_zeros``). On a CPU the copies are finished on return.

    Returns:
        A function that waits, in any thread, for these copies and all that were started earlier.
    """
    copy_stream = _get_copy_stream()
    if copy_stream is None:
        for host, source in copies:
            host.copy_(source)
        return _do_nothing
    copy_stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(copy_stream):
        for host, source in copies:
            host.copy_(source, non_blocking=True)
            if source.is_cuda:
                # Otherwise the allocator could reuse the memory of a freed source too early.
                source.record_stream(copy_stream)
    # blocking=True: a waiting thread sleeps, and leaves its core to those that launch kernels.
    arrived = torch.cuda.Event(blocking=True)
    arrived.record(copy_stream)
    return arrived.synchronize


T = TypeVar("T")
U = TypeVar("U")


@dataclass(frozen=True)
class Arriving(Generic[T]):
    """A value that the device may still be computing; a future without a thread.

    Attributes:
        has_arrived: tells without blocking if ``wait`` would return at once.
        wait: blocks until the value is there and returns it, or raises the error of its
            computation.
    """

    has_arrived: Callable[[], bool]
    wait: Callable[[], T]

    @classmethod
    def now(cls, value: T) -> Arriving[T]:
        """Wrap a value that is there already."""
        return cls(lambda: True, lambda: value)

    def then(self, function: Callable[[T], U]) -> Arriving[U]:
        """Apply ``function`` to the value on the host, in the thread that waits."""
        return Arriving(self.has_arrived, lambda: function(self.wait()))


def to_host_later(source: Tensor) -> Arriving[Tensor]:
    """Start copying ``source`` to the host, behind the kernels that compute it, and return."""
    if not source.is_cuda:
        return Arriving.now(source)
    host = torch.empty(source.shape, dtype=source.dtype, pin_memory=True)
    host.copy_(source, non_blocking=True)
    copied = torch.cuda.Event()
    copied.record()

    def has_arrived() -> bool:
        try:
            return copied.query()
        except RuntimeError:
            # The device is lost. ``wait`` raises the same error, and its caller handles it.
            return True

    def wait() -> Tensor:
        copied.synchronize()
        return host

    return Arriving(has_arrived, wait)


def wait_for_host_copies() -> None:
    """Make all later work of the current stream wait for the copies that have started.

    Call it before kernels overwrite tensors that ``start_host_copies`` may still be reading.
    """
    copy_stream = _get_copy_stream()
    if copy_stream is not None:
        torch.cuda.current_stream().wait_stream(copy_stream)


@cache
def _get_copy_stream() -> torch.cuda.Stream | None:
    """Return the one stream for all copies, which therefore finish in order; None without a GPU."""
    return torch.cuda.Stream() if torch.cuda.is_available() else None


def _do_nothing() -> None:
    """Wait for copies that are finished."""


# Pinned host memory, which a GPU accesses while its kernels run.

_ALIGNMENT = 64


def host_zeros(like: Sequence[Tensor]) -> list[Tensor]:
    """Return zeros in host memory, with the shapes and dtypes of the tensors ``like``.

    With a GPU they share one page-locked buffer, which is freed with the last of them. torch's own
    page-locked allocator rounds up to powers of two, so it would need up to twice the memory.

    Raises:
        RuntimeError: the system refuses to lock that much memory.
    """
    if torch.cuda.is_available() and any(tensor.nbytes for tensor in like):
        return pieces_of(_allocate_page_locked(room_for(like)), like)
    return [torch.zeros(tensor.shape, dtype=tensor.dtype) for tensor in like]


def room_for(like: Sequence[Tensor]) -> int:
    """Return the number of bytes that ``pieces_of`` needs for tensors like these."""
    return sum(map(_aligned_bytes, like))


def pieces_of(memory: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    """Cut ``memory [bytes]`` uint8 into views with the shapes and dtypes of ``like``."""
    pieces, start = [], 0
    for tensor in like:
        piece = memory[start : start + tensor.nbytes]
        pieces.append(piece.view(tensor.dtype).view(tensor.shape))
        start += _aligned_bytes(tensor)
    return pieces


def _aligned_bytes(tensor: Tensor) -> int:
    return -(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT


class _Pages(mmap.mmap):
    """Mapped memory that calls ``unlock`` before it is unmapped.

    ``weakref.finalize`` would run too late, because mmap unmaps before it notifies weak references.
    """

    unlock: Callable[[], object] | None = None

    def __del__(self) -> None:
        if self.unlock is not None and not sys.is_finalizing():
            self.unlock()


def _allocate_page_locked(num_bytes: int) -> Tensor:
    """Return ``[num_bytes]`` uint8 zeros in page-locked host memory."""
    pages = _Pages(-1, num_bytes)
    memory = torch.frombuffer(pages, dtype=torch.uint8)
    runtime, address = torch.cuda.cudart(), memory.data_ptr()
    code = int(runtime.cudaHostRegister(address, num_bytes, 0))
    if code != 0:
        raise RuntimeError(
            f"CUDA error {code}: {num_bytes / 2**30:.1f} GiB of host memory could not be "
            "page-locked; check ulimit -l and the free memory"
        )
    # The tensor keeps a reference to the pages.
    pages.unlock = partial(runtime.cudaHostUnregister, address)
    return memory
