"""Transfers between host memory and the device that do not make the device wait."""

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
    """``host`` on ``device``; itself where it is there already.

    A copy to a GPU is put behind the work that the GPU has, by way of page-locked memory: from any
    other the calling thread would wait until the GPU comes to it.
    """
    if torch.device(device).type != "cuda" or not host.is_cpu:
        return host.to(device)
    return host.pin_memory().to(device, non_blocking=True)


def all_to_device(hosts: Sequence[Tensor], device: torch.device | str) -> list[Tensor]:
    """``to_device`` of several tensors; to a GPU by one copy, into memory that they share."""
    if torch.device(device).type != "cuda" or not all(host.is_cpu for host in hosts):
        return [to_device(host, device) for host in hosts]
    memory = torch.empty(room_for(hosts), dtype=torch.uint8, pin_memory=True)
    for piece, host in zip(pieces_of(memory, hosts), hosts, strict=True):
        piece.copy_(host)
    return pieces_of(memory.to(device, non_blocking=True), hosts)


# Device to host, on a stream beside the kernels.
#
# So a save does not hold training up: the next step computes while tensors cross the bus, until its
# update. A copy starts once its source is computed (its stream waits for the kernels' stream),
# readers wait for the copy (``copy_beside`` returns how), and the update, the only writer, calls
# ``before_writing``.

Wait = Callable[[], None]


def copy_beside(copies: Iterable[tuple[Tensor, Tensor]]) -> Wait:
    """Start copying every ``(host, source)``, with ``source`` as of the GPU work queued so far.

    ``host`` is page-locked (``host_zeros``). On a CPU all is copied when this returns.

    Returns:
        What waits, in any thread, until these have arrived, and all that was begun before them.
    """
    beside = _stream()
    if beside is None:
        for host, source in copies:
            host.copy_(source)
        return _is_there
    beside.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(beside):
        for host, source in copies:
            host.copy_(source, non_blocking=True)
            if source.is_cuda:
                # Memory that is let go meanwhile must not be given to another tensor.
                source.record_stream(beside)
    # A thread that waits sleeps, and takes no processor from those that launch kernels.
    arrived = torch.cuda.Event(blocking=True)
    arrived.record(beside)
    return arrived.synchronize


T = TypeVar("T")
U = TypeVar("U")


@dataclass(frozen=True)
class Arriving(Generic[T]):
    """A value that the device may still be computing.

    Attributes:
        has_arrived: tells, without waiting, whether ``wait`` would return at once.
        wait: returns the value once it is there, or raises what its computation has raised.
    """

    has_arrived: Callable[[], bool]
    wait: Callable[[], T]

    @classmethod
    def now(cls, value: T) -> Arriving[T]:
        return cls(lambda: True, lambda: value)

    def then(self, function: Callable[[T], U]) -> Arriving[U]:
        """What ``function`` makes of the value, on the host, by whoever waits."""
        return Arriving(self.has_arrived, lambda: function(self.wait()))


def to_host_later(source: Tensor) -> Arriving[Tensor]:
    """Copy ``source`` to the host as soon as it is computed, without waiting here."""
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
            # The device is lost. ``wait`` raises the same, where its caller expects it.
            return True

    def wait() -> Tensor:
        copied.synchronize()
        return host

    return Arriving(has_arrived, wait)


def before_writing() -> None:
    """Have the GPU do what it is asked for from here on after all copies that have begun."""
    beside = _stream()
    if beside is not None:
        torch.cuda.current_stream().wait_stream(beside)


@cache
def _stream() -> torch.cuda.Stream | None:
    """One for all copies of this process, which so arrive in order; None without a GPU."""
    return torch.cuda.Stream() if torch.cuda.is_available() else None


def _is_there() -> None:
    pass


# Pinned host memory, which a GPU accesses while its kernels run.

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
