"""Copies to host memory that a GPU makes beside its kernels, on a stream of their own.

So a save holds training up for no copy: while its tensors cross the bus the next step computes,
until it comes to its update. Three things must hold then. A copy begins when what it copies has
been computed: the stream waits for that of the kernels. Nobody reads a copy before it is there:
``copy_beside`` says how to wait. And nobody writes to what is being copied: an update, the only one
who does, calls ``before_writing``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cache

import torch
from torch import Tensor

Wait = Callable[[], None]


def copy_beside(copies: Iterable[tuple[Tensor, Tensor]]) -> Wait:
    """Begin to copy every ``(host, source)``, as the GPU's work until now has left ``source``.

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
