"""Limit the rows in flight on a server or gateway: requests beyond the limit are rejected."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from nemo_aligner.serving.failures import FailureKind, RequestError

_FIRST_GUESS = 100.0  # rows/s, assumed until a request has been answered


class BackpressureLimit:
    """Rejects requests that would put more than ``max_rows`` rows in flight.

    ``key`` names the setting with the limit, for messages. All calls come from one event loop.
    """

    def __init__(self, max_rows: int, key: str) -> None:
        self.rows_in_flight = 0
        self._max_rows, self._key = max_rows, key
        self._rows_per_second = _FIRST_GUESS

    @contextmanager
    def admit(self, rows: int) -> Iterator[None]:
        """Count ``rows`` as in flight during the ``with`` block.

        A request is always admitted if no other rows are in flight.

        Raises:
            RequestError: too many rows are in flight; the error estimates when to try again.
        """
        # Without the first condition, a request of more rows than the limit would never succeed.
        if self.rows_in_flight and self.rows_in_flight + rows > self._max_rows:
            seconds = max(1, round(self.rows_in_flight / self._rows_per_second))
            raise RequestError(
                f"the queue is full: {self.rows_in_flight} rows are in flight, this request has "
                f"{rows} more, and {self._key} allows {self._max_rows}; retry after {seconds} s",
                FailureKind.busy,
                seconds,
            )
        ahead, begun = self.rows_in_flight, time.monotonic()
        self.rows_in_flight += rows
        try:
            yield
            # This line is reached only if the request was answered: its rows and those in flight
            # before it have been scored, which gives a rate. A request without rows could set the
            # rate to 0.
            if rows:
                self._rows_per_second = (ahead + rows) / max(time.monotonic() - begun, 1e-3)
        finally:
            self.rows_in_flight -= rows
