"""Query reward model servers of nemo_aligner for rollouts, and start such a server."""

from __future__ import annotations

import asyncio
import atexit
import itertools
import json
import logging
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

logger = logging.getLogger(__name__)

_PAUSE_S = 0.5
# How long a server with another scoring contract is left out. Only a reward shows its contract, so
# the pause is longer than that of the package's client, which asks for the contract itself.
_LEFT_OUT_S = 10.0
_STOP_S = 30.0
# HTTP statuses with which a proxy or server reports that the server is gone or overloaded.
_UNAVAILABLE = (408, 425, 429, 502, 503, 504)
_REDIRECTS = (301, 302, 303, 307, 308)
_TEMPORARY = ("transport_unreachable", "provider_unavailable")
_SHOWN_CHARACTERS = 2000  # limit for an answer that an error message quotes


class NoRewardError(Exception):
    """A rollout has no reward, and the policy is not at fault; ``kind`` is a Gym failure kind."""

    def __init__(self, kind: str, reason: str) -> None:
        super().__init__(reason)
        self.kind = kind


class FailedServerError(Exception):
    """The model or the server failed, and would also fail for other rollouts.

    It is not a ``NoRewardError``, which would let the run continue with masked samples.
    """


class RewardServers:
    """Client of several servers of one model.

    Requests go to the servers in turn; if a server is gone, the next one gets the request. A server
    whose scoring contract is not that of the first reward is left out for ``_LEFT_OUT_S`` seconds,
    unless all are: rewards of two contracts must not be compared. Other weights with the same
    contract are logged.
    """

    def __init__(
        self, urls: Sequence[str], timeout_s: float, retry_s: float, token: str | None
    ) -> None:
        """Prepare the servers; each URL needs a scheme and a host.

        Args:
            urls: URLs of servers of the same model.
            timeout_s: deadline of one request, in seconds.
            retry_s: for how many seconds a request is repeated while no server answers.
            token: the servers' bearer token, if they require one.

        Raises:
            ValueError: a URL has no scheme or no host.
        """
        self._headers = {} if token is None else {"Authorization": f"Bearer {token}"}
        # Errors are stored in rollouts, which many people may read, so they name URLs without
        # passwords.
        named_urls = [(url.rstrip("/"), _hide_password(url.rstrip("/"))) for url in urls]
        self._named_urls = itertools.cycle(named_urls)
        self._num_servers = len(named_urls)
        # Until when servers are left out, by their names, in seconds of ``time.monotonic``.
        self._left_out: dict[str, float] = {}
        self._timeout_s, self._retry_s = timeout_s, retry_s
        self._session: aiohttp.ClientSession | None = None
        # The contract hash of the first reward with the name of its server, and all fingerprints.
        self._contract: tuple[str | None, str] | None = None
        self._fingerprints: set[str | None] = set()

    async def verify(self, rollout: Mapping[str, Any]) -> dict[str, Any]:
        """Return the rollout with its reward, or with ``failure_kind`` and ``failure_reason``.

        Raises:
            NoRewardError: no server answers with the right contract, or the answer is not one of
                ``/verify``.
            FailedServerError: the model failed.
        """
        end = time.monotonic() + self._retry_s
        while True:
            # Scoring has no side effects, so it is safe to send a rollout again.
            try:
                url, name = self._choose_server()
                answer = await self._post(url, name, rollout)
                self._check_model(name, answer)
                if answer["failure_kind"] not in _TEMPORARY or time.monotonic() > end:
                    return answer
            except NoRewardError as error:
                if error.kind not in _TEMPORARY or time.monotonic() > end:
                    raise
            await asyncio.sleep(_PAUSE_S)

    async def close(self) -> None:
        """Close the connections to the servers."""
        if self._session is not None:
            await self._session.close()

    def _choose_server(self) -> tuple[str, str]:
        """Return URL and name of the next server that is not left out, or of any if all are.

        A server whose pause has just ended gets one request. Others leave it out for another
        ``_LEFT_OUT_S``, or until a reward shows that it has the right contract.
        """
        now = time.monotonic()
        for _ in range(self._num_servers):
            url, name = next(self._named_urls)
            if name not in self._left_out:
                return url, name
            if now >= self._left_out[name]:
                self._left_out[name] = now + _LEFT_OUT_S
                return url, name
        return next(self._named_urls)  # e.g. a load balancer, which may choose another server now

    def _check_model(self, name: str, answer: Mapping[str, Any]) -> None:
        """Raise NoRewardError if a reward has another scoring contract than the first one.

        Its server is then left out for a while.
        """
        if answer["failure_kind"] is not None:
            return
        contract, fingerprint = answer.get("contract_hash"), answer.get("model_fingerprint")
        expected, first_name = self._contract = self._contract or (contract, name)
        if contract != expected:
            reason = (
                f"{name}: got the scoring contract {contract}, wanted {expected}, that of the "
                f"first reward, from {first_name}; serve one model at all of server_url, or start "
                "the environment again"
            )
            self._left_out[name] = time.monotonic() + _LEFT_OUT_S
            raise NoRewardError("provider_unavailable", reason)
        self._left_out.pop(name, None)
        if self._fingerprints and fingerprint not in self._fingerprints:
            text = "%s: rewards now come from other weights (%s) with the same scoring contract"
            logger.warning(text, name, fingerprint)
        self._fingerprints.add(fingerprint)

    async def _post(self, url: str, name: str, rollout: Mapping[str, Any]) -> dict[str, Any]:
        if self._session is None:  # made here, because aiohttp needs the running event loop
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=0),
                headers=self._headers,
                timeout=aiohttp.ClientTimeout(total=self._timeout_s),
            )
        try:
            # A redirected POST would become a GET, and its error would mislead.
            async with self._session.post(
                f"{url}/verify", json=rollout, allow_redirects=False
            ) as answer:
                text = await answer.text()
                if answer.status in _REDIRECTS:
                    text = f"it redirects to {answer.headers.get('Location')}"
                return _read_answer(name, answer.status, text)
        except asyncio.TimeoutError as error:
            raise NoRewardError("transport_timeout", f"{name}: no answer in time") from error
        except aiohttp.ClientError as error:
            raise NoRewardError("transport_unreachable", f"{name}: {error}") from error


def _hide_password(url: str) -> str:
    """Remove user and password from a URL; raise ValueError if it has no scheme or host."""
    try:
        parsed = URL(url)
        is_valid = parsed.scheme in ("http", "https") and bool(parsed.host)
    except ValueError:  # replaced by the error below, because its message may show the password
        is_valid = False
    if not is_valid:
        without_password = url.rpartition("@")[2]
        raise ValueError(
            f"server_url: got {without_password!r}, which is not an http or https URL with a host. "
            "Write it as http://HOST:PORT."
        )
    return str(parsed.with_user(None)).rstrip("/")


def _read_answer(name: str, status: int, text: str) -> dict[str, Any]:
    """Parse the answer of ``/verify``; the status is 200 even if a rollout has no reward.

    Args:
        name: URL of the server without password, for error messages.

    Raises:
        NoRewardError: the answer is not one of ``/verify``, or the server is overloaded.
        FailedServerError: the HTTP status reports that the server failed.
    """
    try:
        body = json.loads(text)
    except ValueError:
        body = None
    if status == 200 and isinstance(body, dict) and "failure_kind" in body:
        return body
    has_detail = isinstance(body, dict) and "detail" in body
    message = str(body["detail"] if has_detail else text)[:_SHOWN_CHARACTERS]
    if status >= 500 and status not in _UNAVAILABLE:
        raise FailedServerError(f"{name}: HTTP {status}: {message}")
    kind = "provider_unavailable" if status in _UNAVAILABLE else "verifier_error"
    is_other_url = status == 404 or status in _REDIRECTS
    hint = "; set server_url to the URL of nemo-aligner serve" if is_other_url else ""
    raise NoRewardError(kind, f"{name}: HTTP {status}: {message}{hint}")


# Program that makes Linux end a process when its parent ends, and then becomes the command.
# atexit does not suffice, because uvicorn ends by re-raising the signal that it got.
_WITH_PARENT = """
import ctypes, os, signal, sys
library = ctypes.CDLL(None)
if hasattr(library, "prctl"):
    library.prctl(1, signal.SIGTERM)
os.execvp(sys.argv[1], sys.argv[1:])
"""


class StartedServer:
    """A ``nemo-aligner serve`` process, which ends when this process ends."""

    def __init__(self, command: Sequence[str], settings: Sequence[str], device: str | None) -> None:
        """Start the server at once, because a model takes long to load.

        Args:
            command: command line that runs ``nemo-aligner``, which may be in another environment.
            settings: settings of ``nemo-aligner serve``.
            device: ``cpu`` hides all GPUs from the server.
        """
        self._folder = tempfile.TemporaryDirectory()
        self._ready_file = Path(self._folder.name, "ready")
        own_settings = ["server.port=0", f"server.ready_file={self._ready_file}"]
        self._process = subprocess.Popen(
            [sys.executable, "-c", _WITH_PARENT, *command, "serve", *settings, *own_settings],
            env={**os.environ, **({"CUDA_VISIBLE_DEVICES": ""} if device == "cpu" else {})},
        )
        atexit.register(self.stop)

    async def url(self, within_s: float) -> str:
        """Wait until the server is ready, and return its URL.

        Raises:
            NoRewardError: the server has ended, or is not ready within ``within_s`` seconds.
        """
        end = time.monotonic() + within_s
        while not self._ready_file.exists():
            code = self._process.poll()
            if code is not None:
                reason = f"nemo-aligner serve ended with exit code {code}; see its output"
                raise NoRewardError("provider_unavailable", reason)
            if time.monotonic() > end:
                reason = f"nemo-aligner serve was not ready within {within_s:g} s (start_s)"
                raise NoRewardError("provider_unavailable", reason)
            await asyncio.sleep(_PAUSE_S)
        return self._ready_file.read_text().strip()

    def stop(self) -> None:
        """End the server; further calls have no effect."""
        atexit.unregister(self.stop)
        self._process.terminate()
        try:
            self._process.wait(_STOP_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._folder.cleanup()
