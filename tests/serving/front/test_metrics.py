"""The Prometheus metrics of a gateway and its backends."""

from __future__ import annotations

import pytest

pytest.importorskip("fastapi")
pytest.importorskip("prometheus_client")
from tests.serving.fake_server import CONTRACT, total
from tests.serving.gateway_calls import FakeClient, call, make


def test_gateway_shows_prometheus_what_it_and_its_backends_have_counted() -> None:
    client = FakeClient(CONTRACT.with_statistics([100.0, -100.0], [50.0, 50.0], "held-out pairs"))
    client.counted = {
        "http://one": {
            "calls": 4.0,
            "tokens_per_call": 100.0,
            "computed_tokens": 300.0,
            "cached_tokens": 20.0,
            "queue_seconds": 0.5,
            "forward_seconds": 2.0,
            "tokens": 320.0,
            "waiting_rows": 3.0,
        },
        "http://two": None,
        "http://three": {},
    }
    app = make(client)
    call(app, "/v1/rewards", {"texts": ["ab", "ab", ""]})
    call(app, "/classify", b"{")
    text = call(app, "/metrics").body.decode()
    values = dict(line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
    prefix, mean = "nemo_aligner_", total("ab")
    expected = {
        'http_requests_total{route="/v1/rewards",status="200"}': 1,
        'http_requests_total{route="/classify",status="400"}': 1,
        'http_request_seconds_count{route="/v1/rewards"}': 1,
        'http_rows_total{outcome="scored",route="/v1/rewards"}': 2,
        'http_rows_total{outcome="refused",route="/v1/rewards"}': 1,
        "http_rows_in_flight": 0,
        'reward_mean{attribute="sum"}': mean,
        'reward_std{attribute="sum"}': 0,
        'reward_mean_drift{attribute="sum"}': (mean - 100) / 50,
        'reward_std_ratio{attribute="minus"}': 0,
        'server_up{backend="http://one"}': 1,
        'server_up{backend="http://two"}': 0,
        'server_up{backend="http://three"}': 1,
        'server_pack_fill{backend="http://one"}': 0.75,
        'server_queue_seconds_total{backend="http://one"}': 0.5,
        'server_forward_seconds_total{backend="http://one"}': 2,
        'server_cached_tokens_total{backend="http://one"}': 20,
        'server_tokens_total{backend="http://one"}': 320,
        'server_waiting_rows{backend="http://one"}': 3,
    }
    assert {name: float(values[prefix + name]) for name in expected} == expected
