"""The gateway's application without a socket or a server: bodies, tokens, limits and pages."""

from __future__ import annotations

import asyncio
import gzip
import json
import re
from typing import Any
from unittest.mock import AsyncMock, Mock

import numpy as np
import pytest

pytest.importorskip("fastapi")
pytest.importorskip("prometheus_client")
from nemo_aligner.config.gateway import GatewayConfig
from nemo_aligner.serving.client import RefusedError, ScoredRows
from nemo_aligner.serving.front import routes as front_routes
from nemo_aligner.serving.front.app import ROUTES
from nemo_aligner.serving.upstream import UpstreamService
from nemo_aligner.utils.errors import ServingError
from tests.serving.fake_server import CONTRACT, FINGERPRINT, total
from tests.serving.gateway_calls import (
    GOOD,
    FakeClient,
    call,
    front_of_models,
    make,
    message,
)

# Routes that merge several attributes into one number.
MERGED = (
    *("/get_reward", "/remote_rm", "/score", "/v1/score", "/rerank", "/v1/rerank", "/v2/rerank"),
    *("/verify", "/compare"),
)
BEARER = {"Authorization": "Bearer s3cret"}


def test_gateway_answers_at_every_route() -> None:
    whole, merged = str(total("ab")), str(total("ab") / 2)
    for path, body in GOOD.items():
        answer = call(make(), path, body)
        assert answer.status == 200, answer.body
        assert answer.headers["content-type"] == "application/json"
        assert (merged if path in MERGED else whole) in answer.body.decode(), path
    contract = json.loads(json.dumps(CONTRACT.to_dict()))
    published = {**contract, "model_fingerprint": FINGERPRINT}
    assert call(make(), "/v1/contract").json == published


def test_model_is_chosen_by_the_path_and_by_the_body() -> None:
    """At the path of a model, a body may have any name that no other model has."""
    clients = {"reward_model": FakeClient(), "harmless": FakeClient()}
    app = front_of_models(clients)
    asked = {name: client.asked for name, client in clients.items()}
    bodies: dict[str, Any] = {**GOOD, "/rerank": {"query": "a", "documents": ["b"]}}
    for path, body in bodies.items():
        in_body = {**body, "model": "harmless"}
        # Path and body -> the model that answers.
        cases = [
            (path, body, "reward_model"),
            (path, in_body, "harmless"),
            (f"/models/harmless{path}", body, "harmless"),
            (f"/models/harmless{path}", {**body, "model": "any"}, "harmless"),
        ]
        for called, sent, name in cases:
            answer = call(app, called, sent)
            assert answer.status == 200, (called, answer.body)
            assert {each for each, calls in asked.items() if calls} == {name}, (called, sent)
            if isinstance(answer.json, dict) and path not in ("/verify", "/compare"):
                assert answer.json.get("model", name) == name, (called, sent)
            for calls in asked.values():
                calls.clear()
        answer = call(app, f"/models/reward_model{path}", in_body)
        assert answer.status == 404, path
        assert "Send the request to /models/harmless, or leave out model" in message(answer)
    call(app, "/classify", {"text": "a", "model": "harmless"})
    assert asked["harmless"] == [["a"]]
    answer = call(app, "/models/harmless/v1/nothing", {})
    assert message(answer).startswith("'/models/harmless/v1/nothing': this server has no such path")
    page = call(app, "/models/harmless/docs")
    assert b"'/models/harmless/openapi.json'" in page.body
    assert call(app, "/openapi.json").json["servers"] == [{"url": "."}]
    for prefix in ("/ng-rollout/r1/models/harmless", "/models/harmless/ng-rollout/r1"):
        assert call(app, f"{prefix}/verify", GOOD["/verify"]).status == 200
    assert len(asked["harmless"]) == 3


def test_path_with_a_slash_too_many_is_refused_and_leads_to_no_other_model() -> None:
    """A redirect to the path without its prefix would lead to the main model."""
    clients = {"reward_model": FakeClient(), "harmless": FakeClient()}
    app = front_of_models(clients)
    for prefix in ("", "/models/harmless", "/ng-rollout/r1", "/models/harmless/ng-rollout/r1"):
        for path, body in {**GOOD, "/v1/models": None, "/seed_session": {}}.items():
            answer = call(app, f"{prefix}{path}/", body)
            assert (answer.status, "location" in answer.headers) == (404, False)
            start = f"'{prefix}{path}/': this server has no such path; did you mean {prefix}{path}?"
            assert message(answer).startswith(start), answer.body
    assert [client.asked for client in clients.values()] == [[], []]
    # A prefix that comes twice leads nowhere, either.
    twice = "/models/harmless/models/harmless/v1/rewards"
    assert call(app, twice, GOOD["/v1/rewards"]).status == 404


def test_wrong_method_is_refused_with_those_of_the_route() -> None:
    app = make()
    cases = [
        ("PUT", "/v1/rewards", "POST", "POST"),
        ("OPTIONS", "/models/reward_model/v1/rewards", "POST", "POST"),
        ("GET", "/v1/rewards", "POST", "POST"),
        ("POST", "/health", "GET", "GET, HEAD"),
        ("DELETE", "/docs", "GET", "GET, HEAD"),
        ("GET", "/seed_session", "POST", "POST"),
    ]
    for method, path, expected, allowed in cases:
        answer = call(app, path, {}, method=method)
        assert (answer.status, answer.headers["allow"]) == (405, allowed), path
        assert message(answer) == f"{path}: got {method}, wanted {expected}"


def test_models_are_probed_at_the_same_time() -> None:
    clients = {"reward_model": FakeClient(), "harmless": FakeClient()}
    begun: dict[str, asyncio.Event] = {name: asyncio.Event() for name in clients}
    for name, client in clients.items():

        async def probe(name: str = name) -> dict[str, str | None]:
            begun[name].set()
            for event in begun.values():
                await asyncio.wait_for(event.wait(), 5)
            return {name: None if name == "harmless" else "it is gone"}

        client.probe_async = probe  # type: ignore[method-assign]
    answer = call(front_of_models(clients), "/ready")
    backends = {"reward_model": "it is gone", "harmless": "ready"}
    assert (answer.status, answer.json["backends"]) == (200, backends)


def test_unknown_model_is_refused_after_the_token_in_the_form_of_the_route() -> None:
    clients = {"reward_model": FakeClient(), "harmless": FakeClient()}
    app, reason = (
        front_of_models(clients, "s3cret"),
        "unknown model 'x'. Models: reward_model, ",
    )
    for path in ("/classify", "/get_reward", "/v2/models/reward_model/infer", "/metrics"):
        body = None if path == "/metrics" else GOOD.get(path, b"")
        answer = call(app, f"/models/x{path}", body)
        assert (answer.status, answer.headers["www-authenticate"]) == (401, "Bearer")
        answer = call(app, f"/models/x{path}", body, BEARER)
        assert (answer.status, reason in message(answer)) == (404, True), path
    assert call(app, "/models/harmless/ready").status == 200
    error = call(app, "/classify", {"input": "a", "model": "x"}, BEARER).json["error"]
    assert (error["type"], error["code"]) == ("NotFoundError", 404)
    # A single model answers under any name in a body, but has only its own path.
    assert call(make(), "/classify", {"input": "a", "model": "x"}).json["model"] == "reward_model"
    assert call(make(), "/models/reward_model/classify", {"input": "a"}).status == 200
    assert call(make(), "/models/x/classify", {"input": "a"}).status == 404


def test_gateway_tells_sglangs_classify_from_vllms_by_the_body() -> None:
    app, whole = make(), total("ab")
    (row,) = call(app, "/classify", {"model": "any", "text": ["ab"]}).json
    assert row["embedding"] == [whole, -whole]
    assert call(app, "/classify", {"input_ids": [1, 2]}).json["embedding"] == [3.0, -3.0]
    assert call(app, "/classify", {"input": "ab"}).json["data"][0]["probs"] == [whole, -whole]
    for body, error in (
        ({"text": [""]}, {"message": "row 0: the text is empty"}),
        (
            {"text": 5},
            {"message": "text: got 5, wanted a string or a list"},
        ),
    ):
        answer = call(app, "/classify", body)
        assert (answer.status, answer.json) == (400, {"error": error}), body
    # A body with neither field belongs to vLLM's route, which is the first one.
    assert call(app, "/classify", {}).json["error"]["type"] == "BadRequestError"


def test_gateway_tells_vllms_rerank_from_teis_by_the_body() -> None:
    app, half = make(), total("ab") / 2
    (rank,) = call(app, "/rerank", {"query": "a", "texts": ["b"]}).json
    assert rank == {"index": 0, "score": half}
    (result,) = call(app, "/rerank", {"query": "a", "documents": ["b"]}).json["results"]
    assert (result["index"], result["relevance_score"]) == (0, half)
    refused = call(app, "/rerank", {"query": "a", "documents": 5})
    assert refused.json["error"]["type"] == "BadRequestError"
    # A body with neither field belongs to TEI's route, which is the first one.
    for body in ({"query": "a"}, ["documents"], b'{"documents"'):
        assert call(app, "/rerank", body).json["error_type"] == "Validation", body


def test_gateway_parses_a_body_of_the_first_route_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Parsing runs on the event loop, which answers nothing else meanwhile."""
    app = make()
    parse = Mock(wraps=front_routes.from_json)
    monkeypatch.setattr(front_routes, "from_json", parse)
    assert call(app, "/classify", GOOD["/classify"]).status == 200
    assert call(app, "/classify", {"text": "ab"}).status == 200
    assert call(app, "/rerank", GOOD["/rerank"]).status == 200
    assert parse.call_count == 0
    assert call(app, "/rerank", GOOD["/v1/rerank"]).status == 200
    assert parse.call_count == 1


def test_gateway_says_what_the_model_is_as_openai_and_tei_do() -> None:
    client = FakeClient()
    app = make(client)
    (model,) = call(app, "/v1/models").json["data"]
    assert (model["id"], model["object"]) == ("reward_model", "model")
    assert model["max_model_len"] == CONTRACT.seq_length
    info = call(app, "/info").json
    assert (info["max_input_length"], info["auto_truncate"]) == (CONTRACT.seq_length, True)
    assert info["model_dtype"] == "float32"
    assert info["model_type"]["reranker"]["id2label"] == {"0": "sum", "1": "minus"}
    client.contract = None  # like a server of NeMo-Aligner, which publishes none
    assert call(app, "/v1/models").json["data"][0]["id"] == "reward_model"
    assert call(app, "/info").json["model_type"]["reranker"]["id2label"] == {"0": "reward"}
    # The contract endpoint fails or requires a token, so it is unknown whether there is a contract.
    for failure, *expected in (
        (ServingError("nobody listens"), 503, "1"),
        (RefusedError("http://one", 500, "the model failed"), 503, "1"),
        (RefusedError("http://one", 401, "the bearer token is missing or wrong"), 500, None),
    ):
        client.failure = failure
        for path in ("/v1/models", "/info", "/v1/contract"):
            answer = call(app, path)
            assert [answer.status, answer.headers.get("retry-after")] == expected, (path, failure)
    client.failure = KeyError("secret words")
    for path in ("/v1/models", "/info"):
        answer = call(app, path)
        assert (answer.status, "KeyError; the server's log" in message(answer)) == (500, True)
        assert call(make(token="s3cret"), path).status == 401


def test_gateway_that_cannot_check_its_backends_says_so_and_ends_the_check_with_itself(
    capsys: pytest.CaptureFixture[str],
) -> None:
    client = FakeClient()
    client.aclose = AsyncMock()  # type: ignore[attr-defined]
    service = UpstreamService(client, GatewayConfig())  # type: ignore[arg-type]

    async def live() -> None:
        await service.start()
        await asyncio.sleep(0)  # let the check run, like uvicorn does while it waits
        await service.close()

    client.probe_async = AsyncMock(side_effect=ServingError("nobody"))  # type: ignore[method-assign]
    asyncio.run(live())
    assert "Warning: the backends could not be checked: nobody." in capsys.readouterr().out

    started, ended = [], []

    async def hang() -> Any:
        started.append(True)
        try:
            await asyncio.Event().wait()
        finally:
            ended.append(True)

    client.probe_async = hang  # type: ignore[method-assign]
    asyncio.run(live())
    assert (started, ended, client.aclose.await_count) == ([True], [True], 2)  # type: ignore[attr-defined]


def test_gateway_answers_a_malformed_body_with_a_400_in_the_protocols_own_shape() -> None:
    for path in GOOD:
        for body in (b"{", b"", b"null", b'{"texts": 5}', b"\xff\xfe"):
            answer = call(make(), path, body)
            assert answer.status == 400, (path, body)
            assert message(answer), (path, body)


def test_gateway_answers_a_body_that_is_too_large_with_a_413() -> None:
    client = FakeClient()
    app = make(client, max_request_bytes=100)
    for path, body in {**GOOD, "/aggregate_metrics": {}}.items():
        limit = 1600 if path in ("/verify", "/compare", "/aggregate_metrics") else 100
        big = json.dumps(body).encode() + b" " * limit
        for headers in ({}, {"Content-Length": str(len(big))}):
            answer = call(app, path, big, headers)
            assert answer.status == 413, path
            assert f"more than {limit} bytes (max_request_bytes)" in message(answer), path
    assert client.asked == []


def test_rows_are_counted_before_samples_are_built() -> None:
    """Samples that share a part of the body may be far larger than it."""
    image, replies = {"content": [{"type": "image_url"}]}, ["a"] * 4
    outputs = [{"output": []}] * 4
    bodies: dict[str, Any] = {
        "/score": {"queries": image, "documents": replies},
        "/v1/score": {"text_1": image, "text_2": replies},
        "/v1/rerank": {"query": image, "documents": replies},
        "/compare": {"conversation_history": [image], "response_objs": outputs},
        "/v1/rewards": {"conversations": [[], []], "principle": [None, [5, 5, 5]]},
    }
    for path, body in bodies.items():
        answer = call(make(max_queue_rows=3), path, body)
        found = (answer.status, "got 4 rows in a request, wanted at most 3" in message(answer))
        assert found == (413, True), (path, answer.body)
        assert call(make(max_queue_rows=4), path, body).status == 400, path


def test_gateway_with_a_token_answers_nothing_but_health_without_it() -> None:
    """test_tokens.py tests which headers carry the token."""
    client = FakeClient()
    app = make(client, token="s3cret")
    for path, body in GOOD.items():
        for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "Bearer \xe9"}):
            answer = call(app, path, body, headers)
            assert answer.status == 401, (path, headers)
            assert answer.headers["www-authenticate"] == "Bearer"
            assert "bearer token" in message(answer)
    assert client.asked == []
    assert call(app, "/v1/rewards", GOOD["/v1/rewards"], BEARER).status == 200
    for path in ("/metrics", "/docs", "/openapi.json", "/v1/contract", "/nowhere"):
        assert call(app, path).status == 401, path
    assert call(app, "/metrics", headers=BEARER).status == 200
    assert call(app, "/health").status == 200
    assert call(app, "/ready").json == {"status": "ready", "backends": {"http://one": "ready"}}


def test_gateway_without_a_backend_answers_503_and_gym_a_masked_sample() -> None:
    client = FakeClient()
    client.failure = ServingError("nobody listens")
    app = make(client)
    for path, body in GOOD.items():
        answer = call(app, path, body)
        if path == "/verify":
            assert (answer.status, answer.json["mask_sample"]) == (200, True)
            assert "nobody listens" in answer.json["failure_reason"]
        else:
            assert (answer.status, answer.headers["retry-after"]) == (503, "1"), path
            assert "nobody listens" in message(answer)
    answer = call(app, "/ready")
    assert (answer.status, answer.headers["retry-after"]) == (503, "1")
    assert answer.json["backends"] == {"http://one": "connection refused"}
    assert call(app, "/health").status == 200
    assert call(app, "/v1/contract").status == 503
    client.failure = KeyError("secret words")
    answer = call(app, "/v1/rewards", GOOD["/v1/rewards"])
    assert answer.status == 500
    assert re.match(r"internal error \w{8}: KeyError; the server's log", message(answer))


def test_gateway_answers_what_its_own_code_raises_with_a_500_in_the_protocols_shape(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(*unused: Any) -> Any:
        raise RuntimeError("secret words")

    client = FakeClient()
    app = make(client)
    monkeypatch.setattr(client, "probe_async", fail)
    monkeypatch.setattr(client, "statistics_async", fail)
    monkeypatch.setattr("nemo_aligner.serving.protocols.base.BaseModel.model_validate_json", fail)
    for path, body in [
        *GOOD.items(),
        ("/aggregate_metrics", {}),
        ("/ready", None),
        ("/metrics", None),
    ]:
        answer = call(app, path, body)
        assert answer.status == 500, path
        assert re.match(r"internal error \w{8}: RuntimeError", message(answer)), path


def test_gateway_reads_bodies_with_a_byte_order_mark_or_packed_by_gzip() -> None:
    body = json.dumps(GOOD["/v1/rewards"]).encode()
    packed, mark = gzip.compress(body), b"\xef\xbb\xbf"
    zipped = {"Content-Encoding": "gzip"}
    app = make(max_request_bytes=100)
    for content, headers in (
        (mark + body, {}),
        (packed, {}),
        (packed, zipped),
        (gzip.compress(mark + body), zipped),
    ):
        assert call(app, "/v1/rewards", content, headers).status == 200, content
    # The gateway limits unpacked bytes, so that few bytes cannot become many.
    answer = call(app, "/v1/rewards", gzip.compress(body + b" " * 10**6), zipped)
    assert (answer.status, "more than 100 bytes" in message(answer)) == (413, True)
    cases: list[tuple[bytes, dict[str, str], str]] = [
        (body, zipped, "Content-Encoding: got gzip, but the body is not"),
        (
            body,
            {"Content-Encoding": "br"},
            "Content-Encoding: got 'br', wanted gzip, deflate or none",
        ),
        (packed[:-9], zipped, "body: its compressed data is incomplete"),
        (packed + packed, zipped, "body: its compressed data is incomplete"),
        (packed[:-8] + bytes(8), zipped, "body: its compressed data cannot be read"),
        (body.decode().encode("utf-16"), {}, "body: got text in UTF-16; wanted JSON in UTF-8"),
    ]
    for content, headers, wanted in cases:
        for path in ("/v1/rewards", "/classify", "/seed_session"):
            answer = call(app, path, content, headers)
            assert (answer.status, wanted in message(answer)) == (400, True), (wanted, answer.body)


def test_gateway_makes_no_one_reward_of_several_attributes_without_a_contract() -> None:
    app = make(FakeClient(contract=None))
    answer = call(app, "/get_reward", GOOD["/get_reward"])
    assert answer.status == 400
    assert "the model has 2 attributes" in message(answer)
    answer = call(app, "/v1/rewards", GOOD["/v1/rewards"])
    assert answer.json["attributes"] == ["reward_0", "reward_1"]


def test_gateway_describes_every_route_and_all_references_lead_somewhere() -> None:
    page = call(make(), "/openapi.json").json
    schemas = page["components"]["schemas"]
    assert set(GOOD) == {route.path for route in ROUTES}
    for route in ROUTES:
        described = page["paths"][route.path]["post"]
        assert route.summary in described["summary"]
        body = described["requestBody"]["content"]["application/json"]["schema"]
        named = [each["$ref"] for each in body.get("anyOf", [body])]
        assert any(each.endswith(f"/{route.request.__name__}") for each in named)
        assert {"200", "400", "401", "413", "503"} <= set(described["responses"])
    references = re.findall(r'"\$ref": "([^"]+)"', json.dumps(page))
    assert references
    assert {ref.removeprefix("#/components/schemas/") for ref in references} <= set(schemas)
    assert "swagger" in call(make(), "/docs").body.decode()


class Picky(FakeClient):
    """A fake client that rejects conversations with a certain content, or all, like a proxy."""

    def __init__(self, refused: str | None, refusal: RefusedError) -> None:
        super().__init__()
        self.refused, self.refusal = refused, refusal

    async def score_rows_async(
        self, texts: Any, *, on_error: str = "nan", is_probe: bool = False
    ) -> Any:
        self.probes += is_probe
        if texts and self.refused in [turn["content"] for turn in texts[0]]:
            if on_error == "raise" or self.refusal.kind.reaction != "skip":
                raise self.refusal
            nothing = np.full((1, 2), np.nan, dtype=np.float32)
            return ScoredRows(nothing, {0: self.refusal.reason}, np.zeros(1, bool), None)
        return await super().score_rows_async(texts, on_error=on_error)


def test_verify_masks_what_is_not_the_policys_fault() -> None:
    """With a threshold, only a reply that is itself at fault counts as 0."""
    asked = {"responses_create_params": {"input": "ask"}}
    call_of_tool = {"type": "function_call", "name": "f", "arguments": "{}", "call_id": "1"}
    refusal = {"role": "assistant", "content": [{"type": "refusal", "refusal": "no"}]}
    broken = {**call_of_tool, "arguments": "{"}
    reply = {"role": "assistant", "content": "say"}
    of_text = RefusedError("http://one", 400, "row 0: got 99 tokens, wanted at most 64")
    of_all = RefusedError("http://one", 413, "too large")
    cases: dict[str, tuple[str | None, RefusedError, Any, bool, str]] = {
        "reply": ("say", of_text, reply, False, "reward_model:refused_text"),
        "prompt": ("ask", of_text, reply, True, "verifier_error"),
        "proxy": ("say", of_all, reply, True, "verifier_error"),
        "call of a tool": (None, of_text, call_of_tool, False, "reward_model:refused_text"),
        "refusal": ("", of_text, refusal, True, "verifier_error"),
        "no reply": ("", of_text, {"type": "reasoning"}, False, "reward_model:refused_text"),
        "broken call": ("", of_text, broken, False, "reward_model:refused_text"),
    }
    wrong = {}
    for name, (refused, error, said, is_masked, kind) in cases.items():
        client = Picky(refused, error)
        app = make(client, reward_threshold=0.5)
        answer = call(app, "/verify", {**asked, "response": {"output": [said]}})
        found = (answer.status, answer.json.get("reward"), answer.json.get("mask_sample"))
        if (*found, answer.json.get("failure_kind")) != (200, 0.0, is_masked, kind):
            wrong[name] = answer.body
        # Rewards of a probe are not counted, neither here nor at the backend.
        assert client.probes == (name in ("reply", "prompt", "call of a tool")), name
        assert b'nemo_aligner_reward_rows{attribute="sum"} 1.0' not in call(app, "/metrics").body
    assert not wrong, wrong
    # A failing model is an error, and gives no reward 0.
    failure = RefusedError("one", 500, "row 0: the model's reward is not a finite number")
    body = {**asked, "response": {"output": [reply]}}
    answer = call(make(Picky("say", failure)), "/verify", body)
    assert (answer.status, "reward" in answer.json) == (500, False)


def test_plain_routes_answer_what_an_agent_of_gym_asks_around_rollouts() -> None:
    app = make()
    session = {"resources_session_id": "s", "episode_id": "e", "task_id": "t", "task_data": {}}
    assert call(app, "/seed_session", {}).json == {}
    for path in ("/seed_session", "/close_session"):
        assert call(app, path, session).json == {"resources_session_id": "s"}
    assert call(app, "/reverify_mode").json == "stateless"
    # Paths that Gym's agents use if Gym observes rollouts.
    assert call(app, "/ng-rollout/0-1/close_session", session).json == {"resources_session_id": "s"}
    assert call(app, "/ng-rollout/0-1/ng-rollout/0-1/seed_session", {}).status == 404
    guarded = make(token="s3cret")
    assert call(guarded, "/ng-rollout/0-1/verify", {}).status == 401
    assert call(guarded, "/ng-rollout/0-1/health").status == 200
    rollouts = [
        {
            "_ng_task_index": task,
            "_ng_rollout_index": repeat,
            "reward": float(task + repeat),
            "mask_sample": (task, repeat) == (1, 1),
        }
        for task in range(2)
        for repeat in range(2)
    ]
    found = call(app, "/aggregate_metrics", {"verify_responses": rollouts}).json
    # Like nemo_gym.reward_profile.compute_aggregate_metrics.
    assert found["agent_metrics"] == {
        "mean/reward": pytest.approx(2 / 3),
        "max/reward": 1.0,
        "min/reward": 0.0,
        "median/reward": 1.0,
        "std/reward": pytest.approx(0.57735, abs=1e-5),
        "coverage/measured_rollouts": 3,
        "coverage/masked_rollouts": 1,
        "coverage/measured_tasks": 2,
        "coverage/fully_masked_tasks": 0,
        "num_repeats": 2,
    }
    assert {name for name in found["key_metrics"] if "/" in name} == {
        "mean/reward",
        *(name for name in found["agent_metrics"] if name.startswith("coverage/")),
    }
    groups = found["group_level_metrics"]
    means = [(group["_ng_task_index"], group["mean/reward"]) for group in groups]
    assert means == [(0, 0.5), (1, 1.0)]
    for none in ([], [{"reward": 0.0, "mask_sample": True}]):
        found = call(app, "/aggregate_metrics", {"verify_responses": none}).json
        assert "mean/reward" not in found["agent_metrics"]
    for body in (b"{", {"verify_responses": 5}):
        assert call(app, "/aggregate_metrics", body).status == 400


def test_verify_of_a_failure_has_no_numbers_of_an_earlier_time() -> None:
    """A rollout that is scored again still carries its last answer."""
    stale = {
        "reward": 0.75,
        "raw_reward": 0.75,
        "reward_components": {"sum": 0.75},
        "truncated": True,
        "contract_hash": "feed",
        "model_fingerprint": "f00d",
        "mask_sample": False,
    }
    none = {
        "reward": 0.0,
        "raw_reward": None,
        "reward_components": {},
        "truncated": False,
        "contract_hash": None,
        "model_fingerprint": None,
    }
    no_reply = {**GOOD["/verify"], **stale, "response": {"output": []}}
    client = FakeClient()
    app = make(client)
    of_reply = call(app, "/verify", no_reply).json
    client.failure = ServingError("nobody listens")
    of_backend = call(app, "/verify", {**GOOD["/verify"], **stale, "_ng_task_index": 7}).json
    assert of_reply["reward_components"] == {"sum": 0.0, "minus": 0.0}
    for answer in ({**of_reply, "reward_components": {}}, of_backend):
        assert {name: answer[name] for name in none} == none
        assert answer["mask_sample"] is True
    assert of_backend["_ng_task_index"] == 7
