"""Concurrent requests of every kind: each gets its own answer, and bad ones harm no good ones."""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import aiohttp
import pytest

from nemo_aligner.contract.scorer import score_all
from tests.harness import tiny
from tests.serving.conftest import MAX_ROWS
from tests.serving.fake_server import SEQ_LENGTH, total
from tests.serving.fire import INFER, Request, check_that_leavers_harm_nobody, send_all
from tests.serving.servers import (
    FAKE,
    QUICK,
    Server,
    gateway,
    json_request,
    running,
    tokens_request,
)

pytest.importorskip("fastapi")

REQUESTS = 1_000
LARGE = 2_000_000


def request(*inputs: dict[str, Any], status: int = 200, found: Any = None) -> Request:
    body = json.dumps({"inputs": inputs, "outputs": [{"name": "rewards"}]}).encode()
    return Request(INFER, body, status, found)


def column(name: str, rows: Sequence[Any]) -> dict[str, Any]:
    return json_request(name, "BYTES", [[row] for row in rows])


MALFORMED = [
    request(column("sentences", ["fine", ""]), status=400, found="row 1: the text has no tokens"),
    request(column("conversations", ["{"]), status=400, found="conversations, row 0: not JSON"),
    request(*tokens_request([[10**6]]), status=400, found="row 0: got token id 1000000"),
    request(column("sentences", ["a"] * (MAX_ROWS + 1)), status=400, found=str(MAX_ROWS)),
    request(json_request("tokens", "FP32", [[1.0]]), status=400, found="datatype"),
]


class Traffic:
    """Draws requests from samples whose rewards are known."""

    def __init__(self, scorer: Any) -> None:
        rng = random.Random(11)
        self._rng = rng
        self._texts = [tiny.sentence(rng, 1, 40) for _ in range(200)]
        self._dialogues = [
            [
                {"role": "user", "content": tiny.sentence(rng)},
                {"role": "assistant", "content": tiny.sentence(rng)},
            ]
            for _ in range(200)
        ]
        self._tokens = [scorer.encode(text).token_ids for text in self._texts]
        self._large = [tiny.sentence(rng, 20, 40) * (LARGE // 100) for _ in range(4)]
        self._rewards = score_all(scorer, self._texts)
        self._of_dialogues = score_all(scorer, self._dialogues)
        self._of_large = score_all(scorer, self._large)

    def good(self) -> Request:
        rows = [self._rng.randrange(200) for _ in range(self._rng.randint(1, 8))]
        match self._rng.randrange(3):
            case 0:
                inputs = [column("sentences", [self._texts[row] for row in rows])]
            case 1:
                lists = [self._tokens[row] for row in rows]
                width = max(map(len, lists)) + self._rng.randint(0, 5)
                padded = [ids + [0] * (width - len(ids)) for ids in lists]
                inputs = tokens_request(padded, *map(len, lists))
            case _:
                texts = [json.dumps(self._dialogues[row]) for row in rows]
                return request(column("conversations", texts), found=self._of_dialogues[rows])
        return request(*inputs, found=self._rewards[rows])

    def large(self) -> Request:
        row = self._rng.randrange(len(self._large))
        return request(column("sentences", [self._large[row]]), found=self._of_large[[row]])

    def mixed(self, count: int) -> list[Request]:
        """A third of the requests are malformed, 2% have 2 MB, and the others are good."""
        makers = self._rng.choices(
            [lambda: self._rng.choice(MALFORMED), self.large, self.good],
            [1 / 3, 0.02, 2 / 3 - 0.02],
            k=count,
        )
        return [make() for make in makers]


@pytest.fixture(scope="module")
def traffic(scorer: Any) -> Traffic:
    return Traffic(scorer)


def rows_per_second(url: str, requests: Sequence[Request]) -> float:
    seconds = asyncio.run(send_all(url, requests))
    return sum(len(each.found) for each in requests if each.status == 200) / seconds


def test_server_under_fire_gives_every_request_its_own_answer_and_good_ones_go_on(
    model_server: Server, traffic: Traffic
) -> None:
    probe = traffic.good()
    asyncio.run(send_all(model_server.url, [probe] * 3))
    alone, among = [], []
    for _ in range(4):  # alternately; the fastest counts, as the machine is sometimes busy
        good = [traffic.good() for _ in range(REQUESTS // 4)]
        alone.append(rows_per_second(model_server.url, good))
        among.append(rows_per_second(model_server.url, traffic.mixed(REQUESTS // 4)))
    print("rows/s alone", alone, "among others", among)
    asyncio.run(send_all(model_server.url, [probe]))
    assert max(among) >= 0.5 * max(alone)
    assert " requests/s | " in model_server.output()


def test_server_is_not_harmed_by_clients_that_leave(model_server: Server, traffic: Traffic) -> None:
    check_that_leavers_harm_nobody(model_server.url, traffic.good)


MAX_BYTES = 100_000
TOKEN = "s3cret"
BEARER = {"Authorization": f"Bearer {TOKEN}"}


def asked(path: str, body: Any, found: Any, status: int = 200) -> Request:
    return Request(path, body, status, found, BEARER)


def rollout(asked: str, said: str) -> dict[str, Any]:
    return {
        "responses_create_params": {"input": asked},
        "response": {"output": [{"type": "message", "role": "assistant", "content": said}]},
    }


def ids_of(texts: Sequence[str]) -> list[list[int]]:
    return [[ord(letter) for letter in text] for text in texts]


BAD = [
    asked("/v1/rewards", b'{"texts": [', "JSON", 400),
    asked("/v1/rewards", {"tokens": [[666]]}, "token 666", 500),
    asked("/get_reward", {"query": ["a", ""]}, "row 1: the text is empty", 400),
    asked("/classify", {"input": [[-1]]}, "row 0: got token id -1", 400),
    asked("/pooling", {"input": "a" * MAX_BYTES}, "the limit is", 413),
    asked("/score", {"text_1": "a"}, "wanted queries", 400),
    asked("/verify", rollout("", ""), (0.0, True)),
    *(
        Request(path, body, 401, "token", {"Authorization": wrong})
        for path, body in (("/v1/rewards", {"texts": ["a"]}), ("/verify", rollout("a", "b")))
        for wrong in ("Bearer nothing", "Basic s3cret", TOKEN)
    ),
]


class GatewayTraffic:
    """Draws requests with known answers: a reward is the sum of a text's last characters."""

    def __init__(self) -> None:
        self._rng = random.Random(5)

    def text(self) -> str:
        return "".join(self._rng.choices("abcdefgh ", k=self._rng.randint(1, SEQ_LENGTH // 2)))

    def good(self) -> Request:
        texts = [self.text() for _ in range(self._rng.randint(1, 8))]
        sums, (first, *_) = [total(text) for text in texts], texts
        turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": first}]
        whole = total("a") + sums[0]
        path, body, found = self._rng.choice(
            [
                ("/v1/rewards", {"texts": texts}, sums),
                ("/v1/rewards", {"tokens": ids_of(texts)}, sums),
                ("/v1/rewards", {"conversations": [turns]}, [whole]),
                ("/v1/rewards", {"texts": [first, ""]}, [sums[0], None]),
                ("/get_reward", {"query": texts}, [value / 2 for value in sums]),
                ("/classify", {"input": texts, "use_activation": False}, sums),
                ("/classify", {"messages": turns}, [whole]),
                ("/pooling", {"input": ids_of(texts)}, sums),
                ("/score", {"text_1": "a", "text_2": first}, [whole / 2]),
                ("/verify", rollout("a", first), (whole / 2, False)),
            ]
        )
        return asked(path, body, found)

    def mixed(self, count: int) -> list[Request]:
        """A third of the requests are malformed."""
        return [
            self._rng.choice(BAD) if number % 3 == 2 else self.good() for number in range(count)
        ]


@pytest.fixture(scope="module")
def backend(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with running(tmp_path_factory.mktemp("backend"), FAKE, *QUICK) as started:
        yield started


@pytest.fixture(scope="module")
def fronted(backend: Server, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("gateway")
    (folder / "token").write_text(TOKEN)
    settings = [
        f"backends=[{backend.url}]",
        f"gateway.token_file={folder / 'token'}",
        f"gateway.max_request_bytes={MAX_BYTES}",
        "gateway.retry_s=0.5",
    ]
    with gateway(folder, *settings) as started:
        yield started


def test_gateway_under_fire_gives_every_request_its_own_answer(fronted: Server) -> None:
    traffic = GatewayTraffic()
    probes, mixed = [traffic.good() for _ in range(50)], traffic.mixed(REQUESTS)
    for requests in (probes, mixed, probes):
        asyncio.run(send_all(fronted.url, requests))
    statuses = Counter(request.status for request in mixed)
    assert set(statuses) == {200, 400, 401, 413, 500}
    assert statuses[401] > 60


def test_clients_that_leave_harm_nobody(fronted: Server) -> None:
    check_that_leavers_harm_nobody(fronted.url, GatewayTraffic().good)


def test_a_backend_that_is_killed_among_requests_costs_a_503_each_and_soon(
    backend: Server, fronted: Server
) -> None:
    async def kill_among() -> list[int]:
        body = json.dumps({"texts": ["a"]}).encode()
        statuses: list[int] = []

        async def ask(session: Any) -> None:
            while statuses.count(503) < 40:
                url = f"{fronted.url}/v1/rewards"
                async with session.post(url, data=body, headers=BEARER) as response:
                    statuses.append(response.status)
                    assert response.status == 200 or response.headers["Retry-After"] == "1"

        async with aiohttp.ClientSession() as session:
            asking = [asyncio.ensure_future(ask(session)) for _ in range(8)]
            while statuses.count(200) < 20:
                await asyncio.sleep(0.05)
            for pid in backend.processes():  # all at once, like a failing machine
                os.kill(pid, signal.SIGKILL)
            await asyncio.wait_for(asyncio.gather(*asking), 20)
        return statuses

    statuses = asyncio.run(kill_among())
    assert set(statuses) == {200, 503}
    begun = time.monotonic()
    unanswered = [
        asked("/v1/rewards", {"texts": ["a"]}, "connection", 503),
        asked("/get_reward", {"query": ["a"]}, "connection", 503),
        asked("/classify", {"input": "a"}, "connection", 503),
        asked("/verify", rollout("a", "b"), (0.0, True)),
    ]
    asyncio.run(send_all(fronted.url, unanswered * 10))
    assert time.monotonic() - begun < 10
    fronted.ranks[0].send_signal(signal.SIGTERM)
    assert fronted.wait(15) == [0], fronted.output()[-3000:]
