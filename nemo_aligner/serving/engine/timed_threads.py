"""Threads for work of many steps, each of which has a time limit.

The chat template of an archive may loop for ever on one conversation. Such a step gets an exception
raised in its thread, which Python code cannot outrun; and until it ends, another thread takes the
place of the one that it holds, so that others are not kept waiting.
"""

from __future__ import annotations

import asyncio
import ctypes
import math
import time
from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from queue import SimpleQueue
from threading import Lock, Thread, get_ident
from typing import Any, Generic, ParamSpec, Protocol, TypeVar

from nemo_aligner.utils.errors import ServingError

P = ParamSpec("P")
T = TypeVar("T")
Q = TypeVar("Q")

# How often jobs are looked at, and for how long a step may hold its thread without a stand-in.
_WATCH_SECS = 0.25
# What a step that is interrupted may take to end before it is left to itself: code in C is not
# interrupted.
_GRACE_SECS = 1.0


class TooSlowError(ServingError):
    """A step that took longer than its limit.

    Attributes:
        step: its number, from 0.
    """

    def __init__(self, message: str, step: int) -> None:
        super().__init__(message)
        self.step = step


class RunStep(Protocol):
    """Calls a function as one step of a job."""

    def __call__(self, function: Callable[P, T], /, *arguments: P.args, **named: P.kwargs) -> T:
        """Call it.

        Raises:
            TooSlowError: it took too long.
        """


class _InterruptedStep(BaseException):
    """Raised in a thread from outside; no ``except Exception`` of a template's code holds it."""


class _AbandonedJobError(Exception):
    """Ends a job that nobody waits for."""


class _Job(Generic[T]):
    def __init__(self, work: Callable[[RunStep], T], limit_secs: float, message: str) -> None:
        self.result: Future[T] = Future()
        self.has_ended = self.is_abandoned = self._is_replaced = False
        self._work, self._limit_secs, self._message = work, limit_secs, message
        self._lock = Lock()
        self._thread: int | None = None
        self._begun: float | None = None  # of the step that runs
        self._step = -1
        self._interrupted = -math.inf

    # In a thread of the pool.

    @property
    def is_replaced(self) -> bool:
        """True if another thread has taken the place of the job's, which then has to end."""
        with self._lock:
            return self._is_replaced

    def run(self) -> None:
        """Do the work, and hand out its result."""
        if not self.result.set_running_or_notify_cancel():
            return
        self._thread = get_ident()
        try:
            result = self._work(self._run_step)
        except BaseException as error:
            with suppress(InvalidStateError):  # who waited was told that it takes too long
                self.result.set_exception(error)
        else:
            with suppress(InvalidStateError):
                self.result.set_result(result)
        finally:
            self.has_ended = True

    def _run_step(self, function: Callable[P, Q], /, *arguments: P.args, **named: P.kwargs) -> Q:
        if self.is_abandoned:
            raise _AbandonedJobError
        try:
            try:
                with self._lock:
                    self._step += 1
                    self._interrupted = -math.inf
                    self._begun = time.monotonic()
                return function(*arguments, **named)
            finally:
                self._end_step()
        # The interruption may also arrive while the step is being ended.
        except _InterruptedStep:
            self._end_step()
            raise TooSlowError(self._message, self._step) from None

    def _end_step(self) -> None:
        """From here on the thread is not interrupted any more."""
        with self._lock:
            self._begun = None
            # One that was raised and has not arrived yet would hit what comes next.
            _raise_in(self._thread, None)

    # In the event loop.

    def watch(self) -> bool:
        """Interrupt a step that takes too long; tell whether it needs a stand-in for its thread."""
        # A thread that waits for Python's lock may hold this one; there is a next time.
        if not self._lock.acquire(blocking=False):
            return False
        # All with the lock held, so that it is about the step that runs: if that ended in between,
        # a job that is over would get a stand-in, or the next step the error.
        try:
            if self._begun is None:
                return False
            now = time.monotonic()
            seconds = now - self._begun
            is_late = seconds >= self._limit_secs or self.is_abandoned
            # Again after a while: an exception may be lost, as in a destructor.
            if is_late and now - self._interrupted >= _GRACE_SECS:
                self._interrupted = now
                _raise_in(self._thread, _InterruptedStep)
            if seconds >= self._limit_secs + _GRACE_SECS:
                with suppress(InvalidStateError):
                    self.result.set_exception(TooSlowError(self._message, self._step))
            needs_thread = seconds >= _WATCH_SECS and not self._is_replaced
            self._is_replaced |= needs_thread
            return needs_thread
        finally:
            self._lock.release()


class TimedThreads:
    """A few threads for jobs of one event loop; each step of a job has a time limit."""

    def __init__(self, num_threads: int, name: str, limit_secs: float, message: str) -> None:
        """``message`` is that of the error of a step that takes longer than ``limit_secs``."""
        self._name, self._limit_secs, self._message = name, limit_secs, message
        self._jobs: SimpleQueue[_Job[Any] | None] = SimpleQueue()
        self._num_threads = num_threads
        for _ in range(num_threads):
            self._start_thread()

    async def run(self, work: Callable[[RunStep], T]) -> T:
        """Do some work in a thread; it passes what may take long to the function that it is given.

        If the caller is cancelled, the work ends with the step that runs.

        Raises:
            TooSlowError: a step could not be interrupted; and whatever the work raises.
        """
        job = _Job(work, self._limit_secs, self._message)
        timer = asyncio.get_running_loop().call_later(_WATCH_SECS, self._watch, job)
        self._jobs.put(job)
        try:
            return await asyncio.wrap_future(job.result)
        finally:
            if job.has_ended:
                timer.cancel()
            job.is_abandoned = True

    def close(self) -> None:
        """End the threads; no job may be waited for."""
        for _ in range(self._num_threads):
            self._jobs.put(None)

    def _watch(self, job: _Job[Any]) -> None:
        if job.has_ended or job.result.cancelled():
            return
        if job.watch():
            self._start_thread()
        asyncio.get_running_loop().call_later(_WATCH_SECS, self._watch, job)

    def _start_thread(self) -> None:
        # Daemons: one that C code holds must not keep the process from its end.
        Thread(target=self._do_jobs, name=self._name, daemon=True).start()

    def _do_jobs(self) -> None:
        while (job := self._jobs.get()) is not None:
            job.run()
            if job.is_replaced:
                return


def _raise_in(thread: int | None, error: type[BaseException] | None) -> None:
    """Have a thread raise an exception at its next instruction; None takes back an earlier one."""
    assert thread is not None
    target = None if error is None else ctypes.py_object(error)
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), target)
