"""Outputs of a reward head by name, and the order of their columns, which only this module knows.

A head returns a single tensor, because pipeline stages and ranks exchange single tensors. Its
columns are K outputs for each of A attributes, attribute by attribute, followed by L scalars that a
loss learns.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class HeadOutputs:
    """Outputs of a reward head for S samples, turns or steps.

    Attributes:
        attributes: ``[S, A * K]`` outputs from which the rewards are computed.
        learned: ``[S, L]`` scalars that a loss learns, the same in every row.
    """

    attributes: Tensor
    learned: Tensor

    def joined(self) -> Tensor:
        """Join the columns to ``[S, A * K + L]``; ``OutputColumns.split`` is the inverse."""
        return torch.cat([self.attributes, self.learned], dim=1)


@dataclass(frozen=True)
class OutputColumns:
    """How many columns a head's outputs have for attributes and for learned scalars.

    Attributes:
        num_attributes: number of attributes, A.
        outputs_per_attribute: K, which is 1 unless the objective has a readout.
        num_learned: number of learned scalars, L.
    """

    num_attributes: int
    outputs_per_attribute: int = 1
    num_learned: int = 0

    @property
    def count(self) -> int:
        """Number of columns, ``A * K + L``."""
        return self._num_read + self.num_learned

    @property
    def _num_read(self) -> int:
        return self.num_attributes * self.outputs_per_attribute

    def split(self, outputs: Tensor) -> HeadOutputs:
        """Split ``outputs [S, A * K + L]`` into those of the attributes and learned scalars."""
        return HeadOutputs(outputs[:, : self._num_read], outputs[:, self._num_read :])

    def by_attribute(self, outputs: Tensor) -> Tensor:
        """Drop the L learned scalars from ``outputs [S, A * K + L]``; return ``[S, A, K]``."""
        shape = (self.num_attributes, self.outputs_per_attribute)
        return self.split(outputs).attributes.unflatten(1, shape)
