"""Data that a verb makes: of a hub, by ``datasets`` without a network, and the demo set."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from collections import Counter
from datetime import date
from pathlib import Path
from types import ModuleType

import pytest

from nemo_aligner.cli.main import main
from nemo_aligner.config.common import RecordKind
from nemo_aligner.data.demo import build_demo_pairs, write_demo
from nemo_aligner.data.hub import fetch
from nemo_aligner.data.readers import ReaderConfig, read_records
from nemo_aligner.utils.errors import ConfigError, DataError
from tests.data.conftest import Run
from tests.data.files import rows_of
from tests.harness import tiny
from tests.harness.environments import kept_environment, make_environment

DATASETS = ("datasets>=4,<5", "numpy<2", "pyarrow<26")
CARD = """---
configs:
- config_name: default
  data_files: [{split: train, path: train.jsonl}, {split: validation, path: validation.jsonl}]
- config_name: other
  data_files: [{split: train, path: other.jsonl}]
---
"""
# Every line of input is one command line; what it ends with, and what it says, is a line of output.
FETCH_ALL = """
import contextlib, io, json, sys
from nemo_aligner.cli.main import main

for line in sys.stdin:
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main(["data", "fetch", *json.loads(line)])
    print(json.dumps([code, out.getvalue(), err.getvalue()]))
"""


@pytest.fixture(scope="module")
def python() -> Path:
    """One that has ``datasets``, whose pins are not ours."""

    def make(folder: Path) -> None:
        make_environment(folder, *DATASETS)

    return kept_environment("hub", DATASETS, make) / "bin" / "python"


def test_fetch_writes_splits_and_subsets_as_files_that_training_reads(
    python: Path, tmp_path: Path, run: Run
) -> None:
    dataset = tmp_path / "dataset"
    dataset.mkdir()
    (dataset / "README.md").write_text(CARD)
    for seed, name in enumerate(("train", "validation", "other")):
        tiny.write_pairs(dataset / f"{name}.jsonl", 6, seed=seed)
    there = {"train": (), "validation": ("--split", "validation"), "other": ("--subset", "other")}
    commands = [
        [str(dataset), "--output", f"{tmp_path}/{name}.jsonl", *options]
        for name, options in there.items()
    ]
    missing = {
        "split nothing": (dataset, "--split", "nothing"),
        "subset nothing": (dataset, "--subset", "nothing"),
        "nobody/nothing": ("nobody/nothing",),
    }
    output = ("--output", str(tmp_path / "missing.jsonl"))
    commands += [[*map(str, arguments), *output] for arguments in missing.values()]
    done = subprocess.run(
        [str(python), "-c", FETCH_ALL],
        input="".join(json.dumps(command) + "\n" for command in commands),
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, **tiny.environment(HF_HUB_OFFLINE="1", HF_DATASETS_OFFLINE="1")},
    )
    assert done.returncode == 0, done.stderr
    ended = [json.loads(line) for line in done.stdout.splitlines()]
    for name, (code, shown, error) in zip(there, ended, strict=False):
        assert code == 0, error
        assert f"6 rows of {dataset}" in shown
        assert rows_of(tmp_path / f"{name}.jsonl") == rows_of(dataset / f"{name}.jsonl")
    run("data inspect", tmp_path / "train.jsonl")
    for named, (code, _, error) in zip(missing, ended[len(there) :], strict=True):
        assert code == 1
        assert named in error
        assert "Traceback" not in error
    assert not list(tmp_path.glob("missing*"))


def test_fetch_without_datasets_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ConfigError, match=r"pip install -e '.*\[hub\]'"):
        fetch("owner/name", tmp_path / "fetched.jsonl")


def test_fetch_leaves_out_what_lines_cannot_hold_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    row = {
        "prompt": "why",
        "score": float("nan"),
        "image": {"bytes": b"x"},
        "day": date(2026, 1, 2),
    }
    hub = ModuleType("datasets")
    monkeypatch.setattr(hub, "disable_progress_bars", lambda: None, raising=False)
    monkeypatch.setattr(hub, "load_dataset", lambda *_, **__: iter([row]), raising=False)
    monkeypatch.setitem(sys.modules, "datasets", hub)
    path = tmp_path / "fetched.jsonl"
    assert fetch("owner/name", path) == 1
    assert rows_of(path) == [{"prompt": "why", "score": None, "day": "2026-01-02"}]
    assert capsys.readouterr().out == "dropped columns that JSON cannot hold: image\n"


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("demo")
    assert main(["data", "demo", "--output", str(folder)]) == 0
    return folder


def test_demo_set_is_large_and_balanced(demo: Path) -> None:
    train, heldout = rows_of(demo / "train.jsonl"), rows_of(demo / "heldout.jsonl")
    assert len(train) >= 2000
    for side in (train, heldout):
        kinds = Counter(row["kind"] for row in side)
        shorter = Counter(row["kind"] for row in side if len(row["chosen"]) < len(row["rejected"]))
        assert len(kinds) == 10
        assert len(set(kinds.values())) == 1
        assert shorter == {kind: count // 2 for kind, count in kinds.items()}
    assert len({json.dumps(row) for row in train + heldout}) == len(train) + len(heldout)
    assert not {row["prompt"] for row in train} & {row["prompt"] for row in heldout}
    file = read_records(demo / "train.jsonl", ReaderConfig(RecordKind.comparison))
    assert file.counts["kept"] == len(train)
    # It is the one that figures were measured on.
    digests = {
        name: hashlib.sha256((demo / f"{name}.jsonl").read_bytes()).hexdigest()
        for name in ("train", "heldout")
    }
    assert digests == {
        "train": "22d0125100788d1b4dc08ceaf1e3b615dd85fafa88f445f101735ae8d6d82306",
        "heldout": "544333d7132c8dd194d551483132f4f8c2395042ac5a24281c12e68bd8902ed9",
    }


def test_demo_set_of_another_seed_and_size(tmp_path: Path) -> None:
    folders = [tmp_path / "new" / name for name in ("a", "b", "c")]
    for folder, seed in zip(folders, (3, 3, 4), strict=True):
        shown = write_demo(folder, pairs=100, heldout=0.2, seed=seed)
    wanted = "always taking the longer reply (in characters) is right in 50.0% of heldout"
    assert shown.splitlines()[-1] == wanted
    first, again, other = ((folder / "train.jsonl").read_text() for folder in folders)
    assert first == again != other
    assert len(rows_of(folders[0] / "heldout.jsonl")) == 20


def test_demo_set_of_too_many_pairs_is_refused(tmp_path: Path, run: Run) -> None:
    with pytest.raises(DataError, match=r"^\w+: .* \d+ different pairs"):
        build_demo_pairs(90000, 0.1, 1)
    failed = run("data demo", "--output", tmp_path, "--pairs", 90000, code=1)
    assert "different pairs" in failed.stderr
    assert "Traceback" not in failed.stderr


def test_demo_set_of_steps_has_an_error_in_every_second_chain(tmp_path: Path) -> None:
    command = ["data", "demo", "--kind", "steps", "--pairs", "60", "--output", str(tmp_path)]
    assert main(command) == 0
    train, heldout = (rows_of(tmp_path / f"{name}.jsonl") for name in ("train", "heldout"))
    assert (len(train), len(heldout)) == (54, 6)
    assert not {row["prompt"] for row in train} & {row["prompt"] for row in heldout}
    wrong = 0
    for row in [*train, *heldout]:
        known = [label for label in row["labels"] if label is not None]
        for step, label in zip(row["completions"], row["labels"], strict=False):
            asked, result = step.split(" = ")
            first, second = map(int, asked.split(" + "))
            # Behind an error the chain goes on from what it found.
            assert label in (None, first + second == int(result))
        assert False not in known[:-1]
        wrong += known[-1] is False
    assert wrong == 30
    file = read_records(
        tmp_path / "train.jsonl", ReaderConfig(RecordKind.rating, attributes=["right"])
    )
    assert (file.format, len(file.records)) == ("stepwise", 54)
