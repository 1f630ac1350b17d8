"""The limit of rows in flight, which every server and the gateway have."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from nemo_aligner.serving.failures import FailureKind, RequestError

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
        ahead, begun = self.rows_in_flight, time.monotonic()
        self.rows_in_flight += rows
        try:
            yield
            # These rows and those before them are done, which gives the rate. Rows that were
            # refused or withdrawn do not, nor does a request without any, which waits for none: the
            # rate must stay above 0.
            if rows:
                self._rows_per_second = (ahead + rows) / max(time.monotonic() - begun, 1e-3)
        finally:
            self.rows_in_flight -= rows
