"""Run by pytest in NeMo Gym's environment: test the resources server against a fake gateway.

The fake gateway answers what each test sets.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from fastapi.testclient import TestClient
from nemo_gym.failure_kinds import FAILURE_KINDS
from nemo_gym.rollout_collection import NG_FAILURE_CLASS_KEY
from nemo_gym.server_utils import ServerClient
from pydantic import ValidationError
from resources_servers.reward_model import app
from resources_servers.reward_model.app import (
    RewardModelResourcesServer,
    RewardModelResourcesServerConfig,
    RewardModelRunRequest,
    RewardModelVerifyRequest,
)
from resources_servers.reward_model.servers import FailedServerError

SERVED = {"host": "127.0.0.1", "port": 0, "entrypoint": "app.py", "name": "reward_model"}
ROWS = [
    json.loads(line)
    for line in Path(app.__file__).with_name("data").joinpath("example.jsonl").open()
]
SCORED = {
    "reward": 1.0,  # from a gateway with its own threshold
    "raw_reward": 2.5,
    "reward_components": {"help": 6.0, "length": -3.5},
    "attribute/help": 6.0,
    "attribute/length": 7.0,
    "truncated": True,
    "reply_cut": True,
    "contract_hash": "h",
    "mask_sample": False,
    "instance_config": {"mask_sample": False},
    "failure_kind": None,
    "failure_reason": None,
}


def failed(kind: str, reason: str) -> dict[str, Any]:
    """Build a gateway's answer to a rollout without a reward."""
    said = {"failure_kind": kind, "failure_reason": reason}
    return {"reward": 0.0, "mask_sample": True, **said}


def config(**options: Any) -> RewardModelResourcesServerConfig:
    return RewardModelResourcesServerConfig(**SERVED, **options)


def said(*texts: str) -> dict[str, Any]:
    """Build a response in the form of the Responses API."""
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


class FakeGateway:
    """Gives the configured answers in order, and repeats the last one."""

    def __init__(self, *answers: tuple[int, Any]) -> None:
        self._answers = list(answers or [(200, SCORED)])
        self.asked: list[dict[str, Any]] = []

    async def verify(self, request: web.Request) -> web.Response:
        self.asked.append(await request.json())
        status, body = self._answers.pop(0) if len(self._answers) > 1 else self._answers[0]
        return web.json_response(body, status=status)


@asynccontextmanager
async def standing(gateway: FakeGateway) -> AsyncIterator[str]:
    """Run the fake gateway, and yield its URL."""
    application = web.Application()
    application.router.add_post("/verify", gateway.verify)
    async with TestServer(application) as server:
        yield str(server.make_url("/"))


async def answers(
    count: int, body: dict[str, Any], settings: RewardModelResourcesServerConfig
) -> list[dict[str, Any]]:
    """Send this many concurrent requests, and return their answers."""
    server = served(settings)
    request = RewardModelVerifyRequest.model_validate(body)
    try:
        found = await asyncio.gather(*(server.verify(request) for _ in range(count)))
    finally:
        await server.close()
    return [answer.model_dump() for answer in found]


def verified(gateway: FakeGateway, body: dict[str, Any], **options: Any) -> dict[str, Any]:
    """Return the answer of ``verify`` to a body, with the fake gateway behind it."""

    async def run() -> dict[str, Any]:
        async with standing(gateway) as url:
            (answer,) = await answers(
                1, body, config(**{"server_url": url, "retry_s": 0, **options})
            )
            return answer

    return asyncio.run(run())


def served(settings: RewardModelResourcesServerConfig) -> RewardModelResourcesServer:
    return RewardModelResourcesServer(config=settings, server_client=MagicMock(spec=ServerClient))


def body(row: int = 0, reply: str = "a rose", **more: Any) -> dict[str, Any]:
    return {**ROWS[row], "response": said(reply), **more}


def test_reward_is_that_of_the_gateway() -> None:
    gateway = FakeGateway()
    answer = verified(gateway, body(reward_threshold=None))
    (asked,) = gateway.asked
    (prompt,) = asked["responses_create_params"]["input"]
    assert prompt["content"] == ROWS[0]["responses_create_params"]["input"][0]["content"]
    assert asked["response"]["output"][0]["content"][0]["text"] == "a rose"
    assert answer["reward"] == answer["raw_reward"] == 2.5
    assert answer["reward_components"] == {"help": 6, "length": -3.5}
    assert (answer["attribute/help"], answer["attribute/length"]) == (6, 7)
    assert (answer["truncated"], answer["contract_hash"]) == (True, "h")
    assert answer["reply_cut"] is True
    assert answer["instance_config"] == {"mask_sample": False}
    assert "_ng_failure_class" not in answer
    assert (answer["mask_sample"], answer["failure_kind"]) == (False, None)
    assert answer["response"]["output"][0]["content"][0]["text"] == "a rose"


def test_one_attribute_may_be_the_reward() -> None:
    answer = verified(FakeGateway(), body(), attribute="help")
    assert (answer["reward"], answer["reward_components"]) == (6, {})
    answer = verified(FakeGateway(), body(), attribute="kind")
    assert "attribute: got 'kind', wanted one of help, length" in answer["failure_reason"]
    assert answer["mask_sample"]


def test_token_ids_go_to_gym_and_not_to_the_gateway() -> None:
    """Each item repeats the token ids of its whole prompt, which soon exceeds any limit."""
    gateway, rollout = FakeGateway(), body()
    tokens = {"prompt_token_ids": [1, 2], "generation_token_ids": [3], "generation_log_probs": [0]}
    prompt, (reply,) = rollout["responses_create_params"]["input"], rollout["response"]["output"]
    turns = [{"type": "message", "role": "assistant", "content": "Hm.", **tokens}]
    asked = {**rollout["responses_create_params"], "input": [*prompt, *turns]}
    response = {**rollout["response"], "output": [{**reply, **tokens}]}
    answer = verified(gateway, {"responses_create_params": asked, "response": response})
    assert "token_ids" not in str(gateway.asked)
    assert "log_probs" not in str(gateway.asked)
    assert "Hm." in str(gateway.asked)
    assert answer["response"]["output"][0]["prompt_token_ids"] == [1, 2]
    assert answer["responses_create_params"]["input"][-1]["generation_token_ids"] == [3]
    text = {"responses_create_params": {"input": "What is red?"}, "response": response}
    assert verified(gateway, text)["reward"] == 2.5


def test_policy_that_was_cut_off_is_known_to_the_gateway() -> None:
    gateway = FakeGateway()
    details = {"incomplete_details": {"reason": "max_output_tokens"}, "status": "incomplete"}
    verified(gateway, {**ROWS[0], "response": {**said("a rose"), **details}})
    assert gateway.asked[0]["response"]["incomplete_details"] == details["incomplete_details"]


@pytest.mark.parametrize("config", [None, "text", {"mask_sample": True, "image": "x"}])
def test_flag_is_also_where_nemo_rl_reads_it(config: Any) -> None:
    """And a sample that gets a reward has no flag of an earlier time."""
    kept = {"image": "x"} if isinstance(config, dict) else {}
    for gateway, is_masked in (
        (FakeGateway(), False),
        (FakeGateway((200, failed("reward_model:refused_text", "no"))), True),
        (FakeGateway((413, "no")), True),
    ):
        answer = verified(gateway, body(instance_config=config))
        assert answer["instance_config"] == {**kept, "mask_sample": is_masked}
        assert answer["mask_sample"] is is_masked


@pytest.mark.parametrize(
    ("help", "threshold", "reward"),
    [(6, 6, 1.0), (6, 6.5, 0.0), (0.8999999761581421, 0.9, 1.0)],  # the last one is 0.9 in float32
)
def test_with_a_threshold_a_reward_is_enough_or_not(
    help: float, threshold: float, reward: float
) -> None:
    gateway = FakeGateway((200, {**SCORED, "attribute/help": help}))
    answer = verified(gateway, body(reward_threshold=threshold), attribute="help")
    assert (answer["reward"], answer["raw_reward"]) == (reward, help)
    assert answer["reward_components"] == {}


def test_reply_that_is_not_scored_is_the_policys_doing() -> None:
    gateway = FakeGateway((200, failed("reward_model:refused_text", "it ends so")))
    answer = verified(gateway, body(), refused_reward=-3.0)
    assert (answer["reward"], answer["mask_sample"]) == (-3.0, False)
    assert answer["failure_kind"] == "reward_model:refused_text"
    assert answer["failure_reason"] == "it ends so"
    assert verified(gateway, body())["mask_sample"]
    judged = verified(gateway, body(reward_threshold=-1), refused_reward=5.0)
    assert (judged["reward"], judged["mask_sample"]) == (0.0, False)


@pytest.mark.parametrize(
    ("options", "threshold", "components"),
    [
        ({"refused_reward": -3.0}, None, {"help": -1.5, "length": -1.5}),
        ({"refused_reward": -3.0, "attribute": "help"}, None, {}),
        ({"refused_reward": -3.0}, -1.0, {}),
        ({}, None, {}),
    ],
)
def test_components_share_the_reward_of_a_rejected_reply(
    options: dict[str, Any], threshold: float | None, components: dict[str, float]
) -> None:
    """NeMo RL fills in 0 for missing components, which is the best where others are negative."""
    names = {"reward_components": {"help": 0.0, "length": 0.0}}
    gateway = FakeGateway((200, {**failed("reward_model:refused_text", "it ends so"), **names}))
    answer = verified(gateway, body(reward_threshold=threshold), **options)
    assert answer["reward_components"] == components


@pytest.mark.parametrize(
    ("status", "said", "kind", "reason"),
    [
        (200, failed("verifier_error", "the prompt"), "verifier_error", "the prompt"),
        (200, failed("judge_failed", "the judge"), "judge_failed", "the judge"),
        (401, {"detail": "no token"}, "verifier_error", "HTTP 401: no token"),
        (404, {"error": "no"}, "verifier_error", "set server_url to the URL"),
        (413, "too large", "verifier_error", 'HTTP 413: "too large"'),
        (503, {"detail": "no"}, "provider_unavailable", "HTTP 503: no"),
        (200, {"rewards": []}, "verifier_error", "HTTP 200"),
    ],
)
def test_failure_of_the_gateway_masks_the_sample(
    status: int, said: Any, kind: str, reason: str
) -> None:
    answer = verified(FakeGateway((status, said)), body(reward_threshold=0.5), refused_reward=-3)
    assert (answer["reward"], answer["mask_sample"], answer["raw_reward"]) == (0.0, True, None)
    assert answer["failure_kind"] == kind
    assert reason in answer["failure_reason"]
    assert kind in FAILURE_KINDS
    # Gym stores a row with a class as a failure, and runs it again on resume.
    outage = None if kind == "verifier_error" else kind
    assert answer.get(NG_FAILURE_CLASS_KEY) == outage


def test_gateway_that_is_gone_masks_the_sample() -> None:
    answer = verified(FakeGateway(), body(), server_url="http://127.0.0.1:9")
    assert (answer["mask_sample"], answer["failure_kind"]) == (True, "transport_unreachable")
    assert answer[NG_FAILURE_CLASS_KEY] == "transport_unreachable"
    assert answer["reply_cut"] is None


def test_outage_has_its_class_in_the_answer_over_http() -> None:
    server = served(config(server_url="http://127.0.0.1:9", retry_s=0))
    with TestClient(server.setup_webserver()) as client:
        answer = client.post("/verify", json=body()).json()
    assert answer[NG_FAILURE_CLASS_KEY] == answer["failure_kind"] == "transport_unreachable"
    assert answer["instance_config"] == {"mask_sample": True}


@pytest.mark.parametrize(
    ("first", "times"),
    [
        ((413, {"detail": "no"}), 1),
        ((200, failed("verifier_error", "no")), 1),
        ((503, {"detail": "no"}), 2),
        ((200, failed("transport_unreachable", "no")), 2),
    ],
)
def test_only_what_is_gone_or_busy_is_asked_again(first: tuple[int, Any], times: int) -> None:
    gateway = FakeGateway(first, (200, SCORED))
    answer = verified(gateway, body(), retry_s=30)
    assert len(gateway.asked) == times
    assert answer["mask_sample"] == (times == 1)


def test_model_that_failed_is_an_error_and_no_masked_sample() -> None:
    """A run must not continue with a reward of 0 for every rollout."""
    for status in (500, 501):
        gateway = FakeGateway((status, {"detail": "the model's reward is not a finite number"}))
        with pytest.raises(FailedServerError, match=f"HTTP {status}: the model's reward is not"):
            verified(gateway, body(reward_threshold=0.5), refused_reward=-3.0, retry_s=30)
        assert len(gateway.asked) == 1


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("127.0.0.1:8000", "127.0.0.1:8000"),
        ("localhost:8000/", "localhost:8000"),
        ("me:s3cret@localhost:8000", "localhost:8000"),
        ("http://me:s3cret@", ""),
        ("http://me:s3cret@localhost:port", "localhost:port"),
        ("ftp://me:s3cret@localhost", "localhost"),
    ],
)
def test_url_that_is_none_is_an_error_without_its_password(url: str, shown: str) -> None:
    with pytest.raises(ValueError, match="server_url: got") as caught:
        verified(FakeGateway(), body(), server_url=url)
    assert str(caught.value) == (
        f"server_url: got {shown!r}, which is not an http or https URL with a host. Write it as "
        "http://HOST:PORT."
    )


def test_password_of_a_url_is_in_no_rollout() -> None:
    answer = verified(FakeGateway(), body(), server_url="http://me:s3cret@127.0.0.1:9/base/")
    assert answer["failure_reason"].startswith("http://127.0.0.1:9/base: Cannot connect")


def test_another_gateway_is_asked_where_one_is_gone() -> None:
    async def ask() -> list[float]:
        async with standing(FakeGateway()) as url:
            settings = config(server_url=["http://127.0.0.1:9", url], attribute="help")
            return [answer["reward"] for answer in await answers(4, body(), settings)]

    assert asyncio.run(ask()) == [6.0] * 4


def test_rewards_of_a_run_have_one_contract(caplog: pytest.LogCaptureFixture) -> None:
    """Rewards of two models would be mixed in a group while servers are updated."""
    weights, other = {"model_fingerprint": "new"}, {"contract_hash": "g"}
    bodies = [SCORED, failed("judge_failed", "no"), {**SCORED, **weights}, {**SCORED, **other}]

    async def ask() -> list[dict[str, Any]]:
        async with standing(FakeGateway(*((200, body) for body in bodies))) as url:
            server = served(config(server_url=url, retry_s=0))
            request = RewardModelVerifyRequest.model_validate(body())
            found = [(await server.verify(request)).model_dump() for _ in bodies]
            await server.close()
            return found

    found = asyncio.run(ask())
    kinds = [answer["failure_kind"] for answer in found]
    assert kinds == [None, "judge_failed", None, "provider_unavailable"]
    assert "got the scoring contract g, wanted h, that of the first" in found[3]["failure_reason"]
    assert [record.getMessage().partition(": ")[2] for record in caplog.records] == [
        "rewards now come from other weights (new) with the same scoring contract"
    ]


def test_every_route_of_a_resources_server_answers() -> None:
    server = served(config(server_url="http://127.0.0.1:9", retry_s=0))
    with TestClient(server.setup_webserver()) as client:
        answer = client.post("/verify", json={**ROWS[0], "response": {**said(), "output": []}})
        assert (answer.status_code, answer.json()["mask_sample"]) == (200, True)
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
        ({}, "server_url, model_path: set exactly one of them"),
        ({"server_url": "http://x", "model_path": "y"}, "set exactly one of them"),
        ({"server_url": "http://x", "clip": [0, 1]}, "clip: set them only together"),
        ({"model_path": "x", "num_workers": 2}, "num_workers"),
        ({"model_path": "x", "reward_mean": 1, "reward_std": 1}, "normalize_rewards: true"),
        ({"model_path": "x", "normalize_rewards": True, "reward_std": 1}, "set both or none"),
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
    assert answer["failure_reason"].endswith("ended with exit code 3; see its output")
