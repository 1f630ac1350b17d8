"""All bodies together have one memory limit, across connections and protocols."""

from __future__ import annotations

import asyncio
import gzip
import json
from typing import Any

import pytest

pytest.importorskip("fastapi")
from tests.serving.gateway_calls import Answer, FakeClient, call_async, gateway_front
from tests.serving.servers import json_request

MOST = 2**20
TENSORS = {"inputs": [json_request("sentences", "BYTES", [["ab"]])]}
SHORT: dict[str, dict[str, Any]] = {
    "/v1/rewards": {"texts": ["ab"]},
    "/v2/models/reward_model/infer": TENSORS,
}


def padded(body: dict[str, Any], size: int) -> bytes:
    text = json.dumps(body).encode()
    return text + b" " * (size - len(text))


def test_large_bodies_wait_for_each_other_and_short_ones_for_none() -> None:
    client = FakeClient()
    app = gateway_front(client, max_request_bytes=2 * MOST, max_buffered_bytes=MOST)

    async def ask_beside_a_large_body(path: str, body: bytes, **headers: str) -> Answer:
        client.gate = asyncio.Event()
        before = len(client.asked)
        # A single body may exceed the common limit.
        large = asyncio.ensure_future(call_async(app, path, padded(SHORT[path], 3 * MOST // 2)))
        while len(client.asked) == before:
            assert not large.done(), large.result()
            await asyncio.sleep(0.001)
        asyncio.get_running_loop().call_later(0.1, client.gate.set)
        answer = await call_async(app, path, body, headers)
        assert (await large).status == 200
        return answer

    for path, body in SHORT.items():
        large = padded(body, 100 * 2**10)
        refused = asyncio.run(ask_beside_a_large_body(path, large))
        assert (refused.status, refused.headers["retry-after"]) == (503, "1"), path
        assert "(gateway.max_buffered_bytes); retry after 1 s" in refused.body.decode()
        packed = gzip.compress(large)
        refused = asyncio.run(ask_beside_a_large_body(path, packed, **{"Content-Encoding": "gzip"}))
        assert refused.status == 503, path
        assert asyncio.run(ask_beside_a_large_body(path, padded(body, 60 * 2**10))).status == 200
        # Nothing is counted after all are answered.
        client.gate = None
        assert asyncio.run(call_async(app, path, large)).status == 200
