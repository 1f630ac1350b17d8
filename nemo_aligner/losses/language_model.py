"""Bradley-Terry, regularized by the loss on chosen replies of the language model that it was."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from nemo_aligner.batch.packed import Records
from nemo_aligner.losses.base import PairObjective, check_number
from nemo_aligner.losses.pairwise import BradleyTerry


@dataclass(frozen=True)
class RegularizedByLanguage(PairObjective):
    """``-log sigmoid(m) + coefficient * NLL``, of the best reply of each record.

    NLL is the mean of ``-log p`` of the reply's tokens by the base model's own output layer, which
    is its embedding. It keeps hidden states from forgetting language (Yang et al. 2024,
    "Regularizing hidden states enables learning generalizable reward model for LLMs", GRM,
    arXiv:2406.10216, section 3, with SFT; the paper puts the reply's probability into a sigmoid,
    and weighs both losses to 1).

    Attributes:
        coefficient: of the language model's loss.
    """

    coefficient: float = 0.01

    reads_language: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_number(self, "coefficient", 0)

    def loss(self, rewards: Tensor, records: Records) -> tuple[Tensor, Tensor]:
        """Sum and count of outputs ``[S, 2]``: rewards, and the NLL of the best replies, else 0."""
        total, count = BradleyTerry().loss(rewards[:, :1], records)
        return total + self.coefficient * rewards[:, 1].sum(), count

    def numbers_learned(self, rewards: Tensor) -> dict[str, float]:
        """Mean NLL of the batch."""
        found = rewards[:, 1][rewards[:, 1] > 0]
        return {"language_loss": float(found.double().mean())} if len(found) else {}
