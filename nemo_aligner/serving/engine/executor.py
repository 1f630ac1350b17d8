"""Rank 0 leads, the workers follow: one operation on every rank at once.

Two gloo groups, apart from the model's own: *work* carries the calls, without a time limit;
*pulse* beats every few seconds in its own thread, so that all ranks notice within seconds if one
died or froze, also in the middle of a forward pass or without any requests.
"""

from __future__ import annotations

import logging
import os
import pickle
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, InvalidStateError, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from queue import Empty, SimpleQueue
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from nemo_aligner.distributed.collectives import wait_for_device
from nemo_aligner.distributed.cpu_products import FreedMemory
from nemo_aligner.utils.errors import ServingError, first_line
from nemo_aligner.utils.host_transfer import Arriving

logger = logging.getLogger(__name__)

T = TypeVar("T")


@dataclass(frozen=True)
class Launch:
    """An operation that leaves its work to a device: the host may begin the next one meanwhile.

    ``begin`` takes the operation's arguments, and is collective as an operation is.
    """

    begin: Callable[..., Arriving[Any]]


Operation = Callable[..., Any] | Launch
"""Collective: each rank calls it with the same arguments; rank 0's result is the answer."""
_Call = tuple[str, tuple[Any, ...]]
"""An operation's name and its arguments."""


class RanksLostError(ServingError):
    """A rank is gone: this server answers nothing any more."""


# Calls differ in size, so free memory between live blocks would grow for days.
_CALLS_BETWEEN_TRIMS = 100
# Seconds after which rank 0 looks again whether the device is done, or somebody wants more of it.
_LOOK_EVERY_SECS = 2e-4
# Workers wait in a broadcast while nobody asks, which may be for days.
_NO_LIMIT = timedelta(days=365)


@dataclass(frozen=True)
class _Begun:
    """A call that this rank has begun; ``answer`` is rank 0's. A call that failed has arrived."""

    call: _Call
    arriving: Arriving[Any]
    answer: Future[Any] | None


class ModelRanks:
    """Runs operations, by name, on all ranks: rank 0 by ``run_leader``, workers by ``run_worker``.

    Operations run one at a time, in the order of their submission; while a ``Launch`` runs on the
    device, the next one is begun behind it. If it then fails, the next one is begun again, as it
    may have built on what the failed one was to leave behind. A worker that cannot go on ends
    its process with exit code 1. On rank 0 ``failure`` then says why (None while the ranks can go
    on), and everything submitted fails.
    """

    def __init__(
        self,
        operations: Mapping[str, Operation],
        reset_cache: Callable[[], None] = lambda: None,
        heartbeat_secs: float = 3.0,
        worker_timeout_secs: float = 30.0,
    ) -> None:
        """Collective over all ranks of the default group, if there is one.

        ``reset_cache`` is called on every rank after a call that failed on any of them: the state
        that operations keep between calls must be the same on all ranks.
        """
        self._operations = dict(operations)
        self._reset_cache = reset_cache
        self._heartbeat_secs = heartbeat_secs
        self._timeout_secs = worker_timeout_secs
        self.world_size = dist.get_world_size() if dist.is_initialized() else 1
        self.rank = dist.get_rank() if dist.is_initialized() else 0
        self.failure: str | None = None
        self._lock = threading.Lock()
        self._open: set[Future[Any]] = set()
        self._leaving = threading.Event()
        self._in_flight: _Begun | None = None
        self._freed = FreedMemory(steps=_CALLS_BETWEEN_TRIMS)
        self._calls: SimpleQueue[tuple[Future[Any], _Call] | None] = SimpleQueue()
        if self.world_size > 1:
            self._work = dist.new_group(backend="gloo", timeout=_NO_LIMIT)
            self._pulse = dist.new_group(
                backend="gloo", timeout=timedelta(seconds=heartbeat_secs + worker_timeout_secs)
            )
            self._pulse_thread = threading.Thread(target=self._beat, name="pulse", daemon=True)
            self._pulse_thread.start()

    def submit(self, operation: str, *arguments: Any) -> Future[Any]:
        """Run an operation on all ranks, after those submitted before; on rank 0, from any thread.

        ``arguments`` are arrays, numbers, or lists of them, and must not change afterwards. The
        future fails with a ServingError if the operation failed (the next one may succeed), or with
        a RanksLostError, without waiting for a model that may never return. It can be cancelled
        until the operation begins.
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
        """``submit``, and wait.

        Raises:
            ServingError: as above.
        """
        return self.submit(operation, *arguments).result()

    def run_leader(self, drive: Callable[[], T]) -> T:
        """Rank 0: compute in this thread what is submitted, until ``drive`` returns in another.

        The caller is the thread that has loaded the model. OpenMP gives every thread that computes
        its own helpers, and once there are more of them than cores, all of them go to sleep after
        each operation: a forward pass took 1.3 to 1.5 times as long in a thread of its own.
        """
        with ThreadPoolExecutor(1, "drive") as beside:
            driving = beside.submit(drive)
            driving.add_done_callback(lambda _: self._calls.put(None))
            while (call := self._next_call()) is not None:
                self._compute(*call)
            return driving.result()

    def _next_call(self) -> tuple[Future[Any], _Call] | None:
        """Wait for a call, until what is in flight has arrived; then end that first."""
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
        """Serve rank 0's calls until it stops; every rank but 0."""
        while True:
            header = self._broadcast(torch.zeros(1, dtype=torch.int64))
            size = int(header)
            if size == 0:
                return
            payload = self._broadcast(torch.zeros(size, dtype=torch.uint8))
            # Pickle is safe here: it comes from rank 0, over a group of this server's processes.
            self._advance(pickle.loads(payload.numpy().data))

    def stop(self) -> None:
        """Release the workers and end the heartbeat; every rank calls it when idle."""
        if self.world_size > 1 and self.failure is None:
            if self.rank == 0:
                self._broadcast(torch.zeros(1, dtype=torch.int64))
            self._leaving.set()
            self._pulse_thread.join()

    def fail(self, why: str) -> None:
        """Mark the ranks as lost; a worker's process ends here."""
        if self.rank != 0:
            logger.error("rank %d leaves: %s", self.rank, why)
            # At once: the main thread may be in a collective that never returns.
            os._exit(1)
        with self._lock:
            if self.failure is None:
                self.failure = why
            left, self._open = self._open, set()
        for answer in left:
            with suppress(InvalidStateError):  # it was cancelled
                answer.set_exception(RanksLostError(self.failure))

    def _compute(self, answer: Future[Any], call: _Call) -> None:
        with self._lock:
            if answer not in self._open:
                return  # a rank was lost, and it has its error
            if not answer.set_running_or_notify_cancel():
                self._open.remove(answer)
                return
        with suppress(RanksLostError):  # everybody who waits has that error
            is_dropped = True
            while is_dropped and self.failure is None:
                is_dropped = not self._tell_and_advance(call, answer)

    def _end_in_flight(self) -> None:
        if self.failure is not None:
            self._in_flight = None  # whoever waits has an error, and nobody else may hear of it
            return
        with suppress(RanksLostError):
            self._tell_and_advance(None, None)

    def _tell_and_advance(self, call: _Call | None, answer: Future[Any] | None) -> bool:
        if self.world_size > 1:
            # Everything is built before the first byte goes out: nothing may raise in between.
            payload = torch.frombuffer(bytearray(pickle.dumps(call, protocol=5)), dtype=torch.uint8)
            # Workers have to know the size before they can receive it; a size of 0 ends them.
            header = torch.tensor([payload.numel()], dtype=torch.int64)
            self._broadcast(header)
            self._broadcast(payload)
        return self._advance(call, answer)

    def _advance(self, call: _Call | None, answer: Future[Any] | None = None) -> bool:
        """Begin ``call``, if any, then end the one in flight; and ``call`` if it is no ``Launch``.

        Every rank does so in the same order, and learns of errors on others when a call ends.

        Returns:
            False if the call in flight has failed: ``call`` was then dropped.
        """
        before, self._in_flight = self._in_flight, None
        begun = None if call is None else self._begin(call, answer)
        if before is not None and not self._end(before, is_followed=begun is not None):
            return begun is None
        if begun is not None and self._is_launch(begun.call):
            self._in_flight = begun
        elif begun is not None:
            self._end(begun)
        return True

    def _broadcast(self, tensor: torch.Tensor) -> torch.Tensor:
        with self._in_step():
            dist.broadcast(tensor, src=0, group=self._work)
        return tensor

    @contextmanager
    def _in_step(self) -> Iterator[None]:
        """A control message that fails leaves the ranks out of step for good."""
        try:
            yield
        except Exception as error:
            why = f"the ranks lost each other: {first_line(error)[:200]}"
            self.fail(why)
            raise RanksLostError(why) from error

    def _begin(self, call: _Call, answer: Future[Any] | None) -> _Begun:
        """Begin an operation; what it raises is raised again by whoever waits for it."""
        name, arguments = call
        operation = self._operations[name]
        try:
            if isinstance(operation, Launch):
                return _Begun(call, operation.begin(*arguments), answer)
            return _Begun(call, Arriving.now(operation(*arguments)), answer)
        except Exception as caught:
            return _Begun(call, _failed(caught), answer)

    def _end(self, begun: _Begun, is_followed: bool = False) -> bool:
        """Wait for a call, and exchange errors with all ranks, so that they stay in step.

        Args:
            is_followed: another call was begun behind it.

        Returns:
            False if it has failed on any rank.
        """
        found, error = None, None
        try:
            found = begun.arriving.wait()
        except Exception as caught:
            error = caught
            logger.exception("rank %d could not %s", self.rank, begun.call[0])
            self._lose_where_the_device_is_lost()
        # After every call, also a good one: a rank that has failed alone must not go on by itself.
        try:
            errors = self._acknowledge(error)
        except RanksLostError:
            return False  # everybody who waits has that error
        if errors:
            self._reset_cache()
        if is_followed and 0 < len(errors) < self.world_size:
            # The next call has been planned, and perhaps sent to a device, with another cache than
            # on the ranks that have failed.
            self.fail(f"only some ranks could {begun.call[0]}: {'; '.join(errors)}")
        if begun.answer is not None:
            failed = ServingError("; ".join(errors)) if errors else None
            if failed is not None:
                failed.__cause__ = error
            self._answer(begun.answer, found, failed)
        # Only now, so that nobody waits for it: where /proc is slow, it takes a quarter of a
        # millisecond.
        self._freed.end_step()
        return not errors

    def _answer(self, answer: Future[Any], result: Any, error: Exception | None) -> None:
        with self._lock:
            if answer not in self._open:
                return  # a rank was lost, and it has its error
            self._open.remove(answer)
        if error is None:
            answer.set_result(result)
        else:
            answer.set_exception(error)

    def _lose_where_the_device_is_lost(self) -> None:
        """Some errors of CUDA stay: a process that has met one computes nothing any more."""
        try:
            wait_for_device()
        except Exception as error:
            self.fail(f"the device of rank {self.rank} is lost: {first_line(error)[:200]}")

    def _acknowledge(self, error: Exception | None) -> list[str]:
        mine = None if error is None else f"{type(error).__name__}: {error}"
        if self.world_size == 1:
            return [] if mine is None else [mine]
        # A rank that fails alone leaves the others waiting for it inside the model.
        watch = threading.Timer(
            self._timeout_secs, self.fail, [f"rank {self.rank} failed alone: {mine}"]
        )
        watch.daemon = True
        if error is not None:
            watch.start()
        everyone: list[str | None] = [None] * self.world_size
        with self._in_step():
            dist.all_gather_object(everyone, mine, group=self._work)
        watch.cancel()
        return [f"rank {rank}: {text}" for rank, text in enumerate(everyone) if text is not None]

    def _beat(self) -> None:
        """All ranks meet, and the others wait here while rank 0 sleeps; until rank 0 leaves."""
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


def _failed(error: Exception) -> Arriving[Any]:
    def wait() -> Any:
        raise error

    return Arriving(lambda: True, wait)
