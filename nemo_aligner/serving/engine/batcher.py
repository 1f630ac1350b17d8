"""Continuous batching: what waits is computed as soon as the model is free, oldest first."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import asdict, dataclass, field
from functools import partial
from threading import Condition, Lock, Thread
from typing import Any, NamedTuple, TypeVar

import numpy as np

from nemo_aligner.data.packing import count_fitting, packed_tokens
from nemo_aligner.serving.engine.pace import ModelPace
from nemo_aligner.serving.engine.rows import Row
from nemo_aligner.utils.errors import ServingError

logger = logging.getLogger(__name__)

T = TypeVar("T")
Execute = Callable[[list[Row]], "Future[list[np.ndarray]]"]
"""Starts computing N rows: the future of N arrays; calls run one after another."""

# One runs, and the next is ready to follow it.
_MOST_CALLS = 2
# Common prefixes count once, so more rows may fit than their lengths say.
_LOOK_AHEAD = 8
# Share of the last call's time for which the next one waits for its senders to come back.
_GATHER = 0.05


class _Request:
    """Rows that were submitted together, and how far they are."""

    def __init__(self, rows: Sequence[Row]) -> None:
        self.rows = rows
        self.results: list[Any] = [None] * len(rows)
        self.num_missing = len(rows)
        self.num_taken = 0  # rows that calls have taken: the first ones
        self.is_over = False  # has its answer or error, or nobody waits for it
        self.answer: Future[list[np.ndarray]] = Future()
        self.came = time.monotonic()


class _QueuedRow(NamedTuple):
    request: _Request
    number: int

    @property
    def row(self) -> Row:
        return self.request.rows[self.number]


class _Call:
    """A call of the model that runs, or is ready to follow the one that does."""

    def __init__(self, rows: list[_QueuedRow], outputs: Future[list[np.ndarray]]) -> None:
        self.rows, self.outputs = rows, outputs
        self.begun = time.monotonic()

    def cancel_if_unneeded(self) -> None:
        """Cancel it if nobody waits for any of its rows; in vain if it runs."""
        if all(request.is_over for request, _ in self.rows):
            self.outputs.cancel()

    def read_outputs(self) -> list[np.ndarray]:
        """Return the array of each row, once the call has ended.

        Raises:
            ServingError: the model returned another number of arrays; or whatever it has raised.
        """
        arrays = self.outputs.result()
        if len(arrays) != len(self.rows):
            raise ServingError(
                f"the model returned {len(arrays)} arrays for {len(self.rows)} rows, wanted one "
                "for each row. This is a bug in the model's code: report it with the server's log"
            )
        return arrays


class Batcher:
    """A queue of rows to compute, of all requests, in front of a model that computes many at once.

    A call of the model takes the oldest rows up to ``tokens_per_call`` tokens, common prefixes
    counted once, and no more than it is expected to compute in ``max_call_secs``. A request's rows
    may fall into several calls, and a call may have rows of many requests. While one call runs, a
    full one is prepared. One that is not full waits for more rows until the model is free, and a
    moment longer if many rows have just been answered: their senders come back one by one, and the
    first would get a call of its own while all others wait for it.

    A request whose future is cancelled leaves the queue. What the model computes already goes on.
    """

    def __init__(
        self,
        execute: Execute,
        tokens_per_call: int,
        meter: Meter | None = None,
        max_call_secs: float = 0.0,
    ) -> None:
        """``max_call_secs`` 0: calls are limited by their tokens alone."""
        self._execute = execute
        self._meter = meter or Meter()
        self._pace = ModelPace(max_call_secs, tokens_per_call)
        # In the order of their arrival, as far as they have rows that no call has taken.
        self._waiting: dict[_Request, None] = {}
        self._waiting_rows = self._waiting_tokens = 0
        self._retries: deque[list[_QueuedRow]] = deque()
        self._calls: list[_Call] = []
        self._num_finishing = 0
        self._last_rows = self._last_end = self._last_seconds = 0.0
        self._is_closing = False
        self._changed = Condition()
        # What the thread waits for.
        self._awaited: Callable[[], bool] = self._has_work
        self._thread = Thread(target=self._run, name="batcher", daemon=True)
        self._thread.start()

    @property
    def waiting_rows(self) -> int:
        """Number of rows that no call has taken yet."""
        return self._waiting_rows

    def submit(self, rows: Sequence[Row]) -> Future[list[np.ndarray]]:
        """The future of the arrays of some rows, at least one; it can be cancelled.

        Its error is the model's; of a call that fails, every request is tried again alone, so that
        it fails by itself only.

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
        """Compute what waits, and end."""
        with self._changed:
            self._is_closing = True
            self._notify()
        self._thread.join()

    def _drop(self, request: _Request, answer: Future[list[np.ndarray]]) -> None:
        """Take a cancelled request out of the queue, and out of the call that does not run yet."""
        if not answer.cancelled():
            return
        with self._changed:
            self._end_request(request)
            calls = list(self._calls)
            self._notify()
        for call in calls:
            call.cancel_if_unneeded()

    def _end_request(self, request: _Request) -> None:
        """Have a request over, with the lock held; its rows wait no longer."""
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
        """Wake the thread, with the lock held, if it has what it waits for.

        If every request woke it, the thread would take a fifth of the interpreter's time to go to
        sleep again.
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
            self._start(self._retries.popleft() if self._retries else self._take())

    def _has_work(self) -> bool:
        if self._is_idle():
            return self._is_closing
        if self._retries or self._waiting:
            running = len(self._calls)
            return running == 0 or (running < _MOST_CALLS and self._is_full())
        return False

    def _gather(self) -> None:
        """Wait for as many rows as the last call had, a twentieth of its time at most."""
        if not self._calls and not self._retries:
            left = self._last_end + _GATHER * self._last_seconds - time.monotonic()
            self._wait_for(self._has_come_back, max(0.0, left))

    def _has_come_back(self) -> bool:
        return self._is_full() or self._is_closing or self._waiting_rows >= self._last_rows

    def _is_full(self) -> bool:
        return self._waiting_tokens >= self._pace.limit

    def _is_idle(self) -> bool:
        return not (self._waiting or self._retries or self._calls or self._num_finishing)

    def _take(self) -> list[_QueuedRow]:
        """The oldest rows that fit into one call; only this thread takes any."""
        with self._changed:
            budget = self._pace.limit
            oldest = list(self._oldest_rows(_LOOK_AHEAD * budget))
        count = count_fitting([queued.row.ids for queued in oldest], budget)
        with self._changed:
            # Requests may have been cancelled, or have failed, meanwhile.
            taken = [queued for queued in oldest[:count] if not queued.request.is_over]
            for request, number in taken:
                request.num_taken += 1
                self._waiting_rows -= 1
                self._waiting_tokens -= len(request.rows[number].ids)
                if request.num_taken == len(request.rows):
                    del self._waiting[request]
        return taken

    def _oldest_rows(self, most_tokens: int) -> Iterator[_QueuedRow]:
        """The first few calls' worth of rows: the queue may have millions of tokens."""
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
        call.cancel_if_unneeded()  # if its requests were cancelled just now

    def _finish(self, call: _Call) -> None:
        """Hand out what a call has computed, in whatever thread has ended it."""
        with self._changed:
            self._calls.remove(call)
            self._notify()
            if call.outputs.cancelled():
                return
            # Until its answers or retries are there, the batcher is not idle.
            self._num_finishing += 1
            seconds = self._measure(call)
        try:
            self._read(call, seconds)
        finally:
            with self._changed:
                self._num_finishing -= 1
                self._notify()

    def _read(self, call: _Call, seconds: float) -> None:
        """Hand out the outputs of a call that took ``seconds``, or what it has raised."""
        # Nobody sees an exception that is raised here, so each becomes that of the requests: they
        # would wait for ever.
        try:
            arrays = call.read_outputs()
        except BaseException as error:
            self._fail(call, error)
            return
        # A call that fails ends early, and says nothing about the pace of the others.
        if self._pace.needs(seconds):
            self._pace.add(packed_tokens([queued.row.ids for queued in call.rows]), seconds)
        self._hand_out(call, arrays)

    def _measure(self, call: _Call) -> float:
        """Take account of a call that has ended; the seconds that the model took."""
        # One that was made ready beside another begins when that has ended.
        started = max(call.begun, self._last_end)
        self._last_rows, self._last_end = len(call.rows), time.monotonic()
        self._last_seconds = self._last_end - call.begun
        queued = sum(started - request.came for request, _ in call.rows)
        seconds = self._last_end - started
        self._meter.called(queued, seconds)
        return seconds

    def _hand_out(self, call: _Call, results: Sequence[np.ndarray]) -> None:
        complete = []
        with self._changed:
            for (request, number), result in zip(call.rows, results, strict=True):
                request.results[number] = result
                request.num_missing -= 1
                if request.num_missing == 0 and not request.is_over:
                    request.is_over = True
                    complete.append(request)
        for request in complete:
            # False if it has been cancelled since; afterwards it cannot be.
            if request.answer.set_running_or_notify_cancel():
                request.answer.set_result(request.results)

    def _fail(self, call: _Call, error: BaseException) -> None:
        failed = []
        with self._changed:
            requests = list(dict.fromkeys(request for request, _ in call.rows))
            # One bad request must not fail those that happened to be in its call.
            if len(requests) > 1:
                logger.error("a call of %d requests failed: %s", len(requests), error)
                for request in requests:
                    self._retries.append([row for row in call.rows if row.request is request])
                self._notify()
            elif not requests[0].is_over:
                self._end_request(requests[0])
                failed = requests
        for request in failed:
            if request.answer.set_running_or_notify_cancel():
                request.answer.set_exception(error)


# Counts of requests and calls.

# A server that never reports its load must not keep a number for every request.
_MOST_SECONDS = 10_000


@dataclass
class _Counts:
    """Counts since the last line."""

    begun: float
    # Of the last answered requests, from their arrival to their answer.
    seconds: deque[float] = field(default_factory=lambda: deque(maxlen=_MOST_SECONDS))
    requests: int = 0
    rows: int = 0
    tokens: int = 0
    refused: int = 0


@dataclass
class _Totals:
    """Since the start."""

    requests: int = 0
    rows: int = 0
    tokens: int = 0
    refused_requests: int = 0
    calls: int = 0
    queue_seconds: float = 0.0
    forward_seconds: float = 0.0


class Meter:
    """Counts requests, and calls of the model; from any thread."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._counts = _Counts(time.monotonic())
        self._totals = _Totals()

    def answered(self, seconds: float, rows: int, tokens: int) -> None:
        """A request has its answer, ``seconds`` after it came; ``rows`` have rewards."""
        with self._lock:
            # One whose rows are all refused has waited for no model.
            if rows:
                self._counts.seconds.append(seconds)
            self._counts.requests += 1
            self._counts.rows += rows
            self._counts.tokens += tokens
            self._totals.requests += 1
            self._totals.rows += rows
            self._totals.tokens += tokens

    def refused(self) -> None:
        """A request has got an error."""
        with self._lock:
            self._counts.refused += 1
            self._totals.refused_requests += 1

    def called(self, queue_seconds: float, forward_seconds: float) -> None:
        """The model was called once; its rows had waited ``queue_seconds`` for it, all added."""
        with self._lock:
            self._totals.calls += 1
            self._totals.queue_seconds += queue_seconds
            self._totals.forward_seconds += forward_seconds

    def statistics(self) -> dict[str, float]:
        """Sums since the start.

        ``requests``, ``rows``, ``tokens`` that were answered, and ``refused_requests``; ``calls``
        of the model, the ``forward_seconds`` that they took, and the ``queue_seconds`` that each
        row had waited for its call, added.
        """
        with self._lock:
            return asdict(self._totals)

    def take_line(self, waiting_rows: int, cached_tokens: int = 0) -> str | None:
        """Summarize what happened since the last line, and reset; None if nothing did."""
        now = time.monotonic()
        with self._lock:
            counts, self._counts = self._counts, _Counts(now)
        if not counts.requests and not counts.refused:
            return None
        passed = now - counts.begun
        parts = [
            f"{counts.requests / passed:.3g} requests/s",
            f"{counts.rows / passed:.3g} rows/s",
            f"{counts.tokens / passed:,.0f} tokens/s",
            f"{waiting_rows} in the queue",
        ]
        if counts.seconds:
            middle, late = np.percentile(counts.seconds, [50, 99]) * 1000
            parts.append(f"p50 {middle:,.0f} ms, p99 {late:,.0f} ms")
        if cached_tokens and counts.tokens:
            parts.append(f"{cached_tokens / counts.tokens:.0%} of tokens cached")
        if counts.refused:
            parts.append(f"{counts.refused} refused")
        return " | ".join(parts)


# Shared and exclusive use of the model.

Begin = Callable[[], "Future[Any]"]
"""Starts some work; it has ended when the future is done."""


class _Work(NamedTuple):
    begin: Begin
    answer: Future[Any]
    is_exclusive: bool


class ReadWriteLock:
    """Runs work in the order of its arrival: shared work side by side, exclusive work alone.

    So a request for values that the model has half answered is finished before the model learns,
    and later requests wait until it has. Work whose answer is cancelled is not begun; shared work
    that has begun is cancelled, exclusive work goes on. Safe from any thread.
    """

    def __init__(self) -> None:
        self._lock = Lock()
        self._waiting: dict[Future[Any], _Work] = {}
        self._running = 0
        self._runs_exclusive = False

    @property
    def is_exclusive(self) -> bool:
        """True if exclusive work runs, or waits."""
        with self._lock:
            return self._runs_exclusive or any(work.is_exclusive for work in self._waiting.values())

    def submit(self, begin: Callable[[], Future[T]], *, exclusive: bool) -> Future[T]:
        """Call ``begin`` once it may run; the future of its result."""
        answer: Future[T] = Future()
        with self._lock:
            self._waiting[answer] = _Work(begin, answer, exclusive)
        answer.add_done_callback(self._drop)
        self._begin_what_may()
        return answer

    def _drop(self, answer: Future[Any]) -> None:
        """Forget work that is cancelled before it has begun; what is behind it may begin."""
        with self._lock:
            is_dropped = self._waiting.pop(answer, None) is not None
        if is_dropped:
            self._begin_what_may()

    def _begin_what_may(self) -> None:
        while (work := self._next()) is not None:
            # From here on exclusive work cannot be cancelled.
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

    def _next(self) -> _Work | None:
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
        self._begin_what_may()
        # Shared work may have been cancelled, and its answer with it.
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
