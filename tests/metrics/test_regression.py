"""Means over attributes, each of its own correlation."""

from __future__ import annotations

import pytest
import torch

from nemo_aligner.metrics.regression import RatedRewards, pearson_mean, spearman_mean


def test_means_are_over_the_attributes() -> None:
    rewards = torch.tensor([[1.0, 1.0], [2.0, 2.0], [9.0, 3.0]])
    labels = torch.tensor([[1.0, 3.0], [2.0, 1.0], [3.0, 2.0]])
    rated = RatedRewards.of(rewards, labels, ("a", "b"))
    assert spearman_mean(rated) == pytest.approx((1 - 0.5) / 2)
    assert pearson_mean(rated) == pytest.approx((0.9176629 - 0.5) / 2)
