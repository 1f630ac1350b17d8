"""Metrics of a server: counts, drift of recent rewards, and the gateway's Prometheus page."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Protocol

import numpy as np
from prometheus_client import (
    CONTENT_TYPE_LATEST,
    CollectorRegistry,
    Counter,
    Histogram,
    disable_created_metrics,
)
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import generate_latest

from nemo_aligner.contract.contract import ScoringContract
from nemo_aligner.serving.protocols.base import ScoredRequest

# What a server counts: a line every few seconds for a person who watches, and totals.


@dataclass
class _Counts:
    """Of the time since the last line."""

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


# How far the rewards of late are from those that the scoring contract was measured on.


@dataclass(frozen=True)
class AttributeDrift:
    """Of one attribute: mean and standard deviation of its last ``rows`` rewards.

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
        if len(scored) and scored.shape[1] != self._kept.shape[1]:
            self._kept = np.zeros((0, scored.shape[1]), dtype=np.float32)
        if len(scored):
            self._kept = np.concatenate([self._kept, scored])[-self._most_rows :]

    def drift(self, contract: ScoringContract | None) -> list[AttributeDrift]:
        """Of each attribute; empty before any reward."""
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


# What the gateway shows to Prometheus: its own counts, and those of its backends.

_SECONDS = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 120.0)
_GATEWAY, _SERVER = "nemo_aligner_gateway", "nemo_aligner_server"
# What a backend counts (see RewardService.statistics), and what that is.
_COUNTED = {
    "requests": "requests answered with rewards",
    "refused_requests": "requests answered with an error",
    "rows": "texts scored",
    "tokens": "tokens of the texts scored",
    "computed_tokens": "tokens that went through the model",
    "cached_tokens": "tokens whose keys and values were kept (cache hits)",
    "calls": "calls of the model",
    "queue_seconds": "seconds that rows waited for their call, added over rows",
    "forward_seconds": "seconds that the model computed",
}

Statistics = Mapping[str, Mapping[str, float] | None]


class Watched(Protocol):
    """What is shown of the service."""

    contract: ScoringContract | None
    recent: RecentRewards

    @property
    def rows_inside(self) -> int:
        """Rows of requests that are not answered yet."""


class GatewayMetrics:
    """Counts what the gateway answers; for one event loop."""

    def __init__(self) -> None:
        disable_created_metrics()  # a line more of each, of which Prometheus makes nothing
        self._registry = CollectorRegistry()
        self._requests = Counter(
            f"{_GATEWAY}_requests",
            "requests answered",
            ["route", "status"],
            registry=self._registry,
        )
        self._seconds = Histogram(
            f"{_GATEWAY}_request_seconds",
            "from the request's head to its answer",
            ["route"],
            buckets=_SECONDS,
            registry=self._registry,
        )
        self._rows = Counter(
            f"{_GATEWAY}_rows",
            "texts by what became of them: scored, refused; cut and completed ones are among both",
            ["route", "outcome"],
            registry=self._registry,
        )

    def answered(self, path: str, status: int, seconds: float) -> None:
        """A request to a route has its answer."""
        self._requests.labels(path, str(status)).inc()
        self._seconds.labels(path).observe(seconds)

    def scored(self, path: str, scored: ScoredRequest) -> None:
        """Rows of a request that was scored."""
        rows = len(scored.reply.rewards)
        self._rows.labels(path, "scored").inc(rows - len(scored.errors))
        self._rows.labels(path, "refused").inc(len(scored.errors))
        self._rows.labels(path, "cut").inc(int(scored.reply.exceeded.sum()))

    def completed(self, path: str, rows: int) -> None:
        """Rows of a request got what the chat template has behind an end of turn."""
        if rows:
            self._rows.labels(path, "completed").inc(rows)

    def render(self, watched: Watched, statistics: Statistics) -> tuple[bytes, str]:
        """The text for Prometheus, with what the backends have just said; and its content type."""
        now = CollectorRegistry()
        now.register(_Snapshot([*_of_service(watched), *_of_backends(statistics)]))
        return generate_latest(self._registry) + generate_latest(now), CONTENT_TYPE_LATEST


class _Snapshot:
    """Values that were taken elsewhere."""

    def __init__(self, families: list[Metric]) -> None:
        self._families = families

    def collect(self) -> Iterator[Metric]:
        yield from self._families


def _of_service(watched: Watched) -> Iterator[Metric]:
    yield GaugeMetricFamily(
        f"{_GATEWAY}_rows_in_flight", "texts not answered yet", value=watched.rows_inside
    )
    contract = watched.contract
    gauges = {
        name: GaugeMetricFamily(f"nemo_aligner_reward_{name}", about, labels=["attribute"])
        for name, about in (
            ("rows", "of how many rewards, the last, these are"),
            ("mean", "mean of the last rewards"),
            ("std", "standard deviation of the last rewards"),
            ("mean_drift", "mean less the contract's, in the contract's standard deviations"),
            ("std_ratio", "standard deviation over the contract's"),
        )
    }
    for column, drift in enumerate(watched.recent.drift(contract)):
        name = str(column) if contract is None else contract.attributes[column]
        for field, value in vars(drift).items():
            if value is not None:
                gauges[field].add_metric([name], value)
    yield from gauges.values()


def _of_backends(statistics: Statistics) -> Iterator[Metric]:
    up = GaugeMetricFamily(f"{_SERVER}_up", "whether the backend answers", labels=["backend"])
    waiting = GaugeMetricFamily(
        f"{_SERVER}_waiting_rows", "texts that wait for a call of the model", labels=["backend"]
    )
    fill = GaugeMetricFamily(
        f"{_SERVER}_pack_fill",
        "computed tokens of a call, in the mean, over what a call has room for",
        labels=["backend"],
    )
    counters = {
        name: CounterMetricFamily(f"{_SERVER}_{name}", about, labels=["backend"])
        for name, about in _COUNTED.items()
    }
    for url, counts in statistics.items():
        up.add_metric([url], counts is not None)
        for name in counters.keys() & (counts or {}).keys():
            counters[name].add_metric([url], counts[name])  # type: ignore[index]
        if counts and "waiting_rows" in counts:
            waiting.add_metric([url], counts["waiting_rows"])
        if counts and counts.get("calls") and counts.get("tokens_per_call"):
            room = counts["calls"] * counts["tokens_per_call"]
            fill.add_metric([url], counts.get("computed_tokens", 0.0) / room)
    yield from (up, waiting, fill, *counters.values())
