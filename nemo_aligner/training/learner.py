"""Take a training step and run a validation on all ranks, with exact global means.

``RewardLearner`` combines model, optimizer and data. The functions below it compute gradients, and
convert a head's outputs to rewards and metrics. ``nonfinite.py`` checks for NaN and infinity.

In shapes, S is the number of rewards (one for each sample, turn or step), Q the number of samples,
and A the number of attributes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor

from nemo_aligner.batch.packed import LabelColumns, PackedBatch, Records
from nemo_aligner.config.common import Aggregate
from nemo_aligner.contract.steps import aggregate_texts
from nemo_aligner.data.dataset import TokenizedDataset
from nemo_aligner.data.packing import measure_record
from nemo_aligner.data.training_data import StepPlan, TrainingData, TrainLoader, validation_batches
from nemo_aligner.distributed.collectives import broadcast_object, current_device
from nemo_aligner.distributed.layout import ParallelLayout
from nemo_aligner.losses.base import (
    Objective,
    add_label_means,
    losses_per_record,
    measure_set,
    measure_step,
    reward_gradient,
    rewards_of,
)
from nemo_aligner.models.experts import collect_load, describe_load
from nemo_aligner.models.step import (
    RewardLoss,
    count_parts,
    forward,
    forward_backward,
    gather_rewards,
    infer_in_parts,
)
from nemo_aligner.models.training_wrap import unwrap_after_training
from nemo_aligner.planning.cost import Packs
from nemo_aligner.training.nonfinite import (
    StepRecords,
    check_rewards,
    check_validation,
    gradient_error,
)
from nemo_aligner.training.optimizer import Optimizer, Update
from nemo_aligner.utils.console import Watch, unwatched

KeepHeldout: TypeAlias = Callable[[TokenizedDataset, Tensor], None]
"""A function that gets a validation set and its rewards ``[S, A]`` float64, label means added."""


class RewardLearner:
    """A reward model with its optimizer and data, distributed over the ranks by ``layout``.

    Every rank makes the same calls.

    Attributes:
        model: this rank's part of the model, without Megatron's data parallel wrapper.
        optimizer: this rank's part of the optimizer.
        data: training, validation and test sets.
        objective: the loss and the metrics that are reported with it.
    """

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
        keep_heldout: KeepHeldout | None = None,
        load_size: tuple[int, int] | None = None,
    ) -> None:
        """Store the parts of a run, which ``build_learner`` has built.

        Args:
            model: the reward model in Megatron's data parallel wrapper.
            micro_batch_tokens: maximum number of tokens in a pack.
            query_key_cost: work of attention for one pair of query and key, relative to the other
                work for one token. With it, packs of long and of short sequences get equal work.
            count_flops: counts a step's FLOPs over all ranks; None if no metric needs them.
            keep_heldout: function that gets each validation set and its rewards, to write them to
                files; None if they are not written.
            load_size: number of layers of a mixture-of-experts model, and number of experts in a
                layer, to measure how evenly tokens are spread over the experts; None for other
                models.
        """
        self._ddp = model
        self._load_size = load_size
        self._count_flops = count_flops
        self._loader = loader
        self._layout = layout
        self._micro_batch_tokens = micro_batch_tokens
        self._query_key_cost = query_key_cost
        self._keep_heldout = keep_heldout
        self.objective = data.objective
        self.model = model.module
        self.optimizer = optimizer
        self.data = data

    def release(self) -> None:
        """Free the model and its gradients; the learner cannot be used afterwards."""
        unwrap_after_training(self._ddp)

    def train_step(self, step: int) -> dict[str, float]:
        """Train on the batch of ``step``, counted from 0; every rank calls it.

        Returns:
            Metrics of the batch, computed with the weights from before the update. A step whose
            gradient overflowed fp16 does not update the weights and has no ``grad_norm``.

        Raises:
            TrainingError: a reward, the loss or the gradient is not finite. The weights are
                unchanged.
        """
        plan = self._loader.plan(step)
        # Pass the step number: LoRA's dropout masks are a hash of it, so that a resumed run has the
        # same masks as a run that was never stopped.
        self.model.begin_step(step, self._losses_per_record(plan))
        loss = self._step_loss(plan)
        local_rewards = compute_gradients(self._ddp, plan.packs, self._layout, loss)
        # Read these values now, because the update changes the loss scale and the learning rate.
        dataset, loss_scale, lr = self.data.train, self.optimizer.loss_scale, self.optimizer.lr
        step_records = StepRecords(
            step=step + 1,
            record_ids=plan.record_ids,
            owners=plan.owners,
            dataset=dataset,
            layout=self._layout,
            device=current_device(),
            is_fp16=loss_scale is not None,
        )
        # The metrics use the rewards of this step's forward pass, with the weights from before the
        # update and with LoRA's dropout. Every rank gathers all rewards, so that a failed check
        # raises on all ranks.
        rewards = self._gather(local_rewards, plan.packs, step_records.records)
        check_rewards(step_records, rewards, self.objective.loss)
        # Read the load before the update begins, because a GPU would finish the update first.
        load = collect_load(self.model, *self._load_size) if self._load_size else None
        update = self._update(step_records, loss_scale)
        # On a GPU the update is only queued by now, so the rest runs next to it.
        metrics = measure_step(self.objective, rewards, step_records.records) | update
        if load is not None:
            metrics |= describe_load(load)
        tokens = sum(dataset.num_tokens(record) for record in plan.record_ids)
        if self._count_flops is not None:
            metrics["flops"] = self._count_flops(as_one_pack(dataset, plan.record_ids))
        return {**metrics, "lr": lr, "tokens": float(tokens)}

    def _losses_per_record(self, plan: StepPlan) -> float:
        """Count the losses of the step per record; a rating has one loss for each label.

        The auxiliary loss of a mixture-of-experts model is scaled by this number. Other models have
        no such loss, so the result is 1.
        """
        if self._load_size is None:
            return 1.0
        return losses_per_record(self.objective, self.data.train.records.select(plan.record_ids))

    def _step_loss(self, plan: StepPlan) -> RewardLoss | Tensor:
        """Return the loss function of a step or, for a loss of the whole batch, its gradient.

        Most losses are sums over records, so that each pack computes its part. A loss that compares
        all rewards of the batch cannot be split. For such a loss, an additional forward pass
        computes all rewards. Each pack then gets the gradient of the loss with respect to its
        rewards. The rewards of both forward passes are equal.
        """
        if not self.objective.is_batch_level:
            return self.objective.loss
        self._ddp.train()
        local_rewards = forward(self._ddp, plan.packs, self._layout)
        records = self.data.train.records.select(plan.record_ids)
        rewards = self._gather(local_rewards, plan.packs, records)
        return reward_gradient(self.objective, rewards, records)

    def _update(self, step: StepRecords, loss_scale: float | None) -> dict[str, float]:
        """Update the weights, unless the gradient of the step is not finite.

        Args:
            step: the records of the step, to name those that caused an error.
            loss_scale: the fp16 loss scale of the step; None in fp32 and bf16.

        Returns:
            The metric ``grad_norm`` if the weights were updated, and in fp16 the loss scale and the
            number of skipped steps.

        Raises:
            TrainingError: the gradient is not finite, and a lower loss scale cannot help.
        """
        update = self.optimizer.step()
        # In fp16, an overflow is no error while the loss scale can still be halved.
        if not update.applied and not update.skipped:
            problem = _describe_gradient(update, loss_scale)
            compute = partial(
                compute_gradients, self._ddp, layout=self._layout, loss=self.objective.loss
            )
            raise gradient_error(step, self._ddp, compute, problem)
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
        self, local_rewards: Tensor | None, batches: Sequence[PackedBatch], records: Records
    ) -> Tensor:
        """Gather the head's outputs ``[S, outputs]`` for ``records`` from all ranks."""
        # With an objective that uses quantiles or bins, the head has several outputs per attribute.
        shape = (records.num_rewards, self.objective.output_columns.count)
        return gather_rewards(local_rewards, batches, shape, self._layout)

    def validate(self, watch: Watch = unwatched) -> dict[str, float]:
        """Compute the metrics of every validation set, named ``set/metric``."""
        return self.measure(self.data.validation, watch)

    def measure(
        self, sets: Sequence[TokenizedDataset], watch: Watch = unwatched
    ) -> dict[str, float]:
        """Compute the metrics of each set in ``sets`` on all its records, named ``set/metric``.

        Every rank returns the same values, to the last bit.

        Raises:
            TrainingError: a reward is not finite.
        """
        # Gather the updated weights on all ranks now. The forward pass would do it, but a rank
        # without records of a set runs no forward pass, and the other ranks would wait for it.
        self.optimizer.finish_update()
        done, total = 0, sum(map(len, sets))
        all_metrics: dict[str, float] = {}
        watch(0, total)
        for dataset in sets:
            show_share = partial(_show_share, watch, done, len(dataset), total)
            metrics = self._measure_on(dataset, show_share)
            all_metrics |= {f"{dataset.name}/{name}": value for name, value in metrics.items()}
            done += len(dataset)
        # Processors of different kinds may round differently, but all ranks must take the same
        # decisions from the metrics, such as to stop early.
        return broadcast_object(all_metrics)

    def _measure_on(
        self, dataset: TokenizedDataset, after_part: Callable[[float], None]
    ) -> dict[str, float]:
        """Compute the rewards of all records of a set, and the set's metrics from these rewards.

        ``after_part`` is called several times with the share of the records that are done, 0 to 1.
        """
        layout, budget = self._layout, self._micro_batch_tokens
        # Compute the metrics from the rewards of the whole set: a correlation, a quantile or a
        # calibration error is not the mean of its values on batches.
        batches = validation_batches(
            dataset, budget, layout.dp_rank, layout.dp, self._query_key_cost
        )
        parts = count_parts(dataset.total_tokens, budget, layout)
        local_rewards = infer_in_parts(self._ddp, batches, layout, parts, after_part)
        rewards = self._gather(local_rewards, batches, dataset.records)
        check_validation(dataset, rewards)
        if self._keep_heldout is not None:
            uncentred = uncentred_rewards(self.objective, dataset.records.labels, rewards)
            self._keep_heldout(dataset, uncentred)
        return describe_rewards(self.objective, dataset, rewards)


def compute_gradients(
    model: Any,
    packs: Sequence[PackedBatch],
    layout: ParallelLayout,
    loss: RewardLoss | Tensor,
) -> Tensor | None:
    """Clear the model's gradients, and compute the gradients of a step on ``packs``.

    ``model`` is Megatron's data parallel wrapper. ``loss`` is a loss function, or the gradient of a
    loss with respect to the rewards.

    Returns:
        This rank's outputs of the head; None on a pipeline stage without a head.
    """
    model.train()
    model.zero_grad_buffer()
    return forward_backward(model, packs, layout, loss)


def as_one_pack(dataset: TokenizedDataset, record_ids: Sequence[int]) -> Packs:
    """Treat the records ``record_ids`` as one large pack, which is enough to count their FLOPs."""
    sizes = [measure_record(dataset, record) for record in record_ids]
    tokens, sequences, query_keys = (sum(column) for column in zip(*sizes, strict=True))
    return Packs(tokens, sequences, keys=query_keys / tokens)


def _show_share(watch: Watch, done: int, size: int, total: int, share: float) -> None:
    """Report progress within a set to ``watch``.

    Args:
        done: number of records in the sets before this one.
        size: number of records of this set.
        total: number of records of all sets.
        share: share of this set's records that are done, 0 to 1.
    """
    watch(done + round(share * size), total)


def rewards_of_samples(rewards: Tensor, records: Records, rule: Aggregate) -> Tensor:
    """Combine the rewards ``[S, A]`` of turns or steps into one per sample, ``[Q, A]`` float64.

    They are combined in float32, as evaluation and server do, so that the results are equal.
    """
    bounds = records.reward_bounds
    if rule is Aggregate.last:
        return rewards[bounds[1:] - 1].double()
    return torch.from_numpy(
        aggregate_texts(rewards.float().numpy(), bounds.tolist(), rule)
    ).double()


def describe_rewards(
    objective: Objective, dataset: TokenizedDataset, rewards: Tensor
) -> dict[str, float]:
    """Compute all metrics of a data set from the head's outputs for its records.

    These are the objective's metrics on the whole set, on each of its sources and principles, and
    the mean and standard deviation of the rewards.

    Args:
        rewards: the head's outputs ``[S, outputs]`` for all records of the set.
    """
    return {
        **measure_set(
            objective,
            rewards,
            dataset.records,
            dataset.reply_lengths,
            dataset.sources,
            dataset.principles,
        ),
        **_spread(objective, dataset.records, rewards),
    }


def uncentred_rewards(objective: Objective, labels: LabelColumns, outputs: Tensor) -> Tensor:
    """Convert a head's ``outputs`` to rewards ``[S, A]`` float64, and add the label means."""
    rewards = rewards_of(objective.readout, objective.output_columns.split(outputs).attributes)
    return add_label_means(rewards, labels, objective.attributes)


def _spread(objective: Objective, records: Records, rewards: Tensor) -> dict[str, float]:
    """Compute mean and standard deviation of every attribute's rewards, for the scoring contract.

    If the objective aggregates the rewards of turns or steps, the statistics are over the samples'
    aggregated rewards; otherwise over the rewards of all turns or steps.
    """
    measured = uncentred_rewards(objective, records.labels, rewards)
    rule = objective.aggregate
    if objective.has_steps and rule not in (None, Aggregate.last.value):
        measured = rewards_of_samples(measured, records, Aggregate(rule))
    averages, deviations = measured.mean(0).tolist(), measured.std(0, correction=0).tolist()
    spread: dict[str, float] = {}
    for name, mean, deviation in zip(objective.attributes, averages, deviations, strict=True):
        spread |= {f"reward_mean/{name}": mean, f"reward_std/{name}": deviation}
    return spread


def validation_metric_names(
    objective: Objective, datasets: Sequence[TokenizedDataset]
) -> list[str]:
    """List the names of all validation metrics by which checkpoints can be ranked.

    The names are known only when metrics are computed, because a custom objective defines its own.
    So this function computes them without a model, with rewards of 0. It takes all records, because
    the names depend on them: on their sources, on the labels and on the number of their steps.
    """
    names = []
    for dataset in datasets:
        rewards = torch.zeros(dataset.records.num_rewards, objective.output_columns.count)
        metrics = describe_rewards(objective, dataset, rewards)
        names += [f"{dataset.name}/{name}" for name in metrics]
    return names


def _describe_gradient(update: Update, loss_scale: float | None) -> str:
    """Describe for an error whether a gradient is NaN, infinite or overflowed fp16.

    ``loss_scale`` is the fp16 loss scale of the step; None in fp32 and bf16.
    """
    if loss_scale is None:
        return f"a gradient norm of {update.grad_norm}"
    return f"a gradient that overflows fp16 at a loss scale of {loss_scale:g}"
