"""Parts of a combined reward next to the reward model: a judge, and Python functions.

A part scores samples in order. ``composed.py`` combines the parts with the reward model's rewards.
"""

from __future__ import annotations

import asyncio
import importlib
import json
import logging
import math
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from hashlib import blake2b
from itertools import combinations
from typing import Any, Protocol

import numpy as np

from nemo_aligner.config.gateway import JUDGE_PART, JudgeConfig, JudgePairs, JudgeTask
from nemo_aligner.contract.messages import (
    Conversation,
    Messages,
    Text,
    as_json,
    messages_of,
    question_of,
    with_messages,
)
from nemo_aligner.serving.client.judge import HIGHEST, LOWEST, JudgeClient, JudgeError, Verdict
from nemo_aligner.serving.client.partial_requests import prompt_context
from nemo_aligner.serving.engine.timed_threads import (
    ThreadsHangError,
    TimedThreads,
    TooSlowError,
)
from nemo_aligner.serving.failures import FailureKind, RequestError
from nemo_aligner.utils.errors import ConfigError, ServingError, one_line, shown

logger = logging.getLogger(__name__)
# Seconds between two warnings about failed judgments.
_WARNING_PAUSE_S = 60.0
# How to end the hanging calls of a function, for error messages.
_HANG_ADVICE = "set a timeout for whatever the function waits for, and restart the gateway"
# Score by a pairwise judge of a reply that has no other to compare, because those were rejected. It
# is NeMo Gym's ``default_score`` of a single reply (0.7.0, resources_servers/genrm_compare/app.py).
_UNOPPOSED_SCORE = (LOWEST + HIGHEST) / 2
# Kinds of failures for failed judgments; all others are ``unscored``.
_TEMPORARY = {"judge_slow": FailureKind.slow, "judge_unreachable": FailureKind.unreachable}
# Maximum number of judgments of one request. With all pairs, their number grows with the square of
# the rows.
_MOST_JUDGMENTS = 2**16


@dataclass(frozen=True)
class Prompts:
    """The prompts of N samples.

    Attributes:
        keys: the key of each prompt (``prompt_keys``).
        num_turns: ``num_prompt_turns`` of the samples' ``ScoreRequest``.
        unopposed: keys of prompts to which only one reply is left, because all others in the
            request were rejected.
    """

    keys: Sequence[str | None]
    num_turns: int | None = None
    unopposed: Collection[str | None] = ()


@dataclass
class PartScores:
    """Scores of N samples by one part.

    Attributes:
        values: ``[N]`` float64; NaN for each sample in ``failures``.
        failures: why a sample has no score, by its number. The kind is ``bad_request`` if the
            sample is rejected, ``unscored`` if the part has no score for it, ``slow`` if it
            scores others, but took too long for this one, and ``unreachable`` if it is gone.
        comparisons: for a pairwise judge, each judgment in the form of NeMo Gym's
            ``comparison_results``, with the numbers of its two samples.
    """

    values: np.ndarray
    failures: dict[int, RequestError] = field(default_factory=dict)
    comparisons: list[dict[str, float]] = field(default_factory=list)


class Part(Protocol):
    """A part of a combined reward, such as a judge."""

    @property
    def name(self) -> str:
        """Name of the part in settings and answers."""

    @property
    def rules(self) -> Any:
        """What the scores depend on, as JSON values, for the published scoring contract."""

    def check_size(self, keys: Sequence[str | None]) -> None:
        """Raise RequestError if samples whose prompts have these keys are too many to score."""

    async def score(self, samples: Sequence[Text], prompts: Prompts) -> PartScores:
        """Score samples; a sample without a score gets a reason."""

    async def probe(self) -> dict[str, str | None]:
        """Map the part's server to why it gives no scores now, or to None if it does."""

    def statistics(self) -> dict[str, dict[str, float]]:
        """Map the part's server or function to its counts since the start."""

    async def close(self) -> None:
        """Close connections and end threads; no call of ``score`` may be running."""


async def prompt_keys(
    samples: Sequence[Text], num_prompt_turns: int | None = None
) -> list[str | None]:
    """Return for each sample a key that responses to the same prompt and principle share.

    It is None for a raw text. ``num_prompt_turns`` is that of the samples' ``ScoreRequest``.
    """
    # In a thread: many long prompts would block the event loop for seconds.
    return await asyncio.to_thread(
        lambda: [_prompt_key(sample, num_prompt_turns) for sample in samples]
    )


def _prompt_key(sample: Text, num_prompt_turns: int | None) -> str | None:
    if isinstance(sample, str):
        return None
    context = prompt_context(sample, _prompt_of(sample, num_prompt_turns))
    # A digest, because thousands of samples may share a prompt of megabytes.
    return blake2b(json.dumps(context, sort_keys=True).encode(), digest_size=16).hexdigest()


def _prompt_of(sample: Messages | Conversation, num_prompt_turns: int | None) -> Messages:
    """Return the messages before the response, which may begin with tool calls."""
    if num_prompt_turns is None:
        return question_of(sample)
    return messages_of(sample)[:num_prompt_turns]


class JudgePart:
    """Scores conversations with a judge: each response by itself, or pairs with the same prompt.

    Attributes:
        name: name of the part.
        rules: what the scores depend on.
    """

    name = JUDGE_PART

    def __init__(self, client: JudgeClient, config: JudgeConfig, timeout_s: float) -> None:
        """Score with ``client``; ``timeout_s`` limits a judgment, including waiting and retries."""
        self._client, self._config, self._timeout_s = client, config, timeout_s
        self._masked_rows = self._failed_judgments = 0
        self._next_warning = 0.0
        names = ["model", "task", "prompt", "pairs", "repeats", "principle"]
        names += ["fields"] if config.fields else []
        values = {name: getattr(config, name) for name in names}
        rules = {name: getattr(value, "value", value) for name, value in values.items()}
        # What else a judge sees, and where the response begins.
        self.rules = {**rules, "context": ["tools", "documents"], "response": "after the question"}

    def check_size(self, keys: Sequence[str | None]) -> None:
        has_all_pairs = self._config.pairs is JudgePairs.all_pairs
        is_square = has_all_pairs and self._config.task is JudgeTask.pairwise
        sizes = Counter(key for key in keys if key is not None).values()
        counts = [size * (size - 1) // 2 if is_square else size for size in sizes]
        total = sum(counts) * self._config.repeats
        if total > _MOST_JUDGMENTS:
            raise RequestError(
                f"got a request that needs {total} judgments, wanted at most {_MOST_JUDGMENTS}. "
                "Send fewer rows per request, or set judge.pairs=circular",
                FailureKind.too_large,
            )

    async def score(self, samples: Sequence[Text], prompts: Prompts) -> PartScores:
        """Score samples, with as many judgments at once as ``judge.max_connections`` allows.

        Raises:
            RequestError: the samples need more than ``_MOST_JUDGMENTS`` judgments.
        """
        self.check_size(prompts.keys)
        scores = PartScores(np.full(len(samples), np.nan))
        groups: dict[str, list[int]] = defaultdict(list)
        for number, key in enumerate(prompts.keys):
            if key is None:
                reason = "it is a raw text, and a judge reads conversations; send messages"
                scores.failures[number] = RequestError(reason, FailureKind.bad_request)
            else:
                groups[key].append(number)
        tasks: list[tuple[int, ...]] = []
        judgments = []
        for key, numbers in groups.items():
            if len(numbers) == 1 and self._config.task is JudgeTask.pairwise:
                _score_lone_reply(numbers[0], key in prompts.unopposed, scores)
                continue
            first: Any = samples[numbers[0]]
            prompt = _prompt_of(first, prompts.num_turns)
            conversation = with_messages(first, prompt)  # shared, because its judgments are many
            responses = {number: messages_of(samples[number])[len(prompt) :] for number in numbers}
            for task in self._list_tasks(numbers):
                tasks += [task] * self._config.repeats
                replies = [responses[number] for number in task]
                judgments += [
                    self._judge(conversation, replies) for _ in range(self._config.repeats)
                ]
        outcomes = await asyncio.gather(*judgments)
        self._collect(tasks, outcomes, scores)
        if all(number in scores.failures for task in tasks for number in task):
            _mark_unreachable(scores.failures)
        self._masked_rows += len(scores.failures)
        return scores

    async def probe(self) -> dict[str, str | None]:
        return {self._client.name: await self._client.probe()}

    def statistics(self) -> dict[str, dict[str, float]]:
        counts = {name: float(count) for name, count in self._client.counts.items()}
        return {self._client.name: {**counts, "masked_rows": float(self._masked_rows)}}

    async def close(self) -> None:
        await self._client.aclose()

    def _list_tasks(self, numbers: Sequence[int]) -> Iterable[tuple[int, ...]]:
        """List the samples of each judgment, for samples with the same prompt."""
        if self._config.task is JudgeTask.rating:
            return [(number,) for number in numbers]
        if self._config.pairs is JudgePairs.all_pairs:
            return combinations(numbers, 2)
        return zip(numbers, [*numbers[1:], numbers[0]], strict=True)

    async def _judge(
        self, conversation: Messages | Conversation, responses: Sequence[Messages]
    ) -> Verdict | RequestError:
        """Return the verdict on one or two responses, or why there is none."""
        judging = self._client.judge(conversation, responses)
        try:
            return await asyncio.wait_for(judging, self._timeout_s)
        except JudgeError as error:
            kind = _TEMPORARY.get(error.count, FailureKind.unscored)
            return self._note_failure(RequestError(one_line(error), kind))
        except asyncio.TimeoutError:
            text = f"no verdict within {self._timeout_s:g} s (gateway.timeout_s)"
            return self._note_failure(RequestError(text, FailureKind.slow))

    def _note_failure(self, failure: RequestError) -> RequestError:
        """Log a failed judgment, but at most one every ``_WARNING_PAUSE_S``."""
        self._failed_judgments += 1
        if time.monotonic() >= self._next_warning:
            self._next_warning = time.monotonic() + _WARNING_PAUSE_S
            text = "%s: failed judgments so far: %d; the last one: %s"
            logger.warning(text, self._client.name, self._failed_judgments, failure.message)
        return failure

    def _collect(
        self,
        tasks: Sequence[tuple[int, ...]],
        outcomes: Sequence[Verdict | RequestError],
        scores: PartScores,
    ) -> None:
        """Set the mean score of each sample; a sample with a failed judgment gets none.

        The mean of its remaining judgments would be from comparisons with fewer responses, so it
        could not be compared with the scores of the other samples in the group.
        """
        rewards: dict[int, list[float]] = defaultdict(list)
        for index, (task, outcome) in enumerate(zip(tasks, outcomes, strict=True)):
            if isinstance(outcome, RequestError):
                for number in task:
                    scores.failures.setdefault(number, outcome)
                continue
            for number, reward in zip(task, outcome.rewards, strict=True):
                rewards[number].append(reward)
            if len(task) == 2:
                judge = index % self._config.repeats
                scores.comparisons.append(_describe_comparison(task, outcome, judge))
        for number, values in rewards.items():
            if number not in scores.failures:
                scores.values[number] = sum(values) / len(values)


def _mark_unreachable(failures: dict[int, RequestError]) -> None:
    """Change the kind of failures of a part that is slow for all samples."""
    for number, failure in failures.items():
        if failure.kind is FailureKind.slow:
            failures[number] = RequestError(failure.message, FailureKind.unreachable)


def _score_lone_reply(number: int, is_unopposed: bool, scores: PartScores) -> None:
    """Set the score of a reply that a pairwise judge cannot compare with another one.

    It gets a score only if it ``is_unopposed``. If its sender sends each reply by itself, a score
    that is always the same would go unnoticed.
    """
    if is_unopposed:
        scores.values[number] = _UNOPPOSED_SCORE
        return
    reason = (
        "a pairwise judge needs at least two replies to one prompt in a request, and this is the "
        "only one that can be scored. Set judge.task=rating, or send the replies to a prompt "
        "together"
    )
    scores.failures[number] = RequestError(reason, FailureKind.unscored)


def _describe_comparison(task: tuple[int, ...], verdict: Verdict, judge: int) -> dict[str, float]:
    return {
        "response_i": task[0],
        "response_j": task[1],
        "judge_idx": judge,
        "score_1": verdict.scores[0],
        "score_2": verdict.scores[1],
        "ranking": verdict.ranking,
    }


Function = Callable[[list[dict[str, Any]]], Sequence[float | None]]


class FunctionPart:
    """Scores samples with a Python function, in threads and with a time limit.

    The function gets a list of ``{"messages": [...]}`` (with ``tools`` and ``documents`` if there
    are any) and ``{"text": ...}``. It returns a number for each; None or NaN means no score.
    After an ``OSError``, such as one from a service that it calls, the same samples may be sent
    again. Only the time limit interrupts a call, so it goes on if its client disconnects. A call
    that hangs in C code, such as a read from a socket, keeps its thread. This thread no longer
    counts as one of ``num_threads``. But while as many calls as that hang, further calls fail at
    once.
    """

    def __init__(self, name: str, location: str, timeout_s: float, num_threads: int) -> None:
        """Import the function at ``location``, ``package.module:function``.

        Args:
            name: name of the part.
            location: where the function is.
            timeout_s: seconds until a call has failed.
            num_threads: maximum number of concurrent calls; further ones wait.

        Raises:
            ConfigError: there is no such function.
        """
        self.name = name
        self.rules = location
        self._function = load_function(name, location)
        self._counts: Counter[str] = Counter(function_calls=0, function_failures=0, masked_rows=0)
        message = f"no answer within {timeout_s:g} s (function_timeout_s)"
        self._threads = TimedThreads(
            *(num_threads, name, timeout_s, message),
            max_replaced=num_threads,
            replaces_slow=False,
            interrupts_abandoned=False,
        )

    def check_size(self, keys: Sequence[str | None]) -> None:
        return

    async def score(self, samples: Sequence[Text], prompts: Prompts) -> PartScores:
        """Score samples in one call of the function."""
        if not samples:
            return PartScores(np.zeros(0))
        self._counts["function_calls"] += 1

        def call() -> np.ndarray:
            # In this thread, because millions of messages would block the event loop, and so would
            # an iterator that computes its values when they are read.
            answer: Any = self._function([*map(_as_record, samples)])
            if isinstance(answer, Iterator):
                answer = [*answer]
            return _read_values(answer, len(samples))

        try:
            values = await self._threads.run(lambda run_step: run_step(call))
        except Exception as error:
            self._counts["function_failures"] += 1
            text = one_line(error) if isinstance(error, ServingError) else one_line(repr(error))
            if isinstance(error, ThreadsHangError):
                text = f"{text}; {_HANG_ADVICE}"
            reasons = dict.fromkeys(range(len(samples)), text)
            values = np.full(len(samples), np.nan)
            is_temporary = isinstance(error, TooSlowError | ThreadsHangError | OSError)
        else:
            is_temporary = False
            missing = np.flatnonzero(~np.isfinite(values))
            reasons = {int(number): "the function returned no number" for number in missing}
            values[missing] = np.nan
        self._counts["masked_rows"] += len(reasons)
        kind = FailureKind.unreachable if is_temporary else FailureKind.unscored
        failures = {number: RequestError(reason, kind) for number, reason in reasons.items()}
        return PartScores(values, failures)

    async def probe(self) -> dict[str, str | None]:
        problem = self._threads.problem
        return {str(self.rules): None if problem is None else f"{problem}; {_HANG_ADVICE}"}

    def statistics(self) -> dict[str, dict[str, float]]:
        return {str(self.rules): {name: float(count) for name, count in self._counts.items()}}

    async def close(self) -> None:
        self._threads.close()


def load_function(name: str, location: str) -> Function:
    """Import ``package.module:function``.

    Raises:
        ConfigError: the module cannot be imported, or has no such function.
    """
    module, _, attribute = location.partition(":")
    key = f"functions.{name}: {location}"
    try:
        function = getattr(importlib.import_module(module), attribute)
    except Exception as error:  # a module may raise anything while it is imported
        raise ConfigError(
            f"{key}: it cannot be imported: {one_line(error)}. Check the name, and that the "
            "module is installed or its folder is in PYTHONPATH"
        ) from error
    if not callable(function) or asyncio.iscoroutinefunction(function):
        raise ConfigError(f"{key}: got {shown(function)}, wanted a function that is not async")
    return function  # type: ignore[no-any-return]


def _as_record(sample: Text) -> dict[str, Any]:
    if isinstance(sample, str):
        return {"text": sample}
    content = deepcopy(as_json(sample))  # the function may change it
    return content if isinstance(content, dict) else {"messages": content}


def _read_values(answer: Any, num_samples: int) -> np.ndarray:
    """Convert a function's answer to ``[N]`` float64; NaN for None.

    Raises:
        ServingError: the answer is not a list of N numbers.
    """
    try:
        values = np.array([math.nan if value is None else float(value) for value in answer])
    except (TypeError, ValueError, OverflowError) as error:
        text = f"the function returned {shown(answer)}, wanted a list of numbers"
        raise ServingError(text) from error
    if len(values) != num_samples:
        raise ServingError(
            f"the function returned {len(values)} numbers, wanted one for each of {num_samples} "
            "samples"
        )
    return values
