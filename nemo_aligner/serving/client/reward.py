"""RewardClient: texts, conversations or token ids -> rewards, over HTTP; sync, futures, asyncio.

A call of any size is split into requests that servers accept. Refused rows cost further requests: a
server refuses a whole request for one row, and names it, so the others are sent again without it.
Scoring has no side effects, so that is harmless.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from nemo_aligner.contract.contract import ScoringContract
from nemo_aligner.contract.messages import Text, check_texts
from nemo_aligner.contract.sample_frame import SampleFrame
from nemo_aligner.contract.scorer import OnError, ScoredRows, check_on_error, place_rows
from nemo_aligner.contract.turns import TurnEnd
from nemo_aligner.serving.client.calls import ServerClient, check_token, checked_urls
from nemo_aligner.serving.client.pool import ServerPool, TooManyRowsError
from nemo_aligner.serving.client.server import ContractCheck
from nemo_aligner.serving.failures import RefusedError
from nemo_aligner.serving.protocols import kserve
from nemo_aligner.serving.protocols.kserve_body import Tensors
from nemo_aligner.serving.tokens import hide_password
from nemo_aligner.utils.errors import DataError, shown

logger = logging.getLogger(__name__)

Split = Callable[[int], "list[PartialRequest]"]


class RewardClient(ServerClient[ServerPool]):
    """Scores on reward model servers; a text is a raw string or a conversation.

    A conversation is a list of messages, or a ``Conversation``, which has tools and documents, too.

    Conversations get the model's chat template on the server. A call is split into requests that
    are sent side by side, each to the least busy of the servers; one that is gone is left out, and
    tried again. Safe to use from several threads.

    All rewards of a client are by one scoring contract: ``expect`` (a contract, or its hash), else
    the first that it meets. A server that scores by another one is left out until it is right; with
    ``expect_fingerprint`` also one whose model has other weights.
    """

    def __init__(
        self,
        url: str | Sequence[str] = kserve.DEFAULT_URL,
        model_name: str = kserve.MODEL_NAME,
        *,
        expect: ScoringContract | str | None = None,
        expect_fingerprint: str | None = None,
        timeout_s: float = 600.0,
        wait_s: float = 0.0,
        retry_s: float = 5.0,
        max_connections: int = 16,
        token: str | None = None,
        in_callers_loop: bool = False,
    ) -> None:
        """One ``url``, or those of several servers of the same model.

        Args:
            url: ``http://host:port``, and the prefix where a proxy has one: ``/rewards``
            model_name: what it is called on the servers
            expect: see above
            expect_fingerprint: of the only model whose rewards are accepted
            timeout_s: for one call with all that it takes
            wait_s: for a server that is not up yet
            retry_s: for a server that has answered before and is gone, or has no room
            max_connections: requests at once, for each server
            token: the servers' bearer token, where they ask for one
            in_callers_loop: the asyncio methods work in the event loop that calls them, always the
                same one, and not in a thread, which costs each request two hand-overs; ``aclose``
                then closes the client, and the other methods are not for it

        Raises:
            ConfigError: ``expect`` is neither a contract nor a hash, ``expect_fingerprint`` is no
                fingerprint, a URL is none, or the token is not one word.
        """
        check_token(token)
        urls = checked_urls([url] if isinstance(url, str) else url)
        self._contract_check = ContractCheck(expect, expect_fingerprint)
        connect = partial(
            ServerPool,
            *(urls, model_name, self._contract_check, wait_s, retry_s, max_connections, token),
        )
        name = f"{', '.join(map(hide_password, urls))}, {model_name}"
        super().__init__(name, timeout_s, connect, in_callers_loop)

    def contract(self) -> ScoringContract:
        """The contract that the servers score by.

        Raises:
            ServingError: there is no server, or it publishes none.
        """
        return self._wait(self._submit(ServerPool.ask_contract))

    @property
    def fingerprint(self) -> str | None:
        """Model fingerprint of the server that was heard last; None before, and if it tells none.

        ``contract()`` asks a server.
        """
        return self._contract_check.fingerprints.latest

    def score(self, texts: Sequence[Text], *, on_error: OnError = "raise") -> np.ndarray:
        """Rewards ``[N, A]`` float32 of N texts.

        With ``on_error="nan"`` a text that the server refuses has NaN, and the others their
        rewards; what is wrong with it is logged. ``score_rows`` returns it.

        Raises:
            ServingError: the server refused a text (in its words), there is none, it failed, or it
                scores by another contract.
        """
        return self._wait(self.score_future(texts, on_error=on_error))

    def score_rows(self, texts: Sequence[Text], *, on_error: OnError = "nan") -> ScoredRows:
        """Rewards, NaN for the texts that the server refuses, and why it does.

        Raises:
            ServingError: as ``score``.
        """
        return self._wait(self._submit(self._collect, *_of_texts(texts), on_error))

    def score_tokens(
        self, token_lists: Sequence[Sequence[int]], *, on_error: OnError = "raise"
    ) -> np.ndarray:
        """Rewards ``[N, A]`` float32 of N token sequences, scored as they stand.

        Raises:
            ServingError: as ``score``; an empty sequence is refused before it is sent.
            TypeError: ``token_lists`` is no list of lists.
        """
        return self._wait(self.score_tokens_future(token_lists, on_error=on_error))

    def score_future(
        self, texts: Sequence[Text], *, on_error: OnError = "raise"
    ) -> Future[np.ndarray]:
        """Like ``score``, in the background."""
        return self._submit(self._rewards, *_of_texts(texts), on_error)

    def score_tokens_future(
        self, token_lists: Sequence[Sequence[int]], *, on_error: OnError = "raise"
    ) -> Future[np.ndarray]:
        """Like ``score_tokens``, in the background."""
        rows = token_rows(token_lists)
        return self._submit(self._rewards, len(rows), partial(split_tokens, rows), on_error)

    async def score_async(
        self, texts: Sequence[Text], *, on_error: OnError = "raise"
    ) -> np.ndarray:
        """Like ``score``, for asyncio."""
        return await self._run(self._rewards, *_of_texts(texts), on_error)

    async def score_rows_async(
        self, texts: Sequence[Text], *, on_error: OnError = "nan", is_probe: bool = False
    ) -> ScoredRows:
        """Like ``score_rows``, for asyncio; ``on_error="raise"``: a refused text is an error.

        ``is_probe``: the servers neither count the texts nor let them enter their statistics.
        """
        return await self._run(self._collect, *_of_texts(texts), on_error, is_probe)

    async def score_token_rows_async(
        self,
        token_lists: Sequence[Sequence[int]],
        *,
        on_error: OnError = "nan",
        is_probe: bool = False,
    ) -> ScoredRows:
        """``score_rows_async`` of token sequences, scored as they stand."""
        rows = token_rows(token_lists)
        split = partial(split_tokens, rows)
        return await self._run(self._collect, len(rows), split, on_error, is_probe)

    async def contract_async(self) -> ScoringContract:
        """Like ``contract``, for asyncio."""
        return await self._run(ServerPool.ask_contract)

    async def turn_end_async(self) -> TurnEnd | None:
        """Text that the servers' chat template writes after a reply; None if unknown."""
        return await self._run(ServerPool.ask_turn_end)

    async def sample_frame_async(self) -> SampleFrame | None:
        """Text that the servers' chat template writes around a sample; None if unknown."""
        return await self._run(ServerPool.ask_sample_frame)

    async def probe_async(self) -> dict[str, str | None]:
        """State of each server by its URL: why it gives no rewards now, None if it does."""
        return await self._run(ServerPool.probe)

    async def statistics_async(self) -> dict[str, dict[str, float] | None]:
        """Counts of each server since its start, by its URL and by name.

        None where it does not answer, empty where it is a server that counts nothing.
        """
        return await self._run(ServerPool.ask_statistics)

    async def _rewards(
        self, pool: ServerPool, total: int, split: Split, on_error: OnError
    ) -> np.ndarray:
        return (await self._collect(pool, total, split, on_error)).rewards

    async def _collect(
        self,
        pool: ServerPool,
        total: int,
        split: Split,
        on_error: OnError,
        is_probe: bool = False,
    ) -> ScoredRows:
        check_on_error(on_error)
        return await RowCollector(pool, on_error, is_probe).collect(
            total, split, self._contract_check.columns
        )


def _of_texts(texts: Sequence[Text]) -> tuple[int, Split]:
    rows = check_texts(texts)
    return len(rows), partial(split_texts, rows)


# Splitting: a call of any size as requests that servers accept.

Encode = Callable[[Sequence[Any]], Tensors]


@dataclass(frozen=True)
class PartialRequest:
    """Some of the caller's rows, by their indices in ``items``, to be sent together.

    Encoded only when it is sent: a call of millions of texts has few of them in memory twice.
    """

    rows: list[int]
    items: Sequence[Any]
    encode: Encode

    @property
    def inputs(self) -> Tensors:
        """The request's tensors."""
        return self.encode([self.items[row] for row in self.rows])

    def only(self, rows: list[int]) -> PartialRequest:
        """A request for these of its rows."""
        return replace(self, rows=rows)

    def chunks(self, size: int) -> list[PartialRequest]:
        """Requests of at most ``size`` rows."""
        return [self.only(rows) for rows in _chunks(self.rows, size)]


def split_texts(texts: Sequence[Text], limit: int) -> list[PartialRequest]:
    """Requests of at most ``limit`` texts each, of raw texts or of conversations."""
    # A request has one form, so texts and conversations of a call travel apart.
    sentences = [row for row, text in enumerate(texts) if isinstance(text, str)]
    conversations = [row for row, text in enumerate(texts) if not isinstance(text, str)]
    return [
        *PartialRequest(sentences, texts, kserve.encode_sentences).chunks(limit),
        *PartialRequest(conversations, texts, kserve.encode_conversations).chunks(limit),
    ]


def token_rows(token_lists: Sequence[Sequence[int]]) -> list[Sequence[int]]:
    """The rows of a call for token sequences.

    Raises:
        TypeError: they are no list of lists.
    """
    wanted = "wanted a list of lists of token ids"
    if isinstance(token_lists, str) or not isinstance(token_lists, Iterable):
        raise TypeError(f"token_lists: got {shown(token_lists)}, {wanted}")
    rows = list(token_lists)
    for row, ids in enumerate(rows):
        if isinstance(ids, str) or not _has_length(ids):
            raise TypeError(f"token_lists, row {row}: got {shown(ids)}, {wanted}")
    return rows


def split_tokens(token_lists: Sequence[Sequence[int]], limit: int) -> list[PartialRequest]:
    """Requests of at most ``limit`` token sequences each."""
    # Alike in length, so that a request carries little padding.
    by_length = sorted(range(len(token_lists)), key=lambda row: len(token_lists[row]))
    return PartialRequest(by_length, token_lists, kserve.encode_tokens).chunks(limit)


def _has_length(ids: object) -> bool:
    try:
        len(ids)  # type: ignore[arg-type]
    except TypeError:  # also a number in an array of torch, which has the method
        return False
    return True


def _chunks(rows: list[int], size: int) -> Iterable[list[int]]:
    return (rows[start : start + size] for start in range(0, len(rows), size))


# Collecting: rewards in the caller's order, and refused rows.

# Rows of a request. Larger ones gain nothing, as the server merges those that wait; and what is
# refused or lost is sent again as a whole.
_MOST_ROWS = 128
_OPTIONAL = [spec.name for spec in kserve.OPTIONAL_OUTPUTS]
# Errors of encoding a row: no JSON value, half of a surrogate pair, lists in lists without end.
_UNSENDABLE = (TypeError, ValueError, RecursionError)


class RowCollector:
    """Gathers the rewards of one call; ``on_error`` says what becomes of rows that are refused."""

    def __init__(self, pool: ServerPool, on_error: OnError, is_probe: bool = False) -> None:
        self._pool, self._is_probe = pool, is_probe
        self._sets_aside = on_error == "nan"
        self._outputs: dict[str, dict[int, np.ndarray]] = {
            name: {} for name in ("rewards", *_OPTIONAL)
        }
        self._errors: dict[int, str] = {}
        self._exceeded: set[int] = set()
        self._contract_hash: str | None = None
        self._fingerprints: set[str | None] = set()

    async def collect(self, total: int, split: Split, columns: int | None) -> ScoredRows:
        """The rewards of ``total`` rows; ``split`` makes requests of at most so many rows.

        Raises:
            ServingError: no server answers, the model failed, or a row was refused that is not
                set aside.
        """
        if total:
            limit, servers = await self._pool.limit()
            # A call is spread over all servers, also where one could take it whole.
            size = min(limit, _MOST_ROWS, -(-total // servers))
            await _all_of(self._score(part) for part in split(size))
        self._tell(total)
        # Where every row was refused, no answer says how many attributes there are.
        rewards = self._gathered("rewards", total)
        if rewards is None:
            rewards = np.full((total, columns or 1), np.nan, dtype=np.float32)
        return ScoredRows(
            rewards,
            dict(sorted(self._errors.items())),
            np.array([row in self._exceeded for row in range(total)], dtype=bool),
            self._contract_hash,
            # Rows of several models have no fingerprint in common.
            self._fingerprints.pop() if len(self._fingerprints) == 1 else None,
            **{name: self._gathered(name, total) for name in _OPTIONAL},
        )

    def _gathered(self, name: str, total: int) -> np.ndarray | None:
        """All rows of an output, NaN where there is none; None if no row has it."""
        rows = self._outputs[name]
        if not rows:
            return None
        if name == "steps":
            values = np.full(len(rows), None, dtype=np.object_)
            values[:] = [*rows.values()]
            return place_rows(values, [*rows], total)
        return place_rows(np.stack([*rows.values()]).astype(np.float32), [*rows], total)

    def _tell(self, total: int) -> None:
        if self._exceeded:
            logger.warning(
                "%d of %d texts were cut to the model's seq_length", len(self._exceeded), total
            )
        if self._errors:
            row = min(self._errors)
            logger.warning(
                "%d of %d rows have no reward; row %d: %s",
                *(len(self._errors), total, row, self._errors[row]),
            )

    async def _score(self, part: PartialRequest) -> None:
        """Send requests until each row has a reward or an error; one more for each refused row."""
        while part.rows:
            try:
                scored = await self._pool.infer(encoded(part), len(part.rows), self._is_probe)
            except TooManyRowsError as error:  # its limit was another server's
                await _all_of(self._score(each) for each in part.chunks(error.limit))
                return
            except RefusedError as refusal:
                row = refusal.row
                if row is None or row >= len(part.rows):
                    await self._score_apart(part, refusal)
                    return
                part = self._without(part, row, refusal)
            else:
                self._keep(part, scored)
                return

    def _keep(self, part: PartialRequest, scored: ScoredRows) -> None:
        for name, rows in self._outputs.items():
            values = getattr(scored, name)
            if values is not None:
                rows.update(zip(part.rows, values, strict=True))
        self._exceeded.update(
            row for row, cut in zip(part.rows, scored.exceeded, strict=True) if cut
        )
        self._contract_hash = scored.contract_hash
        self._fingerprints.add(scored.model_fingerprint)

    def _without(self, part: PartialRequest, place: int, refusal: RefusedError) -> PartialRequest:
        row = part.rows[place]  # the caller's number; the server's is the place in the request
        # A reward that is not finite names a row, too, and is the model's fault, not the text's.
        if not self._sets_aside or refusal.kind.reaction != "skip":
            raise refusal.of_row(row) from refusal
        self._errors[row] = refusal.reason
        return part.only([other for other in part.rows if other != row])

    async def _score_apart(self, part: PartialRequest, refusal: RefusedError) -> None:
        """Find the rows of a refusal that names none, by sending halves."""
        # A request that is too large is not at fault while it can be divided.
        is_too_large = refusal.is_too_large and len(part.rows) > 1
        if not is_too_large and not (self._sets_aside and refusal.kind.reaction == "skip"):
            raise refusal
        if len(part.rows) == 1:
            self._errors[part.rows[0]] = refusal.reason
            return
        await _all_of(self._score(half) for half in part.chunks(-(-len(part.rows) // 2)))
        # Each of several has the same error alone, so it is the request's, such as a wrong model.
        if all(self._errors.get(row) == refusal.reason for row in part.rows):
            raise refusal


def encoded(part: PartialRequest) -> Tensors:
    """The tensors of a request.

    Raises:
        RefusedError: one of its rows cannot be sent, by its place in the request.
    """
    try:
        return part.inputs
    except DataError as error:  # which says what row
        raise RefusedError("client", 400, str(error)) from error
    except _UNSENDABLE:  # such as a lone surrogate: which row has it is yet to be found
        for place, row in enumerate(part.rows):
            try:
                _ = part.only([row]).inputs
            except _UNSENDABLE as error:
                text = f"row {place}: it cannot be sent: {error}"
                raise RefusedError("client", 400, text) from error
        raise


async def _all_of(works: Iterable[Coroutine[Any, Any, None]]) -> None:
    tasks: Sequence[asyncio.Task[None]] = [asyncio.ensure_future(work) for work in works]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:  # where one failed, nobody wants the others
            task.cancel()
