"""The load on servers is bounded, and the table is made from their answers."""

from __future__ import annotations

import asyncio
import importlib
import json
import random
import threading
import time
from collections.abc import Iterator
from http.server import ThreadingHTTPServer
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tests.harness import tiny
from tests.serving.client.misbehaving import Answering

pytest.importorskip("aiohttp")


@pytest.fixture(autouse=True)
def path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(tiny.ROOT / "benchmarks")


def module(name: str) -> ModuleType:
    return importlib.import_module(name)


class FakeServer(ThreadingHTTPServer):
    """The reward of token ids is their sum; 9 is rejected, 8 takes half a second."""

    daemon_threads = True
    request_queue_size = 64

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.asked: list[str] = []
        self.at_once = self.most_at_once = 0
        self.lock = threading.Lock()
        self.url = f"http://127.0.0.1:{self.server_address[1]}"


class Handler(Answering):
    server: FakeServer

    def do_POST(self) -> None:
        request = json.loads(self.body())
        is_kserve = "inputs" in request
        ids = (
            request["inputs"][0]["data"]
            if is_kserve
            else request.get("input", request.get("tokens"))
        )
        ids = ids[0] if isinstance(ids[0], list) else ids
        with self.server.lock:
            self.server.asked.append(self.path)
            self.server.at_once += 1
            self.server.most_at_once = max(self.server.most_at_once, self.server.at_once)
        time.sleep(0.5 if 8 in ids else 0.02)
        with self.server.lock:
            self.server.at_once -= 1
        reward = [sum(ids)]
        outputs = {"outputs": [{"name": "rewards", "data": reward}]}
        reply = {"rewards": [reward]} if "tokens" in request else {"data": [{"probs": reward}]}
        answer = (200, outputs if is_kserve else reply)
        self.answer(*((400, b"no nines") if 9 in ids else answer))


@pytest.fixture
def server() -> Iterator[FakeServer]:
    with FakeServer() as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def load_of(url: str, *token_lists: list[int], **changes: Any) -> dict[str, Any]:
    recipe = module("serving_servers").Recipe("ours", Path("model"), 1)
    requests = [recipe.request(ids) for ids in token_lists]
    return {
        "url": url,
        "requests": requests,
        "count": len(requests),
        "clients": 1,
        "limit_s": 10.0,
        **changes,
    }


def put(load: dict[str, Any]) -> Any:
    return module("serving_servers").Load(**asyncio.run(module("serving_load").send_load(load)))


def test_every_server_is_asked_and_understood(server: FakeServer) -> None:
    gateway, kind = module("gateway"), module("serving_servers").Recipe
    ours, peer = kind("ours", Path("m"), 1), kind("vLLM", Path("m"), 1, (), "python")
    requests = [
        *(ours.request([1, 2]), peer.request([4, 5])),
        *(gateway.rewards_request([1, 2]), gateway.classify_request([3])),
    ]
    load = put(load_of(server.url) | {"requests": requests, "count": 6})
    assert load.rewards == [[3.0], [9.0], [3.0], [3.0], [3.0], [9.0]]
    assert load.rejected == 0
    paths = ["/v2/models/reward_model/infer", "/classify", "/v1/rewards", "/classify"]
    assert server.asked == [*paths, *paths[:2]]


def test_what_the_gateway_adds_is_compared_turn_by_turn_and_every_reward_is_the_servers() -> None:
    gateway = module("gateway")
    load = module("serving_servers").Load

    def loads(*seconds: float) -> list[Any]:
        return [load(1.0, [200], [second], [[1.0]], []) for second in seconds]

    alone = {gateway.DIRECT: loads(0.01, 0.1, 0.02), "through": loads(0.012, 0.103, 0.021)}
    row = gateway._summarize_route("through", alone, alone, 4)
    assert (row["added ms"], row["most added ms"]) == (pytest.approx(2), pytest.approx(3))
    assert row["requests/s, 4 clients"] == 1.0
    gateway._check_rewards([*loads(1), *loads(1)], 0.0)
    other = load(1.0, [200], [1.0], [[1.0 + 1e-6]], [])
    with pytest.raises(
        module("common").WorkerFailed, match="a reward through the gateway differs by"
    ):
        gateway._check_rewards([*loads(1), other], 0.0)
    with pytest.raises(module("common").WorkerFailed, match="1 requests have no reward"):
        gateway._check_rewards([*loads(1), load(1.0, [503], [1.0], [None], ["busy"])], 0.0)


def test_so_many_clients_ask_at_once(server: FakeServer) -> None:
    load = put(load_of(server.url, *([[1]] * 24), clients=8))
    assert server.most_at_once == 8
    assert load.statuses == [200] * 24
    assert all(0.02 <= seconds <= load.seconds for seconds in load.latencies)


def test_what_is_refused_or_late_or_unreachable_has_no_reward(server: FakeServer) -> None:
    load = put(load_of(server.url, [9], [1]))
    assert (load.statuses, load.rewards, load.messages) == ([400, 200], [None, [1.0]], ["no nines"])
    load = put(load_of(server.url, [1], [8], [1], limit_s=0.3))
    assert load.statuses == [200, None, None]
    assert load.rejected == 2
    load = put(load_of("http://127.0.0.1:9", [1]))
    assert load.statuses == [0]
    assert "Cannot connect" in load.messages[0]


def test_a_load_is_bounded() -> None:
    for changes, message in (
        ({"url": "http://example.org"}, "url: got http://example.org"),
        ({"url": "http://127.0.0.1.example.org"}, "url: got"),
        ({"count": 10**7}, "count: got 10000000, wanted 1 to 1000000"),
        ({"clients": 0}, "clients: got 0, wanted 1 to 1024"),
        ({"limit_s": 1e9}, "limit_s: got"),
    ):
        with pytest.raises(ValueError, match=message):
            put(load_of("http://127.0.0.1:9", [1]) | changes)


def test_no_turn_asks_for_texts_of_another() -> None:
    draw = module("serving").Draw(1000)
    for kind in (draw.uniform, draw.lognormal, draw.shared):
        texts = [
            tuple(ids)
            for clients in (1, 8)
            for turn in (0, 1)
            for ids in (kind(20, clients, turn).seen + kind(20, clients, turn).token_lists)
        ]
        assert len(set(texts)) == len(texts) >= 80
    requests = draw.shared(5, 1, 0)
    assert {tuple(ids[:512]) for ids in requests.token_lists} == {tuple(requests.seen[0][:512])}
    assert [len(ids) for ids in requests.token_lists] == [612] * 5
    lengths = [
        sorted(map(len, kind(2000, 1, 0).token_lists)) for kind in (draw.uniform, draw.lognormal)
    ]
    assert all(
        0.9 < sum(drawn_lengths) / len(drawn_lengths) / 224 < 1.1 for drawn_lengths in lengths
    )
    assert lengths[1][1000] < lengths[0][1000]
    assert lengths[1][-1] > lengths[0][-1]


def test_a_pair_is_given_out_once(tmp_path: Path) -> None:
    data = tiny.write_pairs(tmp_path / "pairs.jsonl", 3)
    pairs = module("serving").Pairs(data, lambda text: [text])
    (chosen,), (rejected,) = pairs.take(2)
    assert chosen[0] == rejected[0]  # the prompt
    assert chosen[1] != rejected[1]
    assert len({json.dumps(tokens) for tokens in pairs.take(4)}) == 4
    with pytest.raises(SystemExit, match=r"pairs.jsonl: too few pairs"):
        pairs.take(1)


def test_the_table_has_medians_of_turns_and_dashes() -> None:
    serving, load = module("serving"), module("serving_servers").Load

    def loads(*seconds: float) -> list[Any]:
        return [
            load(duration, [200] * 2, [duration / 2] * 2, [[0.0]] * 2, []) for duration in seconds
        ]

    drawn = [serving.Requests([[1] * 10, [2] * 30], [])] * 3
    both = serving.Work("uniform", 8, lambda turn: drawn[turn], (serving.OURS, serving.VLLM_COLD))
    rows = serving.make_rows(
        both, drawn, {serving.OURS: loads(1, 2, 1), serving.VLLM_COLD: loads(2, 2, 3)}, 4.0
    )
    names = ("server", "rewards/s", "tokens/s", "p50 s", "p99 s", "matmuls alone")
    assert [[row[name] for name in (*names, "ours is faster by")] for row in rows] == [
        ["nemo_aligner", 2.0, 40, 0.5, pytest.approx(1.0, abs=0.1), 4.0, ""],
        ["vLLM", 1.0, 20, 1.0, pytest.approx(1.5, abs=0.1), "", 2.0],
    ]
    assert {(row["work"], row["clients"]) for row in rows} == {("uniform", 8)}
    # A server that failed in the last turn has no figures.
    answered = {serving.OURS: loads(1, 2, 1), serving.VLLM_COLD: loads(2, 2)}
    rows = serving.make_rows(both, drawn, answered, 4.0)
    shown = module("common").render(rows).splitlines()
    assert shown[-1].split() == ["uniform", "8", "vLLM", "-", "-", "-", "-", "-"]


def test_turns_of_an_agent_have_medians_and_the_rewards_of_the_last_turn() -> None:
    agent, load = module("agent"), module("serving_servers").Load
    first, second, third = agent.make_dialogue(random.Random(0), 3)
    assert [len(dialogue) for dialogue in (first, second, third)] == [2, 4, 6]
    assert third[:4] == second
    assert second[:2] == first

    def loads(reward: float, *waited: list[float]) -> list[Any]:
        return [
            load(sum(latencies), [200] * 2, latencies, [[reward]] * 2, []) for latencies in waited
        ]

    server_loads = {
        agent.OURS: loads(1.0, [1, 2], [3, 2], [2, 2]),
        agent.UNCACHED: loads(1.5, [1, 4], [3, 4], [2, 4]),
        agent.VLLM: [],
    }
    faster = f"{agent.UNCACHED} / ours"
    rows = agent.make_rows(server_loads, 2)
    assert [(row["turn"], row["nemo_aligner, s"], row[faster]) for row in rows] == [
        (1, 2, 1.0),
        (2, 2, 2.0),
    ]
    assert agent.largest_difference(server_loads) == 0.5
    reply = module("serving_load").Reply(200, b'{"data": [{"data": [[1.0], [2.0]]}]}', 0.1)
    assert module("serving_load").read_rewards(reply) == [2.0]


def test_tokens_that_a_text_before_has_are_not_new() -> None:
    requests = module("serving").Requests([[1, 2, 3], [1, 2, 4, 5], [1, 2, 3], [6]], [[1]])
    assert requests.new_tokens == [2, 2, 1, 1]


def test_a_peer_that_does_not_start_is_left_out_with_its_last_words(tmp_path: Path) -> None:
    servers = module("serving_servers")
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\necho one\necho Unsupported processor\necho\nexit 3\n")
    python.chmod(0o755)
    recipes = [
        servers.Recipe("vLLM", tmp_path, 1, (), str(python)),
        servers.Recipe("nowhere", tmp_path, 1, (), str(tmp_path / "none")),
    ]
    contestants = servers.Contestants(recipes, tmp_path, clients=None)
    for name in ("vLLM", "vLLM", "nowhere", "no recipe"):
        assert contestants.ask(name, [[1]], 1, 10.0) is None
    assert contestants.failures == {
        "vLLM": "it did not start: it ended with exit status 3\nUnsupported processor",
        "nowhere": f"{tmp_path / 'none'}: cannot be run: No such file or directory",
    }


def test_mixed_traffic_is_checked() -> None:
    tiny_part, servers = module("serving_tiny"), module("serving_servers")
    asks = tiny_part.mixed_requests(300, 0)
    assert sum(ask.is_malformed for ask in asks) == 100
    assert {ask.rows for ask in asks if not ask.is_malformed} == set(range(1, 9))
    assert len({ask.request["body"] for ask in tiny_part.uniform_requests(100)}) == 100

    def answered(*wrong: tuple[int, int, list[float] | None]) -> Any:
        statuses = [400 if ask.is_malformed else 200 for ask in asks]
        rewards = [None if ask.is_malformed else [0.0] * ask.rows for ask in asks]
        for number, status, reward in wrong:
            statuses[number], rewards[number] = status, reward
        return servers.Load(1.0, statuses, [0.1] * len(asks), rewards, [])

    tiny_part.check(asks, answered())
    for wrong in ((0, 400, None), (0, 200, [0.0] * 9), (2, 200, [0.0]), (2, 0, None)):
        with pytest.raises(module("common").WorkerFailed, match=f"^request {wrong[0]}: got status"):
            tiny_part.check(asks, answered(wrong))
