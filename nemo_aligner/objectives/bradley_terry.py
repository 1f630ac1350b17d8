"""Bradley-Terry: the chosen reply above the rejected one."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from nemo_aligner.batch import Records
from nemo_aligner.objectives.base import PairObjective


@dataclass(frozen=True)
class BradleyTerry(PairObjective):
    """``-log sigmoid(chosen - rejected)``.

    Eq. 1 of Ouyang et al. 2022, "Training language models to follow instructions with human
    feedback".
    """

    def loss(self, rewards: Tensor, records: Records) -> tuple[Tensor, Tensor]:
        """The sum over pairs, and their number (int), of rewards ``[S, 1]``."""
        chosen, rejected = records.as_pairs(rewards)[:, :, 0].unbind(dim=1)
        margins = chosen - rejected
        # Made on the device: a number of the host's would have it wait.
        count = torch.full((), margins.numel(), dtype=torch.int64, device=rewards.device)
        return F.softplus(-margins).sum(), count
