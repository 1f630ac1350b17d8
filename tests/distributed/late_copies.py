"""Simulate on a CPU the copies that run next to a GPU's kernels, each as late as possible.

If code overwrites the source of a pending copy, the copy is spoiled; if it reads the target too
early, it finds zeros.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from nemo_aligner.utils import host_transfer

_LONGEST_S = 1.0  # a thread waits at most this long for an update


class LateStream(TorchFunctionMode):
    """Delays its copies until somebody waits for them."""

    def __init__(self) -> None:
        super().__init__()
        self._copies: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._lock = threading.Lock()
        self._is_done = threading.Event()

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> torch.Tensor:
        if func is not torch.Tensor.copy_:
            return func(*args, **(kwargs or {}))
        self._is_done.clear()
        self._copies.append(args[:2])
        return args[0]

    @property
    def num_left(self) -> int:
        return len(self._copies)

    def finish(self) -> None:
        with self._lock, torch.no_grad():
            while self._copies:
                host, source = self._copies.pop(0)
                host.copy_(source)
        self._is_done.set()

    def synchronize(self) -> None:
        if threading.current_thread() is not threading.main_thread():
            self._is_done.wait(_LONGEST_S)
        self.finish()

    def wait_stream(self, other: LateStream) -> None:
        if other is not self:
            other.finish()


class _Event:
    def __init__(self, blocking: bool) -> None: ...

    def record(self, stream: LateStream) -> None:
        self.synchronize = stream.synchronize


def play_late_copies(patch: Callable[[Any, str, Any], None]) -> LateStream:
    """Install the simulation; ``patch(owner, name, value)`` is ``setattr``, or one that undoes."""
    beside, compute = LateStream(), LateStream()

    @contextmanager
    def on(stream: LateStream) -> Iterator[None]:
        with stream:
            yield

    patch(host_transfer, "_get_copy_stream", lambda: beside)
    patch(torch.cuda, "current_stream", lambda: compute)
    patch(torch.cuda, "stream", on)
    patch(torch.cuda, "Event", _Event)
    return beside
