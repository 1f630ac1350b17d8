"""Requests of every kind at once: each gets its own answer, and the good ones go on."""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from tests import tiny
from tests.serving.conftest import MAX_ROWS
from tests.serving.servers import Server, json_request, tokens_request

aiohttp = pytest.importorskip("aiohttp")
pytest.importorskip("pytriton")


CLIENTS = 64
REQUESTS = 2_000
LARGE = 2_000_000
ATOL = 2e-5


@dataclass(frozen=True)
class Request:
    """What is sent, and what has to come back: rewards, or a status and a part of the message."""

    body: bytes
    rewards: np.ndarray | None = None
    statuses: tuple[int, ...] = (200,)
    message: str = ""

    def check(self, status: int, answer: dict[str, Any]) -> None:
        assert status in self.statuses, (status, answer, self.body[:200])
        if self.rewards is None:
            assert self.message in answer["error"], (answer, self.body[:200])
        else:
            found = np.reshape(answer["outputs"][0]["data"], self.rewards.shape)
            np.testing.assert_allclose(found, self.rewards, rtol=0, atol=ATOL)


def body_of(*inputs: dict[str, Any]) -> bytes:
    return json.dumps({"inputs": inputs, "outputs": [{"name": "rewards"}]}).encode()


def column(name: str, rows: Sequence[Any]) -> dict[str, Any]:
    datatype = "INT64" if name == "sequence_lengths" else "BYTES"
    return json_request(name, datatype, [[row] for row in rows])


class Traffic:
    """Requests drawn from texts whose rewards are known."""

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
        self._rewards = {
            "sentences": scorer.score(self._texts),
            "conversations": scorer.score(self._dialogues),
            "large": scorer.score(self._large),
        }

    def good(self) -> Request:
        form = self._rng.choice(["sentences", "conversations", "tokens"])
        rows = [self._rng.randrange(200) for _ in range(self._rng.randint(1, 8))]
        if form == "tokens":
            lists = [self._tokens[row] for row in rows]
            width = max(map(len, lists)) + self._rng.randint(0, 5)
            padded = [ids + [0] * (width - len(ids)) for ids in lists]
            body = body_of(*tokens_request(padded, *map(len, lists)))
            return Request(body, self._rewards["sentences"][rows])
        if form == "sentences":
            body = body_of(column(form, [self._texts[row] for row in rows]))
        else:
            body = body_of(column(form, [json.dumps(self._dialogues[row]) for row in rows]))
        return Request(body, self._rewards[form][rows])

    def large(self) -> Request:
        number = self._rng.randrange(len(self._large))
        body = body_of(column("sentences", [self._large[number]]))
        return Request(body, self._rewards["large"][[number]])

    def malformed(self) -> Request:
        tokens = json_request("tokens", "INT64", [[5, 6, 7]])
        kinds = [
            (body_of(column("sentences", ["fine", ""])), 400, "row 1: the text has no tokens"),
            (body_of(column("conversations", ["[1]"])), 400, "conversations, row 0: got [1]"),
            (body_of(column("conversations", ["{"])), 400, "conversations, row 0: not JSON"),
            (body_of(tokens), 400, "tokens and sequence_lengths together"),
            (body_of(tokens, column("sequence_lengths", [4])), 400, "row 0: got 4, wanted 1 to 3"),
            (body_of(*tokens_request([[10**6]])), 400, "row 0: got token id 1000000"),
            (body_of(column("sentences", ["a"] * (MAX_ROWS + 1))), 400, str(MAX_ROWS)),
            (body_of(json_request("sentences", "BYTES", [["a", "b"]])), 400, "shape"),
            (body_of(json_request("tokens", "FP32", [[1.0]])), 400, "data-type"),
            (body_of(column("sentences", ["a"]), tokens), 400, "exactly one of"),
        ]
        body, status, message = self._rng.choice(kinds)
        return Request(body, None, (status,), message)

    def mixed(self, count: int) -> list[Request]:
        """A third malformed, 2% of 2 MB, the others good."""
        makers = self._rng.choices(
            [self.malformed, self.large, self.good], [1 / 3, 0.02, 2 / 3 - 0.02], k=count
        )
        return [make() for make in makers]


async def send_all(url: str, requests: Sequence[Request], clients: int = CLIENTS) -> float:
    """Rows of good requests answered a second; every answer is checked."""
    waiting = iter(requests)
    target = f"{url}/v2/models/reward_model/infer"

    async def client(session: Any) -> None:
        for request in waiting:
            async with session.post(target, data=request.body) as response:
                request.check(response.status, await response.json(content_type=None))

    timeout, connector = aiohttp.ClientTimeout(120), aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(timeout=timeout, connector=connector) as session:
        begun = time.monotonic()
        await asyncio.gather(*(client(session) for _ in range(clients)))
        rows = sum(len(request.rewards) for request in requests if request.rewards is not None)
        return rows / (time.monotonic() - begun)


@pytest.fixture(scope="module")
def traffic(scorer: Any) -> Traffic:
    return Traffic(scorer)


def test_server_under_fire_gives_every_request_its_own_answer_and_good_ones_go_on(
    model_server: Server, traffic: Traffic
) -> None:
    probe = traffic.good()
    asyncio.run(send_all(model_server.url, [probe] * 3))
    alone, among = [], []
    for _ in range(4):  # in turns, of which the fastest count: the machine has other work at times
        good = [traffic.good() for _ in range(500)]
        alone.append(asyncio.run(send_all(model_server.url, good)))
        among.append(asyncio.run(send_all(model_server.url, traffic.mixed(REQUESTS // 4))))
    print("rows/s alone", alone, "among others", among)
    asyncio.run(send_all(model_server.url, [probe]))
    assert max(among) >= 0.5 * max(alone)
    assert " requests/s | " in model_server.output()


def test_server_is_not_harmed_by_clients_that_leave(model_server: Server, traffic: Traffic) -> None:
    async def leave() -> None:
        for _ in range(30):
            _, writer = await asyncio.open_connection(*model_server.url[7:].split(":"))
            body = traffic.good().body
            head = f"POST /v2/models/reward_model/infer HTTP/1.1\r\nContent-Length: {len(body)}\r\n"
            writer.write(head.encode() + b"Host: x\r\n\r\n" + body[: random.randint(1, len(body))])
            await writer.drain()
            writer.close()

    async def both() -> None:
        await asyncio.gather(
            leave(), send_all(model_server.url, [traffic.good() for _ in range(200)])
        )

    asyncio.run(both())
    asyncio.run(send_all(model_server.url, [traffic.good() for _ in range(50)]))
