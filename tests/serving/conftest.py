"""A server with a fake scorer, and clients of it, for the tests of this folder."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.serving.servers import FAKE, QUICK, Server, running


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    pytest.importorskip("pytriton")
    folder = tmp_path_factory.mktemp("server")
    # The delay gathers what the tests send side by side into one batch.
    with running(
        folder, FAKE, *QUICK, "max_queue_delay_microseconds=100000", "max_batch_size=32"
    ) as started:
        yield started
        assert started.stop() == [0], started.output()[-3000:]
        started.assert_nothing_is_left()
        assert not (folder / "ready").exists()


@pytest.fixture(scope="module")
def client(server):
    from nemo_aligner.serving.client.reward import RewardClient

    with RewardClient(server.url, timeout_s=30, wait_s=30) as client:
        yield client


@pytest.fixture(scope="module")
def old_client(server):
    from pytriton.client import FuturesModelClient

    with FuturesModelClient(
        server.url, "reward_model", init_timeout_s=60, inference_timeout_s=60
    ) as client:
        yield client
