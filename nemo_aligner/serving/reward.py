"""Scoring as a service: check a request, queue its rows, and answer it."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeVar

import numpy as np

from nemo_aligner.config.serving import ServerConfig
from nemo_aligner.contract.contract import ScoringContract, TextEncoder
from nemo_aligner.contract.readout import LOG_ODDS, PROBABILITY
from nemo_aligner.contract.sample_frame import SampleFrame
from nemo_aligner.contract.steps import StepSpan, aggregate_texts
from nemo_aligner.contract.turns import TurnEnd
from nemo_aligner.serving.engine.batcher import BackpressureLimit, Batcher, Meter
from nemo_aligner.serving.engine.executor import ModelRanks, Operation, RanksLostError
from nemo_aligner.serving.engine.scorer import Scorer
from nemo_aligner.serving.engine.shaping import RewardShaper
from nemo_aligner.serving.failures import FailureKind, RequestError
from nemo_aligner.serving.protocols import ScoredRows, ScoreRequest, StepRewards, kserve
from nemo_aligner.serving.protocols.kserve import Tensors
from nemo_aligner.serving.service import Endpoint
from nemo_aligner.utils.errors import AlignerError, ServingError, one_line

# Threads that encode texts beside the model: with one, a long text would hold up all others.
_ENCODERS = 2
# Bytes of a request that is sooner tokenized in the event loop than handed to another thread.
_SHORT = 2000


ReadOutputs = Callable[[np.ndarray], "tuple[np.ndarray, np.ndarray | None]"]


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
        scorer: Scorer | TextEncoder,
        submit: Callable[[list[list[int]]], Future[np.ndarray]],
        config: ServerConfig,
        meter: Meter,
        shaper: RewardShaper | None = None,
        read_outputs: ReadOutputs | None = None,
    ) -> None:
        """``submit`` queues token lists in front of the model: the future of a row for each.

        With ``read_outputs``, which turns outputs into rewards, these rows are outputs.
        """
        self._scorer = scorer
        self._read_outputs = read_outputs
        self._submit = submit
        self._max_bytes = config.max_request_bytes
        # More rows would only wait, while their senders could ask another server.
        self._limit = BackpressureLimit(config.max_queue_rows, "server.max_queue_rows")
        self._meter = meter
        self._encoders = ThreadPoolExecutor(_ENCODERS, "encoder")
        self._shaper = shaper
        takes_steps = shaper is None or shaper.takes_steps
        self._has_steps = scorer.contract.has_steps and takes_steps
        # None where the reward of a text is that of its last turn or step.
        self._aggregate = None if scorer.contract.aggregate is None else scorer.contract.aggregation
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

    async def answer(self, inputs: Tensors) -> ScoredRows:
        """The reply to a request's tensors.

        Raises:
            Exception: of any class; see ``failure_of``.
        """
        begun = time.monotonic()
        rows, num_bytes = kserve.size_of_request(inputs)
        try:
            # Before anything is decoded: what is refused here has cost no more than its bytes.
            check_size(num_bytes, self._max_bytes)
            with self._limit.admit(rows):
                if num_bytes <= _SHORT:
                    encoded = self._encode(inputs)
                else:
                    loop = asyncio.get_running_loop()
                    encoded = await loop.run_in_executor(self._encoders, self._encode, inputs)
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

    async def _score(self, encoded: _Encoded) -> ScoredRows:
        rewards = await answer_of(self._submit(encoded.token_lists))
        outputs = spread = None
        if self._read_outputs is not None:
            outputs = rewards
            rewards, spread = self._read_outputs(outputs)
        # An answer with NaN would reach a trainer's loss; the whole request fails, as its other
        # rewards come from the same model.
        ends = np.cumsum([max(1, len(spans)) for spans in encoded.spans])
        wrong = np.flatnonzero(~np.isfinite(rewards).all(axis=1))
        if wrong.size:
            row = np.searchsorted(ends, wrong[0], side="right")
            what = f"row {row}: the model's reward is not a finite number"
            raise RequestError(what, FailureKind.internal)
        exceeded = np.array(encoded.exceeded, dtype=bool)
        texts = ends - 1
        if self._aggregate is not None:
            # Made of raw rewards: the rules of shaping are for a reward as the contract has it.
            merged = aggregate_texts(rewards, [0, *ends.tolist()], self._aggregate)
            steps = rewards if self._has_steps else rewards[:0]
            rewards, texts = np.concatenate([steps, merged]), len(steps) + np.arange(len(merged))
        scored = ScoredRows(
            rewards, {}, exceeded, self._contract_hash, spread=spread, outputs=outputs
        )
        if self._shaper is not None:
            scored = self._shaper.shape(scored, encoded.reply_tokens)
        return _by_text(scored, encoded.spans, ends, texts) if self._has_steps else scored

    def _encode(self, inputs: Tensors) -> _Encoded:
        request = kserve.decode_request(inputs)
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
            reads = found.reads if self._has_steps or self._aggregate is not None else None
            # Marked ids are what the queue and all ranks pass on; see ``score_marked``.
            encoded.token_lists.append(mark_reads(found.token_ids, reads or ()))
            encoded.exceeded.append(found.truncated)
            encoded.spans.append(found.spans if reads else ())
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


# Rows of a model that has a reward for each turn or step. The ids that are read are marked, so that
# a row goes through queue and ranks like any other. No id that comes from outside is negative.


def mark_reads(token_ids: Sequence[int], reads: Sequence[int]) -> list[int]:
    """The ids with those at the places ``reads`` as ``-1 - id``."""
    marked = list(token_ids)
    for place in reads:
        marked[place] = ~marked[place]
    return marked


def unmark_reads(row: Sequence[int] | np.ndarray) -> tuple[np.ndarray, list[int]]:
    """The inverse of ``mark_reads``; without marks the last id is read."""
    marked = np.asarray(row, dtype=np.int64)
    reads = np.flatnonzero(marked < 0).tolist() or [len(marked) - 1]
    return np.where(marked < 0, ~marked, marked), reads


def score_marked(scorer: Scorer, rows: Sequence[Sequence[int]]) -> list[np.ndarray]:
    """``[s, A]`` rewards of each row, of whose ids s are marked; outputs, if there is a readout."""
    found = [unmark_reads(row) for row in rows]
    reads = [own for _, own in found]
    outputs = scorer.score_step_outputs([ids for ids, _ in found], reads)
    if scorer.contract.readout is None:
        outputs, _ = scorer.read_outputs(outputs)
    return np.split(outputs, np.cumsum([len(own) for own in reads])[:-1])


def _by_text(
    scored: ScoredRows,
    spans: Sequence[tuple[StepSpan, ...]],
    ends: np.ndarray,
    texts: np.ndarray,
) -> ScoredRows:
    """Rows of N texts, each with ``steps``.

    Args:
        scored: a row for each turn or step, text by text; behind them rows of texts, if any.
        ends: ``[N]`` bounds of the rows of each text's turns or steps.
        texts: ``[N]`` rows that are of a text as a whole.
    """
    steps = np.full(len(spans), None, dtype=np.object_)
    parts = np.split(scored.rewards, ends)[: len(spans)]
    steps[:] = [StepRewards(part, own) for part, own in zip(parts, spans, strict=True)]
    of_texts: dict[str, Any] = {
        name: values[texts]
        for name, values in vars(scored).items()
        if isinstance(values, np.ndarray) and name != "exceeded"  # of which there is one a text
    }
    return replace(scored, **of_texts, steps=steps)


# Checks and waiting that endpoints have in common, with the failures of both.

T = TypeVar("T")


def check_size(num_bytes: int, most: int) -> None:
    """Raise RequestError for a request of more than ``most`` bytes."""
    if num_bytes > most:
        raise RequestError(
            f"got a request of {num_bytes} bytes, wanted at most {most} (server.max_request_bytes)",
            FailureKind.too_large,
        )


async def answer_of(ranks: Future[T]) -> T:
    """Wait for a result of all ranks, and say what kind of failure it is if there is none.

    Raises:
        RequestError: they are gone, so that another server has to answer; or the model failed.
    """
    try:
        return await asyncio.wrap_future(ranks)
    except RanksLostError as error:
        text = f"the server cannot go on: {one_line(error)}"
        raise RequestError(text, FailureKind.busy) from error
    except Exception as error:
        text = f"the model failed: {one_line(error)}"
        raise RequestError(text, FailureKind.internal) from error


# The endpoints of a server: the reward model and its scoring contract.

_SCORE = "score"


class RewardModelServable:
    """A scorer on every rank; ``prepare`` is called on each before it scores."""

    def __init__(
        self,
        scorer: Scorer,
        config: ServerConfig,
        shaper: RewardShaper | None = None,
        prepare: Callable[[], None] = lambda: None,
        turn_end: TurnEnd | None = None,
        sample_frame: SampleFrame | None = None,
    ) -> None:
        self._scorer = scorer
        self._config = config
        self._shaper = shaper
        self._prepare = prepare
        self._turn_end, self._sample_frame = turn_end, sample_frame

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
        return RewardModel(
            self._scorer, self._config, self._shaper, ranks, self._turn_end, self._sample_frame
        )

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
        scorer: Scorer,
        config: ServerConfig,
        shaper: RewardShaper | None,
        ranks: ModelRanks,
        turn_end: TurnEnd | None = None,
        sample_frame: SampleFrame | None = None,
    ) -> None:
        self._scorer = scorer
        self._config = config
        self._meter = Meter()
        # A row with turns or steps has several rewards, which ``_by_text`` parts again.
        join = np.concatenate if scorer.contract.has_steps else np.stack
        self._batcher = Batcher(
            partial(ranks.submit, _SCORE), scorer.tokens_per_call, self._meter, join
        )
        read_outputs = None if scorer.contract.readout is None else scorer.read_outputs
        self._service = RewardService(
            scorer, self._batcher.submit, config, self._meter, shaper, read_outputs
        )
        self._cached = 0
        self._turn_end, self._sample_frame = turn_end, sample_frame

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
        published = contract_endpoint(contract, self.statistics, self._turn_end, self._sample_frame)
        return [rewards, published]

    @property
    def startup_log(self) -> Sequence[str]:
        contract = self._service.contract
        lines = [
            "It speaks KServe v2; /v1/rewards and the protocols of trainers are the gateway's",
            f"Scoring contract {contract.hash}",
            *_SCALES.get(contract.reward_scale, ()),
        ]
        if contract.shaping is not None:
            rules = json.loads(contract.shaping).items()
            lines += ["Shaped rewards:", *(f"  {name}: {_shown(rule)}" for name, rule in rules)]
        if self._scorer.prefix_cache_bytes:
            kept, size = self._config.prefix_cache_tokens, self._scorer.prefix_cache_bytes / 2**20
            lines.append(f"Prefix cache: {kept:,} tokens, {size:,.0f} MiB on each rank")
        return lines

    async def _answer(self, inputs: Tensors) -> Tensors:
        return kserve.encode_rewards(await self._service.answer(inputs))

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


# Facts about rewards on each scale that their reader has to know; other scales need none.
_SCALES = {
    PROBABILITY: ["Rewards are probabilities, from 0 to 1"],
    LOG_ODDS: ["Rewards are log-odds of a right step; their sigmoid is its probability"],
}


def _shown(rule: Any) -> str:
    """Format a rule: hashes shortened, single numbers without brackets."""
    if isinstance(rule, dict):
        return ", ".join(f"{name} {_shown(value)}" for name, value in rule.items())
    if isinstance(rule, list):
        return ", ".join(map(_shown, rule))
    return f"{rule:.4g}" if isinstance(rule, float) else str(rule)[:12]


def contract_endpoint(
    contract: ScoringContract,
    statistics: Callable[[], Mapping[str, float]],
    turn_end: TurnEnd | None = None,
    sample_frame: SampleFrame | None = None,
) -> Endpoint:
    """``contract``: how the texts of this server become scores, and what it has counted.

    Counters have no endpoint of their own: each is a process more, and 1.7 s more at the start.
    """
    published = kserve.encode_contract(contract, turn_end, sample_frame)

    async def publish(inputs: Tensors) -> Tensors:
        return {**published, **kserve.encode_statistics(statistics())}

    return Endpoint(
        kserve.CONTRACT_MODEL_NAME,
        kserve.CONTRACT_INPUTS,
        kserve.CONTRACT_OUTPUTS,
        publish,
        comes_first=True,  # Triton loads a model in seconds, and answers others meanwhile
    )
