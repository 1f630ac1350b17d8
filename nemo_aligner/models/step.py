"""A step's forward and backward, and inference: the only callers of Megatron's schedules."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.utils import get_model_config
from torch import Tensor

from nemo_aligner.batch.packed import PackedBatch, Records
from nemo_aligner.distributed.collectives import PipelineMessages, current_device
from nemo_aligner.distributed.layout import ParallelLayout
from nemo_aligner.models.reward_model import GPTRewardModel, find_reply_rows
from nemo_aligner.utils.host_transfer import to_device

_MOST_PARTS = 50
# Of every part, for each stage after the first: the stages wait for a sixteenth of the time.
_PACKS_PER_STAGE = 16

RewardLoss = Callable[[Tensor, Records], tuple[Tensor, Tensor]]
"""Rewards ``[S, A]`` and the records that own them -> (sum of losses, how many were summed)."""


def forward_backward(
    model: torch.nn.Module,
    batches: Sequence[PackedBatch],
    layout: ParallelLayout,
    loss: RewardLoss,
) -> Tensor | None:
    """Accumulate the gradients of this data parallel rank's micro-batches of one step.

    After the last one Megatron sums gradients over the data parallel ranks and divides them by the
    global count, so they are those of the exact mean, however the records fell into micro-batches.

    Returns:
        Rewards ``[S, A]`` float32 of this data parallel rank's records, in the order of
        ``batches``, on the last pipeline stage; None on the others.
    """
    return _run(model, batches, layout, loss)


@torch.no_grad()
def infer(
    model: torch.nn.Module, batches: Sequence[PackedBatch], layout: ParallelLayout
) -> Tensor | None:
    """Rewards ``[S, A]`` float32 of this data parallel rank's ``batches``.

    They are in the order of ``batches``, and raw: the head's output, to which a scoring contract
    may add offsets. None on all pipeline stages but the last, and where there are no ``batches``.
    The model is left in evaluation mode.
    """
    model.eval()
    return _run(model, batches, layout, None) if batches else None


def infer_in_parts(
    model: torch.nn.Module,
    batches: Sequence[PackedBatch],
    layout: ParallelLayout,
    parts: int,
    after_part: Callable[[float], None],
) -> Tensor | None:
    """``infer`` in as many ``parts`` on every rank, and ``after_part`` of each what share is done.

    Every rank is then between two parts, so ``after_part`` may agree with the others, and raise.
    """
    found = []
    for part in range(parts):
        first, end = (len(batches) * number // parts for number in (part, part + 1))
        rewards = infer(model, batches[first:end], layout)
        if rewards is not None:
            found.append(rewards)
        after_part((part + 1) / parts)
    return torch.cat(found) if found else None


def count_parts(num_tokens: int, micro_batch_tokens: int, layout: ParallelLayout) -> int:
    """In how many parts to infer so many tokens, the same on every rank.

    A pipeline is empty between two parts, so that parts of few packs would let stages wait.
    """
    packs = num_tokens // (micro_batch_tokens * layout.dp)
    least = max(1, _PACKS_PER_STAGE * (layout.pp - 1))
    return max(1, min(_MOST_PARTS, packs // least))


@torch.no_grad()
def infer_values(
    model: torch.nn.Module, batches: Sequence[PackedBatch], layout: ParallelLayout
) -> list[Tensor] | None:
    """A critic's values ``[T, A]`` float32 of every token of each of ``batches``, in their order.

    Raw as those of ``infer``; None on all pipeline stages but the last. The model is left in
    evaluation mode.
    """
    model.eval()
    if not batches:
        return []
    values = _run_schedule(model, batches, layout, _value_step, forward_only=True)
    if not layout.is_last_stage:
        return None
    # Sequence parallelism may have appended a filler.
    return [found[: batch.num_tokens] for found, batch in zip(values, batches, strict=True)]


def gather_rewards(
    rewards: Tensor | None,
    batches: Sequence[PackedBatch],
    shape: tuple[int, int],
    layout: ParallelLayout,
) -> Tensor:
    """Put the rewards of this data parallel rank's ``batches`` in their rows among everyone's.

    Args:
        rewards: as ``forward_backward`` and ``infer`` give them.
        shape: ``(S, A)`` of the result.

    Returns:
        ``[S, A]`` float32 on the CPU, the same on every rank: they cross the ranks once.
    """
    gathered = torch.zeros(shape, device=current_device())
    if rewards is not None and layout.tp_rank == 0:
        rows = torch.cat([batch.rows for batch in batches])
        gathered[to_device(rows, rewards.device)] = rewards
    if dist.get_world_size() > 1:
        dist.all_reduce(gathered)
    return gathered.cpu()


def _run(
    model: torch.nn.Module,
    batches: Sequence[PackedBatch],
    layout: ParallelLayout,
    loss: RewardLoss | None,
) -> Tensor | None:
    step = partial(_forward_step, loss=loss)
    outputs = _run_schedule(model, batches, layout, step, forward_only=loss is None)
    return torch.cat(outputs) if layout.is_last_stage else None


def _run_schedule(
    model: torch.nn.Module,
    batches: Sequence[PackedBatch],
    layout: ParallelLayout,
    forward_step: Callable[..., Any],
    forward_only: bool,
) -> list[Tensor]:
    inside = _unwrapped(model)
    batches = [_with_replies(batch, inside.reply_marker) for batch in batches]
    padded = [batch.padded_to_multiple(inside.row_multiple) for batch in batches]
    run = partial(
        get_forward_backward_func(),
        forward_step_func=forward_step,
        data_iterator=iter(padded),
        model=[model],
        num_microbatches=len(padded),
        # Every micro-batch has a length of its own; these two only shape what nobody reads.
        seq_length=padded[0].num_tokens,
        micro_batch_size=1,
        forward_only=forward_only,
    )
    if layout.pp == 1:
        return run()
    config = get_model_config(model)
    ranks = layout.tp if layout.sequence_parallel else 1
    shapes = [(batch.num_tokens // ranks, 1, config.hidden_size) for batch in padded]
    messages = PipelineMessages(config, shapes, inside.stream_dtype)
    outputs = run(p2p_communicator=messages, pg_collection=messages.groups())
    messages.finish()
    return outputs


def _with_replies(batch: PackedBatch, marker: Sequence[int] | None) -> PackedBatch:
    """What the head reads of a pack, where it is more than last tokens."""
    return batch if marker is None else replace(batch, replies=find_reply_rows(batch, marker))


def _unwrapped(model: torch.nn.Module) -> GPTRewardModel:
    """What Megatron's data parallel wrapper has inside."""
    inside = getattr(model, "module", model)
    assert isinstance(inside, GPTRewardModel)
    return inside


def _value_step(
    batches: Iterator[PackedBatch], model: torch.nn.Module
) -> tuple[Tensor, Callable[..., Any]]:
    output = model(next(batches).to(current_device()))
    # The schedule scales what it gets in place: keep a copy.
    return output, lambda values, **unused: (values.sum(), values.clone())


def _forward_step(
    batches: Iterator[PackedBatch], model: torch.nn.Module, loss: RewardLoss | None
) -> tuple[Tensor, Callable[..., Any]]:
    batch = next(batches).to(current_device())

    def finish(output: Tensor, **unused: Any) -> tuple[Tensor, ...]:
        # Of every token, sequence parallelism may have added a filler's. The schedule scales what
        # it gets in place: keep a copy.
        own = output[: batch.records.num_rewards]
        kept = own.detach().clone()
        if loss is None:
            return output.sum(), kept
        total, count = loss(own, batch.records)
        return total, count.to(torch.int), kept

    return model(batch), finish
