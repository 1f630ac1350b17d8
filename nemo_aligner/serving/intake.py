"""What the reward model's and the critic's services have in common: from a request to rows.

A request is checked against the limits, its samples are encoded by the scoring contract, and its
rows wait in the queue in front of the model. What the model's outputs mean is the service's part.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, ParamSpec, TypeVar

import numpy as np

from nemo_aligner.config.serving import ServerConfig
from nemo_aligner.contract.contract import EncodedText, TextEncoder
from nemo_aligner.contract.messages import Text, is_plain
from nemo_aligner.contract.steps import StepSpan
from nemo_aligner.contract.templates import name_of
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
# Characters, or token ids, of a request that is sooner encoded in the event loop than in a thread.
_SHORT = 2000
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

    rows: list[Row] = field(default_factory=list)
    numbers: list[int] = field(default_factory=list)
    truncated: list[bool] = field(default_factory=list)
    spans: list[tuple[StepSpan, ...]] = field(default_factory=list)
    reply_tokens: list[int] | None = None
    errors: dict[int, str] = field(default_factory=dict)
    num_tokens: int = 0

    def check_finite(self, values: np.ndarray, ends: Sequence[int] | np.ndarray) -> None:
        """Fail where the model has computed no number: it would reach a trainer's loss.

        The whole request fails, as its other values come from the same model.

        Args:
            values: ``[S, ...]``, row after row.
            ends: for each row, the end of its values.

        Raises:
            RequestError: it names the first row that has none.
        """
        wrong = np.flatnonzero(~np.isfinite(values.reshape(len(values), -1)).all(axis=1))
        if wrong.size:
            number = self.numbers[int(np.searchsorted(ends, wrong[0], side="right"))]
            raise RequestError(
                f"row {number}: the model's reward is not a finite number", FailureKind.internal
            )


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
        if self._is_quick(request):
            return self._encode(request, sets_rows_aside, _call)
        try:
            return await self._threads.run(
                lambda run_step: self._encode(request, sets_rows_aside, run_step)
            )
        except TooSlowError as error:
            raise _refuse_row(request.row_numbers[error.step], error) from error

    def close(self) -> None:
        """End the threads; nothing may be in flight."""
        self._threads.close()

    def _is_quick(self, request: ScoreRequest) -> bool:
        """Tell whether a request is encoded in less time than it takes to wake another thread."""
        if request.texts is None:
            return sum(map(len, request.token_lists or ())) <= _SHORT
        return sum(map(self._count_characters, request.texts)) <= _SHORT

    def _count_characters(self, sample: Text) -> int:
        if isinstance(sample, str):
            return len(sample)
        # Parts, tools and documents take longer than their characters say.
        if not (self._has_known_template and isinstance(sample, list) and is_plain(sample)):
            return _SHORT + 1
        return sum(len(turn["content"]) for turn in sample)

    def _encode(
        self, request: ScoreRequest, sets_rows_aside: bool, run_step: RunStep
    ) -> EncodedRequest:
        self._check_add_eos(request)
        encoded = EncodedRequest(reply_tokens=[] if self._needs_lengths else None)
        samples: Sequence[Any] = request.texts or request.token_lists or ()
        encode: Callable[[Any], tuple[EncodedText, int]] = (
            self._encode_tokens if request.texts is None else self._encode_text
        )
        num_slow = 0
        for position, (number, sample) in enumerate(zip(request.row_numbers, samples, strict=True)):
            try:
                if num_slow == _MOST_SLOW:
                    raise ServingError(f"not tried, as {num_slow} samples before it took too long")
                text, reply_tokens = run_step(encode, sample)
            except AlignerError as error:
                if not sets_rows_aside:
                    raise _refuse_row(number, error) from error
                num_slow += isinstance(error, TooSlowError)
                encoded.errors[position] = one_line(error)
                continue
            reads = text.reads if self._has_steps else None
            encoded.rows.append(Row.of(text.token_ids, reads))
            encoded.numbers.append(number)
            encoded.truncated.append(text.truncated)
            encoded.spans.append(text.spans if reads else ())
            if encoded.reply_tokens is not None:
                encoded.reply_tokens.append(reply_tokens)
            encoded.num_tokens += len(text.token_ids)
            self._check_num_tokens(encoded.num_tokens)
        return encoded

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
