"""The gateway's service: requests are scored by upstream servers, within one limit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from nemo_aligner.config.serving import GatewayConfig
from nemo_aligner.contract.contract import ScoringContract
from nemo_aligner.contract.sample_frame import SampleFrame
from nemo_aligner.contract.turns import TurnEnd
from nemo_aligner.serving.client.pool import NoServerError
from nemo_aligner.serving.client.reward import OnError, RewardClient
from nemo_aligner.serving.engine.batcher import BackpressureLimit
from nemo_aligner.serving.failures import FailureKind, RefusedError, RequestError, public_failure
from nemo_aligner.serving.protocols import ScoredRows, ScoreRequest, place_rows
from nemo_aligner.utils.errors import ServingError, one_line

# When a backend comes back is unknown, so clients are asked to retry soon.
_AGAIN_IN_S = 1
# Advice to the senders of texts in another chat template.
FOREIGN_ADVICE = (
    "Send messages, which get the model's template, or write the texts with its template (the "
    "field template of /v1/contract)"
)


class UpstreamService:
    """Forwards requests to the backends of a client; for one event loop.

    ``contract`` is the backends', by which the newest rewards were made; None before any, and for
    backends that publish none. ``recent`` has the last rewards, for their drift.
    """

    def __init__(self, client: RewardClient, config: GatewayConfig) -> None:
        self.contract: ScoringContract | None = None
        self.recent = RecentRewards(config.drift_rows)
        self._has_none = False
        self._client = client
        self._limit = BackpressureLimit(config.max_queue_rows, "gateway.max_queue_rows")
        self._turn_end: TurnEnd | None = None
        self._knows_turn_end = not config.complete_turns  # nobody is asked, nothing completed
        self._sample_frame: SampleFrame | None = None
        self._knows_sample_frame = False

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
            raise public_failure(error) from error
        if not is_probe:
            self.recent.add(scored.rewards)
        return _with_refused(scored, request.refused)

    async def complete_turns(self, request: ScoreRequest) -> tuple[ScoreRequest, int]:
        """Complete raw texts and token rows that end at an end of turn; also count them.

        The reward model's template may write more behind it than the policy's own.

        Raises:
            RequestError: no backend says what its template writes.
        """
        # Once for all: it follows from the chat template, which the contract's hash covers. An
        # error leaves it to be asked with the next request.
        if not self._knows_turn_end:
            try:
                self._turn_end = await self._client.turn_end_async()
            except ServingError as error:
                raise unreachable(error) from error
            self._knows_turn_end = True
            if self._turn_end is not None:
                _say_completed(self._turn_end)
        turn = self._turn_end
        if turn is None:
            return request, 0
        if request.texts is not None:
            # A conversation gets its whole turn from the template.
            texts = [turn.complete(row) if isinstance(row, str) else row for row in request.texts]
            return replace(request, texts=texts), _count_changed(request.texts, texts)
        given = request.token_lists or []
        token_lists = [turn.complete_ids(row) for row in given]
        return replace(request, token_lists=token_lists), _count_changed(given, token_lists)

    async def find_foreign_rows(self, request: ScoreRequest) -> dict[int, str]:
        """Find raw texts and token rows that are not written in the backends' chat template.

        Returns:
            Their numbers in the whole request, and how each differs from a text in the template.

        Raises:
            RequestError: no backend says what its template writes.
        """
        rows: Sequence[Any] = request.texts or request.token_lists or ()
        raw = {
            number: row
            for number, row in zip(request.row_numbers, rows, strict=True)
            if request.texts is None or isinstance(row, str)
        }
        if raw and not self._knows_sample_frame:
            try:
                self._sample_frame = await self._client.sample_frame_async()
            except ServingError as error:
                raise unreachable(error) from error
            self._knows_sample_frame = True
        frame = self._sample_frame
        if frame is None:
            return {}
        find_fault = frame.find_fault_of_ids if request.texts is None else frame.find_fault
        faults = {number: find_fault(row) for number, row in raw.items()}
        return {number: fault for number, fault in faults.items() if fault is not None}

    async def say_missing_backends(self) -> None:
        """Warn of the backends that give no rewards; the gateway waits for them all the same."""
        try:
            states = await self._client.probe_async()
        except ServingError as error:
            print(
                f"Warning: the backends could not be checked: {one_line(error)}. "
                "GET /ready says which give rewards.",
                flush=True,
            )
            return
        for url, why in states.items():
            if why is not None:
                print(
                    f"Warning: {url}: {one_line(why)}; requests get a 503 while no backend answers "
                    "(GET /ready says which do)",
                    flush=True,
                )

    async def ask_contract(self) -> ScoringContract:
        """The backends' contract, as they publish it now.

        Raises:
            ServingError: none answers, or it publishes none.
        """
        self.contract = await self._client.contract_async()
        return self.contract

    async def find_contract(self) -> ScoringContract | None:
        """``ask_contract`` of backends that need not publish any, as NeMo-Aligner's do not: None.

        Raises:
            ServingError: none answers, or only with another failure.
        """
        try:
            return await self.ask_contract()
        except RefusedError as error:
            if not error.is_unknown_model:
                raise
            return None

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
        self._has_none = await self.find_contract() is None


def unreachable(error: ServingError) -> RequestError:
    """The failure of a request that no backend has answered."""
    text = f"no backend answers: {error.trouble}" if isinstance(error, NoServerError) else error
    return RequestError(one_line(text), FailureKind.unreachable, _AGAIN_IN_S)


def _say_completed(turn: TurnEnd) -> None:
    print(
        f"Raw texts that end with {turn.end!r} are completed to {turn.end + turn.rest!r}, as the "
        "chat template has it (gateway.complete_turns)",
        flush=True,
    )


def _count_changed(before: Sequence[object], after: Sequence[object]) -> int:
    return sum(new != old for old, new in zip(before, after, strict=True))


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
