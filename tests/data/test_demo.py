"""The demo set is balanced and split by what it asks."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from nemo_aligner.config.common import RecordKind
from nemo_aligner.data.demo import build_demo_pairs, write_demo
from nemo_aligner.data.reading import Reading, read_records
from nemo_aligner.errors import DataError
from tests import tiny


def rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("demo")
    tiny.run_verb("data demo", "--output", str(folder))
    return folder


def test_the_demo_set_is_large_and_balanced(demo: Path) -> None:
    train, heldout = rows(demo / "train.jsonl"), rows(demo / "heldout.jsonl")
    assert len(train) >= 2000
    for side in (train, heldout):
        kinds = Counter(row["kind"] for row in side)
        assert len(kinds) == 10
        assert len(set(kinds.values())) == 1
        for kind, count in kinds.items():
            shorter = sum(
                len(row["chosen"]) < len(row["rejected"]) for row in side if row["kind"] == kind
            )
            assert shorter == count // 2, kind
    assert len({json.dumps(row) for row in train + heldout}) == len(train) + len(heldout)
    assert not {row["prompt"] for row in train} & {row["prompt"] for row in heldout}
    assert read_records(demo / "train.jsonl", Reading(RecordKind.comparison)).counts["kept"] == len(
        train
    )


def test_the_demo_set_follows_its_seed(demo: Path, tmp_path: Path) -> None:
    for seed, same in (("1", True), ("2", False)):
        tiny.run_verb("data demo", "--output", str(tmp_path / seed), "--seed", seed)
        again = (tmp_path / seed / "train.jsonl").read_text()
        assert (again == (demo / "train.jsonl").read_text()) is same


def test_too_many_demo_pairs_is_an_error(tmp_path: Path) -> None:
    done = tiny.run_verb("data demo", "--output", str(tmp_path), "--pairs", "90000", check=False)
    assert done.returncode == 1
    assert "wanted" in done.stderr
    assert "Traceback" not in done.stderr


def test_the_demo_set_is_the_one_that_figures_were_measured_on(demo: Path) -> None:
    digests = {
        name: hashlib.sha256((demo / f"{name}.jsonl").read_bytes()).hexdigest()
        for name in ("train", "heldout")
    }
    assert digests == {
        "train": "22d0125100788d1b4dc08ceaf1e3b615dd85fafa88f445f101735ae8d6d82306",
        "heldout": "544333d7132c8dd194d551483132f4f8c2395042ac5a24281c12e68bd8902ed9",
    }


def test_a_folder_that_is_not_there_is_made(tmp_path: Path) -> None:
    shown = write_demo(tmp_path / "new" / "folder", pairs=100, heldout=0.2, seed=3)
    assert len(rows(tmp_path / "new" / "folder" / "heldout.jsonl")) == 20
    assert shown.splitlines()[-1] == "always taking the longer reply is right in 50.0% of heldout"


def test_a_kind_that_is_too_small_is_named() -> None:
    with pytest.raises(DataError, match=r"^\w+: got \d+ pairs with the shorter reply better and"):
        build_demo_pairs(90000, 0.1, 1)
