from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.harness import families, tiny
from tests.harness.once import Once


@pytest.fixture(scope="session")
def two_ranks(once: Once) -> dict[str, Any]:
    """What ``two_ranks.py`` found, by one launch for all files."""

    def build(folder: Path) -> None:
        families.write_base_nemo(folder / "experts.nemo", "qwen3_moe")
        done = tiny.run_script("tests/training/two_ranks.py", str(folder), processes=2)
        (folder / "stderr").write_text(done.stderr)

    folder = once("two_ranks", build)
    results = json.loads((folder / "found.json").read_text())
    experts = str(folder / "experts.nemo")
    return {**results, "stderr": (folder / "stderr").read_text(), "experts": experts}
