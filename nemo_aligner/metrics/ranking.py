"""Metrics of whole sets of rewards, in float64: the same numbers at any layout and batch size.

Whoever calls these has gathered every record once; nothing here is a mean of means.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from nemo_aligner.losses import bradley_terry
from nemo_aligner.metrics.calibration import calibration_metrics
from nemo_aligner.metrics.length import length_metrics
from nemo_aligner.metrics.statistics import ordered_right

_QUANTILES = (5, 25, 50, 75, 95)


def ranking_metrics(rewards: Tensor) -> dict[str, float]:
    """How well comparisons are ordered; a tie counts one half and is also reported apart.

    Args:
        rewards: ``[N, 2]``, chosen then rejected, of every comparison once.
    """
    rewards = rewards.double().cpu()
    chosen, rejected = rewards.unbind(dim=1)
    margins = chosen - rejected
    loss, count = bradley_terry(rewards)
    return {
        "loss": float(loss / count),
        "accuracy": float(ordered_right(margins).mean()),
        "ties": float((margins == 0).double().mean()),
        "reward_margin": float(margins.mean()),
        "reward_chosen_mean": float(chosen.mean()),
        "reward_chosen_std": float(chosen.std(correction=0)),
        "reward_rejected_mean": float(rejected.mean()),
        "reward_rejected_std": float(rejected.std(correction=0)),
    }


def ranking_report(rewards: Tensor, reply_lengths: Tensor) -> dict[str, float]:
    """``ranking_metrics``, and what a whole set can tell about margins, calibration and length.

    Args:
        rewards: ``[N, 2]``, chosen then rejected, of every comparison once.
        reply_lengths: ``[N, 2]`` lengths of the replies.

    Returns:
        Also ``reward_margin_p05`` to ``_p95``, quantiles of the margin; ``calibration_metrics`` and
        ``length_metrics``.
    """
    margins = (rewards[:, 0].double() - rewards[:, 1].double()).cpu()
    places = torch.tensor(_QUANTILES, dtype=torch.float64) / 100
    quantiles = torch.quantile(margins, places).tolist() if len(margins) else [math.nan] * 5
    return {
        **ranking_metrics(rewards),
        **{
            f"reward_margin_p{percent:02d}": value
            for percent, value in zip(_QUANTILES, quantiles, strict=True)
        },
        **calibration_metrics(margins),
        **length_metrics(rewards, reply_lengths),
    }
