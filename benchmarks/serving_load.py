"""Worker of serving.py: sends requests from concurrent clients and measures their latencies.

One process is used for all servers. The first line on stdin is the job, which is empty. Each
further line is a load: ``requests`` (``path`` and ``body``), the ``count`` to send (repeating from
the first if there are fewer) and the number of ``clients``, each of which sends the next request
once it has its answer. Requests go only to this machine, and end after ``limit_s`` seconds.
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

MAX_REQUESTS = 1_000_000
MAX_CLIENTS = 1024
MAX_SECONDS = 3600.0
_HEADERS = {"Content-Type": "application/json"}


@dataclass
class Reply:
    """Answer to one request. Status 0 means that there was none; ``body`` then has the error."""

    status: int
    body: bytes
    seconds: float


def main() -> None:
    # Answers go to the real stdout; whatever libraries print goes to stderr.
    answers, sys.stdout = sys.stdout, sys.stderr
    sys.stdin.readline()
    for line in sys.stdin:
        print(json.dumps(asyncio.run(send_load(json.loads(line)))), file=answers, flush=True)


async def send_load(load: Mapping[str, Any]) -> dict[str, Any]:
    """Send requests from concurrent clients; the module's docstring describes ``load``.

    Returns:
        Status, seconds and rewards of each request; None for a request without an answer in time.
    """
    check(load)
    requests = [
        (load["url"] + request["path"], request["body"].encode()) for request in load["requests"]
    ]
    replies: list[Reply | None] = [None] * load["count"]
    numbers = iter(range(load["count"]))

    async def client(session: aiohttp.ClientSession) -> None:
        for number in numbers:
            replies[number] = await _send_request(session, *requests[number % len(requests)])

    connector = aiohttp.TCPConnector(limit=load["clients"])
    timeout = aiohttp.ClientTimeout(total=None)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout) as session:
        start = time.perf_counter()
        clients = [asyncio.create_task(client(session)) for _ in range(load["clients"])]
        _, late = await asyncio.wait(clients, timeout=load["limit_s"])
        seconds = time.perf_counter() - start
        for task in late:
            task.cancel()
        await asyncio.gather(*late, return_exceptions=True)
    return {
        "seconds": seconds,
        "statuses": [None if reply is None else reply.status for reply in replies],
        "latencies": [None if reply is None else reply.seconds for reply in replies],
        "rewards": [None if reply is None else read_rewards(reply) for reply in replies],
        "messages": [
            reply.body.decode(errors="replace")[:200]
            for reply in replies
            if reply is not None and reply.status != 200
        ][:10],
    }


def check(load: Mapping[str, Any]) -> None:
    """Reject a load that would go to another machine or take too long.

    Raises:
        ValueError: a value of the load is out of range.
    """
    url = urlsplit(load["url"])
    if url.scheme != "http" or url.hostname != "127.0.0.1":
        raise ValueError(f"url: got {load['url']}, wanted http://127.0.0.1:...")
    for name, limit in (("count", MAX_REQUESTS), ("clients", MAX_CLIENTS)):
        if not 1 <= load[name] <= limit:
            raise ValueError(f"{name}: got {load[name]}, wanted 1 to {limit}")
    if not 0 < load["limit_s"] <= MAX_SECONDS:
        raise ValueError(f"limit_s: got {load['limit_s']}, wanted up to {MAX_SECONDS}")


async def _send_request(session: aiohttp.ClientSession, url: str, body: bytes) -> Reply:
    start = time.perf_counter()
    try:
        async with session.post(url, data=body, headers=_HEADERS) as response:
            content = await response.read()
            return Reply(response.status, content, time.perf_counter() - start)
    except (aiohttp.ClientError, OSError) as error:
        message = f"{type(error).__name__}: {error}".encode()
        return Reply(0, message, time.perf_counter() - start)


def read_rewards(reply: Reply) -> list[float] | None:
    """The rewards in an answer of a KServe server, the gateway or vLLM; None in an error.

    Where a sequence has several rewards (``token_classify``) it is the last one; vLLM then returns
    two classes.
    """
    if reply.status != 200:
        return None
    content = json.loads(reply.body)
    if "outputs" in content:
        outputs = {output["name"]: output["data"] for output in content["outputs"]}
        return [float(reward) for reward in outputs["rewards"]]
    if "rewards" in content:
        return [float(row[0]) for row in content["rewards"]]
    if "probs" in content["data"][0]:
        return [float(row["probs"][0]) for row in content["data"]]
    return [float(row["data"][-1][-1]) for row in content["data"]]


if __name__ == "__main__":
    main()
