"""A server in a process of its own that does not start is said to have failed, and why."""

from __future__ import annotations

from pathlib import Path

import pytest

from nemo_aligner.errors import ServingError
from nemo_aligner.serving.process import served


def test_a_server_that_does_not_start_says_why(tmp_path: Path) -> None:
    log = tmp_path / "server.log"
    with pytest.raises(ServingError) as caught, served(["rm_model_file=nowhere.nemo"], log):
        pytest.fail("the server started without a model")
    said = str(caught.value)
    assert said.startswith(f"the server did not start; the end of {log}:\n")
    assert "CheckpointError: nowhere.nemo" in said
