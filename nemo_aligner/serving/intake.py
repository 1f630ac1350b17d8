"""Encode requests into rows for the queue, in the services of reward models and critics.

A request is checked against the limits, and its samples are encoded by the scoring contract. Its
rows then wait in the queue of the model. Each service itself interprets the model's outputs.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Iterator, Sequence
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
from nemo_aligner.serving.engine.executor import RanksLostError
from nemo_aligner.serving.engine.meter import Meter
from nemo_aligner.serving.engine.rows import Row
from nemo_aligner.serving.engine.timed_threads import (
    RunStep,
    ThreadsHangError,
    TimedThreads,
    TooSlowError,
)
from nemo_aligner.serving.engine.token_scorer import TokenScorer
from nemo_aligner.serving.failures import FailureKind, RequestError
from nemo_aligner.serving.protocols import ScoreRequest
from nemo_aligner.utils.errors import AlignerError, ServingError, one_line

# Threads that encode samples. With one, a long sample would block all others.
_ENCODERS = 2
# Maximum number of additional threads, which start while samples take long. Each of them slows down
# all others, because Python runs one at a time. If so many samples hang, the next ones would, too.
_MORE_ENCODERS = 16
# Requests up to this cost are encoded in the event loop, which is faster than waking a thread. The
# cost is the number of characters or token ids. Each row and turn adds a constant, because even an
# empty one takes time.
_SHORT = 2000
_COST_OF_ROW = 50
_COST_OF_TURN = 30
# Maximum number of samples of a request that may exceed the time limit. After that many, the other
# samples of the request are not tried.
_MOST_SLOW = 3

P = ParamSpec("P")
T = TypeVar("T")


@dataclass
class EncodedRequest:
    """The samples of a request as rows for the queue.

    Attributes:
        rows: rows of the samples that could be encoded, in order.
        numbers: for each row, the number of its sample in the request.
        truncated: for each row, whether the sample was cut to ``seq_length``.
        spans: for each row, the turns or steps of its rewards; empty if it has one reward.
        reply_tokens: for each row, the number of tokens of its reply; None if shaping does not
            need it.
        errors: number of a sample in the request -> why the sample could not be encoded.
        unscored: the samples in ``errors`` that were too slow or not tried; see ``ScoredRows``.
        num_tokens: tokens of all rows.
    """

    rows: list[Row]
    numbers: list[int]
    truncated: list[bool]
    spans: list[tuple[StepSpan, ...]]
    reply_tokens: list[int] | None
    errors: dict[int, str]
    unscored: frozenset[int]
    num_tokens: int

    def check_finite(self, values: np.ndarray, ends: Sequence[int] | np.ndarray) -> None:
        """Raise an error if the model has computed NaN or infinity, which could reach a loss.

        The whole request fails, because its other values come from the same model.

        Args:
            values: ``[S, ...]`` outputs of the model, row after row.
            ends: for each row, the end of its values in ``values``.

        Raises:
            RequestError: a value is not finite; the message names the first row with one.
        """
        is_finite = np.isfinite(values)
        if is_finite.all():
            return
        first = np.flatnonzero(~is_finite.reshape(len(values), -1).all(axis=1))[0]
        number = self.numbers[int(np.searchsorted(ends, first, side="right"))]
        raise RequestError(
            f"row {number}: the model's reward is not a finite number", FailureKind.internal
        )


class _Sample(NamedTuple):
    """An encoded sample; its fields become one element of each list in ``EncodedRequest``."""

    row: Row
    number: int
    is_truncated: bool
    spans: tuple[StepSpan, ...]
    reply_tokens: int


class _Failure(NamedTuple):
    """A sample that could not be encoded, and why.

    ``is_slow`` if it exceeded the time limit, or was not tried because others did.
    """

    reason: str
    is_slow: bool


class Intake:
    """Checks, encodes and counts the requests of a service; must be used in a single event loop.

    Attributes:
        meter: counts requests and calls.
    """

    def __init__(
        self,
        encoder: TokenScorer | TextEncoder,
        config: ServerConfig,
        *,
        has_steps: bool = False,
        needs_lengths: bool = False,
    ) -> None:
        """Start the threads that encode samples.

        Args:
            encoder: encodes samples by a scoring contract.
            config: limits and timeouts.
            has_steps: whether the model gives a reward for each turn or step.
            needs_lengths: whether to count the tokens of replies, for a length penalty.
        """
        self._encoder = encoder
        self._config = config
        self._has_steps, self._needs_lengths = has_steps, needs_lengths
        # Built-in templates always terminate. One that comes from an archive may run forever for
        # some conversation, so it is never run in the event loop.
        self._has_known_template = bool(name_of(encoder.contract.template))
        seconds, key = config.encode_timeout_secs, f"{config.section}.encode_timeout_secs"
        self._threads = TimedThreads(
            _ENCODERS,
            "encoder",
            seconds,
            f"it took more than {seconds:g} s to tokenize ({key}). If it does so again while the "
            "server is idle, leave the sample out: it is very long, or the model's chat template "
            "runs forever for it",
            max_replaced=_MORE_ENCODERS,
        )
        self.meter = Meter()

    @property
    def problem(self) -> str | None:
        """Why samples cannot be encoded now; None if they can."""
        problem = self._threads.problem
        return None if problem is None else f"samples cannot be tokenized: {problem}"

    @contextmanager
    def counting_failures(self) -> Iterator[None]:
        """Count the request as rejected if the ``with`` block, which answers it, raises."""
        try:
            yield
        except Exception:
            self.meter.count_failure()
            raise

    async def encode(self, request: ScoreRequest, aside: Collection[FailureKind]) -> EncodedRequest:
        """Encode the samples of a request, in another thread if that takes long.

        Args:
            request: the samples.
            aside: kinds of failures for which a sample that cannot be encoded is collected in
                ``errors``: ``bad_request``, or ``slow`` if it took too long. The first sample
                with another failure fails the request.

        Raises:
            RequestError: a sample cannot be encoded, the request has too many tokens, or too many
                earlier samples hang.
        """
        outcomes: list[_Sample | _Failure] = []
        if self._is_quick(request):
            self._encode_samples(request, aside, outcomes, _call)
            return self._collect(outcomes)
        while True:
            num_encoded = len(outcomes)
            try:
                work = partial(self._encode_samples, request, aside, outcomes)
                await self._threads.run(work)
            except ThreadsHangError as error:
                text = f"samples cannot be tokenized: {one_line(error)}"
                raise RequestError(text, FailureKind.busy) from error
            except TooSlowError as error:
                # Python cannot interrupt the blocked thread. Another thread encodes the remaining
                # samples into a new list, because the blocked one may still append to the old list.
                position = num_encoded + error.step
                failure = _row_failure(request.row_numbers[position], error, aside)
                outcomes = [*outcomes[:position], failure]
            else:
                return self._collect(outcomes)

    def close(self) -> None:
        """End the threads; no request may be in flight."""
        self._threads.close()

    def _is_quick(self, request: ScoreRequest) -> bool:
        """Return whether encoding a request takes less time than waking another thread."""
        samples: Sequence[Any] = request.texts or request.token_lists or ()
        cost_of = len if request.texts is None else self._cost_of_text
        cost = _COST_OF_ROW * len(samples)
        # Stop as soon as the cost is too high, because a request may have very many samples.
        for sample in samples:
            if cost > _SHORT:
                break
            cost += cost_of(sample)
        return cost <= _SHORT

    def _cost_of_text(self, sample: Text) -> int:
        if isinstance(sample, str):
            return len(sample)
        # Encoding may take longer than the number of characters suggests, with a template from an
        # archive, content parts, tools or documents.
        if not (self._has_known_template and isinstance(sample, list)):
            return _SHORT + 1
        if _COST_OF_TURN * len(sample) > _SHORT or not is_plain(sample):
            return _SHORT + 1
        return sum(_COST_OF_TURN + len(turn["content"]) for turn in sample)

    def _encode_samples(
        self,
        request: ScoreRequest,
        aside: Collection[FailureKind],
        outcomes: list[_Sample | _Failure],
        run_step: RunStep,
    ) -> None:
        """Encode the samples after the first ``len(outcomes)``, and append a result for each."""
        self._check_add_eos(request)
        samples: Sequence[Any] = request.texts or request.token_lists or ()
        encode: Callable[[Any], tuple[EncodedText, int]] = (
            self._encode_tokens if request.texts is None else self._encode_text
        )
        if request.texts is not None and not request.adds_special_tokens:
            encode = self._encode_unchanged
        num_slow = sum(isinstance(outcome, _Failure) and outcome.is_slow for outcome in outcomes)
        num_tokens = sum(
            len(outcome.row.ids) for outcome in outcomes if isinstance(outcome, _Sample)
        )
        numbers, num_done = request.row_numbers, len(outcomes)
        for number, sample in zip(numbers[num_done:], samples[num_done:], strict=True):
            if num_slow == _MOST_SLOW:
                reason = f"not tried, because {num_slow} earlier samples took too long to tokenize"
                outcomes.append(_Failure(reason, is_slow=True))
                continue
            try:
                text, reply_tokens = run_step(encode, sample)
            except AlignerError as error:
                failure = _row_failure(number, error, aside)
                num_slow += failure.is_slow
                outcomes.append(failure)
                continue
            reads = text.reads if self._has_steps else None
            row, spans = Row.of(text.token_ids, reads), text.spans if reads else ()
            outcomes.append(_Sample(row, number, text.truncated, spans, reply_tokens))
            num_tokens += len(text.token_ids)
            self._check_num_tokens(num_tokens)

    def _collect(self, outcomes: Sequence[_Sample | _Failure]) -> EncodedRequest:
        samples = [outcome for outcome in outcomes if isinstance(outcome, _Sample)]
        failures = {
            position: outcome
            for position, outcome in enumerate(outcomes)
            if isinstance(outcome, _Failure)
        }
        return EncodedRequest(
            rows=[sample.row for sample in samples],
            numbers=[sample.number for sample in samples],
            truncated=[sample.is_truncated for sample in samples],
            spans=[sample.spans for sample in samples],
            reply_tokens=[s.reply_tokens for s in samples] if self._needs_lengths else None,
            errors={position: failure.reason for position, failure in failures.items()},
            unscored=frozenset(row for row, failure in failures.items() if failure.is_slow),
            num_tokens=sum(len(sample.row.ids) for sample in samples),
        )

    def _encode_tokens(self, token_ids: list[int]) -> tuple[EncodedText, int]:
        encoded = self._encoder.encode_tokens(token_ids)
        # In token ids, it is unknown where the reply begins, so all of them count as the reply.
        return encoded, len(encoded.token_ids)

    def _encode_text(self, sample: Text) -> tuple[EncodedText, int]:
        text = self._encoder.encode(sample)
        return text, self._encoder.count_reply_tokens([sample])[0] if self._needs_lengths else 0

    def _encode_unchanged(self, sample: Text) -> tuple[EncodedText, int]:
        """Encode a sample whose sender expects that no BOS or EOS is added to a raw text."""
        if isinstance(sample, str) and self._encoder.adds_special_tokens(sample):
            raise ServingError(
                "add_special_tokens: got false, wanted true: the model's scoring contract adds BOS "
                "or EOS to this text"
            )
        return self._encode_text(sample)

    def _check_num_tokens(self, num_tokens: int) -> None:
        limit, section = self._config.max_request_tokens, self._config.section
        if num_tokens > limit:
            raise RequestError(
                f"got a request of {num_tokens} tokens or more, wanted at most {limit} "
                f"({section}.max_request_tokens). Send fewer rows per request",
                FailureKind.too_large,
            )

    def _check_add_eos(self, request: ScoreRequest) -> None:
        """Reject a request of NeMo-Aligner's client that expects another EOS rule.

        ``add_EOS`` in a request states whether its sender expects an EOS token after the text. The
        server always follows the contract's rule, so another expectation would mean unexpected
        rewards.
        """
        # Only a raw text may get an EOS: a chat template writes its own end, and token ids are not
        # changed.
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


def _row_failure(number: int, error: AlignerError, aside: Collection[FailureKind]) -> _Failure:
    """Return the failure of the sample with this number in its request.

    Raises:
        RequestError: failures of this kind are not set aside. The message has the row's number,
            which clients read from it.
    """
    # Seconds depend on the load, so a slow sample may be sent again: it is not rejected, and has no
    # ``row``, so that no route looks for the fault in its reply.
    is_slow = isinstance(error, TooSlowError)
    kind = FailureKind.slow if is_slow else FailureKind.bad_request
    if kind not in aside:
        message = f"row {number}: {one_line(error)}"
        raise RequestError(message, kind, row=None if is_slow else number) from error
    return _Failure(one_line(error), is_slow)


async def answer_of(ranks: Future[T], problem: str = "the model failed") -> T:
    """Wait for a result that the ranks compute, and convert an error to a ``RequestError``.

    If the waiting task is cancelled, so is the computation.

    Raises:
        RequestError: the ranks are lost, so another server has to answer; or they failed, which the
            message calls ``problem``.
    """
    try:
        return await asyncio.wrap_future(ranks)
    except RanksLostError as error:
        text = f"the server cannot continue: {one_line(error)}"
        raise RequestError(text, FailureKind.busy) from error
    except Exception as error:
        text = f"{problem}: {one_line(error)}"
        raise RequestError(text, FailureKind.internal) from error
