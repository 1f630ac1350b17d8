"""A lock for futures: requests for values share the model, training and saving use it alone."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from threading import Lock
from typing import Any, NamedTuple, TypeVar

T = TypeVar("T")

Begin = Callable[[], "Future[Any]"]
"""Starts work, and returns a future that is done when the work has ended."""


class _Work(NamedTuple):
    begin: Begin
    answer: Future[Any]
    is_exclusive: bool


class ReadWriteLock:
    """Runs work in the order of its arrival: shared work concurrently, exclusive work by itself.

    Computing values is shared work, training is exclusive. Values that are being computed are
    finished before the model trains, and later requests wait until training has ended. Work that is
    cancelled before it begins is dropped. After it has begun, shared work can still be cancelled,
    but exclusive work continues. Any thread may call the methods.
    """

    def __init__(self) -> None:
        self._lock = Lock()
        self._waiting: dict[Future[Any], _Work] = {}
        self._running = 0
        self._runs_exclusive = False

    @property
    def is_exclusive(self) -> bool:
        """True if exclusive work is running or waiting."""
        with self._lock:
            return self._runs_exclusive or any(work.is_exclusive for work in self._waiting.values())

    def submit(self, begin: Callable[[], Future[T]], *, exclusive: bool) -> Future[T]:
        """Call ``begin`` once the work may run; return the future of the work's result."""
        answer: Future[T] = Future()
        with self._lock:
            self._waiting[answer] = _Work(begin, answer, exclusive)
        answer.add_done_callback(self._drop)
        self._begin_next()
        return answer

    def _drop(self, answer: Future[Any]) -> None:
        """Remove work that was cancelled before it began; the work after it may then begin."""
        with self._lock:
            is_dropped = self._waiting.pop(answer, None) is not None
        if is_dropped:
            self._begin_next()

    def _begin_next(self) -> None:
        while (work := self._pop_next()) is not None:
            # After set_running_or_notify_cancel returns True, exclusive work can no longer be
            # cancelled.
            if work.is_exclusive and not work.answer.set_running_or_notify_cancel():
                self._release()
                continue
            try:
                result = work.begin()
            except Exception as error:
                result = Future()
                result.set_exception(error)
            if not work.is_exclusive:
                work.answer.add_done_callback(partial(_pass_cancellation, result))
            result.add_done_callback(partial(self._end, work))

    def _pop_next(self) -> _Work | None:
        with self._lock:
            work = next(iter(self._waiting.values()), None)
            if work is None or (self._running and (work.is_exclusive or self._runs_exclusive)):
                return None
            del self._waiting[work.answer]
            self._running += 1
            self._runs_exclusive = work.is_exclusive
            return work

    def _end(self, work: _Work, result: Future[Any]) -> None:
        self._release()
        self._begin_next()
        # The sender may have cancelled shared work while it ran; then nobody waits for the result.
        if not work.is_exclusive and not work.answer.set_running_or_notify_cancel():
            return
        error = result.exception()
        if error is None:
            work.answer.set_result(result.result())
        else:
            work.answer.set_exception(error)

    def _release(self) -> None:
        with self._lock:
            self._running -= 1
            self._runs_exclusive = False


def _pass_cancellation(result: Future[Any], answer: Future[Any]) -> None:
    if answer.cancelled():
        result.cancel()
