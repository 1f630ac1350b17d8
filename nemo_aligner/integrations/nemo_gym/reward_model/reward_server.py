"""Reward model servers, asked by KServe's JSON; and one that is started for this environment."""

from __future__ import annotations

import asyncio
import atexit
import itertools
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp

MODEL = "reward_model"
CONTRACT_MODEL = "contract"
_PAUSE_S = 0.5
_STOP_S = 30.0
# Statuses that may pass, and how a server names a row that it refuses: copies from nemo_aligner's
# serving/failures.py, which cannot be imported here (a test there compares them).
_UNAVAILABLE = (429, 502, 503, 504)
_ROW = re.compile(r"^(?:\w+, )?row \d+: ")
_COMES_BACK = ("transport_unreachable", "provider_unavailable")
_SHOWN = 2000

# ``messages`` and ``tools``.
Conversation = Mapping[str, Any]
OTHER_REPLY = {"role": "assistant", "content": "."}


class RefusedReplyError(Exception):
    """The server does not score this reply, and says why; with another one it would."""


class _RefusedTextError(Exception):
    """The server does not score this conversation, and says why."""


class RewardServerError(Exception):
    """No reward, and the policy is not to blame; ``kind`` is one of Gym's failure kinds."""

    def __init__(self, kind: str, reason: str) -> None:
        super().__init__(reason)
        self.kind = kind


@dataclass(frozen=True)
class ScoredConversation:
    """Rewards of one conversation by attribute, and whether its beginning was cut off."""

    rewards: dict[str, float]
    reward: float
    truncated: bool
    contract_hash: str


class RewardServers:
    """Servers of one model; each request goes to the next, and on to another where one is gone."""

    def __init__(
        self,
        urls: Sequence[str],
        attribute: str | None,
        timeout_s: float,
        retry_s: float,
        token: str | None = None,
    ) -> None:
        """``retry_s``: for how long a request looks for a server that answers."""
        self._headers = {} if token is None else {"Authorization": f"Bearer {token}"}
        self._urls = itertools.cycle([url.rstrip("/") for url in urls])
        self._attribute = attribute
        self._timeout_s, self._retry_s = timeout_s, retry_s
        self._session: aiohttp.ClientSession | None = None
        self._contract: dict[str, Any] | None = None

    async def score(
        self, conversation: Conversation, other: Conversation | None = None
    ) -> ScoredConversation:
        """The rewards of a conversation; ``other`` is its prompt with a reply that nobody refuses.

        None: with the last message replaced.

        Raises:
            RefusedReplyError, RewardServerError: see there.
        """
        try:
            outputs = await self._ask_for(conversation)
        except _RefusedTextError as refusal:
            replied = [*conversation["messages"][:-1], OTHER_REPLY]
            await self._check_prompt(other or {**conversation, "messages": replied})
            raise RefusedReplyError(str(refusal)) from refusal
        contract = await self._published()
        try:
            rewards = dict(zip(contract["attributes"], outputs["rewards"], strict=True))
            reward = self._one_reward(rewards, contract)
            truncated, made_by = bool(outputs["exceeded"][0]), outputs["contract_hash"][0]
        except (KeyError, ValueError, TypeError) as error:
            raise RewardServerError(
                "verifier_error", f"an answer without rewards: {error}"
            ) from error
        if made_by != contract["hash"]:
            self._contract = None
            raise RewardServerError(
                "verifier_error",
                f"a reward by the scoring contract {made_by}, wanted {contract['hash']}",
            )
        return ScoredConversation(rewards, reward, truncated, made_by)

    async def _ask_for(self, conversation: Conversation) -> dict[str, list[Any]]:
        """Without tools it is a list, which servers of earlier versions take, too."""
        whole = conversation if conversation.get("tools") else conversation["messages"]
        text = json.dumps(whole, ensure_ascii=False)
        return await self._ask(MODEL, _tensor("conversations", "BYTES", [1, 1], [text]))

    async def _check_prompt(self, other: Conversation) -> None:
        """Raise RewardServerError if any reply is refused, so that the prompt is at fault."""
        try:
            await self._ask_for(other)
        except _RefusedTextError as refusal:
            reason = f"the model refuses what the policy was asked: {refusal}"
            raise RewardServerError("verifier_error", reason) from refusal

    async def close(self) -> None:
        """Let the connections go."""
        if self._session is not None:
            await self._session.close()

    def _one_reward(self, rewards: dict[str, float], contract: dict[str, Any]) -> float:
        """That of the attribute; or the sum by the weights that the contract has."""
        if self._attribute is not None:
            return float(rewards[self._attribute])
        pairs = zip(rewards.values(), contract["attribute_weights"], strict=True)
        return float(sum(value * weight for value, weight in pairs))

    async def _published(self) -> dict[str, Any]:
        if self._contract is None:
            dummy = _tensor("dummy_var", "INT64", [1], [0])
            outputs = await self._ask(CONTRACT_MODEL, dummy)
            contract = json.loads(outputs["contract"][0])
            if self._attribute not in (None, *contract["attributes"]):
                known = ", ".join(contract["attributes"])
                reason = f"attribute: got {self._attribute!r}, wanted one of {known}"
                raise RewardServerError("verifier_error", reason)
            self._contract = contract
        return self._contract

    async def _ask(self, model: str, tensor: dict[str, Any]) -> dict[str, list[Any]]:
        """Until one of the servers that are gone or busy answers: to score twice harms nobody."""
        end = time.monotonic() + self._retry_s
        while True:
            try:
                return await self._post(f"{next(self._urls)}/v2/models/{model}/infer", tensor)
            except RewardServerError as error:
                if error.kind not in _COMES_BACK or time.monotonic() > end:
                    raise
            await asyncio.sleep(_PAUSE_S)

    async def _post(self, url: str, tensor: dict[str, Any]) -> dict[str, list[Any]]:
        timeout = aiohttp.ClientTimeout(total=self._timeout_s)
        if self._session is None:
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=0), headers=self._headers
            )
        try:
            async with self._session.post(
                url, json={"inputs": [tensor]}, timeout=timeout
            ) as answer:
                return _outputs(url, answer.status, await answer.text())
        except asyncio.TimeoutError as error:
            raise RewardServerError("transport_timeout", f"{url}: no answer in time") from error
        except aiohttp.ClientError as error:
            raise RewardServerError("transport_unreachable", f"{url}: {error}") from error


def _tensor(name: str, datatype: str, shape: list[int], data: list[Any]) -> dict[str, Any]:
    return {"name": name, "datatype": datatype, "shape": shape, "data": data}


def _outputs(url: str, status: int, text: str) -> dict[str, list[Any]]:
    try:
        body = json.loads(text)
    except ValueError:
        body = {"error": text[:_SHOWN]}
    if status == 200 and "outputs" in body:
        return {output["name"]: output["data"] for output in body["outputs"]}
    said = str(body.get("error", text))[:_SHOWN]
    if status == 400 and _ROW.match(said):  # else the request as a whole is unfit, and no text
        raise _RefusedTextError(_ROW.sub("", said))
    kind = "provider_unavailable" if status in _UNAVAILABLE else "verifier_error"
    raise RewardServerError(kind, f"{url}: HTTP {status}: {said}")


# Linux ends the server with its parent, however that ends: uvicorn ends by the signal that it got,
# which leaves atexit out.
_WITH_PARENT = """
import ctypes, os, signal, sys
library = ctypes.CDLL(None)
if hasattr(library, "prctl"):
    library.prctl(1, signal.SIGTERM)
os.execvp(sys.argv[1], sys.argv[1:])
"""


class StartedServer:
    """``nemo-aligner serve`` in a process of its own, which ends with this one."""

    def __init__(self, command: Sequence[str], settings: Sequence[str], device: str | None) -> None:
        """``command`` is what runs ``nemo-aligner``; it need not be in this environment."""
        self._folder = tempfile.TemporaryDirectory()
        self._ready = Path(self._folder.name, "ready")
        environment = {**os.environ, **({"CUDA_VISIBLE_DEVICES": ""} if device == "cpu" else {})}
        own = ["server.port=0", f"server.ready_file={self._ready}"]
        whole = [sys.executable, "-c", _WITH_PARENT, *command, "serve", *settings, *own]
        self._process = subprocess.Popen(whole, env=environment)
        atexit.register(self.stop)

    async def url(self, within_s: float) -> str:
        """Wait until it answers; its URL.

        Raises:
            RewardServerError: it ended, or needs longer; its own output says why.
        """
        end = time.monotonic() + within_s
        while not self._ready.exists():
            code = self._process.poll()
            if code is not None:
                reason = f"the reward server ended with exit code {code}; its output says why"
                raise RewardServerError("provider_unavailable", reason)
            if time.monotonic() > end:
                reason = f"the reward server was not ready within {within_s:g} s"
                raise RewardServerError("provider_unavailable", reason)
            await asyncio.sleep(_PAUSE_S)
        return self._ready.read_text().strip()

    def stop(self) -> None:
        """End it; a second time does nothing."""
        atexit.unregister(self.stop)
        self._process.terminate()
        try:
            self._process.wait(_STOP_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._folder.cleanup()
