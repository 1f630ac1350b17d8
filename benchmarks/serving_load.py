"""Worker of serving.py: asks a server from so many clients at once, and says how long each waited.

The same process asks every server. The first line on stdin is the job, which is empty; each further
one is a load: the requests (``path`` and ``body``), how many of them to send (they are sent again
from the first where they are fewer), and from how many clients, of which each sends the next
request once it has its answer. Nothing is sent to another machine, nor after ``limit_s`` seconds.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import aiohttp

MOST_REQUESTS = 1_000_000
MOST_CLIENTS = 1024
MOST_SECONDS = 3600.0
_HEADERS = {"Content-Type": "application/json"}


@dataclass
class Reply:
    """What one request was answered; status 0 is no answer at all, and ``body`` says why."""

    status: int
    body: bytes
    seconds: float


def main() -> None:
    # What libraries print must not be taken for an answer.
    answers, sys.stdout = sys.stdout, sys.stderr
    sys.stdin.readline()
    for line in sys.stdin:
        print(json.dumps(asyncio.run(put(json.loads(line)))), file=answers, flush=True)


async def put(load: Mapping[str, Any]) -> dict[str, Any]:
    """Send a load; of each request its status (None: not sent in time), seconds and rewards."""
    check(load)
    requests = [(load["url"] + each["path"], each["body"].encode()) for each in load["requests"]]
    replies: list[Reply | None] = [None] * load["count"]
    numbers = iter(range(load["count"]))

    async def client(session: aiohttp.ClientSession) -> None:
        for number in numbers:
            replies[number] = await _ask(session, *requests[number % len(requests)])

    connector = aiohttp.TCPConnector(limit=load["clients"])
    timeout = aiohttp.ClientTimeout(total=None)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout) as session:
        start = time.perf_counter()
        clients = [asyncio.create_task(client(session)) for _ in range(load["clients"])]
        _, late = await asyncio.wait(clients, timeout=load["limit_s"])
        seconds = time.perf_counter() - start
        for each in late:
            each.cancel()
        await asyncio.gather(*late, return_exceptions=True)
    return {
        "seconds": seconds,
        "statuses": [None if reply is None else reply.status for reply in replies],
        "waited": [None if reply is None else reply.seconds for reply in replies],
        "rewards": [None if reply is None else rewards_of(reply) for reply in replies],
        "said": [
            reply.body.decode(errors="replace")[:200]
            for reply in replies
            if reply is not None and reply.status != 200
        ][:10],
    }


def check(load: Mapping[str, Any]) -> None:
    """Refuse what would go to another machine, or on for too long."""
    url = urlsplit(load["url"])
    if url.scheme != "http" or url.hostname != "127.0.0.1":
        raise ValueError(f"url: got {load['url']}, wanted http://127.0.0.1:...")
    for name, most in (("count", MOST_REQUESTS), ("clients", MOST_CLIENTS)):
        if not 1 <= load[name] <= most:
            raise ValueError(f"{name}: got {load[name]}, wanted 1 to {most}")
    if not 0 < load["limit_s"] <= MOST_SECONDS:
        raise ValueError(f"limit_s: got {load['limit_s']}, wanted up to {MOST_SECONDS}")


async def _ask(session: aiohttp.ClientSession, url: str, body: bytes) -> Reply:
    start = time.perf_counter()
    try:
        async with session.post(url, data=body, headers=_HEADERS) as response:
            content = await response.read()
            return Reply(response.status, content, time.perf_counter() - start)
    except (aiohttp.ClientError, OSError) as error:
        said = f"{type(error).__name__}: {error}".encode()
        return Reply(0, said, time.perf_counter() - start)


def rewards_of(reply: Reply) -> list[float] | None:
    """The rewards that a KServe server, the gateway or vLLM has answered, None if it has not.

    Of several in one text (``token_classify``) they are those of the last.
    """
    if reply.status != 200:
        return None
    content = json.loads(reply.body)
    if "outputs" in content:
        found = {output["name"]: output["data"] for output in content["outputs"]}
        return [float(reward) for reward in found["rewards"]]
    if "rewards" in content:
        return [float(row[0]) for row in content["rewards"]]
    if "probs" in content["data"][0]:
        return [float(row["probs"][0]) for row in content["data"]]
    return [float(row["data"][-1][0]) for row in content["data"]]


if __name__ == "__main__":
    main()
