"""Servers of nemo_aligner, asked for the rewards of rollouts; and one that is started here."""

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
# What a proxy says where its server is gone, or full.
_UNAVAILABLE = (429, 502, 503, 504)
_COMES_BACK = ("transport_unreachable", "provider_unavailable")
_SHOWN = 2000


class NoRewardError(Exception):
    """No reward, and the policy is not to blame; ``kind`` is one of Gym's failure kinds."""

    def __init__(self, kind: str, reason: str) -> None:
        super().__init__(reason)
        self.kind = kind


class FailedServerError(Exception):
    """The model or the server failed, and would fail for other rollouts, too.

    No ``NoRewardError``: no rollout may get a masked reward of 0, and the run go on with it.
    """


class RewardServers:
    """Servers of one model; each request goes to the next, and on to another where one is gone."""

    def __init__(
        self, urls: Sequence[str], timeout_s: float, retry_s: float, token: str | None
    ) -> None:
        """``retry_s``: for how long a request looks for one that answers.

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
            NoRewardError: no server answers, or not as one.
            FailedServerError: the model failed.
        """
        end = time.monotonic() + self._retry_s
        while True:
            # To score a rollout twice harms nobody, so what got no answer is sent again.
            try:
                answer = await self._post(*next(self._named_urls), rollout)
                if answer["failure_kind"] not in _COMES_BACK or time.monotonic() > end:
                    return answer
            except NoRewardError as error:
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
            raise NoRewardError("transport_timeout", f"{name}: no answer in time") from error
        except aiohttp.ClientError as error:
            raise NoRewardError("transport_unreachable", f"{name}: {error}") from error


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
    """The answer; a server says 200 also of a rollout that has no reward.

    Raises:
        NoRewardError: the answer is another one.
        FailedServerError: its status is that of a server that failed.
    """
    try:
        body = json.loads(text)
    except ValueError:
        body = None
    if status == 200 and isinstance(body, dict) and "failure_kind" in body:
        return body
    said = str(body["detail"] if isinstance(body, dict) and "detail" in body else text)[:_SHOWN]
    if status >= 500 and status not in _UNAVAILABLE:
        raise FailedServerError(f"{name}: HTTP {status}: {said}")
    kind = "provider_unavailable" if status in _UNAVAILABLE else "verifier_error"
    hint = "; server_url is that of a server: nemo-aligner serve" if status == 404 else ""
    raise NoRewardError(kind, f"{name}: HTTP {status}: {said}{hint}")


# Linux ends a process with its parent, however that ends: uvicorn ends by the signal that it got,
# which leaves atexit out.
_WITH_PARENT = """
import ctypes, os, signal, sys
library = ctypes.CDLL(None)
if hasattr(library, "prctl"):
    library.prctl(1, signal.SIGTERM)
os.execvp(sys.argv[1], sys.argv[1:])
"""


class StartedServer:
    """``nemo-aligner serve``, which ends with this process."""

    def __init__(self, command: Sequence[str], settings: Sequence[str], device: str | None) -> None:
        """Start it, as a model takes long to load.

        ``command`` is what runs ``nemo-aligner``; it need not be in this environment.
        """
        self._folder = tempfile.TemporaryDirectory()
        self._ready_file = Path(self._folder.name, "ready")
        ours = ["server.port=0", f"server.ready_file={self._ready_file}"]
        self._process = subprocess.Popen(
            [sys.executable, "-c", _WITH_PARENT, *command, "serve", *settings, *ours],
            env={**os.environ, **({"CUDA_VISIBLE_DEVICES": ""} if device == "cpu" else {})},
        )
        atexit.register(self.stop)

    async def url(self, within_s: float) -> str:
        """Wait until it answers; its URL.

        Raises:
            NoRewardError: it has ended, or needs longer; its own output says why.
        """
        end = time.monotonic() + within_s
        while not self._ready_file.exists():
            code = self._process.poll()
            if code is not None:
                reason = f"nemo-aligner serve ended with exit code {code}; its output says why"
                raise NoRewardError("provider_unavailable", reason)
            if time.monotonic() > end:
                reason = "nemo-aligner serve was not ready in time (start_s)"
                raise NoRewardError("provider_unavailable", reason)
            await asyncio.sleep(_PAUSE_S)
        return self._ready_file.read_text().strip()

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
