"""Fixtures of this folder: servers with a fake scorer, with a tiny model, or in this process.

Session fixtures are only queried. Tests that stop or kill a server start one themselves.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from nemo_aligner.config.common import Overlong
from tests.harness import tiny
from tests.harness.once import Once
from tests.serving.client.misbehaving import Misbehaving
from tests.serving.servers import FAKE, QUICK, SERVE, Server, running

MAX_ROWS = 16  # most rows of a request to the model's server


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server process around a fake scorer."""
    folder = tmp_path_factory.mktemp("server")
    with running(folder, FAKE, *QUICK, "max_batch_size=32") as started:
        yield started
        assert started.stop() == [0], started.output()[-3000:]
        started.assert_nothing_is_left()
        assert not (folder / "ready").exists()


@pytest.fixture(scope="session")
def archive(once: Once) -> Path:
    """The archive of a tiny reward model with two attributes."""

    def build(folder: Path) -> None:
        tiny.write_reward_nemo(folder / "rm.nemo", seq_length=64, overlong=Overlong.truncate_left)

    return once("served_model", build) / "rm.nemo"


@pytest.fixture(scope="session")
def model_server(archive: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server process of that model."""
    settings = [
        f"rm_model_file={archive}",
        "server.port=0",
        "model.micro_batch_tokens=512",
        f"server.max_batch_size={MAX_ROWS}",
        "server.report_every_secs=2",
    ]
    with running(tmp_path_factory.mktemp("model_server"), SERVE, *settings) as started:
        yield started
        assert started.stop() == [0], started.output()[-3000:]
        started.assert_nothing_is_left()


@pytest.fixture(scope="module")
def scorer(archive: Path, layout: Any) -> Any:
    """A scorer of that model in this process."""
    from nemo_aligner.serving.engine.scorer import load_scorer

    return load_scorer(archive, layout, micro_batch_tokens=128)


@pytest.fixture
def servers() -> Iterator[list[Misbehaving]]:
    """Three servers of this process that do not listen yet; all are stopped at the end."""
    made = [Misbehaving() for _ in range(3)]
    yield made
    for each in made:
        each.go()


@pytest.fixture
def lone(servers: list[Misbehaving]) -> Misbehaving:
    return servers[0].come()
