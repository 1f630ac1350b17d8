"""Find the records and ranks that cause a reward, a loss or a gradient that is not finite.

Such a value ends a run, and the error names the records that caused it. The record that contributes
most is named first. The losses of single records are computed in float64 to find it. An example is
a label of 1e38: it spoils the mean that is subtracted from all labels, so no record's loss is
finite in fp32. But in float64, the record with that label has by far the largest loss.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from nemo_aligner.batch.packed import PackedBatch, Records
from nemo_aligner.data.dataset import TokenizedDataset
from nemo_aligner.data.packing import pack_records
from nemo_aligner.data.report import far_labels
from nemo_aligner.distributed.collectives import agree, gather_objects, run_on_all
from nemo_aligner.distributed.layout import ParallelLayout
from nemo_aligner.models.step import RewardLoss
from nemo_aligner.utils.errors import TrainingError

_MOST_NAMED = 5  # maximum number of records that an error names
_ADVICE = "the weights did not change in this step. Look at the records, or lower model.optim.lr"
_FP16_ADVICE = "; fp16 ends at 65504, but fp32 and bf16 hold far larger values"


@dataclass(frozen=True)
class StepRecords:
    """The records of one training step, in the order of the global batch.

    If the step has a NaN or an infinity, this object finds the records that caused it.

    Attributes:
        step: number of the step, counted from 1.
        record_ids: indices of the records in ``dataset``.
        owners: for each record, the data parallel rank that computes it.
        is_fp16: the model trains in fp16, whose small range may be the cause.
    """

    step: int
    record_ids: Sequence[int]
    owners: Sequence[int]
    dataset: TokenizedDataset
    layout: ParallelLayout
    device: torch.device
    is_fp16: bool = False

    @cached_property
    def records(self) -> Records:
        """The records' bounds and labels, which the loss needs."""
        return self.dataset.records.select(self.record_ids)

    def local_indices(self) -> list[int]:
        """List the records that this rank computes, as indices into ``record_ids``."""
        return [i for i, owner in enumerate(self.owners) if owner == self.layout.dp_rank]

    def error(self, problem: str, ranks: Sequence[int], indices: Sequence[int]) -> TrainingError:
        """Build the error that reports ``problem``, and the ranks and records it comes from.

        Args:
            indices: the records, as indices into ``record_ids``.
        """
        records = _name_records(self.dataset, [self.record_ids[index] for index in indices])
        on_ranks = f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"
        advice = _describe_far_labels(self.dataset) + _ADVICE + _FP16_ADVICE * self.is_fp16
        return TrainingError(
            f"step {self.step}: got {problem}, on {on_ranks}, from {records}; {advice}"
        )


def _name_records(dataset: TokenizedDataset, record_ids: Sequence[int]) -> str:
    """Name the first few records by file and line, and count the rest."""
    # Name a record once, even if the batch has it twice.
    origins = list(dict.fromkeys(str(dataset.origins[record]) for record in record_ids))
    names = ", ".join(origins[:_MOST_NAMED]) or "no single record"
    more = len(origins) - _MOST_NAMED
    return names + (f", and {more} more" if more > 0 else "")


def _describe_far_labels(dataset: TokenizedDataset) -> str:
    """Describe the outliers among the labels of the whole data set; empty if there are none.

    The whole set is searched, because an outlier can also make the loss of other batches infinite:
    it changes the mean that is subtracted from all labels.
    """
    far = far_labels(dataset.records.labels, dataset.label_origins)
    if not far:
        return ""
    more = f", and {len(far) - _MOST_NAMED} more" if len(far) > _MOST_NAMED else ""
    farthest = ", ".join(map(str, far[:_MOST_NAMED]))
    return f"labels of {dataset.name} are outliers: {farthest}{more}; "


@dataclass(frozen=True, order=True)
class _Blame:
    """Judgement of how likely a record has caused a loss or gradient that is not finite.

    Objects sort by the fields in this order, the likeliest cause last.

    Attributes:
        is_certain: a reward of the record itself is not finite.
        is_nan: the loss or the gradient norm of the record is NaN.
        amount: the loss or the gradient norm of the record, in float64; 0 if it is NaN.
        index: index of the record in the batch.
    """

    is_certain: bool
    is_nan: bool
    amount: float
    index: int = field(compare=False)

    @classmethod
    def of(cls, index: int, amount: float, is_certain: bool = False) -> _Blame:
        """Judge a record by its loss or gradient norm ``amount``, which may be NaN."""
        is_nan = math.isnan(amount)
        return cls(is_certain, is_nan, 0.0 if is_nan else amount, index)


def _sort_by_blame(blames: Iterable[_Blame]) -> list[int]:
    """Return the indices of the records without duplicates, the likeliest cause first."""
    # Sort by index first, so that records with equal blame stay in the order of the batch.
    in_order = sorted(sorted(blames, key=lambda blame: blame.index), reverse=True)
    return list(dict.fromkeys(blame.index for blame in in_order))


def check_validation(dataset: TokenizedDataset, rewards: Tensor) -> None:
    """Check that all rewards ``[S, A]`` of a validation set are finite.

    Raises:
        TrainingError: a reward is not finite.
    """
    bad = torch.nonzero(~torch.isfinite(rewards).all(dim=1)).flatten()
    if bad.numel():
        owners = torch.searchsorted(dataset.records.record_bounds, bad, right=True) - 1
        records = _name_records(dataset, owners.unique().tolist())
        raise TrainingError(f"{dataset.name}: got a reward that is not finite, from {records}")


def check_rewards(step: StepRecords, rewards: Tensor, loss: RewardLoss) -> None:
    """Check that the rewards and the loss of a step are finite.

    Every rank calls it with the same rewards ``[S, A]``, in the order of the step's records.

    Raises:
        TrainingError: on every rank, if a reward or the loss is not finite.
    """
    records = step.records
    if _are_finite(rewards, records, loss):
        return

    def blame_own_records() -> list[_Blame]:
        parts = [
            (index, rewards[records.rows([index])], records.select([index]))
            for index in step.local_indices()
        ]
        return [
            _blame_record(index, record_rewards, record, loss)
            for index, record_rewards, record in parts
            if not _are_finite(record_rewards, record, loss)
        ]

    # A custom loss may raise an exception for a single record; then all ranks must raise it.
    blames_by_rank = run_on_all(blame_own_records)
    indices = _sort_by_blame(blame for blames in blames_by_rank for blame in blames)
    # If only the sum of the losses is infinite, and no record's loss is, name all ranks, because
    # every rank has computed the sum.
    all_ranks = list(range(len(blames_by_rank)))
    ranks = [rank for rank in all_ranks if blames_by_rank[rank]] or all_ranks
    if not bool(torch.isfinite(rewards).all()):
        raise step.error("a reward that is not finite", ranks, indices)
    missing = _describe_missing_labels(step, indices)
    raise step.error(f"a loss that is not finite{missing}", ranks, indices)


def _describe_missing_labels(step: StepRecords, indices: Sequence[int]) -> str:
    """Describe which labels are missing in the records at ``indices``; empty if none is missing."""
    labels = step.records.select(indices).labels
    missing = torch.isnan(labels.values)
    if not bool(missing.any()):
        return ""
    columns = zip(labels.names, missing.any(0).tolist(), strict=True)
    names = " or ".join(name for name, is_missing in columns if is_missing)
    return (
        f" ({int(missing.any(1).sum())} of the {len(missing)} records that cause it have no "
        f"{names}: a missing label is NaN, which the loss must mask)"
    )


def _are_finite(rewards: Tensor, records: Records, loss: RewardLoss) -> bool:
    """True if all rewards and their loss are finite."""
    total, _ = loss(rewards, records)
    # Also check the rewards: the loss ignores a record without labels, even if its reward is NaN.
    return bool(torch.isfinite(rewards).all() & torch.isfinite(total))


def _blame_record(index: int, rewards: Tensor, record: Records, loss: RewardLoss) -> _Blame:
    """Judge a record by its own loss in float64; ``index`` is its place in the batch."""
    total, _ = loss(rewards.double(), record)
    return _Blame.of(index, float(total), is_certain=not bool(torch.isfinite(rewards).all()))


def gradient_error(
    step: StepRecords,
    model: Any,
    compute_gradients: Callable[[Sequence[PackedBatch]], object],
    problem: str,
) -> TrainingError:
    """Build the error for a gradient that is not finite; every rank calls it.

    It computes the gradient of each record of the step by itself, to find the records to name.

    Args:
        model: Megatron's data parallel wrapper, which still holds the gradient of the step. This
            function overwrites it.
        compute_gradients: replaces the model's gradients by those of the packs that it gets.
        problem: description of the gradient for the error.
    """
    # Do this first, because the gradients of single records below overwrite the gradient of the
    # step.
    broken = gather_objects(not _has_finite_gradients(model))
    blames: list[_Blame] = []
    for index, record in enumerate(step.record_ids):
        # All ranks compute the same record at the same time. Megatron sums gradients over the
        # ranks, so the gradients of different records could not be told apart.
        dataset = step.dataset
        packs = pack_records(dataset, [record], dataset.num_tokens(record))
        compute_gradients(packs)
        if agree(not _has_finite_gradients(model), step.device):
            blames += gather_objects(_Blame.of(index, _gradient_norm(model)))
    indices = _sort_by_blame(blames)
    owners = {step.owners[index] for index in indices}
    dp_ranks = gather_objects(step.layout.dp_rank)
    ranks = [rank for rank, dp_rank in enumerate(dp_ranks) if dp_rank in owners]
    ranks = ranks or [rank for rank, is_broken in enumerate(broken) if is_broken]
    return step.error(problem, ranks, indices)


def _has_finite_gradients(model: Any) -> bool:
    """True if the norm of this rank's gradients, before clipping, is finite.

    This tests the sum of squares as the norm does: squares of large fp32 gradients overflow.
    """
    norms = [
        parameter.main_grad.norm() for parameter in model.parameters() if parameter.requires_grad
    ]
    return not norms or bool(torch.isfinite(torch.stack(norms).square().sum()))


def _gradient_norm(model: Any) -> float:
    """Compute the norm of this rank's gradients in float64.

    Squares of large float32 values overflow in float32, but not in float64.
    """
    norms = [
        torch.linalg.vector_norm(parameter.main_grad, dtype=torch.float64)
        for parameter in model.parameters()
        if parameter.requires_grad
    ]
    return float(torch.stack(norms).norm()) if norms else 0.0
