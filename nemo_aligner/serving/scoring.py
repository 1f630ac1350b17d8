"""The interface between the HTTP front and what scores: in this process, or upstream servers.

``ScoringService`` is what every protocol's route talks to. It has two implementations:

* ``LocalService`` (``reward.py``): batcher, executor and the ranks of this very server;
* ``UpstreamService`` (``upstream.py``): a client of other servers, for the gateway.

What does not depend on where the model is lives here: the limit of rows in flight, completed turns,
foreign chat templates, rows that were set aside before, and the drift of recent rewards.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from nemo_aligner.config.serving import FrontConfig
from nemo_aligner.contract.contract import ScoringContract
from nemo_aligner.contract.sample_frame import SampleFrame
from nemo_aligner.contract.turns import TurnEnd
from nemo_aligner.serving.backpressure import BackpressureLimit
from nemo_aligner.serving.failures import FailureKind, RequestError
from nemo_aligner.serving.protocols import ScoredRows, ScoreRequest, place_rows

# Advice to clients whose samples are written in another chat template.
FOREIGN_ADVICE = (
    "Send messages, which get the model's template, or write the texts with its template (the "
    "field template of /v1/contract)"
)


@dataclass(frozen=True)
class TemplateParts:
    """What the model's chat template writes at the end of a turn and around a sample.

    Either is None where the template has no such part.
    """

    turn_end: TurnEnd | None = None
    sample_frame: SampleFrame | None = None


class ScoringService(ABC):
    """Scores requests for the routes of an HTTP front; for one event loop.

    Attributes:
        contract: by which the newest rewards were made; None before any rewards, and for upstream
            servers that publish none.
        fingerprint: of the model that these rewards come from, likewise.
        recent: the last rewards, for their drift.
        limits: settings of the front, with the limits of a request.
    """

    def __init__(self, config: FrontConfig) -> None:
        self.limits = config
        self.contract: ScoringContract | None = None
        self.fingerprint: str | None = None
        self.recent = RecentRewards(config.drift_rows)
        self._completes_turns = config.complete_turns
        self._limit = BackpressureLimit(config.max_queue_rows, f"{config.section}.max_queue_rows")
        self._announced_turn_end = False

    @property
    def rows_in_flight(self) -> int:
        """Number of rows of requests that are not answered yet."""
        return self._limit.rows_in_flight

    def counting_failures(self) -> AbstractContextManager[None]:
        """Count a request as refused if a block fails; here nothing counts them."""
        return nullcontext()

    async def answer(
        self, request: ScoreRequest, sets_rows_aside: bool, is_probe: bool = False
    ) -> ScoredRows:
        """Score a request's rows.

        Args:
            request: its samples; rows that it has refused already get NaN and their reasons.
            sets_rows_aside: whether a row that cannot be scored gets NaN and its reason. Otherwise
                the request fails as a whole.
            is_probe: whether the rewards are nobody's: they belong neither to the recent ones nor
                to the statistics of shaping, and the request is not counted. The model's calls and
                their time are.

        Raises:
            RequestError: the request cannot be answered; ``row`` names the row that is at fault.
        """
        with self._limit.admit(len(request.texts or request.token_lists or ())):
            scored = await self._score(request, sets_rows_aside, is_probe)
        if not is_probe:
            self.recent.add(scored.rewards)
        return insert_refused(scored, request.refused)

    @abstractmethod
    async def _score(
        self, request: ScoreRequest, sets_rows_aside: bool, is_probe: bool
    ) -> ScoredRows:
        """``answer`` for the rows that the request has not refused already."""

    @abstractmethod
    async def template_parts(self) -> TemplateParts:
        """What the model's chat template writes around a sample.

        Raises:
            RequestError: no server says.
        """

    @abstractmethod
    async def read_contract(self) -> ScoringContract:
        """The contract as it is published at this moment.

        Raises:
            RequestError: no server answers, or it publishes none.
        """

    @abstractmethod
    async def find_contract(self) -> ScoringContract | None:
        """``read_contract``; None where the servers publish none, as NeMo-Aligner's.

        Raises:
            RequestError: no server answers, or only with another failure.
        """

    @abstractmethod
    async def probe(self) -> dict[str, str | None]:
        """Why each server gives no rewards at the moment; None for those that do."""

    @abstractmethod
    async def statistics(self) -> Mapping[str, Mapping[str, float] | None]:
        """What each server has counted since its start; None for those that do not answer."""

    async def start(self) -> None:
        """Begin what runs beside the requests, in the event loop of the front."""
        return

    async def close(self) -> None:
        """End what ``start`` has begun, once all requests are answered."""
        return

    async def complete_turns(self, request: ScoreRequest) -> tuple[ScoreRequest, int]:
        """Complete raw texts and token rows that end at an end of turn.

        The reward model's chat template may write more after the end of a turn than the policy's.

        Returns:
            The request, and how many of its rows were completed.

        Raises:
            RequestError: no server says what its template writes.
        """
        turn = (await self.template_parts()).turn_end if self._completes_turns else None
        if turn is None:
            return request, 0
        if not self._announced_turn_end:
            self._announced_turn_end = True
            print(
                f"Raw texts that end with {turn.end!r} are completed to {turn.end + turn.rest!r}, "
                "as the chat template has it (complete_turns)",
                flush=True,
            )
        if request.texts is not None:
            # A conversation gets its whole turn from the template.
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
            Their numbers in the whole request, and how each differs from a text in the template.

        Raises:
            RequestError: no server says what its template writes.
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
    return sum(new != old for old, new in zip(rows, completed, strict=True))


def insert_refused(scored: ScoredRows, refused: Mapping[int, str]) -> ScoredRows:
    """Put the rows that were refused before scoring among those that were scored."""
    if not refused:
        return scored
    # The scored rows are numbered from 0, without those that were refused before.
    total = len(scored.rewards) + len(refused)
    rows = [row for row in range(total) if row not in refused]
    arrays: dict[str, Any] = {
        name: place_rows(values, rows, total)
        for name, values in vars(scored).items()
        if isinstance(values, np.ndarray)
    }
    errors = {**refused, **{rows[row]: reason for row, reason in scored.errors.items()}}
    return replace(scored, **arrays, errors=dict(sorted(errors.items())))


def check_num_rows(request: ScoreRequest, config: FrontConfig) -> None:
    """Raise RequestError if a request has more rows than may ever be in flight."""
    if request.num_rows > config.max_queue_rows:
        raise RequestError(
            f"got {request.num_rows} rows in a request, wanted at most {config.max_queue_rows} "
            f"({config.section}.max_queue_rows). Send fewer at once",
            FailureKind.too_large,
        )


# Drift of recent rewards from those that the scoring contract was measured on.


@dataclass(frozen=True)
class AttributeDrift:
    """Mean and standard deviation of an attribute's last ``rows`` rewards.

    Against those of the contract, where it has them: ``mean_drift`` is how far the mean has moved,
    in the contract's standard deviations, and ``std_ratio`` the deviation over the contract's.
    """

    rows: int
    mean: float
    std: float
    mean_drift: float | None
    std_ratio: float | None


class RecentRewards:
    """The last rewards, at most ``most_rows`` of them; rows that have none do not count."""

    def __init__(self, most_rows: int) -> None:
        self._most_rows = most_rows
        self._kept = np.zeros((0, 0), dtype=np.float32)

    def add(self, rewards: np.ndarray) -> None:
        """``[N, A]`` more; of another number of attributes, they replace what was kept."""
        scored = rewards[np.isfinite(rewards).all(axis=1)]
        # The backends' model was changed for one with other attributes.
        if len(scored) and scored.shape[1] != self._kept.shape[1]:
            self._kept = np.zeros((0, scored.shape[1]), dtype=np.float32)
        if len(scored):
            self._kept = np.concatenate([self._kept, scored])[-self._most_rows :]

    def drift(self, contract: ScoringContract | None) -> list[AttributeDrift]:
        """Drift of each attribute; empty before any reward."""
        if not len(self._kept):
            return []
        kept = self._kept.astype(np.float64)
        means, stds = kept.mean(axis=0), kept.std(axis=0)
        return [
            AttributeDrift(
                len(kept), float(mean), float(std), *_against(contract, column, mean, std)
            )
            for column, (mean, std) in enumerate(zip(means, stds, strict=True))
        ]


def _against(
    contract: ScoringContract | None, column: int, mean: float, std: float
) -> tuple[float | None, float | None]:
    if contract is None or contract.reward_mean is None or contract.reward_std is None:
        return None, None
    usual = contract.reward_std[column]
    if usual <= 0:
        return None, None
    return float((mean - contract.reward_mean[column]) / usual), float(std / usual)
