"""One server of a client: its KServe v2 requests over HTTP, and whether it may be asked now.

A server is asked for rewards after a handshake: its model is ready, its limit of rows is known, and
it scores by the right contract. One that gives no answer is backed off from for 0.1 to 1.5 seconds,
or for as long as it asks; one that was gone needs a new handshake, as another may have taken its
place.
"""

from __future__ import annotations

import asyncio
import json
import logging
import random
import re
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from io import BytesIO
from typing import Any, TypeVar
from urllib.parse import quote, urlsplit

import aiohttp
import numpy as np

from nemo_aligner.contract.contract import ScoringContract
from nemo_aligner.contract.from_settings import describe_differences
from nemo_aligner.contract.sample_frame import SampleFrame
from nemo_aligner.contract.turns import TurnEnd
from nemo_aligner.serving.client.causes import CONNECT_S, HANDSHAKE_S, cause_of
from nemo_aligner.serving.client.fingerprint import FingerprintCheck
from nemo_aligner.serving.failures import (
    NO_TOKEN,
    FailureKind,
    RefusedError,
    RequestError,
    UnavailableError,
    retry_after,
)
from nemo_aligner.serving.protocols import kserve, kserve_body
from nemo_aligner.serving.protocols.kserve_body import Tensors
from nemo_aligner.serving.tokens import hide_password
from nemo_aligner.utils.errors import CheckpointError, ConfigError, ServingError, short

logger = logging.getLogger(__name__)

T = TypeVar("T")

_PROBE_S = 2.0  # somebody waits for the gateway's ``/ready`` or ``/metrics``
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.1, 1.0
# With these and a body that is not KServe's, vLLM, our gateway or a proxy answers in its place.
_FOREIGN_STATUSES = (401, 403, 404)
_FOREIGN = (
    "this is no KServe server, or it asks for a token "
    "(servers of other protocols have other clients: docs/protocols.md)"
)
# Triton answers it with a 500, before the model's server sees the request.
_UNPARSED = re.compile(r"^(failed to parse the request JSON|Unable to parse ')")


def new_session(token: str | None) -> aiohttp.ClientSession:
    """Session for all servers of a client; concurrent requests are limited elsewhere."""
    connector = aiohttp.TCPConnector(limit=0, socket_factory=_socket)
    headers = {} if token is None else {"Authorization": f"Bearer {token}"}
    return aiohttp.ClientSession(connector=connector, headers=headers)


class RemoteServer:
    """A server by its URL and the model there; see the top of this file.

    Attributes:
        url: for people, without a password.
        limit: most rows of a request; None before a handshake has succeeded.
        fault: why it is left out, where waiting does not help, such as another contract.
        trouble: why it is left out, for people.
        is_foreign: the last handshake was answered by something that is no KServe server.
        tried_at: end of the last handshake.
        handshake: the one under way.
        again_at: when the pause ends.
    """

    def __init__(
        self,
        session: aiohttp.ClientSession,
        url: str,
        model_name: str,
        contract_check: ContractCheck,
        reads_contract: bool,
    ) -> None:
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
        self._has_said_when = False
        # The log has that it is left out, and not yet that it is back.
        self._is_missed = False
        self._failures = 0
        self._session, self._contract_check = session, contract_check
        self._model_name, self._reads_contract = model_name, reads_contract

    def is_ready(self, now: float) -> bool:
        """True if it may be asked for rewards."""
        return self.limit is not None and now >= self.again_at

    def is_full(self, now: float) -> bool:
        """True if it has said when to come again, and that is not yet."""
        return self.limit is not None and self._has_said_when and now < self.again_at

    def start_handshake(self) -> asyncio.Task[None]:
        """Begin a handshake, unless one is under way."""
        if self.handshake is None:
            self.handshake = asyncio.ensure_future(self._handshake())
        return self.handshake

    def start_handshake_if_due(self, now: float, tried_since: float) -> None:
        """Begin a handshake if it needs one, and its pause is over or it was not tried since."""
        due = now >= self.again_at or self.tried_at < tried_since
        if self.limit is None and due:
            self.start_handshake()

    def leave_out(self, reason: str) -> None:
        """Send it no requests until a new handshake has succeeded."""
        self._back_off(UnavailableError(reason))

    def forget(self) -> None:
        """Return to the state before the first handshake."""
        self.limit, self.fault, self.again_at = None, None, 0.0
        self._contract_check.withdraw(self.name)

    async def infer(self, inputs: Tensors, is_probe: bool = False) -> Tensors:
        """Its answer; it does not count a probe.

        Raises:
            RefusedError: it does not score them.
            UnavailableError: it gave no answer, and is left out for a while.
        """
        with self._asked():
            try:
                return await self._infer(self._model_name, inputs, None, is_probe)
            except RefusedError as error:
                if error.status == 404:  # a server in place of it, which is still loading its model
                    raise UnavailableError(error.message) from error
                raise

    async def contract(self) -> tuple[ScoringContract, str | None]:
        """The contract that it publishes, and its model's fingerprint, None if it tells none.

        Raises:
            ServingError: it publishes none that can be read.
            UnavailableError: it gave no answer, and is left out for a while.
        """
        with self._asked():
            return await self._contract(HANDSHAKE_S)

    async def turn_end(self) -> TurnEnd | None:
        """Text that its chat template writes after a reply; None if it writes nothing.

        Raises:
            UnavailableError: it gave no answer, and is left out for a while.
        """
        return await self._read_template_part(
            "turn_end",
            TurnEnd.from_dict,
            "it does not say how its chat template ends (%s); a text that ends before that is "
            "scored unchanged",
        )

    async def sample_frame(self) -> SampleFrame | None:
        """Text that its chat template writes around a sample; None if it has no template.

        Raises:
            UnavailableError: it gave no answer, and is left out for a while.
        """
        return await self._read_template_part(
            "sample_frame",
            SampleFrame.from_dict,
            "it does not say how its chat template begins and ends (%s); texts that are written in "
            "another template are scored and not counted",
        )

    async def _read_template_part(
        self, name: str, from_dict: Callable[[Any], T], if_missing: str
    ) -> T | None:
        """Decode a part of what it publishes; None, and a warning, if that is missing."""
        with self._asked():
            try:
                outputs = await self._publication(HANDSHAKE_S)
                return kserve.decode_template_part(outputs, name, from_dict)
            except UnavailableError:
                raise
            except ServingError as error:  # another's server, or an older one
                if _is_unauthorized(error):
                    raise
                logger.warning(f"%s: {if_missing}", self.name, short(error))
                return None

    async def probe(self) -> str | None:
        """Reason why it gives no rewards now, and is left out; None if it gives them."""
        try:
            with self._asked():
                await self._ask("GET", f"models/{quote(self._model_name)}/ready", _PROBE_S)
                await self._check_contract(_PROBE_S)
        except OtherContractError as error:
            self._refuse(error)
            return error.text
        except UnavailableError as error:
            self.fault = None
            return str(error)
        except ServingError as error:
            return str(error)
        self.fault = None
        return None

    async def statistics(self) -> dict[str, float] | None:
        """Counts since its start; empty if it publishes none, None without an answer."""
        try:
            with self._asked():
                outputs = await self._publication(_PROBE_S)
            return kserve.decode_statistics(outputs)
        except UnavailableError:
            return None
        except ServingError:  # another's server, or an older one
            return {}

    @contextmanager
    def _asked(self) -> Iterator[None]:
        """Count a request as in flight; back off where it gets no answer."""
        self.in_flight += 1
        try:
            yield
        except UnavailableError as error:
            # Of many requests that are lost at once only the first may lengthen the pause.
            if self.is_ready(time.monotonic()):
                self._back_off(error)
                if self.limit is None and not self._is_missed:
                    self._is_missed = True
                    logger.warning("%s: %s; it is left out until it answers", self.name, error)
            raise
        finally:
            self.in_flight -= 1
        self._failures = 0
        if self.limit is not None:
            self.trouble = ""
            if self._is_missed:
                self._is_missed = False
                logger.warning("%s: it answers again", self.name)

    async def _publication(self, timeout_s: float) -> Tensors:
        """Ask for all that it publishes: its contract, turn end and statistics."""
        asked = {"dummy_var": np.zeros(1, dtype=np.int64)}
        return await self._infer(kserve.CONTRACT_MODEL_NAME, asked, timeout_s)

    async def _contract(self, timeout_s: float) -> tuple[ScoringContract, str | None]:
        outputs = await self._publication(timeout_s)
        try:
            return kserve.decode_contract(outputs), kserve.decode_fingerprint(outputs)
        except (CheckpointError, KeyError, ValueError, IndexError) as error:
            raise ServingError(f"{self.url}: {error}") from error

    async def _handshake(self) -> None:
        self.is_foreign = False
        try:
            await self._ask("GET", f"models/{quote(self._model_name)}/ready")
            answer, _ = await self._ask("GET", f"models/{quote(self._model_name)}/config")
            limit = max(1, int(json.loads(answer)["max_batch_size"]))
            await self._check_contract(HANDSHAKE_S)
            self.limit, self.fault, self.trouble, self.again_at = limit, None, "", 0.0
        except RefusedError as error:
            self._on_refused_handshake(error)
        except UnavailableError as error:
            if error.waiting_helps:
                self._back_off(error)
            else:
                self._refuse(ServingError(f"{self.name}: {error}"))
        except ServingError as error:
            self._refuse(error)
        except (ValueError, TypeError, KeyError, OverflowError, RecursionError):
            self._back_off(UnavailableError("what answers there is no server of KServe v2"))
        finally:
            self.tried_at = time.monotonic()
            self.handshake = None

    def _on_refused_handshake(self, error: RefusedError) -> None:
        self.is_foreign = error.is_foreign
        path = urlsplit(self._url).path
        advice = (
            f"; the URL's path, {short(path)}, must be a proxy's prefix or none" if path else ""
        )
        if error.is_foreign:
            reason = f"HTTP {error.status}: {error.message}; {_FOREIGN}{advice}"
            self._back_off(UnavailableError(reason))
        elif _is_unauthorized(error):
            self._refuse(error)
        else:  # its model is still being loaded
            reason = f"{self._model_name} is not ready: {error.message}{advice}"
            self._back_off(UnavailableError(reason))

    async def _check_contract(self, timeout_s: float) -> None:
        """Raise OtherContractError; a lone server shows its contract by its first reward."""
        if not self._reads_contract and not self._contract_check.is_bound:
            return
        try:
            contract, fingerprint = await self._published(timeout_s)
        except ServingError as error:
            if self._reads_contract or isinstance(error, UnavailableError):
                raise
            # A newer version's contract cannot be read here, but its rewards come with its hash.
            return
        self._contract_check.check_published(self.name, contract, fingerprint)

    async def _published(self, timeout_s: float) -> tuple[ScoringContract | None, str | None]:
        try:
            return await self._contract(timeout_s)
        except RefusedError as error:
            if _is_unauthorized(error):
                raise
            # A server of NeMo-Aligner has none; one of ours may still be loading that endpoint.
            missing = self._contract_check.missing
            if missing is not None:
                raise UnavailableError(f"{missing}: {error.message}") from error
            return None, None

    def _refuse(self, error: ServingError) -> None:
        """Leave it out for a fault that waiting does not mend; the log has each fault once."""
        known = self.fault
        self._back_off(UnavailableError(str(error).removeprefix(f"{self.name}: ")))
        self.fault = error
        if str(known) != str(error):
            self._is_missed = True
            logger.warning("%s; it is left out", error)

    def _back_off(self, error: UnavailableError) -> None:
        """Leave it out for a pause, which doubles with each failure up to a second."""
        pause = min(_FIRST_PAUSE_S * 2**self._failures, _LONGEST_PAUSE_S)
        self._failures = min(self._failures + 1, 10)
        self._has_said_when = error.retry_after_s is not None
        if error.retry_after_s is not None:
            pause = max(pause, error.retry_after_s)
        # Jitter: clients that failed together must not come back together.
        self.again_at = time.monotonic() + pause * random.uniform(1.0, 1.5)
        self.trouble, self.fault = str(error), None
        if error.kind is FailureKind.unreachable:
            self.limit = None
            self._contract_check.withdraw(self.name)

    async def _infer(
        self, model_name: str, inputs: Tensors, timeout_s: float | None, is_probe: bool = False
    ) -> Tensors:
        body, headers = kserve_body.encode_body(inputs, is_probe)
        path = f"models/{quote(model_name)}/infer"
        answer, said = await self._ask("POST", path, timeout_s, body, headers)
        try:
            return kserve_body.decode_body(answer, said)
        except ServingError as error:
            raise ServingError(f"{self.name}: {error}") from error

    async def _ask(
        self,
        method: str,
        path: str,
        timeout_s: float | None = HANDSHAKE_S,
        body: bytes | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> tuple[bytes, Mapping[str, str]]:
        try:
            async with self._session.request(
                method,
                f"{self._url}/v2/{path}",
                # aiohttp warns of large bytes, which it writes at once; a stream goes in pieces.
                data=None if body is None else BytesIO(body),
                headers=headers,
                timeout=aiohttp.ClientTimeout(total=timeout_s, sock_connect=CONNECT_S),
            ) as response:
                answer = await response.read()
        except (aiohttp.ClientSSLError, aiohttp.InvalidURL) as error:
            raise UnavailableError(cause_of(error), waiting_helps=False) from error
        except (aiohttp.ClientError, OSError, asyncio.TimeoutError) as error:
            raise UnavailableError(cause_of(error)) from error
        if response.status == 200:
            return answer, response.headers
        raise self._failure(response.status, answer, response.headers)

    def _failure(self, status: int, answer: bytes, headers: Mapping[str, str]) -> RequestError:
        said, kind = _error_of(answer), FailureKind.of_status(status)
        text = short(" ".join(answer.decode("utf-8", errors="replace").split()))
        text = text if said is None else said
        if kind.reaction == "retry":
            seconds = retry_after(text, headers.get("Retry-After", ""))
            return UnavailableError(f"HTTP {status}: {text}", kind, seconds)
        if said == NO_TOKEN:
            return RefusedError(self.name, FailureKind.unauthorized.status, text)
        if said is None and answer and status in _FOREIGN_STATUSES:
            return RefusedError(self.name, status, text, is_foreign=True)
        if said is not None and _UNPARSED.match(said):
            # What this client sends is whole: something between has changed it.
            text = f"Triton could not read the request as it arrived, behind any proxy: {text}"
        return RefusedError(self.name, status, text or f"HTTP {status}")


def _is_unauthorized(error: ServingError) -> bool:
    """Tell whether the token is missing or wrong, which is no reason to wait or to ask others."""
    return isinstance(error, RefusedError) and error.kind is FailureKind.unauthorized


def _error_of(answer: bytes) -> str | None:
    """Error text of a KServe server; None if the answer is not KServe's."""
    try:
        said = json.loads(answer.decode("utf-8", errors="replace"))["error"]
    except (ValueError, TypeError, KeyError, RecursionError):
        return None
    return said if isinstance(said, str) else None  # an object is vLLM's


def _socket(address: Any) -> socket.socket:
    """Socket with keepalive probes, which notice a machine that is gone within a minute.

    Without them a request to a machine that lost its power waits for the whole call's timeout.
    """
    family, kind, protocol, _, _ = address
    made = socket.socket(family, kind, protocol)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (("TCP_KEEPIDLE", 20), ("TCP_KEEPINTVL", 10), ("TCP_KEEPCNT", 3)):
        if hasattr(socket, name):
            made.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
    return made


# All rewards of a client are by one scoring contract: the expected one, or that of the first.

_HASH = re.compile("[0-9a-f]{64}")


class OtherContractError(ServingError):
    """A server scores by another contract than the wanted one; ``text`` leaves out its name."""

    def __init__(self, server: str, text: str) -> None:
        super().__init__(f"{server}: {text}")
        self.text = text


class OtherModelError(OtherContractError):
    """A server scores by the wanted contract, but with other weights."""


@dataclass(frozen=True)
class _Known:
    """The hash of a contract, None for a server that has none; and whose it is."""

    hash: str | None
    contract: ScoringContract | None
    whose: str = ""


class ContractCheck:
    """Compares what each server scores by; also knows how many columns its rewards have.

    Attributes:
        fingerprints: compares the servers' models.
    """

    def __init__(
        self, expect: ScoringContract | str | None, expect_fingerprint: str | None = None
    ) -> None:
        """Raise ConfigError if ``expect`` is neither a contract nor a hash, or see there."""
        if isinstance(expect, str) and not _HASH.fullmatch(expect):
            raise ConfigError(
                f"expect: got {expect!r:.80}, wanted a ScoringContract or its whole hash"
            )
        self.fingerprints = FingerprintCheck(expect_fingerprint)
        self.columns: int | None = None
        self._wanted: _Known | None = None
        self._published: dict[str, _Known] = {}
        if isinstance(expect, ScoringContract):
            self._wanted = _Known(expect.hash, expect)
            self.columns = len(expect.attributes)
        elif expect is not None:
            self._wanted = _Known(expect, None)

    @property
    def is_bound(self) -> bool:
        """True once it is known which contract is wanted, or that none is."""
        return self._wanted is not None

    @property
    def missing(self) -> str | None:
        """Why a server that publishes nothing is a wrong one; None if it is not."""
        if self._wanted is not None and self._wanted.hash is not None:
            return "got the scoring contract (none), wanted one"
        expected = self.fingerprints.expected
        return expected and f"got the model fingerprint (none), wanted {expected}"

    def check_fingerprint(self, server: str, fingerprint: str | None) -> None:
        """Check the fingerprint of a server's model.

        Raises:
            OtherModelError: it is not the expected one.
        """
        fault = self.fingerprints.find_fault(server, fingerprint)
        if fault is not None:
            raise OtherModelError(server, fault)

    def check_published(
        self, server: str, contract: ScoringContract | None, fingerprint: str | None = None
    ) -> None:
        """Check what a server publishes: its contract and its model's fingerprint, None without.

        Raises:
            OtherContractError: one is not the wanted one, or the contract not that of another
                server.
        """
        mine = _Known(contract.hash if contract is not None else None, contract, server)
        self.withdraw(server)
        # First: with a wrong model a server's contract is no reason to doubt the others.
        self.check_fingerprint(server, fingerprint)
        # Before any reward nobody knows which server is right: each is compared with all others.
        for other in [self._wanted] if self._wanted is not None else self._published.values():
            _compare(server, mine, other)
        self._published[server] = mine
        if contract is not None:
            self.columns = len(contract.attributes)

    def check_reward(
        self, server: str, contract_hash: str | None, columns: int, fingerprint: str | None = None
    ) -> None:
        """Check the contract of a reward of ``columns`` attributes; the first one binds the others.

        Raises:
            OtherContractError: it is another contract, or the reward comes from another model.
        """
        self.check_fingerprint(server, fingerprint)
        # If the server has published this contract, an error can say in what it differs.
        known = self._published.get(server)
        is_published = known is not None and known.hash == contract_hash
        mine = known if is_published and known else _Known(contract_hash, None, server)
        if self._wanted is None:
            self._wanted = mine
        _compare(server, mine, self._wanted)
        self.columns = columns

    def withdraw(self, server: str) -> None:
        """Drop what this server published, as another may have taken its place."""
        self._published.pop(server, None)


def _compare(server: str, got: _Known, wanted: _Known) -> None:
    if got.hash == wanted.hash:
        return
    text = f"got the scoring contract {got.hash or '(none)'}, "
    text += f"wanted {wanted.hash or '(none)'}"
    if wanted.whose:
        text += f", that of {wanted.whose}: the rewards of one client are by one contract"
    if got.contract is not None and wanted.contract is not None:
        text += f": {describe_differences(wanted.contract.differences(got.contract))}"
    raise OtherContractError(server, text)
