"""Common base of clients: calls with one deadline, in the background, split into requests.

Refused rows cost further requests: a server refuses a whole request for one row, and names it, so
the others are sent again without it. Scoring has no side effects, so that is harmless.
"""

from __future__ import annotations

import asyncio
import logging
import weakref
from collections.abc import Callable, Coroutine, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from functools import partial
from threading import Lock
from types import TracebackType
from typing import Any, Generic, Literal, TypeVar
from urllib.parse import urlsplit

import numpy as np

from nemo_aligner.contract.messages import Text
from nemo_aligner.serving.client.pool import Background, Connections, ServerPool, TooManyRowsError
from nemo_aligner.serving.client.server import Tensors
from nemo_aligner.serving.failures import RefusedError
from nemo_aligner.serving.protocols import ScoredRows, kserve, place_rows
from nemo_aligner.serving.tokens import is_token
from nemo_aligner.utils.errors import ConfigError, DataError, ServingError, shown

C = TypeVar("C", bound=Connections)
T = TypeVar("T")
Client = TypeVar("Client", bound="ServerClient[Any]")

# A fork has its parent's sockets, but neither the thread nor the right to close them.
_NEVER_FREED: list[Background] = []


class ServerClient(Generic[C]):
    """Asks servers from a thread beside the program; safe to use from several threads.

    A client that is not closed lets its connections go when nothing refers to it any more; a
    program that ends does not wait for what it has in flight.
    """

    def __init__(
        self,
        name: str,
        timeout_s: float,
        connect: Callable[[], C],
        in_callers_loop: bool = False,
    ) -> None:
        """``name`` begins errors; ``connect`` is called in the thread, or in the caller's loop.

        It is called at the first request, so that a client can be made before a fork.
        """
        self._name = name
        self._timeout_s = timeout_s
        self._connect = connect
        self._lock = Lock()  # callers of several threads start one background
        self._background: Background[C] | None = None
        self._in_callers_loop = in_callers_loop
        self._here: C | None = None
        self._is_closed = False

    def __enter__(self: Client) -> Client:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if kind is not None and self._background is not None:
            self._background.leave()  # nobody will read the answers
        self.close()

    def close(self) -> None:
        """Finish what was submitted, and let the connections go."""
        self._is_closed = True
        if self._background is not None and self._background.belongs_here():
            self._background.close()

    async def aclose(self) -> None:
        """Let the connections of the caller's loop go; nothing may be in flight."""
        if self._here is not None:
            await self._here.close()

    def _submit(self, work: Callable[..., Coroutine[Any, Any, T]], *given: Any) -> Future[T]:
        """Run ``work(connections, *given)`` in the background, for ``timeout_s`` at most."""
        limited = partial(_in_time, work, given, self._timeout_s, self._name)
        return self._started().submit(limited)

    async def _run(self, work: Callable[..., Coroutine[Any, Any, T]], *given: Any) -> T:
        """Like ``_submit``, for asyncio."""
        if not self._in_callers_loop:
            return await asyncio.wrap_future(self._submit(work, *given))
        if self._here is None:
            self._here = self._connect()
        return await _in_time(work, given, self._timeout_s, self._name, self._here)

    def _started(self) -> Background[C]:
        """Background thread of this process, started if it has none; a fork never has one.

        Raises:
            ServingError: the client is closed.
        """
        with self._lock:
            if self._is_closed:
                raise ServingError(f"{self._name}: the client is closed")
            inherited = self._background
            if inherited is not None and not inherited.belongs_here():
                _NEVER_FREED.append(inherited)
                self._background = None
            if self._background is None:
                # It does not refer to this client, or that would never be freed.
                self._background = Background(self._connect)
                weakref.finalize(self, self._background.leave).atexit = False
            return self._background

    def _wait(self, future: Future[T]) -> T:
        if self._background is not None and self._background.is_current():
            future.cancel()  # the thread would wait for itself
            raise RuntimeError("a callback of a future may not wait for another: submit a future")
        try:
            return future.result()
        except BaseException:
            future.cancel()  # an interruption: the server is spared what nobody waits for
            raise


async def _in_time(
    work: Callable[..., Coroutine[Any, Any, T]],
    given: Sequence[Any],
    timeout_s: float,
    name: str,
    connections: C,
) -> T:
    try:
        return await asyncio.wait_for(work(connections, *given), timeout_s)
    except asyncio.TimeoutError:
        trouble = connections.trouble()
        raise ServingError(
            f"{name}: timed out: no answer within {timeout_s:g} s (timeout_s)"
            + (f"; {trouble}" if trouble else "")
        ) from None


def check_token(token: str | None) -> None:
    """Raise ConfigError for a token that no header can carry; it is not shown."""
    if token is not None and not is_token(token):
        raise ConfigError("token: it is no token, wanted one word of ASCII letters, digits, signs")


def checked_urls(urls: Sequence[str]) -> list[str]:
    """Complete the URLs, each once.

    Raises:
        ConfigError: there is none, or one is no URL.
    """
    checked = []
    for url in urls:
        whole = (url if "://" in url else f"http://{url}").rstrip("/")
        parts = urlsplit(whole)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ConfigError(f"url: got {url!r:.80}, wanted http://host:port")
        checked.append(whole)
    if not checked:
        raise ConfigError("url: got no URL, wanted http://host:port, or several")
    return list(dict.fromkeys(checked))


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

logger = logging.getLogger(__name__)

OnError = Literal["raise", "nan"]
Split = Callable[[int], list[PartialRequest]]

# Of a request. Larger ones gain nothing, as the server merges those that wait; and what is refused
# or lost is sent again as a whole.
_MOST_ROWS = 128
_OPTIONAL = [spec.name for spec in kserve.OPTIONAL_OUTPUTS]


def check_on_error(on_error: str) -> None:
    """Raise ConfigError for any other way."""
    if on_error not in ("raise", "nan"):
        raise ConfigError(f"on_error: got {on_error!r:.80}, wanted 'raise' or 'nan'")


class RowCollector:
    """Gathers the rewards of one call; ``on_error`` says what becomes of rows that are refused."""

    def __init__(self, pool: ServerPool, on_error: OnError) -> None:
        self._pool = pool
        self._sets_aside = on_error == "nan"
        self._outputs: dict[str, dict[int, np.ndarray]] = {
            name: {} for name in ("rewards", *_OPTIONAL)
        }
        self._errors: dict[int, str] = {}
        self._exceeded: set[int] = set()
        self._contract_hash: str | None = None

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
                scored = await self._pool.infer(encoded(part), len(part.rows))
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
    except (TypeError, ValueError):  # such as a lone surrogate: which row has it is yet to be found
        for place, row in enumerate(part.rows):
            try:
                _ = part.only([row]).inputs
            except (TypeError, ValueError) as error:
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
