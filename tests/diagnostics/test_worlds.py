"""A world, or a server, that fails is said to have failed."""

from __future__ import annotations

import sys

import pytest

from nemo_aligner.diagnostics.worlds import score_over_http
from nemo_aligner.errors import ServingError


def test_a_server_that_does_not_start_says_why() -> None:
    pytest.importorskip("pytriton")
    serve = [sys.executable, "-c", "import sys; sys.exit(f'no port for {sys.argv[1]}')"]
    with pytest.raises(ServingError) as caught:
        score_over_http(serve, "rm.nemo", "fp32", ["a text"])
    assert str(caught.value) == ("the server did not start:\nno port for rm_model_file=rm.nemo\n")
