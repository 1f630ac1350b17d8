"""A world of processes that fails is said to have failed."""

from __future__ import annotations

import pytest

from nemo_aligner.diagnostics.worlds import run_world
from nemo_aligner.errors import PeerError


@pytest.mark.slow(seconds=10)
@pytest.mark.parametrize("size", [1, 2])
def test_a_world_that_fails_says_why_once(size: int, capfd: pytest.CaptureFixture[str]) -> None:
    job = {"checkpoint": "nowhere.nemo", "texts": ["a"], "precision": "fp32"}
    with pytest.raises(PeerError, match=f"the run of {size} processes failed"):
        run_world(job, size)
    assert capfd.readouterr().err == (
        "CheckpointError: nowhere.nemo: no such .nemo archive or folder\n"
    )
