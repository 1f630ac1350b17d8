"""``ServerPool``, the servers of a client: each request goes to an available server.

It goes to the least busy server or, for samples with a ``prefix``, to the server that had this
prefix before, because the prefix cache of that server has the beginning of the dialogue. If that
server is much busier than the others, another one gets the request.

If no server is available, a request waits for one. Before the client has seen a ready server, a
request waits up to ``wait_s``, because a server may still be starting. Afterwards, it waits up to
``retry_s``, because a server may be restarting. If a server is full and sends ``Retry-After``, the
request waits until its deadline, or that of its call.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import time
from collections.abc import Awaitable, Callable, Collection, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from nemo_aligner.contract.contract import ScoringContract
from nemo_aligner.contract.sample_frame import SampleFrame
from nemo_aligner.contract.turns import TurnEnd
from nemo_aligner.serving.client.causes import PROBE_S
from nemo_aligner.serving.client.contract_check import (
    ContractCheck,
    OtherContractError,
    OtherModelError,
)
from nemo_aligner.serving.client.partial_requests import (
    Capacity,
    CharacterBudget,
    PartialRequest,
    TooManyRowsError,
    decode_scored,
    encode_request,
)
from nemo_aligner.serving.client.server import RemoteServer, new_session
from nemo_aligner.serving.failures import FailureKind, RefusedError, UnavailableError
from nemo_aligner.serving.protocols import ScoredRows
from nemo_aligner.serving.protocols.kserve_body import Tensors
from nemo_aligner.utils.errors import ServingError

logger = logging.getLogger(__name__)

T = TypeVar("T")

# A server that had the prefix of a request before gets the request, if it has at most this many
# requests in flight more than the least busy server. Waiting for a few requests takes less time
# than computing a long dialogue again. Without a limit, a prefix that all samples share would leave
# other servers idle.
_MOST_EXTRA_REQUESTS = 4
# Seconds without any server after which the log reports what the client waits for.
_QUIET_S = 5.0


class UnansweredError(ServingError):
    """A request got no answer; ``progress`` describes how much of its call was answered."""

    progress = ""

    def __str__(self) -> str:
        return super().__str__() + (f"; {self.progress}" if self.progress else "")


class NoServerError(UnansweredError):
    """No server has answered.

    ``trouble`` lists the reason for each server; ``advice`` is what the user can do.
    """

    def __init__(self, trouble: str, advice: str) -> None:
        super().__init__(f"{trouble}; {advice}")
        self.trouble = trouble  # for commands: ``advice`` names settings that they do not have


class RequestTimeoutError(UnansweredError):
    """A request got no answer within ``request_timeout_s``, with all its retries."""


class NoKServeError(ServingError):
    """A server answers at every URL, but none of them speaks KServe v2."""


@dataclass
class _Search:
    """The state of one request while it looks for an available server.

    Attributes:
        began: start of the request, in seconds of ``time.monotonic``.
        trouble_since: when the request first found no available server, in seconds of
            ``time.monotonic``; the limit ``wait_s`` or ``retry_s`` is counted from then. None if
            there always was one.
        tried: servers to which the request was sent without success.
        last_trouble: reason of the last failure.
    """

    began: float = field(default_factory=time.monotonic)
    trouble_since: float | None = None
    tried: set[RemoteServer] = field(default_factory=set)
    last_trouble: str = "no server answers"

    def note_trouble(self, time_s: float) -> None:
        """Record ``time_s`` as the time when the request first found no available server."""
        if self.trouble_since is None:
            self.trouble_since = time_s


class ServerPool:
    """Sends requests to several servers of the same model.

    A server that is gone, or has another scoring contract, gets no requests until a new handshake
    succeeds. If the contracts of servers differ before the first reward, it is unknown which
    contract is right, so all servers are rejected.
    """

    def __init__(
        self,
        urls: Sequence[str],
        model_name: str,
        contract_check: ContractCheck,
        wait_s: float,
        retry_s: float,
        max_connections: int,
        token: str | None = None,
        request_timeout_s: float | None = None,
    ) -> None:
        self._session = new_session(token)
        # With one server and no expected contract or fingerprint, the contract is not fetched: the
        # first reward carries its hash, and all later rewards must have the same hash.
        reads_contract = (
            contract_check.is_bound
            or contract_check.fingerprints.expected is not None
            or len(urls) > 1
        )
        self._servers = [
            RemoteServer(
                *(self._session, url, model_name, contract_check, reads_contract),
                self._has_ready_server,
            )
            for url in urls
        ]
        self._name = f"{', '.join(server.url for server in self._servers)}, {model_name}"
        self._contract_check = contract_check
        self._wait_s, self._retry_s = wait_s, retry_s
        self._request_timeout_s = request_timeout_s
        # Concurrency is limited here and not by aiohttp's connector, so that a waiting request
        # chooses the least busy server at the moment when it is sent.
        self._gate = asyncio.Semaphore(max_connections * len(urls))
        self._budget = CharacterBudget(len(urls))
        self._ever_ready = False
        self._has_logged_trouble = False
        self._has_compared_servers = False
        self._handshakes: asyncio.Task[None] | None = None

    async def capacity(self) -> Capacity:
        """Return the limit of rows and the number of available servers.

        Raises:
            ServingError: no server is available.
        """
        return await self._limit_time(self._read_capacity())

    async def _read_capacity(self) -> Capacity:
        # _choose returns as soon as a server is ready. Read the limits at once: if another task ran
        # first, it could find that the last server is gone.
        await self._choose(1, _Search())
        limits = [server.limit for server in self._servers if server.limit is not None]
        return Capacity(min(limits), len(limits))

    async def scores_jointly(self) -> bool | None:
        """Return ``ContractCheck.scores_jointly``; while it is unknown, ask a server first."""
        if self._contract_check.scores_jointly is None:
            try:
                server = await self._choose(1, _Search())
                await server.check_contract()
            except ServingError as error:  # if it matters for rewards, their requests report it
                logger.debug("the contract is unknown: %s", error)
        return self._contract_check.scores_jointly

    async def infer(
        self, part: PartialRequest, marks: Collection[str] = (), prefix: bytes | None = None
    ) -> ScoredRows:
        """Score the rows of one request.

        It is encoded when it is sent: a call of many requests must not encode all of them while
        they wait for a connection. ``marks`` are parameters of the request
        (``kserve_body.encode_body``). Requests with the same ``prefix``, which stands for the
        beginning of their samples, go to the same server if it is not busy.

        Raises:
            RefusedError: a server rejected the request, or it cannot be encoded; the error has the
                reason.
            UnansweredError: no server answers, or none in time.
            ServingError: all servers that answer have another scoring contract.
            TooManyRowsError: no available server accepts this many rows.
        """
        rows = len(part.rows)

        def read(outputs: Tensors, server: str) -> ScoredRows:
            scored = decode_scored(outputs, rows, server)
            columns = scored.rewards.shape[1]
            if len(scored.errors) < rows:  # otherwise there is no reward that could have a contract
                self._contract_check.check_reward(
                    server, scored.contract_hash, columns, scored.model_fingerprint
                )
            return scored

        async with self._gate:
            num_characters = await part.measure()
            async with self._budget.spend(num_characters):
                inputs = await encode_request(part, num_characters)
                return await self._send(inputs, rows, read, marks=marks, prefix=prefix)

    async def send_request(
        self,
        encode: Callable[[], Tensors],
        rows: int,
        read: Callable[[Tensors, str], T],
        *,
        may_repeat: bool = True,
    ) -> T:
        """Send the tensors that ``encode`` returns, and return ``read(outputs, server name)``.

        ``encode`` is called when the request is sent. With ``may_repeat=False``, a request without
        an answer is not sent again.

        Raises:
            RefusedError, ServingError, TooManyRowsError: for the reasons that ``infer`` lists.
        """
        async with self._gate:
            return await self._send(encode(), rows, read, may_repeat)

    async def _send(
        self,
        inputs: Tensors,
        rows: int,
        read: Callable[[Tensors, str], T],
        may_repeat: bool = True,
        marks: Collection[str] = (),
        prefix: bytes | None = None,
    ) -> T:
        async def infer(server: RemoteServer) -> T:
            return read(await server.infer(inputs, marks, may_repeat), server.name)

        return await self._call_server(infer, rows, may_repeat, prefix)

    async def fetch_contract(self) -> ScoringContract:
        """Return the scoring contract that a server publishes; it is the same for all servers.

        All later rewards must have this contract, because the caller uses it to read them.

        Raises:
            ServingError: no server answers; or the server publishes no contract, or its contract
                differs from that of earlier rewards.
        """

        async def fetch(server: RemoteServer) -> ScoringContract:
            contract, fingerprint = await server.contract()
            self._contract_check.bind(server.name, contract, fingerprint)
            return contract

        return await self._call_server(fetch, 1)

    async def fetch_turn_end(self) -> TurnEnd | None:
        """Return the text that the servers' chat template writes after a reply.

        None if it writes none, or the server does not publish it.

        Raises:
            ServingError: no server answers.
        """
        return await self._call_server(RemoteServer.turn_end, 1)

    async def fetch_sample_frame(self) -> SampleFrame | None:
        """Return the text that the servers' chat template writes before and after a sample.

        None if there is no chat template, or the server does not publish it.

        Raises:
            ServingError: no server answers.
        """
        return await self._call_server(RemoteServer.sample_frame, 1)

    async def probe(self) -> dict[str, str | None]:
        """Check all servers: map each URL to why it gives no rewards now, or to None if it does."""
        # If no contract is expected, forget the contracts that servers published earlier: while all
        # servers are being replaced, the earlier contract of one server would differ from the new
        # contract of another.
        if not self._contract_check.is_bound:
            for server in self._servers:
                self._contract_check.withdraw(server.name)
        reasons = await asyncio.gather(*(server.probe() for server in self._servers))
        clash = self._find_clash()
        shared_reason = None if clash is None else str(clash)
        return {
            server.url: reason or shared_reason
            for server, reason in zip(self._servers, reasons, strict=True)
        }

    async def fetch_statistics(self) -> dict[str, dict[str, float] | None]:
        """Map the URL of each server to its counts since its start, e.g. of requests.

        None for a server that does not answer.
        """
        counts = await asyncio.gather(*(server.statistics() for server in self._servers))
        return {
            server.url: server_counts
            for server, server_counts in zip(self._servers, counts, strict=True)
        }

    def trouble(self) -> str:
        """List the reasons why servers are unavailable, for error messages.

        Empty if all are available.
        """
        return "; ".join(
            f"{server.name}: {server.trouble}" for server in self._servers if server.trouble
        )

    async def close(self) -> None:
        """Close the sockets."""
        await self._session.close()

    async def _call_server(
        self,
        call: Callable[[RemoteServer], Awaitable[T]],
        rows: int,
        may_repeat: bool = True,
        prefix: bytes | None = None,
    ) -> T:
        """Call an available server; with ``may_repeat``, call again if there is no answer.

        Raises:
            RequestTimeoutError: there was no answer within ``request_timeout_s``.
        """
        return await self._limit_time(self._repeat_call(call, rows, may_repeat, prefix))

    async def _limit_time(self, work: Coroutine[Any, Any, T]) -> T:
        try:
            return await asyncio.wait_for(work, self._request_timeout_s)
        except asyncio.TimeoutError:
            limit, trouble = self._request_timeout_s, self.trouble()
            raise RequestTimeoutError(
                f"{self._name}: timed out: no answer to a request within {limit:g} s "
                "(request_timeout_s)" + (f"; {trouble}" if trouble else "")
            ) from None

    async def _repeat_call(
        self,
        call: Callable[[RemoteServer], Awaitable[T]],
        rows: int,
        may_repeat: bool,
        prefix: bytes | None,
    ) -> T:
        search = _Search()
        while True:
            server = await self._choose(rows, search, prefix)
            search.tried.add(server)
            try:
                answer = await call(server)
            except UnavailableError as error:
                # After a lost answer, the server may have executed the training step. A 502 or 504
                # of a proxy also counts as lost, even with a Retry-After. A busy server, in
                # contrast, rejects a step before it executes anything.
                is_lost = error.kind is FailureKind.unreachable
                if not may_repeat and (is_lost or error.retry_after_s is None):
                    raise ServingError(
                        f"{server.name}: {error}; the request is not sent again, because the "
                        "server may have executed it"
                    ) from error
                if error.retry_after_s is None:
                    search.note_trouble(time.monotonic())
                else:
                    search.trouble_since = None
                search.last_trouble = f"{server.name}: {error}"
                if not is_lost:  # RemoteServer logs a lost server itself
                    self._log_trouble(search.last_trouble)
            except OtherContractError as error:
                # The server has another contract or model, e.g. during a rolling update. Drop its
                # answer, send it no more requests until a new handshake succeeds, and call another
                # server.
                server.leave_out(error.text)
                search.note_trouble(time.monotonic())
                search.last_trouble = str(error)
                self._log_trouble(search.last_trouble)
            else:
                self._has_logged_trouble = False
                return answer

    async def _choose(
        self, rows: int, search: _Search, prefix: bytes | None = None
    ) -> RemoteServer:
        while True:
            await self._wait_for_first_handshakes()
            time_s = time.monotonic()
            self._start_due_handshakes(time_s, search)
            # Once the time that a request may wait is over, it tries only servers that have not
            # failed it.
            is_over = (
                search.trouble_since is not None and self._patience_ends(search, time_s) <= time_s
            )
            ready = [
                server
                for server in self._servers
                if server.is_ready(time_s) and not (is_over and server in search.tried)
            ]
            if ready:
                fitting = [server for server in ready if server.limit and server.limit >= rows]
                if not fitting:
                    raise TooManyRowsError(max(server.limit or 1 for server in ready))
                return _pick(fitting, prefix)
            # A full server has announced when it has room again, so waiting for it does not count
            # toward wait_s or retry_s.
            if not any(server.is_full(time_s) for server in self._servers):
                self._give_up_if_hopeless(search)
                search.note_trouble(time_s)
                self._give_up_if_over(search, time_s)
                self._log_long_wait(search, time_s)
            await self._wait_for_change(time_s, search)

    async def _wait_for_first_handshakes(self) -> None:
        """Wait for the first handshakes; if they fail, the next call tries again.

        All requests that arrive meanwhile wait for the same task, so cancelling one of the requests
        must not cancel the task.
        """
        if self._has_compared_servers:
            return
        if self._handshakes is None or self._handshakes.done():
            self._handshakes = asyncio.ensure_future(self._handshake_all())
            self._handshakes.add_done_callback(_retrieve_error)
        await asyncio.shield(self._handshakes)

    async def _handshake_all(self) -> None:
        """Shake hands with all servers, so that they are compared before any reward is used.

        Once a server is ready, the others have at most ``PROBE_S``, because a server that hangs
        would delay the first reward. A later handshake compares a contract as well, and then the
        ready servers are right.

        Raises:
            ServingError: the contracts differ. The next request compares them again, because a
                server may have been replaced.
        """
        running = {server.start_handshake() for server in self._servers}
        while running and not self._has_ready_server():
            _, running = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
        if running:
            await asyncio.wait(running, timeout=PROBE_S)
        clash = self._find_clash()
        if clash is not None:
            # It is unknown which of the different contracts is right, so the next request compares
            # again.
            for server in self._servers:
                server.forget()
            raise clash
        self._has_compared_servers = True

    def _has_ready_server(self) -> bool:
        time_s = time.monotonic()
        return any(server.is_ready(time_s) for server in self._servers)

    def _find_clash(self) -> ServingError | None:
        """Return an error if the servers' contracts differ; None if they agree.

        Once a reward has decided which contract is right, this is not an error any more.
        """
        if self._contract_check.is_bound:
            return None
        # A server whose fingerprint is not the expected one is unusable by itself, so its contract
        # is not compared with the others.
        faults = [
            server.fault
            for server in self._servers
            if isinstance(server.fault, OtherContractError)
            and not isinstance(server.fault, OtherModelError)
        ]
        return next(iter(faults), None)

    def _start_due_handshakes(self, time_s: float, search: _Search) -> None:
        """Start handshakes with unavailable servers whose pause is over.

        If no server is ready, also start handshakes with the servers that the request of ``search``
        must try again before it gives up.
        """
        any_ready = any(server.is_ready(time_s) for server in self._servers)
        tried_since = 0.0 if any_ready else self._last_try(search, time_s)
        for server in self._servers:
            server.start_handshake_if_due(time_s, tried_since)
        self._ever_ready |= any_ready

    def _give_up_if_hopeless(self, search: _Search) -> None:
        """Raise ServingError if no server can become available, so that waiting is useless.

        Waiting is useless if every server was tried since the request began, and each has a fault
        that waiting does not fix, e.g. another contract.
        """
        faults = [
            server.fault
            for server in self._servers
            if server.fault is not None and server.tried_at >= search.began
        ]
        if len(faults) < len(self._servers):
            return
        # The token is the same for all servers, so the first rejection of it stands for all.
        is_unauthorized = [
            isinstance(fault, RefusedError) and fault.kind is FailureKind.unauthorized
            for fault in faults
        ]
        if all(is_unauthorized):
            raise faults[0]
        raise ServingError("; ".join(map(str, faults)))

    def _patience_ends(self, search: _Search, time_s: float) -> float:
        patience = self._retry_s if self._ever_ready else self._wait_s
        return (time_s if search.trouble_since is None else search.trouble_since) + patience

    def _last_try(self, search: _Search, time_s: float) -> float:
        """Return the time since which each server must have been tried before a request gives up.

        It is the moment when the request's waiting time ended, or its start if it did not wait.
        """
        ends = self._patience_ends(search, time_s)
        was_patient = search.trouble_since is not None and search.trouble_since < ends <= time_s
        return ends if was_patient else search.began

    def _give_up_if_over(self, search: _Search, time_s: float) -> None:
        # Every server is tried once more after the waiting time has ended, so that a request still
        # succeeds if a server came back at the last moment.
        was_each_tried = all(
            server.limit is not None
            or (server.handshake is None and server.tried_at >= self._last_try(search, time_s))
            for server in self._servers
        )
        if not was_each_tried or time_s < self._patience_ends(search, time_s):
            return
        if self._ever_ready:
            advice = f"no server came back within {self._retry_s:g} s (retry_s)"
        elif self._wait_s:
            advice = f"no server was ready within {self._wait_s:g} s (wait_s)"
        else:
            advice = "set wait_s=60 to wait for a server to start"
        trouble = self.trouble() or search.last_trouble
        # For this error, ``nemo-aligner evaluate`` suggests the clients of other protocols.
        if all(server.is_foreign for server in self._servers):
            raise NoKServeError(trouble)
        raise NoServerError(trouble, advice)

    async def _wait_for_change(self, time_s: float, search: _Search) -> None:
        """Sleep until a handshake, a server's pause or the request's time to wait ends.

        It sleeps at most 1 s.
        """
        moments = [server.again_at for server in self._servers if server.again_at > time_s]
        ends = self._patience_ends(search, time_s)
        pause = max(
            0.01, min([*moments, *([ends] if ends > time_s else []), time_s + 1.0]) - time_s
        )
        handshakes = [server.handshake for server in self._servers if server.handshake is not None]
        if handshakes:
            await asyncio.wait(handshakes, timeout=pause, return_when=asyncio.FIRST_COMPLETED)
        else:
            await asyncio.sleep(pause)

    def _log_long_wait(self, search: _Search, time_s: float) -> None:
        """Log once why a request waits, if no server has answered since the start of the client."""
        started_at = time_s if search.trouble_since is None else search.trouble_since
        if not (self._ever_ready or self._has_logged_trouble) and time_s - started_at >= _QUIET_S:
            self._has_logged_trouble = True
            trouble = self.trouble() or search.last_trouble
            logger.warning("%s; waiting up to %g s for a server", trouble, self._wait_s)

    def _log_trouble(self, trouble: str) -> None:
        if not self._has_logged_trouble:
            self._has_logged_trouble = True
            logger.warning("%s; the request is sent again", trouble)


def _pick(servers: Sequence[RemoteServer], prefix: bytes | None) -> RemoteServer:
    """Pick the least busy server, or the one that had ``prefix`` before unless it is busy.

    Which server has a prefix follows from their hashes (rendezvous hashing, Thaler and Ravishankar
    1998): all clients choose alike, and if a server leaves, only its own prefixes move.
    """
    fewest_in_flight = min(server.in_flight for server in servers)
    if prefix is None:
        return next(server for server in servers if server.in_flight == fewest_in_flight)
    idle = [
        server for server in servers if server.in_flight <= fewest_in_flight + _MOST_EXTRA_REQUESTS
    ]
    return max(idle, key=lambda server: hashlib.blake2b(server.url.encode(), key=prefix).digest())


def _retrieve_error(first: asyncio.Task[None]) -> None:
    """Retrieve the error of the handshakes, because asyncio logs errors that nobody retrieves."""
    if not first.cancelled():
        first.exception()
