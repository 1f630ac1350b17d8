"""Requests and replies, whichever protocol they come by; each file of this package is a protocol.

The client imports this, so nothing here needs pydantic: that is for ``base.py`` and the gateway.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import compress
from typing import Any

from nemo_aligner.contract.messages import Text
from nemo_aligner.contract.scorer import ScoredRows, StepRewards, place_rows

__all__ = ["ScoreRequest", "ScoredRows", "StepRewards", "TensorSpec", "place_rows"]


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
