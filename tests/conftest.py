"""What tests of several folders share."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.environments import make_environment


@pytest.fixture(scope="session")
def trl_python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A python with TRL and the module of rewardbench's pipeline."""
    folder = tmp_path_factory.mktemp("trl") / "environment"
    return make_environment(folder, "trl==1.16.0", alone=("rewardbench==0.1.4",))
