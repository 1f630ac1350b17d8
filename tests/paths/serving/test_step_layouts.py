"""Rewards of turns are bit-identical in any batch, and a new turn costs only its own tokens."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from nemo_aligner.distributed.layout import ParallelLayout
from nemo_aligner.serving.engine.prefix_cache import BlockManager, as_key
from tests.harness import tiny
from tests.serving.engine import step_layouts


def check(found: dict[str, Any], name: str) -> None:
    assert found["alone"], name
    assert found["cut"], name
    assert found["grown"] == {"large": True, "small": True}, name
    assert found["together"], name
    assert found["last"], name
    rewards = np.array(found["rewards"])
    assert rewards.shape == (step_layouts.TEXTS, step_layouts.TURNS, 2)
    assert np.ptp(rewards) > 0.3


@pytest.fixture(scope="module")
def alone(base: Path, layout: ParallelLayout) -> dict[str, Any]:
    return step_layouts.compare(base, layout)


def test_rewards_of_turns_are_those_of_the_text_cut_there(alone: dict[str, Any]) -> None:
    check(alone, "one rank")


def test_turn_of_a_growing_text_costs_its_own_tokens(alone: dict[str, Any]) -> None:
    """At most one incomplete block is computed again; without cached outputs all would be."""
    computed = np.diff([0, *alone["computed"]])
    for tokens, own in zip(alone["tokens"], computed, strict=True):
        assert own <= tokens + 16 * step_layouts.TURNS
    # All dialogues again, of which only the last block is computed.
    assert alone["computed_again"] <= 2 * 16 * step_layouts.TEXTS


def test_rewards_of_turns_at_any_layout(base: Path, alone: dict[str, Any]) -> None:
    """With data parallelism, also the loss and the gradient of a training step on step labels."""
    done = tiny.run_script("tests/serving/engine/step_layouts.py", str(base), processes=2)
    found = json.loads(done.stdout.splitlines()[-1])
    assert set(found) == set(step_layouts.LAYOUTS)
    for name, own in found.items():
        check(own, name)
        np.testing.assert_allclose(own["rewards"], alone["rewards"], atol=1e-5, err_msg=name)
    # Replicas have different numbers of records and labels, which are weighted equally.
    assert found["DP=2"]["step"] == pytest.approx(alone["step"], rel=1e-5)


def test_outputs_go_with_their_blocks() -> None:
    manager = BlockManager(2)
    key = as_key(np.arange(40))
    (use,) = manager.allocate([key], [[3, 17, 39]])
    assert (use.cached, len(use.path)) == ((), 2)
    manager.keep_outputs(use.path, [3, 17, 39], np.array([[1.0], [2.0], [3.0]]))
    assert manager.find(key, [3, 17, 39]) == use.path
    assert manager.find(key, [3, 18]) == use.path[:1]  # position 18 was not read yet
    assert manager.find(key, [4]) == ()
    assert [float(own[0]) for own in manager.outputs_of(use.path, [3, 17, 39])] == [1.0, 2.0]
    manager.allocate([as_key(np.arange(100, 140))])  # evicts both blocks
    (use,) = manager.allocate([key])
    assert manager.find(key, [3]) == ()
    manager.clear()
    assert manager.find(key) == ()
