"""Requests and replies, whichever protocol they come by; each file of this package is a protocol.

The client imports this, so nothing here needs pydantic: that is for ``base.py`` and the gateway.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import compress
from typing import Any

import numpy as np

from nemo_aligner.contract.messages import Text
from nemo_aligner.contract.steps import StepSpan


@dataclass(frozen=True)
class TensorSpec:
    """One named tensor; ``shape`` leaves out the batch dimension, -1 is any size."""

    name: str
    dtype: Any
    shape: tuple[int, ...]
    optional: bool = False


@dataclass(frozen=True)
class ScoreRequest:
    """One decoded request: B ``texts`` (raw, or a conversation's messages) or ``token_lists``.

    ``add_eos`` is what its sender takes the contract's rule to be, for each of the B. ``refused``
    has further rows that cannot be scored, by their numbers in the whole request, and why; the B
    are the rest, in order.
    """

    texts: list[Text] | None = None
    token_lists: list[list[int]] | None = None
    add_eos: list[bool] | None = None
    refused: Mapping[int, str] = field(default_factory=dict)

    @property
    def num_rows(self) -> int:
        """Rows of the whole request, those that are refused included."""
        return len(self.texts or self.token_lists or ()) + len(self.refused)

    @property
    def row_numbers(self) -> list[int]:
        """Numbers in the whole request of the rows that are not refused."""
        return [row for row in range(self.num_rows) if row not in self.refused]

    def without_rows(self, reasons: Mapping[int, str]) -> ScoreRequest:
        """The same request with further rows refused, by their numbers in the whole request."""
        keeps = [row not in reasons for row in self.row_numbers]

        def remaining(rows: Sequence[Any] | None) -> list[Any] | None:
            return None if rows is None else [*compress(rows, keeps)]

        return ScoreRequest(
            remaining(self.texts),
            remaining(self.token_lists),
            remaining(self.add_eos),
            {**self.refused, **reasons},
        )


@dataclass(frozen=True)
class StepRewards:
    """Rewards ``[S, A]`` float32 of a text's turns or steps, and where each stands in it.

    ``spans`` are empty for token ids, of which the last one alone is read.
    """

    rewards: np.ndarray
    spans: tuple[StepSpan, ...] = ()

    def to_json(self) -> str:
        """JSON of which ``from_json`` makes the same bits."""
        spans = [[span.message, span.start, span.end] for span in self.spans]
        return json.dumps({"rewards": self.rewards.tolist(), "spans": spans})

    @classmethod
    def from_json(cls, text: str) -> StepRewards:
        """The inverse of ``to_json``; KeyError, TypeError or ValueError where it is none."""
        found = json.loads(text)
        spans = tuple(StepSpan(*span) for span in found["spans"])
        return cls(np.array(found["rewards"], dtype=np.float32), spans)


@dataclass(frozen=True)
class ScoredRows:
    """Rewards of N texts: of one request on a server, or of a whole call of a client.

    ``rewards`` ``[N, A]`` float32, NaN for each row in ``errors``, which has the reasons.
    ``exceeded`` ``[N]`` bool says which texts were cut to the model's ``seq_length``;
    ``contract_hash`` by what contract they were scored, None where no row was, or no server says;
    ``model_fingerprint`` by what weights, None also where the rows are of several models.

    From a server that shapes its rewards also those of each model before, ``raw_rewards``
    ``[N, M * A]``; ``deviation`` ``[N, A]`` between models; and whether a reward ``passed`` the
    threshold, ``[N]`` 1, 0 or NaN. None where it does not say.

    From a model with K outputs for each attribute (``ordinal_bins``, ``quantiles``) also ``spread``
    ``[N, A]``, the uncertainty of the rewards, and the head's ``outputs`` ``[N, M * A * K]``.

    From a model with a reward for each turn or step also ``steps`` ``[N]``, a ``StepRewards`` or
    None for each row; the reward of a row is that of its last one, or what the contract's
    ``aggregate`` makes of all.

    From the gateway also ``foreign_template`` ``[N]`` bool: rows that are not written in the
    model's chat template.
    """

    rewards: np.ndarray
    errors: dict[int, str]
    exceeded: np.ndarray
    contract_hash: str | None = None
    model_fingerprint: str | None = None
    raw_rewards: np.ndarray | None = None
    deviation: np.ndarray | None = None
    passed: np.ndarray | None = None
    spread: np.ndarray | None = None
    outputs: np.ndarray | None = None
    steps: np.ndarray | None = None
    foreign_template: np.ndarray | None = None


def place_rows(values: np.ndarray, rows: Sequence[int], total: int) -> np.ndarray:
    """Put ``values`` at their ``rows`` of ``total``; the other rows are NaN, False or None."""
    nothing: Any = {"b": False, "O": None}.get(values.dtype.kind, np.nan)
    placed = np.full((total, *values.shape[1:]), nothing, dtype=values.dtype)
    placed[rows] = values
    return placed
