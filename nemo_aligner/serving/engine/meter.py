"""Counts of requests and calls of the model, for the log and for /metrics."""

from __future__ import annotations

import time
from collections import deque
from dataclasses import asdict, dataclass, field
from threading import Lock

import numpy as np

# Maximum number of latencies to keep. Each log line clears them, but a server may never log its
# load, and must not keep a latency for every request.
_MOST_SECONDS = 10_000


@dataclass
class _Counts:
    """Counts of requests and calls since the last log line."""

    begun: float
    # Seconds from arrival to answer, of the latest answered requests.
    seconds: deque[float] = field(default_factory=lambda: deque(maxlen=_MOST_SECONDS))
    requests: int = 0
    rows: int = 0
    tokens: int = 0
    num_refused: int = 0


@dataclass
class _Totals:
    """Counts of requests and calls since the start; ``/metrics`` shows them under these names."""

    requests: int = 0
    rows: int = 0
    tokens: int = 0
    refused_requests: int = 0
    calls: int = 0
    queue_seconds: float = 0.0
    forward_seconds: float = 0.0


class Meter:
    """Counts requests and calls of the model; may be called from any thread."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._counts = _Counts(time.monotonic())
        self._totals = _Totals()

    def count_answer(self, seconds: float, rows: int, tokens: int) -> None:
        """Count an answered request of ``rows`` rows; ``seconds`` is the time since its arrival."""
        with self._lock:
            # A request without rows has not waited for the model, so its latency is not kept.
            if rows:
                self._counts.seconds.append(seconds)
            self._counts.requests += 1
            self._counts.rows += rows
            self._counts.tokens += tokens
            self._totals.requests += 1
            self._totals.rows += rows
            self._totals.tokens += tokens

    def count_failure(self) -> None:
        """Count a request that was answered with an error."""
        with self._lock:
            self._counts.num_refused += 1
            self._totals.refused_requests += 1

    def count_call(self, queue_seconds: float, forward_seconds: float) -> None:
        """Count a call for which the model took ``forward_seconds``.

        ``queue_seconds`` is the time that a row waited for the call, summed over its rows.
        """
        with self._lock:
            self._totals.calls += 1
            self._totals.queue_seconds += queue_seconds
            self._totals.forward_seconds += forward_seconds

    def statistics(self) -> dict[str, float]:
        """Return sums since the start.

        ``requests``, ``rows`` and ``tokens`` count what was answered, and ``refused_requests`` what
        got an error. ``calls`` of the model took ``forward_seconds``. ``queue_seconds`` is the sum
        over all rows of the time that a row waited for its call.
        """
        with self._lock:
            return asdict(self._totals)

    def take_line(self, waiting_rows: int, cached_tokens: int = 0) -> str | None:
        """Return a log line of the counts since the last one, and reset them; None if all are 0."""
        now = time.monotonic()
        with self._lock:
            counts, self._counts = self._counts, _Counts(now)
        if not counts.requests and not counts.num_refused:
            return None
        elapsed = now - counts.begun
        parts = [
            f"{counts.requests / elapsed:.3g} requests/s",
            f"{counts.rows / elapsed:.3g} rows/s",
            f"{counts.tokens / elapsed:,.0f} tokens/s",
            f"{waiting_rows} in the queue",
        ]
        if counts.seconds:
            median, percentile_99 = np.percentile(counts.seconds, [50, 99]) * 1000
            parts.append(f"p50 {median:,.0f} ms, p99 {percentile_99:,.0f} ms")
        if cached_tokens and counts.tokens:
            parts.append(f"{cached_tokens / counts.tokens:.0%} of tokens cached")
        if counts.num_refused:
            parts.append(f"{counts.num_refused} refused")
        return " | ".join(parts)
