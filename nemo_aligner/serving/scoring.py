"""The interface between the HTTP front and the model: in this process, or on upstream servers.

Every protocol's route calls a ``ScoringService``. There are three implementations:

* ``LocalService`` (``reward.py``): the batcher, executor and ranks of this server;
* ``UpstreamService`` (``upstream.py``): a client of other servers, for the gateway;
* ``ComposedService`` (``composed.py``): a gateway's servers combined with a judge and functions.

This module has what they share:

* the limit of rows in flight;
* the completion of raw samples that end with an end-of-turn token;
* the detection of foreign rows (raw samples that are not written in the model's chat template);
* the results of rows that are rejected before scoring;
* the drift of recent rewards (``drift.py``);
* the log of the highest-rewarded samples.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from nemo_aligner.config.serving import FrontConfig
from nemo_aligner.contract.contract import ScoringContract
from nemo_aligner.contract.readout import one_reward
from nemo_aligner.contract.sample_frame import SampleFrame
from nemo_aligner.contract.turns import TurnEnd
from nemo_aligner.serving.backpressure import BackpressureLimit
from nemo_aligner.serving.drift import RecentRewards
from nemo_aligner.serving.failures import FailureKind, RequestError
from nemo_aligner.serving.protocols import ScoredRows, ScoreRequest, place_rows
from nemo_aligner.serving.protocols.kserve import MODEL_NAME
from nemo_aligner.serving.reward_log import RewardLog


@dataclass(frozen=True)
class TemplateParts:
    """The strings that the model's chat template writes at the end of a turn and around a sample.

    A field is None if the template writes no such string.
    """

    turn_end: TurnEnd | None = None
    sample_frame: SampleFrame | None = None


class ScoringService(ABC):
    """Scores requests for the routes of an HTTP front; must be used in a single event loop.

    Attributes:
        model_name: name by which requests choose this service.
        contract: scoring contract of the latest rewards; None before the first rewards, and for
            upstream servers that publish none.
        fingerprint: fingerprint of the model that computed the latest rewards; None before the
            first rewards, and for upstream servers that publish none.
        recent: the latest rewards, to compute their drift.
        limits: settings of the front, including the limits of a request.
    """

    def __init__(self, config: FrontConfig, model_name: str = MODEL_NAME) -> None:
        self.limits = config
        self.model_name = model_name
        self.contract: ScoringContract | None = None
        self.fingerprint: str | None = None
        self.recent = RecentRewards(config.drift_rows)
        self._completes_turns = config.complete_turns
        self._limit = BackpressureLimit(
            config.max_queue_rows, f"{config.section}.max_queue_rows", model_name
        )
        self._announced_turn_end = False
        self._reward_log = RewardLog.of(config)

    @property
    def rows_in_flight(self) -> int:
        """Number of rows of requests that are not answered yet."""
        return self._limit.rows_in_flight

    def counting_failures(self) -> AbstractContextManager[None]:
        """Count a request as rejected if the ``with`` block raises.

        By default nothing is counted; ``LocalService`` counts.
        """
        return nullcontext()

    async def answer(
        self, request: ScoreRequest, aside: Collection[FailureKind], is_probe: bool = False
    ) -> ScoredRows:
        """Score the rows of a request.

        Args:
            request: the samples; rows in ``request.refused`` get NaN and their reasons.
            aside: kinds of failures for which a row gets NaN and a reason (``ALL_ROWS`` and others
                in ``failures.py``). A row with another failure fails the whole request.
            is_probe: whether the request only tests if its samples can be scored. It is then not
                counted, and its rewards enter neither the recent rewards nor the statistics of
                shaping. Only the model's calls and their duration are counted.

        Raises:
            RequestError: the request cannot be answered; ``row`` is the row that is at fault.
        """
        with self._limit.admit(len(request.texts or request.token_lists or ())):
            scored = await self._score(request, aside, is_probe)
        if not is_probe:
            self.recent.add(scored.rewards)
            self._log_highest(request, scored)
        return insert_refused(scored, request.refused)

    @abstractmethod
    async def _score(
        self, request: ScoreRequest, aside: Collection[FailureKind], is_probe: bool
    ) -> ScoredRows:
        """Score the rows that are not in ``request.refused``; ``answer`` explains the arguments."""

    @abstractmethod
    async def template_parts(self) -> TemplateParts:
        """Return the strings that the chat template writes after a reply and around a sample.

        Raises:
            RequestError: no server publishes them.
        """

    @abstractmethod
    async def read_contract(self) -> ScoringContract:
        """Return the scoring contract that is published now.

        Raises:
            RequestError: no server answers, or the server publishes no contract.
        """

    @abstractmethod
    async def find_contract(self) -> ScoringContract | None:
        """Return the scoring contract; None if the servers (NVIDIA's NeMo-Aligner) publish none.

        Raises:
            RequestError: no server answers, or fetching the contract failed otherwise.
        """

    @abstractmethod
    async def probe(self) -> dict[str, str | None]:
        """Map the name of each server to why it gives no rewards now, or to None if it does."""

    @abstractmethod
    async def statistics(self) -> Mapping[str, Mapping[str, float] | None]:
        """Map the name of each server to its counts since the start; None if it is unreachable."""

    async def start(self) -> None:
        """Start background tasks in the front's event loop; by default there are none."""
        return

    async def close(self) -> None:
        """End background tasks, after all requests are answered."""
        if self._reward_log is not None:
            await asyncio.to_thread(self._reward_log.close)

    def _log_highest(self, request: ScoreRequest, scored: ScoredRows) -> None:
        """Add the rewards of the scored rows to the log of the highest ones, if there is one."""
        if self._reward_log is None or not len(scored.rewards):
            return
        columns = scored.rewards.shape[1]
        weights = (1.0,) if self.contract is None else self.contract.attribute_weights
        # Without a scoring contract the first attribute counts, because no weights are known.
        merged = one_reward(scored.rewards, weights if len(weights) == columns else (1.0,))
        self._reward_log.add(request.texts or request.token_lists or [], merged, scored)

    async def complete_turns(self, request: ScoreRequest) -> tuple[ScoreRequest, int]:
        """Complete raw texts and token rows that end with the model's end-of-turn token.

        The model was trained with the text that its chat template writes after that token, e.g. a
        line break. A policy stops at the token, so its samples lack the text.

        Returns:
            The request, and the number of its rows that were completed.

        Raises:
            RequestError: no server publishes what its chat template writes.
        """
        turn = (await self.template_parts()).turn_end if self._completes_turns else None
        if turn is None:
            return request, 0
        if not self._announced_turn_end:
            self._announced_turn_end = True
            print(
                f"{self.model_name}: raw texts that end with {turn.end!r} are completed to "
                f"{turn.end + turn.rest!r}, as the chat template does (complete_turns)",
                flush=True,
            )
        if request.texts is not None:
            # Conversations need no completion: the server writes them in the template as whole
            # turns.
            texts = [
                turn.complete(text) if isinstance(text, str) else text for text in request.texts
            ]
            return replace(request, texts=texts), _count_changes(request.texts, texts)
        sent_rows = request.token_lists or []
        token_lists = [turn.complete_ids(row) for row in sent_rows]
        return replace(request, token_lists=token_lists), _count_changes(sent_rows, token_lists)

    async def find_foreign_rows(self, request: ScoreRequest) -> dict[int, str]:
        """Find raw texts and token rows that are not written in the model's chat template.

        Returns:
            Row number in the request -> how the row differs from the template.

        Raises:
            RequestError: no server publishes what its chat template writes.
        """
        rows: Sequence[Any] = request.texts or request.token_lists or ()
        raw_rows = {
            number: row
            for number, row in zip(request.row_numbers, rows, strict=True)
            if request.texts is None or isinstance(row, str)
        }
        frame = (await self.template_parts()).sample_frame if raw_rows else None
        if frame is None:
            return {}
        find_fault = frame.find_fault_of_ids if request.texts is None else frame.find_fault
        faults = {number: find_fault(row) for number, row in raw_rows.items()}
        return {number: fault for number, fault in faults.items() if fault is not None}


def _count_changes(rows: Sequence[object], completed: Sequence[object]) -> int:
    return sum(after != sent for sent, after in zip(rows, completed, strict=True))


def insert_refused(scored: ScoredRows, refused: Mapping[int, str]) -> ScoredRows:
    """Insert a row of NaN and a reason for each row that was rejected before scoring.

    Args:
        scored: results of the other rows, in order.
        refused: number of a rejected row in the request -> reason.
    """
    if not refused:
        return scored
    # ``scored.errors`` numbers only the scored rows, without the rejected ones.
    total = len(scored.rewards) + len(refused)
    rows = [row for row in range(total) if row not in refused]
    arrays: dict[str, Any] = {
        name: place_rows(values, rows, total)
        for name, values in vars(scored).items()
        if isinstance(values, np.ndarray)
    }
    errors = {**refused, **{rows[row]: reason for row, reason in scored.errors.items()}}
    comparisons = [
        {**pair, **{key: rows[int(pair[key])] for key in ("response_i", "response_j")}}
        for pair in scored.comparisons
    ]
    return replace(
        scored,
        **arrays,
        errors=dict(sorted(errors.items())),
        comparisons=comparisons,
        unscored=frozenset(rows[row] for row in scored.unscored),
        temporary=frozenset(rows[row] for row in scored.temporary),
    )


def check_num_rows(num_rows: int, config: FrontConfig) -> None:
    """Raise RequestError if a request has more rows than may ever be in flight."""
    if num_rows > config.max_queue_rows:
        raise RequestError(
            f"got {num_rows} rows in a request, wanted at most {config.max_queue_rows} "
            f"({config.section}.max_queue_rows). Send fewer rows per request",
            FailureKind.too_large,
        )
