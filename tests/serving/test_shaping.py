"""Shaped rewards over HTTP: what they are made of stands beside, and the contract says how."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest
import torch

from nemo_aligner.checkpoint.nemo.reward_model import load_reward_model, save_reward_model
from nemo_aligner.config.gateway import GatewayConfig
from nemo_aligner.errors import ServingError
from nemo_aligner.integrations.in_process import InProcessScorer
from nemo_aligner.readout import Readout
from nemo_aligner.scoring.scorer import RewardScorer, load_scorer
from nemo_aligner.serving.client import RewardClient
from tests.serving.gateway_calls import call
from tests.serving.servers import SERVE, running

CHAT = [
    {"role": "user", "content": "What is red?"},
    {"role": "assistant", "content": "river stone river stone"},
]
TEXTS: list = ["river", "river stone river stone river", CHAT]
PENALTY, FREE = 0.25, 2


def write_other(archive: Path, target: Path, scorer: RewardScorer) -> Path:
    """The same model with a head of its own."""
    other = load_reward_model(archive, scorer._layout)
    torch.nn.init.normal_(other.model.rm_head.weight, std=0.05)
    save_reward_model(target, other.model, other.config, other.tokenizer, other.contract)
    return target


def test_shaped_reward_has_its_parts_and_a_client_of_the_plain_model_is_refused(
    scorer: RewardScorer, archive: Path, tmp_path: Path
) -> None:
    pytest.importorskip("pytriton")
    other = write_other(archive, tmp_path / "other.nemo", scorer)
    settings = [
        f"rm_model_file={archive}",
        f"ensemble.files=[{other}]",
        "ensemble.combine=lower_bound",
        "ensemble.k=2",
        "shaping.attribute_weights={helpfulness: 1.0, verbosity: -0.5}",
        f"shaping.length_penalty={PENALTY}",
        f"shaping.length_penalty_from={FREE}",
        "shaping.threshold=0.0",
        "server.port=0",
        "model.micro_batch_tokens=128",
    ]
    with running(tmp_path, SERVE, *settings) as server, RewardClient(server.url) as client:
        scored = client.score_rows([*TEXTS, ""])
        assert client.contract().attributes == ("reward",)
        with (
            RewardClient(server.url, expect=scorer.contract) as plain,
            pytest.raises(ServingError, match="shaping: None"),
        ):
            plain.score(TEXTS)
    second = load_scorer(other, scorer._layout, micro_batch_tokens=128)
    raw = np.stack([scorer.score(TEXTS), second.score(TEXTS)], axis=1).astype(float)
    merged = raw @ [1.0, -0.5]
    beyond = np.clip(np.array(scorer.count_reply_tokens(TEXTS)) - FREE, 0, None)
    wanted = merged.mean(1) - 2 * merged.std(1) - PENALTY * beyond
    close = {"rtol": 0, "atol": 1e-4}
    assert scored.raw_rewards is not None
    np.testing.assert_allclose(scored.raw_rewards[:3], raw.reshape(3, 4), **close)
    assert scored.deviation is not None
    np.testing.assert_allclose(scored.deviation[:3, 0], merged.std(1), **close)
    np.testing.assert_allclose(scored.rewards[:3, 0], wanted, **close)
    assert scored.passed is not None
    assert scored.passed[:3].tolist() == (scored.rewards[:3, 0] >= 0).tolist()
    # A row that is refused has none of them.
    assert scored.errors == {3: "the text has no tokens: it is empty"}
    for each in (scored.rewards, scored.raw_rewards, scored.deviation, scored.passed):
        assert np.isnan(each[3]).all()


def test_uncertainty_over_http_is_that_in_process_and_can_be_taken_off(
    scorer: RewardScorer, archive: Path, tmp_path: Path
) -> None:
    """Of a head with two bins for one attribute, read by the same rule everywhere."""
    pytest.importorskip("pytriton")
    pytest.importorskip("fastapi")
    from nemo_aligner.serving.transports.http import build_app
    from nemo_aligner.serving.wire.protocols import ROUTES

    loaded = load_reward_model(archive, scorer._layout)
    contract = dataclasses.replace(
        loaded.contract,
        attributes=("help",),
        attribute_weights=(1.0,),
        label_means=(0.0,),
        readout=Readout("bins", ((0.0, 4.0),)).to_json(),
    )
    binned = tmp_path / "binned.nemo"
    save_reward_model(binned, loaded.model, loaded.config, loaded.tokenizer, contract)
    own = load_scorer(binned, scorer._layout, micro_batch_tokens=128)
    rewards, spreads = own.score_and_spread(TEXTS)
    assert spreads is not None
    assert len(np.unique(spreads)) == len(TEXTS)
    in_process = InProcessScorer(own).score_rows([*TEXTS, ""])
    settings = ["server.port=0", "model.micro_batch_tokens=128", "shaping.spread_penalty=0.5"]
    with (
        running(tmp_path, SERVE, f"rm_model_file={binned}", *settings) as server,
        RewardClient(server.url) as client,
    ):
        served = client.score_rows([*TEXTS, ""])
        app = build_app(ROUTES, client, GatewayConfig(), None)
        answer = call(app, "/v1/rewards", {"texts": TEXTS[:2], "outputs": True}).json
    for name, found in (("in process", in_process), ("over HTTP", served)):
        assert found.spread is not None, name
        assert found.outputs is not None, name
        np.testing.assert_allclose(found.spread[:3], spreads, rtol=0, atol=1e-5)
        assert found.outputs.shape == (4, 2)
        assert np.isnan(found.spread[3]).all()
    np.testing.assert_allclose(served.rewards[:3], rewards - 0.5 * spreads, rtol=0, atol=1e-5)
    np.testing.assert_allclose(answer["spread"], spreads[:2], rtol=0, atol=1e-5)
    np.testing.assert_allclose(answer["outputs"], served.outputs[:2], rtol=0, atol=1e-5)
