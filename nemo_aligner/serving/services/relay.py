"""Scoring by other servers: let a request in, have a backend score it, say why it did not."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import fields
from typing import Protocol

from nemo_aligner.errors import ServingError, one_line
from nemo_aligner.serving.admission import Admission, BusyError
from nemo_aligner.serving.client import RefusedError, ScoredRows
from nemo_aligner.serving.client.rows import OnError
from nemo_aligner.serving.drift import RecentRewards
from nemo_aligner.serving.wire.types import Failure, FailureKind, ScoreReply, ScoreRequest
from nemo_aligner.text.contract import ScoringContract
from nemo_aligner.text.messages import Text

logger = logging.getLogger(__name__)

_KINDS = {413: FailureKind.too_large, 422: FailureKind.bad_request, 400: FailureKind.bad_request}
# There is no telling when a backend comes back; who asks in a second learns soon.
_AGAIN_IN_S = 1


class AsyncRewardClient(Protocol):
    """What this needs of a ``RewardClient``."""

    async def score_rows_async(
        self, texts: list[Text], *, on_error: OnError = "nan"
    ) -> ScoredRows: ...

    async def score_token_rows_async(
        self, token_lists: list[list[int]], *, on_error: OnError = "nan"
    ) -> ScoredRows: ...

    async def contract_async(self) -> ScoringContract: ...


class RelayService:
    """Hands requests on to the backends of a client; for one event loop."""

    def __init__(self, client: AsyncRewardClient, max_queue_rows: int, drift_rows: int) -> None:
        self.contract: ScoringContract | None = None
        self.recent = RecentRewards(drift_rows)
        self._has_none = False
        self._client = client
        self._admission = Admission(max_queue_rows, "gateway.max_queue_rows")

    @property
    def rows_inside(self) -> int:
        """Rows of requests that are not answered yet."""
        return self._admission.inside

    async def answer(
        self, request: ScoreRequest, sets_rows_aside: bool, is_probe: bool = False
    ) -> tuple[ScoreReply, Mapping[int, str]] | Failure:
        """The rewards of a request's rows, and why some have none (NaN).

        Unless ``sets_rows_aside``, a row that is refused is a failure of the whole request. The
        rewards of a probe are nobody's, and not among the recent ones.
        """
        try:
            with self._admission.of(len(request.texts or request.token_lists or ())):
                scored = await self._score(request, "nan" if sets_rows_aside else "raise")
                await self._know_contract(scored.contract_hash)
        except BusyError as error:
            return Failure(str(error), FailureKind.busy, error.retry_after_s)
        except RefusedError as error:
            kind = _KINDS.get(error.status, FailureKind.internal)
            row = error.row if kind is FailureKind.bad_request else None
            return Failure(one_line(error.text), kind, row=row)
        except ServingError as error:
            return Failure(one_line(error), FailureKind.unreachable, _AGAIN_IN_S)
        except Exception as error:
            logger.exception("a request could not be answered")
            return Failure(f"internal error: {type(error).__name__}", FailureKind.internal)
        if not is_probe:
            self.recent.add(scored.rewards)
        names = [each.name for each in fields(ScoreReply)]
        return ScoreReply(**{name: getattr(scored, name) for name in names}), scored.errors

    async def ask_contract(self) -> ScoringContract:
        """The backends' contract, as they publish it now.

        Raises:
            ServingError: none answers, or it publishes none.
        """
        self.contract = await self._client.contract_async()
        return self.contract

    async def _score(self, request: ScoreRequest, on_error: OnError) -> ScoredRows:
        if request.texts is not None:
            return await self._client.score_rows_async(request.texts, on_error=on_error)
        token_lists = request.token_lists or []
        return await self._client.score_token_rows_async(token_lists, on_error=on_error)

    async def _know_contract(self, contract_hash: str | None) -> None:
        """For the names and weights of attributes; a server of NeMo-Aligner has no contract."""
        if self.contract is not None and contract_hash in (None, self.contract.hash):
            return
        if self._has_none and contract_hash is None:
            return
        try:
            await self.ask_contract()
        except RefusedError:
            self._has_none = True
