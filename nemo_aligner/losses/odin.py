"""ODIN: a quality head and a length head, of which the first becomes the model's reward."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from nemo_aligner.batch.packed import Records
from nemo_aligner.losses.base import PairObjective, check_number
from nemo_aligner.losses.length import pearson, reply_lengths
from nemo_aligner.losses.pairwise import BradleyTerry


@dataclass(frozen=True)
class Odin(PairObjective):
    """``L(m_Q + m_L) + length_coefficient * (|r_Q| - r_L) + orthogonality_coefficient * |cos|``.

    L is Bradley-Terry's loss of the sum of a quality head Q and a length head L (Chen et al. 2024,
    "ODIN: Disentangled reward mitigates hacking in RLHF", arXiv:2402.07319, section 4). r are
    Pearson's of each head and the replies' tokens over the whole global batch, and cos is that of
    the heads' weights, which the authors normalise in the model and which here keep their norms.
    The quality head is the model's reward; the length head ends with the run.

    Attributes:
        length_coefficient, orthogonality_coefficient: 1 in the authors' training script.
    """

    length_coefficient: float = 1.0
    orthogonality_coefficient: float = 1.0

    auxiliary_heads: ClassVar[int] = 1
    is_of_batch: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_number(self, "length_coefficient", 0)
        check_number(self, "orthogonality_coefficient", 0)

    def loss(self, rewards: Tensor, records: Records) -> tuple[Tensor, Tensor]:
        """Sum and count of outputs ``[S, 3]``: quality, length, and the cosine of their weights."""
        total, count = BradleyTerry().loss(rewards[:, :2].sum(dim=1, keepdim=True), records)
        lengths = reply_lengths(rewards, records)
        of_quality, of_length = (pearson(rewards[:, head], lengths) for head in (0, 1))
        cosine = rewards[:, 2].abs().sum() / max(1, len(rewards))  # the same in every row
        term = self.length_coefficient * (of_quality.abs() - of_length)
        return total + count * (term + self.orthogonality_coefficient * cosine), count
