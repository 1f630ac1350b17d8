"""Scoring as a service: check a request, queue its rows for the model, answer it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Protocol

import numpy as np

from nemo_aligner.config.serving import ServerConfig
from nemo_aligner.errors import AlignerError, ServingError
from nemo_aligner.scoring.scorer import TokenCounts
from nemo_aligner.scoring.shaping import RewardShaper
from nemo_aligner.serving.admission import Admission
from nemo_aligner.serving.meter import Meter
from nemo_aligner.serving.services.failures import answer_of, check_size, failure_of
from nemo_aligner.serving.wire.types import Failure, FailureKind, ScoreReply, ScoreRequest
from nemo_aligner.text.contract import EncodedText, ScoringContract
from nemo_aligner.text.messages import Text

# Beside the model: one would let a long text hold up all others.
_ENCODERS = 2
_SHORT = 2000  # bytes


ReadOutputs = Callable[[np.ndarray], "tuple[np.ndarray, np.ndarray | None]"]


class RequestEncoder(Protocol):
    """What a request is checked and read by."""

    contract: ScoringContract

    def encode(self, text: Text) -> EncodedText:
        """Raises AlignerError where the scoring contract refuses the text."""

    def check_tokens(self, token_ids: Sequence[int]) -> None:
        """Raises AlignerError where these ids cannot be scored as they stand."""

    def count_reply_tokens(self, texts: Sequence[Text]) -> list[int]:
        """Tokens of every text's reply alone."""


class ServableScorer(RequestEncoder, Protocol):
    """What a server needs of a scorer.

    ``score_token_lists`` and ``forget`` are collective over the ranks, the others are not.
    """

    @property
    def counts(self) -> TokenCounts:
        """Tokens of all calls."""

    @property
    def tokens_per_call(self) -> int:
        """With how many tokens a call of ``score_token_lists`` keeps all ranks at work."""

    @property
    def prefix_cache_bytes(self) -> int:
        """What each rank keeps of texts before, at most."""

    def score_token_lists(self, token_lists: Sequence[Sequence[int] | np.ndarray]) -> np.ndarray:
        """``[N, A]`` float32 rewards."""

    def score_outputs(self, token_lists: Sequence[Sequence[int] | np.ndarray]) -> np.ndarray:
        """``[N, outputs]`` float32 of the head."""

    def read_outputs(self, outputs: np.ndarray) -> tuple[np.ndarray, np.ndarray | None]:
        """``[N, A]`` float32 rewards of ``outputs``, and their spreads, if any."""

    def forget(self) -> None:
        """Keep nothing of earlier calls."""


class RowQueue(Protocol):
    """Where rows wait for the model."""

    def submit(self, token_lists: Sequence[Sequence[int]]) -> Future[np.ndarray]:
        """The future of a row of numbers for each token list."""


@dataclass
class _Encoded:
    token_lists: list[list[int]] = field(default_factory=list)
    exceeded: list[bool] = field(default_factory=list)
    reply_tokens: list[int] | None = None

    @property
    def num_tokens(self) -> int:
        return sum(map(len, self.token_lists))


class RewardService:
    """Answers requests, as many at once as come; for one event loop.

    Texts are tokenized in threads of their own while the model is at work.
    """

    def __init__(
        self,
        scorer: RequestEncoder,
        batcher: RowQueue,
        config: ServerConfig,
        meter: Meter,
        shaper: RewardShaper | None = None,
        read_outputs: ReadOutputs | None = None,
    ) -> None:
        """With ``read_outputs`` the rows of ``batcher`` are outputs that become rewards by it."""
        self._scorer = scorer
        self._read_outputs = read_outputs
        self._batcher = batcher
        self._max_bytes = config.max_request_bytes
        self._admission = Admission(config.max_queue_rows, "server.max_queue_rows")
        self._meter = meter
        self._encoders = ThreadPoolExecutor(_ENCODERS, "encoder")
        self._shaper = shaper
        self.contract = scorer.contract if shaper is None else shaper.contract
        self._contract_hash = self.contract.hash

    @property
    def optional_outputs(self) -> tuple[str, ...]:
        """What replies have beside rewards: of shaping, and of a head with several outputs."""
        shaped = () if self._shaper is None else ("raw_rewards", *self._shaper.outputs)
        return shaped if self._read_outputs is None else (*shaped, "spread", "outputs")

    @property
    def rows_inside(self) -> int:
        """Rows of requests that are not answered yet."""
        return self._admission.inside

    async def answer(
        self, rows: int, num_bytes: int, read: Callable[[], ScoreRequest]
    ) -> ScoreReply | Failure:
        """The reply to a request of so many rows and bytes, which ``read`` takes apart."""
        begun = time.monotonic()
        try:
            check_size(num_bytes, self._max_bytes)
            with self._admission.of(rows):
                # A short request is sooner tokenized than handed to another thread.
                is_short = num_bytes <= _SHORT
                encoded = self._encode(read()) if is_short else await self._in_encoder(read)
                answer = await self._score(encoded)
        except Exception as error:
            answer = failure_of(error)
        if isinstance(answer, Failure):
            self._meter.refused()
        else:
            self._meter.answered(time.monotonic() - begun, rows, encoded.num_tokens)
        return answer

    def close(self) -> None:
        """End the threads; nothing may be in flight."""
        self._encoders.shutdown()
        if self._shaper is not None:
            self._shaper.save()

    async def _in_encoder(self, read: Callable[[], ScoreRequest]) -> _Encoded:
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._encoders, lambda: self._encode(read()))

    async def _score(self, encoded: _Encoded) -> ScoreReply | Failure:
        rewards = await answer_of(self._batcher.submit(encoded.token_lists))
        outputs = spread = None
        if self._read_outputs is not None:
            outputs = rewards
            rewards, spread = self._read_outputs(outputs)
        wrong = np.flatnonzero(~np.isfinite(rewards).all(axis=1))
        if wrong.size:
            what = f"row {wrong[0]}: the model's reward is not a finite number"
            return Failure(what, FailureKind.internal)
        exceeded = np.array(encoded.exceeded, dtype=bool)
        reply = ScoreReply(rewards, exceeded, self._contract_hash, spread=spread, outputs=outputs)
        if self._shaper is None:
            return reply
        shaped = self._shaper.shape(rewards, encoded.reply_tokens, spread)
        return replace(reply, raw_rewards=rewards, **vars(shaped))

    def _encode(self, request: ScoreRequest) -> _Encoded:
        self._check_add_eos(request)
        encoded = _Encoded()
        for row, token_list in enumerate(request.token_lists or ()):
            with _naming(row):
                self._scorer.check_tokens(token_list)
            encoded.token_lists.append(token_list)
            encoded.exceeded.append(False)
        for row, text in enumerate(request.texts or ()):
            with _naming(row):
                found = self._scorer.encode(text)
            encoded.token_lists.append(list(found.token_ids))
            encoded.exceeded.append(found.truncated)
        if self._shaper is not None and self._shaper.needs_lengths:
            encoded.reply_tokens = self._count_reply_tokens(request)
        return encoded

    def _count_reply_tokens(self, request: ScoreRequest) -> list[int]:
        """Of token ids nobody knows where the reply begins."""
        if request.texts is not None:
            return self._scorer.count_reply_tokens(request.texts)
        return [len(token_list) for token_list in request.token_lists or ()]

    def _check_add_eos(self, request: ScoreRequest) -> None:
        raw_text = request.texts is not None and isinstance(request.texts[0], str)
        wanted = self._scorer.contract.add_eos and raw_text
        for row, flag in enumerate(request.add_eos or ()):
            if flag != wanted:
                why = "the model's scoring contract" if raw_text else "conversations and tokens"
                raise ServingError(
                    f"add_EOS, row {row}: got {flag}, wanted {wanted} ({why}) or no add_EOS at all"
                )


@contextmanager
def _naming(row: int) -> Iterator[None]:
    """Put the row's number before whatever the scorer refuses."""
    try:
        yield
    except AlignerError as error:
        raise ServingError(f"row {row}: {error}") from error
