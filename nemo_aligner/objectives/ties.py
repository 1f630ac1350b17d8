"""What models of pairs that may be tied have in common.

Their parameter says how often equals are tied. It is fixed, or learned with the model (as Rao and
Kupper, and Davidson, estimate it): the head then has one more output, the same number x for every
text, of which the parameter is made.
"""

from __future__ import annotations

from typing import Protocol, TypeAlias

import torch
from torch import Tensor

from nemo_aligner.batch import Records
from nemo_aligner.transfer import to_device

Number: TypeAlias = float | Tensor


class TieModel(Protocol):
    """``-log`` of the probabilities that a pair is won, and that it is tied."""

    @property
    def learned(self) -> bool:
        """Whether the parameter is made of an x."""
        ...

    def parameter(self, x: float) -> float:
        """The parameter that any x makes."""
        ...

    def won(self, margins: Tensor, x: Tensor | None) -> Tensor:
        """``[P]`` losses of pairs that were won, by the better rewards minus the worse."""
        ...

    def tied(self, margins: Tensor, x: Tensor | None) -> Tensor:
        """``[P]`` losses of pairs that were tied."""
        ...


def won_or_tied(model: TieModel, rewards: Tensor, records: Records) -> tuple[Tensor, Tensor]:
    """The sum over records of their pairs' mean loss, and their number.

    Of rewards ``[S, 1]``, or ``[S, 2]`` with x where it is learned.
    """
    pairs = records.pairs(with_ties=True)
    better, worse = pairs.of(rewards[:, 0])
    x = pairs.of(rewards[:, 1])[0] if model.learned else None
    losses = model.won(better - worse, x)
    if pairs.are_ties is not None:
        are_ties = to_device(pairs.are_ties, losses.device)
        losses = torch.where(are_ties, model.tied(better - worse, x), losses)
    return pairs.sum_and_count(losses)


def tie_parameter_of(model: TieModel, rewards: Tensor) -> dict[str, float]:
    """The parameter by its name, of rewards with x; nothing where it is fixed."""
    if not model.learned or len(rewards) == 0:
        return {}
    return {"tie_parameter": model.parameter(float(rewards[0, 1]))}
