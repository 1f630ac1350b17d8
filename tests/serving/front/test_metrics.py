"""The Prometheus metrics of a gateway and its backends."""

from __future__ import annotations

import re

import numpy as np
import pytest

pytest.importorskip("fastapi")
pytest.importorskip("prometheus_client")
from nemo_aligner.serving.front.metrics import FrontMetrics
from nemo_aligner.serving.protocols import ScoredRows
from tests.serving.fake_server import CONTRACT, total
from tests.serving.gateway_calls import GOOD, FakeClient, call, front_of_models, make


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


def test_samples_that_a_judge_fails_on_are_not_counted_as_refused() -> None:
    rewards = np.array([[1.0], [np.nan], [2.0], [np.nan], [3.0], [np.nan]], dtype=np.float32)
    errors = {1: "judge: no", 3: "the text is empty", 5: "judge: no"}
    exceeded = np.array([True] + [False] * 5)
    metrics = FrontMetrics()
    metrics.count_scored("/x", ScoredRows(rewards, errors, exceeded, unscored=frozenset({1, 5})))
    text = metrics.render([], {})[0].decode()
    counted = re.findall(r'^\w+_rows_total{outcome="(.*)",route="/x"} (.*)', text, re.M)
    assert dict(counted) == {"scored": "3.0", "refused": "1.0", "unscored": "2.0", "cut": "1.0"}


def test_requests_that_are_rejected_unread_are_counted_for_their_model() -> None:
    app = front_of_models({"reward_model": FakeClient(), "harmless": FakeClient()}, "s3cret")
    bearer, infer = {"Authorization": "Bearer s3cret"}, "/v2/models/reward_model/infer"
    large = {**bearer, "Content-Length": str(2**30)}
    for prefix in ("", "/models/harmless", "/models/x"):
        call(app, f"{prefix}/v1/rewards", GOOD["/v1/rewards"])
        call(app, f"{prefix}{infer}", b"{}")
    call(app, infer, b"{}", large)
    call(app, f"/models/harmless{infer}", b"{}", {**bearer, "Content-Encoding": "br"})
    # Paths that have no endpoint are not counted.
    for path in ("/v2/models/x/infer", "/v2/models/reward_model/versions/2/infer", "/v2/x"):
        call(app, path, b"{}")
        call(app, path, b"{}", large)
    text = call(app, "/metrics", headers=bearer).body.decode()
    counted = re.findall(
        r'^nemo_aligner_http_requests_total{route="(.*)",status="(.*)"} 1', text, re.M
    )
    assert sorted(counted) == [
        ("/models/harmless/v1/rewards", "401"),
        (f"/models/harmless{infer}", "400"),
        (f"/models/harmless{infer}", "401"),
        ("/v1/rewards", "401"),
        (infer, "401"),
        (infer, "413"),
    ]
    stats = call(app, "/v2/models/reward_model/stats", headers=bearer, method="GET").json
    assert stats["model_stats"][0]["inference_stats"]["fail"]["count"] == 2
