"""What the reward model's and the critic's services have in common: from a request to rows.

A request is checked against the limits, its samples are encoded by the scoring contract, and its
rows wait in the queue in front of the model. What the model's outputs mean is the service's part.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, ParamSpec, TypeVar

import numpy as np

from nemo_aligner.config.serving import ServerConfig
from nemo_aligner.contract.contract import EncodedText
from nemo_aligner.contract.messages import Text, is_plain
from nemo_aligner.contract.steps import StepSpan
from nemo_aligner.contract.templates import name_of
from nemo_aligner.contract.text_encoder import TextEncoder
from nemo_aligner.serving.engine.batcher import Meter
from nemo_aligner.serving.engine.executor import RanksLostError
from nemo_aligner.serving.engine.rows import Row
from nemo_aligner.serving.engine.scorer import TokenScorer
from nemo_aligner.serving.engine.timed_threads import RunStep, TimedThreads, TooSlowError
from nemo_aligner.serving.failures import FailureKind, RequestError
from nemo_aligner.serving.protocols import ScoreRequest
from nemo_aligner.utils.errors import AlignerError, ServingError, one_line

# Threads that encode samples beside the model: with one, a long sample would hold up all others.
_ENCODERS = 2
# A request is sooner encoded in the event loop than in a thread up to this cost, which counts
# characters or token ids. Rows and turns have one of their own, as an empty one takes time, too.
_SHORT = 2000
_COST_OF_ROW = 50
_COST_OF_TURN = 30
# Samples of a request that may exceed the time limit; what comes after them is not tried.
_MOST_SLOW = 3

P = ParamSpec("P")
T = TypeVar("T")


@dataclass
class EncodedRequest:
    """A request's samples as rows for the queue.

    Attributes:
        rows: of the samples that could be encoded, in order.
        numbers: for each row, the number of its sample in the whole request.
        truncated: for each row, whether the sample was cut to ``seq_length``.
        spans: for each row, what its rewards are the rewards of; empty where it has one reward.
        reply_tokens: for each row, the tokens of its reply alone; None unless shaping needs them.
        errors: why the other samples have no row, by their positions in the request.
        num_tokens: of all rows.
    """

    rows: list[Row]
    numbers: list[int]
    truncated: list[bool]
    spans: list[tuple[StepSpan, ...]]
    reply_tokens: list[int] | None
    errors: dict[int, str]
    num_tokens: int

    def check_finite(self, values: np.ndarray, ends: Sequence[int] | np.ndarray) -> None:
        """Fail where the model has computed no number: it would reach a trainer's loss.

        The whole request fails, as its other values come from the same model.

        Args:
            values: ``[S, ...]``, row after row.
            ends: for each row, the end of its values.

        Raises:
            RequestError: it names the first row that has none.
        """
        is_finite = np.isfinite(values)
        if is_finite.all():
            return
        wrong = np.flatnonzero(~is_finite.reshape(len(values), -1).all(axis=1))
        number = self.numbers[int(np.searchsorted(ends, wrong[0], side="right"))]
        raise RequestError(
            f"row {number}: the model's reward is not a finite number", FailureKind.internal
        )


class _Sample(NamedTuple):
    """A sample that is encoded, with what ``EncodedRequest`` says about its row."""

    row: Row
    number: int
    is_truncated: bool
    spans: tuple[StepSpan, ...]
    reply_tokens: int


class _Failure(NamedTuple):
    """Why a sample has no row."""

    reason: str
    is_slow: bool


class Intake:
    """Checks, encodes and counts requests; for one event loop.

    Attributes:
        meter: counts them.
    """

    def __init__(
        self,
        encoder: TokenScorer | TextEncoder,
        config: ServerConfig,
        *,
        has_steps: bool = False,
        needs_lengths: bool = False,
    ) -> None:
        """``has_steps``: rows are read at each turn or step. ``needs_lengths``: count replies."""
        self._encoder = encoder
        self._config = config
        self._has_steps, self._needs_lengths = has_steps, needs_lengths
        # Others may take for ever, on whatever conversation.
        self._has_known_template = bool(name_of(encoder.contract.template))
        seconds, key = config.encode_timeout_secs, f"{config.section}.encode_timeout_secs"
        self._threads = TimedThreads(
            _ENCODERS,
            "encoder",
            seconds,
            f"it took more than {seconds:g} s to tokenize ({key}). If the sample is not very long, "
            "the model's chat template does not end on it",
        )
        self.meter = Meter()

    @contextmanager
    def counting_failures(self) -> Iterator[None]:
        """Count a request as refused if the block that answers it fails."""
        try:
            yield
        except Exception:
            self.meter.refused()
            raise

    async def encode(self, request: ScoreRequest, sets_rows_aside: bool) -> EncodedRequest:
        """Encode a request's samples, in another thread where that takes long.

        Args:
            request: its samples.
            sets_rows_aside: whether a sample that cannot be encoded becomes one of ``errors``.

        Raises:
            RequestError: a sample cannot be encoded; or the request has too many tokens.
        """
        outcomes: list[_Sample | _Failure] = []
        if self._is_quick(request):
            self._encode(request, sets_rows_aside, outcomes, _call)
            return self._collect(outcomes)
        while True:
            num_before = len(outcomes)
            try:
                await self._threads.run(partial(self._encode, request, sets_rows_aside, outcomes))
            except TooSlowError as error:
                # The thread cannot be interrupted. What is left goes to another one, and into
                # another list: the first thread may come back at any time and go on with its own.
                position = num_before + error.step
                if not sets_rows_aside:
                    raise _refuse_row(request.row_numbers[position], error) from error
                outcomes = [*outcomes[:position], _Failure(one_line(error), is_slow=True)]
            else:
                return self._collect(outcomes)

    def close(self) -> None:
        """End the threads; nothing may be in flight."""
        self._threads.close()

    def _is_quick(self, request: ScoreRequest) -> bool:
        """Tell whether a request is encoded in less time than it takes to wake another thread."""
        samples: Sequence[Any] = request.texts or request.token_lists or ()
        cost_of = len if request.texts is None else self._cost_of_text
        cost = _COST_OF_ROW * len(samples)
        # Ends with the first sample that is too much: a request may have very many.
        for sample in samples:
            if cost > _SHORT:
                break
            cost += cost_of(sample)
        return cost <= _SHORT

    def _cost_of_text(self, sample: Text) -> int:
        if isinstance(sample, str):
            return len(sample)
        # Parts, tools and documents take longer than their characters say.
        if not (self._has_known_template and isinstance(sample, list)):
            return _SHORT + 1
        if _COST_OF_TURN * len(sample) > _SHORT or not is_plain(sample):
            return _SHORT + 1
        return sum(_COST_OF_TURN + len(turn["content"]) for turn in sample)

    def _encode(
        self,
        request: ScoreRequest,
        sets_rows_aside: bool,
        outcomes: list[_Sample | _Failure],
        run_step: RunStep,
    ) -> None:
        """Encode the samples that have no outcome yet, each of which adds its own."""
        self._check_add_eos(request)
        samples: Sequence[Any] = request.texts or request.token_lists or ()
        encode: Callable[[Any], tuple[EncodedText, int]] = (
            self._encode_tokens if request.texts is None else self._encode_text
        )
        num_slow = sum(isinstance(outcome, _Failure) and outcome.is_slow for outcome in outcomes)
        num_tokens = sum(
            len(outcome.row.ids) for outcome in outcomes if isinstance(outcome, _Sample)
        )
        numbers, num_done = request.row_numbers, len(outcomes)
        for number, sample in zip(numbers[num_done:], samples[num_done:], strict=True):
            try:
                if num_slow == _MOST_SLOW:
                    raise ServingError(f"not tried, as {num_slow} samples before it took too long")
                text, reply_tokens = run_step(encode, sample)
            except AlignerError as error:
                if not sets_rows_aside:
                    raise _refuse_row(number, error) from error
                is_slow = isinstance(error, TooSlowError)
                num_slow += is_slow
                outcomes.append(_Failure(one_line(error), is_slow))
                continue
            reads = text.reads if self._has_steps else None
            row, spans = Row.of(text.token_ids, reads), text.spans if reads else ()
            outcomes.append(_Sample(row, number, text.truncated, spans, reply_tokens))
            num_tokens += len(text.token_ids)
            self._check_num_tokens(num_tokens)

    def _collect(self, outcomes: Sequence[_Sample | _Failure]) -> EncodedRequest:
        samples = [outcome for outcome in outcomes if isinstance(outcome, _Sample)]
        return EncodedRequest(
            rows=[sample.row for sample in samples],
            numbers=[sample.number for sample in samples],
            truncated=[sample.is_truncated for sample in samples],
            spans=[sample.spans for sample in samples],
            reply_tokens=[s.reply_tokens for s in samples] if self._needs_lengths else None,
            errors={
                position: outcome.reason
                for position, outcome in enumerate(outcomes)
                if isinstance(outcome, _Failure)
            },
            num_tokens=sum(len(sample.row.ids) for sample in samples),
        )

    def _encode_tokens(self, token_ids: list[int]) -> tuple[EncodedText, int]:
        self._encoder.check_tokens(token_ids)
        # In token ids the beginning of the reply is unknown, so all count.
        return EncodedText(token_ids, False), len(token_ids)

    def _encode_text(self, sample: Text) -> tuple[EncodedText, int]:
        text = self._encoder.encode(sample)
        return text, self._encoder.count_reply_tokens([sample])[0] if self._needs_lengths else 0

    def _check_num_tokens(self, num_tokens: int) -> None:
        most, section = self._config.max_request_tokens, self._config.section
        if num_tokens > most:
            raise RequestError(
                f"got a request of {num_tokens} tokens or more, wanted at most {most} "
                f"({section}.max_request_tokens). Send fewer rows at once",
                FailureKind.too_large,
            )

    def _check_add_eos(self, request: ScoreRequest) -> None:
        """Refuse a client of NeMo-Aligner that expects another EOS rule than the contract's.

        Scored by the contract all the same, its rewards would mean something else than it thinks.
        """
        # A template writes its own end, and token ids stand as they were sent.
        is_raw = any(isinstance(sample, str) for sample in request.texts or ())
        expected = self._encoder.contract.add_eos and is_raw
        for number, flag in zip(request.row_numbers, request.add_eos or (), strict=False):
            if flag != expected:
                reason = "the model's scoring contract" if is_raw else "conversations and tokens"
                raise RequestError(
                    f"add_EOS, row {number}: got {flag}, wanted {expected} ({reason}) or no "
                    "add_EOS at all",
                    FailureKind.bad_request,
                    row=number,
                )


def _call(function: Callable[P, T], /, *arguments: P.args, **named: P.kwargs) -> T:
    return function(*arguments, **named)


def _refuse_row(number: int, error: Exception) -> RequestError:
    """Clients read the row's number from the words, too."""
    message = f"row {number}: {one_line(error)}"
    return RequestError(message, FailureKind.bad_request, row=number)


async def answer_of(ranks: Future[T]) -> T:
    """Wait for a result of all ranks, and say what kind of failure it is if there is none.

    A task that is cancelled here cancels what it waits for.

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
