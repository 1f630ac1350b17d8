"""``Row``, one sample in the queue: its token ids, and the positions at which rewards are read.

Rows pass from requests through the batcher to every rank. The result of each row is one array.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, slots=True)
class Row:
    """One sample to compute.

    Attributes:
        ids: ``[tokens]`` int64 token ids, already checked.
        reads: positions in ``ids`` at which the head computes rewards, ascending; the last one is
            the last token. Empty if there is only the reward of the whole sample, at the last
            token.
    """

    ids: np.ndarray
    reads: tuple[int, ...] = ()

    @classmethod
    def of(cls, token_ids: Sequence[int], reads: Sequence[int] | None = None) -> Row:
        """Create a row from a list or array of ``token_ids``.

        ``reads`` are the positions at which the head computes rewards; None or empty means only the
        last token.
        """
        return cls(np.asarray(token_ids, dtype=np.int64), tuple(reads or ()))

    @property
    def positions(self) -> tuple[int, ...]:
        """The positions at which the head computes rewards.

        Only the last token if ``reads`` is empty.
        """
        return self.reads or (len(self.ids) - 1,)
