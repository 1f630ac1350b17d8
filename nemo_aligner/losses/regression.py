"""Losses on ratings: masked MSE, Huber, quantiles, and cross-entropy over ordinal bins."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from nemo_aligner.batch.packed import LabelColumns, Records
from nemo_aligner.contract.readout import BINS, QUANTILES, Readout
from nemo_aligner.losses.base import RatingObjective, check_above, check_whole
from nemo_aligner.utils.host_transfer import to_device

# Masked mean squared error: every attribute near its label, where there is one.


@dataclass(frozen=True)
class MaskedMse(RatingObjective):
    """``(reward - label) ** 2`` over the labels that are there."""

    def loss(self, rewards: Tensor, records: Records) -> tuple[Tensor, Tensor]:
        """The sum over labels, and their number (int), of rewards ``[S, A]``."""
        errors, present = self.errors(rewards, records)
        return errors.square().sum(), present.sum()


# Masked Huber loss: every attribute near its label; what is far off pulls no harder.


@dataclass(frozen=True)
class Huber(RatingObjective):
    """``e ** 2 / 2`` of errors e up to ``delta``, ``delta * (abs(e) - delta / 2)`` of larger ones.

    Huber 1964, "Robust estimation of a location parameter". Over the labels that are there.
    """

    delta: float = 1.0

    def __post_init__(self) -> None:
        check_above(self, "delta", 0)

    def loss(self, rewards: Tensor, records: Records) -> tuple[Tensor, Tensor]:
        """The sum over labels, and their number (int), of rewards ``[S, A]``."""
        errors, present = self.errors(rewards, records)
        losses = F.huber_loss(
            errors, errors.new_zeros(errors.shape), reduction="none", delta=self.delta
        )
        return losses.sum(), present.sum()


# Quantiles of the labels: the median is the reward, and their distance says how sure it is.


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


# Cross-entropy over ordinal bins: a label is one of K values, and the reward the expected one.


@dataclass(frozen=True)
class OrdinalBins(RatingObjective):
    """``-sum_k w_k log softmax(outputs)_k`` of K outputs an attribute, for labels that are there.

    w is 1 at the value that is the label. A label between two values has a part of each, so that
    their weighted sum is the label ("two-hot": Imani and White 2018, "Improving regression
    performance with distributional losses"; Farebrother et al. 2024, "Stop regressing").

    Attributes:
        values: of the bins, going up: a list for all attributes, or by attribute's name a list for
            each. None is ``bins`` values at equal distances over the range of the training labels.
        bins: how many values, where these are not given.
    """

    values: Any = None
    bins: int = 5

    centres_labels: ClassVar[bool] = False

    def __post_init__(self) -> None:
        check_whole(self, "bins", 2)
        if self.values is not None:
            _ = self.readout

    @property
    def readout(self) -> Readout | None:
        """None until the values are known."""
        if self.values is None:
            return None
        rows = _rows(self.values, self.attributes)
        return Readout(BINS, tuple(tuple(map(float, row)) for row in rows))

    def fitted(self, labels: LabelColumns, kept: Readout | None) -> OrdinalBins:
        """With the values that ``kept`` has, or over the range of each attribute's ``labels``.

        Those that are given stay.

        Raises:
            ValueError: the labels of an attribute have no range.
        """
        if self.values is not None:
            return self
        if kept is not None and kept.kind == BINS:
            own = zip(self.attributes, map(list, kept.numbers), strict=True)
            return replace(self, values=dict(own))
        columns = [labels.values[:, labels.names.index(name)] for name in self.attributes]
        ranges = [column[~torch.isnan(column)] for column in columns]
        values = {}
        for name, given in zip(self.attributes, ranges, strict=True):
            if given.numel() == 0 or given.min() == given.max():
                raise ValueError(f"values: got none, wanted them, as all labels of {name} are one")
            low, high = float(given.min()), float(given.max())
            values[name] = np.linspace(low, high, self.bins).tolist()
        return replace(self, values=values)

    def loss(self, outputs: Tensor, records: Records) -> tuple[Tensor, Tensor]:
        """The sum over labels, and their number (int), of ``outputs [S, A * K]``."""
        readout = self.readout
        assert readout is not None, "training fits it to its data first"
        values = to_device(torch.tensor(readout.numbers, dtype=outputs.dtype), outputs.device)
        labels = records.labels.targets(self.attributes)
        present = ~torch.isnan(labels)
        logits = records.as_single(outputs).unflatten(1, (len(self.attributes), readout.width))
        weights = _two_hot(labels.nan_to_num().to(outputs.dtype), values)
        losses = -(weights * logits.log_softmax(dim=2)).sum(dim=2)
        return torch.where(present, losses, 0.0).sum(), present.sum()


def _rows(values: Any, attributes: Sequence[str]) -> list[Any]:
    """The list of every attribute; ValueError where one lacks or is none."""
    rows = [values] * len(attributes)
    if isinstance(values, Mapping):
        if set(values) != set(attributes):
            raise ValueError(f"values: got those of {list(values)}, wanted {list(attributes)}")
        rows = [values[name] for name in attributes]
    for row in rows:
        are_numbers = isinstance(row, list | tuple) and all(
            isinstance(value, int | float) and not isinstance(value, bool) for value in row
        )
        if not are_numbers:
            raise ValueError(f"values: got {row!r}, wanted a list of numbers")
    return rows


def _two_hot(labels: Tensor, values: Tensor) -> Tensor:
    """``[S, A]`` labels and ``[A, K]`` values to ``[S, A, K]`` weights that sum to 1.

    A label beyond the values counts as the nearest.
    """
    within = torch.minimum(torch.maximum(labels, values[:, 0]), values[:, -1])[..., None]
    steps = values.diff(dim=1)
    ones = torch.ones_like(within)
    # How far the label is on its way to a value from the one below, and from the one above.
    rising = torch.cat([ones.expand_as(within), (within - values[:, :-1]) / steps], dim=2)
    falling = torch.cat([(values[:, 1:] - within) / steps, ones.expand_as(within)], dim=2)
    return torch.minimum(rising, falling).clamp(0, 1)
