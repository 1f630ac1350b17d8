"""Run by pytest in NeMo Gym's environment: its simple_agent and comparison strategy with a gateway.

The gateway is the resources server; ``GATEWAY`` is its URL. The policy is a server in this process,
which replies what the prompt asks for.
"""

from __future__ import annotations

import asyncio
import json
import os
import socket
from contextlib import asynccontextmanager
from urllib.parse import urlsplit

import httpx
import pytest
import uvicorn
from fastapi import FastAPI, Request
from nemo_gym.config_types import BaseServerConfig
from nemo_gym.server_utils import ServerClient
from omegaconf import OmegaConf
from resources_servers.genrm_compare.comparison_strategies import (
    GenRMStrategy,
    GenRMStrategyConfig,
)
from resources_servers.reward_model.app import (
    RewardModelResourcesServer,
    RewardModelResourcesServerConfig,
    RewardModelVerifyRequest,
)
from responses_api_agents.simple_agent.app import SimpleAgent, SimpleAgentConfig

MASKED = {
    "call": "reward_model:refused_text",
    "no": "verifier_error",
    "mark": "reward_model:refused_text",
}
MASKED |= {"thoughts": "reward_model:refused_text", "<|im_end|>": "verifier_error"}


def message(*parts):
    return {
        "id": "m", "type": "message", "role": "assistant", "status": "completed", "content": parts
    }  # fmt: skip


def text(said):
    return message({"type": "output_text", "text": said, "annotations": []})


SAID = {
    "plain": [text("thank you")],
    "call": [{"type": "function_call", "name": "look", "call_id": "c", "arguments": "{}"}],
    "no": [message({"type": "refusal", "refusal": "no"})],
    "mark": [text("yes <|im_end|>")],
    "thoughts": [{"type": "reasoning", "id": "t", "summary": []}],
    "<|im_end|>": [text("thank you")],
}


def policy():
    app = FastAPI()

    async def respond(request: Request):
        body = await request.json()
        asked = body["input"][0]["content"]
        return {
            "id": "r", "created_at": 0, "model": "policy", "object": "response",
            "output": SAID[asked], "parallel_tool_calls": True, "tool_choice": "auto", "tools": [],
        }  # fmt: skip

    for path in ("/v1/responses", "/ng-rollout/{rollout}/v1/responses"):
        app.post(path)(respond)
    return app


def free_port():
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


@asynccontextmanager
async def listening(app, port):
    server = uvicorn.Server(uvicorn.Config(app, port=port, log_level="warning"))
    serving = asyncio.create_task(server._serve())  # serve() would handle signals in this thread
    while not server.started:
        assert not serving.done()
        await asyncio.sleep(0.05)
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        server.should_exit = True
        await serving


def client_of(ports, observes=False):
    """Create Gym's client for the gateway, a policy and an agent."""
    gateway = urlsplit(os.environ["GATEWAY"])
    places = {
        "gateway": ("resources_servers", gateway.hostname, gateway.port),
        "policy": ("responses_api_models", "127.0.0.1", ports[0]),
        "agent": ("responses_api_agents", "127.0.0.1", ports[1]),
    }
    served = {
        name: {kind: {name: {"entrypoint": "app.py", "host": host, "port": port}}}
        for name, (kind, host, port) in places.items()
    }
    return ServerClient(
        head_server_config=BaseServerConfig(host="127.0.0.1", port=ports[1]),
        global_config_dict=OmegaConf.create({**served, "observability_enabled": observes}),
    )


def agent(ports, observes):
    config = SimpleAgentConfig(
        **{"name": "agent", "entrypoint": "app.py", "host": "127.0.0.1", "port": ports[1]},
        resources_server={"type": "resources_servers", "name": "gateway"},
        model_server={"type": "responses_api_models", "name": "policy"},
        max_steps=2,
    )
    return SimpleAgent(config=config, server_client=client_of(ports, observes))


async def verified(rollouts):
    """Verify the same rollouts with this project's resources server, run by Gym."""
    own = RewardModelResourcesServerConfig(
        **{"name": "reward_model", "entrypoint": "app.py", "host": "127.0.0.1", "port": 1},
        **{"domain": "rlhf", "server_url": os.environ["GATEWAY"]},
    )
    client = ServerClient(
        head_server_config=BaseServerConfig(host="127.0.0.1", port=1),
        global_config_dict=OmegaConf.create({}),
    )
    server = RewardModelResourcesServer(config=own, server_client=client)
    found = [await server.verify(RewardModelVerifyRequest.model_validate(r)) for r in rollouts]
    await server.close()
    return found


async def run_all(observes):
    """Run all rollouts; return the agent's answer to each, and the metrics of all."""
    ports = free_port(), free_port()
    app, rollouts = agent(ports, observes).setup_webserver(), []
    async with (
        listening(policy(), ports[0]),
        listening(app, ports[1]) as url,
        httpx.AsyncClient(base_url=url, timeout=60) as client,
    ):
        for number, asked in enumerate(SAID):
            row = {"responses_create_params": {"input": [{"role": "user", "content": asked}]}}
            indices = {"_ng_task_index": number, "_ng_rollout_index": 0}
            done = await client.post("/run", json=row | indices)
            assert done.status_code == 200, (asked, done.text)
            rollouts.append(done.json() | indices)
        answer = await client.post("/aggregate_metrics", json={"verify_responses": rollouts})
        assert answer.status_code == 200, answer.text
    return rollouts, answer.json()["agent_metrics"]


def check(rollouts, metrics, verified):
    found = {
        asked: each["failure_kind"] if each["mask_sample"] else None
        for asked, each in zip(SAID, rollouts, strict=True)
    }
    assert found == {"plain": None} | MASKED
    for rollout, own in zip(rollouts, verified, strict=True):
        got = rollout["mask_sample"], rollout["failure_kind"]
        assert got == (own.mask_sample, own.failure_kind), rollout
        # NeMo RL reads the flag here.
        assert rollout["instance_config"] == own.instance_config == {"mask_sample": got[0]}
        assert rollout["reply_cut"] is own.reply_cut is False
        assert rollout["reward"] == pytest.approx(own.reward, abs=1e-5)
    assert metrics["mean/reward"] == pytest.approx(rollouts[0]["reward"])
    assert metrics["coverage/masked_rollouts"] == len(MASKED)


async def compare():
    """Replies to one prompt get the same rewards from Gym's strategy as their rollouts."""
    asked = [{"role": "user", "content": "plain"}]
    replies = [{"output": [text(said)]} for said in ("thank you", "a rose is red")]
    own = {"genrm_compare_server_name": "gateway"}
    strategy = GenRMStrategy(GenRMStrategyConfig(**own))
    client = client_of((free_port(), free_port()))
    rewards, metrics = await strategy.compare(asked, replies, client)
    kept = {
        "id": "r", "created_at": 0, "model": "policy", "object": "response",
        "parallel_tool_calls": True, "tool_choice": "auto", "tools": [],
    }  # fmt: skip
    params = {"responses_create_params": {"input": asked}}
    rollouts = [{**params, "response": kept | reply} for reply in replies]
    alone = await verified(json.loads(json.dumps(rollouts)))
    assert rewards == pytest.approx([each.reward for each in alone], abs=1e-5)
    assert metrics["mean_individual_score"] == pytest.approx(sum(rewards) / 2)


def test_rollouts_of_the_agent_end_and_are_masked_as_gyms_own_server_masks_them(monkeypatch):
    # What Gym configures for each of its servers.
    head = {"head_server": {"host": "127.0.0.1", "port": 1}}
    monkeypatch.setenv("NEMO_GYM_CONFIG_DICT", json.dumps(head))

    async def run():
        for observes in (False, True):
            rollouts, metrics = await run_all(observes)
            check(rollouts, metrics, await verified(rollouts))
        await compare()

    asyncio.run(run())  # Gym has one client for all, which is bound to an event loop
