"""Errors for numbers that are not finite: which records and ranks they come from.

A reward, a loss or a gradient that is not finite ends a run, and the error names the records that
caused it. The record with the largest part is named first: centring spreads one label of 1e38 over
all, so that no record's loss is finite, but that record's is by far the largest.
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
from nemo_aligner.distributed.collectives import agree, gather_objects
from nemo_aligner.distributed.layout import ParallelLayout
from nemo_aligner.models.step import RewardLoss
from nemo_aligner.utils.errors import TrainingError

_NAMED = 5
_ADVICE = "nothing was learned from this step: look at the records, or lower model.optim.lr"
_FP16_ADVICE = "; fp16 ends at 65504, fp32 and bf16 do not"


@dataclass(frozen=True)
class StepRecords:
    """The records of one step, counted from 1, in the order of the global batch.

    Attributes:
        record_ids: in ``dataset``.
        owners: of each record the data parallel rank that computed it, as the loader planned.
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
        """Who owns the step's rewards, and what people said."""
        return self.dataset.records.select(self.record_ids)

    def my_indices(self) -> list[int]:
        """This rank's records, as indices into ``record_ids``."""
        return [i for i, owner in enumerate(self.owners) if owner == self.layout.dp_rank]

    def error(self, what: str, ranks: Sequence[int], indices: Sequence[int]) -> TrainingError:
        """The same on every rank, for what was seen on ``ranks`` in the records at ``indices``."""
        whose = _named(self.dataset, [self.record_ids[index] for index in indices])
        on = f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"
        advice = _far_labels(self.dataset) + _ADVICE + _FP16_ADVICE * self.is_fp16
        return TrainingError(f"step {self.step}: got {what}, on {on}, from {whose}; {advice}")


def _named(dataset: TokenizedDataset, record_ids: Sequence[int]) -> str:
    # A record may be in a batch twice.
    origins = list(dict.fromkeys(str(dataset.origins[record]) for record in record_ids))
    shown = ", ".join(origins[:_NAMED]) or "no record alone"
    return shown + (f", and {len(origins) - _NAMED} more" if len(origins) > _NAMED else "")


def _far_labels(dataset: TokenizedDataset) -> str:
    """A label outside the batch can spoil it, too: by the mean that is subtracted from all."""
    far = far_labels(dataset.records.labels, dataset.label_origins)
    if not far:
        return ""
    more = f", and {len(far) - _NAMED} more" if len(far) > _NAMED else ""
    return f"labels of {dataset.name} are far out: {', '.join(map(str, far[:_NAMED]))}{more}; "


@dataclass(frozen=True, order=True)
class _Blame:
    """Share of a record in a number that is not finite; the greater, the more.

    ``amount`` is the size of its own part of the number, in float64.
    """

    is_certain: bool
    is_nan: bool
    amount: float
    index: int = field(compare=False)

    @classmethod
    def of(cls, index: int, amount: float, is_certain: bool = False) -> _Blame:
        is_nan = math.isnan(amount)
        return cls(is_certain, is_nan, 0.0 if is_nan else amount, index)


def _by_blame(blames: Iterable[_Blame]) -> list[int]:
    """The records' indices, each once, the one that is most to blame first."""
    # Where the blame is the same, in the order of the batch.
    in_order = sorted(sorted(blames, key=lambda blame: blame.index), reverse=True)
    return list(dict.fromkeys(blame.index for blame in in_order))


def check_validation(dataset: TokenizedDataset, rewards: Tensor) -> None:
    """Refuse rewards ``[S, A]`` of a whole set that nothing can be measured on.

    Raises:
        TrainingError: a reward is not finite.
    """
    bad = torch.nonzero(~torch.isfinite(rewards).all(dim=1)).flatten()
    if bad.numel():
        owners = torch.searchsorted(dataset.records.bounds, bad, right=True) - 1
        whose = _named(dataset, owners.unique().tolist())
        raise TrainingError(f"{dataset.name}: got a reward that is not finite, from {whose}")


def check_rewards(step: StepRecords, rewards: Tensor, loss: RewardLoss) -> None:
    """Refuse rewards ``[S, A]``, in the order of ``step``'s records, that cannot be learned on.

    Every rank calls it, with the same rewards.

    Raises:
        TrainingError: on every rank, if on any a reward or the loss is not finite.
    """
    records = step.records
    if _is_learnable(rewards, records, loss):
        return
    parts = [
        (index, rewards[records.rows([index])], records.select([index]))
        for index in step.my_indices()
    ]
    mine = [
        _loss_blame(index, own, record, loss)
        for index, own, record in parts
        if not _is_learnable(own, record, loss)
    ]
    seen = gather_objects(mine)
    indices = _by_blame(blame for found in seen for blame in found)
    # Or no record's loss, but their sum, which is every rank's.
    ranks = [rank for rank, found in enumerate(seen) if found] or list(range(len(seen)))
    if not bool(torch.isfinite(rewards).all()):
        raise step.error("a reward that is not finite", ranks, indices)
    missing = _without_labels(step, indices)
    raise step.error(f"a loss that is not finite{missing}", ranks, indices)


def _without_labels(step: StepRecords, indices: Sequence[int]) -> str:
    """A note on records without a label, which a loss reads as NaN; empty if all have theirs."""
    labels = step.records.select(indices).labels
    absent = torch.isnan(labels.values)
    if not bool(absent.any()):
        return ""
    some = absent.any(0).tolist()
    names = " or ".join(name for name, lacks in zip(labels.names, some, strict=True) if lacks)
    return (
        f" ({int(absent.any(1).sum())} of its {len(absent)} records have no {names}: a missing "
        "label is NaN, which the loss has to leave out)"
    )


def _is_learnable(rewards: Tensor, records: Records, loss: RewardLoss) -> bool:
    total, _ = loss(rewards, records)
    # Both: a record whose labels are all missing hides a NaN reward from the loss.
    return bool(torch.isfinite(rewards).all() & torch.isfinite(total))


def _loss_blame(index: int, rewards: Tensor, record: Records, loss: RewardLoss) -> _Blame:
    total, _ = loss(rewards.double(), record)
    return _Blame.of(index, float(total), is_certain=not bool(torch.isfinite(rewards).all()))


def gradient_error(
    step: StepRecords,
    model: Any,
    compute_gradients: Callable[[Sequence[PackedBatch]], object],
    what: str,
) -> TrainingError:
    """Trace a gradient that is not finite: recompute each record's alone; every rank calls it.

    ``model`` is Megatron's data parallel wrapper, with the gradient of the step still in it; what
    is in it afterwards is of no use.
    """
    # Before any gradient is computed anew: which ranks saw it in the step itself.
    broken = gather_objects(not _has_finite_gradients(model))
    blames: list[_Blame] = []
    for index, record in enumerate(step.record_ids):
        # All ranks take the same record: Megatron sums gradients over them within this call.
        dataset = step.dataset
        packs = pack_records(dataset, [record], dataset.num_tokens(record))
        compute_gradients(packs)
        if agree(not _has_finite_gradients(model), step.device):
            blames += gather_objects(_Blame.of(index, _gradient_norm(model)))
    indices = _by_blame(blames)
    owners = {step.owners[index] for index in indices}
    dp_ranks = gather_objects(step.layout.dp_rank)
    ranks = [rank for rank, dp_rank in enumerate(dp_ranks) if dp_rank in owners]
    ranks = ranks or [rank for rank, bad in enumerate(broken) if bad]
    return step.error(what, ranks, indices)


def _has_finite_gradients(model: Any) -> bool:
    """True if the squares of all gradients on this rank have a finite sum, as the norm needs."""
    norms = [
        parameter.main_grad.norm() for parameter in model.parameters() if parameter.requires_grad
    ]
    return not norms or bool(torch.isfinite(torch.stack(norms).square().sum()))


def _gradient_norm(model: Any) -> float:
    """The norm of all gradients on this rank, in float64, which the square of no float32 leaves."""
    norms = [
        torch.linalg.vector_norm(parameter.main_grad, dtype=torch.float64)
        for parameter in model.parameters()
        if parameter.requires_grad
    ]
    return float(torch.stack(norms).norm()) if norms else 0.0
