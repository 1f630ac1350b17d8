"""The training commands of the pages on other trainers, checked as far as a run's first step."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests import tiny
from tests.config.nemo_aligner_files import write_file
from tests.launching import ROOT
from tests.test_docs import commands

PAGES = sorted((ROOT / "docs" / "migration").glob("*.md"))
TRAINING = [
    pytest.param(words, id=f"{page.stem}")
    for page in PAGES
    for words in commands(page)
    if words[0] == "train"
]
# NeMo-Aligner's own file is for long runs of long texts, which the files here are not.
SHORT = ["model.optim.sched.constant_steps=0", "model.encoder_seq_length=512"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("migration")
    tiny.write_base_nemo(folder / "base.nemo", num_attention_heads=8, num_key_value_heads=4)
    write_file(folder, "training_rm.yaml")
    return folder


def test_every_trainer_has_a_command() -> None:
    assert len(TRAINING) >= 4


@pytest.mark.slow(seconds=10)
@pytest.mark.parametrize("words", TRAINING)
def test_a_command_begins_a_run(words: list[str], folder: Path) -> None:
    arguments = [in_folder(word, folder) for word in words[1:]]
    own_file = SHORT if "--config" in words else []
    done = tiny.run_verb("train", "--dry-run", *arguments, *own_file)
    assert "The run can begin, on" in done.stdout


def in_folder(word: str, folder: Path) -> str:
    """The word with its files in ``folder``; those of data are made there."""
    return re.sub(
        r"[\w-]+\.(?:jsonl|nemo|yaml)\b|results\b", lambda name: made(folder / name[0]), word
    )


def made(path: Path) -> str:
    """The path, and pairs of its own in it if it is one of data."""
    if path.suffix == ".jsonl" and not path.exists():
        tiny.write_pairs(path, 600, seed=len([*path.parent.iterdir()]))
    return str(path)
