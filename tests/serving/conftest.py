"""Servers with a fake scorer or of this process, and clients, for the tests of this folder."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests import tiny
from tests.serving.client.misbehaving import Misbehaving
from tests.serving.servers import FAKE, QUICK, Server, running


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    pytest.importorskip("pytriton")
    folder = tmp_path_factory.mktemp("server")
    # The delay gathers what the tests send side by side into one batch.
    with running(folder, FAKE, *QUICK, "max_batch_size=32") as started:
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


@pytest.fixture(scope="module")
def scorer_and_path(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple]:
    """A tiny reward model in this process, and its archive."""
    import torch

    from nemo_aligner.checkpoint.nemo.reward_model import load_pretrained, save_reward_model
    from nemo_aligner.config.common import Overlong, Precision, RewardModelType
    from nemo_aligner.config.data import DataConfig, RegressionConfig
    from nemo_aligner.config.model import ModelConfig
    from nemo_aligner.parallel.launch import launch
    from nemo_aligner.parallel.layout import destroy_layout, initialize_layout
    from nemo_aligner.scoring.scorer import load_scorer
    from nemo_aligner.text.contract_settings import build_contract

    folder = tmp_path_factory.mktemp("model")
    config = ModelConfig(
        reward_model_type=RewardModelType.regression,
        regression=RegressionConfig(attributes=["helpfulness", "verbosity"]),
        data=DataConfig(seq_length=64, overlong=Overlong.truncate_left),
    )
    with launch():
        layout = initialize_layout()
        base = load_pretrained(
            tiny.write_base_nemo(folder / "base.nemo"),
            layout,
            num_attributes=2,
            precision=Precision.fp32,
        )
        torch.nn.init.normal_(base.model.rm_head.weight, std=0.05)
        contract = build_contract(config, base.tokenizer, Precision.fp32)
        contract = contract.with_label_means([1.5, 2.5])
        path = folder / "rm.nemo"
        save_reward_model(path, base.model, base.config, base.tokenizer, contract)
        yield load_scorer(path, layout, micro_batch_tokens=128), path
        destroy_layout()


@pytest.fixture
def servers() -> Iterator[list[Misbehaving]]:
    """Three of this process that are not there yet; each goes in the end."""
    made = [Misbehaving() for _ in range(3)]
    yield made
    for each in made:
        each.go()


@pytest.fixture
def lone(servers: list[Misbehaving]) -> Misbehaving:
    return servers[0].come()
