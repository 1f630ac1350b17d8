"""Which records a step trains on: a function of the step alone, which is all a resumed run needs.

The records form one endless stream, epoch after epoch, every epoch in an order of its own that
follows from ``(seed, epoch)`` and the weights of files, if there are any (``mixture.py``). Step k
(from 0) takes records ``k * global_batch_size`` up to the next multiple: every batch is full, and
one may hold the end of an epoch and the start of the next.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from statistics import fmean

from nemo_aligner.batch import PackedBatch
from nemo_aligner.data.dataset import TokenizedDataset
from nemo_aligner.data.mixture import weighted_order
from nemo_aligner.data.packing import pack_records, record_cost, share_out
from nemo_aligner.errors import ConfigError


@dataclass(frozen=True)
class StepPlan:
    """What one step trains on, and who computes which part of it.

    Attributes:
        record_ids: of the global batch, in its order; the same on every rank and at any layout.
        owners: of each of them the data parallel rank that computes it; no rank has none.
        packs: of this rank; ranks may differ in number. Their rows are those of the global batch's
            rewards.
    """

    record_ids: list[int]
    owners: list[int]
    packs: list[PackedBatch]


class TrainLoader:
    """The plan of every step, with ranks as even as ``packing.record_cost`` tells.

    The step to come is packed while the present one is computed.
    """

    def __init__(
        self,
        dataset: TokenizedDataset,
        global_batch_size: int,
        micro_batch_tokens: int,
        seed: int,
        dp_rank: int,
        dp_size: int,
        query_key_cost: float = 0.0,
        weights: Sequence[float] = (),
    ) -> None:
        if global_batch_size < dp_size:
            raise ConfigError(
                f"model.global_batch_size: got {global_batch_size}, wanted at least {dp_size}, one "
                "record for every data-parallel rank"
            )
        self._dataset = dataset
        self._global_batch_size = global_batch_size
        self._micro_batch_tokens = micro_batch_tokens
        sizes = dataset.file_sizes if weights else (len(dataset),)
        self._order = weighted_order(sizes, seed, weights)
        self._dp_rank = dp_rank
        self._dp_size = dp_size
        self._query_key_cost = query_key_cost
        self._packer = ThreadPoolExecutor(max_workers=1, thread_name_prefix="packs")
        self._ahead: tuple[int, Future[StepPlan]] | None = None

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
        first = step * self._global_batch_size
        return [self._order.record(first + place) for place in range(self._global_batch_size)]

    def plan(self, step: int) -> StepPlan:
        """This rank's view of ``step``, counted from 0."""
        ahead, self._ahead = self._ahead, None
        plan = ahead[1].result() if ahead and ahead[0] == step else self._plan(step)
        self._ahead = step + 1, self._packer.submit(self._plan, step + 1)
        return plan

    def imbalance(self, steps: range) -> Imbalance:
        """How far the work of ``steps`` is from even."""
        ranks, packs = [], []
        for step in steps:
            batch = self.global_batch(step)
            rank_shares = self._rank_shares(batch)
            work = [sum(self._cost(batch[index]) for index in indices) for indices in rank_shares]
            ranks.append(_largest_to_mean(work))
            for indices in rank_shares:
                of_rank = self._pack(batch, indices)
                work = [sum(map(self._cost, pack.records.ids.tolist())) for pack in of_rank]
                packs.append(_largest_to_mean(work))
        return Imbalance(fmean(ranks), fmean(packs))

    def _plan(self, step: int) -> StepPlan:
        batch = self.global_batch(step)
        rank_shares = self._rank_shares(batch)
        owner_of = {index: rank for rank, indices in enumerate(rank_shares) for index in indices}
        return StepPlan(
            record_ids=batch,
            owners=[owner_of[index] for index in range(len(batch))],
            packs=self._pack(batch, rank_shares[self._dp_rank]),
        )

    def _rank_shares(self, batch: Sequence[int]) -> list[list[int]]:
        """Of every rank the indices into ``batch`` of what it computes."""
        return share_out([self._cost(record) for record in batch], self._dp_size)

    def _pack(self, batch: Sequence[int], indices: Sequence[int]) -> list[PackedBatch]:
        bounds = self._dataset.records.select(batch).bounds.tolist()
        return pack_records(
            self._dataset,
            [batch[index] for index in indices],
            self._micro_batch_tokens,
            self._query_key_cost,
            [bounds[index] for index in indices],
        )

    def _cost(self, record: int) -> float:
        return record_cost(self._dataset, record, self._query_key_cost)


@dataclass(frozen=True)
class Imbalance:
    """The largest part of a step over the mean one, on average over steps; 1 is even.

    Attributes:
        ranks: of a step's work over the data parallel ranks.
        micro_batches: of a rank's work over its micro-batches.
    """

    ranks: float
    micro_batches: float


def _largest_to_mean(work: Sequence[float]) -> float:
    return max(work) / fmean(work)


def validation_batches(
    dataset: TokenizedDataset,
    micro_batch_tokens: int,
    dp_rank: int,
    dp_size: int,
    query_key_cost: float = 0.0,
) -> list[PackedBatch]:
    """This rank's packs of every record once; empty on a rank beyond the last record.

    Their rows are those of the data set's rewards.
    """
    costs = [record_cost(dataset, record, query_key_cost) for record in range(len(dataset))]
    mine = share_out(costs, dp_size)[dp_rank]
    bounds = dataset.records.bounds.tolist()
    first_rows = [bounds[record] for record in mine]
    return pack_records(dataset, mine, micro_batch_tokens, query_key_cost, first_rows)
