"""Masked mean squared error: every attribute near its label, where there is one."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from nemo_aligner.batch import Records
from nemo_aligner.objectives.base import RatingObjective


@dataclass(frozen=True)
class MaskedMse(RatingObjective):
    """``(reward - label) ** 2`` over the labels that are there."""

    def loss(self, rewards: Tensor, records: Records) -> tuple[Tensor, Tensor]:
        """The sum over labels, and their number (int), of rewards ``[S, A]``."""
        labels = records.labels.targets(self.attributes)
        present = ~torch.isnan(labels)
        errors = torch.where(present, records.as_single(rewards) - labels.nan_to_num(), 0.0)
        return errors.square().sum(), present.sum()
