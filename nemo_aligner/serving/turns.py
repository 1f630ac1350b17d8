"""Whose turn it is: work that others may stand beside, and work that must be alone."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from threading import Lock
from typing import Any, TypeVar

T = TypeVar("T")
Begin = Callable[[], "Future[Any]"]
"""Starts some work; it has ended when the future is done."""


class Turns:
    """Work in the order in which it came: what need not be alone, beside what came just before.

    So a request for values that the model has half answered is answered whole before the model
    learns, and what is asked for meanwhile waits. Safe from any thread.
    """

    def __init__(self) -> None:
        self._lock = Lock()
        self._waiting: deque[tuple[bool, Begin, Future[Any]]] = deque()
        self._running = 0
        self._runs_alone = False

    @property
    def is_reserved(self) -> bool:
        """Whether something is alone, or waits to be."""
        with self._lock:
            return self._runs_alone or any(alone for alone, _, _ in self._waiting)

    def take(self, begin: Callable[[], Future[T]], *, alone: bool) -> Future[T]:
        """Call ``begin`` when its turn has come: the future of what comes of it."""
        answer: Future[T] = Future()
        answer.set_running_or_notify_cancel()  # nobody can cancel it any more
        with self._lock:
            self._waiting.append((alone, begin, answer))
        self._begin_what_may()
        return answer

    def _begin_what_may(self) -> None:
        while (taken := self._next()) is not None:
            begin, answer = taken
            try:
                work = begin()
            except Exception as error:
                self._end_turn()
                answer.set_exception(error)
            else:
                work.add_done_callback(partial(self._end, answer))

    def _next(self) -> tuple[Begin, Future[Any]] | None:
        with self._lock:
            if not self._waiting:
                return None
            alone, begin, answer = self._waiting[0]
            if self._running and (alone or self._runs_alone):
                return None
            self._waiting.popleft()
            self._running += 1
            self._runs_alone = alone
            return begin, answer

    def _end(self, answer: Future[Any], work: Future[Any]) -> None:
        self._end_turn()
        self._begin_what_may()
        error = work.exception()
        if error is None:
            answer.set_result(work.result())
        else:
            answer.set_exception(error)

    def _end_turn(self) -> None:
        with self._lock:
            self._running -= 1
            self._runs_alone = False
