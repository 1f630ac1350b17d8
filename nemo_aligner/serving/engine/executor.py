"""Run an operation on all ranks at once: rank 0 leads, and the workers follow.

Two gloo process groups are used in addition to the model's. Over the group *work*, rank 0 sends the
calls, without a time limit. Over the group *pulse*, all ranks exchange a heartbeat every few
seconds, in another thread. So they notice within seconds if one of them has died or frozen, even
during a forward pass or without requests. A rank whose call never ends still sends heartbeats, so
rank 0 also watches the duration of calls.
"""

from __future__ import annotations

import logging
import os
import pickle
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, InvalidStateError, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from queue import Empty, SimpleQueue
from typing import Any, NoReturn, TypeVar

import torch
import torch.distributed as dist

from nemo_aligner.cpu.matmuls import FreedMemory
from nemo_aligner.distributed.collectives import wait_for_device
from nemo_aligner.serving.engine.pace import CallClock
from nemo_aligner.serving.engine.running_calls import LongOperation, RunningCalls
from nemo_aligner.utils.errors import AlignerError, ServingError, first_line, one_line
from nemo_aligner.utils.host_transfer import Arriving

logger = logging.getLogger(__name__)

T = TypeVar("T")


@dataclass(frozen=True)
class Launch:
    """An operation that returns while the GPU still computes, so that the next one may begin.

    ``begin`` takes the operation's arguments, and is collective: every rank calls it.
    """

    begin: Callable[..., Arriving[Any]]


Operation = Callable[..., Any] | Launch
"""Collective: each rank calls it with the same arguments, and rank 0's result is returned.

A ``LongOperation`` is one whose duration is not limited."""
_Call = tuple[str, tuple[Any, ...]]
"""The name of an operation, and its arguments."""


class RanksLostError(ServingError):
    """A rank has died or frozen, or the model hangs, so this server cannot answer any more."""


# Freed memory is returned to the operating system at most once in this many calls. Without this,
# fragments of free memory would accumulate over days, because calls differ in size.
_CALLS_BETWEEN_TRIMS = 100
# Interval at which rank 0 checks whether the device has finished, or another call has arrived.
_LOOK_EVERY_SECS = 2e-4
# Between calls, workers wait in a broadcast, which may take days.
_NO_LIMIT = timedelta(days=365)


@dataclass(frozen=True)
class _Begun:
    """A call that has begun on this rank.

    Attributes:
        call: name and arguments of the operation.
        arriving: the future result; if the call could not begin, reading it raises the error.
        answer: the future that ``submit`` returned to its caller; None on workers.
    """

    call: _Call
    arriving: Arriving[Any]
    answer: Future[Any] | None


class ModelRanks:
    """Runs operations by name on all ranks: rank 0 in ``run_leader``, workers in ``run_worker``.

    Operations run one at a time in the order of their submission. While a ``Launch`` runs on the
    device, the next one may already begin. If the first one then fails, the next one is begun
    again, because it may depend on state that the first one should have stored. A worker that
    cannot continue ends its process with exit code 1. On rank 0, ``failure`` is then the reason
    (None while the ranks work), and all submitted operations fail. ``clock`` has the end of the
    latest ``LongOperation`` or call of a batcher, for the batchers on rank 0. ``running`` has the
    calls that run now; it is empty on workers.
    """

    def __init__(
        self,
        operations: Mapping[str, Operation],
        reset_cache: Callable[[], None] = lambda: None,
        heartbeat_secs: float = 3.0,
        worker_timeout_secs: float = 30.0,
        max_stuck_secs: float = 0.0,
    ) -> None:
        """Create the two gloo groups; collective over the default group, if there is one.

        ``reset_cache`` clears the state that operations keep between calls, e.g. the prefix cache.
        It is called on every rank after a call has failed on any of them, because the state must be
        the same on all ranks. The ranks count as lost if a call takes longer than
        ``max_stuck_secs`` (0: no limit), unless it is one of a ``LongOperation``.
        """
        self._operations = dict(operations)
        self._reset_cache = reset_cache
        self._heartbeat_secs = heartbeat_secs
        self._timeout_secs = worker_timeout_secs
        self.world_size = dist.get_world_size() if dist.is_initialized() else 1
        self.rank = dist.get_rank() if dist.is_initialized() else 0
        self.failure: str | None = None
        self.clock = CallClock()
        self._lock = threading.Lock()
        self._open: set[Future[Any]] = set()
        self._leaving = threading.Event()
        self._in_flight: _Begun | None = None
        self._freed = FreedMemory(steps=_CALLS_BETWEEN_TRIMS)
        self.running = RunningCalls(max_stuck_secs)
        self._has_stopped = threading.Event()
        self._calls: SimpleQueue[tuple[Future[Any], _Call] | None] = SimpleQueue()
        if self.world_size > 1:
            self._work = dist.new_group(backend="gloo", timeout=_NO_LIMIT)
            self._pulse = dist.new_group(
                backend="gloo", timeout=timedelta(seconds=heartbeat_secs + worker_timeout_secs)
            )
            self._pulse_thread = threading.Thread(target=self._beat, name="pulse", daemon=True)
            self._pulse_thread.start()
        if self.rank == 0 and max_stuck_secs:
            threading.Thread(target=self._watch_calls, name="call watch", daemon=True).start()

    def submit(self, operation: str, *arguments: Any) -> Future[Any]:
        """Queue an operation for all ranks; called on rank 0, from any thread.

        ``arguments`` are arrays, numbers, or lists of them, and must not change afterwards. The
        future can be cancelled until the operation begins. It fails with a ServingError if the
        operation failed (the next one may succeed). If a rank is lost, the future fails at once
        with a RanksLostError, because the model may never return.
        """
        answer: Future[Any] = Future()
        with self._lock:
            if self.failure is not None:
                answer.set_exception(RanksLostError(self.failure))
                return answer
            self._open.add(answer)
        self._calls.put((answer, (operation, arguments)))
        return answer

    def execute(self, operation: str, *arguments: Any) -> Any:
        """Submit an operation, and wait for its result.

        Raises:
            ServingError: the operation failed, or a rank is lost.
        """
        return self.submit(operation, *arguments).result()

    def run_leader(self, drive: Callable[[], T]) -> T:
        """On rank 0: compute submitted calls in this thread until ``drive`` returns in another one.

        The caller must be the thread that has loaded the model. OpenMP starts helpers for every
        thread that computes, and if there are more of them than cores, all of them sleep after each
        operation: in another thread, a forward pass took 1.3 to 1.5 times as long.
        """
        with ThreadPoolExecutor(1, "drive") as executor:
            driving = executor.submit(drive)
            driving.add_done_callback(lambda _: self._calls.put(None))
            while (call := self._next_call()) is not None:
                self._compute(*call)
            return driving.result()

    def _next_call(self) -> tuple[Future[Any], _Call] | None:
        """Wait for the next submitted call, and return it with its future.

        None at the end of the run. A call in flight is ended first, unless the next call is a
        ``Launch`` that may begin while it runs.
        """
        while self._in_flight is not None:
            try:
                submitted = self._calls.get(timeout=_LOOK_EVERY_SECS)
            except Empty:
                if self._in_flight.arriving.has_arrived():
                    self._end_in_flight()
                continue
            is_behind = submitted is not None and self._is_launch(submitted[1])
            if not is_behind or self._in_flight.arriving.has_arrived():
                self._end_in_flight()
            return submitted
        return self._calls.get()

    def _is_launch(self, call: _Call) -> bool:
        return isinstance(self._operations[call[0]], Launch)

    def run_worker(self) -> None:
        """On a worker: run the calls that rank 0 sends, until rank 0 stops."""
        while True:
            header = self._broadcast(torch.zeros(1, dtype=torch.int64))
            size = int(header)
            if size == 0:
                return
            payload = self._broadcast(torch.zeros(size, dtype=torch.uint8))
            # Unpickling is safe: the data comes from rank 0, over a group of this server.
            self._advance(pickle.loads(payload.numpy().data))

    def stop(self) -> None:
        """Release the workers and end the heartbeat; every rank does so while no operation runs."""
        if self.world_size > 1 and self.failure is None:
            if self.rank == 0:
                self._broadcast(torch.zeros(1, dtype=torch.int64))
            self._leaving.set()
            self._pulse_thread.join()
        self._has_stopped.set()

    def fail(self, reason: str) -> None:
        """Mark the ranks as lost: rank 0 fails all operations, and a worker ends its process."""
        if self.rank == 0:
            self._fail_operations(reason)
        else:
            self._exit(reason)

    def _exit(self, reason: str) -> NoReturn:
        logger.error("rank %d exits: %s", self.rank, reason)
        # Exit without cleaning up, because the main thread may be in a collective that never
        # returns.
        os._exit(1)

    def _fail_operations(self, reason: str) -> None:
        with self._lock:
            if self.failure is None:
                self.failure = reason
            unanswered, self._open = self._open, set()
        for answer in unanswered:
            with suppress(InvalidStateError):  # the caller cancelled the future
                answer.set_exception(RanksLostError(self.failure))

    def _compute(self, answer: Future[Any], call: _Call) -> None:
        with self._lock:
            if answer not in self._open:
                return  # ``fail`` has already given the future the error that a rank was lost
            if not answer.set_running_or_notify_cancel():
                self._open.remove(answer)
                return
        self.running.begin(answer, call[0], is_long=self._is_long(call))
        with suppress(RanksLostError):  # ``fail`` has already given every waiting future this error
            is_dropped = True
            while is_dropped and self.failure is None:
                is_dropped = self._send_and_advance(call, answer)

    def _end_in_flight(self) -> None:
        if self.failure is not None:
            self._in_flight = None  # its future already has the error
            return
        with suppress(RanksLostError):
            self._send_and_advance(None, None)

    def _send_and_advance(self, call: _Call | None, answer: Future[Any] | None) -> bool:
        """Call ``_advance`` on all ranks; called on rank 0."""
        if self.world_size > 1:
            # Build both tensors before sending the first, so that workers never wait for a second
            # that failed.
            payload = torch.frombuffer(bytearray(pickle.dumps(call, protocol=5)), dtype=torch.uint8)
            # Workers need the size before they can receive the payload; size 0 ends them.
            header = torch.tensor([payload.numel()], dtype=torch.int64)
            self._broadcast(header)
            self._broadcast(payload)
        return self._advance(call, answer)

    def _advance(self, call: _Call | None, answer: Future[Any] | None = None) -> bool:
        """Begin ``call``, then end the call in flight; also end ``call`` unless it is a ``Launch``.

        To end a call is to wait for its result and to exchange errors with all ranks. Every rank
        does this in the same order.

        Returns:
            Whether ``call`` was dropped because the call in flight has failed. It must then be
            begun again.
        """
        previous, self._in_flight = self._in_flight, None
        begun = None if call is None else self._begin(call, answer)
        if previous is not None and not self._end(previous, is_followed=begun is not None):
            return begun is not None
        if begun is not None and self._is_launch(begun.call):
            self._in_flight = begun
        elif begun is not None:
            self._end(begun)
        return False

    def _broadcast(self, tensor: torch.Tensor) -> torch.Tensor:
        with self._in_step():
            dist.broadcast(tensor, src=0, group=self._work)
        return tensor

    @contextmanager
    def _in_step(self) -> Iterator[None]:
        """Mark the ranks as lost if a message between them fails: their calls may differ now."""
        try:
            yield
        except Exception as error:
            reason = f"the ranks lost each other: {first_line(error)[:200]}"
            self.fail(reason)
            raise RanksLostError(reason) from error

    def _begin(self, call: _Call, answer: Future[Any] | None) -> _Begun:
        """Begin an operation; an exception is kept and raised when the result is awaited."""
        name, arguments = call
        operation = self._operations[name]
        try:
            if isinstance(operation, Launch):
                return _Begun(call, operation.begin(*arguments), answer)
            return _Begun(call, Arriving.now(operation(*arguments)), answer)
        except Exception as caught:
            return _Begun(call, _failed_arrival(caught), answer)

    def _end(self, begun: _Begun, is_followed: bool = False) -> bool:
        """Wait for a call, and exchange errors, so that all ranks know if it has failed.

        Args:
            begun: the call.
            is_followed: whether another call has begun after this one.

        Returns:
            False if the call has failed on any rank.
        """
        result, error = None, None
        try:
            result = begun.arriving.wait()
        except Exception as caught:
            error = caught
            # An error of this package has everything that a user can act on, without a traceback.
            with_trace = not isinstance(caught, AlignerError) or logger.isEnabledFor(logging.DEBUG)
            logger.error(
                "rank %d could not %s: %s",
                self.rank,
                begun.call[0],
                one_line(caught),
                exc_info=with_trace,
            )
            self._fail_if_device_is_lost()
        # Exchange errors even if the call succeeded on this rank: if it failed on another one, all
        # ranks must reset their caches and drop the next call.
        try:
            errors = self._acknowledge(error)
        except RanksLostError:
            return False  # ``fail`` has already given every waiting future this error
        if errors:
            self._reset_cache()
        if is_followed and 0 < len(errors) < self.world_size:
            # The other ranks have planned, and perhaps started, the next call with a prefix cache
            # that the failed ranks have emptied, so the ranks no longer compute the same.
            self.fail(f"only some ranks could {begun.call[0]}: {'; '.join(errors)}")
        if begun.answer is not None:
            failed = ServingError("; ".join(errors)) if errors else None
            if failed is not None:
                failed.__cause__ = error
            if self._is_long(begun.call):
                self.clock.last_end = time.monotonic()  # batchers note the ends of their own calls
            self._set_answer(begun.answer, result, failed)
        # Check the memory after the answer, so that no request waits for it: reading /proc takes up
        # to 0.25 ms.
        self._freed.end_step()
        return not errors

    def _is_long(self, call: _Call) -> bool:
        return isinstance(self._operations[call[0]], LongOperation)

    def _set_answer(self, answer: Future[Any], result: Any, error: Exception | None) -> None:
        self.running.end(answer)
        with self._lock:
            if answer not in self._open:
                return  # ``fail`` has already given the future the error that a rank was lost
            self._open.remove(answer)
        if error is None:
            answer.set_result(result)
        else:
            answer.set_exception(error)

    def _fail_if_device_is_lost(self) -> None:
        """Mark the ranks as lost after a CUDA error that all later calls on the device repeat."""
        try:
            wait_for_device()
        except Exception as error:
            self.fail(f"the device of rank {self.rank} is lost: {first_line(error)[:200]}")

    def _acknowledge(self, error: Exception | None) -> list[str]:
        local_error = None if error is None else f"{type(error).__name__}: {error}"
        if self.world_size == 1:
            return [] if local_error is None else [local_error]
        # If only this rank has failed, the others wait for it in a collective of the model, and
        # never get to exchange errors. So a timer marks the ranks as lost.
        watch = threading.Timer(
            self._timeout_secs, self.fail, [f"rank {self.rank} failed alone: {local_error}"]
        )
        watch.daemon = True
        if error is not None:
            watch.start()
        errors: list[str | None] = [None] * self.world_size
        with self._in_step():
            dist.all_gather_object(errors, local_error, group=self._work)
        watch.cancel()
        return [f"rank {rank}: {text}" for rank, text in enumerate(errors) if text is not None]

    def _watch_calls(self) -> None:
        """Mark the ranks as lost if a call hangs; on rank 0, until ``stop``."""
        while not self._has_stopped.wait(self.running.look_secs):
            reason = self.running.find_hung()
            if reason is not None:
                self.fail(reason)
                return

    def _beat(self) -> None:
        """Exchange heartbeats until rank 0 stops.

        Workers wait in an all-reduce for the next heartbeat.
        """
        while True:
            leaving = torch.tensor([int(self.rank == 0 and self._leaving.is_set())])
            try:
                dist.all_reduce(leaving, op=dist.ReduceOp.MAX, group=self._pulse)
            except Exception as error:
                self.fail(f"a rank died or froze: {first_line(error)[:200]}")
                return
            if leaving.item():
                return
            if self.rank == 0:
                self._leaving.wait(self._heartbeat_secs)


def _failed_arrival(error: Exception) -> Arriving[Any]:
    def wait() -> Any:
        raise error

    return Arriving(lambda: True, wait)
