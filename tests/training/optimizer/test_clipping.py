"""A gradient longer than the limit is shortened to it; its norm is told as it was."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests import tiny
from tests.training.optimizer import clipping

# float32 beside float64, after a few steps of 0.01.
TOLERANCE = 1e-5


def check(found: dict[str, Any]) -> None:
    assert found["norms"] == pytest.approx(found["wanted"], rel=1e-5)
    assert min(found["wanted"]) < clipping.LIMIT < max(found["wanted"])
    assert found["difference"] < TOLERANCE


def test_the_weights_move_as_by_adamw_on_the_clipped_gradient(layout: Any) -> None:
    check(clipping.compare(layout, clipping.LIMIT))


def test_a_limit_of_zero_clips_nothing(layout: Any) -> None:
    check(clipping.compare(layout, 0.0))


def test_two_ranks_clip_by_the_norm_of_the_whole_gradient() -> None:
    done = tiny.run_script("tests/training/optimizer/clipping.py", processes=2)
    check(json.loads(done.stdout.strip().splitlines()[-1]))
