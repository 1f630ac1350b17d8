"""A row of the queue: the token ids of one sample, and the positions that its rewards are read at.

Rows go from the requests through the batcher to every rank, and come back as an array each.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, slots=True)
class Row:
    """One sample to compute.

    Attributes:
        ids: ``[tokens]`` int64 token ids, which were checked.
        reads: positions in ``ids`` that the head reads, ascending; the last one is that of the last
            id. Empty for one reward of the whole sample.
    """

    ids: np.ndarray
    reads: tuple[int, ...] = ()

    @classmethod
    def of(cls, token_ids: Sequence[int], reads: Sequence[int] | None = None) -> Row:
        """A row of ids in any sequence."""
        return cls(np.asarray(token_ids, dtype=np.int64), tuple(reads or ()))

    @property
    def positions(self) -> tuple[int, ...]:
        """Positions that a model with a reward for each turn or step reads."""
        return self.reads or (len(self.ids) - 1,)
