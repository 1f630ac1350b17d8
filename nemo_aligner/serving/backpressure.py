"""Limit the rows in flight, on servers and the gateway, by rejecting requests when it is full."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from nemo_aligner.serving.failures import FailureKind, RequestError

_FIRST_GUESS = 100.0  # rows/s, until a request has been answered


class BackpressureLimit:
    """Limits the rows in flight; ``key`` is the setting with the limit. For one event loop."""

    def __init__(self, max_rows: int, key: str) -> None:
        self.rows_in_flight = 0
        self._max_rows, self._key = max_rows, key
        self._rows_per_second = _FIRST_GUESS

    @contextmanager
    def admit(self, rows: int) -> Iterator[None]:
        """Count rows as in flight during a block; a request is always admitted if none are.

        Raises:
            RequestError: too many rows are in flight; it estimates when to try again.
        """
        # Without the first condition, a request of more rows than the limit would never succeed.
        if self.rows_in_flight and self.rows_in_flight + rows > self._max_rows:
            seconds = max(1, round(self.rows_in_flight / self._rows_per_second))
            raise RequestError(
                f"the queue is full ({self.rows_in_flight} rows wait of {self._max_rows}, "
                f"{self._key}); retry after {seconds} s",
                FailureKind.busy,
                seconds,
            )
        ahead, begun = self.rows_in_flight, time.monotonic()
        self.rows_in_flight += rows
        try:
            yield
            # These rows and the ones before them have been scored, which gives the rate. It is
            # skipped for requests that fail, and for one without rows, after which it would be 0.
            if rows:
                self._rows_per_second = (ahead + rows) / max(time.monotonic() - begun, 1e-3)
        finally:
            self.rows_in_flight -= rows
