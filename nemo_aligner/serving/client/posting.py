"""JSON posted to servers of others, several requests side by side."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import aiohttp

from nemo_aligner.serving.client.causes import cause_of
from nemo_aligner.serving.tokens import hide_password
from nemo_aligner.utils.console import Watch, unwatched
from nemo_aligner.utils.errors import ServingError, one_line

# vLLM scores together what is there at once, so requests one after the other would take far longer.
_AT_ONCE = 16


@dataclass(frozen=True)
class PostingAddress:
    """Target of POST requests; ``timeout_s`` is for one request."""

    url: str
    bearer_token: str | None = None
    timeout_s: float = 600.0

    @property
    def name(self) -> str:
        """The URL for people, without a password."""
        return hide_password(self.url)


@dataclass(frozen=True)
class JsonAnswer:
    """An HTTP status, and what the body says: of JSON its value, else its text."""

    status: int
    body: Any


def post_all(
    address: PostingAddress, bodies: Sequence[Mapping[str, Any]], watch: Watch = unwatched
) -> list[JsonAnswer]:
    """The answers to all bodies, in their order; at most 16 are on their way at once.

    Raises:
        ServingError: the server does not answer one.
    """
    return asyncio.run(_post_all(address, bodies, watch))


async def _post_all(
    address: PostingAddress, bodies: Sequence[Mapping[str, Any]], watch: Watch
) -> list[JsonAnswer]:
    token = address.bearer_token
    headers = {} if token is None else {"Authorization": f"Bearer {token}"}
    connector = aiohttp.TCPConnector(limit=_AT_ONCE)
    waiting, done = asyncio.Semaphore(_AT_ONCE), 0
    watch(0, len(bodies))

    async def post(session: aiohttp.ClientSession, body: Mapping[str, Any]) -> JsonAnswer:
        nonlocal done
        async with waiting:
            answer = await _post(session, address, body)
        done += 1
        watch(done, len(bodies))
        return answer

    async with aiohttp.ClientSession(connector=connector, headers=headers) as session:
        return await asyncio.gather(*(post(session, body) for body in bodies))


async def _post(
    session: aiohttp.ClientSession, address: PostingAddress, body: Mapping[str, Any]
) -> JsonAnswer:
    timeout = aiohttp.ClientTimeout(total=address.timeout_s)
    try:
        async with session.post(address.url, json=body, timeout=timeout) as answer:
            return JsonAnswer(answer.status, _read(await answer.text(errors="replace")))
    except (aiohttp.ClientError, asyncio.TimeoutError) as error:
        is_tls = isinstance(error, aiohttp.ClientSSLError)
        said = cause_of(error) if is_tls else one_line(error)
        why = said or f"nothing within {address.timeout_s:g} s"
        raise ServingError(f"{address.name}: no answer: {why}") from error


def _read(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text
