"""Davidson: a tie is as likely as the mean of a win and a loss says."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from nemo_aligner.batch import Records
from nemo_aligner.objectives.base import PairObjective
from nemo_aligner.objectives.checks import check_above, check_flag
from nemo_aligner.objectives.ties import tie_parameter_of, won_or_tied


@dataclass(frozen=True)
class Davidson(PairObjective):
    """Of a margin m: won, lost and tied as ``exp(m / 2)``, ``exp(-m / 2)`` and ``tie_parameter``.

    A tie is as likely as the geometric mean of a win and a loss, times the parameter (Davidson
    1970, "On extending the Bradley-Terry model to accommodate ties in paired comparison
    experiments", who calls it nu).

    Attributes:
        tie_parameter: above 0; replies of equal rewards are tied with the probability
            ``tie_parameter / (tie_parameter + 2)``.
        learned: ``tie_parameter`` is only where it begins; it is ``exp(x)`` of a learned x.
    """

    tie_parameter: float = 1.0
    learned: bool = False

    def __post_init__(self) -> None:
        check_flag(self, "learned")
        check_above(self, "tie_parameter", 0)

    @property
    def learns_from_ties(self) -> bool:
        return True

    @property
    def start_of_learned(self) -> tuple[float, ...]:
        return (math.log(self.tie_parameter),) if self.learned else ()

    def loss(self, rewards: Tensor, records: Records) -> tuple[Tensor, Tensor]:
        """As ``won_or_tied``, of rewards ``[S, 1]``, or ``[S, 2]`` with x where it is learned."""
        return won_or_tied(self, rewards, records)

    def numbers_learned(self, rewards: Tensor) -> dict[str, float]:
        return tie_parameter_of(self, rewards)

    def parameter(self, x: float) -> float:
        return math.exp(x)

    def won(self, margins: Tensor, x: Tensor | None) -> Tensor:
        return self._total(margins, x) - margins / 2

    def tied(self, margins: Tensor, x: Tensor | None) -> Tensor:
        return self._total(margins, x) - (math.log(self.tie_parameter) if x is None else x)

    def _total(self, margins: Tensor, x: Tensor | None) -> Tensor:
        """``[P]`` logarithms of what the three sum up to."""
        tie = torch.full_like(margins, math.log(self.tie_parameter)) if x is None else x
        return torch.stack([margins / 2, -margins / 2, tie]).logsumexp(dim=0)
