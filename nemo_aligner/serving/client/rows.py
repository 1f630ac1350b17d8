"""One call: its requests side by side, their rewards in the caller's order, and refused rows."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from nemo_aligner.errors import ConfigError, DataError
from nemo_aligner.serving.client.pool import ServerPool, TooManyRowsError
from nemo_aligner.serving.client.server import RefusedError
from nemo_aligner.serving.client.split import PartialRequest
from nemo_aligner.serving.client.tensors import Tensors
from nemo_aligner.serving.wire.types import ScoreReply

logger = logging.getLogger(__name__)

OnError = Literal["raise", "nan"]
Split = Callable[[int], list[PartialRequest]]

_MOST_ROWS = 128  # of a request: what is refused or lost is sent again as a whole
_OUTPUTS = ("rewards", "raw_rewards", "deviation", "passed", "spread", "outputs")
_AT_FAULT = (400, 413, 422)  # statuses of a request that its sender can mend


@dataclass(frozen=True)
class ScoredRows:
    """``rewards`` ``[N, A]`` float32, NaN for each row in ``errors``, which has the reasons.

    ``exceeded`` ``[N]`` bool says which texts were cut to the model's ``seq_length``;
    ``contract_hash`` by what contract they were scored, None where no row was, or no server says.

    From a server that shapes its rewards also those of each model before, ``raw_rewards``
    ``[N, M * A]``; ``deviation`` ``[N, A]`` between models; and whether a reward ``passed`` the
    threshold, ``[N]`` 1, 0 or NaN. None where it does not say.

    From a model with K outputs for each attribute (``ordinal_bins``, ``quantiles``) also ``spread``
    ``[N, A]``, the uncertainty of the rewards, and the head's ``outputs`` ``[N, M * A * K]``.
    """

    rewards: np.ndarray
    errors: dict[int, str]
    exceeded: np.ndarray
    contract_hash: str | None
    raw_rewards: np.ndarray | None = None
    deviation: np.ndarray | None = None
    passed: np.ndarray | None = None
    spread: np.ndarray | None = None
    outputs: np.ndarray | None = None


def check_on_error(on_error: str) -> None:
    """Raises ConfigError: it is neither of the two ways."""
    if on_error not in ("raise", "nan"):
        raise ConfigError(f"on_error: got {on_error!r:.80}, wanted 'raise' or 'nan'")


class RowCollector:
    """Gathers the rewards of one call; ``on_error`` says what becomes of rows that are refused."""

    def __init__(self, pool: ServerPool, on_error: OnError) -> None:
        self._pool = pool
        self._sets_aside = on_error == "nan"
        self._outputs: dict[str, dict[int, np.ndarray]] = {name: {} for name in _OUTPUTS}
        self._errors: dict[int, str] = {}
        self._exceeded: set[int] = set()
        self._contract_hash: str | None = None

    async def collect(self, total: int, split: Split, columns: int | None) -> ScoredRows:
        """The rewards of ``total`` rows; ``split`` makes requests of at most so many rows.

        Raises:
            ServingError: no server answers, the model failed, or a row was refused that is not
                set aside.
        """
        if total:
            limit, servers = await self._pool.limit()
            size = min(limit, _MOST_ROWS, -(-total // servers))
            await _all_of(self._score(part) for part in split(size))
        self._tell(total)
        rewards = self._gathered("rewards", total)
        if rewards is None:
            rewards = np.full((total, columns or 1), np.nan, dtype=np.float32)
        return ScoredRows(
            rewards,
            dict(sorted(self._errors.items())),
            np.array([row in self._exceeded for row in range(total)], dtype=bool),
            self._contract_hash,
            *(self._gathered(name, total) for name in _OUTPUTS[1:]),
        )

    def _gathered(self, name: str, total: int) -> np.ndarray | None:
        """All rows of an output, NaN where there is none; None if no row has it."""
        rows = self._outputs[name]
        if not rows:
            return None
        shape = next(iter(rows.values())).shape
        gathered = np.full((total, *shape), np.nan, dtype=np.float32)
        for row, values in rows.items():
            gathered[row] = values
        return gathered

    def _tell(self, total: int) -> None:
        if self._exceeded:
            logger.warning(
                "%d of %d texts were cut to the model's seq_length", len(self._exceeded), total
            )
        if self._errors:
            row = min(self._errors)
            logger.warning(
                "%d of %d rows have no reward; row %d: %s",
                *(len(self._errors), total, row, self._errors[row]),
            )

    async def _score(self, part: PartialRequest) -> None:
        """Until each of its rows has a reward or is set aside: a request for each refused row."""
        while part.rows:
            try:
                reply = await self._pool.infer(encoded(part), len(part.rows))
            except TooManyRowsError as error:
                await _all_of(self._score(each) for each in part.chunks(error.limit))
                return
            except RefusedError as refusal:
                row = refusal.row
                if row is None or row >= len(part.rows):
                    await self._score_apart(part, refusal)
                    return
                part = self._without(part, row, refusal)
            else:
                self._keep(part, reply)
                return

    def _keep(self, part: PartialRequest, reply: ScoreReply) -> None:
        for name, rows in self._outputs.items():
            values = getattr(reply, name)
            if values is not None:
                rows.update(zip(part.rows, values, strict=True))
        self._exceeded.update(
            row for row, cut in zip(part.rows, reply.exceeded, strict=True) if cut
        )
        self._contract_hash = reply.contract_hash

    def _without(self, part: PartialRequest, place: int, refusal: RefusedError) -> PartialRequest:
        row = part.rows[place]
        # A reward that is not finite names a row, too, and is the model's fault, not the text's.
        if not self._sets_aside or refusal.status not in _AT_FAULT:
            raise refusal.of_row(row) from refusal
        self._errors[row] = refusal.reason
        return part.only([other for other in part.rows if other != row])

    async def _score_apart(self, part: PartialRequest, refusal: RefusedError) -> None:
        """What was refused without a row's number: find the rows by halves."""
        is_too_large = refusal.is_too_large and len(part.rows) > 1
        if not is_too_large and not (self._sets_aside and refusal.status in _AT_FAULT):
            raise refusal
        if len(part.rows) == 1:
            self._errors[part.rows[0]] = refusal.reason
            return
        await _all_of(self._score(half) for half in part.chunks(-(-len(part.rows) // 2)))
        # The same for each of several: it is not about a row.
        if all(self._errors.get(row) == refusal.reason for row in part.rows):
            raise refusal


def encoded(part: PartialRequest) -> Tensors:
    """The tensors of a request.

    Raises:
        RefusedError: one of its rows cannot be sent, by its place in the request.
    """
    try:
        return part.inputs
    except DataError as error:  # which says what row
        raise RefusedError("client", 400, str(error)) from error
    except (TypeError, ValueError):
        for place, row in enumerate(part.rows):
            try:
                _ = part.only([row]).inputs
            except (TypeError, ValueError) as error:
                text = f"row {place}: it cannot be sent: {error}"
                raise RefusedError("client", 400, text) from error
        raise


async def _all_of(works: Iterable[Coroutine[Any, Any, None]]) -> None:
    tasks: Sequence[asyncio.Task[None]] = [asyncio.ensure_future(work) for work in works]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:  # where one failed, nobody wants the others
            task.cancel()
