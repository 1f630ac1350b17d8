"""RewardClient: texts, conversations or token ids -> rewards, over HTTP; sync, futures, asyncio."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from threading import Lock
from types import TracebackType
from typing import Any

import numpy as np
from pytriton.client import AsyncioModelClient, FuturesModelClient, ModelClient
from pytriton.client.exceptions import PyTritonClientError

from nemo_aligner.errors import CheckpointError, ServingError
from nemo_aligner.serving.client.quiet import silence_pytriton_client
from nemo_aligner.serving.client.split import (
    PartialRequest,
    Tensors,
    join_replies,
    split_texts,
    split_tokens,
)
from nemo_aligner.serving.wire import kserve
from nemo_aligner.text.contract import ScoringContract, describe_differences
from nemo_aligner.text.messages import Text

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
            ValueError: ``expect`` is neither a contract nor a hash.
        """
        silence_pytriton_client()
        self._expect = expect
        self._expected_hash = _checked_hash(expect)
        self._url = url
        self._model_name = model_name
        self._timeouts = {"inference_timeout_s": timeout_s, "init_timeout_s": init_timeout_s}
        self._max_connections = max_connections
        self._futures = FuturesModelClient(
            url, model_name, max_workers=max_connections, max_queue_size=1_000_000, **self._timeouts
        )
        self._max_batch_size: int | None = None

    def __enter__(self) -> RewardClient:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Finish what was submitted, and let the connections go."""
        self._futures.close()

    def contract(self) -> ScoringContract:
        """The contract that the server scores by.

        Raises:
            ServingError: there is no server, or it publishes none.
        """

        def ask() -> Tensors:
            with ModelClient(self._url, kserve.CONTRACT_MODEL_NAME, **self._timeouts) as client:
                return client.infer_sample(dummy_var=np.zeros(1, dtype=np.int64))

        try:
            return kserve.decode_contract(self._call(ask))
        except CheckpointError as error:
            raise ServingError(f"{self._url}: {error}") from error

    def score(self, texts: Sequence[Text]) -> np.ndarray:
        """Rewards ``[N, A]`` float32 of N texts.

        Raises:
            ServingError: the server refused a request (in its words), there is none, or it scores
                by another contract than the expected one.
        """
        return self.score_future(texts).result()

    def score_tokens(self, token_lists: Sequence[Sequence[int]]) -> np.ndarray:
        """Rewards ``[N, A]`` float32 of N token sequences, scored as they stand."""
        return self.score_tokens_future(token_lists).result()

    def score_future(self, texts: Sequence[Text]) -> Future[np.ndarray]:
        """Like ``score``, in the background."""
        return self._submit(split_texts(texts, self._batch_limit()))

    def score_tokens_future(self, token_lists: Sequence[Sequence[int]]) -> Future[np.ndarray]:
        """Like ``score_tokens``, in the background."""
        return self._submit(split_tokens(token_lists, self._batch_limit()))

    async def score_async(self, texts: Sequence[Text]) -> np.ndarray:
        """Like ``score``, for asyncio."""
        limit = await asyncio.to_thread(self._batch_limit)
        parts = split_texts(texts, limit)
        gate = asyncio.Semaphore(self._max_connections)
        async with AsyncioModelClient(self._url, self._model_name, **self._timeouts) as client:

            async def send(part: PartialRequest) -> Tensors:
                async with gate:
                    return await client.infer_batch(**part.inputs)

            try:
                outputs = await asyncio.gather(*map(send, parts))
            except (PyTritonClientError, OSError) as error:
                raise self._explain(error) from error
        return self._join(parts, outputs)

    def _batch_limit(self) -> int:
        if self._max_batch_size is None:
            if self._expected_hash is not None:
                self._check_published(self.contract())
            config = self._call(lambda: self._futures.model_config().result())
            self._max_batch_size = max(1, config.max_batch_size)
        return self._max_batch_size

    def _submit(self, parts: list[PartialRequest]) -> Future[np.ndarray]:
        joined: Future[np.ndarray] = Future()
        joined.set_running_or_notify_cancel()
        answers = [self._futures.infer_batch(**part.inputs) for part in parts]
        missing = len(answers)
        lock = Lock()

        def settle(_: object) -> None:
            nonlocal missing
            with lock:
                missing -= 1
            if missing == 0:
                finish()

        def finish() -> None:
            try:
                joined.set_result(self._join(parts, [answer.result() for answer in answers]))
            except ServingError as error:
                joined.set_exception(error)
            except Exception as error:
                joined.set_exception(self._explain(error))

        for answer in answers:
            answer.add_done_callback(settle)
        if not answers:
            finish()
        return joined

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

    def _call(self, function: Callable[[], Any]) -> Any:
        try:
            return function()
        except (PyTritonClientError, OSError) as error:
            raise self._explain(error) from error

    def _explain(self, error: Exception) -> ServingError:
        # PyTriton's client puts its own words around the server's.
        cause = error.__cause__
        message = getattr(cause, "message", None)
        text = message() if callable(message) else str(error)
        return ServingError(f"{self._url}, {self._model_name}: {text}")


def _checked_hash(expect: ScoringContract | str | None) -> str | None:
    if isinstance(expect, str) and not _HASH.fullmatch(expect):
        raise ValueError(f"expect: got {expect!r:.80}, wanted a ScoringContract or its whole hash")
    return expect.hash if isinstance(expect, ScoringContract) else expect
