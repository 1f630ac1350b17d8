"""Threads for jobs of many steps (encoding samples), where each step has a time limit.

The chat template of an archive may loop forever for one conversation. If a step is too slow, this
module raises an exception in its thread that a template cannot catch. Until the step ends, another
thread replaces the blocked one, so that other jobs do not wait.
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

# Seconds between two checks of the running jobs. A thread whose step runs longer than this is
# replaced.
_WATCH_SECS = 0.25
# Seconds after which an interrupted step is abandoned if it has not ended, because Python cannot
# interrupt code in C.
_GRACE_SECS = 1.0


class TooSlowError(ServingError):
    """A step took longer than its limit.

    Attributes:
        step: number of the step in its job, from 0.
    """

    def __init__(self, message: str, step: int) -> None:
        super().__init__(message)
        self.step = step


class RunStep(Protocol):
    """Type of the function that a job gets, to run its slow calls with a time limit each."""

    def __call__(self, function: Callable[P, T], /, *arguments: P.args, **named: P.kwargs) -> T:
        """Call ``function``, and return its result.

        Raises:
            TooSlowError: the function took longer than the limit.
        """


class _InterruptedStep(BaseException):
    """Raised in a slow step by another thread.

    It is a BaseException, so ``except Exception`` in a template does not catch it.
    """


class _AbandonedJobError(Exception):
    """Raised at the next step of a job whose caller no longer waits, to end the job."""


class _Job(Generic[T]):
    def __init__(self, work: Callable[[RunStep], T], limit_secs: float, message: str) -> None:
        self.result: Future[T] = Future()
        self.has_ended = self.is_abandoned = self._is_replaced = False
        self._work, self._limit_secs, self._message = work, limit_secs, message
        self._lock = Lock()
        self._thread: int | None = None
        self._begun: float | None = None  # time at which the running step began; None between steps
        self._step = -1
        self._interrupted = -math.inf

    # Methods that a thread of the pool calls.

    @property
    def is_replaced(self) -> bool:
        """Tell whether another thread replaces this job's thread, which must end with the job."""
        with self._lock:
            return self._is_replaced

    def run(self) -> None:
        """Run the work of this job, and give its result or exception to the waiting caller."""
        if not self.result.set_running_or_notify_cancel():
            return
        self._thread = get_ident()
        try:
            result = self._work(self._run_step)
        except BaseException as error:
            with suppress(InvalidStateError):  # the caller has already got a TooSlowError
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
        # The interruption may also arrive while _end_step runs, so _end_step is called again.
        except _InterruptedStep:
            self._end_step()
            raise TooSlowError(self._message, self._step) from None

    def _end_step(self) -> None:
        """Mark the step as ended, so that ``watch`` no longer interrupts the thread."""
        with self._lock:
            self._begun = None
            # Cancel an exception that is on its way to this thread; it would hit the code after the
            # step.
            _raise_in(self._thread, None)

    # Methods that the event loop calls.

    def watch(self) -> bool:
        """Interrupt a step that is too slow; tell whether its thread needs a replacement."""
        # Do not wait for the lock: a thread that waits for the GIL may hold it. The next call of
        # watch tries again.
        if not self._lock.acquire(blocking=False):
            return False
        # The lock is held to the end, so that the step cannot end meanwhile. Otherwise a finished
        # job could get a replacement thread, or the exception could hit the next step.
        try:
            if self._begun is None:
                return False
            now = time.monotonic()
            seconds = now - self._begun
            is_late = seconds >= self._limit_secs or self.is_abandoned
            # Interrupt again after _GRACE_SECS, because an exception is lost if it hits e.g. a
            # destructor.
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
    """A few threads that run the jobs of one event loop; each step of a job has a time limit."""

    def __init__(self, num_threads: int, name: str, limit_secs: float, message: str) -> None:
        """Start the threads; a step longer than ``limit_secs`` fails with ``message``."""
        self._name, self._limit_secs, self._message = name, limit_secs, message
        self._jobs: SimpleQueue[_Job[Any] | None] = SimpleQueue()
        self._num_threads = num_threads
        for _ in range(num_threads):
            self._start_thread()

    async def run(self, work: Callable[[RunStep], T]) -> T:
        """Run ``work`` in a thread; ``work`` makes slow calls through its ``RunStep`` argument.

        If the caller is cancelled, the work ends after the running step.

        Raises:
            TooSlowError: a step could not be interrupted. Exceptions of ``work`` are also raised.
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
        """End the threads; no call of ``run`` may be waiting."""
        for _ in range(self._num_threads):
            self._jobs.put(None)

    def _watch(self, job: _Job[Any]) -> None:
        if job.has_ended or job.result.cancelled():
            return
        if job.watch():
            self._start_thread()
        asyncio.get_running_loop().call_later(_WATCH_SECS, self._watch, job)

    def _start_thread(self) -> None:
        # Daemon threads, because one that is stuck in C code must not keep the process alive.
        Thread(target=self._run_jobs, name=self._name, daemon=True).start()

    def _run_jobs(self) -> None:
        while (job := self._jobs.get()) is not None:
            job.run()
            if job.is_replaced:
                return


def _raise_in(thread: int | None, error: type[BaseException] | None) -> None:
    """Raise ``error`` in a thread at its next instruction; None cancels one not raised yet."""
    assert thread is not None
    target = None if error is None else ctypes.py_object(error)
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), target)
