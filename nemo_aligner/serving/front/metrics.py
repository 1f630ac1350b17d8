"""Prometheus metrics: the requests of an HTTP front, and the servers whose model it uses."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from prometheus_client import (
    CONTENT_TYPE_LATEST,
    CollectorRegistry,
    Counter,
    Histogram,
    disable_created_metrics,
)
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import generate_latest

from nemo_aligner.serving.protocols import ScoredRows
from nemo_aligner.serving.scoring import ScoringService

# Upper bounds of latencies, from those of a short text on a GPU to those behind a full queue.
_SECONDS = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 120.0)
_HTTP, _SERVER = "nemo_aligner_http", "nemo_aligner_server"
# Counters that a backend publishes (``LocalService.statistics``), with their help texts.
COUNTED = {
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


class FrontMetrics:
    """Counts what the front answers; for one event loop.

    Attributes:
        refused_connections: by status, the requests that a limit of their connection has refused.
        aborted_connections: by cause, the connections that ended without an answer.
    """

    def __init__(self) -> None:
        self.refused_connections: Mapping[int, int] = {}
        self.aborted_connections: Mapping[str, int] = {}
        disable_created_metrics()  # a line more of each, of which Prometheus makes nothing
        self._registry = CollectorRegistry()
        self._requests = Counter(
            f"{_HTTP}_requests",
            "requests answered",
            ["route", "status"],
            registry=self._registry,
        )
        self._seconds = Histogram(
            f"{_HTTP}_request_seconds",
            "from the request's head to its answer",
            ["route"],
            buckets=_SECONDS,
            registry=self._registry,
        )
        self._rows = Counter(
            f"{_HTTP}_rows",
            "texts: scored, refused; cut, completed and foreign_template ones are among these",
            ["route", "outcome"],
            registry=self._registry,
        )

    def count_request(self, path: str, status: int, seconds: float) -> None:
        """Count a request to a route, answered after ``seconds``."""
        self._requests.labels(path, str(status)).inc()
        self._seconds.labels(path).observe(seconds)

    def count_scored(self, path: str, scored: ScoredRows) -> None:
        """Count the rows of a request that was scored."""
        rows = len(scored.rewards)
        self._rows.labels(path, "scored").inc(rows - len(scored.errors))
        self._rows.labels(path, "refused").inc(len(scored.errors))
        self._rows.labels(path, "cut").inc(int(scored.exceeded.sum()))

    def count_rows(self, path: str, outcome: str, rows: int) -> None:
        """Rows of a request that are also counted as something else than scored or refused."""
        if rows:
            self._rows.labels(path, outcome).inc(rows)

    def render(self, scoring: ScoringService | None, statistics: Statistics) -> tuple[bytes, str]:
        """Write the text for Prometheus, with the counts of the models; and its content type."""
        now = CollectorRegistry()
        refused = CounterMetricFamily(
            f"{_HTTP}_refused_connections",
            "requests refused by a limit of their connection, before they were read",
            labels=["status"],
        )
        for status, count in self.refused_connections.items():
            refused.add_metric([str(status)], count)
        aborted = CounterMetricFamily(
            f"{_HTTP}_aborted_connections",
            "connections that ended before their handshake was done or their request answered",
            labels=["cause"],
        )
        for cause, count in self.aborted_connections.items():
            aborted.add_metric([cause], count)
        of_scoring = () if scoring is None else _of_service(scoring)
        now.register(_Snapshot([refused, aborted, *of_scoring, *_of_backends(statistics)]))
        return generate_latest(self._registry) + generate_latest(now), CONTENT_TYPE_LATEST


class _Snapshot:
    """Values that were taken elsewhere."""

    def __init__(self, families: list[Metric]) -> None:
        self._families = families

    def collect(self) -> Iterator[Metric]:
        yield from self._families


def _of_service(scoring: ScoringService) -> Iterator[Metric]:
    yield GaugeMetricFamily(
        f"{_HTTP}_rows_in_flight", "texts not answered yet", value=scoring.rows_in_flight
    )
    contract = scoring.contract
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
    for column, drift in enumerate(scoring.recent.drift(contract)):
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
        for name, about in COUNTED.items()
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
