"""Gateways of nemo_aligner, asked for the rewards of rollouts; and one that is started here."""

from __future__ import annotations

import asyncio
import atexit
import itertools
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import aiohttp
from yarl import URL

_PAUSE_S = 0.5
_STOP_S = 30.0
# What a proxy says where its gateway is gone, or full.
_UNAVAILABLE = (429, 502, 503, 504)
_COMES_BACK = ("transport_unreachable", "provider_unavailable")
_SHOWN = 2000


class GatewayError(Exception):
    """No reward, and the policy is not to blame; ``kind`` is one of Gym's failure kinds."""

    def __init__(self, kind: str, reason: str) -> None:
        super().__init__(reason)
        self.kind = kind


class FailedGatewayError(Exception):
    """The model or the gateway failed, and would fail for other rollouts, too.

    No ``GatewayError``, so that no rollout gets a masked reward of 0: a run must not go on with it.
    """


class Gateways:
    """Gateways of one model; each request goes to the next, and on to another where one is gone."""

    def __init__(
        self, urls: Sequence[str], timeout_s: float, retry_s: float, token: str | None
    ) -> None:
        """``retry_s``: for how long a request looks for one whose servers answer.

        Raises:
            ValueError: a URL has no scheme or no host.
        """
        self._headers = {} if token is None else {"Authorization": f"Bearer {token}"}
        # Errors are in rollouts, which are for all to read: they name the URL without a password.
        named_urls = [(url.rstrip("/"), _name_of(url.rstrip("/"))) for url in urls]
        self._named_urls = itertools.cycle(named_urls)
        self._timeout_s, self._retry_s = timeout_s, retry_s
        self._session: aiohttp.ClientSession | None = None

    async def verify(self, rollout: Mapping[str, Any]) -> dict[str, Any]:
        """The rollout with its reward, or with ``failure_kind`` and ``failure_reason``.

        Raises:
            GatewayError: no gateway answers, or not as one.
            FailedGatewayError: the model failed.
        """
        end = time.monotonic() + self._retry_s
        while True:
            # To score a rollout twice harms nobody, so what got no answer is sent again.
            try:
                answer = await self._post(*next(self._named_urls), rollout)
                if answer["failure_kind"] not in _COMES_BACK or time.monotonic() > end:
                    return answer
            except GatewayError as error:
                if error.kind not in _COMES_BACK or time.monotonic() > end:
                    raise
            await asyncio.sleep(_PAUSE_S)

    async def close(self) -> None:
        """Let the connections go."""
        if self._session is not None:
            await self._session.close()

    async def _post(self, url: str, name: str, rollout: Mapping[str, Any]) -> dict[str, Any]:
        if self._session is None:  # only now: it belongs to the event loop that serves requests
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=0),
                headers=self._headers,
                timeout=aiohttp.ClientTimeout(total=self._timeout_s),
            )
        try:
            async with self._session.post(f"{url}/verify", json=rollout) as answer:
                return _read(name, answer.status, await answer.text())
        except asyncio.TimeoutError as error:
            raise GatewayError("transport_timeout", f"{name}: no answer in time") from error
        except aiohttp.ClientError as error:
            raise GatewayError("transport_unreachable", f"{name}: {error}") from error


def _name_of(url: str) -> str:
    """The URL without user and password; raise ValueError if it is no URL of a server."""
    try:
        parsed = URL(url)
        is_whole = parsed.scheme in ("http", "https") and bool(parsed.host)
    except ValueError:  # whose text may have the password
        is_whole = False
    if not is_whole:
        shown = url.rpartition("@")[2]
        raise ValueError(
            f"server_url: got {shown!r}, which is no http or https URL with a host. Write it as "
            "http://HOST:PORT."
        )
    return str(parsed.with_user(None)).rstrip("/")


def _read(name: str, status: int, text: str) -> dict[str, Any]:
    """The answer; a gateway says 200 also of a rollout that has no reward.

    Raises:
        GatewayError: the answer is another one.
        FailedGatewayError: its status is that of a server that failed.
    """
    try:
        body = json.loads(text)
    except ValueError:
        body = None
    if status == 200 and isinstance(body, dict) and "failure_kind" in body:
        return body
    said = str(body["detail"] if isinstance(body, dict) and "detail" in body else text)[:_SHOWN]
    if status >= 500 and status not in _UNAVAILABLE:
        raise FailedGatewayError(f"{name}: HTTP {status}: {said}")
    kind = "provider_unavailable" if status in _UNAVAILABLE else "verifier_error"
    hint = "; server_url is that of a gateway: nemo-aligner gateway" if status == 404 else ""
    raise GatewayError(kind, f"{name}: HTTP {status}: {said}{hint}")


# Linux ends a process with its parent, however that ends: uvicorn ends by the signal that it got,
# which leaves atexit out.
_WITH_PARENT = """
import ctypes, os, signal, sys
library = ctypes.CDLL(None)
if hasattr(library, "prctl"):
    library.prctl(1, signal.SIGTERM)
os.execvp(sys.argv[1], sys.argv[1:])
"""


class StartedGateway:
    """``nemo-aligner serve`` and a gateway in front of it, which end with this process."""

    def __init__(self, command: Sequence[str], settings: Sequence[str], device: str | None) -> None:
        """``command`` is what runs ``nemo-aligner``; it need not be in this environment."""
        self._command = command
        self._environment = {
            **os.environ,
            **({"CUDA_VISIBLE_DEVICES": ""} if device == "cpu" else {}),
        }
        self._folder = tempfile.TemporaryDirectory()
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        atexit.register(self.stop)
        # At once, as a model takes long to load; its gateway needs the URL, and is there in a
        # second.
        self._start("serve", "server", settings)

    async def url(self, within_s: float) -> str:
        """Wait until it answers; its URL.

        Raises:
            GatewayError: a process ended, or needs longer; its own output says why.
        """
        end = time.monotonic() + within_s
        server = await self._ready("serve", end)
        if "gateway" not in self._processes:
            self._start("gateway", "gateway", [f"backends=[{server}]"])
        return await self._ready("gateway", end)

    def stop(self) -> None:
        """End both; a second time does nothing."""
        atexit.unregister(self.stop)
        for process in self._processes.values():
            process.terminate()
        for process in self._processes.values():
            try:
                process.wait(_STOP_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        self._folder.cleanup()

    def _start(self, verb: str, section: str, settings: Sequence[str]) -> None:
        own = [f"{section}.port=0", f"{section}.ready_file={self._ready_file(verb)}"]
        whole = [sys.executable, "-c", _WITH_PARENT, *self._command, verb, *settings, *own]
        self._processes[verb] = subprocess.Popen(whole, env=self._environment)

    def _ready_file(self, verb: str) -> Path:
        return Path(self._folder.name, verb)

    async def _ready(self, verb: str, end: float) -> str:
        """Wait for the URL that a process writes once it answers."""
        name = f"nemo-aligner {verb}"
        while not self._ready_file(verb).exists():
            code = self._processes[verb].poll()
            if code is not None:
                reason = f"{name} ended with exit code {code}; its output says why"
                raise GatewayError("provider_unavailable", reason)
            if time.monotonic() > end:
                raise GatewayError(
                    "provider_unavailable", f"{name} was not ready in time (start_s)"
                )
            await asyncio.sleep(_PAUSE_S)
        return self._ready_file(verb).read_text().strip()
