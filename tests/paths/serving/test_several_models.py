"""One server of three LoRA adapters answers like three servers, to the bit, under mixed load."""

from __future__ import annotations

import json
import random
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from nemo_aligner.config.evaluation import SourceConfig
from nemo_aligner.contract.messages import Text
from nemo_aligner.evaluation.sources import open_server
from nemo_aligner.serving.client import RewardClient
from nemo_aligner.serving.engine.scorer import RewardScorer, load_scorer
from nemo_aligner.utils.errors import ServingError
from tests.harness import tiny
from tests.harness.adapters import write_adapters
from tests.harness.once import Once
from tests.serving.servers import SERVE, Server, gateway, running

NAMES = ("reward_model", "harmless", "plain-1.5")
ROUNDS = 6


def conversations(count: int) -> list[Text]:
    """Conversations that share few prompts, so that the prefix caches are used."""
    rng = random.Random(0)
    prompts = [tiny.sentence(rng, 6, 16) for _ in range(4)]
    return [tiny.chat(rng.choice(prompts), tiny.sentence(rng)) for _ in range(count)]


TEXTS = conversations(40)


@pytest.fixture(scope="module")
def archives(once: Once) -> dict[str, Path]:
    folder = once("adapters", write_adapters)
    return {name: folder / f"{name}.nemo" for name in NAMES}


@pytest.fixture(scope="module")
def alone(archives: dict[str, Path], layout: Any) -> dict[str, RewardScorer]:
    """Each model loaded without the others."""
    return {
        name: load_scorer(path, layout, micro_batch_tokens=128) for name, path in archives.items()
    }


@pytest.fixture(scope="module")
def expected(alone: dict[str, RewardScorer]) -> dict[str, np.ndarray]:
    rewards = {name: scorer.score_rows(TEXTS).rewards for name, scorer in alone.items()}
    assert all(len(np.unique(values)) > len(TEXTS) - 10 for values in rewards.values())
    return rewards


@pytest.fixture(scope="module")
def several(
    archives: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("several")
    main, *others = archives.items()
    models = ", ".join(f"{name}: {path}" for name, path in others)
    settings = [
        f"rm_model_file={main[1]}",
        f"models={{{models}}}",
        "model.micro_batch_tokens=512",
        "server.prefix_cache_tokens=512",
        f"server.top_rewards_file={folder / 'top.jsonl'}",
        "server.port=0",
    ]
    with running(folder, SERVE, *settings) as started:
        for name in NAMES:  # so that each has a reward to log, whichever tests run
            score(started.url, name, [0], way=0)
        yield started
        assert started.stop() == [0], started.output()[-3000:]
        logs = {path.name for path in folder.glob("top*.jsonl") if path.stat().st_size}
        assert logs == {"top.jsonl", "top-harmless.jsonl", "top-plain-1.5.jsonl"}


def post(url: str, body: Mapping[str, Any] | None) -> tuple[int, Any]:
    data = None if body is None else json.dumps(body).encode()
    try:
        with urllib.request.urlopen(urllib.request.Request(url, data), timeout=60) as response:
            return response.status, json.load(response)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)


def score(server: str, name: str, rows: list[int], way: int) -> np.ndarray:
    """Score rows of TEXTS with a model, which is named in one of several ways."""
    texts = [TEXTS[row] for row in rows]
    if way == 0:
        client = RewardClient(f"{server}/models/{name}")
        with client:
            return client.score(texts)
    if way == 1:
        status, answer = post(f"{server}/v1/rewards", {"model": name, "conversations": texts})
        assert status == 200, answer
        return np.array(answer["rewards"], dtype=np.float32)
    if way == 2:
        bodies = [{"model": name, "messages": text} for text in texts]
        answers = [post(f"{server}/classify", body) for body in bodies]
        assert {answer["model"] for _, answer in answers} == {name}
        return np.array([answer["data"][0]["probs"] for _, answer in answers], dtype=np.float32)
    column = {
        "name": "conversations",
        "datatype": "BYTES",
        "shape": [len(texts), 1],
        "data": [json.dumps(text) for text in texts],
    }
    status, answer = post(f"{server}/v2/models/{name}/infer", {"inputs": [column]})
    assert (status, answer["model_name"]) == (200, name)
    rewards = answer["outputs"][0]
    return np.array(rewards["data"], dtype=np.float32).reshape(rewards["shape"])


def test_models_of_one_server_answer_as_alone_under_mixed_load(
    several: Server, expected: dict[str, np.ndarray]
) -> None:
    rng = random.Random(1)
    requests = [
        (name, rng.sample(range(len(TEXTS)), rng.randint(1, 8)), way)
        for _ in range(ROUNDS)
        for name in NAMES
        for way in range(4)
    ]
    with ThreadPoolExecutor(8) as threads:
        answers = list(threads.map(lambda request: score(several.url, *request), requests))
    wrong = [
        request
        for request, rewards in zip(requests, answers, strict=True)
        if not np.array_equal(rewards, expected[request[0]][request[1]])
    ]
    assert not wrong
    metrics = urllib.request.urlopen(f"{several.url}/metrics", timeout=30).read().decode()
    lines = dict(line.rsplit(" ", 1) for line in metrics.splitlines() if line[0] != "#")
    for backend in ("local", *NAMES[1:]):
        assert float(lines[f'nemo_aligner_server_cached_tokens_total{{backend="{backend}"}}']) > 0
    for path in ("/v1/rewards", "/models/harmless/classify", "/v2/models/plain-1.5/infer"):
        labels = f'{{route="{path}",status="200"}}'
        assert float(lines[f"nemo_aligner_http_requests_total{labels}"]) >= ROUNDS
    mean = 'nemo_aligner_reward_mean{attribute="helpfulness",model="harmless"}'
    assert float(lines[mean]) == pytest.approx(expected["harmless"].mean(), abs=0.1)


def test_models_share_their_base_and_are_listed(several: Server) -> None:
    said = several.output()
    models = "harmless.contract, harmless, plain-1.5.contract, plain-1.5"
    assert f"KServe models: contract, reward_model, {models}" in said
    assert "harmless: shares 0.2M of 0.2M parameters with reward_model" in said
    assert "plain-1.5: Prefix cache: 512 tokens" in said
    listed = post(f"{several.url}/v1/models", None)[1]["data"]
    assert [model["id"] for model in listed] == [*NAMES]
    assert post(f"{several.url}/ready", None)[1]["backends"] == dict.fromkeys(
        ("local", "harmless", "plain-1.5"), "ready"
    )


def test_path_of_a_model_is_a_server_of_it(
    several: Server,
    alone: dict[str, RewardScorer],
    expected: dict[str, np.ndarray],
    tmp_path: Path,
) -> None:
    """All protocols work there, whatever model a body names, and through a gateway."""
    for name, scorer in alone.items():
        url = f"{several.url}/models/{name}"
        assert post(f"{url}/v1/contract", None)[1]["hash"] == scorer.contract.hash
        for client in (RewardClient(url), RewardClient(several.url, name)):
            with client:
                assert client.contract() == scorer.contract
                assert np.array_equal(client.score(TEXTS[:2]), expected[name][:2])
        assert post(f"{url}/info", None)[1]["model_id"] == name
        assert [each["id"] for each in post(f"{url}/v1/models", None)[1]["data"]] == [name]
        status, answer = post(f"{url}/classify", {"model": "any", "messages": TEXTS[0]})
        assert (status, answer["model"]) == (200, name)
        assert answer["data"][0]["probs"] == expected[name][0].tolist()
        weights = dict.fromkeys(scorer.attributes, 1.0)
        others = SourceConfig(attribute_weights=weights)
        for path, config in (("", SourceConfig()), ("/", SourceConfig()), ("/classify", others)):
            with open_server(url + path, config) as source:
                rewards = source.scorer.score_rows(TEXTS[:2]).rewards
                assert np.array_equal(rewards, expected[name][:2]), path
    with gateway(tmp_path, f"backends=[{several.url}/models/harmless]") as front:
        answer = post(f"{front.url}/v1/rewards", {"conversations": TEXTS[:4]})[1]
    assert answer["contract_hash"] == alone["harmless"].contract.hash
    assert np.array_equal(np.array(answer["rewards"], np.float32), expected["harmless"][:4])


def test_unknown_model_gets_a_404_with_the_names(several: Server) -> None:
    names = "unknown model 'helpful'. Models: reward_model, harmless, plain-1.5"
    for route, body in (
        ("/classify", {"model": "helpful", "input": "a"}),
        ("/v1/rewards", {"model": "helpful", "texts": ["a"]}),
        ("/models/helpful/v1/rewards", {"texts": ["a"]}),
        ("/models/helpful/get_reward", {"query": ["a"]}),
        ("/models/helpful/v1/contract", None),
        ("/models/helpful/v2/models/reward_model", None),
    ):
        status, answer = post(several.url + route, body)
        assert status == 404, route
        assert names in json.dumps(answer, ensure_ascii=False), route
    with (
        RewardClient(f"{several.url}/models/helpful") as client,
        pytest.raises(ServingError, match=r"/models/helpful, reward_model.*unknown model"),
    ):
        client.score(["a"])
