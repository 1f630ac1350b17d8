"""Thousands of requests with known answers, and clients that leave."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import numpy as np

INFER = "/v2/models/reward_model/infer"
ATOL = 2e-5
CLIENTS = 64


@dataclass(frozen=True)
class Request:
    """A request and its expected answer: numbers, or a status and a part of the message."""

    path: str
    body: Any
    status: int = 200
    found: Any = None
    headers: dict[str, str] = field(default_factory=dict)

    @property
    def data(self) -> bytes:
        return self.body if isinstance(self.body, bytes) else json.dumps(self.body).encode()

    def check(self, status: int, answer: Any) -> None:
        shown = (self.path, self.data[:200], status, str(answer)[:400])
        assert status == self.status, shown
        if status == 200:
            found = np.array(numbers(self.path, answer), dtype=float)
            wanted = np.array(self.found, dtype=float).reshape(found.shape)
            np.testing.assert_allclose(found, wanted, rtol=0, atol=ATOL, err_msg=str(shown))
        else:
            assert self.found in words(answer), shown


def numbers(path: str, answer: Any) -> Any:
    """Return the rewards in an answer of any protocol; the first column of the gateway's."""
    if path == INFER:
        return answer["outputs"][0]["data"]
    if path == "/v1/rewards":
        return [row and row[0] for row in answer["rewards"]]
    if path == "/get_reward":
        return answer["rewards"]
    if path == "/verify":
        return (answer["reward"], answer["mask_sample"])
    key = {"/classify": "probs", "/pooling": "data", "/score": "score"}[path]
    return [row[key] if path == "/score" else row[key][0] for row in answer["data"]]


def words(answer: Any) -> str:
    """Return the error message in an answer of any protocol."""
    said = answer["detail"] if "detail" in answer else answer["error"]
    text = said["message"] if isinstance(said, dict) else said
    assert isinstance(text, str), answer
    return text


async def send_all(url: str, requests: Sequence[Request]) -> float:
    """Send all requests, check every answer, and return the seconds that it took."""
    waiting = iter(requests)

    async def client(session: Any) -> None:
        for request in waiting:
            async with session.post(
                url + request.path, data=request.data, headers=request.headers
            ) as response:
                request.check(response.status, await response.json(content_type=None))

    timeout, connector = aiohttp.ClientTimeout(120), aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(timeout=timeout, connector=connector) as session:
        begun = time.monotonic()
        await asyncio.gather(*(client(session) for _ in range(CLIENTS)))
        return time.monotonic() - begun


async def leave(url: str, requests: Sequence[Request]) -> None:
    """Clients that leave in the middle of a request."""
    for number, request in enumerate(requests):
        _, writer = await asyncio.open_connection(*url[7:].split(":"))
        headers = {"Host": "x", "Content-Length": len(request.data), **request.headers}
        lines = [f"POST {request.path} HTTP/1.1", *(f"{k}: {v}" for k, v in headers.items())]
        part = request.data[: number * len(request.data) // len(requests)]
        writer.write("\r\n".join([*lines, "", ""]).encode() + part)
        await writer.drain()
        writer.close()


def check_that_leavers_harm_nobody(url: str, good: Callable[[], Request]) -> None:
    async def both() -> None:
        left = leave(url, [good() for _ in range(50)])
        await asyncio.gather(left, send_all(url, [good() for _ in range(200)]))

    asyncio.run(both())
    asyncio.run(send_all(url, [good() for _ in range(50)]))
