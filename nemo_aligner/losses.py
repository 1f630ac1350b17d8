"""Losses of reward tensors: sums and counts, so that means are taken once, over everything."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def bradley_terry(rewards: Tensor) -> tuple[Tensor, Tensor]:
    """The Bradley-Terry loss of comparisons, ``-log sigmoid(chosen - rejected)``.

    Eq. 1 of Ouyang et al. 2022, "Training language models to follow instructions with human
    feedback", summed instead of averaged.

    Args:
        rewards: ``[R, 2]`` float32, chosen then rejected.

    Returns:
        The sum over pairs, and their number (int).
    """
    margins = rewards[:, 0] - rewards[:, 1]
    return F.softplus(-margins).sum(), torch.tensor(margins.numel(), device=rewards.device)


def masked_mse(rewards: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Squared error of every label that is there.

    Args:
        rewards: ``[R, A]`` float32.
        labels: ``[R, A]`` float32, NaN where a label is missing.

    Returns:
        The sum over labels, and their number (int).
    """
    present = ~torch.isnan(labels)
    errors = torch.where(present, rewards - labels.nan_to_num(), 0.0)
    return errors.square().sum(), present.sum()
