"""Requests of every kind at once: each gets its own answer, and the good ones go on."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Sequence
from typing import Any

import pytest

from tests import tiny
from tests.serving.conftest import MAX_ROWS
from tests.serving.fire import INFER, Request, check_that_leavers_harm_nobody, send_all
from tests.serving.servers import Server, json_request, tokens_request

pytest.importorskip("pytriton")

CLIENTS = 64
REQUESTS = 2_000
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
    request(json_request("tokens", "FP32", [[1.0]]), status=400, found="data-type"),
]


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
        self._rewards = scorer.score(self._texts)
        self._of_dialogues = scorer.score(self._dialogues)
        self._of_large = scorer.score(self._large)

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
        """A third malformed, 2% of 2 MB, the others good."""
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
    seconds = asyncio.run(send_all(url, requests, CLIENTS))
    return sum(len(each.found) for each in requests if each.status == 200) / seconds


def test_server_under_fire_gives_every_request_its_own_answer_and_good_ones_go_on(
    model_server: Server, traffic: Traffic
) -> None:
    probe = traffic.good()
    asyncio.run(send_all(model_server.url, [probe] * 3, CLIENTS))
    alone, among = [], []
    for _ in range(4):  # in turns, of which the fastest count: the machine has other work at times
        good = [traffic.good() for _ in range(500)]
        alone.append(rows_per_second(model_server.url, good))
        among.append(rows_per_second(model_server.url, traffic.mixed(REQUESTS // 4)))
    print("rows/s alone", alone, "among others", among)
    asyncio.run(send_all(model_server.url, [probe], CLIENTS))
    assert max(among) >= 0.5 * max(alone)
    assert " requests/s | " in model_server.output()


def test_server_is_not_harmed_by_clients_that_leave(model_server: Server, traffic: Traffic) -> None:
    check_that_leavers_harm_nobody(model_server.url, traffic.good, CLIENTS)
