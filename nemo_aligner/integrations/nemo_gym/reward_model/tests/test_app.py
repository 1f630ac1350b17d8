"""Answers of the environment, with a stand-in for the reward model's server."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from fastapi.testclient import TestClient
from nemo_gym.failure_kinds import FAILURE_KINDS
from nemo_gym.server_utils import ServerClient
from pydantic import ValidationError
from resources_servers.reward_model.app import (
    RewardModelResourcesServer,
    RewardModelResourcesServerConfig,
    RewardModelRunRequest,
    RewardModelVerifyRequest,
)
from resources_servers.reward_model.conversation import (
    NoReplyError,
    UnscorableError,
    conversation_of,
)

HERE = Path(__file__).resolve().parent
SERVED = {"host": "127.0.0.1", "port": 0, "entrypoint": "app.py", "name": "reward_model"}
CONTRACT = {"attributes": ["help", "length"], "attribute_weights": [1.0, -0.5], "hash": "h"}
ROWS = [json.loads(line) for line in (HERE.parent / "data/example.jsonl").open()]


def config(**options: Any) -> RewardModelResourcesServerConfig:
    return RewardModelResourcesServerConfig(**SERVED, **options)


def said(*texts: str) -> dict[str, Any]:
    """A response of the Responses API."""
    parts = [{"type": "output_text", "text": text, "annotations": []} for text in texts]
    message = {"id": "m", "type": "message", "role": "assistant", "status": "completed"}
    return {
        "id": "r",
        "created_at": 0.0,
        "model": "policy",
        "object": "response",
        "output": [{**message, "content": parts}],
        "parallel_tool_calls": False,
        "tool_choice": "none",
        "tools": [],
    }


class FakeModel:
    """Answers as KServe's JSON does: the letters of the reply, and of the whole."""

    def __init__(self) -> None:
        self.asked: list[list[dict[str, str]]] = []
        self.answer: Callable[[list[dict[str, str]]], tuple[int, dict[str, Any]]] = self.rewards

    def rewards(self, conversation: list[dict[str, str]]) -> tuple[int, dict[str, Any]]:
        lengths = [len(turn["content"] or "") for turn in conversation]
        return 200, self.outputs(
            rewards=[lengths[-1], sum(lengths)], exceeded=[1], contract_hash=["h"]
        )

    @staticmethod
    def outputs(**data: list[Any]) -> dict[str, Any]:
        return {"outputs": [{"name": name, "data": values} for name, values in data.items()]}

    async def contract(self, request: web.Request) -> web.Response:
        return web.json_response(self.outputs(contract=[json.dumps(CONTRACT)]))

    async def infer(self, request: web.Request) -> web.Response:
        (tensor,) = (await request.json())["inputs"]
        assert (tensor["name"], tensor["shape"]) == ("conversations", [1, 1])
        self.asked.append(json.loads(tensor["data"][0]))
        status, body = self.answer(self.asked[-1])
        return web.json_response(body, status=status)


@asynccontextmanager
async def standing(model: FakeModel) -> AsyncIterator[str]:
    """The URL of the stand-in."""
    app = web.Application()
    app.router.add_post("/v2/models/reward_model/infer", model.infer)
    app.router.add_post("/v2/models/contract/infer", model.contract)
    async with TestServer(app) as server:
        yield str(server.make_url("/"))


async def answers(
    count: int, body: dict[str, Any], settings: RewardModelResourcesServerConfig
) -> list[dict[str, Any]]:
    """Answers of so many requests side by side."""
    server = served(settings)
    request = RewardModelVerifyRequest.model_validate(body)
    found = await asyncio.gather(*(server.verify(request) for _ in range(count)))
    await server.close()
    return [answer.model_dump() for answer in found]


def verified(model: FakeModel, body: dict[str, Any], **options: Any) -> dict[str, Any]:
    """Answer of ``verify`` to a body, with the stand-in behind it."""

    async def run() -> dict[str, Any]:
        async with standing(model) as url:
            (answer,) = await answers(
                1, body, config(**{"server_url": url, "retry_s": 0, **options})
            )
            return answer

    return asyncio.run(run())


def served(settings: RewardModelResourcesServerConfig) -> RewardModelResourcesServer:
    return RewardModelResourcesServer(config=settings, server_client=MagicMock(spec=ServerClient))


def body(row: int = 0, reply: str = "a rose", **more: Any) -> dict[str, Any]:
    return {**ROWS[row], "response": said(reply), **more}


def test_the_reward_is_that_of_the_model() -> None:
    model = FakeModel()
    answer = verified(model, body())
    prompt = ROWS[0]["responses_create_params"]["input"][0]["content"]
    assert model.asked == [
        [{"role": "user", "content": prompt}, {"role": "assistant", "content": "a rose"}]
    ]
    assert answer["reward"] == 6 - 0.5 * (6 + len(prompt))
    assert answer["reward_components"] == {"help": 6, "length": 6 + len(prompt)}
    assert (answer["truncated"], answer["contract_hash"]) == (True, "h")
    assert (answer["mask_sample"], answer["failure_kind"]) == (False, None)
    assert answer["response"]["output"][0]["content"][0]["text"] == "a rose"


def test_one_attribute_may_be_the_reward() -> None:
    assert verified(FakeModel(), body(), attribute="help")["reward"] == 6
    answer = verified(FakeModel(), body(), attribute="kind")
    assert "attribute: got 'kind', wanted one of help, length" in answer["failure_reason"]
    assert answer["mask_sample"]


@pytest.mark.parametrize(("threshold", "reward"), [(6, 1.0), (6.5, 0.0)])
def test_with_a_threshold_a_reward_is_enough_or_not(threshold: float, reward: float) -> None:
    answer = verified(FakeModel(), body(reward_threshold=threshold), attribute="help")
    assert (answer["reward"], answer["raw_reward"]) == (reward, 6)


def failing(status: int, error: str) -> FakeModel:
    model = FakeModel()
    model.answer = lambda conversation: (status, {"error": error})
    return model


def refusing(text: str, error: str) -> FakeModel:
    """Refuses conversations with this message in them."""
    model = FakeModel()
    refusal = 400, {"error": f"row 0: {error}"}

    def answer(conversation: list[dict[str, str]]) -> tuple[int, dict[str, Any]]:
        is_refused = text in [turn["content"] for turn in conversation]
        return refusal if is_refused else model.rewards(conversation)

    model.answer = answer
    return model


def test_a_reply_that_is_not_scored_is_the_policys_doing() -> None:
    model = refusing("a rose", "message 2 ends with '<|im_end|>'")
    answer = verified(model, body(), refused_reward=-3.0)
    assert (answer["reward"], answer["mask_sample"]) == (-3.0, False)
    assert answer["failure_kind"] == "reward_model:refused_text"
    assert answer["failure_reason"] == "message 2 ends with '<|im_end|>'"
    assert verified(model, body())["mask_sample"]
    failed = verified(model, body(reward_threshold=-1), refused_reward=5.0)
    assert (failed["reward"], failed["mask_sample"]) == (0.0, False)


def test_a_prompt_that_is_not_scored_is_not_the_policys_doing() -> None:
    """Nor is a request that a proxy or the server refuses as a whole."""
    prompt = ROWS[0]["responses_create_params"]["input"][0]["content"]
    models = {
        "refuses what the policy was asked: message 1 ends so": refusing(
            prompt, "message 1 ends so"
        ),
        "HTTP 413: too large": failing(413, "too large"),
        "HTTP 400: the bearer token is missing": failing(400, "the bearer token is missing"),
    }
    for reason, model in models.items():
        answer = verified(model, body(reward_threshold=0.5), refused_reward=-3.0)
        assert (answer["reward"], answer["mask_sample"]) == (0.0, True), reason
        assert answer["failure_kind"] == "verifier_error"
        assert reason in answer["failure_reason"]


def test_a_prompts_own_beginning_of_the_reply_is_the_prompts() -> None:
    asked = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "Sure: "}]
    rows = body(responses_create_params={"input": asked})
    model = FakeModel()
    model.answer = lambda conversation: (
        (400, {"error": "row 0: no"})
        if conversation[-1]["content"].startswith("Sure")
        else model.rewards(conversation)
    )
    answer = verified(model, rows, refused_reward=-3.0)
    assert (answer["reward"], answer["mask_sample"]) == (0.0, True)


@pytest.mark.parametrize(
    ("status", "kind"), [(500, "verifier_error"), (503, "provider_unavailable")]
)
def test_a_server_that_fails_masks_the_sample(status: int, kind: str) -> None:
    answer = verified(failing(status, "no"), body(reward_threshold=0))
    assert (answer["reward"], answer["mask_sample"], answer["raw_reward"]) == (0.0, True, None)
    assert answer["failure_kind"] == kind
    assert answer["failure_reason"].endswith(f"HTTP {status}: no")
    assert kind in FAILURE_KINDS


def test_a_server_that_is_gone_masks_the_sample() -> None:
    answer = verified(FakeModel(), body(), server_url="http://127.0.0.1:9")
    assert (answer["mask_sample"], answer["failure_kind"]) == (True, "transport_unreachable")


def test_another_server_is_asked_where_one_is_gone() -> None:
    async def ask() -> list[float]:
        async with standing(FakeModel()) as url:
            settings = config(server_url=["http://127.0.0.1:9", url], attribute="help")
            return [answer["reward"] for answer in await answers(4, body(), settings)]

    assert asyncio.run(ask()) == [6.0] * 4


@pytest.mark.parametrize("reward", [float("nan"), float("inf")])
def test_a_reward_that_is_no_number_masks_the_sample(reward: float) -> None:
    model = FakeModel()
    model.answer = lambda conversation: (
        200,
        model.outputs(rewards=[reward, 1], exceeded=[0], contract_hash=["h"]),
    )
    answer = verified(model, body(), attribute="help")
    assert (answer["reward"], answer["failure_kind"]) == (0.0, "verifier_error")
    assert answer["mask_sample"]


def test_rewards_by_another_contract_mask_the_sample() -> None:
    model = FakeModel()
    model.answer = lambda conversation: (
        200,
        model.outputs(rewards=[1, 1], exceeded=[0], contract_hash=["other"]),
    )
    answer = verified(model, body())
    assert "contract other, wanted h" in answer["failure_reason"]
    assert answer["mask_sample"]


def test_every_route_of_a_resources_server_answers() -> None:
    server = served(config(server_url="http://127.0.0.1:9", retry_s=0, refused_reward=-1))
    with TestClient(server.setup_webserver()) as client:
        answer = client.post("/verify", json={**ROWS[0], "response": {**said(), "output": []}})
        assert (answer.status_code, answer.json()["reward"]) == (200, -1.0)
        assert client.get("/reverify_mode").json() == "stateless"
        assert client.post("/seed_session", json={}).status_code == 200


def test_rows_of_the_sample_are_what_a_run_takes() -> None:
    assert [RewardModelRunRequest.model_validate(row).reward_threshold for row in ROWS] == [
        None,
        0.0,
        None,
        0.5,
        None,
    ]


def test_a_conversation_has_the_words_of_the_system_and_one_turn_of_the_policy() -> None:
    request = {"instructions": "be kind", "input": [{"role": "developer", "content": "be brief"}]}
    parts = [{"type": "output_text", "text": "It "}, {"type": "output_text", "text": "is"}]
    output = [
        {"type": "reasoning", "summary": []},
        {"type": "message", "role": "assistant", "content": "I look. "},
        {"type": "message", "role": "assistant", "content": parts},
    ]
    assert conversation_of(request, {"output": output}) == {
        "messages": [
            {"role": "system", "content": "be kind"},
            {"role": "system", "content": "be brief"},
            {"role": "assistant", "content": "I look. It is"},
        ],
        "tools": [],
    }


def test_calls_of_functions_and_their_results_are_messages_with_the_tools() -> None:
    call = {"type": "function_call", "name": "look", "arguments": "{}", "call_id": "1"}
    result = {"type": "function_call_output", "call_id": "1", "output": "dry"}
    tool: dict[str, Any] = {"type": "function", "name": "look", "parameters": {}, "strict": None}
    output = [{"role": "assistant", "content": "I look."}, call, result, call]
    calls = [
        {"id": "1", "type": "function", "function": {"name": "look", "arguments": "{}"}},
    ]
    assert conversation_of({"input": "a", "tools": [tool]}, {"output": output}) == {
        "messages": [
            {"role": "user", "content": "a"},
            {"role": "assistant", "content": "I look.", "tool_calls": calls},
            {"role": "tool", "content": "dry", "tool_call_id": "1"},
            {"role": "assistant", "content": None, "tool_calls": calls},
        ],
        "tools": [{"type": "function", "function": {"name": "look", "parameters": {}}}],
    }


@pytest.mark.parametrize("output", [[], [{"type": "reasoning", "summary": []}]])
def test_a_policy_that_says_nothing_has_no_reply(output: list[Any]) -> None:
    asked = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "earlier"}]
    with pytest.raises(NoReplyError, match="no message of the assistant"):
        conversation_of({"input": asked}, {"output": output})


@pytest.mark.parametrize(
    ("output", "wanted"),
    [
        ([{"type": "web_search_call", "id": "1"}], "an item of type 'web_search_call'"),
        (
            [{"role": "assistant", "content": [{"type": "input_image", "image_url": "x"}]}],
            "a part of type 'input_image'",
        ),
    ],
)
def test_what_is_no_text_cannot_be_scored(output: list[Any], wanted: str) -> None:
    with pytest.raises(UnscorableError, match=wanted):
        conversation_of({"input": "a question"}, {"output": output})


def test_calls_of_functions_are_scored() -> None:
    call = {"type": "function_call", "name": "look", "arguments": "{}", "call_id": "1"}
    output = [
        call,
        {"type": "function_call_output", "call_id": "1", "output": "dry"},
        *said()["output"],
    ]
    model = FakeModel()
    answer = verified(model, {**body(), "response": {**said(), "output": output}})
    assert (answer["mask_sample"], answer["failure_kind"]) == (False, None)
    (asked,) = model.asked
    assert [turn["role"] for turn in asked[-3:]] == ["assistant", "tool", "assistant"]


def test_the_options_are_settings_of_the_server_that_is_started() -> None:
    settings = config(
        model_path="/m/rm.nemo",
        batch_size=4,
        max_length=2048,
        normalize_rewards=True,
        reward_mean=0.5,
        reward_std=2.0,
        clip=[-5, 5],
        length_penalty=0.001,
        length_penalty_from=500,
        ensemble=["/m/b.nemo"],
        ensemble_combine="lower_bound",
        server_settings=["server.max_queue_rows=9"],
    ).settings()
    assert settings == [
        "rm_model_file=/m/rm.nemo",
        "model.micro_batch_tokens=8192",
        "shaping.standardize=given",
        "shaping.mean=[0.5]",
        "shaping.std=[2.0]",
        "shaping.clip=[-5.0, 5.0]",
        "shaping.length_penalty=0.001",
        "shaping.length_penalty_from=500",
        'ensemble.files=["/m/b.nemo"]',
        "ensemble.combine=lower_bound",
        "ensemble.k=1.0",
        "server.max_queue_rows=9",
    ]
    measured = config(model_path="/m/rm.nemo", normalize_rewards=True).settings()
    assert measured == ["rm_model_file=/m/rm.nemo", "shaping.standardize=contract"]


@pytest.mark.parametrize(
    ("options", "wanted"),
    [
        ({}, "server_url, model_path: wanted one of them"),
        ({"server_url": "http://x", "model_path": "y"}, "wanted one of them"),
        ({"server_url": "http://x", "clip": [0, 1]}, "clip: wanted with model_path alone"),
        ({"model_path": "x", "num_workers": 2}, "num_workers"),
        ({"model_path": "x", "reward_mean": 1, "reward_std": 1}, "normalize_rewards: true"),
        ({"model_path": "x", "normalize_rewards": True, "reward_std": 1}, "wanted both"),
        ({"model_path": "x", "batch_size": 2}, "max_length"),
    ],
)
def test_options_that_do_not_fit_are_errors(options: dict[str, Any], wanted: str) -> None:
    with pytest.raises(ValidationError, match=wanted):
        config(**options)


def test_a_server_that_cannot_start_masks_the_sample(tmp_path: Path) -> None:
    script = tmp_path / "broken.py"
    script.write_text("import sys; sys.exit(3)")
    settings = config(model_path="x", command=[sys.executable, str(script)])
    (answer,) = asyncio.run(answers(1, body(), settings))
    assert (answer["mask_sample"], answer["failure_kind"]) == (True, "provider_unavailable")
    assert answer["failure_reason"].endswith("ended with exit code 3; its output says why")
