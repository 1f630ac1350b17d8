"""Prometheus metrics of an HTTP front, and of the model servers behind it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

from prometheus_client import (
    CONTENT_TYPE_LATEST,
    CollectorRegistry,
    Counter,
    Histogram,
    disable_created_metrics,
)
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import generate_latest

from nemo_aligner.serving.front.models import HostedModel
from nemo_aligner.serving.protocols import ScoredRows

# Upper bounds of the duration buckets in seconds: from a short sample on a GPU to a request that
# waits behind a full queue.
_SECONDS = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 120.0)
_HTTP, _SERVER = "nemo_aligner_http", "nemo_aligner_server"
# Counters that model servers publish (``LocalService.statistics``), and those of a gateway's judge
# and functions (``serving/parts.py``), with their help texts.
COUNTED = {
    "requests": "requests answered with rewards",
    "refused_requests": "requests answered with an error",
    "rows": "samples scored",
    "tokens": "tokens of the scored samples",
    "computed_tokens": "tokens that went through the model",
    "cached_tokens": "tokens whose keys and values were in the cache",
    "calls": "calls of the model",
    "queue_seconds": "seconds that rows waited for their call, summed over rows",
    "forward_seconds": "seconds in which the model computed",
    "judge_calls": "requests sent to the judge, with retries",
    "judge_seconds": "seconds that requests to the judge took, summed over requests",
    "judge_prompt_tokens": "tokens of the judge's prompts, as its answers say",
    "judge_completion_tokens": "tokens that the judge has generated, as its answers say",
    "judge_slow": "requests that the judge did not answer in time",
    "judge_malformed": "answers of the judge without valid scores",
    "judge_refusals": "requests that the judge refused to answer",
    "judge_unreachable": "requests that failed because of the judge's server or connection",
    "judge_rejected": "requests that the judge's server rejected, and that are not sent again",
    "function_calls": "calls of the function",
    "function_failures": "calls of the function that failed or were too slow",
    "masked_rows": "samples that got no score from the judge or function",
}

Statistics = Mapping[str, Mapping[str, float] | None]


class FrontMetrics:
    """Counts the requests of a front; must be used in a single event loop.

    Attributes:
        refused_connections: HTTP status -> number of requests that a connection limit rejected.
        aborted_connections: cause -> number of connections that ended without an answer.
    """

    def __init__(self) -> None:
        self.refused_connections: Mapping[int, int] = {}
        self.aborted_connections: Mapping[str, int] = {}
        disable_created_metrics()  # no creation time of each metric
        self._registry = CollectorRegistry()
        self._requests = Counter(
            f"{_HTTP}_requests",
            "requests answered",
            ["route", "status"],
            registry=self._registry,
        )
        self._seconds = Histogram(
            f"{_HTTP}_request_seconds",
            "seconds from the request's head to its answer",
            ["route"],
            buckets=_SECONDS,
            registry=self._registry,
        )
        self._rows = Counter(
            f"{_HTTP}_rows",
            "samples: scored, refused or unscored; "
            "cut, completed and foreign_template ones are among them",
            ["route", "outcome"],
            registry=self._registry,
        )

    def count_request(self, path: str, status: int, seconds: float) -> None:
        """Count a request to a route that was answered after ``seconds``."""
        self._requests.labels(path, str(status)).inc()
        self._seconds.labels(path).observe(seconds)

    def count_scored(self, path: str, scored: ScoredRows) -> None:
        """Count the rows of an answer by outcome: scored, refused, or unscored.

        A refused row was rejected; an unscored one has no reward, and is not at fault itself.
        Truncated rows are also counted as cut.
        """
        rows = len(scored.rewards)
        self._rows.labels(path, "scored").inc(rows - len(scored.errors))
        self._rows.labels(path, "refused").inc(len(scored.rejected))
        self._rows.labels(path, "unscored").inc(len(scored.unscored))
        self._rows.labels(path, "cut").inc(int(scored.exceeded.sum()))

    def count_rows(self, path: str, outcome: str, rows: int) -> None:
        """Count rows under a further ``outcome``: ``completed`` or ``foreign_template``.

        Each of these rows is also counted as scored, refused or unscored.
        """
        if rows:
            self._rows.labels(path, outcome).inc(rows)

    def render(self, models: Iterable[HostedModel], statistics: Statistics) -> tuple[bytes, str]:
        """Return all metrics in Prometheus's text format, and the content type of that format.

        ``statistics`` has the current counts of the model servers. If there are several models,
        the other metrics of a model have the label ``model``.
        """
        now = CollectorRegistry()
        refused = CounterMetricFamily(
            f"{_HTTP}_refused_connections",
            "requests rejected by a limit of their connection, before they were read",
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
        families = [refused, aborted, *_model_metrics([*models]), *_backend_metrics(statistics)]
        now.register(_Snapshot(families))
        return generate_latest(self._registry) + generate_latest(now), CONTENT_TYPE_LATEST


class _Snapshot:
    """A Prometheus collector that returns metrics which were computed elsewhere."""

    def __init__(self, families: list[Metric]) -> None:
        self._families = families

    def collect(self) -> Iterator[Metric]:
        yield from self._families


def _model_metrics(models: Sequence[HostedModel]) -> Iterator[Metric]:
    labels = ["model"] if len(models) > 1 else []
    in_flight = GaugeMetricFamily(
        f"{_HTTP}_rows_in_flight", "samples not answered yet", labels=labels
    )
    gauges = {
        name: GaugeMetricFamily(
            f"nemo_aligner_reward_{name}", meaning, labels=[*labels, "attribute"]
        )
        for name, meaning in (
            ("rows", "number of latest rewards in the other gauges"),
            ("mean", "mean of the latest rewards"),
            ("std", "standard deviation of the latest rewards"),
            ("mean_drift", "mean minus the contract's, in the contract's standard deviations"),
            ("std_ratio", "standard deviation divided by the contract's"),
        )
    }
    for model in models:
        scoring, values = model.scoring, [model.name] * len(labels)
        in_flight.add_metric(values, scoring.rows_in_flight)
        contract = scoring.contract
        for column, drift in enumerate(scoring.recent.drift(contract)):
            name = str(column) if contract is None else contract.attributes[column]
            for field, value in vars(drift).items():
                if value is not None:
                    gauges[field].add_metric([*values, name], value)
    yield from ([in_flight, *gauges.values()] if models else [])


def _backend_metrics(statistics: Statistics) -> Iterator[Metric]:
    up = GaugeMetricFamily(f"{_SERVER}_up", "whether the backend answers", labels=["backend"])
    waiting = GaugeMetricFamily(
        f"{_SERVER}_waiting_rows", "rows that wait for a call of the model", labels=["backend"]
    )
    fill = GaugeMetricFamily(
        f"{_SERVER}_pack_fill",
        "mean of a call's computed tokens divided by the tokens that fit into a call",
        labels=["backend"],
    )
    counters = {
        name: CounterMetricFamily(f"{_SERVER}_{name}", meaning, labels=["backend"])
        for name, meaning in COUNTED.items()
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
