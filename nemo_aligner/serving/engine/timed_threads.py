"""Threads for jobs of many steps (encoding samples), where each step has a time limit.

The chat template of an archive may loop forever for one conversation. If a step is too slow, this
module raises an exception in its thread that a template cannot catch. Until the step ends, another
thread replaces the blocked one, so that other jobs do not wait. Python cannot interrupt code in C,
such as a read from a socket, so a step may hang forever: then its job fails, but not its thread.
The number of such threads is limited.
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

# Seconds between two checks of the running jobs. With ``replaces_slow``, a thread whose step runs
# longer than this is replaced.
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


class ThreadsHangError(ServingError):
    """A job was not run, because too many earlier ones hang."""


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


class _ThreadCounts:
    """Counts a pool's threads by what they do; any thread may call the methods.

    Attributes:
        num_hanging: threads whose step has not ended, although its time limit has passed.
    """

    def __init__(self, num_threads: int, max_replaced: int) -> None:
        self._num_threads, self._max_replaced = num_threads, max_replaced
        self._num_alive = self._num_idle = self._num_replaced = self.num_hanging = 0
        self._lock = Lock()

    @property
    def num_alive(self) -> int:
        return self._num_alive

    @property
    def are_all_hanging(self) -> bool:
        """True if no thread will take another job, which includes that there is no thread."""
        with self._lock:
            return self._num_alive == self.num_hanging

    def needs_thread(self, num_jobs: int) -> bool:
        """Return whether ``num_jobs`` waiting jobs need another thread that the pool may start."""
        with self._lock:
            has_room = self._num_alive - self._num_replaced < self._num_threads
            return has_room and num_jobs > self._num_idle

    def add_thread(self, change: int = 1) -> None:
        """Count a new thread, which is idle until its first job.

        ``change`` is -1 for a thread that ends while it is idle.
        """
        with self._lock:
            self._num_alive += change
            self._num_idle += change

    def begin_job(self) -> None:
        with self._lock:
            self._num_idle -= 1

    def end_job(self, *, is_replaced: bool, is_hanging: bool) -> bool:
        """Count a thread whose job has ended as idle; return False if it must end.

        It must end if its replacement has made it superfluous.
        """
        with self._lock:
            self._num_replaced -= is_replaced
            self.num_hanging -= is_hanging
            is_needed = self._num_alive - self._num_replaced <= self._num_threads
            self._num_alive -= not is_needed
            self._num_idle += is_needed
            return is_needed

    def replace_thread(self) -> bool:
        """Allow another thread in place of one with a slow job; False if too many are replaced."""
        with self._lock:
            can_replace = self._num_replaced < self._max_replaced
            self._num_replaced += can_replace
            return can_replace

    def note_hanging(self) -> None:
        with self._lock:
            self.num_hanging += 1


class _Job(Generic[T]):
    def __init__(
        self,
        work: Callable[[RunStep], T],
        limit_secs: float,
        replace_secs: float,
        message: str,
        counts: _ThreadCounts,
        interrupts_abandoned: bool,
    ) -> None:
        self.result: Future[T] = Future()
        self.has_begun = self.has_ended = self.is_abandoned = False
        self.is_replaced = self.is_hanging = False
        self._work, self._message, self._counts = work, message, counts
        self._limit_secs, self._replace_secs = limit_secs, replace_secs
        self._interrupts_abandoned = interrupts_abandoned
        self._lock = Lock()
        self._thread: int | None = None
        self._begun: float | None = None  # time at which the running step began; None between steps
        self._step = -1
        self._interrupted = -math.inf

    # Methods that a thread of the pool calls.

    def run(self) -> None:
        """Run the work of this job, and give its result or exception to the waiting caller."""
        with self._lock:
            if self.has_ended or not self.result.set_running_or_notify_cancel():
                return
            self.has_begun = True
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

    def watch(self) -> None:
        """Interrupt a step that is too slow, and count its thread as replaced or hanging."""
        # Do not wait for the lock: a thread that waits for the GIL may hold it. The next call of
        # watch tries again.
        if not self._lock.acquire(blocking=False):
            return
        # The lock is held to the end, so that the step cannot end meanwhile. Otherwise the thread
        # of a finished job could count as replaced, or the exception could hit the next step.
        try:
            if self._begun is None:
                return
            now = time.monotonic()
            seconds = now - self._begun
            is_unneeded = self.is_abandoned and self._interrupts_abandoned
            is_late = seconds >= self._limit_secs or is_unneeded
            # Interrupt again after _GRACE_SECS, because an exception is lost if it hits e.g. a
            # destructor.
            if is_late and now - self._interrupted >= _GRACE_SECS:
                self._interrupted = now
                _raise_in(self._thread, _InterruptedStep)
            if seconds >= self._limit_secs + _GRACE_SECS:
                with suppress(InvalidStateError):
                    self.result.set_exception(TooSlowError(self._message, self._step))
                if not self.is_hanging:
                    self.is_hanging = True
                    self._counts.note_hanging()
            if seconds >= self._replace_secs and not self.is_replaced:
                self.is_replaced = self._counts.replace_thread()
        finally:
            self._lock.release()

    def refuse(self, error: Exception) -> None:
        """Fail the job with ``error``, unless a thread has begun it meanwhile."""
        with self._lock:
            if not self.has_begun:
                self.has_ended = True
                with suppress(InvalidStateError):  # the caller has cancelled it
                    self.result.set_exception(error)


class TimedThreads:
    """Threads that run the jobs of one event loop; each step of a job has a time limit.

    A thread begins when a job needs it. ``num_threads`` run at the same time, in addition to those
    that are replaced because their jobs are slow or hang.
    """

    def __init__(
        self,
        num_threads: int,
        name: str,
        limit_secs: float,
        message: str,
        *,
        max_replaced: int = 16,
        replaces_slow: bool = True,
        interrupts_abandoned: bool = True,
    ) -> None:
        """Set the limits of jobs and threads.

        Args:
            num_threads: maximum number of threads that are not replaced.
            name: name of the threads.
            limit_secs: a step that takes longer fails, with ``message``.
            message: see ``limit_secs``.
            max_replaced: maximum number of replaced threads whose steps have not ended. While that
                many hang, jobs are rejected.
            replaces_slow: whether a thread is replaced if its step is slow, so that other jobs do
                not wait for it. If False, only one whose step hangs is replaced.
            interrupts_abandoned: whether a step is also interrupted if the caller of its job no
                longer waits. The interruption is an exception at any instruction, so code that is
                not prepared for it could keep a lock for ever.
        """
        self._name, self._limit_secs, self._message = name, limit_secs, message
        self._replace_secs = _WATCH_SECS if replaces_slow else limit_secs + _GRACE_SECS
        self._max_replaced, self._interrupts_abandoned = max_replaced, interrupts_abandoned
        self._jobs: SimpleQueue[_Job[Any] | None] = SimpleQueue()
        self._counts = _ThreadCounts(num_threads, max_replaced)

    @property
    def problem(self) -> str | None:
        """Why jobs are rejected now; None if they are run."""
        num_hanging = self._counts.num_hanging
        if num_hanging < self._max_replaced:
            return None
        return f"{num_hanging} earlier calls still hang, so no more are made"

    async def run(self, work: Callable[[RunStep], T]) -> T:
        """Run ``work`` in a thread; ``work`` makes slow calls through its ``RunStep`` argument.

        If the caller is cancelled, the work ends after the running step, which is interrupted if
        ``interrupts_abandoned`` is set.

        Raises:
            TooSlowError: a step could not be interrupted. Exceptions of ``work`` are also raised.
            ThreadsHangError: too many earlier steps hang, so no thread is left for the work.
        """
        problem = self._start_threads(num_new=1)
        if problem is not None:
            raise ThreadsHangError(problem)
        job = _Job(
            *(work, self._limit_secs, self._replace_secs, self._message, self._counts),
            self._interrupts_abandoned,
        )
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
        for _ in range(self._counts.num_alive):
            self._jobs.put(None)

    def _watch(self, job: _Job[Any]) -> None:
        if job.has_ended or job.result.cancelled():
            return
        # Schedule the next check first, so that the job is still watched if this one fails.
        asyncio.get_running_loop().call_later(_WATCH_SECS, self._watch, job)
        if job.has_begun:
            job.watch()
            return
        # The job waits. Threads that could take it may be replaced now, or may all hang.
        problem = self._start_threads()
        if problem is not None:
            job.refuse(ThreadsHangError(problem))

    def _start_threads(self, num_new: int = 0) -> str | None:
        """Start threads for the waiting jobs and ``num_new`` more, up to ``num_threads`` in all.

        Returns:
            Why the jobs cannot be run; None if there are threads for them, or will be.
        """
        if self.problem is not None:
            return self.problem
        while self._counts.needs_thread(self._jobs.qsize() + num_new):
            try:
                self._start_thread()
            except RuntimeError as error:  # the process or its container may have no more threads
                if not self._counts.are_all_hanging:
                    return None  # the next thread whose job ends takes the job
                num_hanging = self._counts.num_hanging
                return f"no thread can be started ({error}); {num_hanging} earlier calls still hang"
        return None

    def _start_thread(self) -> None:
        self._counts.add_thread()
        # Daemon threads, because one that is stuck in C code must not keep the process alive.
        thread = Thread(target=self._run_jobs, name=self._name, daemon=True)
        try:
            thread.start()
        except RuntimeError:
            self._counts.add_thread(-1)
            raise

    def _run_jobs(self) -> None:
        while (job := self._jobs.get()) is not None:
            self._counts.begin_job()
            job.run()
            if not self._counts.end_job(is_replaced=job.is_replaced, is_hanging=job.is_hanging):
                return
        self._counts.add_thread(-1)


def _raise_in(thread: int | None, error: type[BaseException] | None) -> None:
    """Raise ``error`` in a thread at its next instruction; None cancels one not raised yet."""
    assert thread is not None
    target = None if error is None else ctypes.py_object(error)
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), target)
