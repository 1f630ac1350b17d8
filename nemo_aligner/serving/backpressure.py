"""Limit the rows (samples) in flight on a server or gateway; reject requests beyond the limit."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager

from nemo_aligner.serving.failures import FailureKind, RequestError

_FIRST_GUESS = 100.0  # scoring speed in rows/s, assumed until requests have been answered
# The speed is measured over about this many seconds: older ones fade with this time constant.
# Seconds without any row in flight are not counted.
_MEMORY_S = 15.0
# Maximum number of seconds of an estimate. The speed may be far too low, because a service that
# scores many rows at once has so far got only one at a time.
_LONGEST_WAIT_S = 30


class BackpressureLimit:
    """Rejects requests that would put more than ``max_rows`` rows in flight.

    Error messages name ``key``, the setting that has the limit, and ``model``, because each model
    of a server has its own queue. The class needs no lock, because all calls come from one event
    loop.
    """

    def __init__(self, max_rows: int, key: str, model: str) -> None:
        self.rows_in_flight = 0
        self._max_rows, self._key, self._model = max_rows, key, model
        # The rows that were answered, and the seconds with rows in flight, both fading with time.
        # Their quotient is the scoring speed. They begin with one second of the guess.
        self._answered_rows, self._busy_seconds = _FIRST_GUESS, 1.0
        self._counted_until = time.monotonic()

    @contextmanager
    def admit(self, rows: int) -> Iterator[None]:
        """Count ``rows`` as in flight during the ``with`` block.

        A request is always admitted if no other rows are in flight.

        Raises:
            RequestError: too many rows are in flight; the error estimates when to try again, at
                most 30 s from now.
        """
        self._count_time()
        # The first condition lets a request of more than max_rows rows succeed when the server is
        # idle; otherwise it would be rejected forever.
        if self.rows_in_flight and self.rows_in_flight + rows > self._max_rows:
            seconds = self._estimate_wait()
            raise RequestError(
                f"the queue of {self._model} is full: {self.rows_in_flight} rows are in flight, "
                f"this request has {rows} more, and {self._key} allows {self._max_rows}; retry "
                f"after {seconds} s",
                FailureKind.busy,
                seconds,
            )
        self.rows_in_flight += rows
        begun = self._counted_until
        is_answered = False
        try:
            yield
            is_answered = True
        finally:
            self._count_time()
            if is_answered:
                # The rows were answered evenly over the request's time, and have faded since.
                time_constants = max((self._counted_until - begun) / _MEMORY_S, 1e-9)
                self._answered_rows += rows * -math.expm1(-time_constants) / time_constants
            self.rows_in_flight -= rows

    def _count_time(self) -> None:
        """Count the time since the last call as busy if rows were in flight."""
        now = time.monotonic()
        if self.rows_in_flight:
            remaining = math.exp((self._counted_until - now) / _MEMORY_S)
            self._answered_rows *= remaining
            self._busy_seconds = self._busy_seconds * remaining + _MEMORY_S * (1 - remaining)
        self._counted_until = now

    def _estimate_wait(self) -> int:
        """Return the seconds in which the rows in flight are probably answered, from 1 to 30."""
        # After hours without an answer, the number of answered rows has faded to 0.
        rows_per_second = max(self._answered_rows, 1e-3) / self._busy_seconds
        return min(max(1, round(self.rows_in_flight / rows_per_second)), _LONGEST_WAIT_S)
