"""Training steps and inference on packs; only this module calls Megatron's pipeline schedules.

``forward_backward`` is a training step without the update, ``infer`` computes rewards, and
``infer_values`` a critic's values. ``gather_rewards`` brings the rewards of all ranks together.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.utils import get_model_config
from torch import Tensor

from nemo_aligner.batch.packed import PackedBatch, Records, ReplyRows
from nemo_aligner.contract.turns import reply_start
from nemo_aligner.distributed.collectives import PipelineMessages, current_device
from nemo_aligner.distributed.layout import ParallelLayout
from nemo_aligner.models.attention.segments import KeyValuePool, chains_of
from nemo_aligner.models.fixed_sizes import pad_to_fixed_sizes
from nemo_aligner.models.reward_model import GPTRewardModel
from nemo_aligner.utils.host_transfer import Arriving, to_device, to_host_later

# Inference over many packs runs in parts (``infer_in_parts``): at most this many, each with at
# least 16 packs for every pipeline stage after the first, so that the pipeline's bubble is a
# sixteenth.
_MOST_PARTS = 50
_PACKS_PER_STAGE = 16

RewardLoss = Callable[[Tensor, Records], tuple[Tensor, Tensor]]
"""Rewards ``[S, A]`` and their records -> the sum of the losses, and how many were summed."""


def forward_backward(
    model: torch.nn.Module,
    batches: Sequence[PackedBatch],
    layout: ParallelLayout,
    loss: RewardLoss | Tensor,
) -> Tensor | None:
    """Accumulate this data parallel rank's gradients over the micro-batches of one step.

    After the last micro-batch Megatron sums gradients over the data parallel ranks and divides by
    the number of losses in the whole step. The result is the gradient of the exact mean over all
    records, however they were packed.

    Args:
        model: the model inside Megatron's data parallel wrapper.
        batches: this rank's micro-batches, on the host.
        loss: a function of a micro-batch's rewards; or, if the loss depends on all rewards of the
            step together, its gradient with respect to them, ``[rows, A]`` float32 on the host
            (``losses.base.reward_gradient``).

    Returns:
        Rewards ``[S, A]`` float32, with A outputs of the head for each of the S sequences of this
        rank's records, in the order of ``batches``. None on all pipeline stages but the last.
    """
    return _run(model, batches, layout, loss)


@torch.no_grad()
def forward(
    model: torch.nn.Module, batches: Sequence[PackedBatch], layout: ParallelLayout
) -> Tensor | None:
    """Compute the rewards ``[S, A]`` that ``forward_backward`` returns, without gradients."""
    return _run(model, batches, layout, None)


@torch.no_grad()
def infer(
    model: torch.nn.Module,
    batches: Sequence[PackedBatch],
    layout: ParallelLayout,
    pool: KeyValuePool | None = None,
) -> Tensor | None:
    """Compute rewards ``[S, A]`` float32 of this data parallel rank's ``batches``, in their order.

    Rewards are the head's raw output, without the offsets of a scoring contract. The result is None
    if there are no ``batches``, and on all pipeline stages but the last. The model stays in
    evaluation mode.

    Args:
        pool: keys and values of the prefix cache, which the packs read and write.
    """
    _stop_training(model)
    return _run(model, batches, layout, None, pool) if batches or layout.ep > 1 else None


def _stop_training(model: torch.nn.Module) -> None:
    # Module.eval takes a millisecond, which is much of the time to score a single short sample.
    if model.training:
        model.eval()


def infer_in_parts(
    model: torch.nn.Module,
    batches: Sequence[PackedBatch],
    layout: ParallelLayout,
    parts: int,
    after_part: Callable[[float], None],
    pool: KeyValuePool | None = None,
) -> Tensor | None:
    """Run ``infer`` in ``parts``, and after each part call ``after_part`` with the fraction done.

    All ranks call ``after_part`` after the same parts, so it may run collectives and may raise on
    all ranks together.
    """
    rewards_of_parts = []
    for part in range(parts):
        first, end = (len(batches) * number // parts for number in (part, part + 1))
        rewards = infer(model, batches[first:end], layout, pool)
        if rewards is not None:
            rewards_of_parts.append(rewards)
        after_part((part + 1) / parts)
    return torch.cat(rewards_of_parts) if rewards_of_parts else None


def count_parts(num_tokens: int, micro_batch_tokens: int, layout: ParallelLayout) -> int:
    """Return how many parts to split the inference of ``num_tokens`` into; equal on all ranks.

    The pipeline drains between two parts, so each part needs enough packs to keep the stages busy.
    """
    packs = num_tokens // (micro_batch_tokens * layout.dp)
    min_packs = max(1, _PACKS_PER_STAGE * (layout.pp - 1))
    return max(1, min(_MOST_PARTS, packs // min_packs))


@torch.no_grad()
def infer_values(
    model: torch.nn.Module, batches: Sequence[PackedBatch], layout: ParallelLayout
) -> list[Tensor] | None:
    """Compute a critic's values ``[T, A]`` float32 for every token of each of ``batches``.

    Values are the head's raw output, like the rewards of ``infer``. The result is None on all
    pipeline stages but the last. The model stays in evaluation mode.
    """
    _stop_training(model)
    if not batches and layout.ep == 1:
        return []
    values = _run_schedule(model, batches, layout, _value_step, forward_only=True)
    if not layout.is_last_stage:
        return None
    # Sequence or context parallelism may have appended a padding segment, whose values are cut off.
    pairs = zip(values, batches, strict=False)
    return [pack_values[: batch.num_tokens] for pack_values, batch in pairs]


def gather_rewards(
    rewards: Tensor | None,
    batches: Sequence[PackedBatch],
    shape: tuple[int, int],
    layout: ParallelLayout,
) -> Tensor:
    """Gather the rewards of all data parallel ranks, in the order of the records.

    Args:
        rewards: the result of ``forward_backward`` or ``infer`` on this rank's ``batches``.
        shape: ``(S, A)``: number of sequences on all ranks, and number of outputs of the head.

    Returns:
        ``[S, A]`` float32 on the CPU, the same on every rank. Collective: one all-reduce.
    """
    return _gather_on_device(rewards, batches, shape, layout).cpu()


def gather_rewards_later(
    rewards: Tensor | None,
    batches: Sequence[PackedBatch],
    shape: tuple[int, int],
    layout: ParallelLayout,
) -> Arriving[Tensor]:
    """Start ``gather_rewards``, and return at once; the result's ``wait`` returns the rewards.

    Meanwhile the host can prepare the next step.
    """
    return to_host_later(_gather_on_device(rewards, batches, shape, layout))


def _gather_on_device(
    rewards: Tensor | None,
    batches: Sequence[PackedBatch],
    shape: tuple[int, int],
    layout: ParallelLayout,
) -> Tensor:
    gathered = torch.zeros(shape, device=current_device())
    # Each row is written by one rank and is 0 on all others, so the sum is exact. Tensor and
    # context parallel ranks have equal rewards, so one of them writes. Earlier pipeline stages have
    # none.
    if rewards is not None and layout.tp_rank == 0 and layout.cp_rank == 0:
        rows = torch.cat([batch.rows for batch in batches])
        gathered[to_device(rows, rewards.device)] = rewards
    if dist.get_world_size() > 1:
        dist.all_reduce(gathered)
    return gathered


def _run(
    model: torch.nn.Module,
    batches: Sequence[PackedBatch],
    layout: ParallelLayout,
    loss: RewardLoss | Tensor | None,
    pool: KeyValuePool | None = None,
) -> Tensor | None:
    step = partial(_forward_step, loss=loss, pool=pool)
    outputs = _run_schedule(model, batches, layout, step, forward_only=loss is None)
    return torch.cat(outputs) if batches and layout.is_last_stage else None


def _run_schedule(
    model: torch.nn.Module,
    batches: Sequence[PackedBatch],
    layout: ParallelLayout,
    forward_step: Callable[..., Any],
    forward_only: bool,
) -> list[Tensor]:
    inside = _unwrap(model)
    if layout.ep > 1:
        batches = _pad_number_of_packs(batches)
        if not batches:
            return []
    batches = [_attach_reply_rows(batch, inside) for batch in batches]
    padded = [_prepare_pack(batch, inside, layout) for batch in batches]
    run = partial(
        get_forward_backward_func(),
        forward_step_func=forward_step,
        data_iterator=iter(padded),
        model=[model],
        num_microbatches=len(padded),
        # Micro-batches differ in length (variable_seq_lengths). Megatron requires these two
        # arguments, but does not use them.
        seq_length=padded[0].num_own_tokens,
        micro_batch_size=1,
        forward_only=forward_only,
    )
    if layout.pp == 1:
        return run()
    config = get_model_config(model)
    ranks = layout.tp if layout.sequence_parallel else 1
    shapes = [(batch.num_own_tokens // ranks, 1, config.hidden_size) for batch in padded]
    messages = PipelineMessages(config, shapes, inside.stream_dtype)
    outputs = run(p2p_communicator=messages, pg_collection=messages.groups())
    # Sends still read this step's tensors, so they have to finish before the tensors are freed.
    messages.finish()
    return outputs


def _prepare_pack(batch: PackedBatch, model: GPTRewardModel, layout: ParallelLayout) -> PackedBatch:
    """Pad a pack, or cut out the tokens that this rank of a context parallel group computes."""
    multiple = model.row_multiple(batch.num_tokens // layout.cp)
    if model.graphs is not None and model.graphs.are_used(model.training):
        return pad_to_fixed_sizes(batch, multiple)
    if layout.cp == 1:
        return batch.padded_to_multiple(multiple)
    return batch.shared(layout.cp_rank, layout.cp, multiple, model.reads_every_token)


def _pad_number_of_packs(batches: Sequence[PackedBatch]) -> list[PackedBatch]:
    """Add packs without records until all data parallel ranks have equally many.

    Every layer exchanges tokens by collectives, so a rank with fewer packs would leave the others
    waiting.
    """
    max_packs = torch.tensor(len(batches), device=current_device())
    # The expert parallel group is too small: with context parallelism, groups of both kinds may
    # overlap in a chain over all data parallel ranks.
    group = parallel_state.get_data_parallel_group(with_context_parallel=True)
    dist.all_reduce(max_packs, dist.ReduceOp.MAX, group)
    single_token = PackedBatch.pack([torch.zeros(1, dtype=torch.int64)])
    empty = replace(single_token, rows=single_token.rows[:0], records=Records.of([], []))
    return [*batches, *[empty] * (int(max_packs) - len(batches))]


def _attach_reply_rows(batch: PackedBatch, model: GPTRewardModel) -> PackedBatch:
    """Attach to a pack which of its tokens belong to the replies, if the model's head needs that.

    Only a head that averages the hidden states over each reply does; its model has a reply marker.
    Otherwise the pack is returned unchanged.
    """
    if model.reply_marker is not None:
        batch = replace(batch, replies=find_reply_rows(batch, model.reply_marker))
    return batch


def find_reply_rows(batch: PackedBatch, marker: Sequence[int]) -> ReplyRows:
    """Find which tokens of a pack belong to the reply of each sequence, as indices on the host.

    If a sequence begins with cached tokens, they must end before the last marker of the sequence,
    because no hidden states exist for cached tokens.
    """
    rows, lengths = [], []
    for sequence in _list_sequence_rows(batch):
        start = reply_start(batch.tokens[sequence].numpy(), marker)
        rows.append(sequence[start:])
        lengths.append(len(sequence) - start)
    return ReplyRows(torch.cat(rows), tuple(lengths))


def _list_sequence_rows(batch: PackedBatch) -> Iterator[Tensor]:
    """Yield the row indices of each sequence's tokens in the pack, prefix segments included."""
    bounds = batch.cu_seqlens.tolist()
    cached = 0 if batch.cached is None else len(batch.cached.lengths)
    chains = chains_of(batch.prefixes.tolist(), cached)
    ends = torch.searchsorted(batch.cu_seqlens.long(), batch.scored_tokens, right=True) - 1
    for segment in ends.tolist():
        parts = [number - cached for number in chains[segment] if number >= cached]
        spans = [torch.arange(bounds[part], bounds[part + 1]) for part in (*parts, segment)]
        yield torch.cat(spans)


def _unwrap(model: torch.nn.Module) -> GPTRewardModel:
    """Return the model inside Megatron's data parallel wrapper, or ``model`` itself."""
    inside = getattr(model, "module", model)
    assert isinstance(inside, GPTRewardModel)
    return inside


def _value_step(
    batches: Iterator[PackedBatch], model: torch.nn.Module
) -> tuple[Tensor, Callable[..., Any]]:
    output = model(next(batches).to(current_device()))
    # Return a copy, because the schedule scales its input in place.
    return output, lambda values, **unused: (values.sum(), values.clone())


def _forward_step(
    batches: Iterator[PackedBatch],
    model: torch.nn.Module,
    loss: RewardLoss | Tensor | None,
    pool: KeyValuePool | None,
) -> tuple[Tensor, Callable[..., Any]]:
    batch = next(batches).to(current_device())

    def finish(output: Tensor, **unused: Any) -> tuple[Tensor, ...]:
        # Drop the padding segment. Return a copy, because the schedule scales its input in place.
        rewards = output[: batch.records.num_rewards]
        detached = rewards.detach().clone()
        if loss is None:
            return output.sum(), detached
        if not len(batch.records):
            return (
                output.sum() * 0,
                torch.zeros((), dtype=torch.int, device=detached.device),
                detached,
            )
        if isinstance(loss, Tensor):
            total, count = _loss_of_gradient(rewards, loss[batch.rows], len(batch.records))
        else:
            total, count = loss(rewards, batch.records)
        if batch.share is not None and batch.share.rank > 0:
            # All ranks of the context parallel group have this loss. Each has the gradient of its
            # own tokens only, and the sum over ranks is the whole gradient. So only one rank counts
            # the losses.
            count = torch.zeros_like(count)
        # Under ``calculate_per_token_loss`` Megatron takes a sum and a count. It backpropagates the
        # sum, times the loss scale of fp16, and finalize_model_grads divides the gradients by the
        # count over all micro-batches and ranks. A mean in each micro-batch would instead give the
        # records of short micro-batches more weight. The count has to be an int, because Megatron
        # adds it in place to an int.
        return total, count.to(torch.int), detached

    return model(batch, pool), finish


def _loss_of_gradient(rewards: Tensor, gradient: Tensor, records: int) -> tuple[Tensor, Tensor]:
    """Return a loss that has this ``gradient`` at ``rewards [S, A]``, and the record count."""
    total = (rewards * to_device(gradient, rewards.device)).sum()
    return total, torch.full((), records, dtype=torch.int64, device=rewards.device)
