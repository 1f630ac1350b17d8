"""NeMo Gym runs the resources server, and gets the rewards of the scorer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from nemo_aligner.integrations.nemo_gym.__main__ import drop_in
from nemo_aligner.scoring.scorer import RewardScorer, load_scorer
from tests import tiny
from tests.integrations import gym
from tests.serving.servers import FAKE, QUICK, running

QUESTION = "what is the river"


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


@pytest.mark.slow(seconds=10)
def test_its_own_tests_pass_in_gym(python: Path, folder: Path) -> None:
    done = gym.run(python, folder, "-m", "pytest", "-q", "resources_servers/reward_model")
    assert done.returncode == 0, done.stdout[-4000:]
    assert " passed" in done.stdout.splitlines()[-1]


@pytest.mark.slow(seconds=20)
def test_gym_gets_the_rewards_of_running_servers(python: Path, folder: Path) -> None:
    pytest.importorskip("pytriton")
    with running(folder, FAKE, *QUICK) as server:
        options = {"server_url": server.url, "attribute": "sum", "retry_s": 0}
        with gym.environment_server(python, folder, **options) as url:
            scored = gym.verify(url, body("a rose", reward_threshold=10))
            assert scored["reward"] == sum(map(ord, QUESTION + "a rose"))
            assert (scored["passed"], scored["mask_sample"]) == (True, False)
            assert scored["responses_create_params"]["input"][0]["content"] == QUESTION
            failed = gym.verify(url, body("", responses_create_params={"input": "\u029a"}))
            assert failed["failure_kind"] == "verifier_error", failed
            server.stop()
            gone = gym.verify(url, body("a rose"))
    assert (gone["mask_sample"], gone["reward"]) == (True, 0.0)
    assert gone["failure_kind"] == "transport_unreachable"


@pytest.fixture(scope="module")
def reward_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.write_reward_nemo(tmp_path_factory.mktemp("model") / "rm.nemo")


@pytest.fixture(scope="module")
def scorer(reward_model: Path, layout: Any) -> RewardScorer:
    return load_scorer(reward_model, layout)


@pytest.mark.slow(seconds=20)
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
    }
    with gym.environment_server(python, folder, **options) as url:
        answers = [gym.verify(url, body(reply)) for reply in replies]
        refused = gym.verify(url, body("yes <|im_end|>"))
    user = {"role": "user", "content": QUESTION}
    texts = [[user, {"role": "assistant", "content": reply}] for reply in replies]
    wanted = scorer.score(texts)[:, 0].clip(1.4, 1.6)
    np.testing.assert_allclose([answer["reward"] for answer in answers], wanted, atol=1e-5)
    assert (refused["failure_kind"], refused["mask_sample"]) == ("reward_model:refused", False)
    assert "message 2 ends with '<|im_end|>'" in refused["failure_reason"]


def test_it_is_dropped_into_a_checkout_of_gym_once(tmp_path: Path) -> None:
    target = drop_in(tmp_path)
    assert target == tmp_path / "resources_servers" / "reward_model"
    names = {path.relative_to(target).as_posix() for path in target.rglob("*") if path.is_file()}
    assert {"app.py", "configs/reward_model.yaml", "data/example.jsonl", "README.md"} <= names
    rows = [json.loads(line) for line in (target / "data/example.jsonl").open()]
    assert all(row["responses_create_params"]["input"] for row in rows)
    with pytest.raises(FileExistsError):
        drop_in(tmp_path)
