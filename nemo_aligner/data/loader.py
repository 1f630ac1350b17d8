"""Which records a step trains on: a function of the step alone, which is all a resumed run needs.

The records form one endless stream, epoch after epoch, every epoch in an order of its own that
follows from ``(seed, epoch)``. Step k (from 0) takes records ``k * global_batch_size`` up to the
next multiple: every batch is full, and one may hold the end of an epoch and the start of the next.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from nemo_aligner.batch import PackedBatch
from nemo_aligner.data.datasets import TokenizedDataset
from nemo_aligner.data.packing import pack_records
from nemo_aligner.errors import ConfigError


class TrainLoader:
    """This data-parallel rank's share of every step."""

    def __init__(
        self,
        dataset: TokenizedDataset,
        global_batch_size: int,
        micro_batch_tokens: int,
        seed: int,
        dp_rank: int,
        dp_size: int,
    ) -> None:
        if global_batch_size < dp_size:
            raise ConfigError(
                f"model.global_batch_size: got {global_batch_size}, wanted at least {dp_size}, one "
                "record for every data-parallel rank"
            )
        self._dataset = dataset
        self._global_batch_size = global_batch_size
        self._micro_batch_tokens = micro_batch_tokens
        self._seed = seed
        self._dp_rank = dp_rank
        self._dp_size = dp_size

    def total_steps(self, max_epochs: int, max_steps: int | None = None) -> int:
        """Full batches in ``max_epochs`` epochs, at most ``max_steps``.

        Raises:
            ConfigError: not even one batch is full.
        """
        records = max_epochs * len(self._dataset)
        steps = records // self._global_batch_size
        if steps == 0:
            raise ConfigError(
                f"model.global_batch_size: got {self._global_batch_size}, wanted at most "
                f"{records}, the records of {max_epochs} epochs"
            )
        return steps if max_steps is None else min(steps, max_steps)

    def global_batch(self, step: int) -> list[int]:
        """The records of ``step`` over all ranks; the same on every rank and at any layout."""
        size = len(self._dataset)
        first = step * self._global_batch_size
        return [
            int(_epoch_order(size, self._seed, position // size)[position % size])
            for position in range(first, first + self._global_batch_size)
        ]

    def micro_batches(self, step: int) -> list[PackedBatch]:
        """This rank's packs of ``step``; ranks may differ in number, none has zero."""
        mine = self.global_batch(step)[self._dp_rank :: self._dp_size]
        return pack_records(self._dataset, mine, self._micro_batch_tokens)


def validation_batches(
    dataset: TokenizedDataset, micro_batch_tokens: int, dp_rank: int, dp_size: int
) -> list[PackedBatch]:
    """This rank's packs of every record once; empty on a rank beyond the last record."""
    mine = range(dp_rank, len(dataset), dp_size)
    return pack_records(dataset, mine, micro_batch_tokens)


@lru_cache(maxsize=4)
def _epoch_order(size: int, seed: int, epoch: int) -> np.ndarray:
    # RandomState and not default_rng: numpy promises that its stream never changes.
    return np.random.RandomState([seed % 2**32, seed // 2**32, epoch]).permutation(size)
