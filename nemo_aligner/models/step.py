"""A step's forward and backward, and inference: the only callers of Megatron's schedules."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor

from nemo_aligner.batch import PackedBatch
from nemo_aligner.parallel.layout import ParallelLayout

RewardLoss = Callable[[Tensor, Tensor | None], tuple[Tensor, Tensor]]
"""Rewards ``[R, sequences, A]`` and labels ``[R, A]`` -> (sum of losses, how many were summed)."""


def forward_backward(
    model: torch.nn.Module,
    batches: Sequence[PackedBatch],
    layout: ParallelLayout,
    loss: RewardLoss,
) -> Tensor:
    """Accumulate the gradients of this data parallel rank's micro-batches of one step.

    After the last one Megatron sums gradients over the data parallel ranks and divides them by the
    global count, so they are those of the exact mean, however the records fell into micro-batches.

    Returns:
        Rewards ``[R, sequences, A]`` float32 of this data parallel rank's records, in the order of
        ``batches``, on every rank of its tensor and pipeline groups.
    """
    return _run(model, batches, layout, loss)


@torch.no_grad()
def infer(model: torch.nn.Module, batches: Sequence[PackedBatch], layout: ParallelLayout) -> Tensor:
    """Rewards ``[S, A]`` float32 of this data parallel rank's ``batches``, on the model's device.

    They are in the order of ``batches``, on every rank of the tensor and pipeline groups, and raw:
    the head's output, to which a scoring contract may add offsets. The model is left in evaluation
    mode.
    """
    model.eval()
    if not batches:
        return torch.empty(0, _num_attributes(model, layout), device=_device())
    return _run(model, batches, layout, None).flatten(0, 1)


def gather_rewards(
    rewards: Tensor, positions: Tensor, total: int, layout: ParallelLayout
) -> Tensor:
    """Put every data parallel rank's rows ``[n, ...]`` at their ``positions [n]`` among ``total``.

    Returns:
        ``[total, ...]`` float32 on the CPU, the same on every rank.
    """
    gathered = rewards.new_zeros((total, *rewards.shape[1:]))
    gathered[positions.to(rewards.device)] = rewards
    if layout.dp > 1:
        dist.all_reduce(gathered, group=layout.dp_group)
    return gathered.float().cpu()


def _device() -> torch.device:
    return torch.device(torch.cuda.current_device())


def _num_attributes(model: torch.nn.Module, layout: ParallelLayout) -> int:
    """The head's width, on every pipeline stage."""
    width = torch.zeros(1, dtype=torch.int64, device=_device())
    if layout.is_last_stage:
        reward_model: Any = getattr(model, "module", model)
        width[0] = reward_model.rm_head.weight.size(0)
    if layout.pp > 1:
        dist.broadcast(width, layout.last_stage_rank, group=layout.pp_group)
    return int(width)


def _run(
    model: torch.nn.Module,
    batches: Sequence[PackedBatch],
    layout: ParallelLayout,
    loss: RewardLoss | None,
) -> Tensor:
    multiple = layout.tp if layout.sequence_parallel else 1
    padded = [batch.padded_to_multiple(multiple) for batch in batches]
    outputs = get_forward_backward_func()(
        forward_step_func=partial(_forward_step, loss=loss),
        data_iterator=iter(padded),
        model=[model],
        num_microbatches=len(padded),
        # Lengths travel with the activations; these two only shape what nobody reads.
        seq_length=padded[0].num_tokens,
        micro_batch_size=1,
        forward_only=loss is None,
    )
    num_records = sum(batch.num_records for batch in batches)
    return _share_rewards(model, outputs, num_records, batches[0].sequences_per_record, layout)


def _forward_step(
    batches: Iterator[PackedBatch], model: torch.nn.Module, loss: RewardLoss | None
) -> tuple[Tensor, Callable[..., Any]]:
    batch = next(batches).to(_device())

    def finish(output: Tensor, **unused: Any) -> tuple[Tensor, ...]:
        rewards = output.view(batch.num_records, batch.sequences_per_record, -1)
        # The schedule scales what it gets in place: keep a copy.
        kept = rewards.detach().clone()
        if loss is None:
            return rewards.sum(), kept
        total, count = loss(rewards, batch.labels)
        return total, count.to(torch.int), kept

    return model(batch), finish


def _share_rewards(
    model: torch.nn.Module,
    outputs: list[Tensor],
    num_records: int,
    sequences_per_record: int,
    layout: ParallelLayout,
) -> Tensor:
    """The last stage's rewards, on every stage of the pipeline."""
    if layout.pp == 1:
        return torch.cat(outputs)
    attributes = _num_attributes(model, layout)
    if layout.is_last_stage:
        rewards = torch.cat(outputs)
    else:
        shape = (num_records, sequences_per_record, attributes)
        rewards = torch.empty(shape, device=_device())
    dist.broadcast(rewards, layout.last_stage_rank, group=layout.pp_group)
    return rewards
