"""Which stream of a fake GPU does what, and which waits between streams are missing.

Operations run at once, in the order of the calls. As with Lamport's clocks (1978, "Time, Clocks,
and the Ordering of Events"), each stream knows only the work of streams that it has waited for. A
stream that reads what another has written, or writes what another has touched, must know of that
work. So must the stream that owns a tensor's memory when the memory is freed and reused. Reads by
the host are not checked.
"""

from __future__ import annotations

import weakref
from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tests.paths.gpu_rehearsal.fake_gpu import _Stream
from tests.paths.gpu_rehearsal.watch import _place

aten = torch.ops.aten
_COPIES = (aten.copy_.default, aten._to_copy.default)
# By a stream's number: how many of its operations are known to be finished.
Known = dict[int, int]


def _learn(clock: Known, more: Known) -> None:
    clock.update({number: max(time, clock.get(number, 0)) for number, time in more.items()})


class Event(_Stream):
    """The state of a stream when an event was recorded: what it knew and had queued."""

    def __init__(self, *unused: Any, **more: Any) -> None:
        self.known: Known = {}

    def record(self, stream: Any = None) -> None:
        self.known = dict((stream or torch.cuda.current_stream()).known)

    def synchronize(self) -> None:
        super().synchronize()
        _learn(Stream.host, self.known)


class Stream(_Stream):
    every: ClassVar[list[Stream]] = []
    current: ClassVar[list[Stream]]  # the current stream is the last one
    host: ClassVar[Known] = {}  # work that the host has waited for is finished for all later calls
    recorded: ClassVar[set[int]] = set()  # storages for which record_stream was called

    def __init__(self, *unused: Any, **more: Any) -> None:
        self.number = len(Stream.every)
        self.known: Known = {self.number: 0}
        Stream.every.append(self)

    def record_event(self, *unused: Any) -> Event:
        event = Event()
        event.record(self)
        return event

    def wait_event(self, other: Any) -> None:
        _learn(self.known, other.known)

    wait_stream = wait_event

    def synchronize(self) -> None:
        super().synchronize()
        _learn(Stream.host, self.known)


def play_streams() -> None:
    """Replace torch's streams until the process ends, as ``fake_gpu`` does; stream 0 computes."""
    cuda, synchronize = torch.cuda, torch.cuda.synchronize
    current = Stream.current = [Stream()]

    @contextmanager
    def on(stream: Stream) -> Iterator[None]:
        current.append(stream)
        yield
        current.pop()

    def wait_for_all(*unused: Any) -> None:
        synchronize()
        for stream in Stream.every:
            _learn(Stream.host, stream.known)

    cuda.Stream, cuda.Event, cuda.stream = Stream, Event, on  # type: ignore
    cuda.current_stream = lambda *unused: current[-1]  # type: ignore[assignment]
    cuda.default_stream = lambda *unused: current[0]  # type: ignore[assignment]
    cuda.synchronize = wait_for_all  # type: ignore[assignment]
    torch.Tensor.record_stream = lambda self, stream: Stream.recorded.add(_storage(self))  # type: ignore


class Streams(TorchDispatchMode):
    """Records ``races``, and ``copies`` to the host on the computing stream or next to it."""

    def __init__(self) -> None:
        super().__init__()
        self.races: Counter[str] = Counter()
        self.copies: Counter[str] = Counter()
        # By storage and stream: the time of the last read and of the last write.
        self._touched: dict[int, dict[bool, Known]] = {}
        # By new storage: the stream that owns its memory.
        self._owners: dict[int, Stream] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        if func is torch.ops.prim.device.default or func.is_view:
            return out
        touched = _on_gpu(func, args, kwargs)
        if touched:
            stream = Stream.current[-1]
            stream.known[stream.number] += 1
            _learn(stream.known, Stream.host)
            for storage, is_written in touched.items():
                self._touch(func, storage, is_written)
            self._note_host(func, args, kwargs, out)
        for tensor in tree_leaves(out):
            if isinstance(tensor, FakeTensor) and _storage(tensor) not in touched:
                self._touched.pop(
                    _storage(tensor), None
                )  # a new storage, although another one had the same address
                self._touch(func, _storage(tensor), True)
                self._own(tensor)
        return out

    def _own(self, tensor: Tensor) -> None:
        storage = _storage(tensor)
        if storage not in self._owners:
            self._owners[storage] = Stream.current[-1]
            gone = weakref.finalize(tensor.untyped_storage(), self._let_go, storage, _place())
            gone.atexit = False

    def _let_go(self, storage: int, place: str) -> None:
        """Free memory: the allocator may reuse it on the stream that owns it."""
        owner = self._owners.pop(storage)
        touched = self._touched.pop(storage, {})
        for stream, time in (item for clock in touched.values() for item in clock.items()):
            is_over = stream == owner.number or time <= owner.known.get(stream, 0)
            if not is_over and time > Stream.host.get(stream, 0) and storage not in Stream.recorded:
                self.races[f"memory of {place} is let go while another stream uses it"] += 1
        Stream.recorded.discard(storage)

    def _touch(self, func: Any, storage: int, is_written: bool) -> None:
        clock, number = Stream.current[-1].known, Stream.current[-1].number
        earlier = self._touched.setdefault(storage, {False: {}, True: {}})
        for kind in (True, False)[: 2 if is_written else 1]:
            if any(time > clock.get(stream, 0) for stream, time in earlier[kind].items()):
                verbs = ["writes" if is_written else "reads", "writes" if kind else "reads"]
                self.races[f"{func} at {_place()} {verbs[0]} what another stream {verbs[1]}"] += 1
        earlier[is_written][number] = clock[number]

    def _note_host(self, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        is_copy = func in _COPIES and isinstance(out, Tensor) and not isinstance(out, FakeTensor)
        is_blocking = not (kwargs.get("non_blocking") or (*args, *(False,) * 3)[2] is True)
        if is_copy and not is_blocking:
            self.copies["beside" if len(Stream.current) > 1 else "in line"] += 1
        elif is_copy or func is aten._local_scalar_dense.default:
            _learn(Stream.host, Stream.current[-1].known)


def _on_gpu(func: Any, args: Any, kwargs: Any) -> dict[int, bool]:
    """The storages that an operation touches, and whether it writes to each."""
    is_on_gpu: dict[int, bool] = defaultdict(bool)
    names = _names(func)
    for name, value in (*zip(names, args, strict=False), *kwargs.items()):
        for tensor in tree_leaves(value):
            if isinstance(tensor, FakeTensor):
                is_on_gpu[_storage(tensor)] |= names[name]
    return is_on_gpu


@cache
def _names(func: Any) -> dict[str, bool]:
    """The arguments of an operation, and whether it writes to each."""
    return {
        argument.name: argument.alias_info is not None and argument.alias_info.is_write
        for argument in func._schema.arguments
    }


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata
