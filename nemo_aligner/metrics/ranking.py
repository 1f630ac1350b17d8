"""How well rewards order pairs, in float64: the same numbers at any layout and batch size."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from nemo_aligner.metrics.statistics import deviation


@dataclass(frozen=True)
class PairRewards:
    """Rewards of N pairs, each there once; who calls metrics has gathered them all.

    Attributes:
        chosen, rejected: ``[N]`` float64.
        reply_lengths: ``[N, 2]`` integer tokens of the replies, chosen then rejected.
    """

    chosen: Tensor
    rejected: Tensor
    reply_lengths: Tensor

    @classmethod
    def of(cls, rewards: Tensor, reply_lengths: Tensor | None = None) -> PairRewards:
        """Of ``[N, 2]`` rewards, chosen then rejected, in any dtype and on any device."""
        chosen, rejected = rewards.double().cpu().unbind(dim=1)
        if reply_lengths is None:
            reply_lengths = torch.zeros(rewards.shape, dtype=torch.int64)
        return cls(chosen, rejected, reply_lengths.cpu())

    @property
    def margins(self) -> Tensor:
        """``[N]`` float64, chosen minus rejected."""
        return self.chosen - self.rejected

    @property
    def right(self) -> Tensor:
        """``[N]`` float64: 1 for a pair in order, one half for a tie, else 0."""
        return share_right(self.margins)


def share_right(margins: Tensor) -> Tensor:
    """``[N]`` float64: 1 for a positive margin, one half for none, else 0."""
    return (margins.sign().double() + 1) / 2


def accuracy(pairs: PairRewards) -> float:
    """The share of pairs in order; a tie counts one half."""
    return float(pairs.right.mean())


def ties(pairs: PairRewards) -> float:
    """The share of pairs with equal rewards."""
    return float((pairs.margins == 0).double().mean())


def mean_margin(pairs: PairRewards) -> float:
    """The mean of chosen minus rejected."""
    return float(pairs.margins.mean())


def chosen_mean(pairs: PairRewards) -> float:
    """The mean reward of the chosen replies."""
    return float(pairs.chosen.mean())


def chosen_std(pairs: PairRewards) -> float:
    """The deviation of the chosen replies' rewards."""
    return deviation(pairs.chosen)


def rejected_mean(pairs: PairRewards) -> float:
    """The mean reward of the rejected replies."""
    return float(pairs.rejected.mean())


def rejected_std(pairs: PairRewards) -> float:
    """The deviation of the rejected replies' rewards."""
    return deviation(pairs.rejected)


def margin_quantile(percent: int) -> Callable[[PairRewards], float]:
    """The metric that is the margin which ``percent`` of the pairs stay below."""

    def quantile(pairs: PairRewards) -> float:
        if len(pairs.margins) == 0:
            return math.nan
        # torch.quantile takes no more than 2^24.
        return float(np.quantile(pairs.margins.detach().numpy(), percent / 100))

    return quantile
