"""The value loss of PPO, against numbers that can be computed by hand."""

from __future__ import annotations

import pytest
import torch

from nemo_aligner.batch import LabelColumns, Records
from nemo_aligner.objectives.clipped_value import ClippedValueLoss


def records(*rows: tuple[float, float, float]) -> Records:
    """A token for each: return, earlier value, mask."""
    labels = LabelColumns.of(ClippedValueLoss.columns, torch.tensor(rows))
    return Records.of(range(len(rows)), [1] * len(rows), labels)


def test_clipped_value_that_moved_far_pays_for_the_clipped_one() -> None:
    # Near the return, but far from what it was: the clipped error is the larger one.
    for clip, wanted in ((0.2, 0.5 * 0.8**2), (0.0, 0.5 * 0.1**2), (5.0, 0.5 * 0.1**2)):
        total, count = ClippedValueLoss(clip).loss(torch.tensor([[0.9]]), records((1.0, 0.0, 1.0)))
        assert (total.item(), int(count)) == (pytest.approx(wanted), 1), clip


def test_clipped_value_that_came_nearer_has_no_gradient() -> None:
    values = torch.tensor([[0.9], [-0.9]], requires_grad=True)
    total, _ = ClippedValueLoss(0.2).loss(values, records((1.0, 0.0, 1.0), (1.0, 0.0, 1.0)))
    total.backward()
    assert values.grad is not None
    assert values.grad[:, 0].tolist() == [0.0, pytest.approx(-1.9)]


def test_clipped_value_that_is_masked_may_be_anything_and_changes_nothing() -> None:
    values = torch.tensor([[0.5], [7.0]], requires_grad=True)
    of_both = records((1.0, 0.4, 1.0), (float("nan"), float("inf"), 0.0))
    total, count = ClippedValueLoss(0.2).loss(values, of_both)
    total.backward()
    assert (total.item(), int(count)) == (pytest.approx(0.125), 1)
    assert values.grad is not None
    assert values.grad[:, 0].tolist() == [pytest.approx(-0.5), 0.0]


def test_clipped_value_merges_attributes_by_weights_and_label_means_as_rewards_do() -> None:
    outputs, token = torch.tensor([[3.0, 2.0]]), records((0.0, 0.0, 1.0))
    for means, value in (((), 2.0), ((1.5, 2.5), 2.25)):
        loss = ClippedValueLoss(0.0, weights=(1.0, -0.5), means=means)
        assert loss.merged(outputs).tolist() == [pytest.approx(value)]
        assert loss.loss(outputs, token)[0].item() == pytest.approx(0.5 * value**2)
