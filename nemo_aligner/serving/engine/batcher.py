"""Continuous batching: what waits is scored as soon as the model is free, oldest first."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from threading import Condition, Lock, Thread
from typing import Any, TypeVar

import numpy as np

from nemo_aligner.data.packing import take_oldest
from nemo_aligner.serving.failures import FailureKind, RequestError
from nemo_aligner.utils.errors import ServingError

logger = logging.getLogger(__name__)

Execute = Callable[[list[np.ndarray]], "Future[Any]"]
"""Starts scoring N sequences of token ids: the future of ``[N, A]``; calls run one after another.
"""
Join = Callable[[list[np.ndarray]], np.ndarray]
"""Combines the results of a request's rows into its answer."""

# One runs, and the next is ready to follow it.
_MOST_CALLS = 2
# Common prefixes count once, so more rows may fit than their lengths say.
_LOOK_AHEAD = 8
# Share of the last call's time for which the next one waits for its senders to come back.
_GATHER = 0.05


class _Request:
    def __init__(self, token_lists: Sequence[Sequence[int]]) -> None:
        self.sequences = [np.asarray(token_ids, dtype=np.int64) for token_ids in token_lists]
        self.rewards: dict[int, np.ndarray] = {}
        self.answer: Future[np.ndarray] = Future()
        self.answer.set_running_or_notify_cancel()  # nobody can cancel it any more
        self.came = time.monotonic()


_Row = tuple[_Request, int]


class Batcher:
    """A queue of texts to score, of all requests, in front of a model that scores many at once.

    A call of the model takes the oldest rows up to ``tokens_per_call`` tokens, common prefixes
    counted once. A request's rows may fall into several calls, and a call may have rows of many
    requests. While one call runs, a full one is prepared. One that is not full waits for more rows
    until the model is free, and a moment longer if many rows have just been answered: their senders
    come back one by one, and the first would get a call of its own while all others wait for it.
    """

    def __init__(
        self,
        execute: Execute,
        tokens_per_call: int,
        meter: Meter | None = None,
        join: Join = np.stack,
    ) -> None:
        self._execute = execute
        self._meter = meter or Meter()
        self._join = join
        self._tokens_per_call = tokens_per_call
        self._waiting: deque[_Row] = deque()
        self._waiting_tokens = 0
        self._again: deque[list[_Row]] = deque()
        self._running = 0
        self._last_rows = self._last_end = self._last_seconds = 0.0
        self._is_closing = False
        self._changed = Condition()
        self._thread = Thread(target=self._run, name="batcher", daemon=True)
        self._thread.start()

    @property
    def waiting_rows(self) -> int:
        """Number of rows that no call has taken yet."""
        return len(self._waiting)

    def submit(self, token_lists: Sequence[Sequence[int]]) -> Future[np.ndarray]:
        """The future of the rewards ``[N, A]`` of N token lists, at least one.

        Its error is the model's; of a call that fails, every request is tried again alone, so that
        it fails by itself only.

        Raises:
            ServingError: the server is stopping.
        """
        request = _Request(token_lists)
        with self._changed:
            if self._is_closing:
                raise ServingError("the server is stopping")
            self._waiting.extend((request, row) for row in range(len(token_lists)))
            self._waiting_tokens += sum(map(len, token_lists))
            self._changed.notify()
        return request.answer

    def close(self) -> None:
        """Score what waits, and end."""
        with self._changed:
            self._is_closing = True
            self._changed.notify()
        self._thread.join()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(self._has_work)
                if self._is_idle():
                    return
                self._gather()
            self._start(self._again.popleft() if self._again else self._take())

    def _has_work(self) -> bool:
        if self._is_idle():
            return self._is_closing
        if self._again or self._waiting:
            return self._running == 0 or (self._running < _MOST_CALLS and self._is_full())
        return False

    def _gather(self) -> None:
        """Wait for as many rows as the last call had, a twentieth of its time at most."""
        if self._running == 0 and not self._again:
            rest = self._last_end + _GATHER * self._last_seconds - time.monotonic()
            self._changed.wait_for(self._has_come_back, max(0.0, rest))

    def _has_come_back(self) -> bool:
        return self._is_full() or self._is_closing or len(self._waiting) >= self._last_rows

    def _is_full(self) -> bool:
        return self._waiting_tokens >= self._tokens_per_call

    def _is_idle(self) -> bool:
        return not (self._waiting or self._again or self._running)

    def _take(self) -> list[_Row]:
        """The oldest rows that fit into one call; only this thread takes any away."""
        oldest, tokens = [], 0
        with self._changed:
            rows = list(self._waiting)
        # Only the first few calls' worth is looked at: the queue may have millions of tokens.
        for row in rows:
            oldest.append(row)
            tokens += len(_sequence(row))
            if tokens >= _LOOK_AHEAD * self._tokens_per_call:
                break
        count = take_oldest([_sequence(row) for row in oldest], self._tokens_per_call)
        with self._changed:
            taken = [self._waiting.popleft() for _ in range(count)]
            self._waiting_tokens -= sum(len(_sequence(row)) for row in taken)
        # One that has failed meanwhile needs no more rewards.
        return [row for row in taken if not row[0].answer.done()]

    def _start(self, call: list[_Row]) -> None:
        if not call:
            return
        with self._changed:
            self._running += 1
        try:
            scored = self._execute([_sequence(row) for row in call])
        except Exception as error:
            scored = Future()
            scored.set_exception(error)
        begun = time.monotonic()
        scored.add_done_callback(lambda done: self._finish(call, begun, done))

    def _finish(self, call: list[_Row], begun: float, scored: Future[np.ndarray]) -> None:
        error = scored.exception()
        requests = list(dict.fromkeys(request for request, _ in call))
        with self._changed:
            self._running -= 1
            # One that was made ready beside another begins when that has ended.
            started = max(begun, self._last_end)
            self._last_rows, self._last_end = len(call), time.monotonic()
            self._last_seconds = self._last_end - begun
            queued = sum(started - request.came for request, _ in call)
            self._meter.called(queued, self._last_end - started)
            # One bad request must not fail those that happened to be in its call.
            if error is not None and len(requests) > 1:
                logger.error("a call of %d requests failed: %s", len(requests), error)
                self._again.extend([row for row in call if row[0] is each] for each in requests)
                requests = []
            self._changed.notify()
        if error is None:
            self._hand_out(call, scored.result())
        else:
            for request in requests:
                _fail(request, error)

    def _hand_out(self, call: Sequence[_Row], rewards: Any) -> None:
        for (request, number), reward in zip(call, rewards, strict=True):
            request.rewards[number] = reward
            count = len(request.sequences)
            if len(request.rewards) == count and not request.answer.done():
                whole = self._join([request.rewards[row] for row in range(count)])
                request.answer.set_result(whole)


def _sequence(row: _Row) -> np.ndarray:
    request, number = row
    return request.sequences[number]


def _fail(request: _Request, error: BaseException) -> None:
    if not request.answer.done():
        request.answer.set_exception(error)


# Counts of requests and calls.


@dataclass
class _Counts:
    """Counts since the last line."""

    begun: float
    seconds: list[float]  # of every answered request, from its arrival to its answer
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
        self._counts = _Counts(time.monotonic(), [])
        self._totals = _Totals()

    def answered(self, seconds: float, rows: int, tokens: int) -> None:
        """A request has its rewards, ``seconds`` after it came."""
        with self._lock:
            self._counts.seconds.append(seconds)
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
            counts, self._counts = self._counts, _Counts(now, [])
        if not counts.seconds and not counts.refused:
            return None
        passed = now - counts.begun
        parts = [
            f"{len(counts.seconds) / passed:.3g} requests/s",
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


# Backpressure: a limit of the rows in flight.

_FIRST_GUESS = 100.0  # rows/s, before any was scored


class BackpressureLimit:
    """A limit of the rows in flight (the setting ``key``); for one event loop."""

    def __init__(self, most: int, key: str) -> None:
        self.rows_in_flight = 0
        self._most, self._key = most, key
        self._rows_per_second = _FIRST_GUESS

    @contextmanager
    def admit(self, rows: int) -> Iterator[None]:
        """Count these rows as in flight for a block; a lone request is always admitted.

        Raises:
            RequestError: too many are in flight; when to come again is a guess.
        """
        # Else a request of more rows than may wait would be refused forever.
        if self.rows_in_flight and self.rows_in_flight + rows > self._most:
            seconds = max(1, round(self.rows_in_flight / self._rows_per_second))
            raise RequestError(
                f"the queue is full ({self.rows_in_flight} rows wait of {self._most}, "
                f"{self._key}); retry after {seconds} s",
                FailureKind.busy,
                seconds,
            )
        # These rows and those before them are done when the block ends, which gives the rate.
        ahead, begun = self.rows_in_flight, time.monotonic()
        self.rows_in_flight += rows
        try:
            yield
        finally:
            self.rows_in_flight -= rows
            self._rows_per_second = (ahead + rows) / max(time.monotonic() - begun, 1e-3)


# Shared and exclusive use of the model.

T = TypeVar("T")
Begin = Callable[[], "Future[Any]"]
"""Starts some work; it has ended when the future is done."""


class ReadWriteLock:
    """Runs work in the order of its arrival: shared work side by side, exclusive work alone.

    So a request for values that the model has half answered is finished before the model learns,
    and later requests wait until it has. Safe from any thread.
    """

    def __init__(self) -> None:
        self._lock = Lock()
        self._waiting: deque[tuple[bool, Begin, Future[Any]]] = deque()
        self._running = 0
        self._runs_exclusive = False

    @property
    def is_exclusive(self) -> bool:
        """True if exclusive work runs, or waits."""
        with self._lock:
            return self._runs_exclusive or any(exclusive for exclusive, _, _ in self._waiting)

    def submit(self, begin: Callable[[], Future[T]], *, exclusive: bool) -> Future[T]:
        """Call ``begin`` once it may run; the future of its result."""
        answer: Future[T] = Future()
        answer.set_running_or_notify_cancel()  # nobody can cancel it any more
        with self._lock:
            self._waiting.append((exclusive, begin, answer))
        self._begin_what_may()
        return answer

    def _begin_what_may(self) -> None:
        while (taken := self._next()) is not None:
            begin, answer = taken
            try:
                work = begin()
            except Exception as error:
                self._release()
                answer.set_exception(error)
            else:
                work.add_done_callback(partial(self._end, answer))

    def _next(self) -> tuple[Begin, Future[Any]] | None:
        with self._lock:
            if not self._waiting:
                return None
            exclusive, begin, answer = self._waiting[0]
            if self._running and (exclusive or self._runs_exclusive):
                return None
            self._waiting.popleft()
            self._running += 1
            self._runs_exclusive = exclusive
            return begin, answer

    def _end(self, answer: Future[Any], work: Future[Any]) -> None:
        self._release()
        self._begin_what_may()
        error = work.exception()
        if error is None:
            answer.set_result(work.result())
        else:
            answer.set_exception(error)

    def _release(self) -> None:
        with self._lock:
            self._running -= 1
            self._runs_exclusive = False
