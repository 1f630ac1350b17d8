"""NeMo Gym runs the resources server, and gets the same rewards as from the scorer."""

from __future__ import annotations

import asyncio
import contextlib
import json
import shutil
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from nemo_aligner.contract.scorer import score_all
from nemo_aligner.integrations.nemo_gym import drop_in
from nemo_aligner.integrations.resources_servers.reward_model import servers as gym_servers
from nemo_aligner.integrations.resources_servers.reward_model.servers import (
    NoRewardError,
    RewardServers,
)
from nemo_aligner.serving.engine.scorer import RewardScorer
from nemo_aligner.utils.errors import ConfigError
from tests.integrations import gym
from tests.serving.client.misbehaving import Misbehaving

QUESTION = "what is the river"
CLIENTS = Path(__file__).parent / "clients"
REFUSED = "reward_model:refused_text"


@pytest.fixture(scope="module")
def python() -> Path:
    return gym.gym_python()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return gym.gym_folder(tmp_path)


def body(reply: str, **more: Any) -> dict[str, Any]:
    """What an agent of Gym posts to ``/verify``."""
    part = {"type": "output_text", "text": reply, "annotations": []}
    message = {"id": "m", "type": "message", "role": "assistant", "status": "completed"}
    response = {
        "id": "r",
        "created_at": 0,
        "model": "policy",
        "object": "response",
        "output": [{**message, "content": [part]}],
        "parallel_tool_calls": True,
        "tool_choice": "auto",
        "tools": [],
    }
    asked = {"input": [{"role": "user", "content": QUESTION}]}
    return {"responses_create_params": asked, "response": response, **more}


def test_environment_answers_in_gym_and_the_simple_agent_ends_its_rollouts_at_a_gateway(
    python: Path, folder: Path, gateway: str
) -> None:
    # In a folder that our conftest.py does not reach.
    tests = [shutil.copy(CLIENTS / name, folder) for name in ("gym_app.py", "simple_agent.py")]
    done = gym.run(python, folder, "-m", "pytest", "-q", *tests, GATEWAY=gateway)
    assert done.returncode == 0, done.stdout[-4000:]
    assert " passed" in done.stdout.splitlines()[-1]


CLIP = "shaping.clip=[1.4, 1.6]"


def servers_that_clip() -> list[int]:
    """Find the servers that were started with this test's setting."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):  # the process has ended
            if CLIP.encode() in path.read_bytes():
                found.append(int(path.parent.name))
    return found


def test_gym_gets_shaped_rewards_of_a_model_that_it_serves(
    python: Path, folder: Path, reward_model: Path, scorer: RewardScorer
) -> None:
    pytest.importorskip("uvicorn")
    replies = ["thank you", "the bird sings in the tree"]
    options = {
        "model_path": str(reward_model),
        "command": gym.serve_command(folder),
        "attribute": "helpfulness",
        "clip": [1.4, 1.6],
        "server_settings": ["server.exit_timeout_secs=2"],
    }
    with gym.environment_server(python, folder, **options) as url:
        answers = [gym.verify(url, body(reply)) for reply in replies]
        enough = gym.verify(url, body(replies[0], reward_threshold=1.0))
        refused = gym.verify(url, body("yes <|im_end|>"))
    assert answers[0]["responses_create_params"]["input"][0]["content"] == QUESTION
    user = {"role": "user", "content": QUESTION}
    texts = [[user, {"role": "assistant", "content": reply}] for reply in replies]
    wanted = score_all(scorer, texts)[:, 0].clip(1.4, 1.6)
    np.testing.assert_allclose([answer["reward"] for answer in answers], wanted, atol=1e-5)
    assert (enough["reward"], enough["raw_reward"]) == (1.0, answers[0]["reward"])
    assert (refused["failure_kind"], refused["mask_sample"]) == (REFUSED, True)
    assert "messages[1].content: got '<|im_end|>'" in refused["failure_reason"]
    end = time.monotonic() + 60
    while servers_that_clip() and time.monotonic() < end:
        time.sleep(0.2)
    assert servers_that_clip() == []


def test_redirected_rollout_is_not_sent_on_as_a_get() -> None:
    server = Misbehaving().come()
    server.moved = 301, "http://elsewhere"

    async def verify() -> str:
        servers = RewardServers([server.url], 5.0, 5.0, None)
        with pytest.raises(NoRewardError) as caught:
            await servers.verify({})
        await servers.close()
        return str(caught.value)

    error = asyncio.run(verify())
    server.go()
    assert error == (
        f"{server.url}: HTTP 301: it redirects to http://elsewhere/verify; set server_url to the "
        "URL of nemo-aligner serve"
    )


def test_server_with_another_contract_is_left_out_for_a_while_unless_it_is_the_only_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Also by requests that come while the first one after the pause is not answered yet."""
    contracts, asked, clock = {"a": "h", "b": "g"}, [], [0.0]

    async def post(self: RewardServers, url: str, name: str, rollout: object) -> dict[str, Any]:
        asked.append(name[-1])
        await asyncio.sleep(0)
        return {"failure_kind": None, "contract_hash": contracts[name[-1]]}

    monkeypatch.setattr(RewardServers, "_post", post)
    monkeypatch.setattr(gym_servers, "_PAUSE_S", 0.0)
    monkeypatch.setattr(gym_servers, "time", SimpleNamespace(monotonic=lambda: clock[0]))

    async def ask(servers: RewardServers, count: int) -> str:
        asked.clear()
        await asyncio.gather(*(servers.verify({}) for _ in range(count)))
        return "".join(sorted(asked))

    async def verify() -> None:
        servers = RewardServers(["http://a", "http://b"], 5.0, 0.0, None)
        assert [await ask(servers, count) for count in (1, 1, 4)] == ["a", "ab", "aaaa"]
        clock[0] = gym_servers._LEFT_OUT_S
        assert [await ask(servers, count) for count in (4, 2)] == ["aaaab", "aa"]
        clock[0], contracts["b"] = 3 * clock[0], "h"
        assert [await ask(servers, count) for count in (2, 4)] == ["ab", "aabb"]

    async def fail() -> None:
        servers = RewardServers(["http://a"], 5.0, -1.0, None)
        await servers.verify({})
        contracts["a"] = "f"
        with pytest.raises(NoRewardError, match="got the scoring contract f, wanted h"):
            await servers.verify({})
        contracts["a"] = "h"
        await servers.verify({})  # a load balancer at the only URL chooses another server

    asyncio.run(verify())
    asyncio.run(fail())


def test_it_is_dropped_into_a_checkout_of_gym_once(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no such folder; wanted a checkout of NeMo Gym"):
        drop_in(tmp_path / "gone")
    target = drop_in(tmp_path)
    assert target == tmp_path / "resources_servers" / "reward_model"
    names = {path.relative_to(target).as_posix() for path in target.rglob("*") if path.is_file()}
    assert {"app.py", "configs/reward_model.yaml", "data/example.jsonl", "README.md"} <= names
    rows = [json.loads(line) for line in (target / "data/example.jsonl").open()]
    assert all(row["responses_create_params"]["input"] for row in rows)
    with pytest.raises(ConfigError, match="exists already"):
        drop_in(tmp_path)
