"""Calls of the gateway's application in this process, with a fake client that computes rewards.

``asked`` sends requests to a gateway that combines several parts: a model, a judge and functions.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from unittest.mock import AsyncMock

import numpy as np
import pytest

from nemo_aligner.config.gateway import (
    CombineConfig,
    GatewayConfig,
    GatewayRunConfig,
    JudgeConfig,
)
from nemo_aligner.contract.contract import ScoringContract
from nemo_aligner.contract.messages import messages_of
from nemo_aligner.serving import gateway
from nemo_aligner.serving.client import RefusedError, ScoredRows
from nemo_aligner.serving.endpoints import reward_endpoints
from nemo_aligner.serving.front.app import Front
from nemo_aligner.serving.front.models import HostedModel
from nemo_aligner.serving.protocols import kserve
from nemo_aligner.serving.upstream import UpstreamService
from tests.serving.fake_judge import FakeJudge
from tests.serving.fake_server import CONTRACT, FINGERPRINT, total


def gateway_front(client: Any, token: str | None = None, **settings: Any) -> Front:
    """Create a gateway's front with this client, like ``nemo-aligner gateway``."""
    config = GatewayConfig(**settings)
    service = UpstreamService(client, config)
    endpoints = reward_endpoints(service, 16, kserve.OPTIONAL_NAMES)
    return Front([HostedModel(service, endpoints)], endpoints, config, token, service.statistics)


def front_of_models(clients: Mapping[str, Any], token: str | None = None) -> Front:
    """Create a front of several models, each with its client; the first one is the main model."""
    config, models = GatewayConfig(), []
    for name, client in clients.items():
        service = UpstreamService(client, config)
        service.model_name = name
        models.append(HostedModel(service, reward_endpoints(service, 16, kserve.OPTIONAL_NAMES)))
    return Front(models, models[0].endpoints, config, token, AsyncMock(return_value={}))


@dataclass(frozen=True)
class Answer:
    status: int
    headers: Mapping[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)


def call(app: Any, path: str, *arguments: Any, **options: Any) -> Answer:
    """Call ``call_async``, with the same arguments, in an event loop of its own."""
    return asyncio.run(call_async(app, path, *arguments, **options))


async def call_async(
    app: Any,
    path: str,
    body: Any = None,
    headers: Mapping[str, str] | None = None,
    method: str | None = None,
) -> Answer:
    """POST if there is a body (JSON, or bytes unchanged), otherwise GET, or as ``method`` says."""
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    chunks = [data[:7], data[7:]]
    sent: list[Any] = []
    scope = {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": method or ("GET" if body is None else "POST"),
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"",
        "root_path": "",
        "headers": [(k.lower().encode(), v.encode("latin-1")) for k, v in (headers or {}).items()],
        "client": ("127.0.0.1", 1),
        "server": ("127.0.0.1", 2),
    }

    async def receive() -> Any:
        part = chunks.pop(0)
        return {"type": "http.request", "body": part, "more_body": bool(chunks)}

    async def send(message: Any) -> None:
        sent.append(message)

    await app(scope, receive, send)
    found = {k.decode(): v.decode() for k, v in sent[0]["headers"]}
    return Answer(sent[0]["status"], found, b"".join(each.get("body", b"") for each in sent[1:]))


class FakeClient:
    """A client without a server: rewards like fake_server.py; empty texts are rejected."""

    def __init__(self, contract: ScoringContract | None = CONTRACT, columns: int = 2) -> None:
        self.contract, self.columns = contract, columns
        self.fingerprint = None if contract is None else FINGERPRINT
        self.failure: Exception | None = None
        self.asked: list[Any] = []
        self.probes = 0
        self.gate: asyncio.Event | None = None
        self.counted: dict[str, dict[str, float] | None] = {"http://one": None}
        self.turn_end_async = AsyncMock(return_value=None)
        self.sample_frame_async = AsyncMock(return_value=None)

    async def score_rows_async(
        self, texts: Sequence[Any], *, on_error: str = "nan", is_probe: bool = False
    ) -> ScoredRows:
        self.probes += is_probe
        whole = [
            text if isinstance(text, str) else "".join(m["content"] for m in messages_of(text))
            for text in texts
        ]
        return await self._scored(list(texts), [total(text) for text in whole], on_error)

    async def score_token_rows_async(
        self,
        token_lists: Sequence[Sequence[int]],
        *,
        on_error: str = "nan",
        is_probe: bool = False,
    ) -> ScoredRows:
        self.probes += is_probe
        return await self._scored(list(token_lists), [*map(float, map(sum, token_lists))], on_error)

    async def _scored(self, rows: list[Any], sums: list[float], on_error: str) -> ScoredRows:
        self.asked.append(rows)
        if self.gate is not None:
            await self.gate.wait()
        if self.failure is not None:
            raise self.failure
        errors = {row: "the text is empty" for row, value in enumerate(sums) if value == 0}
        if errors and on_error == "raise":
            raise RefusedError("http://one", 400, f"row {min(errors)}: the text is empty")
        rewards = np.array([[value, -value][: self.columns] for value in sums], dtype=np.float32)
        rewards = rewards.reshape(len(rows), self.columns)
        rewards[[*errors]] = np.nan
        exceeded = np.array([value > 5000 for value in sums], dtype=bool)
        if self.contract is None or len(errors) == len(rows):
            return ScoredRows(rewards, errors, exceeded)
        return ScoredRows(rewards, errors, exceeded, self.contract.hash, self.fingerprint)

    async def contract_async(self) -> ScoringContract:
        if self.failure is not None:
            raise self.failure
        if self.contract is None:
            raise RefusedError("http://one", 404, "no such model")
        return self.contract

    async def probe_async(self) -> dict[str, str | None]:
        return {"http://one": None if self.failure is None else "connection refused"}

    async def statistics_async(self) -> dict[str, dict[str, float] | None]:
        return self.counted


# One valid body for each route.
GOOD = {
    "/v1/rewards": {"texts": ["ab"]},
    "/get_reward": {"query": ["ab"]},
    "/remote_rm": {"prompt": "a", "response": "b", "label": None},
    "/classify": {"input": "ab"},
    "/pooling": {"input": "ab"},
    "/score": {"text_1": "a", "text_2": "b"},
    "/predict": {"inputs": "ab"},
    "/rerank": {"query": "a", "texts": ["b"]},
    "/v1/rerank": {"query": "a", "documents": ["b"]},
    "/v2/rerank": {"query": "a", "documents": ["b"], "top_n": 1},
    "/v1/score": {"text_1": "a", "text_2": "b"},
    "/v1/classify": {"input": "ab"},
    "/v1/embeddings": {"input": "ab"},
    "/verify": {
        "responses_create_params": {"input": "a"},
        "response": {"output": [{"role": "assistant", "content": "b"}]},
    },
    "/compare": {
        "conversation_history": [{"role": "user", "content": "a"}],
        "response_objs": [{"output": [{"role": "assistant", "content": "b"}]}],
    },
}


def make(client: FakeClient | None = None, token: str | None = None, **settings: Any) -> Any:
    """Create a gateway's front; ``settings`` are those of ``gateway``."""
    return gateway_front(client or FakeClient(), token, **settings)


def message(answer: Any) -> str:
    """Return the error message of an answer, whatever the form of its protocol."""
    error = answer.json
    error = error["detail"] if "detail" in error else error["error"]
    error = error["message"] if isinstance(error, dict) else error
    assert isinstance(error, str)
    return error


# A gateway of several parts.

USER = {"role": "user", "content": "a"}
# A function that scores samples, as a setting names it.
LENGTH = "tests.serving.gateway_calls:count_characters"
Calls = Sequence[tuple[str, Any]]


def count_characters(samples: list[dict[str, Any]]) -> list[float]:
    return [len(json.dumps(sample)) for sample in samples]


def conversation(reply: str, prompt: dict[str, str] = USER) -> list[dict[str, str]]:
    return [prompt, {"role": "assistant", "content": reply}]


def modelled(reply: str) -> float:
    """The model's merged reward: CONTRACT weighs a total and its negative by 1 and 0.5."""
    return total(f"a{reply}") / 2


def verify(reply: str) -> dict[str, Any]:
    output = [{"role": "assistant", "content": reply}]
    return {"responses_create_params": {"input": "a"}, "response": {"output": output}}


def compare(*replies: str, **fields: Any) -> dict[str, Any]:
    outputs = [{"output": [{"role": "assistant", "content": reply}]} for reply in replies]
    return {"conversation_history": [USER], "response_objs": outputs, **fields}


def asked(
    monkeypatch: pytest.MonkeyPatch,
    calls: Calls,
    fake: FakeJudge | None = None,
    *,
    client: Any = None,
    functions: dict[str, str] | None = None,
    combine: dict[str, Any] | None = None,
    settings: dict[str, Any] | None = None,
    **rules: Any,
) -> list[Answer]:
    """Return the answers to all calls, which are sent at once; ``client`` False: no model."""
    model = FakeClient() if client is None else client
    if model:
        model.aclose = _nothing
        monkeypatch.setattr(gateway, "_build_client", lambda config, token: model)

    async def run() -> list[Answer]:
        judge_config = JudgeConfig()
        if fake is not None:
            rules.setdefault("timeout_s", 0.3)
            rules.setdefault("retries", 1)
            judge_config = JudgeConfig(url=fake.url, model="j", **rules)
        config = GatewayRunConfig(
            backends=["http://one"] if model else [],
            judge=judge_config,
            functions=functions or {},
            function_timeout_s=0.3,
            combine=CombineConfig(**(combine or {})),
            gateway=GatewayConfig(**(settings or {})),
        )
        service = gateway.build_service(config, None)
        endpoints = reward_endpoints(service, 16, kserve.OPTIONAL_NAMES)
        front = Front(
            [HostedModel(service, endpoints)], endpoints, config.gateway, None, service.statistics
        )
        await service.start()
        posts = [call_async(front, path, body) for path, body in calls if body is not None]
        answers = list(await asyncio.gather(*posts))
        for path, body in calls:
            if body is None:
                answers.append(await call_async(front, path))
        await service.close()
        return answers

    async def with_judge() -> list[Answer]:
        if fake is None:
            return await run()
        async with fake.running():
            return await run()

    return asyncio.run(with_judge())


async def _nothing() -> None:
    return
