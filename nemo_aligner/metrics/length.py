"""How much the rewards of pairs go with the length of the replies."""

from __future__ import annotations

import torch
from torch import Tensor

from nemo_aligner.metrics.ranking import PairRewards, share_right
from nemo_aligner.metrics.statistics import correlation


def length_correlation(pairs: PairRewards) -> float:
    """Pearson's r of reward and length, over all replies."""
    rewards = torch.stack([pairs.chosen, pairs.rejected], dim=1)
    return correlation(rewards.flatten(), pairs.reply_lengths.double().flatten())


def accuracy_longer_chosen(pairs: PairRewards) -> float:
    """The accuracy where people chose the longer reply; NaN where they never did."""
    return float(pairs.right[_longer_by(pairs) > 0].mean())


def accuracy_shorter_chosen(pairs: PairRewards) -> float:
    """The accuracy where people chose the shorter reply; NaN where they never did."""
    return float(pairs.right[_longer_by(pairs) < 0].mean())


def longer_reply_accuracy(pairs: PairRewards) -> float:
    """The accuracy that taking the longer reply would have."""
    return float(share_right(_longer_by(pairs)).mean())


def _longer_by(pairs: PairRewards) -> Tensor:
    """``[N]`` tokens that the chosen reply has more."""
    return pairs.reply_lengths[:, 0] - pairs.reply_lengths[:, 1]
