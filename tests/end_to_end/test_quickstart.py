"""The quickstart on a tiny model and data of one's own, from the first command to the last."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import tiny
from tests.once import TURNS

STEPS = ("convert", "data split", "train", "evaluate", "serve", "score")


@pytest.fixture
def home() -> Iterator[Path]:
    """Of the server: a short path, as its sockets have at most 108 letters."""
    with tempfile.TemporaryDirectory(prefix="triton") as folder:
        yield Path(folder)


def test_every_step_is_shown_and_done(tmp_path: Path, home: Path) -> None:
    pytest.importorskip("pytriton")
    base = tiny.write_base_nemo(tmp_path / "base.nemo").with_suffix(".hf")
    pairs = tiny.write_pairs(tmp_path / "pairs.jsonl", 60)
    asked = [f"--data={pairs}", f"--base={base}", f"--output={tmp_path / 'out'}"]
    settings = ["trainer.rm.max_steps=2", "model.freeze_layers=0", "model.optim.lr=1e-3"]
    # It starts ranks and a server, which another test's ranks would starve.
    with TURNS.one():
        done = tiny.run_verb(
            "quickstart", *asked, *settings, timeout=600, env={"PYTRITON_HOME": str(home)}
        )
    for verb in STEPS:
        assert f"$ nemo-aligner {verb} " in done.stdout
    assert "step 2/2" in done.stdout
    assert "held-out accuracy, " in done.stdout
    assert "the server is stopped" in done.stdout
    model = tmp_path / "out" / "run" / "checkpoints" / "megatron_gpt.nemo"
    assert f"nemo-aligner serve rm_model_file={model}" in done.stdout
    report = json.loads((tmp_path / "out" / "evaluation.json").read_text())
    assert 0 <= report["metrics"]["accuracy"] <= 1
