from __future__ import annotations

from pathlib import Path

import pytest

from tests.distributed import layouts
from tests.harness.once import Once


@pytest.fixture(scope="session")
def inputs(once: Once) -> Path:
    """Base checkpoints and data sets of all cases."""
    return once("layouts_inputs", layouts.write_inputs)


@pytest.fixture(scope="session")
def plain(once: Once, inputs: Path) -> Path:
    """Runs of the plain cases by one process; see ``layouts.py``."""
    return once("plain", lambda folder: layouts.train_plain(inputs, folder)) / "one"


@pytest.fixture(scope="session")
def one_process(once: Once, inputs: Path, plain: Path) -> Path:
    """A run of each case by one process, and some evaluations; see ``layouts.py``."""

    def build(folder: Path) -> None:
        layouts.train_one_process(inputs, plain, folder)

    return once("one_process", build) / "one"
