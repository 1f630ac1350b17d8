"""How many rows a server lets in, and when it asks the others to come back."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from nemo_aligner.errors import ServingError

_FIRST_GUESS = 100.0  # rows/s, before any was scored


class BusyError(ServingError):
    """More rows wait than may; ``retry_after_s`` is a guess at when there is room."""

    def __init__(self, message: str, retry_after_s: int) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class Admission:
    """How many rows are inside, of all that may (the setting ``key``); for one event loop."""

    def __init__(self, most: int, key: str) -> None:
        self.inside = 0
        self._most, self._key = most, key
        self._rows_per_second = _FIRST_GUESS

    @contextmanager
    def of(self, rows: int) -> Iterator[None]:
        """Let so many in for a block; alone, a request is always let in.

        Raises:
            BusyError: too many are inside.
        """
        if self.inside and self.inside + rows > self._most:
            seconds = max(1, round(self.inside / self._rows_per_second))
            raise BusyError(
                f"the queue is full ({self.inside} rows wait of {self._most}, {self._key}); "
                f"retry after {seconds} s",
                seconds,
            )
        ahead, begun = self.inside, time.monotonic()
        self.inside += rows
        try:
            yield
        finally:
            self.inside -= rows
            self._rows_per_second = (ahead + rows) / max(time.monotonic() - begun, 1e-3)
