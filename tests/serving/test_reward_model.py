"""One text, one reward: in process and over HTTP, alone and in any batch, at every layout."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from nemo_aligner.errors import ConfigError, DataError
from tests import tiny
from tests.serving.servers import Server, json_request, running

SERVE = "examples/serve_reward_model.py"
CLOSE = {"rtol": 0, "atol": 1e-5}


def make_texts() -> list:
    rng = random.Random(7)
    texts: list = [tiny.sentence(rng, 1, 40) for _ in range(20)]
    texts += [
        [
            {"role": "user", "content": tiny.sentence(rng)},
            {"role": "assistant", "content": tiny.sentence(rng)},
        ]
        for _ in range(10)
    ]
    return [*texts, "river stone " * 60, "Grüße 🙂"]


TEXTS = make_texts()


@dataclass
class Archive:
    """A reward model's ``.nemo``, and the rewards ``[N, 2]`` of TEXTS by the in-process scorer."""

    path: Path
    rewards: np.ndarray


@pytest.fixture(scope="module")
def scorer(scorer_and_path):
    return scorer_and_path[0]


@pytest.fixture(scope="module")
def archive(scorer_and_path) -> Archive:
    scorer, path = scorer_and_path
    return Archive(path, scorer.score(TEXTS))


def test_alone_or_in_any_batch(scorer, archive):
    assert archive.rewards.shape == (len(TEXTS), 2)
    assert archive.rewards.dtype == np.float32
    assert len(np.unique(archive.rewards[:, 0])) == len(TEXTS)
    alone = np.concatenate([scorer.score([text]) for text in TEXTS])
    np.testing.assert_allclose(alone, archive.rewards, **CLOSE)
    np.testing.assert_allclose(scorer.score(TEXTS[::-1])[::-1], archive.rewards, **CLOSE)


def test_tokens_are_scored_like_the_text_they_come_from(scorer, archive):
    token_lists = [scorer.encode(text).token_ids for text in TEXTS]
    np.testing.assert_allclose(scorer.score_tokens(token_lists), archive.rewards, **CLOSE)


def test_label_means_are_added(scorer):
    from nemo_aligner.scoring.scorer import RewardScorer

    plain = RewardScorer(
        scorer.model,
        scorer.contract.with_label_means([0.0, 0.0]),
        scorer._tokenizer,
        scorer._layout,
        128,
    )
    difference = scorer.score(TEXTS[:3]) - plain.score(TEXTS[:3])
    np.testing.assert_allclose(difference, [[1.5, 2.5]] * 3, rtol=0, atol=1e-6)


def test_what_cannot_be_scored(scorer):
    with pytest.raises(DataError, match=r"text 1: .*empty"):
        scorer.score(["fine", ""])
    with pytest.raises(DataError, match="got 0 tokens, wanted 1 to 64"):
        scorer.score_tokens([[]])
    with pytest.raises(DataError, match="got 65 tokens, wanted 1 to 64"):
        scorer.score_tokens([[5] * 65])
    with pytest.raises(DataError, match="got token id -1, wanted 0 to"):
        scorer.score_tokens([[5, -1]])
    with pytest.raises(DataError, match="got token id 100000, wanted 0 to"):
        scorer.score_tokens([[5, 100000]])
    assert scorer.score([]).shape == (0, 2)


def test_a_budget_below_the_longest_text_is_refused(archive, scorer):
    from nemo_aligner.scoring.scorer import load_scorer

    with pytest.raises(ConfigError, match="micro_batch_tokens: got 63, wanted"):
        load_scorer(archive.path, scorer._layout, micro_batch_tokens=63)


LAYOUTS = {
    "one": (1, []),
    "tp2": (2, ["model.tensor_model_parallel_size=2"]),
    "tp2_sp": (2, ["model.tensor_model_parallel_size=2", "model.sequence_parallel=true"]),
    "pp2": (2, ["model.pipeline_model_parallel_size=2"]),
    "dp2": (2, []),
}


SLOW = ("tp2_sp",)


@pytest.mark.parametrize(
    "layout",
    [pytest.param(name, marks=pytest.mark.slow if name in SLOW else ()) for name in LAYOUTS],
)
def test_over_http_it_is_the_same_number(archive, tmp_path, layout):
    pytest.importorskip("pytriton")
    from nemo_aligner.serving.client.reward import RewardClient

    ranks, overrides = LAYOUTS[layout]
    settings = [f"rm_model_file={archive.path}", "server.port=0", "model.micro_batch_tokens=128"]
    with running(tmp_path, SERVE, *settings, *overrides, ranks=ranks) as server:
        with RewardClient(server.url, timeout_s=60) as client:
            together = client.score_future(TEXTS)
            alone = [client.score_future([text]) for text in TEXTS]
            np.testing.assert_allclose(together.result(), archive.rewards, **CLOSE)
            one_by_one = np.concatenate([future.result() for future in alone])
            np.testing.assert_allclose(one_by_one, archive.rewards, **CLOSE)
        if layout == "one":
            check_plain_http(server, archive)
            check_score_example(server, archive)
            check_gateway(server, archive)
        assert server.stop() == [0] * ranks, server.output()[-3000:]
        server.assert_nothing_is_left()


def check_plain_http(server: Server, archive: Archive) -> None:
    long_one = TEXTS.index("river stone " * 60)
    body = {"inputs": [json_request("sentences", "BYTES", [[TEXTS[0]], [TEXTS[long_one]]])]}
    status, answer = server.post(body)
    assert status == 200
    rewards, exceeded, _ = answer["outputs"]
    wanted = archive.rewards[[0, long_one]].ravel()
    np.testing.assert_allclose(rewards["data"], wanted, **CLOSE)
    assert exceeded["data"] == [0, 1]
    status, answer = server.post(
        {
            "inputs": [
                json_request("tokens", "INT64", [[5, 100000]]),
                json_request("sequence_lengths", "INT64", [[2]]),
            ]
        }
    )
    assert status == 400
    assert answer["error"].startswith("row 0: got token id 100000")


def check_score_example(server: Server, archive: Archive) -> None:
    chat = next(row for row, text in enumerate(TEXTS) if not isinstance(text, str))
    done = subprocess.run(
        [
            sys.executable,
            str(tiny.ROOT / "examples/score.py"),
            f"--url={server.url}",
            TEXTS[0],
            f"--conversation={json.dumps(TEXTS[chat])}",
        ],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
        cwd=tiny.ROOT,
        env={"PYTHONPATH": str(tiny.ROOT)},
    )
    printed = [[float(word) for word in line.split()[:2]] for line in done.stdout.splitlines()]
    np.testing.assert_allclose(printed, archive.rewards[[0, chat]], rtol=0, atol=1e-4)


def check_gateway(server: Server, archive: Archive) -> None:
    """By every protocol of the gateway a reward is the same bits as from the server."""
    pytest.importorskip("fastapi")
    from nemo_aligner.config.gateway import GatewayConfig
    from nemo_aligner.serving.client.reward import RewardClient
    from nemo_aligner.serving.transports.http import build_app
    from nemo_aligner.serving.wire.protocols import ROUTES
    from tests.serving.gateway_calls import call

    raw = TEXTS[0]
    chat = next(text for text in TEXTS if not isinstance(text, str))
    asked, said = (turn["content"] for turn in chat)
    with RewardClient(server.url) as client:
        # Alone, and with its beginning known, as it is for each that asks again.
        direct = [[client.score([text])[0] for _ in range(2)][1] for text in (raw, chat)]
        for row, text in enumerate((raw, chat)):
            wanted = archive.rewards[TEXTS.index(text)]
            np.testing.assert_allclose(direct[row], wanted, **CLOSE)

    def ask(path: str, body: object) -> dict:
        answer = call(app, path, body)
        assert answer.status == 200, answer.body
        return answer.json

    with RewardClient(server.url) as client:
        app = build_app(ROUTES, client, GatewayConfig(), None)
        rollout = {"responses_create_params": {"input": asked}, "response": {"output": [
            {"role": "assistant", "content": said}
        ]}}  # fmt: skip
        found = [
            ask("/v1/rewards", {"texts": [raw]})["rewards"][0],
            [*ask("/get_reward", {"query": [raw]})["extra_logs"].values()],
            ask("/classify", {"input": raw})["data"][0]["probs"],
            ask("/pooling", {"input": [raw]})["data"][0]["data"],
            ask("/v1/rewards", {"conversations": [chat]})["rewards"][0],
            ask("/classify", {"messages": chat})["data"][0]["probs"],
            [*ask("/verify", rollout)["reward_components"].values()],
        ]
        merged = ask("/score", {"text_1": asked, "text_2": said})["data"][0]["score"]
        shown = call(app, "/metrics").body.decode()
    same = [np.float32(np.ravel(each)).tobytes() for each in found]
    assert same == [direct[0].tobytes()] * 4 + [direct[1].tobytes()] * 3
    assert merged == float(np.float32(direct[1].astype(np.float64).sum()))
    counted = dict(line.rsplit(" ", 1) for line in shown.splitlines() if "server_" in line)
    for name in ("calls", "computed_tokens", "cached_tokens", "forward_seconds", "queue_seconds"):
        assert float(counted[f'nemo_aligner_server_{name}_total{{backend="{server.url}"}}']) > 0
    fill = float(counted[f'nemo_aligner_server_pack_fill{{backend="{server.url}"}}'])
    assert 0 < fill <= 1
