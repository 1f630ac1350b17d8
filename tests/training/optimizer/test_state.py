"""The state while it is saved and training goes on, and what a rank loads of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from nemo_aligner.checkpoint.runs import RunCheckpoints, RunState
from nemo_aligner.config.common import Precision
from nemo_aligner.parallel.layout import ParallelLayout
from tests.parallel.late_copies import play_late_copies
from tests.training.optimizer.test_optimizer import build, step


@pytest.mark.parametrize(
    ("precision", "offload"),
    [
        (Precision.fp32, False),
        (Precision.fp32, True),
        (Precision.bf16, True),
        (Precision.fp16, False),
    ],
)
def test_updates_wait_for_a_save_and_change_nothing_of_it(
    layout: ParallelLayout,
    precision: Precision,
    offload: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stream = play_late_copies(monkeypatch.setattr)
    wrapped, optimizer = build(layout, precision, cpu_offload=offload, warmup_steps=0)
    checkpoints = RunCheckpoints(tmp_path)
    checkpoints.reserve(wrapped.module, optimizer)
    for number in (1, 2):  # the second save has the memory of the first
        step(wrapped, optimizer, 0.01 * number)
        expected = [each.clone() for each in (*wrapped.parameters(), *optimizer.state_tensors())]
        checkpoints.save(RunState(number, number), wrapped.module, optimizer)
        assert stream.num_left == len(expected)
        step(wrapped, optimizer, -0.5)
        assert stream.num_left == 0
    saved = checkpoints.latest()
    assert saved is not None
    assert saved.state.step == 2
    resumed, other = build(layout, precision, cpu_offload=offload, warmup_steps=0)
    checkpoints.load(saved, resumed.module, other)
    found = [*resumed.parameters(), *other.state_tensors()]
    assert all(map(torch.equal, found, expected))


def test_resume_of_two_ranks_reads_of_the_state_what_each_has(two_ranks: dict[str, Any]) -> None:
    """Not all of it on each; a shard's rows may have numbers of the other rank's, too."""
    for found in two_ranks["resume"]:
        assert found["same"]
        assert found["own"] > 10**7
        assert found["allocated"] < 1.1 * found["own"], two_ranks["resume"]
        assert found["read"] < 1.3 * found["own"], two_ranks["resume"]  # every piece has an index
