"""A data set by Hugging Face ``datasets``, from a local folder of one, without a network."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from nemo_aligner.data.hub import fetch
from nemo_aligner.errors import ConfigError
from tests import tiny
from tests.environments import kept_environment, make_environment

DATASETS = ("datasets>=4,<5", "numpy<2")
CARD = """---
configs:
- config_name: default
  data_files: [{split: train, path: train.jsonl}, {split: validation, path: validation.jsonl}]
- config_name: other
  data_files: [{split: train, path: other.jsonl}]
---
"""


@pytest.fixture(scope="module")
def python() -> Path:
    """One that has ``datasets``, whose pins are not ours."""

    def make(folder: Path) -> None:
        make_environment(folder, *DATASETS)

    return kept_environment("hub", DATASETS, make) / "bin" / "python"


@pytest.fixture
def dataset(tmp_path: Path) -> Path:
    folder = tmp_path / "dataset"
    folder.mkdir()
    (folder / "README.md").write_text(CARD)
    for seed, name in enumerate(("train", "validation", "other")):
        tiny.write_pairs(folder / f"{name}.jsonl", 6, seed=seed)
    return folder


def run(python: Path, *arguments: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(python), "-m", "nemo_aligner", "data", "fetch", *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, **tiny.environment(HF_HUB_OFFLINE="1", HF_DATASETS_OFFLINE="1")},
    )


@pytest.mark.slow(seconds=40)
def test_splits_and_subsets_become_files_that_training_reads(
    python: Path, dataset: Path, tmp_path: Path
) -> None:
    output = tmp_path / "fetched.jsonl"
    for options, name in (
        ((), "train"),
        (("--split", "validation"), "validation"),
        (("--subset", "other"), "other"),
    ):
        done = run(python, dataset, "--output", output, *options)
        assert done.returncode == 0, done.stderr
        assert f"6 rows of {dataset}" in done.stdout
        rows, wanted = (
            [json.loads(line) for line in path.read_text().splitlines()]
            for path in (output, dataset / f"{name}.jsonl")
        )
        assert rows == wanted
    tiny.run_verb("data inspect", str(output))


@pytest.mark.slow(seconds=10)
def test_what_is_not_there_is_one_error_and_no_file(
    python: Path, dataset: Path, tmp_path: Path
) -> None:
    output = tmp_path / "fetched.jsonl"
    for arguments, wanted in (
        ((dataset, "--split", "nothing"), "split nothing"),
        ((dataset, "--subset", "nothing"), "subset nothing"),
        (("nobody/nothing",), "nobody/nothing"),
    ):
        done = run(python, *arguments, "--output", output)
        assert done.returncode == 1
        assert wanted in done.stderr
        assert "Traceback" not in done.stderr
        assert not list(tmp_path.glob("fetched*"))


def test_without_datasets_it_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ConfigError, match=r'pip install "nemo_aligner\[hub\]"'):
        fetch("owner/name", tmp_path / "fetched.jsonl")
