"""Post JSON to servers of other projects, several requests at a time."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import aiohttp

from nemo_aligner.serving.client.calls import check_token
from nemo_aligner.serving.client.causes import cause_of, redirect_of
from nemo_aligner.serving.tokens import hide_password
from nemo_aligner.utils.console import Watch, unwatched
from nemo_aligner.utils.errors import ServingError, one_line

# Maximum number of requests in flight. vLLM batches concurrent requests, so sending one at a time
# would be far slower.
_MOST_CONCURRENT = 16


@dataclass(frozen=True)
class PostingAddress:
    """Where to send POST requests; ``timeout_s`` limits one request, in seconds."""

    url: str
    bearer_token: str | None = None
    timeout_s: float = 600.0

    def __post_init__(self) -> None:
        """Raise ConfigError if a request cannot carry the token."""
        check_token(self.bearer_token, [self.url])

    @property
    def name(self) -> str:
        """The URL for error messages, with a password in it hidden."""
        return hide_password(self.url)


@dataclass(frozen=True)
class JsonAnswer:
    """An answer: its HTTP status, and its body as parsed JSON, or as text if it is not JSON."""

    status: int
    body: Any


def post_all(
    address: PostingAddress, bodies: Sequence[Mapping[str, Any]], watch: Watch = unwatched
) -> list[JsonAnswer]:
    """Post all bodies, and return the answers in the same order; 16 requests run at a time.

    Raises:
        ServingError: a request got no answer, or was redirected to another URL.
    """
    return asyncio.run(_post_all(address, bodies, watch))


async def _post_all(
    address: PostingAddress, bodies: Sequence[Mapping[str, Any]], watch: Watch
) -> list[JsonAnswer]:
    token = address.bearer_token
    headers = {} if token is None else {"Authorization": f"Bearer {token}"}
    connector = aiohttp.TCPConnector(limit=_MOST_CONCURRENT)
    semaphore, done = asyncio.Semaphore(_MOST_CONCURRENT), 0
    watch(0, len(bodies))

    async def post(session: aiohttp.ClientSession, body: Mapping[str, Any]) -> JsonAnswer:
        nonlocal done
        async with semaphore:
            answer = await _post_body(session, address, body)
        done += 1
        watch(done, len(bodies))
        return answer

    async with aiohttp.ClientSession(connector=connector, headers=headers) as session:
        return await asyncio.gather(*(post(session, body) for body in bodies))


async def _post_body(
    session: aiohttp.ClientSession, address: PostingAddress, body: Mapping[str, Any]
) -> JsonAnswer:
    timeout = aiohttp.ClientTimeout(total=address.timeout_s)
    try:
        async with session.post(
            address.url, json=body, timeout=timeout, allow_redirects=False
        ) as answer:
            redirect = redirect_of(answer.status, answer.headers, address.url)
            if redirect is not None:
                raise ServingError(f"{address.name}: {redirect}")
            return JsonAnswer(answer.status, _parse_json(await answer.text(errors="replace")))
    except (aiohttp.ClientError, asyncio.TimeoutError) as error:
        is_tls = isinstance(error, aiohttp.ClientSSLError)
        message = cause_of(error) if is_tls else one_line(error)
        reason = message or f"nothing within {address.timeout_s:g} s"
        raise ServingError(f"{address.name}: no answer: {reason}") from error


def _parse_json(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text
