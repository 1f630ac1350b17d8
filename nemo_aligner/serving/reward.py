"""Scoring as a service: check a request, queue its rows, answer it, here or by an upstream."""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Protocol

import numpy as np

from nemo_aligner.config.serving import ServerConfig
from nemo_aligner.contract.contract import EncodedText, ScoringContract
from nemo_aligner.contract.messages import Text
from nemo_aligner.contract.steps import StepSpan
from nemo_aligner.contract.turns import TurnEnd
from nemo_aligner.serving.client.calls import OnError
from nemo_aligner.serving.engine.batcher import BackpressureLimit, Batcher
from nemo_aligner.serving.engine.executor import ModelRanks, Operation
from nemo_aligner.serving.engine.scorer import TokenCounts
from nemo_aligner.serving.engine.shaping import RewardShaper
from nemo_aligner.serving.engine.steps import StepScorer, by_text, mark_reads, score_marked
from nemo_aligner.serving.failures import FailureKind, RefusedError, RequestError
from nemo_aligner.serving.metrics import Meter, RecentRewards
from nemo_aligner.serving.protocols import ScoredRows, ScoreRequest, kserve, place_rows
from nemo_aligner.serving.service import Endpoint, Tensors, answer_of, check_size
from nemo_aligner.utils.errors import AlignerError, ServingError, one_line

# Threads that encode texts beside the model: with one, a long text would hold up all others.
_ENCODERS = 2
# Bytes of a request that is sooner tokenized in the event loop than handed to another thread.
_SHORT = 2000


ReadOutputs = Callable[[np.ndarray], "tuple[np.ndarray, np.ndarray | None]"]


class RequestEncoder(Protocol):
    """Encoder and checker of requests."""

    contract: ScoringContract

    def encode(self, text: Text) -> EncodedText:
        """Encode a text; raise AlignerError if the scoring contract refuses it."""

    def check_tokens(self, token_ids: Sequence[int]) -> None:
        """Raise AlignerError if these ids cannot be scored."""

    def count_reply_tokens(self, texts: Sequence[Text]) -> list[int]:
        """Tokens of every text's reply alone."""


class ServableScorer(RequestEncoder, StepScorer, Protocol):
    """Scorer, as a server needs it.

    ``score_token_lists`` and ``reset_cache`` are collective over the ranks, the others are not.
    """

    @property
    def counts(self) -> TokenCounts:
        """Tokens of all calls."""

    @property
    def tokens_per_call(self) -> int:
        """Tokens with which a call of ``score_token_lists`` keeps all ranks at work."""

    @property
    def prefix_cache_bytes(self) -> int:
        """Bytes of the prefix cache on each rank."""

    def score_token_lists(self, token_lists: Sequence[Sequence[int] | np.ndarray]) -> np.ndarray:
        """``[N, A]`` float32 rewards."""

    def score_outputs(self, token_lists: Sequence[Sequence[int] | np.ndarray]) -> np.ndarray:
        """``[N, outputs]`` float32 of the head."""

    def reset_cache(self) -> None:
        """Empty the prefix cache."""


class RowQueue(Protocol):
    """Queue of rows in front of the model."""

    def submit(self, token_lists: Sequence[Sequence[int]]) -> Future[np.ndarray]:
        """The future of a row of numbers for each token list."""


@dataclass
class _Encoded:
    token_lists: list[list[int]] = field(default_factory=list)
    exceeded: list[bool] = field(default_factory=list)
    reply_tokens: list[int] | None = None
    spans: list[tuple[StepSpan, ...]] = field(default_factory=list)

    @property
    def num_tokens(self) -> int:
        return sum(map(len, self.token_lists))


class RewardService:
    """Answers any number of requests at once; for one event loop.

    Texts are tokenized in other threads while the model computes.
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
        """With ``read_outputs``, which turns outputs into rewards, ``batcher`` returns outputs."""
        self._scorer = scorer
        self._read_outputs = read_outputs
        self._batcher = batcher
        self._max_bytes = config.max_request_bytes
        # More rows would only wait, while their senders could ask another server.
        self._limit = BackpressureLimit(config.max_queue_rows, "server.max_queue_rows")
        self._meter = meter
        self._encoders = ThreadPoolExecutor(_ENCODERS, "encoder")
        self._shaper = shaper
        takes_steps = shaper is None or shaper.takes_steps
        self._has_steps = scorer.contract.has_steps and takes_steps
        self.contract = scorer.contract if shaper is None else shaper.contract
        self._contract_hash = self.contract.hash

    @property
    def optional_outputs(self) -> tuple[str, ...]:
        """Names of the outputs beside rewards, by shaping and by a head with several outputs."""
        shaped = () if self._shaper is None else ("raw_rewards", *self._shaper.outputs)
        read = () if self._read_outputs is None else ("spread", "outputs")
        return (*shaped, *read, *(("steps",) if self._has_steps else ()))

    @property
    def rows_in_flight(self) -> int:
        """Rows of requests that are not answered yet."""
        return self._limit.rows_in_flight

    async def answer(
        self, rows: int, num_bytes: int, read: Callable[[], ScoreRequest]
    ) -> ScoredRows:
        """The reply to a request of so many rows and bytes, which ``read`` takes apart.

        Raises:
            Exception: of any class; see ``failure_of``.
        """
        begun = time.monotonic()
        try:
            check_size(num_bytes, self._max_bytes)
            with self._limit.admit(rows):
                is_short = num_bytes <= _SHORT
                encoded = self._encode(read()) if is_short else await self._in_encoder(read)
                scored = await self._score(encoded)
        except Exception:
            self._meter.refused()
            raise
        self._meter.answered(time.monotonic() - begun, rows, encoded.num_tokens)
        return scored

    def close(self) -> None:
        """End the threads; nothing may be in flight."""
        self._encoders.shutdown()
        if self._shaper is not None:
            self._shaper.save()

    async def _in_encoder(self, read: Callable[[], ScoreRequest]) -> _Encoded:
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._encoders, lambda: self._encode(read()))

    async def _score(self, encoded: _Encoded) -> ScoredRows:
        rewards = await answer_of(self._batcher.submit(encoded.token_lists))
        outputs = spread = None
        if self._read_outputs is not None:
            outputs = rewards
            rewards, spread = self._read_outputs(outputs)
        # An answer with NaN would reach a trainer's loss; the whole request fails, as its other
        # rewards come from the same model.
        wrong = np.flatnonzero(~np.isfinite(rewards).all(axis=1))
        if wrong.size:
            what = f"row {wrong[0]}: the model's reward is not a finite number"
            raise RequestError(what, FailureKind.internal)
        exceeded = np.array(encoded.exceeded, dtype=bool)
        found: dict[str, Any] = {"rewards": rewards, "spread": spread, "outputs": outputs}
        if self._shaper is not None:
            shaped = self._shaper.shape(rewards, encoded.reply_tokens, spread)
            found |= {"raw_rewards": rewards, **vars(shaped)}
        if self._has_steps:
            steps, last = by_text(found["rewards"], encoded.spans)
            found = {name: None if each is None else each[last] for name, each in found.items()}
            found["steps"] = steps
        return ScoredRows(errors={}, exceeded=exceeded, contract_hash=self._contract_hash, **found)

    def _encode(self, request: ScoreRequest) -> _Encoded:
        self._check_add_eos(request)
        encoded = _Encoded()
        # The first row that cannot be scored fails the request, before any row is in the queue.
        for row, token_list in enumerate(request.token_lists or ()):
            with _naming(row):
                self._scorer.check_tokens(token_list)
            encoded.token_lists.append(token_list)
            encoded.exceeded.append(False)
            encoded.spans.append(())
        for row, text in enumerate(request.texts or ()):
            with _naming(row):
                found = self._scorer.encode(text)
            reads = found.reads if self._has_steps else None
            encoded.token_lists.append(mark_reads(found.token_ids, reads or ()))
            encoded.exceeded.append(found.truncated)
            encoded.spans.append(found.spans)
        if self._shaper is not None and self._shaper.needs_lengths:
            encoded.reply_tokens = self._count_reply_tokens(request)
        return encoded

    def _count_reply_tokens(self, request: ScoreRequest) -> list[int]:
        """Count reply tokens; in token ids the reply's beginning is unknown, so all count."""
        if request.texts is not None:
            return self._scorer.count_reply_tokens(request.texts)
        return [len(token_list) for token_list in request.token_lists or ()]

    def _check_add_eos(self, request: ScoreRequest) -> None:
        """Refuse a client of NeMo-Aligner that expects another EOS rule than the contract's.

        Scored by the contract all the same, its rewards would mean something else than it thinks.
        """
        # A template writes its own end, and token ids stand as they were sent.
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
    """Prefix an error with the row's number, which clients read from it (``RefusedError.row``)."""
    try:
        yield
    except AlignerError as error:
        raise ServingError(f"row {row}: {error}") from error


# The endpoints of a server: the reward model and its scoring contract.

_SCORE = "score"


class RewardModelServable:
    """A scorer on every rank; ``prepare`` is called on each before it scores."""

    def __init__(
        self,
        scorer: ServableScorer,
        config: ServerConfig,
        shaper: RewardShaper | None = None,
        prepare: Callable[[], None] = lambda: None,
        turn_end: TurnEnd | None = None,
    ) -> None:
        self._scorer = scorer
        self._config = config
        self._shaper = shaper
        self._prepare = prepare
        self._turn_end = turn_end

    @property
    def operations(self) -> Mapping[str, Operation]:
        return {_SCORE: self._score}

    def reset_cache(self) -> None:
        self._scorer.reset_cache()

    def start(self, ranks: ModelRanks) -> RewardModel:
        if self._shaper is not None:
            self._shaper.check_file()
        # Before the server says that it is ready: the first forward pass is slow, and may show that
        # the model cannot run.
        ranks.execute(_SCORE, [[0]])
        return RewardModel(self._scorer, self._config, self._shaper, ranks, self._turn_end)

    def _score(self, sequences: Sequence[Sequence[int]]) -> object:
        self._prepare()
        if self._scorer.contract.has_steps:
            return score_marked(self._scorer, sequences)
        # With several outputs for an attribute, rank 0 makes rewards and spreads of them.
        if self._scorer.contract.readout is not None:
            return self._scorer.score_outputs(sequences)
        return self._scorer.score_token_lists(sequences)


class RewardModel:
    """The endpoints ``reward_model`` and ``contract``."""

    def __init__(
        self,
        scorer: ServableScorer,
        config: ServerConfig,
        shaper: RewardShaper | None,
        ranks: ModelRanks,
        turn_end: TurnEnd | None = None,
    ) -> None:
        self._scorer = scorer
        self._config = config
        self._meter = Meter()
        join = np.concatenate if scorer.contract.has_steps else np.stack
        self._batcher = Batcher(
            partial(ranks.submit, _SCORE), scorer.tokens_per_call, self._meter, join
        )
        read_outputs = None if scorer.contract.readout is None else scorer.read_outputs
        self._service = RewardService(
            scorer, self._batcher, config, self._meter, shaper, read_outputs
        )
        self._cached = 0
        self._turn_end = turn_end

    @property
    def endpoints(self) -> Sequence[Endpoint]:
        optional = self._service.optional_outputs
        rewards = Endpoint(
            name=kserve.MODEL_NAME,
            inputs=kserve.INPUTS,
            outputs=[
                *kserve.OUTPUTS,
                *(spec for spec in kserve.OPTIONAL_OUTPUTS if spec.name in optional),
            ],
            answer=self._answer,
            max_rows=self._config.max_batch_size,
        )
        contract = self._service.contract
        return [rewards, contract_endpoint(contract, self.statistics, self._turn_end)]

    @property
    def startup_log(self) -> Sequence[str]:
        contract = self._service.contract
        lines = [f"Scoring contract {contract.hash}"]
        if contract.shaping is not None:
            rules = json.loads(contract.shaping).items()
            lines += ["Shaped rewards:", *(f"  {name}: {_shown(rule)}" for name, rule in rules)]
        if self._scorer.prefix_cache_bytes:
            kept, size = self._config.prefix_cache_tokens, self._scorer.prefix_cache_bytes / 2**20
            lines.append(f"Prefix cache: {kept:,} tokens, {size:,.0f} MiB on each rank")
        return lines

    async def _answer(self, inputs: Tensors) -> Tensors:
        return kserve.encode_rewards(await answer_request(self._service, inputs))

    def statistics(self) -> dict[str, float]:
        """Counts since the start, and the queue now; see ``Meter.statistics``."""
        counts = self._scorer.counts
        return {
            **self._meter.statistics(),
            "computed_tokens": counts.computed,
            "cached_tokens": counts.cached,
            "tokens_per_call": self._scorer.tokens_per_call,
            "waiting_rows": self._batcher.waiting_rows,
        }

    def report(self) -> str | None:
        cached = self._scorer.counts.cached
        line = self._meter.take_line(self._batcher.waiting_rows, cached - self._cached)
        self._cached = cached
        return line

    def close(self) -> None:
        left = self._service.rows_in_flight
        if left:
            print(f"{left} rows were not answered within server.exit_timeout_secs", flush=True)
        self._service.close()
        self._batcher.close()


def _shown(rule: Any) -> str:
    """Format a rule: hashes shortened, single numbers without brackets."""
    if isinstance(rule, dict):
        return ", ".join(f"{name} {_shown(value)}" for name, value in rule.items())
    if isinstance(rule, list):
        return ", ".join(map(_shown, rule))
    return f"{rule:.4g}" if isinstance(rule, float) else str(rule)[:12]


async def answer_request(service: RewardService, inputs: Tensors) -> ScoredRows:
    """Answer one request's tensors."""
    return await service.answer(
        *kserve.size_of_request(inputs), lambda: kserve.decode_request(inputs)
    )


def contract_endpoint(
    contract: ScoringContract,
    statistics: Callable[[], Mapping[str, float]],
    turn_end: TurnEnd | None = None,
) -> Endpoint:
    """``contract``: how the texts of this server become scores, and what it has counted.

    Counters have no endpoint of their own: each is a process more, and 1.7 s more at the start.
    """
    published = {**kserve.encode_contract(contract), **kserve.encode_turn_end(turn_end)}

    async def publish(inputs: Tensors) -> Tensors:
        return {**published, **kserve.encode_statistics(statistics())}

    return Endpoint(
        kserve.CONTRACT_MODEL_NAME,
        kserve.CONTRACT_INPUTS,
        kserve.CONTRACT_OUTPUTS,
        publish,
        comes_first=True,  # Triton loads a model in seconds, and answers others meanwhile
    )


# The gateway's service: requests are scored by upstream servers.

logger = logging.getLogger(__name__)

# When a backend comes back is unknown, so clients are asked to retry soon.
_AGAIN_IN_S = 1


class AsyncRewardClient(Protocol):
    """The part of ``RewardClient`` that is used here."""

    async def score_rows_async(
        self, texts: list[Text], *, on_error: OnError = "nan"
    ) -> ScoredRows: ...

    async def score_token_rows_async(
        self, token_lists: list[list[int]], *, on_error: OnError = "nan"
    ) -> ScoredRows: ...

    async def contract_async(self) -> ScoringContract: ...


class UpstreamService:
    """Forwards requests to the backends of a client; for one event loop.

    ``contract`` is the backends', by which the newest rewards were made; None before any, and for
    backends that publish none. ``recent`` has the last rewards, for their drift.
    """

    def __init__(self, client: AsyncRewardClient, max_queue_rows: int, drift_rows: int) -> None:
        self.contract: ScoringContract | None = None
        self.recent = RecentRewards(drift_rows)
        self._has_none = False
        self._client = client
        self._limit = BackpressureLimit(max_queue_rows, "gateway.max_queue_rows")

    @property
    def rows_in_flight(self) -> int:
        """Rows of requests that are not answered yet."""
        return self._limit.rows_in_flight

    async def answer(
        self, request: ScoreRequest, sets_rows_aside: bool, is_probe: bool = False
    ) -> ScoredRows:
        """The rewards of a request's rows, and why some have none (NaN).

        Unless ``sets_rows_aside``, a row that is refused is a failure of the whole request. The
        rewards of a probe are nobody's, and not among the recent ones.

        Raises:
            RequestError: in a backend's words, if one has answered.
        """
        try:
            with self._limit.admit(len(request.texts or request.token_lists or ())):
                scored = await self._score(request, "nan" if sets_rows_aside else "raise")
                await self._know_contract(scored.contract_hash)
        except RefusedError as error:
            # A backend's other refusals, such as of the gateway's own token, are not the sender's.
            kind = error.kind if error.kind.reaction == "skip" else FailureKind.internal
            row = error.row if kind is FailureKind.bad_request else None
            raise RequestError(one_line(error.message), kind, row=row) from error
        except RequestError:  # too many rows are in flight
            raise
        except ServingError as error:
            raise unreachable(error) from error
        except Exception as error:
            logger.exception("a request could not be answered")
            # Without its words: who is at the gateway need not learn of the code behind it.
            text = f"internal error: {type(error).__name__}"
            raise RequestError(text, FailureKind.internal) from error
        if not is_probe:
            self.recent.add(scored.rewards)
        return _with_refused(scored, request.refused)

    async def ask_contract(self) -> ScoringContract:
        """The backends' contract, as they publish it now.

        Raises:
            ServingError: none answers, or it publishes none.
        """
        self.contract = await self._client.contract_async()
        return self.contract

    async def _score(self, request: ScoreRequest, on_error: OnError) -> ScoredRows:
        if request.texts is not None:
            return await self._client.score_rows_async(request.texts, on_error=on_error)
        token_lists = request.token_lists or []
        return await self._client.score_token_rows_async(token_lists, on_error=on_error)

    async def _know_contract(self, contract_hash: str | None) -> None:
        """Ask for the contract of new rewards, which names and weighs their attributes.

        Only where its hash is new: one more request for each would double them.
        """
        if self.contract is not None and contract_hash in (None, self.contract.hash):
            return
        if self._has_none and contract_hash is None:  # of NeMo-Aligner, as known from before
            return
        try:
            await self.ask_contract()
        except RefusedError:
            self._has_none = True


def unreachable(error: ServingError) -> RequestError:
    """The failure of a request that no backend has answered."""
    return RequestError(one_line(error), FailureKind.unreachable, _AGAIN_IN_S)


def _with_refused(scored: ScoredRows, refused: Mapping[int, str]) -> ScoredRows:
    """Put the rows that were refused before they were sent among those that were."""
    # The backends have numbered the rows that they got from 0.
    total = len(scored.rewards) + len(refused)
    rows = [row for row in range(total) if row not in refused]
    arrays: dict[str, Any] = {
        name: place_rows(values, rows, total)
        for name, values in vars(scored).items()
        if refused and isinstance(values, np.ndarray)
    }
    every = {**refused, **{rows[row]: reason for row, reason in scored.errors.items()}}
    return replace(scored, **arrays, errors=dict(sorted(every.items())))


# Raw texts that end at an end of turn, completed by what the reward model's template writes there.


class TurnCompletion:
    """Asks the backends once how their template ends a turn; for one event loop."""

    def __init__(self, ask: Callable[[], Awaitable[TurnEnd | None]]) -> None:
        self._ask = ask
        self._has_asked = False
        self._turn_end: TurnEnd | None = None

    async def complete(self, request: ScoreRequest) -> tuple[ScoreRequest, int]:
        """The request, and how many of its raw texts or token rows were completed.

        Raises:
            ServingError: no backend says what its template writes.
        """
        # Once for all: it follows from the chat template, which the contract's hash covers. An
        # error leaves it to be asked with the next request.
        if not self._has_asked:
            self._turn_end = await self._ask()
            self._has_asked = True
            self._say()
        turn = self._turn_end
        if turn is None:
            return request, 0
        texts, token_lists = request.texts, request.token_lists
        if texts is not None:
            texts = [turn.complete(each) if isinstance(each, str) else each for each in texts]
        if token_lists is not None:
            token_lists = [turn.complete_ids(each) for each in token_lists]
        before = [*(request.texts or ()), *(request.token_lists or ())]
        after = [*(texts or ()), *(token_lists or ())]
        changed = sum(new != old for old, new in zip(before, after, strict=True))
        return replace(request, texts=texts, token_lists=token_lists), changed

    def _say(self) -> None:
        turn = self._turn_end
        if turn is not None:
            whole = turn.end + turn.rest
            print(
                f"Raw texts that end with {turn.end!r} are completed to {whole!r}, as the chat "
                "template has it (gateway.complete_turns)",
                flush=True,
            )
