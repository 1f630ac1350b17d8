"""A tiny reward model behind a server and a gateway, for all tests of this folder."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from nemo_aligner.serving.engine.scorer import RewardScorer, load_scorer
from tests.harness import tiny
from tests.harness.once import Once
from tests.serving import servers
from tests.serving.client.misbehaving import Misbehaving
from tests.serving.servers import FAKE, QUICK, SERVE, running


def write_models(folder: Path) -> None:
    tiny.write_reward_nemo(folder / "rm.nemo")
    tiny.write_hf_checkpoint(folder / "policy")


@pytest.fixture(scope="session")
def reward_model(once: Once) -> Path:
    """A reward model with the attributes helpfulness and verbosity."""
    return once("integrations", write_models) / "rm.nemo"


@pytest.fixture(scope="session")
def policy(reward_model: Path) -> Path:
    """A policy with the tokenizer of the reward model."""
    return reward_model.parent / "policy"


@pytest.fixture(scope="module")
def scorer(reward_model: Path, layout: Any) -> RewardScorer:
    return load_scorer(reward_model, layout)


@pytest.fixture(scope="session")
def server(reward_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    settings = [f"rm_model_file={reward_model}", "server.port=0"]
    with running(tmp_path_factory.mktemp("server"), SERVE, *settings) as started:
        yield started.url


@pytest.fixture(scope="session")
def gateway(server: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    pytest.importorskip("uvicorn")
    folder = tmp_path_factory.mktemp("gateway")
    with servers.gateway(folder, f"backends=[{server}]") as started:
        yield started.url


@pytest.fixture
def lone() -> Iterator[Misbehaving]:
    """A server in this process, which listens."""
    server = Misbehaving().come()
    yield server
    server.go()


@pytest.fixture(scope="session")
def fake_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The URL of a server whose rewards are sums of characters."""
    with running(tmp_path_factory.mktemp("fake"), FAKE, *QUICK) as started:
        yield started.url
