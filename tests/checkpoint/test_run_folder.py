"""The folder of a run, given for a model."""

from __future__ import annotations

from pathlib import Path

import pytest

from nemo_aligner.checkpoint.nemo.open import open_nemo
from nemo_aligner.errors import CheckpointError

STEP = "checkpoints/step_00000100"


def make_run(folder: Path, *names: str) -> Path:
    (folder / "checkpoints").mkdir(parents=True)
    for name in ("config.yaml", *names):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("")
    return folder


def refused(path: Path) -> str:
    with pytest.raises(CheckpointError) as caught, open_nemo(path):
        pass
    return str(caught.value)


@pytest.mark.parametrize(
    ("inside", "what"),
    [
        (".", "a training run"),
        ("checkpoints", "the checkpoints of a training run"),
        (STEP, "a checkpoint of a training run"),
        (f"{STEP}/state", "a part of a checkpoint of a training run"),
    ],
)
def test_the_model_of_a_run_is_named(tmp_path: Path, inside: str, what: str) -> None:
    states = [f"{STEP}/run_state.json", f"{STEP}/state/common.pt"]
    run = make_run(tmp_path / "first", *states)
    path = run / inside
    assert refused(path) == (
        f"{path}: got {what}, wanted a model; the run has not come to its end: its training with "
        f"trainer.rm.max_steps=100 writes {run}/checkpoints/megatron_gpt.nemo"
    )
    (run / "checkpoints" / "megatron_gpt.nemo").write_text("")
    assert refused(path) == (
        f"{path}: got {what}, wanted a model; the run's is {run}/checkpoints/megatron_gpt.nemo"
    )


def test_the_newest_step_is_named(tmp_path: Path) -> None:
    steps = [f"checkpoints/step_{step:08d}/run_state.json" for step in (100, 1200, 900)]
    assert "trainer.rm.max_steps=1200 writes" in refused(make_run(tmp_path / "first", *steps))


def test_a_run_without_a_checkpoint_is_one(tmp_path: Path) -> None:
    said = refused(make_run(tmp_path / "first"))
    assert said.endswith("the run has not come to its end: it has no checkpoint yet")


def test_another_folder_is_no_run(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("")
    assert "wanted a checkpoint of NeMo or Megatron" in refused(tmp_path)
