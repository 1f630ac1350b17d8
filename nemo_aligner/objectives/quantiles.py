"""Quantiles of the labels: the median is the reward, and their distance says how sure it is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from nemo_aligner.batch import Records
from nemo_aligner.objectives.base import RatingObjective
from nemo_aligner.readout import QUANTILES, Readout
from nemo_aligner.transfer import to_device


@dataclass(frozen=True)
class Quantiles(RatingObjective):
    """The mean over K levels t of ``max(t * u, (t - 1) * u)``, u the label minus the output of t.

    The pinball loss of Koenker and Bassett 1978, "Regression quantiles", for labels that are there.

    Attributes:
        levels: between 0 and 1, going up; 0.5 is one of them.
    """

    levels: Sequence[float] = (0.1, 0.5, 0.9)

    def __post_init__(self) -> None:
        try:
            _ = self.readout
        except TypeError as error:
            raise ValueError(f"levels: got {self.levels!r}, wanted a list of numbers") from error

    @property
    def readout(self) -> Readout:
        return Readout(QUANTILES, (tuple(map(float, self.levels)),) * len(self.attributes))

    def loss(self, outputs: Tensor, records: Records) -> tuple[Tensor, Tensor]:
        """The sum over labels, and their number (int), of ``outputs [S, A * K]``."""
        levels = to_device(torch.tensor(self.levels, dtype=outputs.dtype), outputs.device)
        labels = records.labels.targets(self.attributes)
        present = ~torch.isnan(labels)
        shape = (len(self.attributes), len(self.levels))
        short = labels.nan_to_num()[..., None] - records.as_single(outputs).unflatten(1, shape)
        losses = torch.maximum(levels * short, (levels - 1) * short).mean(dim=2)
        return torch.where(present, losses, 0.0).sum(), present.sum()
