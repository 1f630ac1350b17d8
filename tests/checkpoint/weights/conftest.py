"""Stored weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.checkpoint.weights.tensors import request


@pytest.fixture
def saved(layout: Any, tmp_path: Path) -> Path:
    from nemo_aligner.checkpoint.weights.save import save_weights

    save_weights(request(), tmp_path / "weights")
    return tmp_path / "weights"
