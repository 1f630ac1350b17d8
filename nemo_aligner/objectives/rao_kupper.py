"""Rao-Kupper: who is nearly equal is tied."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor

from nemo_aligner.batch import Records
from nemo_aligner.objectives.base import PairObjective
from nemo_aligner.objectives.checks import check_above, check_flag
from nemo_aligner.objectives.ties import Number, tie_parameter_of, won_or_tied

_LOG_2 = math.log(2)


@dataclass(frozen=True)
class RaoKupper(PairObjective):
    """Of a margin m: won with ``sigmoid(m - h)``, lost with ``sigmoid(-m - h)``, else tied.

    h is ``log(tie_parameter)``: a difference below it is not seen (Rao and Kupper 1967, "Ties in
    paired-comparison experiments: a generalization of the Bradley-Terry model").

    Attributes:
        tie_parameter: above 1; replies of equal rewards are tied with the probability
            ``(tie_parameter - 1) / (tie_parameter + 1)``.
        learned: ``tie_parameter`` is only where it begins; it is ``1 + exp(x)`` of a learned x.
    """

    tie_parameter: float = 2.0
    learned: bool = False

    def __post_init__(self) -> None:
        check_flag(self, "learned")
        check_above(self, "tie_parameter", 1)

    @property
    def learns_from_ties(self) -> bool:
        return True

    @property
    def start_of_learned(self) -> tuple[float, ...]:
        return (math.log(self.tie_parameter - 1),) if self.learned else ()

    def loss(self, rewards: Tensor, records: Records) -> tuple[Tensor, Tensor]:
        """As ``won_or_tied``, of rewards ``[S, 1]``, or ``[S, 2]`` with x where it is learned."""
        return won_or_tied(self, rewards, records)

    def numbers_learned(self, rewards: Tensor) -> dict[str, float]:
        return tie_parameter_of(self, rewards)

    def parameter(self, x: float) -> float:
        return 1 + math.exp(x)

    def won(self, margins: Tensor, x: Tensor | None) -> Tensor:
        height: Number = math.log(self.tie_parameter) if x is None else F.softplus(x)
        return F.softplus(height - margins)

    def tied(self, margins: Tensor, x: Tensor | None) -> Tensor:
        # The rest of the two others is their product times a constant, t ** 2 - 1.
        rest: Number = math.log(self.tie_parameter**2 - 1)
        if x is not None:
            # (t - 1) * (t + 1) with t = 1 + exp(x).
            rest = x + F.softplus(x - _LOG_2) + _LOG_2
        return self.won(margins, x) + self.won(-margins, x) - rest
