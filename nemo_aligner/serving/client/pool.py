"""The servers of a client: each request goes to the least busy available one.

How long a request looks for one: ``wait_s`` before any has ever been ready, for a server that is
still starting; ``retry_s`` afterwards, for one that is restarted. A server that says when it has
room again is waited for until the call's own deadline.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from nemo_aligner.contract.contract import ScoringContract
from nemo_aligner.contract.sample_frame import SampleFrame
from nemo_aligner.contract.turns import TurnEnd
from nemo_aligner.serving.client.server import (
    ContractCheck,
    OtherContractError,
    OtherModelError,
    RemoteServer,
    new_session,
)
from nemo_aligner.serving.failures import FailureKind, UnavailableError
from nemo_aligner.serving.protocols import ScoredRows, kserve
from nemo_aligner.serving.protocols.kserve_body import Tensors
from nemo_aligner.utils.errors import ServingError

logger = logging.getLogger(__name__)

T = TypeVar("T")


class NoServerError(ServingError):
    """No server has answered; ``trouble`` says why of each, without what a client may set."""

    def __init__(self, trouble: str, advice: str) -> None:
        super().__init__(f"{trouble}; {advice}")
        self.trouble = trouble


class NoKServeError(ServingError):
    """Every URL is answered by another protocol."""


class TooManyRowsError(Exception):
    """No available server takes so many rows at once, but ``limit``."""

    def __init__(self, limit: int) -> None:
        super().__init__(f"at most {limit} rows")
        self.limit = limit


@dataclass
class _Search:
    """State of one request that looks for a server; ``trouble_since`` starts its patience."""

    began: float = field(default_factory=time.monotonic)
    trouble_since: float | None = None
    tried: set[RemoteServer] = field(default_factory=set)
    last_trouble: str = "no server answers"

    def note_trouble(self, now: float) -> None:
        """Note that no server answers, if that is new."""
        if self.trouble_since is None:
            self.trouble_since = now


class ServerPool:
    """A server that is gone, or scores by another contract, is left out, and tried again.

    Where servers disagree before there is any reward, nobody knows which is right: all are refused.
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
    ) -> None:
        self._session = new_session(token)
        # A lone server without an expected contract needs no request for it: its first reward has
        # the hash, and binds the client to it.
        reads_contract = (
            contract_check.is_bound
            or contract_check.fingerprints.expected is not None
            or len(urls) > 1
        )
        self._servers = [
            RemoteServer(self._session, url, model_name, contract_check, reads_contract)
            for url in urls
        ]
        self._contract_check = contract_check
        self._wait_s, self._retry_s = wait_s, retry_s
        # Here and not in aiohttp's connector, so that a request that waits for its turn can still
        # choose the server that is least busy by then.
        self._gate = asyncio.Semaphore(max_connections * len(urls))
        self._ever_ready = False
        self._said_trouble = False
        self._all_known = False
        self._handshakes: asyncio.Task[None] | None = None

    async def limit(self) -> tuple[int, int]:
        """Most rows of a request, and the number of available servers.

        Raises:
            ServingError: no server is there.
        """
        await self._choose(1, _Search())  # one is ready from here on
        limits = [server.limit for server in self._servers if server.limit is not None]
        return min(limits), len(limits)

    async def infer(self, inputs: Tensors, rows: int, is_probe: bool = False) -> ScoredRows:
        """The answer to one request, which servers do not count if it is a probe.

        Raises:
            RefusedError: it was refused, in the server's words.
            ServingError: no server answers, or all that do score by another contract.
            TooManyRowsError: see there.
        """

        def read(outputs: Tensors, server: str) -> ScoredRows:
            scored = _decoded(outputs, rows, server)
            columns = scored.rewards.shape[1]
            self._contract_check.check_reward(
                server, scored.contract_hash, columns, scored.model_fingerprint
            )
            return scored

        return await self.ask_for(inputs, rows, read, is_probe=is_probe)

    async def ask_for(
        self,
        inputs: Tensors,
        rows: int,
        read: Callable[[Tensors, str], T],
        *,
        again: bool = True,
        is_probe: bool = False,
    ) -> T:
        """Ask a server, and return what ``read`` makes of its answer and its name.

        Without ``again`` a request that got no answer is not sent once more.

        Raises:
            RefusedError, ServingError, TooManyRowsError: as ``infer``.
        """

        async def ask(server: RemoteServer) -> T:
            return read(await server.infer(inputs, is_probe), server.name)

        async with self._gate:
            return await self._ask(ask, rows, again)

    async def ask_contract(self) -> ScoringContract:
        """The contract that a server publishes, which is that of all.

        Raises:
            ServingError: no server answers, it publishes none, or another than rewards are by.
        """

        async def ask(server: RemoteServer) -> ScoringContract:
            contract, fingerprint = await server.contract()
            if self._contract_check.is_bound:
                self._contract_check.check_published(server.name, contract, fingerprint)
            else:
                self._contract_check.check_fingerprint(server.name, fingerprint)
            return contract

        return await self._ask(ask, 1)

    async def ask_turn_end(self) -> TurnEnd | None:
        """Text that the servers' chat template writes after a reply; None if unknown.

        Raises:
            ServingError: no server answers.
        """
        return await self._ask(RemoteServer.turn_end, 1)

    async def ask_sample_frame(self) -> SampleFrame | None:
        """Text that the servers' chat template writes around a sample; None if unknown.

        Raises:
            ServingError: no server answers.
        """
        return await self._ask(RemoteServer.sample_frame, 1)

    async def probe(self) -> dict[str, str | None]:
        """State of each server by its URL: why it gives no rewards now, None if it does."""
        # What servers said before is not compared with what they say now: the probe's answer has to
        # become good when the last of them was replaced.
        if not self._contract_check.is_bound:
            for server in self._servers:
                self._contract_check.withdraw(server.name)
        found = await asyncio.gather(*(server.probe() for server in self._servers))
        clash = self._clash()
        all_wrong = None if clash is None else str(clash)
        return {
            server.url: why or all_wrong for server, why in zip(self._servers, found, strict=True)
        }

    async def ask_statistics(self) -> dict[str, dict[str, float] | None]:
        """Counts of each server by its URL, None if it does not answer."""
        found = await asyncio.gather(*(server.statistics() for server in self._servers))
        return {server.url: counts for server, counts in zip(self._servers, found, strict=True)}

    def trouble(self) -> str:
        """Reasons why servers are unavailable."""
        wrong = [(each.name, each.trouble) for each in self._servers if each.trouble]
        return "; ".join(f"{name}: {why}" for name, why in wrong)

    async def close(self) -> None:
        """Close the sockets."""
        await self._session.close()

    async def _ask(
        self, question: Callable[[RemoteServer], Awaitable[T]], rows: int, again: bool = True
    ) -> T:
        """Ask a server; with ``again`` a request without an answer is sent once more."""
        search = _Search()
        while True:
            server = await self._choose(rows, search)
            search.tried.add(server)
            try:
                answer = await question(server)
            except UnavailableError as error:
                # A lost training step may have been done, also where a proxy's 502 or 504 says when
                # to come again. A server that is busy has refused it before it began.
                is_lost = error.kind is FailureKind.unreachable
                if not again and (is_lost or error.retry_after_s is None):
                    raise ServingError(
                        f"{server.name}: {error}; it is not sent again, as it may have been done"
                    ) from error
                if error.retry_after_s is None:
                    search.note_trouble(time.monotonic())
                else:
                    search.trouble_since = None
                search.last_trouble = f"{server.name}: {error}"
                if not is_lost:  # which the server has logged
                    self._say_trouble(search.last_trouble)
            except OtherContractError as error:
                # In a rolling update: its reward is not used, and another server is asked.
                server.leave_out(error.text)
                search.note_trouble(time.monotonic())
                search.last_trouble = str(error)
                self._say_trouble(search.last_trouble)
            else:
                self._said_trouble = False
                return answer

    async def _choose(self, rows: int, search: _Search) -> RemoteServer:
        while True:
            await self._first_handshakes()
            now = time.monotonic()
            self._start_due_handshakes(now, search)
            # Once its patience is over, a request tries only servers that it has not tried yet.
            is_over = search.trouble_since is not None and self._patience_ends(search, now) <= now
            ready = [
                each
                for each in self._servers
                if each.is_ready(now) and not (is_over and each in search.tried)
            ]
            if ready:
                fitting = [each for each in ready if each.limit and each.limit >= rows]
                if not fitting:
                    raise TooManyRowsError(max(each.limit or 1 for each in ready))
                return min(fitting, key=lambda each: each.in_flight)
            # A full server comes back by itself, so nobody loses patience with it.
            if not any(each.is_full(now) for each in self._servers):
                self._give_up_if_hopeless(search)
                search.note_trouble(now)
                self._give_up_if_over(search, now)
            await self._change(now, search)

    async def _first_handshakes(self) -> None:
        """Wait for the first handshake with every server; one that fails is not kept.

        All requests that come meanwhile wait for the same task, which none of them may cancel.
        """
        if self._all_known:
            return
        if self._handshakes is None or self._handshakes.done():
            self._handshakes = asyncio.ensure_future(self._handshake_all())
            self._handshakes.add_done_callback(_retrieve_error)
        await asyncio.shield(self._handshakes)

    async def _handshake_all(self) -> None:
        """Handshake with all servers, so that they are compared before any reward is used.

        Raises:
            ServingError: they have different contracts; any of them may change.
        """
        await asyncio.wait([server.start_handshake() for server in self._servers])
        clash = self._clash()
        if clash is not None:
            # None of them can be said to be right, so the next request compares them anew.
            for server in self._servers:
                server.forget()
            raise clash
        self._all_known = True

    def _clash(self) -> ServingError | None:
        """Error if servers disagree, while no reward says which of them is right."""
        if self._contract_check.is_bound:
            return None
        # A server with another model than the expected one is wrong by itself.
        faults = [
            server.fault
            for server in self._servers
            if isinstance(server.fault, OtherContractError)
            and not isinstance(server.fault, OtherModelError)
        ]
        return next(iter(faults), None)

    def _start_due_handshakes(self, now: float, search: _Search) -> None:
        """Begin handshakes with servers whose pause is over, or that a decision depends on.

        Where none is ready, each has to be tried again before a request may give up.
        """
        any_ready = any(server.is_ready(now) for server in self._servers)
        tried_since = 0.0 if any_ready else self._last_try(search, now)
        for server in self._servers:
            server.start_handshake_if_due(now, tried_since)
        self._ever_ready |= any_ready

    def _give_up_if_hopeless(self, search: _Search) -> None:
        """Raise if every server was tried since the request began, and is a wrong one."""
        faults = [
            str(server.fault)
            for server in self._servers
            if server.fault is not None and server.tried_at >= search.began
        ]
        if len(faults) == len(self._servers):
            raise ServingError("; ".join(faults))

    def _patience_ends(self, search: _Search, now: float) -> float:
        patience = self._retry_s if self._ever_ready else self._wait_s
        return (now if search.trouble_since is None else search.trouble_since) + patience

    def _last_try(self, search: _Search, now: float) -> float:
        """Time since which every server must have been tried before the request gives up."""
        ends = self._patience_ends(search, now)
        was_patient = search.trouble_since is not None and search.trouble_since < ends <= now
        return ends if was_patient else search.began

    def _give_up_if_over(self, search: _Search, now: float) -> None:
        # Every server was asked once more after the patience has ended: one that came back in its
        # last moment still gets the request.
        asked = all(
            server.limit is not None
            or (server.handshake is None and server.tried_at >= self._last_try(search, now))
            for server in self._servers
        )
        if not asked or now < self._patience_ends(search, now):
            return
        if self._ever_ready:
            advice = f"none came back within {self._retry_s:g} s (retry_s)"
        elif self._wait_s:
            advice = f"none was ready within {self._wait_s:g} s (wait_s)"
        else:
            advice = "wait_s=60 waits for one to come up"
        trouble = self.trouble() or search.last_trouble
        if all(server.is_foreign for server in self._servers):  # to evaluate, another client fits
            raise NoKServeError(trouble)
        raise NoServerError(trouble, advice)

    async def _change(self, now: float, search: _Search) -> None:
        """Wait until a handshake, a pause or the search's patience ends; at most a second."""
        moments = [each.again_at for each in self._servers if each.again_at > now]
        ends = self._patience_ends(search, now)
        pause = max(0.01, min([*moments, *([ends] if ends > now else []), now + 1.0]) - now)
        handshakes = [server.handshake for server in self._servers if server.handshake is not None]
        if handshakes:
            await asyncio.wait(handshakes, timeout=pause, return_when=asyncio.FIRST_COMPLETED)
        else:
            await asyncio.sleep(pause)

    def _say_trouble(self, trouble: str) -> None:
        if not self._said_trouble:
            self._said_trouble = True
            logger.warning("%s; the request is sent again", trouble)


def _retrieve_error(first: asyncio.Task[None]) -> None:
    """Retrieve the error, which asyncio would log where every waiting request was cancelled."""
    if not first.cancelled():
        first.exception()


def _decoded(outputs: Tensors, rows: int, server: str) -> ScoredRows:
    try:
        scored = kserve.decode_rewards(outputs)
        if scored.rewards.ndim == 2 and len(scored.rewards) == rows:
            return scored
    except (KeyError, ValueError, TypeError, IndexError):
        pass
    raise ServingError(f"{server}: the answer has no reward for each row")
