"""Counts of a server's requests and calls, and drift of its recent rewards."""

from __future__ import annotations

import threading
import time
from dataclasses import asdict, dataclass

import numpy as np

from nemo_aligner.contract.contract import ScoringContract


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
        self._lock = threading.Lock()
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


# Drift of recent rewards from those that the scoring contract was measured on.


@dataclass(frozen=True)
class AttributeDrift:
    """Mean and standard deviation of an attribute's last ``rows`` rewards.

    Against those of the contract, where it has them: ``mean_drift`` is how far the mean has moved,
    in the contract's standard deviations, and ``std_ratio`` the deviation over the contract's.
    """

    rows: int
    mean: float
    std: float
    mean_drift: float | None
    std_ratio: float | None


class RecentRewards:
    """The last rewards, at most ``most_rows`` of them; rows that have none do not count."""

    def __init__(self, most_rows: int) -> None:
        self._most_rows = most_rows
        self._kept = np.zeros((0, 0), dtype=np.float32)

    def add(self, rewards: np.ndarray) -> None:
        """``[N, A]`` more; of another number of attributes, they replace what was kept."""
        scored = rewards[np.isfinite(rewards).all(axis=1)]
        # The backends' model was changed for one with other attributes.
        if len(scored) and scored.shape[1] != self._kept.shape[1]:
            self._kept = np.zeros((0, scored.shape[1]), dtype=np.float32)
        if len(scored):
            self._kept = np.concatenate([self._kept, scored])[-self._most_rows :]

    def drift(self, contract: ScoringContract | None) -> list[AttributeDrift]:
        """Drift of each attribute; empty before any reward."""
        if not len(self._kept):
            return []
        kept = self._kept.astype(np.float64)
        means, stds = kept.mean(axis=0), kept.std(axis=0)
        return [
            AttributeDrift(
                len(kept), float(mean), float(std), *_against(contract, column, mean, std)
            )
            for column, (mean, std) in enumerate(zip(means, stds, strict=True))
        ]


def _against(
    contract: ScoringContract | None, column: int, mean: float, std: float
) -> tuple[float | None, float | None]:
    if contract is None or contract.reward_mean is None or contract.reward_std is None:
        return None, None
    usual = contract.reward_std[column]
    if usual <= 0:
        return None, None
    return float((mean - contract.reward_mean[column]) / usual), float(std / usual)
