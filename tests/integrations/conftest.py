"""A tiny reward model behind a server and its gateway, for all tests of this folder."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from nemo_aligner.scoring.scorer import RewardScorer, load_scorer
from tests import tiny
from tests.once import Once
from tests.serving import servers

SERVE = "examples/serve_reward_model.py"


def write_models(folder: Path) -> None:
    tiny.write_reward_nemo(folder / "rm.nemo")
    tiny.write_hf_checkpoint(folder / "policy")


@pytest.fixture(scope="session")
def reward_model(once: Once) -> Path:
    """With the attributes helpfulness and verbosity."""
    return once("integrations", write_models) / "rm.nemo"


@pytest.fixture(scope="session")
def policy(reward_model: Path) -> Path:
    """With the tokenizer of the reward model."""
    return reward_model.parent / "policy"


@pytest.fixture(scope="module")
def scorer(reward_model: Path, layout: Any) -> RewardScorer:
    return load_scorer(reward_model, layout)


@pytest.fixture(scope="session")
def server(reward_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    pytest.importorskip("pytriton")
    settings = [f"rm_model_file={reward_model}", "server.port=0"]
    with servers.running(tmp_path_factory.mktemp("server"), SERVE, *settings) as started:
        yield started.url


@pytest.fixture(scope="session")
def gateway(server: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    pytest.importorskip("uvicorn")
    with servers.gateway(tmp_path_factory.mktemp("gateway"), f"backends=[{server}]") as started:
        yield started.url
