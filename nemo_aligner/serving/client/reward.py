"""RewardClient: texts, conversations or token ids -> rewards, over HTTP; sync, futures, asyncio."""

from __future__ import annotations

import asyncio
import re
import weakref
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import Future
from functools import partial
from threading import Lock
from types import TracebackType
from typing import Any, TypeVar

import numpy as np

from nemo_aligner.errors import CheckpointError, ConfigError, ServingError
from nemo_aligner.serving.client.background import Background
from nemo_aligner.serving.client.connection import Connection
from nemo_aligner.serving.client.quiet import silence_pytriton_client
from nemo_aligner.serving.client.split import (
    PartialRequest,
    Tensors,
    join_replies,
    split_texts,
    split_tokens,
)
from nemo_aligner.serving.wire import kserve
from nemo_aligner.text.contract import ScoringContract
from nemo_aligner.text.contract_changes import describe_differences
from nemo_aligner.text.messages import Text

T = TypeVar("T")

# A fork has its parent's sockets, but neither the thread nor the right to close them.
_NEVER_FREED: list[Background] = []
_HASH = re.compile("[0-9a-f]{64}")


class RewardClient:
    """Scores on a reward model server; a text is a raw string or a conversation's messages.

    Conversations get the model's chat template on the server. Calls are split into requests of at
    most the server's ``max_batch_size`` rows, sent side by side. Safe to use from several threads.

    ``expect`` is the scoring contract (or its hash) that every reward must have been made by: a
    server that scores by another one is refused, also when it takes the place of another later.
    """

    def __init__(
        self,
        url: str = kserve.DEFAULT_URL,
        model_name: str = kserve.MODEL_NAME,
        *,
        expect: ScoringContract | str | None = None,
        timeout_s: float = 600.0,
        init_timeout_s: float = 60.0,
        max_connections: int = 16,
    ) -> None:
        """``timeout_s`` is for one request, ``init_timeout_s`` for the server to get ready.

        Raises:
            ConfigError: ``expect`` is neither a contract nor a hash.
        """
        silence_pytriton_client()
        self._expect = expect
        self._expected_hash = _checked_hash(expect)
        self._url = url
        self._model_name = model_name
        self._timeouts = (timeout_s, init_timeout_s)
        self._connect = partial(
            Connection, url, model_name, timeout_s, init_timeout_s, max_connections
        )
        self._max_batch_size: int | None = None
        self._lock = Lock()
        self._background: Background | None = None
        self._is_closed = False

    def __enter__(self) -> RewardClient:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if kind is not None and self._background is not None:
            self._background.leave()  # nobody will read what was submitted
        self.close()

    def close(self) -> None:
        """Finish what was submitted, and let the connections go.

        A client that is not closed lets them go when nothing refers to it any more; a program that
        ends does not wait for what it has in flight.
        """
        self._is_closed = True
        if self._background is not None and self._background.belongs_here():
            self._background.close()

    def contract(self) -> ScoringContract:
        """The contract that the server scores by.

        Raises:
            ServingError: there is no server, or it publishes none.
        """
        return self._wait(self._submit(self._read_contract))

    def score(self, texts: Sequence[Text]) -> np.ndarray:
        """Rewards ``[N, A]`` float32 of N texts.

        Raises:
            ServingError: the server refused a request (in its words), there is none, or it scores
                by another contract than the expected one.
        """
        return self._wait(self.score_future(texts))

    def score_tokens(self, token_lists: Sequence[Sequence[int]]) -> np.ndarray:
        """Rewards ``[N, A]`` float32 of N token sequences, scored as they stand."""
        return self._wait(self.score_tokens_future(token_lists))

    def score_future(self, texts: Sequence[Text]) -> Future[np.ndarray]:
        """Like ``score``, in the background; only the first call waits for the server."""
        return self._submit(self._send, split_texts(texts, self._batch_limit()))

    def score_tokens_future(self, token_lists: Sequence[Sequence[int]]) -> Future[np.ndarray]:
        """Like ``score_tokens``, in the background."""
        return self._submit(self._send, split_tokens(token_lists, self._batch_limit()))

    async def score_async(self, texts: Sequence[Text]) -> np.ndarray:
        """Like ``score``, for asyncio."""
        limit = self._max_batch_size
        if limit is None:
            limit = await asyncio.wrap_future(self._submit(self._meet))
        return await asyncio.wrap_future(self._submit(self._send, split_texts(texts, limit)))

    def _batch_limit(self) -> int:
        return self._max_batch_size or self._wait(self._submit(self._meet))

    def _submit(self, work: Callable[..., Coroutine[Any, Any, T]], *given: Any) -> Future[T]:
        """``work(connection, *given)`` in the background."""
        return self._started().submit(lambda connection: work(connection, *given))

    def _started(self) -> Background:
        """The background of this process: a forked one has none yet.

        Raises:
            ServingError: the client is closed, or its URL is none.
        """
        with self._lock:
            if self._is_closed:
                raise ServingError(f"{self._url}, {self._model_name}: the client is closed")
            inherited = self._background
            if inherited is not None and not inherited.belongs_here():
                _NEVER_FREED.append(inherited)
                self._background = None
            if self._background is None:
                self._background = Background(self._connect)  # which does not hold this client
                weakref.finalize(self, self._background.leave).atexit = False
            return self._background

    def _wait(self, future: Future[T]) -> T:
        if self._background is not None and self._background.is_current():
            future.cancel()
            raise RuntimeError("a callback of a future may not wait for another: use score_future")
        try:
            return future.result()
        except BaseException:
            future.cancel()  # an interruption: the server is spared what nobody waits for
            raise

    async def _meet(self, connection: Connection) -> int:
        """How many texts the server takes at once, if it scores as expected."""
        limit = await connection.max_batch_size()
        if self._expected_hash is not None:
            self._check_published(await self._read_contract(connection))
        self._max_batch_size = limit
        return limit

    async def _read_contract(self, _: Connection) -> ScoringContract:
        connection = Connection(self._url, kserve.CONTRACT_MODEL_NAME, *self._timeouts)
        try:
            outputs = await connection.infer({"dummy_var": np.zeros(1, dtype=np.int64)})
            return kserve.decode_contract(outputs)
        except CheckpointError as error:
            raise ServingError(f"{self._url}: {error}") from error
        finally:
            await connection.close()

    async def _send(self, connection: Connection, parts: Sequence[PartialRequest]) -> np.ndarray:
        requests = [asyncio.ensure_future(connection.infer(part.inputs)) for part in parts]
        try:
            outputs = await asyncio.gather(*requests)
        finally:
            for request in requests:  # where one failed, nobody wants the others
                request.cancel()
        return self._join(parts, outputs)

    def _join(self, parts: Sequence[PartialRequest], outputs: Sequence[Tensors]) -> np.ndarray:
        replies = [kserve.decode_reply(each) for each in outputs]
        for reply in replies:
            self._check_hash(reply.contract_hash)
        return join_replies(parts, replies)

    def _check_published(self, contract: ScoringContract) -> None:
        if isinstance(self._expect, ScoringContract):
            differences = self._expect.differences(contract)
            self._check_hash(contract.hash, describe_differences(differences))
        self._check_hash(contract.hash)

    def _check_hash(self, got: str | None, differences: str = "") -> None:
        if self._expected_hash not in (None, got):
            raise ServingError(
                f"{self._url}, {self._model_name}: got the scoring contract {got or '(none)'}, "
                f"wanted {self._expected_hash}" + (f": {differences}" if differences else "")
            )


def _checked_hash(expect: ScoringContract | str | None) -> str | None:
    if isinstance(expect, str) and not _HASH.fullmatch(expect):
        raise ConfigError(f"expect: got {expect!r:.80}, wanted a ScoringContract or its whole hash")
    return expect.hash if isinstance(expect, ScoringContract) else expect
