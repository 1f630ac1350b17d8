"""Copy tensors between host memory and GPU without blocking the GPU or the calling thread.

- ``to_device`` and ``all_to_device`` copy to the GPU through page-locked memory.
- ``start_host_copies`` copies large tensors to the host on a second CUDA stream, while kernels run.
- ``to_host_later`` copies a small result to the host, after the kernels that compute it.
- ``host_zeros`` allocates page-locked host memory.
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

# The first part copies to the device, without waiting for the work that is queued there.


def to_device(host: Tensor, device: torch.device | str) -> Tensor:
    """Copy ``host`` to ``device``; a tensor that is already on the device is returned itself.

    A copy to a GPU goes through page-locked memory, so the copy is only queued and the thread
    continues. A copy from pageable memory would block the thread until the GPU has finished all
    work that was queued before.
    """
    if torch.device(device).type != "cuda" or not host.is_cpu:
        return host.to(device)
    return host.pin_memory().to(device, non_blocking=True)


def all_to_device(hosts: Sequence[Tensor], device: torch.device | str) -> list[Tensor]:
    """Copy several tensors to ``device``.

    For a GPU, it makes a single copy of one buffer, and the results are views of that buffer.
    """
    if torch.device(device).type != "cuda" or not all(host.is_cpu for host in hosts):
        return [to_device(host, device) for host in hosts]
    memory = torch.empty(room_for(hosts), dtype=torch.uint8, pin_memory=True)
    for piece, host in zip(pieces_of(memory, hosts), hosts, strict=True):
        piece.copy_(host)
    return pieces_of(memory.to(device, non_blocking=True), hosts)


# The second part copies to the host on a second CUDA stream, while kernels run.  So saving a
# checkpoint overlaps with training: the next step runs up to its optimizer update while weights and
# moments are copied. Three rules make this safe. First, a copy starts after its source is computed,
# because the copy stream waits for the kernels' stream. Second, a reader of the copy waits for it,
# with the function that ``start_host_copies`` returns. Third, the optimizer's update, which alone
# overwrites the sources, first calls ``wait_for_host_copies``.

Wait = Callable[[], None]


def start_host_copies(copies: Iterable[tuple[Tensor, Tensor]]) -> Wait:
    """Start copying each ``source`` to its ``host`` tensor, after the GPU work queued so far.

    ``host`` must be page-locked (``host_zeros``). Without a GPU, the copies are complete on return.

    Returns:
        A function that waits for these copies and for all that were started before. Any thread may
        call it.
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
                # record_stream: if the source is freed now, the allocator must not reuse its memory
                # before the copy is complete.
                source.record_stream(copy_stream)
    # blocking=True: a waiting thread sleeps, so that its core is free for a thread that launches
    # kernels.
    arrived = torch.cuda.Event(blocking=True)
    arrived.record(copy_stream)
    return arrived.synchronize


T = TypeVar("T")
U = TypeVar("U")


@dataclass(frozen=True)
class Arriving(Generic[T]):
    """A value that the GPU may still be computing, like a future.

    Attributes:
        has_arrived: function that tells if the value is on the host; it does not block.
        wait: function that blocks until the value is on the host, and returns it. It raises the
            error if the computation failed.
    """

    has_arrived: Callable[[], bool]
    wait: Callable[[], T]

    @classmethod
    def now(cls, value: T) -> Arriving[T]:
        """Wrap a value that is already on the host."""
        return cls(lambda: True, lambda: value)

    def then(self, function: Callable[[T], U]) -> Arriving[U]:
        """Return an ``Arriving`` whose value is ``function`` applied to this value.

        ``function`` runs in the thread that calls ``wait``.
        """
        return Arriving(self.has_arrived, lambda: function(self.wait()))


def to_host_later(source: Tensor) -> Arriving[Tensor]:
    """Start copying ``source`` to the host, and return without waiting.

    The copy is queued on the current stream, after the kernels that compute ``source``.
    """
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
            # The query raised because the GPU has failed. Return True, so that the caller calls
            # ``wait``, which raises the same error.
            return True

    def wait() -> Tensor:
        copied.synchronize()
        return host

    return Arriving(has_arrived, wait)


def wait_for_host_copies() -> None:
    """Make later kernels of the current stream wait for the copies that have been started.

    Call it before kernels overwrite tensors from which ``start_host_copies`` may still be copying.
    The calling thread does not wait.
    """
    copy_stream = _get_copy_stream()
    if copy_stream is not None:
        torch.cuda.current_stream().wait_stream(copy_stream)


@cache
def _get_copy_stream() -> torch.cuda.Stream | None:
    """Return the CUDA stream of all copies to the host; None without a GPU.

    Copies on the same stream finish in the order in which they start.
    """
    return torch.cuda.Stream() if torch.cuda.is_available() else None


def _do_nothing() -> None:
    """Return at once: the wait function for copies that are already complete.

    Without a GPU, ``start_host_copies`` makes its copies at once, and returns this function.
    """


# The third part allocates page-locked host memory, which a GPU can read and write while its kernels
# run.

_ALIGNMENT = 64


def host_zeros(like: Sequence[Tensor]) -> list[Tensor]:
    """Return zeros in host memory, with the shapes and dtypes of the tensors ``like``.

    With a GPU, the results are views of one page-locked buffer, which is freed with the last view.
    torch's allocator of page-locked memory is not used, because it rounds sizes up to powers of two
    and so takes up to twice the memory.

    Raises:
        RuntimeError: the system refuses to lock that much memory.
    """
    if torch.cuda.is_available() and any(tensor.nbytes for tensor in like):
        return pieces_of(_allocate_page_locked(room_for(like)), like)
    return [torch.zeros(tensor.shape, dtype=tensor.dtype) for tensor in like]


def room_for(like: Sequence[Tensor]) -> int:
    """Return how many bytes ``pieces_of`` needs to make views for the tensors ``like``."""
    return sum(map(_aligned_bytes, like))


def pieces_of(memory: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    """Cut ``memory``, a uint8 tensor, into one view for each tensor in ``like``.

    Each view has the shape and dtype of its tensor.
    """
    pieces, start = [], 0
    for tensor in like:
        piece = memory[start : start + tensor.nbytes]
        pieces.append(piece.view(tensor.dtype).view(tensor.shape))
        start += _aligned_bytes(tensor)
    return pieces


def _aligned_bytes(tensor: Tensor) -> int:
    return -(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT


class _Pages(mmap.mmap):
    """Memory mapped from the system; it calls ``unlock`` before it is unmapped.

    CUDA must unlock pages before they are unmapped. ``weakref.finalize`` would do so too late,
    because mmap unmaps its memory before it notifies weak references.
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
    # The tensor keeps ``pages`` alive. When its last view is freed, ``pages`` unlocks the memory.
    pages.unlock = partial(runtime.cudaHostUnregister, address)
    return memory
