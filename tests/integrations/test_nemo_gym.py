"""NeMo Gym runs the resources server, and gets the rewards of the scorer."""

from __future__ import annotations

import asyncio
import contextlib
import json
import shutil
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from nemo_aligner.integrations.nemo_gym.__main__ import drop_in
from nemo_aligner.integrations.nemo_gym.reward_model import reward_server
from nemo_aligner.integrations.nemo_gym.reward_model.reward_server import (
    RewardServerError,
    RewardServers,
)
from nemo_aligner.serving import failures
from nemo_aligner.serving.engine.scorer import RewardScorer
from nemo_aligner.utils.errors import ConfigError
from tests.integrations import gym

QUESTION = "what is the river"
AGENT = "clients/simple_agent.py"
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


def test_its_own_tests_pass_in_gym_and_the_simple_agent_ends_its_rollouts_at_a_gateway(
    python: Path, folder: Path, server: str, gateway: str
) -> None:
    agent = shutil.copy(Path(__file__).parent / AGENT, folder)  # out of reach of our conftest.py
    tests = ["resources_servers/reward_model", agent]
    urls = {"GATEWAY": gateway, "REWARD_SERVER": server}
    done = gym.run(python, folder, "-m", "pytest", "-q", *tests, **urls)
    assert done.returncode == 0, done.stdout[-4000:]
    assert " passed" in done.stdout.splitlines()[-1]


@pytest.mark.parametrize(
    ("status", "kind", "times"),
    [(500, "verifier_error", 1), (404, "verifier_error", 1), (503, "provider_unavailable", 2)],
)
def test_only_servers_that_are_gone_or_busy_are_asked_again(
    status: int, kind: str, times: int
) -> None:
    asked = []

    async def infer(request: web.Request) -> web.Response:
        asked.append(request.path)
        return web.json_response({"error": "row 0: no"}, status=status)

    async def score() -> str:
        app = web.Application()
        app.router.add_post("/v2/models/reward_model/infer", infer)
        async with TestServer(app) as server:
            servers = RewardServers([str(server.make_url("/"))], None, 10, retry_s=0.2)
            with pytest.raises(RewardServerError) as caught:
                await servers.score({"messages": [{"role": "assistant", "content": "a"}]})
            await servers.close()
        return caught.value.kind

    assert asyncio.run(score()) == kind
    assert len(asked) == times


def test_its_copy_of_the_failure_table_is_right() -> None:
    """It cannot import the table: in Gym's environment this package is not installed."""
    retried = [kind for kind in failures.FailureKind if kind.reaction == "retry"]
    statuses = {status for kind in retried for status in (kind.status, *kind.aliases)}
    assert set(reward_server._UNAVAILABLE) == statuses
    for text in ("row 3: empty", "sentences, row 3: empty", "a row 3: empty", "row: empty"):
        assert bool(reward_server._ROW.match(text)) == bool(failures._ROW.match(text)), text


CLIP = "shaping.clip=[1.4, 1.6]"


def servers_that_clip() -> list[int]:
    """Those that were started with the setting of the test."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):  # it has ended
            if CLIP.encode() in path.read_bytes():
                found.append(int(path.parent.name))
    return found


def test_gym_gets_shaped_rewards_of_a_model_that_it_serves(
    python: Path, folder: Path, reward_model: Path, scorer: RewardScorer
) -> None:
    pytest.importorskip("pytriton")
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
    wanted = scorer.score(texts)[:, 0].clip(1.4, 1.6)
    np.testing.assert_allclose([answer["reward"] for answer in answers], wanted, atol=1e-5)
    assert (enough["reward"], enough["raw_reward"]) == (1.0, answers[0]["reward"])
    assert (refused["failure_kind"], refused["mask_sample"]) == (REFUSED, True)
    assert "messages[1].content: got '<|im_end|>'" in refused["failure_reason"]
    end = time.monotonic() + 60
    while servers_that_clip() and time.monotonic() < end:
        time.sleep(0.2)
    assert servers_that_clip() == []


def test_it_is_dropped_into_a_checkout_of_gym_once(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="wanted NeMo Gym's checkout"):
        drop_in(tmp_path)
    (tmp_path / "resources_servers").mkdir()
    target = drop_in(tmp_path)
    assert target == tmp_path / "resources_servers" / "reward_model"
    names = {path.relative_to(target).as_posix() for path in target.rglob("*") if path.is_file()}
    assert {"app.py", "configs/reward_model.yaml", "data/example.jsonl", "README.md"} <= names
    rows = [json.loads(line) for line in (target / "data/example.jsonl").open()]
    assert all(row["responses_create_params"]["input"] for row in rows)
    with pytest.raises(ConfigError, match="is there already"):
        drop_in(tmp_path)
