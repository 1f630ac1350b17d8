"""Which records a step trains on: a function of the step alone, which is all a resumed run needs.

The records form one endless stream, epoch after epoch, every epoch in an order of its own that
follows from ``(seed, epoch)``. Step k (from 0) takes records ``k * global_batch_size`` up to the
next multiple: every batch is full, and one may hold the end of an epoch and the start of the next.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import lru_cache
from statistics import fmean

import numpy as np

from nemo_aligner.batch import PackedBatch
from nemo_aligner.data.dataset import TokenizedDataset
from nemo_aligner.data.packing import pack_records, record_cost, share_out
from nemo_aligner.errors import ConfigError


class TrainLoader:
    """This data-parallel rank's share of every step, as even as ``packing.record_cost`` tells.

    The packs of the step to come are made while the present one is computed.
    """

    def __init__(
        self,
        dataset: TokenizedDataset,
        global_batch_size: int,
        micro_batch_tokens: int,
        seed: int,
        dp_rank: int,
        dp_size: int,
        pair_cost: float = 0.0,
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
        self._pair_cost = pair_cost
        # Of the present step and the one that is packed ahead.
        self._shares = lru_cache(maxsize=2)(self._share_out)
        self._packer = ThreadPoolExecutor(max_workers=1, thread_name_prefix="packs")
        self._ahead: tuple[int, Future[list[PackedBatch]]] | None = None

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

    def share(self, step: int) -> list[int]:
        """The places in ``global_batch(step)`` of this rank's records; no rank has none."""
        return self._shares(step)[self._dp_rank]

    def micro_batches(self, step: int) -> list[PackedBatch]:
        """This rank's packs of ``step``; ranks may differ in number, none has zero."""
        ahead, self._ahead = self._ahead, None
        packs = ahead[1].result() if ahead and ahead[0] == step else self._pack(step)
        self._ahead = step + 1, self._packer.submit(self._pack, step + 1)
        return packs

    def imbalance(self, steps: range) -> Imbalance:
        """How far the work of ``steps`` is from even."""
        ranks, packs = [], []
        for step in steps:
            batch = self.global_batch(step)
            shares = [[batch[place] for place in share] for share in self._shares(step)]
            ranks.append(_largest_to_mean([self._work(share) for share in shares]))
            packs += [
                _largest_to_mean(
                    [self._work(pack.record_ids.tolist()) for pack in self._packs_of(share)]
                )
                for share in shares
            ]
        return Imbalance(fmean(ranks), fmean(packs))

    def _pack(self, step: int) -> list[PackedBatch]:
        batch = self.global_batch(step)
        return self._packs_of([batch[place] for place in self.share(step)])

    def _packs_of(self, record_ids: Sequence[int]) -> list[PackedBatch]:
        return pack_records(self._dataset, record_ids, self._micro_batch_tokens, self._pair_cost)

    def _share_out(self, step: int) -> list[list[int]]:
        costs = [
            record_cost(self._dataset, record, self._pair_cost)
            for record in self.global_batch(step)
        ]
        return share_out(costs, self._dp_size)

    def _work(self, record_ids: Sequence[int]) -> float:
        return sum(record_cost(self._dataset, record, self._pair_cost) for record in record_ids)


@dataclass(frozen=True)
class Imbalance:
    """The largest share of a step over the mean one, on average over steps; 1 is even.

    Attributes:
        ranks: of a step's work over the data parallel ranks.
        micro_batches: of a rank's work over its micro-batches.
    """

    ranks: float
    micro_batches: float

    def __str__(self) -> str:
        return (
            f"the largest share of a step is {self.ranks:.2f} of the mean over ranks, "
            f"{self.micro_batches:.2f} over micro-batches"
        )


def _largest_to_mean(work: Sequence[float]) -> float:
    return max(work) / fmean(work)


def validation_batches(
    dataset: TokenizedDataset,
    micro_batch_tokens: int,
    dp_rank: int,
    dp_size: int,
    pair_cost: float = 0.0,
) -> list[PackedBatch]:
    """This rank's packs of every record once; empty on a rank beyond the last record."""
    costs = [record_cost(dataset, record, pair_cost) for record in range(len(dataset))]
    mine = share_out(costs, dp_size)[dp_rank]
    return pack_records(dataset, mine, micro_batch_tokens, pair_cost)


@lru_cache(maxsize=4)
def _epoch_order(size: int, seed: int, epoch: int) -> np.ndarray:
    # RandomState and not default_rng: numpy promises that its stream never changes.
    return np.random.RandomState([seed % 2**32, seed // 2**32, epoch]).permutation(size)
