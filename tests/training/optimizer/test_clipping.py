"""A gradient longer than the limit is shortened to it; its norm is told as it was."""

from __future__ import annotations

from typing import Any

import pytest

from tests.training.optimizer import clipping

# float32 beside float64, after a few steps of 0.01.
TOLERANCE = 1e-5


def check(found: dict[str, Any]) -> None:
    assert found["norms"] == pytest.approx(found["wanted"], rel=1e-5)
    assert min(found["wanted"]) < clipping.LIMIT < max(found["wanted"])
    assert found["difference"] < TOLERANCE


def test_clipping_moves_the_weights_as_adamw_on_the_clipped_gradient(layout: Any) -> None:
    check(clipping.compare(layout, clipping.LIMIT))


def test_clipping_at_zero_clips_nothing(layout: Any) -> None:
    check(clipping.compare(layout, 0.0))


def test_clipping_on_two_ranks_is_by_the_norm_of_the_whole_gradient(
    two_ranks: dict[str, Any],
) -> None:
    check(two_ranks["clipping"])
