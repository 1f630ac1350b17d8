"""Continuous batching: waiting rows (samples) are computed as soon as the model is free."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from functools import partial
from threading import Condition, Thread
from typing import Any, NamedTuple

import numpy as np

from nemo_aligner.data.packing import count_fitting, packed_tokens
from nemo_aligner.serving.engine.meter import Meter
from nemo_aligner.serving.engine.pace import CallClock, ModelPace
from nemo_aligner.serving.engine.rows import Row
from nemo_aligner.utils.errors import ServingError

logger = logging.getLogger(__name__)

Execute = Callable[[list[Row]], "Future[list[np.ndarray]]"]
"""Starts to compute N rows, and returns the future of N arrays; calls run one after another."""

# Maximum number of calls of the model at a time: one that runs, and one that is ready to follow it.
_MOST_CALLS = 2
# Rows considered for a call: the oldest ones, up to this many times the tokens of a call. Shared
# prefixes count once, so more rows may fit than the sum of their lengths suggests.
_LOOK_AHEAD = 8
# Before the next call, wait for at most this fraction of the last call's duration, so that the
# clients that just got answers can send new requests.
_GATHER = 0.05


class _Request:
    """The rows of one request, their results so far, and the future that its sender waits for."""

    def __init__(self, rows: Sequence[Row]) -> None:
        self.rows = rows
        self.results: list[Any] = [None] * len(rows)
        self.num_missing = len(rows)
        self.num_taken = 0  # the request's first num_taken rows are in a call, or already computed
        self.is_over = False  # True once the request has its answer or error, or was cancelled
        self.answer: Future[list[np.ndarray]] = Future()
        self.came = time.monotonic()


class _QueuedRow(NamedTuple):
    request: _Request
    number: int

    @property
    def row(self) -> Row:
        return self.request.rows[self.number]


class _Call:
    """One call of the model (a batch of rows): the running one, or the one that follows it."""

    def __init__(self, rows: list[_QueuedRow], outputs: Future[list[np.ndarray]]) -> None:
        self.rows, self.outputs = rows, outputs
        self.begun = time.monotonic()

    def cancel_if_unneeded(self) -> None:
        """Cancel the call if nobody waits for its rows any more; a running call continues."""
        if all(request.is_over for request, _ in self.rows):
            self.outputs.cancel()

    def read_outputs(self) -> list[np.ndarray]:
        """Return the output array of each row; the call must have ended.

        Raises:
            ServingError: the model returned a wrong number of arrays. An exception of the call
                itself is also raised.
        """
        arrays = self.outputs.result()
        if len(arrays) != len(self.rows):
            raise ServingError(
                f"the model returned {len(arrays)} arrays for {len(self.rows)} rows, wanted one "
                "for each row. This is a bug: report it with the server's log"
            )
        return arrays


class Batcher:
    """A queue in front of the model, with rows of all requests; a call computes many rows.

    A call takes the oldest rows up to ``tokens_per_call`` tokens, with shared prefixes counted
    once, and no more than are expected to be computed in ``max_call_secs``. The rows of a request
    may be computed in several calls, and a call may have rows of many requests.

    While a call runs, the next one is prepared if it is full. If it is not full, it waits for more
    rows until the model is free. If many rows were just answered, it waits a moment longer: their
    clients send new requests one after the other. Without this wait, the first new request would be
    computed by itself, while all others would have to wait for the next call.

    A request whose future is cancelled leaves the queue; a running call continues.
    """

    def __init__(
        self,
        execute: Execute,
        tokens_per_call: int,
        meter: Meter | None = None,
        max_call_secs: float = 0.0,
        clock: CallClock | None = None,
    ) -> None:
        """Start the batcher's thread.

        With ``max_call_secs`` 0, only ``tokens_per_call`` limits a call. ``clock`` is the clock of
        the ranks, if other operations also run on them.
        """
        self._clock = clock or CallClock()
        self._execute = execute
        self._meter = meter or Meter()
        self._pace = ModelPace(max_call_secs, tokens_per_call)
        # Requests with rows that no call has taken yet, in the order of arrival.
        self._waiting: dict[_Request, None] = {}
        self._waiting_rows = self._waiting_tokens = 0
        self._retries: deque[list[_QueuedRow]] = deque()
        self._calls: list[_Call] = []
        self._num_finishing = 0
        self._last_rows = self._last_end = self._last_seconds = 0.0
        self._is_closing = False
        self._changed = Condition()
        # The batcher's thread sleeps until this condition holds.
        self._awaited: Callable[[], bool] = self._has_work
        self._thread = Thread(target=self._run, name="batcher", daemon=True)
        self._thread.start()

    @property
    def waiting_rows(self) -> int:
        """The number of rows that wait for a call of the model."""
        return self._waiting_rows

    def submit(self, rows: Sequence[Row]) -> Future[list[np.ndarray]]:
        """Queue one or more rows; return the future of their arrays, which can be cancelled.

        If a call of several requests fails, each request is tried again in a separate call, so
        that only the one at fault fails, with the model's error.

        Raises:
            ServingError: the server is stopping.
        """
        request = _Request(rows)
        with self._changed:
            if self._is_closing:
                raise ServingError("the server is stopping")
            self._waiting[request] = None
            self._waiting_rows += len(rows)
            self._waiting_tokens += sum(len(row.ids) for row in rows)
            self._notify()
        request.answer.add_done_callback(partial(self._drop, request))
        return request.answer

    def close(self) -> None:
        """Compute all waiting rows, and end the thread."""
        with self._changed:
            self._is_closing = True
            self._notify()
        self._thread.join()

    def _drop(self, request: _Request, answer: Future[list[np.ndarray]]) -> None:
        """Remove a request whose future was cancelled.

        Cancel a call that has not begun if no request needs it.
        """
        if not answer.cancelled():
            return
        with self._changed:
            self._end_request(request)
            calls = list(self._calls)
            self._notify()
        for call in calls:
            call.cancel_if_unneeded()

    def _end_request(self, request: _Request) -> None:
        """Mark a request as over, and drop its waiting rows; the caller holds the lock."""
        request.is_over = True
        if request in self._waiting:
            del self._waiting[request]
            rows = request.rows[request.num_taken :]
            self._waiting_rows -= len(rows)
            self._waiting_tokens -= sum(len(row.ids) for row in rows)

    def _wait_for(self, condition: Callable[[], bool], timeout: float | None = None) -> None:
        self._awaited = condition
        self._changed.wait_for(condition, timeout)

    def _notify(self) -> None:
        """Wake the batcher's thread if what it waits for has happened; the caller holds the lock.

        If every request woke the thread needlessly, waking it would take a fifth of the
        interpreter's time (with 64 clients).
        """
        if self._awaited():
            self._changed.notify()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._wait_for(self._has_work)
                if self._is_idle():
                    return
                self._gather()
            self._start(self._retries.popleft() if self._retries else self._take_rows())

    def _has_work(self) -> bool:
        if self._is_idle():
            return self._is_closing
        if self._retries or self._waiting:
            running = len(self._calls)
            return running == 0 or (running < _MOST_CALLS and self._is_full())
        return False

    def _gather(self) -> None:
        """Wait a moment, so that the clients that just got answers can send new requests.

        The wait is at most a twentieth of the last call's duration.
        """
        if not self._calls and not self._retries:
            remaining = self._last_end + _GATHER * self._last_seconds - time.monotonic()
            self._wait_for(self._has_come_back, max(0.0, remaining))

    def _has_come_back(self) -> bool:
        return self._is_full() or self._is_closing or self._waiting_rows >= self._last_rows

    def _is_full(self) -> bool:
        return self._waiting_tokens >= self._pace.limit

    def _is_idle(self) -> bool:
        return not (self._waiting or self._retries or self._calls or self._num_finishing)

    def _take_rows(self) -> list[_QueuedRow]:
        """Take the oldest rows that fit into a call; only the batcher's thread takes rows."""
        with self._changed:
            budget = self._pace.limit
            oldest = list(self._oldest_rows(_LOOK_AHEAD * budget))
        count = count_fitting([queued.row.ids for queued in oldest], budget)
        with self._changed:
            # While the lock was released, requests may have been cancelled or have failed; skip
            # their rows.
            taken = [queued for queued in oldest[:count] if not queued.request.is_over]
            for request, number in taken:
                request.num_taken += 1
                self._waiting_rows -= 1
                self._waiting_tokens -= len(request.rows[number].ids)
                if request.num_taken == len(request.rows):
                    del self._waiting[request]
        return taken

    def _oldest_rows(self, most_tokens: int) -> Iterator[_QueuedRow]:
        """Yield waiting rows, oldest first, until they have ``most_tokens`` tokens.

        It is a generator because the queue may have millions of rows.
        """
        tokens = 0
        for request in self._waiting:
            for number in range(request.num_taken, len(request.rows)):
                yield _QueuedRow(request, number)
                tokens += len(request.rows[number].ids)
                if tokens >= most_tokens:
                    return

    def _start(self, rows: list[_QueuedRow]) -> None:
        rows = [queued for queued in rows if not queued.request.is_over]
        if not rows:
            return
        try:
            outputs = self._execute([queued.row for queued in rows])
        except Exception as error:
            outputs = Future()
            outputs.set_exception(error)
        call = _Call(rows, outputs)
        with self._changed:
            self._calls.append(call)
        outputs.add_done_callback(lambda _: self._finish(call))
        call.cancel_if_unneeded()  # its requests may be cancelled already

    def _finish(self, call: _Call) -> None:
        """Pass the outputs of an ended call to its requests; called in the thread that ended it."""
        with self._changed:
            self._calls.remove(call)
            self._notify()
            if call.outputs.cancelled():
                return
            # While this is above 0, close() waits, so that it does not return before the answers
            # are set, or the failed requests are tried again.
            self._num_finishing += 1
            seconds = self._measure(call)
        try:
            self._pass_outputs(call, seconds)
        finally:
            with self._changed:
                self._num_finishing -= 1
                self._notify()

    def _pass_outputs(self, call: _Call, seconds: float) -> None:
        """Pass the outputs of a call that took ``seconds``, or its error, to the requests."""
        # This runs in a callback, where no caller sees an exception. So every exception must become
        # the error of the requests, which would otherwise wait forever.
        try:
            arrays = call.read_outputs()
        except BaseException as error:
            self._fail(call, error)
            return
        # A failed call ends early, so its time says nothing about the model's speed.
        if self._pace.needs(seconds):
            self._pace.add(packed_tokens([queued.row.ids for queued in call.rows]), seconds)
        self._set_results(call, arrays)

    def _measure(self, call: _Call) -> float:
        """Add an ended call to the statistics; return the seconds that its computation took."""
        # The ranks run one operation at a time. If this call was submitted while another one ran,
        # it started only when that one ended.
        started = max(call.begun, self._clock.last_end)
        self._last_rows, self._last_end = len(call.rows), time.monotonic()
        self._clock.last_end = self._last_end
        self._last_seconds = self._last_end - started
        queued = sum(started - request.came for request, _ in call.rows)
        self._meter.count_call(queued, self._last_seconds)
        return self._last_seconds

    def _set_results(self, call: _Call, results: Sequence[np.ndarray]) -> None:
        complete = []
        with self._changed:
            for (request, number), result in zip(call.rows, results, strict=True):
                request.results[number] = result
                request.num_missing -= 1
                if request.num_missing == 0 and not request.is_over:
                    request.is_over = True
                    complete.append(request)
        for request in complete:
            # set_running_or_notify_cancel returns False if the request was cancelled meanwhile. If
            # it returns True, the request can no longer be cancelled.
            if request.answer.set_running_or_notify_cancel():
                request.answer.set_result(request.results)

    def _fail(self, call: _Call, error: BaseException) -> None:
        failed = []
        with self._changed:
            requests = list(dict.fromkeys(request for request, _ in call.rows))
            # A bad request must not fail the others of its call.
            if len(requests) > 1:
                logger.error(
                    "a call of %d requests failed, so each of them is tried by itself: %s",
                    *(len(requests), error),
                )
                for request in requests:
                    self._retries.append([row for row in call.rows if row.request is request])
                self._notify()
            elif not requests[0].is_over:
                self._end_request(requests[0])
                failed = requests
        for request in failed:
            if request.answer.set_running_or_notify_cancel():
                request.answer.set_exception(error)
