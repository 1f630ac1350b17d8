"""What a person who watches a server sees: a line every few seconds while it has work."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass

import numpy as np


@dataclass
class _Counts:
    """Of the time since the last line."""

    begun: float
    seconds: list[float]  # of every answered request, from its arrival to its answer
    rows: int = 0
    tokens: int = 0
    refused: int = 0


class Meter:
    """Counts requests; from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts = _Counts(time.monotonic(), [])

    def answered(self, seconds: float, rows: int, tokens: int) -> None:
        """A request has its rewards, ``seconds`` after it came."""
        with self._lock:
            self._counts.seconds.append(seconds)
            self._counts.rows += rows
            self._counts.tokens += tokens

    def refused(self) -> None:
        """A request has got an error."""
        with self._lock:
            self._counts.refused += 1

    def take_line(self, waiting_rows: int, cached_tokens: int = 0) -> str | None:
        """What happened since the last one, in one line; None if nothing did."""
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
