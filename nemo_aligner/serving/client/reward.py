"""RewardClient: score samples over HTTP with blocking calls, futures or asyncio.

A call of any size is split into requests that the servers accept. Replies to the same prompt stay
in one request if a gateway's judge may compare them. An answer has a reason for each row without a
reward. Triton and earlier servers reject a whole request if one row is bad, and name the row; the
client then sends the other rows again. Repeating a request is harmless, because scoring has no side
effects.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections.abc import Callable, Coroutine, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any, TypeVar

import numpy as np

from nemo_aligner.contract.contract import ScoringContract
from nemo_aligner.contract.messages import Conversation, Text, check_texts
from nemo_aligner.contract.principles import Principles, add_principles
from nemo_aligner.contract.sample_frame import SampleFrame
from nemo_aligner.contract.scorer import OnError, ScoredRows, check_on_error, place_rows
from nemo_aligner.contract.turns import TurnEnd
from nemo_aligner.serving.client.calls import (
    Progress,
    ServerClient,
    check_token,
    complete_urls,
    run_all,
)
from nemo_aligner.serving.client.contract_check import ContractCheck
from nemo_aligner.serving.client.partial_requests import (
    PartialRequest,
    TooManyRowsError,
    requests_of_texts,
    requests_of_tokens,
    token_rows,
)
from nemo_aligner.serving.client.pool import ServerPool, UnansweredError
from nemo_aligner.serving.failures import FailureKind, RefusedError
from nemo_aligner.serving.protocols import kserve, kserve_body
from nemo_aligner.serving.tokens import hide_password

logger = logging.getLogger(__name__)

T = TypeVar("T")


class RewardClient(ServerClient[ServerPool]):
    """Scores samples on reward model servers.

    A sample is a raw text or a conversation: a list of messages, or a ``Conversation``, which also
    has tools, documents and a principle. The server writes conversations in the model's chat
    template.

    A call is split into requests, which are sent concurrently, each to the least busy server. If
    the servers are gateways that combine rewards, replies to the same prompt stay in one request,
    up to the servers' limit of rows: a judge may compare them. To know this, the first call of
    several requests fetches the contract. A server that is gone gets no requests for a while, and
    is tried again later. The client is safe to use from several threads.

    All rewards of a client have the same scoring contract: ``expect`` (a contract or its hash), or
    the contract of the first answer. A server with another contract gets no requests until it is
    replaced. With ``expect_fingerprint``, the same holds for a server whose model has other
    weights.
    """

    def __init__(
        self,
        url: str | Sequence[str] = kserve.DEFAULT_URL,
        model_name: str = kserve.MODEL_NAME,
        *,
        expect: ScoringContract | str | None = None,
        expect_fingerprint: str | None = None,
        timeout_s: float | None = 600.0,
        wait_s: float = 0.0,
        retry_s: float = 5.0,
        max_connections: int = 16,
        token: str | None = None,
        in_callers_loop: bool = False,
        request_timeout_s: float | None = None,
    ) -> None:
        """Store the settings; the client connects at the first call.

        Args:
            url: ``http://host:port``, with a proxy's path prefix if there is one; or a list of URLs
                of servers of the same model
            model_name: name of the model on the servers
            expect: the expected scoring contract or its hash; if None, that of the first answer
            expect_fingerprint: fingerprint of the only model whose rewards are accepted
            timeout_s: deadline of one call, including retries, in seconds; None for no deadline. A
                call of many samples may take long even if the servers answer each of its requests.
                For such calls, set ``timeout_s=None`` and ``request_timeout_s``
            wait_s: how long to wait for a server that is still starting, in seconds
            retry_s: how long to wait for a server that has answered before and is gone, in seconds
            max_connections: maximum number of concurrent requests per server
            token: the servers' bearer token, if they require one
            in_callers_loop: run asyncio methods in the calling event loop, which must always be the
                same one, instead of a thread. This saves two switches between threads per request.
                Call only the asyncio methods of such a client, and close it with ``aclose``
            request_timeout_s: deadline of each request of a call, including its retries, in
                seconds; None for only the deadline of the call

        Raises:
            ConfigError: ``expect`` is neither a contract nor a hash, ``expect_fingerprint`` is not
                a fingerprint, a URL is invalid or has a password next to the token, or a header
                cannot carry the token.
        """
        urls = complete_urls([url] if isinstance(url, str) else url)
        check_token(token, urls)
        self._contract_check = ContractCheck(expect, expect_fingerprint)
        connect = partial(
            ServerPool,
            *(urls, model_name, self._contract_check, wait_s, retry_s, max_connections, token),
            request_timeout_s,
        )
        name = f"{', '.join(map(hide_password, urls))}, {model_name}"
        super().__init__(name, timeout_s, connect, in_callers_loop)

    def contract(self) -> ScoringContract:
        """Fetch the scoring contract of the servers.

        Raises:
            ServingError: no server answers, or the server publishes no contract.
        """
        return self._wait(self._submit(ServerPool.fetch_contract))

    def sample_frame(self) -> SampleFrame | None:
        """Fetch the text that the servers' chat template writes before and after a sample.

        None if there is no chat template, or the server does not publish it.

        Raises:
            ServingError: no server answers.
        """
        return self._wait(self._submit(ServerPool.fetch_sample_frame))

    @property
    def fingerprint(self) -> str | None:
        """Model fingerprint of the latest answer; None before the first answer, or if it has none.

        ``contract()`` also queries a server, so it updates the fingerprint.
        """
        return self._contract_check.fingerprints.latest

    def score(
        self,
        texts: Sequence[Text],
        *,
        on_error: OnError = "raise",
        principle: Principles = None,
    ) -> np.ndarray:
        """Score N samples: rewards ``[N, A]`` float32, one column per attribute.

        ``principle`` is the principle of all samples, or a list with an entry for each: a string,
        None, or a list of K strings, with which the sample becomes K samples. All methods that take
        ``texts`` have this argument.

        With ``on_error="nan"``, a sample that the server rejects gets NaN, and a warning is logged;
        ``score_rows`` also returns the reasons.

        Raises:
            ServingError: no server answers; or a server rejected a sample (the error has the
                reason), failed, or has another scoring contract.
        """
        return self._wait(self.score_future(texts, on_error=on_error, principle=principle))

    def score_rows(
        self,
        texts: Sequence[Text],
        *,
        on_error: OnError = "nan",
        is_probe: bool = False,
        principle: Principles = None,
    ) -> ScoredRows:
        """Score N samples: rewards with NaN for rejected samples, and the reasons.

        With ``is_probe``, the servers neither count the samples nor use them for statistics. A
        gateway's judge and functions do not score them.

        Raises:
            ServingError: for the reasons that ``score`` lists.
        """
        requests = _prepare_requests(texts, principle)
        return self._wait(self._submit_rows(self._collect, *requests, on_error, is_probe))

    def score_tokens(
        self, token_lists: Sequence[Sequence[int]], *, on_error: OnError = "raise"
    ) -> np.ndarray:
        """Score N token sequences unchanged: rewards ``[N, A]`` float32.

        Raises:
            ServingError: for the reasons that ``score`` lists, or a sequence is empty; the client
                does not send an empty sequence.
            TypeError: ``token_lists`` is not a list of lists.
        """
        return self._wait(self.score_tokens_future(token_lists, on_error=on_error))

    def score_future(
        self,
        texts: Sequence[Text],
        *,
        on_error: OnError = "raise",
        principle: Principles = None,
    ) -> Future[np.ndarray]:
        """Score N samples without waiting; the future has the rewards ``[N, A]`` float32."""
        return self._submit_rows(
            self._fetch_rewards, *_prepare_requests(texts, principle), on_error
        )

    def score_tokens_future(
        self, token_lists: Sequence[Sequence[int]], *, on_error: OnError = "raise"
    ) -> Future[np.ndarray]:
        """Score N token sequences without waiting.

        The future has the rewards ``[N, A]`` float32.
        """
        rows = token_rows(token_lists)
        requests = requests_of_tokens(rows)
        return self._submit_rows(self._fetch_rewards, len(rows), requests, on_error)

    async def score_async(
        self,
        texts: Sequence[Text],
        *,
        on_error: OnError = "raise",
        principle: Principles = None,
    ) -> np.ndarray:
        """Score N samples, as a coroutine: rewards ``[N, A]`` float32."""
        return await self._run_rows(
            self._fetch_rewards, *_prepare_requests(texts, principle), on_error
        )

    async def score_rows_async(
        self,
        texts: Sequence[Text],
        *,
        on_error: OnError = "nan",
        is_probe: bool = False,
        principle: Principles = None,
    ) -> ScoredRows:
        """Score N samples, as a coroutine: rewards, and the reasons for rejected samples.

        The arguments are those of ``score_rows``.
        """
        return await self._run_rows(
            self._collect, *_prepare_requests(texts, principle), on_error, is_probe
        )

    async def score_token_rows_async(
        self,
        token_lists: Sequence[Sequence[int]],
        *,
        on_error: OnError = "nan",
        is_probe: bool = False,
    ) -> ScoredRows:
        """Score N token sequences, as a coroutine: rewards, and reasons for rejected sequences."""
        rows = token_rows(token_lists)
        requests = requests_of_tokens(rows)
        return await self._run_rows(self._collect, len(rows), requests, on_error, is_probe)

    async def contract_async(self) -> ScoringContract:
        """Fetch the scoring contract of the servers, as a coroutine."""
        return await self._run(ServerPool.fetch_contract)

    async def turn_end_async(self) -> TurnEnd | None:
        """Fetch the text that the servers' chat template writes after a reply.

        None if it writes none, or the server does not publish it.
        """
        return await self._run(ServerPool.fetch_turn_end)

    async def sample_frame_async(self) -> SampleFrame | None:
        """Fetch what ``sample_frame`` returns, as a coroutine."""
        return await self._run(ServerPool.fetch_sample_frame)

    async def probe_async(self) -> dict[str, str | None]:
        """Check all servers: map each URL to why it gives no rewards now, or to None if it does."""
        return await self._run(ServerPool.probe)

    async def statistics_async(self) -> dict[str, dict[str, float] | None]:
        """Fetch counts (e.g. of requests) since each server's start: server URL -> name -> count.

        The inner dict is None if the server does not answer, and empty if it publishes no counts.
        """
        return await self._run(ServerPool.fetch_statistics)

    def _submit_rows(self, work: Callable[..., Coroutine[Any, Any, T]], *args: Any) -> Future[T]:
        """Submit a call that scores rows (see ``_submit``); its errors report the progress."""
        progress = Progress()
        return self._submit(partial(work, progress), *args, progress=progress)

    async def _run_rows(self, work: Callable[..., Coroutine[Any, Any, T]], *args: Any) -> T:
        """Run a call that scores rows (see ``_run``); its errors report the progress."""
        progress = Progress()
        return await self._run(partial(work, progress), *args, progress=progress)

    async def _fetch_rewards(
        self,
        progress: Progress,
        pool: ServerPool,
        total: int,
        requests: list[PartialRequest],
        on_error: OnError,
    ) -> np.ndarray:
        return (await self._collect(progress, pool, total, requests, on_error)).rewards

    async def _collect(
        self,
        progress: Progress,
        pool: ServerPool,
        total: int,
        requests: list[PartialRequest],
        on_error: OnError,
        is_probe: bool = False,
    ) -> ScoredRows:
        check_on_error(on_error)
        return await RowCollector(pool, on_error, is_probe, progress).collect(
            total, requests, self._contract_check.columns
        )


def _prepare_requests(
    texts: Sequence[Text], principle: Principles
) -> tuple[int, list[PartialRequest]]:
    rows = add_principles(check_texts(texts), principle)
    return len(rows), requests_of_texts(rows)


# RowCollector puts the rewards of a call in the caller's order, and records why rows were rejected.

# Maximum number of rows of a request, unless more rows must stay together. Larger requests gain
# nothing, because the server merges waiting requests, and a rejected or lost request is sent again
# as a whole.
_MOST_ROWS = 128
_OPTIONAL = [spec.name for spec in kserve.OPTIONAL_OUTPUTS]


class RowCollector:
    """Collects the rewards of one call.

    ``on_error`` decides about a rejected row: "raise" raises its error, "nan" sets its reward to
    NaN.
    """

    def __init__(
        self,
        pool: ServerPool,
        on_error: OnError,
        is_probe: bool = False,
        progress: Progress | None = None,
    ) -> None:
        self._pool = pool
        self._progress = Progress() if progress is None else progress
        self._sets_aside, self._is_probe = on_error == "nan", is_probe
        marks = {kserve_body.PROBE: is_probe, kserve_body.ROW_ERRORS: self._sets_aside}
        self._marks = [mark for mark, is_set in marks.items() if is_set]
        self._outputs: dict[str, dict[int, np.ndarray]] = {
            name: {} for name in ("rewards", *_OPTIONAL)
        }
        self._errors: dict[int, str] = {}
        self._unscored: set[int] = set()
        self._temporary: set[int] = set()
        # Why requests of a single row were rejected, by row, if the server did not name the row.
        self._unnamed: dict[int, RefusedError] = {}
        self._exceeded: set[int] = set()
        self._contract_hash: str | None = None
        self._fingerprints: set[str | None] = set()

    async def collect(
        self, total: int, requests: list[PartialRequest], columns: int | None
    ) -> ScoredRows:
        """Score ``total`` rows.

        Args:
            total: number of rows of the call, N.
            requests: the call as requests of any size, which are split as servers accept them.
            columns: number of attributes; only needed if all rows are rejected.

        Raises:
            ServingError: no server answers, the model failed, or a row was rejected and
                ``on_error`` is "raise".
        """
        self._progress.total = total
        if total:
            parts, servers = await self._split(total, requests)
            # Only a call of one request has a prefix: a larger one is to use all servers.
            prefix = _common_prefix(parts[0]) if servers > 1 and len(parts) == 1 else None
            try:
                await run_all(self._score(part, prefix) for part in parts)
            except UnansweredError as error:
                error.progress = self._progress.text
                raise
        self._check_call(total)
        self._log_problems(total)
        # If every row was rejected, no answer shows the number of attributes.
        rewards = self._place_output("rewards", total)
        if rewards is None:
            rewards = np.full((total, columns or 1), np.nan, dtype=np.float32)
        optional: dict[str, Any] = {name: self._place_output(name, total) for name in _OPTIONAL}
        return ScoredRows(
            rewards,
            dict(sorted(self._errors.items())),
            np.array([row in self._exceeded for row in range(total)], dtype=bool),
            self._contract_hash,
            # Rows that were scored by several models have no common fingerprint.
            self._fingerprints.pop() if len(self._fingerprints) == 1 else None,
            unscored=frozenset(self._unscored),
            temporary=frozenset(self._temporary),
            **optional,
        )

    async def _split(
        self, total: int, requests: list[PartialRequest]
    ) -> tuple[list[PartialRequest], int]:
        """Split the call into requests; return also the number of available servers."""
        limit, servers = await self._pool.capacity()
        # A call is spread over all servers, even if a single one could take all of it. Of probes,
        # servers count requests of more than one row, and no judge compares them.
        size = 1 if self._is_probe else min(limit, _MOST_ROWS, -(-total // servers))
        has_groups = total > size and any(request.key and request.rows for request in requests)
        if self._is_probe or (has_groups and await self._pool.scores_jointly() is False):
            requests, has_groups = [request.without_groups() for request in requests], False

        def split() -> list[PartialRequest]:
            return [part for request in requests for part in request.split(size, limit)]

        # In a thread: comparing many long prompts would block the event loop for seconds.
        return (await asyncio.to_thread(split) if has_groups else split()), servers

    def _check_call(self, total: int) -> None:
        """Raise the refusal if the call is at fault and not its rows, e.g. for a wrong model name.

        The call is at fault if every row was rejected for the same reason. That all rows of a
        single request were rejected proves less: rows of similar length are sent together, so all
        of them may be too long.
        """
        reasons = {refusal.reason for refusal in self._unnamed.values()}
        if total > 1 and len(self._unnamed) == total and len(reasons) == 1:
            raise self._unnamed[0]

    def _place_output(self, name: str, total: int) -> np.ndarray | None:
        """Arrange the rows of output ``name`` in the caller's order: ``[total, ...]``.

        A row without the output gets NaN (None for ``steps``). Return None if no row has the
        output.
        """
        rows = self._outputs[name]
        if not rows:
            return None
        if name == "steps":
            values = np.full(len(rows), None, dtype=np.object_)
            values[:] = [*rows.values()]
            return place_rows(values, [*rows], total)
        return place_rows(np.stack([*rows.values()]).astype(np.float32), [*rows], total)

    def _log_problems(self, total: int) -> None:
        if self._exceeded:
            logger.warning(
                "%d of %d samples were cut to the model's seq_length", len(self._exceeded), total
            )
        if self._errors:
            row = min(self._errors)
            logger.warning(
                "%d of %d samples have no reward; row %d: %s",
                *(len(self._errors), total, row, self._errors[row]),
            )

    async def _score(self, part: PartialRequest, prefix: bytes | None = None) -> None:
        """Send ``part`` until each of its rows has a reward or an error.

        ``prefix`` stands for the beginning of all its samples; None if they have different ones.

        A server without ``ROW_ERRORS`` rejects the whole request for one bad row, so each bad row
        costs one more request.
        """
        while part.rows:
            try:
                scored = await self._pool.infer(part, self._marks, prefix)
            # When the call was split, every known server accepted requests of this size. Those
            # servers are gone now, and the ones that answer accept fewer rows, so split again.
            except TooManyRowsError as error:
                await run_all(self._score(piece) for piece in part.split(error.limit))
                return
            except RefusedError as refusal:
                row = refusal.row
                if row is None or row >= len(part.rows):
                    await self._bisect(part, refusal)
                    return
                part = self._set_row_aside(part, row, refusal)
            else:
                self._store(part, scored)
                return

    def _store(self, part: PartialRequest, scored: ScoredRows) -> None:
        self._progress.answered += len(part.rows)
        self._errors |= {part.rows[place]: reason for place, reason in scored.errors.items()}
        self._unscored.update(part.rows[place] for place in scored.unscored)
        self._temporary.update(part.rows[place] for place in scored.temporary)
        places = [place for place in range(len(part.rows)) if place not in scored.errors]
        if not places:
            return
        for name, rows in self._outputs.items():
            values = getattr(scored, name)
            if values is not None:
                rows |= {part.rows[place]: values[place] for place in places}
        self._exceeded.update(part.rows[place] for place in places if scored.exceeded[place])
        self._contract_hash = scored.contract_hash
        self._fingerprints.add(scored.model_fingerprint)

    def _set_row_aside(
        self, part: PartialRequest, place: int, refusal: RefusedError
    ) -> PartialRequest:
        # A refusal names the row by its index in the request; the caller needs its index in the
        # call.
        row = part.rows[place]
        # If the reward of a row is not finite, the server also names the row. But then the model is
        # at fault, so the row is not skipped, and the call fails.
        if not self._may_skip(refusal):
            raise refusal.of_row(row) from refusal
        self._errors[row] = refusal.reason
        self._progress.answered += 1
        return part.select([other_row for other_row in part.rows if other_row != row])

    def _may_skip(self, refusal: RefusedError) -> bool:
        """Return whether rejected rows are to have no reward, instead of failing the call."""
        # A gateway sets aside rows that its judge cannot score, unless combine.fail_requests is
        # true: then the request has to fail.
        is_skipped = refusal.kind.reaction == "skip" and refusal.kind is not FailureKind.unscored
        return self._sets_aside and is_skipped

    async def _bisect(self, part: PartialRequest, refusal: RefusedError) -> None:
        """Find rows that a server rejects without naming them, by sending the request in halves."""
        # A request that has too many bytes is split even if rejected rows must raise.
        is_too_large = refusal.is_too_large and len(part.rows) > 1
        if not is_too_large and not self._may_skip(refusal):
            raise refusal
        if len(part.rows) == 1:
            row = part.rows[0]
            self._errors[row], self._unnamed[row] = refusal.reason, refusal
            self._progress.answered += 1
            return
        halves, is_group_cut = part.halve()
        if is_too_large and is_group_cut and await self._pool.scores_jointly():
            logger.warning(
                "%d replies to the same prompt are sent in several requests, so a gateway's judge "
                "may compare only some of them with each other: %s",
                len(part.rows),
                refusal.reason,
            )
        await run_all(self._score(half) for half in halves)


# How much of a sample's beginning stands for the prefix that later samples may share. Shorter
# samples have no prefix: computing them again takes less time than waiting for a busy server.
_PREFIX_CHARACTERS = 1024
_PREFIX_TOKENS = 256


def _common_prefix(part: PartialRequest) -> bytes | None:
    """Return a hash of the beginning of the samples; None if they begin in different ways.

    The turns of a dialogue begin alike: with the messages up to the user's first one, or with the
    same characters or token ids.
    """
    try:
        prefixes = {_beginning(part.items[row]) for row in part.rows}
    except (TypeError, KeyError, RecursionError):  # a malformed sample; the server says which
        return None
    prefix = prefixes.pop()
    if prefixes or prefix is None:
        return None
    return hashlib.blake2b(prefix, digest_size=16).digest()


def _beginning(sample: Any) -> bytes | None:
    """Return what later samples may begin with, as bytes; None for a short sample."""
    if isinstance(sample, str):
        text = sample[:_PREFIX_CHARACTERS]
        return repr(text).encode() if len(text) == _PREFIX_CHARACTERS else None
    rows = sample["messages"] if isinstance(sample, Mapping) else sample
    rows = rows.messages if isinstance(rows, Conversation) else rows
    first = [*rows[:_PREFIX_TOKENS]]
    roles = [row.get("role") if isinstance(row, dict) else None for row in first]
    if "user" not in roles:
        return repr(first).encode() if len(first) == _PREFIX_TOKENS else None
    if sum(len(str(row)) for row in first) < _PREFIX_CHARACTERS:
        return None
    return repr(first[: roles.index("user") + 1]).encode()
