"""Scoring as a service: check each request of a batch, score them together, answer each."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

import numpy as np

from nemo_aligner.errors import AlignerError, ServingError
from nemo_aligner.serving.wire.types import Failure, ScoreReply, ScoreRequest
from nemo_aligner.text.contract import EncodedText, ScoringContract
from nemo_aligner.text.messages import Text

logger = logging.getLogger(__name__)

Execute = Callable[[list[list[int]]], np.ndarray]
T = TypeVar("T")


class ServableScorer(Protocol):
    """What a server needs of a scorer; only ``score_token_lists`` is collective over the ranks."""

    contract: ScoringContract

    def encode(self, text: Text) -> EncodedText:
        """Raises AlignerError where the scoring contract refuses the text."""

    def check_tokens(self, token_ids: Sequence[int]) -> None:
        """Raises AlignerError where these ids cannot be scored as they stand."""

    def score_token_lists(self, token_lists: list[list[int]]) -> np.ndarray:
        """``[N, A]`` float32 rewards."""


@dataclass
class _Job:
    token_lists: list[list[int]] = field(default_factory=list)
    exceeded: list[bool] = field(default_factory=list)
    answer: ScoreReply | Failure | None = None


class RewardEndpoint:
    """Answers a batch of requests at once; ``execute`` scores token lists on all ranks."""

    def __init__(self, scorer: ServableScorer, execute: Execute) -> None:
        self._scorer = scorer
        self._execute = execute
        self._contract_hash = scorer.contract.hash

    def answer(self, requests: Sequence[ScoreRequest | Failure]) -> list[ScoreReply | Failure]:
        """One reply or failure per request, in order.

        A request that nobody could read comes as the failure that it is answered with.
        """
        jobs = [self._prepare(request) for request in requests]
        ready = [job for job in jobs if job.answer is None]
        if ready and not self._score(ready) and len(ready) > 1:
            # Whoever made the batch fail fails alone.
            for job in ready:
                self._score([job])
        return [job.answer or Failure("the request was not scored", False) for job in jobs]

    def _prepare(self, request: ScoreRequest | Failure) -> _Job:
        job = request if isinstance(request, Failure) else or_failure(self._encode, request)
        return _Job(answer=job) if isinstance(job, Failure) else job

    def _encode(self, request: ScoreRequest) -> _Job:
        self._check_add_eos(request)
        job = _Job()
        for row, token_list in enumerate(request.token_lists or ()):
            with _naming(row):
                self._scorer.check_tokens(token_list)
            job.token_lists.append(token_list)
            job.exceeded.append(False)
        for row, text in enumerate(request.texts or ()):
            with _naming(row):
                encoded = self._scorer.encode(text)
            job.token_lists.append(list(encoded.token_ids))
            job.exceeded.append(encoded.truncated)
        return job

    def _check_add_eos(self, request: ScoreRequest) -> None:
        raw_text = request.texts is not None and isinstance(request.texts[0], str)
        wanted = self._scorer.contract.add_eos and raw_text
        for row, flag in enumerate(request.add_eos or ()):
            if flag != wanted:
                why = "the model's scoring contract" if raw_text else "conversations and tokens"
                raise ServingError(
                    f"add_EOS, row {row}: got {flag}, wanted {wanted} ({why}) or no add_EOS at all"
                )

    def _score(self, jobs: list[_Job]) -> bool:
        try:
            rewards = self._execute([ids for job in jobs for ids in job.token_lists])
        except Exception as error:
            failure = Failure(f"the model failed: {_one_line(error)}", False)
            logger.error("a batch of %d requests: %s", len(jobs), failure.message)
            for job in jobs:
                job.answer = failure
            return False
        start = 0
        for job in jobs:
            stop = start + len(job.token_lists)
            job.answer = _reply(rewards[start:stop], job.exceeded, self._contract_hash)
            start = stop
        return True


def or_failure(step: Callable[..., T], *arguments: object) -> T | Failure:
    """What ``step`` makes of a request, or why it cannot; a bug fails that one request alone."""
    try:
        return step(*arguments)
    except AlignerError as error:
        return Failure(_one_line(error), True)
    except Exception as error:
        logger.exception("a request could not be prepared")
        return Failure(f"internal error: {type(error).__name__}: {_one_line(error)}", False)


@contextmanager
def _naming(row: int) -> Iterator[None]:
    """Put the row's number before whatever the scorer refuses."""
    try:
        yield
    except AlignerError as error:
        raise ServingError(f"row {row}: {error}") from error


def _reply(rewards: np.ndarray, exceeded: list[bool], contract_hash: str) -> ScoreReply | Failure:
    rows = np.flatnonzero(~np.isfinite(rewards).all(axis=1))
    if rows.size:
        return Failure(f"row {rows[0]}: the model's reward is not a finite number", False)
    return ScoreReply(rewards, np.array(exceeded, dtype=bool), contract_hash)


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())[:500]
