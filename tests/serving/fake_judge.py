"""A judge over HTTP whose scores are written in the responses, and which can misbehave.

A response ``... 4`` gets the score 4. A response may also name a mode of ``MODES``, e.g. ``slow``:
then the judge answers so, always, or as often as ``failures`` says, and after that with a verdict.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from aiohttp import web

MODES = ("slow", "malformed", "outside", "refuses", "filtered", "dies", "broken", "busy", "endless")
MODES += ("nothing", "html", "forbidden", "cut", "long", "drafts")
DRAFT = '{"score_1": 1, "score_2": 5, "ranking": 6}'
USAGE = {"prompt_tokens": 10, "completion_tokens": 3}


class FakeJudge:
    """Attributes: requests, most requests at once, and how often each mode is still to come."""

    def __init__(self, failures: int | None = None) -> None:
        self.url = ""
        self.requests: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.pause_s = 0.0
        self.moved_to: str | None = None  # URL to which all requests are redirected
        self.open = self.most_open = 0
        self._failures = failures
        self._seen: Counter[str] = Counter()

    @asynccontextmanager
    async def running(self) -> AsyncIterator[FakeJudge]:
        app = web.Application(client_max_size=2**26)
        app.router.add_post("/v1/chat/completions", self._answer)
        app.router.add_get("/v1/models", self._list_models)
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        self.url = f"http://127.0.0.1:{runner.addresses[0][1]}/v1"
        try:
            yield self
        finally:
            await runner.cleanup()

    async def _list_models(self, request: web.Request) -> web.Response:
        return self._redirect("/models") or web.json_response({"data": []})

    def _redirect(self, path: str) -> web.Response | None:
        if self.moved_to is None:
            return None
        return web.Response(status=301, headers={"Location": f"{self.moved_to}{path}"})

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        if redirect := self._redirect("/chat/completions"):
            return redirect
        body = await request.json()
        self.requests.append(body)
        self.headers.append(dict(request.headers))
        self.open += 1
        self.most_open = max(self.most_open, self.open)
        try:
            await asyncio.sleep(self.pause_s)
            texts = responses_of(body)
            mode = next((mode for mode in MODES if any(mode in text for text in texts)), None)
            if mode is not None and (self._failures is None or self._seen[mode] < self._failures):
                self._seen[mode] += 1
                return await self._misbehave(mode, request)
            return web.json_response(completion(verdict(texts)))
        finally:
            self.open -= 1

    async def _misbehave(self, mode: str, request: web.Request) -> web.StreamResponse:
        if mode == "slow":
            await asyncio.sleep(30)
        if mode == "dies":
            assert request.transport is not None
            request.transport.abort()
        if mode == "endless":  # a body that never ends
            stream = web.StreamResponse()
            await stream.prepare(request)
            while True:
                await stream.write(b" " * 2**16)
                await asyncio.sleep(0)
        if mode == "long":  # as vLLM answers a prompt beyond its longest sequence
            error = {"message": "The prompt is too long.", "type": "BadRequestError", "code": 400}
            return web.json_response({"error": error}, status=400)
        statuses = {"broken": 500, "busy": 429, "forbidden": 401}
        if mode in statuses:
            headers = {"Retry-After": "0.01"} if mode == "busy" else {}
            return web.Response(status=statuses[mode], text="no", headers=headers)
        if mode == "html":
            return web.Response(text="<html>", content_type="text/html")
        contents: dict[str, Any] = {
            "malformed": completion("Both are fine."),
            "outside": completion('{"score_1": 9, "score_2": 3, "ranking": 2}'),
            "refuses": completion(None, refusal="I will not"),
            "filtered": completion("", reason="content_filter"),
            "cut": completion(f"<think>First {DRAFT}, but", reason="length"),
            "drafts": completion(f"<think>Maybe {DRAFT}. No.</think>I cannot tell."),
            "nothing": {"choices": []},
        }
        return web.json_response(contents.get(mode))


def responses_of(body: dict[str, Any]) -> list[str]:
    """Read the responses of a request in either form of prompt."""
    messages = body["messages"]
    marked = [m["content"] for m in messages if m["role"].startswith("response_")]
    return marked or re.findall(r"<response_\d>\n(.*?)\n</response_", messages[0]["content"], re.S)


def verdict(texts: list[str]) -> str:
    scores = [int(re.findall(r"\d", text)[-1]) for text in texts]
    if len(scores) == 1:
        return f'Good. {{"score_1": {scores[0]}}}'
    first, second = scores
    # Of two equal scores, the response with the first text in order is slightly better.
    ranking = 2 if first > second else 5 if first < second else 3 if texts[0] < texts[1] else 4
    scored = {"score_1": first, "score_2": second, "ranking": ranking}
    return f"I compare {{a}} and {{b}}.\n```json\n{json.dumps(scored)}\n```"


def completion(
    content: str | None, reason: str = "stop", refusal: str | None = None
) -> dict[str, Any]:
    message = {"role": "assistant", "content": content, "refusal": refusal}
    return {"choices": [{"message": message, "finish_reason": reason}], "usage": USAGE}
