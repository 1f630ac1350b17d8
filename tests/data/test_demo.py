"""The demo sets of pairs and of steps."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from pathlib import Path

import pytest

from nemo_aligner.cli.main import main
from nemo_aligner.config.common import RecordKind
from nemo_aligner.data.demo import build_demo_pairs, write_demo, write_step_demo
from nemo_aligner.data.readers import ReaderConfig, read_records
from nemo_aligner.utils.errors import ConfigError, DataError
from tests.data.conftest import Run
from tests.data.files import rows_of


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
    # The published measurements used exactly this set.
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
    for write in (write_demo, write_step_demo):
        with pytest.raises(ConfigError, match=r"train.jsonl exists with other records"):
            write(folders[0], 100, 0.2, 5)
    assert (folders[0] / "train.jsonl").read_text() == first


def test_demo_set_of_too_many_pairs_is_refused(tmp_path: Path, run: Run) -> None:
    with pytest.raises(DataError, match=r"^\w+: .* \d+ different pairs"):
        build_demo_pairs(90000, 0.1, 1)
    failed = run("data demo", "--output", tmp_path, "--pairs", 90000, code=1)
    assert "different pairs" in failed.stderr
    assert "Traceback" not in failed.stderr


def test_demo_set_of_so_few_pairs_that_none_is_held_out_is_refused(tmp_path: Path) -> None:
    for write, pairs, found in (
        (write_demo, 40, "got 4 pairs of the kind 'sum', of which the fraction 0.1 is 0"),
        (write_demo, 5, "got 0 pairs"),
        (write_step_demo, 3, "got 3 answers in steps, of which the fraction 0.1 is 0"),
    ):
        with pytest.raises(DataError, match=found):
            write(tmp_path / "demo", pairs, 0.1, 1)
    assert not (tmp_path / "demo").exists()


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
            # After an error, the chain continues with the wrong sum.
            assert label in (None, first + second == int(result))
        assert False not in known[:-1]
        wrong += known[-1] is False
    assert wrong == 30
    file = read_records(
        tmp_path / "train.jsonl", ReaderConfig(RecordKind.rating, attributes=["right"])
    )
    assert (file.format, len(file.records)) == ("stepwise", 54)
