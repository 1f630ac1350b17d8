"""``PartialRequest``: the part of a call that is sent in one request.

A call of any size is split into requests that the servers accept, and each is encoded when it is
sent. Where rewards may depend on the other samples of a request, replies to the same prompt stay in
one request.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Hashable, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any, NamedTuple

from nemo_aligner.contract.messages import (
    Conversation,
    Messages,
    Text,
    as_json,
    question_of,
    read_text,
)
from nemo_aligner.serving.failures import RefusedError
from nemo_aligner.serving.protocols import ScoredRows, kserve
from nemo_aligner.serving.protocols.kserve_body import Tensors
from nemo_aligner.utils.errors import DataError, ServingError, shown

Encode = Callable[[Sequence[Any]], Tensors]
# Errors while encoding a row: a value that JSON cannot represent, half of a surrogate pair (invalid
# Unicode), or lists that are nested too deeply.
_UNSENDABLE = (TypeError, ValueError, RecursionError)
# A request of up to this many characters is encoded in the event loop. A larger one would keep it
# from answering other requests, so it is encoded in a thread.
SHORT_CHARACTERS = 2**16
# Limit of the characters of all requests in flight to a server. Rows of a call share their prompt
# in memory, but each is sent with a copy of it. Requests are not split for it: a gateway's judge
# may compare the rows of a request.
_MOST_IN_FLIGHT = 2**24
_OF_NUMBER = 8  # estimated characters of a number, or of the punctuation of another value


class Capacity(NamedTuple):
    """Number of rows that every available server accepts in a request, and of these servers."""

    rows: int
    servers: int


class TooManyRowsError(Exception):
    """No available server accepts this many rows; ``limit`` is the most that one accepts."""

    def __init__(self, limit: int) -> None:
        super().__init__(f"at most {limit} rows")
        self.limit = limit


@dataclass(frozen=True)
class PartialRequest:
    """Some samples of a call that are sent in one request; ``rows`` are their indices in ``items``.

    Rows are encoded only when the request is sent, so that a call of millions of samples has few
    encoded samples in memory. Samples for which ``key`` returns the same value form a group, which
    stays in one request; None stands for a sample that is in no group.
    """

    rows: list[int]
    items: Sequence[Any]
    encode: Encode
    key: Callable[[Any], int | None] | None = None

    @property
    def inputs(self) -> Tensors:
        """Encode this request's samples as tensors."""
        return self.encode([self.items[row] for row in self.rows])

    async def measure(self) -> int:
        """Estimate the characters of the encoded request; counting ends above the budget."""
        num_characters = self._count_characters(SHORT_CHARACTERS)
        if num_characters <= SHORT_CHARACTERS:
            return num_characters
        return await asyncio.to_thread(self._count_characters, _MOST_IN_FLIGHT)

    def _count_characters(self, limit: int) -> int:
        total = 0
        for row in self.rows:
            total += count_characters(self.items[row], limit)
            if total > limit:
                break
        return total

    def select(self, rows: list[int]) -> PartialRequest:
        """Return a smaller request; ``rows`` are some of this request's indices in ``items``."""
        return replace(self, rows=rows)

    def split(self, size: int, group_size: int | None = None) -> list[PartialRequest]:
        """Split the request into requests of at most ``size`` rows, between groups.

        A larger group becomes one request of its own; only one of more than ``group_size`` rows
        (None: ``size``) is cut.
        """
        if self.key is None or len(self.rows) <= size:
            return [self.select(rows) for rows in _split_rows(self.rows, size)]
        groups: dict[Hashable, list[int]] = {}
        for row in self.rows:
            key = self.key(self.items[row])
            groups.setdefault((row,) if key is None else key, []).append(row)
        requests: list[list[int]] = []
        for group in groups.values():
            for rows in _split_rows(group, max(size, group_size or 0)):
                if requests and len(requests[-1]) + len(rows) <= size:
                    requests[-1] += rows
                else:
                    requests.append(rows)
        return [self.select(rows) for rows in requests]

    def halve(self) -> tuple[list[PartialRequest], bool]:
        """Split the request into two or three; return also whether a group was cut.

        It is cut if there is only one, and then the parts have no ``key``. A single row stays as it
        is.
        """
        size = -(-len(self.rows) // 2)
        halves = self.split(size, len(self.rows))
        is_group = len(halves) == 1 and len(self.rows) > 1
        return (self.without_groups().split(size) if is_group else halves), is_group

    def without_groups(self) -> PartialRequest:
        """Return the same request without groups: it may be split anywhere."""
        return replace(self, key=None)


def requests_of_texts(texts: Sequence[Text]) -> list[PartialRequest]:
    """Return a call as requests of any size: one of raw texts, and one of conversations.

    A request has either raw texts or conversations. Conversations that answer the same prompt form
    a group.
    """
    sentences = [row for row, text in enumerate(texts) if isinstance(text, str)]
    conversations = [row for row, text in enumerate(texts) if not isinstance(text, str)]
    return [
        PartialRequest(sentences, texts, kserve.encode_sentences),
        PartialRequest(conversations, texts, kserve.encode_conversations, _prompt_key),
    ]


def _prompt_key(sample: Any) -> int | None:
    """Return a hash of what replies to the same prompt share; None if there is no prompt.

    A gateway's judge compares the samples of a request that share it (``serving/parts.py``), after
    the gateway has read them in the same way. A malformed sample has no prompt.
    """
    try:
        text = read_text(sample)
        question = question_of(text)
        return hash(_as_hashable(prompt_context(text, question))) if question else None
    except (DataError, TypeError, RecursionError):
        return None


def prompt_context(text: Text, prompt: Messages) -> list[Any]:
    """Return what replies to the same ``prompt`` share: it, tools, documents and principle."""
    if isinstance(text, Conversation):
        return [prompt, text.tools, text.documents, text.principle]
    return [prompt, None, None, None]


def _as_hashable(value: Any) -> Hashable:
    # Faster than JSON, because nothing is copied, and Python stores the hash of a string.
    if isinstance(value, dict):
        return frozenset([(name, _as_hashable(item)) for name, item in value.items()])
    return tuple(map(_as_hashable, value)) if isinstance(value, list | tuple) else value


def token_rows(token_lists: Sequence[Sequence[int]]) -> list[Sequence[int]]:
    """Check token sequences, and return each one as a row of the call.

    Raises:
        TypeError: ``token_lists`` is not a list of lists.
    """
    expected = "wanted a list of lists of token ids"
    if isinstance(token_lists, str) or not isinstance(token_lists, Iterable):
        raise TypeError(f"token_lists: got {shown(token_lists)}, {expected}")
    rows = list(token_lists)
    for row, ids in enumerate(rows):
        if isinstance(ids, str) or not _has_length(ids):
            raise TypeError(f"token_lists, row {row}: got {shown(ids)}, {expected}")
    return rows


def requests_of_tokens(token_lists: Sequence[Sequence[int]]) -> list[PartialRequest]:
    """Return a call as one request of any size, in order of length.

    It has no groups: a gateway that combines rewards does not take token ids.
    """
    # Sorted, so that the requests into which it is split carry little padding.
    by_length = sorted(range(len(token_lists)), key=lambda row: len(token_lists[row]))
    return [PartialRequest(by_length, token_lists, kserve.encode_tokens)]


def _has_length(ids: object) -> bool:
    try:
        len(ids)  # type: ignore[arg-type]
    except TypeError:  # TypeError: a number, or a 0-dimensional tensor, whose __len__ raises
        return False
    return True


def count_characters(sample: Any, limit: int) -> int:
    """Estimate the characters of a sample as JSON; counting ends soon after ``limit``."""
    total, waiting = 0, [as_json(sample)]
    while waiting and total <= limit:
        value = waiting.pop()
        total += _OF_NUMBER
        if isinstance(value, str):
            total += len(value)
        elif isinstance(value, Mapping):
            waiting += chain.from_iterable(value.items())
        elif isinstance(value, list | tuple):
            waiting += value
        elif _has_length(value):  # an array of token ids
            total += _OF_NUMBER * len(value)
    return total


def _split_rows(rows: list[int], size: int) -> Iterable[list[int]]:
    return (rows[start : start + size] for start in range(0, len(rows), size))


async def encode_request(part: PartialRequest, num_characters: int) -> Tensors:
    """Encode the tensors of a request of this size, in a thread if it is large.

    Raises:
        RefusedError: a row cannot be encoded; the message has its index in the request.
    """
    if num_characters <= SHORT_CHARACTERS:
        return encode_rows(part)
    return await asyncio.to_thread(encode_rows, part)


def encode_rows(part: PartialRequest) -> Tensors:
    """Encode the tensors of a request.

    Raises:
        RefusedError: a row cannot be encoded; the message has its index in the request.
    """
    try:
        return part.inputs
    except DataError as error:  # a DataError already names the row
        raise RefusedError("client", 400, str(error)) from error
    except _UNSENDABLE:  # e.g. half of a surrogate pair (invalid Unicode); find the row that has it
        for place, row in enumerate(part.rows):
            try:
                _ = part.select([row]).inputs
            except _UNSENDABLE as error:
                text = f"row {place}: it cannot be sent: {error}"
                raise RefusedError("client", 400, text) from error
        raise


def decode_scored(outputs: Tensors, rows: int, server: str) -> ScoredRows:
    """Decode the answer to a request of ``rows`` rows.

    Raises:
        ServingError: the answer of ``server`` is not that of a reward model.
    """
    try:
        scored = kserve.decode_rewards(outputs)
        is_in_range = max(scored.errors, default=0) < rows
        if scored.rewards.ndim == 2 and len(scored.rewards) == rows and is_in_range:
            return scored
    except (KeyError, ValueError, TypeError, IndexError):
        pass
    raise ServingError(f"{server}: the answer does not have a row of rewards for each sample")


class CharacterBudget:
    """Limits the characters of a client's requests in flight; used in one event loop.

    Short requests take nothing of it. The others wait in turn; one that is larger than the whole
    budget takes all of it.
    """

    def __init__(self, num_servers: int) -> None:
        self._num_blocks = num_servers * _MOST_IN_FLIGHT // SHORT_CHARACTERS
        self._blocks = asyncio.Semaphore(self._num_blocks)
        # Only one request at a time collects blocks, so that two never wait for each other's.
        self._turn = asyncio.Lock()

    @asynccontextmanager
    async def spend(self, num_characters: int) -> AsyncIterator[None]:
        """Wait until a request of this size may be encoded; it counts until the context ends."""
        needed, acquired = min(num_characters // SHORT_CHARACTERS, self._num_blocks), 0
        try:
            if needed:
                async with self._turn:
                    while acquired < needed:
                        await self._blocks.acquire()
                        acquired += 1
            yield
        finally:
            for _ in range(acquired):
                self._blocks.release()
