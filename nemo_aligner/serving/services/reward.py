"""What the endpoint does with a batch of requests: check each, score them together, answer each."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from nemo_aligner.errors import AlignerError, ServingError
from nemo_aligner.serving.wire import kserve as protocol
from nemo_aligner.serving.wire.kserve import ScoreReply, ScoreRequest
from nemo_aligner.text.contract import ScoringContract
from nemo_aligner.text.messages import Text

logger = logging.getLogger(__name__)

Execute = Callable[[list[list[int]]], np.ndarray]


class Encoded(Protocol):
    """Token ids of one text, and whether the contract's overlong rule cut it."""

    @property
    def token_ids(self) -> Sequence[int]: ...

    @property
    def truncated(self) -> bool: ...


class Scorer(Protocol):
    """What a server needs of a scorer; only ``score_token_lists`` is collective over the ranks."""

    contract: ScoringContract

    def encode(self, text: Text) -> Encoded:
        """Raises AlignerError where the scoring contract refuses the text."""

    def check_tokens(self, token_ids: Sequence[int]) -> None:
        """Raises AlignerError where these ids cannot be scored as they stand."""

    def score_token_lists(self, token_lists: list[list[int]]) -> np.ndarray:
        """``[N, A]`` float32 rewards."""


@dataclass(frozen=True)
class Failure:
    """Why one request is not answered: ``bad_request`` when its sender can mend it."""

    message: str
    bad_request: bool


@dataclass
class _Job:
    token_lists: list[list[int]] = field(default_factory=list)
    exceeded: list[bool] = field(default_factory=list)
    answer: ScoreReply | Failure | None = None


class RewardEndpoint:
    """Answers a batch of requests at once; ``execute`` scores token lists on all ranks."""

    def __init__(self, scorer: Scorer, execute: Execute) -> None:
        self._scorer = scorer
        self._execute = execute
        self._contract_hash = scorer.contract.hash

    def answer(self, requests: Sequence[Mapping[str, np.ndarray]]) -> list[ScoreReply | Failure]:
        """One reply or failure per request, in order."""
        jobs = [self._prepare(request) for request in requests]
        ready = [job for job in jobs if job.answer is None]
        if ready and not self._score(ready) and len(ready) > 1:
            # Whoever made the batch fail fails alone.
            for job in ready:
                self._score([job])
        return [job.answer or Failure("the request was not scored", False) for job in jobs]

    def _prepare(self, inputs: Mapping[str, np.ndarray]) -> _Job:
        try:
            request = protocol.decode_request(inputs)
            self._check_add_eos(request)
            return self._encode(request)
        except AlignerError as error:
            return _Job(answer=Failure(_one_line(error), True))
        except Exception as error:
            logger.exception("a request could not be prepared")
            what = f"internal error: {type(error).__name__}: {_one_line(error)}"
            return _Job(answer=Failure(what, False))

    def _check_add_eos(self, request: ScoreRequest) -> None:
        raw_text = request.texts is not None and isinstance(request.texts[0], str)
        wanted = self._scorer.contract.add_eos and raw_text
        for row, flag in enumerate(request.add_eos or ()):
            if flag != wanted:
                why = "the model's scoring contract" if raw_text else "conversations and tokens"
                raise ServingError(
                    f"add_EOS, row {row}: got {flag}, wanted {wanted} ({why}) or no add_EOS at all"
                )

    def _encode(self, request: ScoreRequest) -> _Job:
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
