"""Hugging Face checkpoints that several test files convert."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from nemo_aligner.checkpoint.hf.convert import convert_hf_to_nemo as convert
from tests.checkpoint.hf.exporting import MEANS, REWARD_CASES, WEIGHTS, save_again
from tests.harness import tiny


@pytest.fixture(scope="module")
def base_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("hf") / "tiny"
    tiny.write_hf_checkpoint(folder)
    return folder


@pytest.fixture
def changed_base(base_checkpoint: Path, tmp_path: Path) -> Path:
    """A copy that a test may damage."""
    return Path(shutil.copytree(base_checkpoint, tmp_path / "tiny"))


@pytest.fixture(scope="module")
def reward_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("reward") / "tiny"
    tiny.write_hf_reward_model(folder)
    return folder


@pytest.fixture
def changed_reward(reward_checkpoint: Path, tmp_path: Path) -> Path:
    """A copy that a test may damage."""
    return Path(shutil.copytree(reward_checkpoint, tmp_path / "tiny"))


@pytest.fixture(scope="module")
def three(tmp_path_factory: pytest.TempPathFactory, layout: Any) -> Path:
    """Archive of a regression model with three attributes and label means."""
    folder = tmp_path_factory.mktemp("three")
    tiny.write_hf_reward_model(folder / "hf", **REWARD_CASES["three_labels"])
    convert(folder / "hf", folder / "converted.nemo")
    save_again(
        folder / "converted.nemo",
        folder / "rm.nemo",
        layout,
        attribute_weights=WEIGHTS,
        label_means=MEANS,
        reward_mean=(2.0, 1.0, 0.0),
        reward_std=(1.0, 1.0, 0.5),
        measured_on="validation-heldout",
    )
    return folder / "rm.nemo"
