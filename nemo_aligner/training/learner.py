"""RewardLearner: one step of training, one pass of validation, with exact global means."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from nemo_aligner.batch import PackedBatch
from nemo_aligner.data.dataset import TokenizedDataset
from nemo_aligner.data.loader import Imbalance, TrainLoader, validation_batches
from nemo_aligner.data.training_data import TrainingData
from nemo_aligner.metrics.by_source import by_source
from nemo_aligner.models.step import forward_backward, gather_rewards, infer, record_ids_of
from nemo_aligner.parallel.device import current_device
from nemo_aligner.parallel.layout import ParallelLayout
from nemo_aligner.training.finite import (
    StepRecords,
    check_rewards,
    check_validation,
    gradient_error,
)
from nemo_aligner.training.objective import Objective
from nemo_aligner.training.optimizer import Optimizer, Update


class RewardLearner:
    """A reward model, its optimizer and its data, spread over the ranks by ``layout``."""

    def __init__(
        self,
        model: Any,
        optimizer: Optimizer,
        objective: Objective,
        data: TrainingData,
        loader: TrainLoader,
        layout: ParallelLayout,
        micro_batch_tokens: int,
        pair_cost: float = 0.0,
    ) -> None:
        self._ddp = model
        self._loader = loader
        self._layout = layout
        self._micro_batch_tokens = micro_batch_tokens
        self._pair_cost = pair_cost
        self._attributes = len(objective.attributes)
        self.objective = objective
        self.model = model.module
        self.optimizer = optimizer
        self.data = data

    def imbalance(self, steps: range) -> Imbalance:
        """How evenly the work of ``steps`` falls on ranks and micro-batches."""
        return self._loader.imbalance(steps)

    def train_step(self, step: int) -> dict[str, float]:
        """Train on the batch of ``step``, counted from 0; metrics of the batch before the update.

        A step whose gradient overflowed fp16 is skipped, and has no ``grad_norm``.

        Raises:
            TrainingError: a reward, the loss or the gradient is not finite; the weights are those
                from before the step.
        """
        record_ids = self._loader.global_batch(step)
        batches = self._loader.micro_batches(step)
        self._ddp.train()
        self._ddp.zero_grad_buffer()
        self.optimizer.zero_grad()
        mine = forward_backward(self._ddp, batches, self._layout, self.objective.loss)
        places = _places(batches, record_ids, self._loader.share(step))
        dataset, loss_scale, lr = self.data.train, self.optimizer.loss_scale, self.optimizer.lr
        rewards = self._gather(mine, places, len(record_ids), dataset)
        records = StepRecords(
            step + 1, record_ids, dataset, self._layout, current_device(), loss_scale is not None
        )
        check_rewards(records, rewards, self.objective.loss)
        metrics = self.objective.step_metrics(rewards, dataset.centred_labels(record_ids))
        metrics |= self._update(records, loss_scale)
        tokens = sum(dataset.num_tokens(record) for record in record_ids)
        return {**metrics, "lr": lr, "tokens": float(tokens)}

    def _update(self, records: StepRecords, loss_scale: float | None) -> dict[str, float]:
        """Step the optimizer: the gradient's norm, and what ``loss_scale`` made of the step."""
        update = self.optimizer.step()
        if not update.applied and not update.skipped:
            what = _wrong_gradient(update, loss_scale)
            raise gradient_error(records, self._ddp, self.optimizer, self.objective.loss, what)
        norm = {"grad_norm": update.grad_norm} if update.applied else {}
        if loss_scale is None:
            return norm
        return {
            **norm,
            "loss_scale": loss_scale,
            "skipped": float(update.skipped),
            "skipped_steps": float(self.optimizer.skipped_steps),
        }

    def _gather(
        self, mine: Tensor | None, places: Tensor, records: int, dataset: TokenizedDataset
    ) -> Tensor:
        shape = (records, dataset.sequences_per_record, self._attributes)
        return gather_rewards(mine, places, shape, self._layout)

    def validate(self) -> dict[str, float]:
        """Metrics of every validation set, over each record once, named ``set/metric``."""
        # A rank without records would not come to the weights that the others wait for.
        self.optimizer.finish_update()
        return {
            f"{dataset.name}/{name}": value
            for dataset in self.data.validation
            for name, value in self._validate_on(dataset).items()
        }

    def _validate_on(self, dataset: TokenizedDataset) -> dict[str, float]:
        layout = self._layout
        batches = validation_batches(
            dataset, self._micro_batch_tokens, layout.dp_rank, layout.dp, self._pair_cost
        )
        mine = infer(self._ddp, batches, layout)
        rewards = self._gather(mine, record_ids_of(batches), len(dataset), dataset)
        check_validation(dataset, rewards)
        return describe_rewards(self.objective, dataset, rewards)


def describe_rewards(
    objective: Objective, dataset: TokenizedDataset, rewards: Tensor
) -> dict[str, float]:
    """The objective's report on a whole data set and on each of its sources; the rewards' spread.

    Args:
        rewards: ``[N, sequences, A]`` of every record once, as the head gives them.
    """

    def report(records: Sequence[int]) -> dict[str, float]:
        places = torch.as_tensor(records, dtype=torch.int64)
        labels = dataset.centred_labels(records)
        return objective.report(rewards[places], labels, dataset.reply_lengths[places])

    return {
        **report(range(len(dataset))),
        **by_source(dataset.sources, report),
        **_spread(objective, dataset, rewards),
    }


def _spread(objective: Objective, dataset: TokenizedDataset, rewards: Tensor) -> dict[str, float]:
    """Mean and deviation of every attribute, offsets included, for the scoring contract."""
    flat = rewards.flatten(0, 1).double()
    if dataset.label_means:
        flat = flat + torch.tensor(dataset.label_means, dtype=torch.float64)
    means, deviations = flat.mean(0).tolist(), flat.std(0, correction=0).tolist()
    spread: dict[str, float] = {}
    for name, mean, deviation in zip(objective.attributes, means, deviations, strict=True):
        spread |= {f"reward_mean/{name}": mean, f"reward_std/{name}": deviation}
    return spread


def validation_metric_names(
    objective: Objective, datasets: Sequence[TokenizedDataset]
) -> list[str]:
    """Every name by which checkpoints may be chosen, without a model."""
    names = []
    for dataset in datasets:
        rewards = torch.zeros(len(dataset), dataset.sequences_per_record, len(objective.attributes))
        names += [
            f"{dataset.name}/{name}" for name in describe_rewards(objective, dataset, rewards)
        ]
    return names


def _places(
    batches: Sequence[PackedBatch], record_ids: Sequence[int], share: Sequence[int]
) -> Tensor:
    """The place in the global batch of every record in this rank's ``batches``."""
    # A record may be in a batch twice, at the end of an epoch and in the next.
    free: dict[int, deque[int]] = defaultdict(deque)
    for place in share:
        free[record_ids[place]].append(place)
    order = record_ids_of(batches).tolist()
    return torch.tensor([free[record].popleft() for record in order])


def _wrong_gradient(update: Update, loss_scale: float | None) -> str:
    if loss_scale is None:
        return f"a gradient norm of {update.grad_norm}"
    return f"a gradient that overflows fp16 at a loss scale of {loss_scale:g}"
