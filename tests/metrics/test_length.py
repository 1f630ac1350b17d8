"""Accuracy on pairs whose chosen reply is longer, or shorter, by as little as one token."""

from __future__ import annotations

import pytest
import torch

from nemo_aligner.metrics.length import (
    accuracy_longer_chosen,
    accuracy_shorter_chosen,
    longer_reply_accuracy,
)
from nemo_aligner.metrics.ranking import PairRewards


def test_one_token_more_is_longer_and_as_many_is_neither() -> None:
    longer, shorter, even = [4, 3], [3, 4], [5, 5]
    right, wrong = [1.0, 0.0], [0.0, 1.0]
    rewards = torch.tensor([right, wrong, right, wrong, wrong, right, right])
    lengths = torch.tensor([longer, longer, longer, shorter, shorter, shorter, even])
    pairs = PairRewards.of(rewards, lengths)
    assert accuracy_longer_chosen(pairs) == pytest.approx(2 / 3)
    assert accuracy_shorter_chosen(pairs) == pytest.approx(1 / 3)
    assert longer_reply_accuracy(pairs) == pytest.approx(3.5 / 7)
