"""Numbers that stop a run: whose reward, loss or gradient is not finite, and on which rank."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from nemo_aligner.data.dataset import TokenizedDataset
from nemo_aligner.data.packing import pack_records
from nemo_aligner.errors import TrainingError
from nemo_aligner.models.step import RewardLoss, forward_backward
from nemo_aligner.parallel.collectives import agree, gather_objects
from nemo_aligner.parallel.layout import ParallelLayout

_NAMED = 5
_ADVICE = "the checkpoint before it is good: look at the records, or resume with a lower "
_ADVICE += "model.optim.lr"
_FP16_ADVICE = "; fp16 ends at 65504, fp32 and bf16 do not"


class GradientOwner(Protocol):
    """An optimizer, as far as it can forget gradients."""

    def zero_grad(self) -> None: ...


@dataclass(frozen=True)
class StepRecords:
    """The records of one step, counted from 1, in the order of the global batch.

    The record at place ``p`` is data parallel rank ``p % dp``'s.
    """

    step: int
    record_ids: Sequence[int]
    dataset: TokenizedDataset
    layout: ParallelLayout
    device: torch.device
    is_fp16: bool = False

    @property
    def labels(self) -> Tensor | None:
        """``[R, A]`` float32, as the loss takes them."""
        return self.dataset.centred_labels(self.record_ids)

    def my_places(self) -> range:
        return range(self.layout.dp_rank, len(self.record_ids), self.layout.dp)

    def error(self, what: str, ranks: Sequence[int], places: Sequence[int]) -> TrainingError:
        """The same on every rank, for what was seen on ``ranks`` at ``places``."""
        whose = _named(self.dataset, [self.record_ids[place] for place in places])
        on = f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"
        advice = _ADVICE + _FP16_ADVICE * self.is_fp16
        return TrainingError(f"step {self.step}: got {what}, on {on}, from {whose}; {advice}")


def _named(dataset: TokenizedDataset, record_ids: Sequence[int]) -> str:
    # A record may be in a batch twice.
    origins = list(dict.fromkeys(str(dataset.origins[record]) for record in record_ids))
    shown = ", ".join(origins[:_NAMED]) or "no record alone"
    return shown + (f", and {len(origins) - _NAMED} more" if len(origins) > _NAMED else "")


def check_validation(dataset: TokenizedDataset, rewards: Tensor) -> None:
    """Refuse rewards ``[N, sequences, A]`` of a whole set that nothing can be measured on.

    Raises:
        TrainingError: a reward is not finite.
    """
    bad = torch.nonzero(~torch.isfinite(rewards).flatten(1).all(dim=1)).flatten().tolist()
    if bad:
        whose = _named(dataset, bad)
        raise TrainingError(f"{dataset.name}: got a reward that is not finite, from {whose}")


def check_rewards(records: StepRecords, rewards: Tensor, loss: RewardLoss) -> None:
    """Refuse rewards ``[R, sequences, A]``, in the order of ``records``, that cannot be learned on.

    Every rank calls it.

    Raises:
        TrainingError: on every rank, if on any a reward or the loss is not finite.
    """
    is_bad = not _is_learnable(rewards, records.labels, loss)
    if not agree(is_bad, records.device):
        return
    labels = records.labels
    mine = [
        place
        for place in records.my_places()
        if not _is_learnable(
            rewards[place : place + 1], None if labels is None else labels[place : place + 1], loss
        )
    ]
    rewards_are_bad = not bool(torch.isfinite(rewards).all())
    seen = gather_objects((is_bad, rewards_are_bad, mine))
    places = sorted({place for *_, found in seen for place in found})
    ranks = [rank for rank, (*_, found) in enumerate(seen) if found]
    # No record's loss, but their sum: then every rank that summed has seen it.
    ranks = ranks or [rank for rank, (bad, *_) in enumerate(seen) if bad]
    what = "reward" if any(of_rewards for _, of_rewards, _ in seen) else "loss"
    raise records.error(f"a {what} that is not finite", ranks, places)


def _is_learnable(rewards: Tensor, labels: Tensor | None, loss: RewardLoss) -> bool:
    total, _ = loss(rewards, labels)
    return bool(torch.isfinite(rewards).all() & torch.isfinite(total))


def gradient_error(
    records: StepRecords,
    model: Any,
    optimizer: GradientOwner,
    loss: RewardLoss,
    what: str,
) -> TrainingError:
    """Whose gradient is not finite: every record's is computed again, alone; every rank calls it.

    ``model`` is Megatron's data parallel wrapper, with the gradient of the step still in it; what
    is in it afterwards is of no use.
    """
    broken = gather_objects(not _has_finite_gradients(model))
    places = []
    for place, record in enumerate(records.record_ids):
        # All ranks take the same record: Megatron sums gradients over them within this call.
        model.zero_grad_buffer()
        optimizer.zero_grad()
        dataset = records.dataset
        packs = pack_records(dataset, [record], dataset.num_tokens(record))
        forward_backward(model, packs, records.layout, loss)
        if agree(not _has_finite_gradients(model), records.device):
            places.append(place)
    owners = {place % records.layout.dp for place in places}
    dp_ranks = gather_objects(records.layout.dp_rank)
    ranks = [rank for rank, dp_rank in enumerate(dp_ranks) if dp_rank in owners]
    ranks = ranks or [rank for rank, bad in enumerate(broken) if bad]
    return records.error(what, ranks, places)


def _has_finite_gradients(model: Any) -> bool:
    """Whether the squares of all gradients on this rank have a finite sum, as their norm needs."""
    norms = [
        parameter.main_grad.norm() for parameter in model.parameters() if parameter.requires_grad
    ]
    return not norms or bool(torch.isfinite(torch.stack(norms).square().sum()))
