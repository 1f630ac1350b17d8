"""The gateway among requests of every protocol, malformed ones, wrong tokens; its backend dies."""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest

from tests.serving.fake_server import SEQ_LENGTH, total
from tests.serving.servers import FAKE, QUICK, Server, gateway, running

aiohttp = pytest.importorskip("aiohttp")
pytest.importorskip("pytriton")
pytest.importorskip("fastapi")


CLIENTS = 32
REQUESTS = 2_000
MAX_BYTES = 100_000
TOKEN = "s3cret"
BEARER = {"Authorization": f"Bearer {TOKEN}"}
MODEL_FAILS = [666]


@dataclass(frozen=True)
class Request:
    """What is sent, and what has to come back: a status, and what ``find`` finds in the answer."""

    path: str
    body: Any
    status: int = 200
    found: Any = None
    headers: dict[str, str] = field(default_factory=lambda: BEARER)

    @property
    def data(self) -> bytes:
        return self.body if isinstance(self.body, bytes) else json.dumps(self.body).encode()

    def check(self, status: int, answer: Any) -> None:
        shown = (self.path, self.data[:200], status, str(answer)[:400])
        assert status == self.status, shown
        found = find(self.path, answer) if status == 200 else words(self.path, answer)
        if status == 200:
            assert found == self.found, (shown, found)
        else:
            assert isinstance(found, str), shown
            assert self.found in found, shown


def find(path: str, answer: Any) -> Any:
    """The first column of the rewards in a protocol's answer."""
    if path == "/v1/rewards":
        return [row and row[0] for row in answer["rewards"]]
    if path == "/get_reward":
        return answer["rewards"]
    if path == "/verify":
        return (answer["reward"], answer["mask_sample"])
    key = {"/classify": "probs", "/pooling": "data", "/score": "score"}[path]
    return [row[key] if path == "/score" else row[key][0] for row in answer["data"]]


def words(path: str, answer: Any) -> Any:
    return answer["detail"] if path in ("/get_reward", "/verify") else answer["error"]["message"]


def rollout(asked: str, said: str) -> dict[str, Any]:
    return {
        "responses_create_params": {"input": asked},
        "response": {"output": [{"type": "message", "role": "assistant", "content": said}]},
    }


def ids_of(texts: Sequence[str]) -> list[list[int]]:
    return [[ord(letter) for letter in text] for text in texts]


# Path, body, what is answered, and whether the token is right.
BAD: list[tuple[str, Any, int, Any, bool]] = [
    ("/v1/rewards", b'{"texts": [', 400, "JSON", True),
    ("/v1/rewards", {"texts": [5]}, 400, "texts.0", True),
    ("/v1/rewards", {}, 400, "wanted one of", True),
    ("/v1/rewards", {"tokens": [MODEL_FAILS]}, 500, "token 666", True),
    ("/get_reward", {"query": ["a", ""]}, 400, "row 1: the text is empty", True),
    ("/get_reward", {"queries": ["a"]}, 400, "query", True),
    ("/classify", {"input": [[-1]]}, 400, "row 0: got token id -1", True),
    ("/classify", {"input": "a", "use_activation": True}, 400, "use_activation", True),
    ("/pooling", b"\x00\xff", 400, "JSON", True),
    ("/pooling", {"input": "a" * MAX_BYTES}, 413, "more than", True),
    ("/score", {"text_1": "a"}, 400, "wanted queries", True),
    ("/verify", {"response": {"output": []}}, 400, "responses_create_params", True),
    ("/verify", rollout("", ""), 200, (0.0, True), True),
    ("/v1/rewards", {"texts": ["a"]}, 401, "token", False),
    ("/classify", {"input": "a"}, 401, "token", False),
    ("/verify", rollout("a", "b"), 401, "token", False),
]


class Traffic:
    """Requests whose answers are known: a reward is the sum of a text's last letters."""

    def __init__(self) -> None:
        self._rng = random.Random(5)

    def text(self) -> str:
        return "".join(self._rng.choices("abcdefgh ", k=self._rng.randint(1, SEQ_LENGTH // 2)))

    def good(self) -> Request:
        texts = [self.text() for _ in range(self._rng.randint(1, 8))]
        sums, (first, *_) = [total(text) for text in texts], texts
        turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": first}]
        whole = total("a") + sums[0]
        match self._rng.randrange(10):
            case 0:
                return Request("/v1/rewards", {"texts": texts}, found=sums)
            case 1:
                return Request("/v1/rewards", {"tokens": ids_of(texts)}, found=sums)
            case 2:
                return Request("/v1/rewards", {"conversations": [turns]}, found=[whole])
            case 3:
                return Request("/v1/rewards", {"texts": [first, ""]}, found=[sums[0], None])
            case 4:
                halves = [value / 2 for value in sums]
                return Request("/get_reward", {"query": texts}, found=halves)
            case 5:
                body = {"input": texts, "use_activation": False}
                return Request("/classify", body, found=sums)
            case 6:
                return Request("/classify", {"messages": turns}, found=[whole])
            case 7:
                return Request("/pooling", {"input": ids_of(texts)}, found=sums)
            case 8:
                return Request("/score", {"text_1": "a", "text_2": first}, found=[whole / 2])
        return Request("/verify", rollout("a", first), found=(whole / 2, False))

    def bad(self) -> Request:
        wrong = {"Authorization": self._rng.choice(["Bearer nothing", "Basic s3cret", TOKEN])}
        path, body, status, found, headers = self._rng.choice(BAD)
        return Request(path, body, status, found, BEARER if headers else wrong)

    def mixed(self, count: int) -> list[Request]:
        """A third of them malformed."""
        return [self.bad() if number % 3 == 2 else self.good() for number in range(count)]


async def send_all(url: str, requests: Sequence[Request], clients: int = CLIENTS) -> None:
    """Every answer is checked."""
    waiting = iter(requests)

    async def client(session: Any) -> None:
        for request in waiting:
            async with session.post(
                url + request.path, data=request.data, headers=request.headers
            ) as response:
                request.check(response.status, await response.json(content_type=None))

    timeout, connector = aiohttp.ClientTimeout(60), aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(timeout=timeout, connector=connector) as session:
        await asyncio.gather(*(client(session) for _ in range(clients)))


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
    traffic = Traffic()
    probes = [traffic.good() for _ in range(50)]
    asyncio.run(send_all(fronted.url, probes))
    mixed = traffic.mixed(REQUESTS)
    asyncio.run(send_all(fronted.url, mixed))
    asyncio.run(send_all(fronted.url, probes))
    statuses = Counter(request.status for request in mixed)
    assert set(statuses) == {200, 400, 401, 413, 500}
    assert statuses[401] > 60


def test_clients_that_leave_harm_nobody(fronted: Server) -> None:
    traffic = Traffic()

    async def leave() -> None:
        for number in range(50):
            _, writer = await asyncio.open_connection(*fronted.url[7:].split(":"))
            data = traffic.good().data
            head = f"POST /v1/rewards HTTP/1.1\r\nHost: x\r\nContent-Length: {len(data)}\r\n"
            secret = f"Authorization: Bearer {TOKEN}\r\n\r\n"
            writer.write((head + secret).encode() + data[: number % len(data)])
            await writer.drain()
            writer.close()

    async def both() -> None:
        good = [traffic.good() for _ in range(200)]
        await asyncio.gather(leave(), send_all(fronted.url, good))

    asyncio.run(both())


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
            for pid in backend.processes():  # all of it at once, as where its machine fails
                os.kill(pid, signal.SIGKILL)
            await asyncio.wait_for(asyncio.gather(*asking), 20)
        return statuses

    statuses = asyncio.run(kill_among())
    assert set(statuses) == {200, 503}
    begun = time.monotonic()
    unanswered = [
        Request("/v1/rewards", {"texts": ["a"]}, 503, "connection"),
        Request("/get_reward", {"query": ["a"]}, 503, "connection"),
        Request("/classify", {"input": "a"}, 503, "connection"),
        Request("/verify", rollout("a", "b"), found=(0.0, True)),
    ]
    asyncio.run(send_all(fronted.url, unanswered * 10))
    assert time.monotonic() - begun < 10
    fronted.ranks[0].send_signal(signal.SIGTERM)
    assert fronted.wait(15) == [0], fronted.output()[-3000:]
