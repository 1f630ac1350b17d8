"""CriticLearner: the values of every token, and PPO steps on rollouts with exact global means."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from nemo_aligner.batch import LabelColumns, PackedBatch
from nemo_aligner.data.rollout import Rollout
from nemo_aligner.data.token_packing import TokenPacking
from nemo_aligner.errors import TrainingError
from nemo_aligner.models.step import forward_backward, gather_rewards, infer_values
from nemo_aligner.objectives.clipped_value import ClippedValueLoss
from nemo_aligner.parallel.device import current_device
from nemo_aligner.parallel.layout import ParallelLayout
from nemo_aligner.training.optimizer.optimizer import Optimizer

_ADVICE = "the weights are those from before it; look at its returns, or lower model.optim.lr"


@dataclass(frozen=True)
class ValueStep:
    """What became of one step of a critic.

    Attributes:
        loss: its mean over ``num_tokens``, on all ranks, before the update.
        grad_norm: before clipping; None where fp16 overflowed and the step was skipped.
    """

    step: int
    loss: float
    num_tokens: int
    grad_norm: float | None
    lr: float
    seconds: float


class CriticLearner:
    """A critic and its optimizer, spread over the ranks by ``layout``; every rank calls it alike.

    ``step`` counts the steps that are done, ``consumed_samples`` their sequences.
    """

    def __init__(
        self,
        model: Any,
        optimizer: Optimizer,
        layout: ParallelLayout,
        packing: TokenPacking,
        objective: ClippedValueLoss,
        global_batch_size: int,
    ) -> None:
        """``model`` is Megatron's data parallel wrapper of one that reads every token."""
        self._ddp = model
        self._layout = layout
        self._packing = packing
        self._objective = objective
        self._global_batch_size = global_batch_size
        self.model = model.module
        self.optimizer = optimizer
        self.step = 0
        self.consumed_samples = 0

    @property
    def tokens_per_call(self) -> int:
        """With how many tokens a call of ``values`` has a pack for every rank."""
        return self._packing.micro_batch_tokens * self._layout.dp * self._layout.pp

    def values(self, sequences: Sequence[np.ndarray]) -> list[np.ndarray]:
        """Of each sequence of token ids its values ``[tokens]`` float32, on every rank."""
        lengths = [len(sequence) for sequence in sequences]
        mine = self._packing.share(lengths, self._layout.dp)[self._layout.dp_rank]
        packs = self._packing.pack(sequences, mine)
        found = infer_values(self._ddp, packs, self._layout)
        gathered = gather_rewards(
            torch.cat(found) if found else None,
            packs,
            (sum(lengths), len(self._objective.weights)),
            self._layout,
        )
        merged = self._objective.merged(gathered).numpy()
        return np.split(merged, np.cumsum(lengths)[:-1])

    def train(self, rollout: Rollout) -> list[ValueStep]:
        """A step for each ``global_batch_size`` sequences, in order.

        Raises:
            TrainingError: the loss or the gradient of a step is not finite. The weights are those
                from before this step; the steps before it are done.
        """
        batches = rollout.in_batches(self._global_batch_size)
        steps = [self._train_step(batch) for batch in batches]
        # A rank that only answers would not come to the weights that the others wait for.
        self.optimizer.finish_update()
        return steps

    def _train_step(self, batch: Rollout) -> ValueStep:
        begun = time.perf_counter()
        packs = self._pack(batch)
        self._ddp.train()
        self._ddp.zero_grad_buffer()
        self.optimizer.zero_grad()
        values = forward_backward(self._ddp, packs, self._layout, self._objective.loss)
        total, count = self._sum_over_ranks(values, packs)
        if not math.isfinite(total):
            raise self._error("a loss that is not finite")
        lr = self.optimizer.lr
        update = self.optimizer.step()
        if not update.applied and not update.skipped:
            raise self._error(f"a gradient norm of {update.grad_norm}")
        self.step += 1
        self.consumed_samples += len(batch)
        return ValueStep(
            step=self.step,
            loss=total / count,
            num_tokens=count,
            grad_norm=update.grad_norm if update.applied else None,
            lr=lr,
            seconds=time.perf_counter() - begun,
        )

    def _pack(self, batch: Rollout) -> list[PackedBatch]:
        """This data parallel rank's packs: at least one, as all ranks meet in the backward pass."""
        lengths = batch.lengths()
        used = np.flatnonzero(lengths)
        shares = self._packing.share(lengths[used].tolist(), self._layout.dp)
        sequences = [batch.tokens[row, : lengths[row]] for row in used]
        labels = _labels(batch, used, lengths)
        mine = shares[self._layout.dp_rank]
        if mine:
            return self._packing.pack(sequences, mine, labels)
        nothing = LabelColumns.of(ClippedValueLoss.columns, torch.zeros(1, 3))
        return self._packing.pack([np.zeros(1, dtype=np.int64)], [0], nothing)

    def _sum_over_ranks(
        self, values: Tensor | None, packs: Sequence[PackedBatch]
    ) -> tuple[float, int]:
        """The loss's sum and count over all ranks, the same on each."""
        sums = torch.zeros(2, dtype=torch.float64, device=current_device())
        if values is not None and self._layout.tp_rank == 0:
            sizes = [len(pack.records) for pack in packs]
            for own, pack in zip(values.split(sizes), packs, strict=True):
                labels = pack.to(own.device).records
                sums += torch.stack(self._objective.loss(own.double(), labels)).double()
        if dist.get_world_size() > 1:
            dist.all_reduce(sums)
        total, count = sums.tolist()
        return total, int(count)

    def _error(self, what: str) -> TrainingError:
        return TrainingError(f"step {self.step + 1}: got {what}; {_ADVICE}")


def _labels(batch: Rollout, rows: np.ndarray, lengths: np.ndarray) -> LabelColumns:
    """Returns, earlier values and mask of every token that has a say, in the order of ``rows``."""
    columns = [batch.returns, batch.prev_values, batch.mask]
    values = [
        np.concatenate([column[row, : lengths[row]] for row in rows]).astype(np.float32)
        for column in columns
    ]
    return LabelColumns.of(ClippedValueLoss.columns, torch.from_numpy(np.stack(values, axis=1)))
