"""Shaped rewards over HTTP: what they are made of stands beside, and the contract says how."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from nemo_aligner.errors import ServingError
from nemo_aligner.serving.client import RewardClient
from tests.serving.servers import Server, running

SERVE = "examples/serve_reward_model.py"
CHAT = [
    {"role": "user", "content": "What is red?"},
    {"role": "assistant", "content": "river stone river stone"},
]
TEXTS: list = ["river", "river stone river stone river", CHAT]
PENALTY, FREE = 0.25, 2


@pytest.fixture(scope="module")
def other_model(scorer_and_path: tuple, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same model with a head of its own."""
    import torch

    from nemo_aligner.checkpoint.nemo.reward_model import load_reward_model, save_reward_model

    scorer, path = scorer_and_path
    other = load_reward_model(path, scorer._layout)
    torch.nn.init.normal_(other.model.rm_head.weight, std=0.05)
    target = tmp_path_factory.mktemp("other") / "other.nemo"
    save_reward_model(target, other.model, other.config, other.tokenizer, other.contract)
    return target


@pytest.fixture(scope="module")
def server(
    scorer_and_path: tuple, other_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    pytest.importorskip("pytriton")
    settings = [
        f"rm_model_file={scorer_and_path[1]}",
        f"ensemble.files=[{other_model}]",
        "ensemble.combine=lower_bound",
        "ensemble.k=2",
        "shaping.attribute_weights={helpfulness: 1.0, verbosity: -0.5}",
        f"shaping.length_penalty={PENALTY}",
        f"shaping.length_penalty_from={FREE}",
        "shaping.threshold=0.0",
        "server.port=0",
        "model.micro_batch_tokens=128",
    ]
    with running(tmp_path_factory.mktemp("server"), SERVE, *settings) as started:
        yield started
        assert started.stop() == [0], started.output()[-3000:]


def test_every_part_of_a_shaped_reward(
    scorer_and_path: tuple, other_model: Path, server: Server
) -> None:
    from nemo_aligner.scoring.scorer import load_scorer

    first, _ = scorer_and_path
    second = load_scorer(other_model, first._layout, micro_batch_tokens=128)
    with RewardClient(server.url) as client:
        scored = client.score_rows([*TEXTS, ""])
    raw = np.stack([first.score(TEXTS), second.score(TEXTS)], axis=1).astype(float)
    merged = raw @ [1.0, -0.5]
    beyond = np.clip(np.array(first.count_reply_tokens(TEXTS)) - FREE, 0, None)
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


def test_a_client_that_wants_the_plain_model_is_not_given_shaped_rewards(
    scorer_and_path: tuple, server: Server
) -> None:
    plain = scorer_and_path[0].contract
    with (
        RewardClient(server.url, expect=plain) as client,
        pytest.raises(ServingError, match="shaping: None"),
    ):
        client.score(TEXTS)
    with RewardClient(server.url) as client:
        assert client.contract().attributes == ("reward",)
        assert client.score(TEXTS).shape == (3, 1)
