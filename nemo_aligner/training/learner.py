"""RewardLearner: one step of training, one pass of validation, with exact global means."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from nemo_aligner.batch import LabelColumns, PackedBatch, Records
from nemo_aligner.console import Watch, unwatched
from nemo_aligner.data.dataset import TokenizedDataset
from nemo_aligner.data.loader import Imbalance, TrainLoader, validation_batches
from nemo_aligner.data.packing import measure_record
from nemo_aligner.data.training_data import TrainingData
from nemo_aligner.models.step import count_parts, forward_backward, gather_rewards, infer_in_parts
from nemo_aligner.models.trainable import unwrap_after_training
from nemo_aligner.objectives.base import (
    Objective,
    count_outputs,
    readout_of,
    rewards_of,
    start_of_learned,
)
from nemo_aligner.objectives.measure import measure_set, measure_step
from nemo_aligner.parallel.device import current_device
from nemo_aligner.parallel.layout import ParallelLayout
from nemo_aligner.planning.cost import Packs
from nemo_aligner.training.finite import (
    StepRecords,
    check_rewards,
    check_validation,
    gradient_error,
)
from nemo_aligner.training.optimizer.optimizer import Optimizer, Update


class RewardLearner:
    """A reward model, its optimizer and its data, spread over the ranks by ``layout``.

    ``count_flops`` says what a step on all of these packs takes, over all ranks; None: nobody asks.
    ``keep_heldout`` is called in every validation with a set and its ``[S, A]`` rewards, label
    means added; by default nothing is done with them.
    """

    keep_heldout: Callable[[TokenizedDataset, Tensor], None]

    def __init__(
        self,
        model: Any,
        optimizer: Optimizer,
        data: TrainingData,
        loader: TrainLoader,
        layout: ParallelLayout,
        micro_batch_tokens: int,
        query_key_cost: float = 0.0,
        count_flops: Callable[[Packs], float] | None = None,
    ) -> None:
        self._ddp = model
        self._count_flops = count_flops
        self._loader = loader
        self._layout = layout
        self._micro_batch_tokens = micro_batch_tokens
        self._query_key_cost = query_key_cost
        self.keep_heldout = _forget
        self.objective = data.objective
        self.model = model.module
        self.optimizer = optimizer
        self.data = data

    def release(self) -> None:
        """Let go of the model and its gradients; nothing can be trained or measured afterwards."""
        unwrap_after_training(self._ddp)

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
        plan = self._loader.plan(step)
        self._ddp.train()
        if self.model.lora_dropout is not None:
            self.model.lora_dropout.step = step
        self._ddp.zero_grad_buffer()
        self.optimizer.zero_grad()
        mine = forward_backward(self._ddp, plan.packs, self._layout, self.objective.loss)
        dataset, loss_scale, lr = self.data.train, self.optimizer.loss_scale, self.optimizer.lr
        done = StepRecords(
            step=step + 1,
            record_ids=plan.record_ids,
            owners=plan.owners,
            dataset=dataset,
            layout=self._layout,
            device=current_device(),
            is_fp16=loss_scale is not None,
        )
        rewards = self._gather(mine, plan.packs, done.records)
        check_rewards(done, rewards, self.objective.loss)
        metrics = measure_step(self.objective, rewards, done.records)
        metrics |= self._update(done, loss_scale)
        tokens = sum(dataset.num_tokens(record) for record in plan.record_ids)
        if self._count_flops is not None:
            metrics["flops"] = self._count_flops(as_one_pack(dataset, plan.record_ids))
        return {**metrics, "lr": lr, "tokens": float(tokens)}

    def _update(self, done: StepRecords, loss_scale: float | None) -> dict[str, float]:
        """Step the optimizer: the gradient's norm, and what ``loss_scale`` made of the step."""
        update = self.optimizer.step()
        if not update.applied and not update.skipped:
            what = _wrong_gradient(update, loss_scale)
            raise gradient_error(done, self._ddp, self.optimizer, self.objective.loss, what)
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
        self, mine: Tensor | None, batches: Sequence[PackedBatch], records: Records
    ) -> Tensor:
        shape = (records.num_rewards, count_outputs(self.objective))
        return gather_rewards(mine, batches, shape, self._layout)

    def validate(self, watch: Watch = unwatched) -> dict[str, float]:
        """Metrics of every validation set, over each record once, named ``set/metric``."""
        return self.measure(self.data.validation, watch)

    def measure(
        self, sets: Sequence[TokenizedDataset], watch: Watch = unwatched
    ) -> dict[str, float]:
        """Metrics of each of these sets, over each record once, named ``set/metric``."""
        # A rank without records would not come to the weights that the others wait for.
        self.optimizer.finish_update()
        done, total = 0, sum(map(len, sets))
        found: dict[str, float] = {}
        watch(0, total)
        for dataset in sets:
            shown = partial(_show_share, watch, done, len(dataset), total)
            metrics = self._measure_on(dataset, shown)
            found |= {f"{dataset.name}/{name}": value for name, value in metrics.items()}
            done += len(dataset)
        return found

    def _measure_on(
        self, dataset: TokenizedDataset, after_part: Callable[[float], None]
    ) -> dict[str, float]:
        layout, budget = self._layout, self._micro_batch_tokens
        batches = validation_batches(
            dataset, budget, layout.dp_rank, layout.dp, self._query_key_cost
        )
        parts = count_parts(dataset.total_tokens, budget, layout)
        mine = infer_in_parts(self._ddp, batches, layout, parts, after_part)
        rewards = self._gather(mine, batches, dataset.records)
        check_validation(dataset, rewards)
        self.keep_heldout(dataset, whole_rewards(self.objective, dataset.records.labels, rewards))
        return describe_rewards(self.objective, dataset, rewards)


def _forget(dataset: TokenizedDataset, rewards: Tensor) -> None:
    """A ``keep_heldout`` for where nobody reads them."""


def as_one_pack(dataset: TokenizedDataset, record_ids: Sequence[int]) -> Packs:
    """All that is computed of these records, whatever packs they are in."""
    sizes = [measure_record(dataset, record) for record in record_ids]
    tokens, sequences, query_keys = (sum(each) for each in zip(*sizes, strict=True))
    return Packs(tokens, sequences, keys=query_keys / tokens)


def _show_share(watch: Watch, before: int, size: int, total: int, share: float) -> None:
    watch(before + round(share * size), total)


def describe_rewards(
    objective: Objective, dataset: TokenizedDataset, rewards: Tensor
) -> dict[str, float]:
    """The objective's report on a whole data set and on each of its sources; the rewards' spread.

    Args:
        rewards: ``[S, outputs]`` of every record once, as the head gives them.
    """
    return {
        **measure_set(objective, rewards, dataset.records, dataset.reply_lengths, dataset.sources),
        **_spread(objective, dataset.records.labels, rewards),
    }


def whole_rewards(objective: Objective, labels: LabelColumns, outputs: Tensor) -> Tensor:
    """``[S, A]`` float64 of a head's ``outputs``, what labels were centred on added."""
    means = dict(zip(labels.names, labels.means, strict=True))
    offsets = [means.get(name) or 0.0 for name in objective.attributes]
    learned = len(start_of_learned(objective))
    of_texts = outputs[:, : outputs.size(1) - learned]
    read = rewards_of(readout_of(objective), of_texts)
    return read.double() + torch.tensor(offsets, dtype=torch.float64)


def _spread(objective: Objective, labels: LabelColumns, rewards: Tensor) -> dict[str, float]:
    """Mean and deviation of every attribute, offsets included, for the scoring contract."""
    whole = whole_rewards(objective, labels, rewards)
    averages, deviations = whole.mean(0).tolist(), whole.std(0, correction=0).tolist()
    spread: dict[str, float] = {}
    for name, mean, deviation in zip(objective.attributes, averages, deviations, strict=True):
        spread |= {f"reward_mean/{name}": mean, f"reward_std/{name}": deviation}
    return spread


def validation_metric_names(
    objective: Objective, datasets: Sequence[TokenizedDataset]
) -> list[str]:
    """Every name by which checkpoints may be chosen, without a model."""
    names = []
    for dataset in datasets:
        rewards = torch.zeros(dataset.records.num_rewards, count_outputs(objective))
        names += [
            f"{dataset.name}/{name}" for name in describe_rewards(objective, dataset, rewards)
        ]
    return names


def _wrong_gradient(update: Update, loss_scale: float | None) -> str:
    if loss_scale is None:
        return f"a gradient norm of {update.grad_norm}"
    return f"a gradient that overflows fp16 at a loss scale of {loss_scale:g}"
