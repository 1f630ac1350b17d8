"""``nemo-aligner data fetch``: files of a local hub, read by ``datasets`` without a network."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from datetime import date
from pathlib import Path
from types import ModuleType

import pytest

from nemo_aligner.data.hub import fetch, local_files
from nemo_aligner.utils.cache import VARIABLE
from nemo_aligner.utils.errors import ConfigError, DataError
from tests.data.conftest import Run
from tests.data.files import rows_of
from tests.data.hubs import FakeHub
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
# Each input line is the arguments of a command; each output line has its exit code and output.
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
    """A Python with ``datasets``, whose pinned dependencies differ from ours."""

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
    monkeypatch.setenv(VARIABLE, str(tmp_path / "cache"))
    with pytest.raises(ConfigError, match=r"^there is no file nosuch/name; as a name of"):
        local_files(["nosuch/name"])


def test_fetch_to_a_folder_or_file_of_the_data_set_is_refused_before_it_downloads(
    tmp_path: Path,
) -> None:
    with pytest.raises(ConfigError, match=f"^output: {tmp_path} is a folder. Name a file$"):
        fetch("owner/name", tmp_path)
    pairs = tiny.write_pairs(tmp_path / "train.jsonl", 1)
    with pytest.raises(ConfigError, match=r"train\.jsonl is a file of the folder"):
        fetch(str(tmp_path), pairs)


def test_data_set_becomes_a_file_of_the_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VARIABLE, str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    pairs = tiny.write_pairs(tmp_path / "pairs.jsonl", 4)
    hub = FakeHub(pairs).put_into(monkeypatch)
    (tmp_path / "here").mkdir()
    files = ["pairs.jsonl", "nowhere", "a/b/c", "here/gone", "gone/pairs.jsonl", "gone/x.parquet"]
    assert local_files(files) == files
    assert hub.requests == []
    for _ in range(2):
        paths = local_files(["owner/set", "owner/set:train", "owner/set:test"])
    assert paths[0] == paths[1] != paths[2]
    assert rows_of(Path(paths[2])) == rows_of(pairs)
    assert hub.requests == [("owner/set", "train"), ("owner/set", "test")]
    of_subset, of_other_name = local_files(["owner/set:principle:test", "owner/set-principle:test"])
    assert Path(of_subset).name == "owner--set--principle--test.jsonl"
    assert Path(of_other_name).name == "owner--set-principle--test.jsonl"
    assert hub.requests[2:] == [("owner/set", "principle", "test"), ("owner/set-principle", "test")]
    pairs.write_text("")
    with pytest.raises(DataError, match="owner/empty, subset a, split train: it has no rows"):
        local_files(["owner/empty:a:train"])
    assert len(list((tmp_path / "cache/data").glob("*.jsonl"))) == 4


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
