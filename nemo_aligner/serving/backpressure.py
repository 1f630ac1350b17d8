"""Limit the rows (samples) in flight on a server or gateway; reject requests beyond the limit."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from nemo_aligner.serving.failures import FailureKind, RequestError

_FIRST_GUESS = 100.0  # scoring speed in rows/s, assumed until the first request has been answered


class BackpressureLimit:
    """Rejects requests that would put more than ``max_rows`` rows in flight.

    Error messages name ``key``, the setting that has the limit, and ``model``, because each model
    of a server has its own queue. The class needs no lock, because all calls come from one event
    loop.
    """

    def __init__(self, max_rows: int, key: str, model: str) -> None:
        self.rows_in_flight = 0
        self._max_rows, self._key, self._model = max_rows, key, model
        self._rows_per_second = _FIRST_GUESS

    @contextmanager
    def admit(self, rows: int) -> Iterator[None]:
        """Count ``rows`` as in flight during the ``with`` block.

        A request is always admitted if no other rows are in flight.

        Raises:
            RequestError: too many rows are in flight; the error estimates when to try again.
        """
        # The first condition lets a request of more than max_rows rows succeed when the server is
        # idle; otherwise it would be rejected forever.
        if self.rows_in_flight and self.rows_in_flight + rows > self._max_rows:
            seconds = max(1, round(self.rows_in_flight / self._rows_per_second))
            raise RequestError(
                f"the queue of {self._model} is full: {self.rows_in_flight} rows are in flight, "
                f"this request has {rows} more, and {self._key} allows {self._max_rows}; retry "
                f"after {seconds} s",
                FailureKind.busy,
                seconds,
            )
        ahead, begun = self.rows_in_flight, time.monotonic()
        self.rows_in_flight += rows
        try:
            yield
            # This line is reached only if the request was answered. By then, its rows and the rows
            # that were in flight before it have been scored, so their number divided by the time is
            # the scoring speed. A request without rows is not counted, because it could set the
            # speed to 0.
            if rows:
                self._rows_per_second = (ahead + rows) / max(time.monotonic() - begun, 1e-3)
        finally:
            self.rows_in_flight -= rows
