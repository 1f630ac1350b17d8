"""The demo set is balanced and split by prompt; a split keeps lines and prompts whole."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from nemo_aligner.data.records import read_records
from tests import tiny

SCRIPT = "scripts/prepare_data.py"


def rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("demo")
    tiny.run_script(SCRIPT, "demo", "--output", str(folder))
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
    assert read_records(demo / "train.jsonl", "comparison").counts["kept"] == len(train)


def test_the_demo_set_follows_its_seed(demo: Path, tmp_path: Path) -> None:
    for seed, same in (("1", True), ("2", False)):
        tiny.run_script(SCRIPT, "demo", "--output", str(tmp_path / seed), "--seed", seed)
        again = (tmp_path / seed / "train.jsonl").read_text()
        assert (again == (demo / "train.jsonl").read_text()) is same


def test_too_many_demo_pairs_is_an_error(tmp_path: Path) -> None:
    done = tiny.run_script(
        SCRIPT, "demo", "--output", str(tmp_path), "--pairs", "90000", check=False
    )
    assert done.returncode == 1
    assert "wanted" in done.stderr
    assert "Traceback" not in done.stderr


def test_split_keeps_lines_and_prompts_whole(tmp_path: Path) -> None:
    lines = [
        json.dumps({"x": n, "rejected": "no", "chosen": f"yes {n}", "prompt": f"Why  {n // 3}"})
        for n in range(60)
    ]
    lines += [json.dumps({"prompt": "WHY 0", "chosen": "a", "rejected": "b"})]
    lines += [json.dumps({"prompt": "drop", "chosen": "a", "rejected": "a"})]
    source = tmp_path / "pairs.jsonl"
    source.write_text("\n".join(lines))
    done = tiny.run_script(
        SCRIPT, "split", str(source), "--output", str(tmp_path), "--heldout", "0.3"
    )
    train = (tmp_path / "train.jsonl").read_text().splitlines()
    heldout = (tmp_path / "heldout.jsonl").read_text().splitlines()
    assert sorted(train + heldout) == sorted(lines[:-1])
    assert 18 <= len(heldout) <= 21

    def prompts(side: list[str]) -> set[str]:
        return {json.loads(line)["prompt"].casefold().replace("  ", " ") for line in side}

    assert not prompts(train) & prompts(heldout)
    assert "1 identical" in done.stdout
    assert "longer reply is right in 100.0%" in done.stdout or "b" in "".join(heldout)


def test_split_keeps_comparison_lines_together(tmp_path: Path) -> None:
    lines = []
    for n in range(40):
        prompt = f"User: question {n // 2}\nAssistant: "
        lines += [json.dumps({"text": f"{prompt}good {n}"}), json.dumps({"text": f"{prompt}bad"})]
    source = tmp_path / "lines.jsonl"
    source.write_text("\n".join(lines))
    tiny.run_script(SCRIPT, "split", str(source), "--output", str(tmp_path))
    sides = [(tmp_path / f"{name}.jsonl").read_text().splitlines() for name in ("train", "heldout")]
    assert [len(side) for side in sides] == [64, 16]
    questions = []
    for side in sides:
        for good, bad in zip(side[::2], side[1::2], strict=True):
            assert lines.index(good) % 2 == 0
            assert json.loads(bad)["text"].endswith("bad")
        questions.append({json.loads(line)["text"].split("\n")[0] for line in side})
    assert not questions[0] & questions[1]


def test_split_of_ratings_shows_what_length_scores(tmp_path: Path) -> None:
    source = tmp_path / "ratings.json"
    ratings = [
        {"prompt": f"p{n}", "response": "x" * (n + 1), "up": n, "down": None if n % 7 == 0 else -n}
        for n in range(50)
    ]
    source.write_text(json.dumps(ratings, indent=2))
    done = tiny.run_script(
        SCRIPT, "split", str(source), "--output", str(tmp_path), "--attributes", "up,down"
    )
    assert "up: Pearson r 1.000" in done.stdout
    assert "mean over attributes: 1.000" in done.stdout
    assert (
        sorted(
            rows(tmp_path / "train.jsonl") + rows(tmp_path / "heldout.jsonl"),
            key=lambda row: row["up"],
        )
        == ratings
    )


def test_one_prompt_cannot_be_split(tmp_path: Path) -> None:
    source = tmp_path / "pairs.jsonl"
    source.write_text(json.dumps({"prompt": "a", "chosen": "b", "rejected": "c"}))
    done = tiny.run_script(SCRIPT, "split", str(source), "--output", str(tmp_path), check=False)
    assert done.returncode == 1
    assert "got 1 different prompts" in done.stderr
    assert not (tmp_path / "train.jsonl").exists()
