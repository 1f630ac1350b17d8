"""``RemoteServer``, one server of a client: it sends requests over KServe v2, and tracks failures.

A server gets requests for rewards after a handshake, which checks that its model is ready, reads
its limit of rows, and compares its scoring contract. After a failed request it gets none during a
pause of 0.1 to 1.5 seconds, or for as long as its ``Retry-After`` header says, up to 45 seconds. If
it was unreachable or its model is not ready, it needs a new handshake, because another server may
run there now. If that gets no answer, the server hangs, and other servers get the requests that it
still has.
"""

from __future__ import annotations

import asyncio
import json
import logging
import random
import re
import socket
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from io import BytesIO
from typing import Any, TypeVar
from urllib.parse import quote, urlsplit

import aiohttp
import numpy as np

from nemo_aligner.contract.contract import ScoringContract
from nemo_aligner.contract.sample_frame import SampleFrame
from nemo_aligner.contract.turns import TurnEnd
from nemo_aligner.serving.client.causes import (
    CONNECT_S,
    HANDSHAKE_S,
    PROBE_S,
    cause_of,
    redirect_of,
)
from nemo_aligner.serving.client.contract_check import ContractCheck, OtherContractError
from nemo_aligner.serving.client.running_calls import RunningCalls
from nemo_aligner.serving.failures import (
    NO_TOKEN,
    NOT_SENT,
    WRONG_TOKEN,
    FailureKind,
    RefusedError,
    RequestError,
    UnavailableError,
    retry_after,
)
from nemo_aligner.serving.protocols import kserve, kserve_body
from nemo_aligner.serving.protocols.kserve_body import Tensors
from nemo_aligner.serving.tokens import hide_password
from nemo_aligner.utils.errors import CheckpointError, ServingError, short

logger = logging.getLogger(__name__)

T = TypeVar("T")

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.1, 1.0
# Longest time of a ``Retry-After`` that is obeyed, because the server only estimates it.
_LONGEST_RETRY_AFTER_S = 30.0
# HTTP statuses with which vLLM, our gateway or a proxy may answer a KServe request, with a body
# that is not a KServe error.
_FOREIGN_STATUSES = (401, 403, 404)
_FOREIGN = (
    "this is not a KServe server, or it requires a token "
    "(docs/protocols.md lists the clients of other protocols)"
)
# Triton's errors (status 500) for a body that it cannot parse; the model has not seen it.
_UNPARSED = re.compile(r"^(failed to parse the request JSON|Unable to parse ')")


def new_session(token: str | None) -> aiohttp.ClientSession:
    """Create the HTTP session for all servers of a client; ``ServerPool`` limits concurrency."""
    connector = aiohttp.TCPConnector(limit=0, socket_factory=_create_socket)
    headers = {} if token is None else {"Authorization": f"Bearer {token}"}
    return aiohttp.ClientSession(connector=connector, headers=headers)


class RemoteServer:
    """A server, identified by its URL and the name of its model, and whether it may get requests.

    Attributes:
        url: the URL for messages, without a password.
        limit: maximum number of rows of a request; None until a handshake has succeeded.
        fault: why it gets no requests, if waiting does not help, e.g. another contract; else None.
        trouble: why the server gets no requests now, for messages; empty if it has not failed.
        is_foreign: the last handshake was answered by a server of another protocol.
        tried_at: end of the last handshake, in seconds of ``time.monotonic``.
        handshake: the running handshake; None if none runs.
        again_at: end of the pause after a failure, in seconds of ``time.monotonic``.
    """

    def __init__(
        self,
        session: aiohttp.ClientSession,
        url: str,
        model_name: str,
        contract_check: ContractCheck,
        reads_contract: bool,
        has_substitute: Callable[[], bool],
    ) -> None:
        """Store the settings of a server.

        Args:
            session: the HTTP session of all servers of the client.
            url: URL of the server.
            model_name: name of the model on the server.
            contract_check: compares the contracts of all servers of the client.
            reads_contract: whether a handshake compares the contract.
            has_substitute: returns whether another server can answer the requests of this one now.
        """
        self.url = hide_password(url)
        self.name = f"{self.url}, {model_name}"
        self._url = url
        self.in_flight = 0
        self.limit: int | None = None
        self.fault: ServingError | None = None
        self.trouble = ""
        self.is_foreign = False
        self.tried_at = -np.inf
        self.handshake: asyncio.Task[None] | None = None
        self.again_at = 0.0
        self._has_retry_after = False
        # True after it was logged that the server gets no requests; then its return is also logged.
        self._is_missed = False
        self._failures = 0
        self._session, self._contract_check = session, contract_check
        self._model_name, self._reads_contract = model_name, reads_contract
        self._has_substitute = has_substitute
        self._running_calls = RunningCalls()

    def is_ready(self, time_s: float) -> bool:
        """Return whether the server may get requests for rewards."""
        return self.limit is not None and time_s >= self.again_at

    def is_full(self, time_s: float) -> bool:
        """Return whether the server is full: the pause of its ``Retry-After`` is not over."""
        return self.limit is not None and self._has_retry_after and time_s < self.again_at

    def start_handshake(self) -> asyncio.Task[None]:
        """Start a handshake, or return the running one."""
        if self.handshake is None:
            self.handshake = asyncio.ensure_future(self._handshake())
        return self.handshake

    def start_handshake_if_due(self, time_s: float, tried_since: float) -> None:
        """Start a handshake if the server is unavailable and its pause is over.

        The pause is ignored if the last handshake was before ``tried_since``.
        """
        due = time_s >= self.again_at or self.tried_at < tried_since
        if self.limit is None and due:
            self.start_handshake()

    def leave_out(self, reason: str) -> None:
        """Send no requests before a new handshake has succeeded; messages show ``reason``."""
        self._back_off(UnavailableError(reason))

    def forget(self) -> None:
        """Return to the state before the first handshake, so that contracts are compared again."""
        self.limit, self.fault, self.again_at = None, None, 0.0
        self._contract_check.withdraw(self.name)

    async def infer(
        self, inputs: Tensors, marks: Collection[str] = (), may_repeat: bool = True
    ) -> Tensors:
        """Send a request with parameters ``marks`` for rewards, and return the outputs.

        Raises:
            RefusedError: the server rejected the request.
            UnavailableError: there was no answer; this server gets no requests during a pause. If
                the server hangs, this is raised only with ``may_repeat``, and if another server
                can answer the request.
        """
        with self._tracking_request():
            try:
                call = self._infer(self._model_name, inputs, None, marks)
                return await (self._running_calls.run(call) if may_repeat else call)
            except RefusedError as error:
                if error.status == 404:  # the server has restarted and loads its model
                    raise UnavailableError(error.message) from error
                raise

    async def contract(self) -> tuple[ScoringContract, str | None]:
        """Fetch the scoring contract and the model's fingerprint (None if there is none).

        Raises:
            ServingError: the server publishes no contract that can be read.
            UnavailableError: there was no answer; this server gets no requests during a pause.
        """
        with self._tracking_request():
            return await self._fetch_contract(HANDSHAKE_S)

    async def check_contract(self) -> None:
        """Let ``ContractCheck`` know the contract that the server publishes, or that it has none.

        Raises:
            ServingError: it is another contract than expected, or there was no answer.
        """
        await self._check_contract(HANDSHAKE_S)

    async def turn_end(self) -> TurnEnd | None:
        """Fetch the text that the chat template writes after a reply; None if none is published.

        Raises:
            UnavailableError: there was no answer; this server gets no requests during a pause.
        """
        return await self._read_template_part(
            "turn_end",
            TurnEnd.from_dict,
            "the server does not publish how its chat template ends a turn (%s); a sample that "
            "ends before that is scored unchanged",
        )

    async def sample_frame(self) -> SampleFrame | None:
        """Fetch the text that the chat template writes around a sample; None if none is published.

        Raises:
            UnavailableError: there was no answer; this server gets no requests during a pause.
        """
        return await self._read_template_part(
            "sample_frame",
            SampleFrame.from_dict,
            "the server does not publish how its chat template begins and ends (%s); samples in "
            "another template are scored without being counted",
        )

    async def _read_template_part(
        self, name: str, from_dict: Callable[[Any], T], if_missing: str
    ) -> T | None:
        """Fetch the published value ``name``; if there is none, log ``if_missing``, return None."""
        with self._tracking_request():
            try:
                outputs = await self._fetch_publication(HANDSHAKE_S)
                return kserve.decode_template_part(outputs, name, from_dict)
            except UnavailableError:
                raise
            except ServingError as error:  # a server of another project, or of an earlier version
                if _needs_correction(error):
                    raise
                logger.warning(f"%s: {if_missing}", self.name, short(error))
                return None

    async def probe(self) -> str | None:
        """Return why the server gives no rewards now, and stop using it; None if it gives them."""
        try:
            with self._tracking_request():
                await self._check_readiness()
        except OtherContractError as error:
            self._set_fault(error)
            return error.text
        except UnavailableError as error:
            self.fault = None
            # A server that is only slow may also miss a probe's limit. The longer limit of a
            # handshake decides whether it hangs, which ends its running calls.
            if error.is_hang and self.limit is None and self._running_calls:
                self.start_handshake()
            return str(error)
        except ServingError as error:
            return str(error)
        self.fault = None
        return None

    async def _check_readiness(self) -> None:
        """Check within ``PROBE_S`` that the model is ready and has the right contract."""
        ready = f"models/{quote(self._model_name)}/ready"

        async def check() -> None:
            try:
                await self._send("GET", ready, PROBE_S)
            except UnavailableError as error:
                if error.kind is not FailureKind.busy or error.retry_after_s is not None:
                    raise
                # The model may hang. So unlike a server that is only full, this one gets no
                # requests before a handshake finds it ready.
                reason = f"{self._model_name} is not ready: {error.message}"
                raise UnavailableError(reason) from error
            except RefusedError as error:
                if error.status == 404 or _needs_correction(error):
                    raise
                # Triton answers 400 while it loads the model, as in a handshake.
                reason = f"{self._model_name} is not ready: {error.message}"
                raise UnavailableError(reason) from error
            # Readiness is open to everyone, but the contract needs the token, which may be wrong.
            await self._check_contract(PROBE_S)

        try:
            await asyncio.wait_for(check(), PROBE_S)  # both requests together
        except asyncio.TimeoutError as error:
            raise UnavailableError(cause_of(error, PROBE_S), is_hang=True) from error

    async def statistics(self) -> dict[str, float] | None:
        """Fetch counts since the server's start; empty if it has none.

        None if it does not answer, or rejects the token.
        """
        try:
            with self._tracking_request():
                outputs = await self._fetch_publication(PROBE_S)
            return kserve.decode_statistics(outputs)
        except UnavailableError:
            return None
        except ServingError as error:  # a server of another project, or of an earlier version
            return None if _needs_correction(error) else {}

    @contextmanager
    def _tracking_request(self) -> Iterator[None]:
        """Count a request as in flight; if it gets no answer, start the pause without requests."""
        self.in_flight += 1
        try:
            yield
        except UnavailableError as error:
            # If many requests are lost at once, only the first one starts the pause or doubles it.
            # A full server that is unreachable meanwhile also needs a handshake.
            is_first_loss = self.limit is not None and error.kind is FailureKind.unreachable
            if is_first_loss or self.is_ready(time.monotonic()):
                self._back_off(error)
                if self.limit is None and not self._is_missed:
                    self._is_missed = True
                    logger.warning("%s: %s; it gets no requests until it answers", self.name, error)
            raise
        finally:
            self.in_flight -= 1
        self._failures = 0
        if self.limit is not None:
            self.trouble = ""
            if self._is_missed:
                self._is_missed = False
                logger.warning("%s: it answers again", self.name)

    async def _fetch_publication(self, timeout_s: float) -> Tensors:
        """Fetch contract, statistics, and the template's end of a turn and frame of a sample."""
        inputs = {"dummy_var": np.zeros(1, dtype=np.int64)}
        return await self._infer(kserve.contract_name(self._model_name), inputs, timeout_s)

    async def _fetch_contract(self, timeout_s: float) -> tuple[ScoringContract, str | None]:
        outputs = await self._fetch_publication(timeout_s)
        try:
            return kserve.decode_contract(outputs), kserve.decode_fingerprint(outputs)
        except (CheckpointError, KeyError, ValueError, IndexError) as error:
            raise ServingError(f"{self.url}: scoring contract: {short(error)}") from error

    async def _handshake(self) -> None:
        self.is_foreign = False
        try:
            model = f"models/{quote(self._model_name)}"
            await self._send("GET", f"{model}/ready", HANDSHAKE_S)
            answer, _ = await self._send("GET", f"{model}/config", HANDSHAKE_S)
            limit = max(1, int(json.loads(answer)["max_batch_size"]))
            # Nothing is fetched from a single server before its first reward, which has the hash.
            if self._reads_contract or self._contract_check.is_bound:
                await self._check_contract(HANDSHAKE_S)
            self.limit, self.fault, self.trouble, self.again_at = limit, None, "", 0.0
        except RefusedError as error:
            self._handle_refused_handshake(error)
        except UnavailableError as error:
            if error.waiting_helps:
                self._back_off(error)
            else:
                self._set_fault(ServingError(f"{self.name}: {error}"))
            # Without a substitute, keep waiting, because the server may continue later. And a
            # server that only accepts no new connections may still answer the requests it has.
            if error.is_hang and self._has_substitute():
                self._running_calls.end(str(error))
        except ServingError as error:
            self._set_fault(error)
        except (ValueError, TypeError, KeyError, OverflowError, RecursionError):
            self._back_off(UnavailableError("the answer is not that of a KServe v2 server"))
        finally:
            self.tried_at = time.monotonic()
            self.handshake = None

    def _handle_refused_handshake(self, error: RefusedError) -> None:
        self.is_foreign = error.is_foreign
        advice = ""
        if path := urlsplit(self._url).path:
            allowed = "must be empty, a proxy's prefix or /models/ and a name of that server"
            advice = f"; the path in the URL, {short(path)}, {allowed}"
        if error.is_foreign:
            otherwise = "; otherwise " if advice else "; "
            reason = f"HTTP {error.status}: {error.message}{advice}{otherwise}{_FOREIGN}"
            self._back_off(UnavailableError(reason))
        elif _needs_correction(error):
            self._set_fault(error)
        elif error.status == 404:  # a server that is ready but has other models, e.g. a critic's
            fix = advice or f". Pass the URL of a server of {self._model_name}"
            self._set_fault(RefusedError(self.name, error.status, error.message + fix))
        else:  # the model is still loading; try again later
            reason = f"{self._model_name} is not ready: {error.message}{advice}"
            self._back_off(UnavailableError(reason))

    async def _check_contract(self, timeout_s: float) -> None:
        """Raise OtherContractError if the server publishes another contract than expected.

        RefusedError if the server rejects the token.
        """
        try:
            contract, fingerprint = await self._fetch_contract(timeout_s)
        except RefusedError as error:
            if _needs_correction(error):
                raise
            # A server of NVIDIA's NeMo-Aligner has no contract; one of this package rejects the
            # request only while it loads its model. It is unknown which of the two this is.
            missing = self._contract_check.missing
            if missing is not None:
                raise UnavailableError(f"{missing}: {error.message}") from error
            # A gateway has an endpoint for the contract, also if it has none, so it never answers
            # 404; a proxy might.
            may_be_gateway = error.status != 404 or error.is_foreign
            self._contract_check.check_published(self.name, None, None, may_be_gateway)
        except ServingError as error:
            if self._reads_contract or isinstance(error, UnavailableError):
                raise
            # This version cannot parse the contract of a newer one, but each reward carries its
            # hash.
        else:
            self._contract_check.check_published(self.name, contract, fingerprint)

    def _set_fault(self, error: ServingError) -> None:
        """Send no more requests, because of a fault that waiting does not fix; log it once."""
        previous = self.fault
        self._back_off(UnavailableError(str(error).removeprefix(f"{self.name}: ")))
        self.fault = error
        if str(previous) != str(error):
            self._is_missed = True
            logger.warning("%s; this server gets no requests until the problem is fixed", error)

    def _back_off(self, error: UnavailableError) -> None:
        """Start a pause without requests: that of ``Retry-After``, up to 30 s, times 1.0 to 1.5.

        Without ``Retry-After``, the pause doubles with each failure up to one second.
        """
        pause = min(_FIRST_PAUSE_S * 2**self._failures, _LONGEST_PAUSE_S)
        self._failures = min(self._failures + 1, 10)
        self._has_retry_after = error.retry_after_s is not None
        if error.retry_after_s is not None:
            pause = max(pause, min(error.retry_after_s, _LONGEST_RETRY_AFTER_S))
        # Jitter, so that clients that failed at the same time do not retry at the same time.
        self.again_at = time.monotonic() + pause * random.uniform(1.0, 1.5)
        self.trouble, self.fault = str(error), None
        if error.kind is FailureKind.unreachable:
            self.limit = None
            self._contract_check.withdraw(self.name)

    async def _infer(
        self, model_name: str, inputs: Tensors, timeout_s: float | None, marks: Collection[str] = ()
    ) -> Tensors:
        body, headers = kserve_body.encode_body(inputs, marks)
        path = f"models/{quote(model_name)}/infer"
        answer, answer_headers = await self._send("POST", path, timeout_s, body, headers)
        try:
            return kserve_body.decode_body(answer, answer_headers)
        except ServingError as error:
            raise ServingError(f"{self.name}: {error}") from error

    async def _send(
        self,
        method: str,
        path: str,
        timeout_s: float | None,
        body: bytes | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> tuple[bytes, Mapping[str, str]]:
        url = f"{self._url}/v2/{path}"
        try:
            async with self._session.request(
                method,
                url,
                # aiohttp warns about large bytes objects, because sending them blocks the event
                # loop. It sends a stream in pieces, without blocking.
                data=None if body is None else BytesIO(body),
                headers=headers,
                allow_redirects=False,
                timeout=aiohttp.ClientTimeout(total=timeout_s, sock_connect=CONNECT_S),
            ) as response:
                answer = await response.read()
        except (aiohttp.ClientSSLError, aiohttp.InvalidURL) as error:
            raise UnavailableError(cause_of(error), waiting_helps=False) from error
        except (aiohttp.ClientError, OSError, asyncio.TimeoutError) as error:
            is_hang = isinstance(error, asyncio.TimeoutError) and not isinstance(
                error, aiohttp.ConnectionTimeoutError
            )
            raise UnavailableError(cause_of(error, timeout_s), is_hang=is_hang) from error
        if response.status == 200:
            return answer, response.headers
        redirect = redirect_of(response.status, response.headers, url, f"/v2/{path}")
        if redirect is not None:
            raise RefusedError(self.name, response.status, redirect)
        raise self._build_error(response.status, answer, response.headers)

    def _build_error(self, status: int, answer: bytes, headers: Mapping[str, str]) -> RequestError:
        message, kind = _read_string(answer, "error"), FailureKind.of_status(status)
        text = short(" ".join(answer.decode("utf-8", errors="replace").split()))
        text = text if message is None else message
        if kind.reaction == "retry":
            seconds = retry_after(text, headers.get("Retry-After", ""))
            text = f"HTTP {status}: {text}" if text else f"HTTP {status}"
            return UnavailableError(text, kind, seconds)
        if message == NO_TOKEN or (message is not None and kind is FailureKind.unauthorized):
            fact = WRONG_TOKEN if "Authorization" in self._session.headers else NOT_SENT
            return RefusedError(self.name, FailureKind.unauthorized.status, f"{text}; {fact}")
        if message is None and answer and status in _FOREIGN_STATUSES:
            return RefusedError(self.name, status, text, is_foreign=True)
        if message is not None and _UNPARSED.match(message):
            # This client sends valid JSON, so a proxy must have changed the body.
            text = f"Triton could not parse the request as it arrived, after any proxy: {text}"
        if _read_string(answer, kserve_body.KIND) == FailureKind.unscored.name:
            kind = FailureKind.unscored
        return RefusedError(self.name, status, text or f"HTTP {status}", kind=kind)


def _needs_correction(error: ServingError) -> bool:
    """Return whether token or URL is wrong; then neither waiting nor other servers help."""
    if not isinstance(error, RefusedError):
        return False
    return error.kind is FailureKind.unauthorized or 300 <= error.status < 400


def _read_string(answer: bytes, key: str) -> str | None:
    """Return a string of a KServe server's error; None if the answer has another form."""
    try:
        value = json.loads(answer.decode("utf-8", errors="replace"))[key]
    except (ValueError, TypeError, KeyError, RecursionError):
        return None
    return value if isinstance(value, str) else None  # vLLM's error is a dict, not a string


def _create_socket(address: Any) -> socket.socket:
    """Create a socket whose keepalive probes notice within a minute that a machine is gone.

    Otherwise a request to a machine without power would wait until the deadline of the call.
    """
    family, kind, protocol, _, _ = address
    connection = socket.socket(family, kind, protocol)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (("TCP_KEEPIDLE", 20), ("TCP_KEEPINTVL", 10), ("TCP_KEEPCNT", 3)):
        if hasattr(socket, name):
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
    return connection
