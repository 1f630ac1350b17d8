"""A split keeps all records of a line and of a prompt in the same part."""

from __future__ import annotations

import itertools
import json
import re
from collections import Counter
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from nemo_aligner.data import files
from nemo_aligner.data.formats import FORMATS
from nemo_aligner.data.readers import ReaderConfig, read_records
from nemo_aligner.data.split import Split, split_file
from nemo_aligner.utils.errors import ConfigError, DataError
from tests.data.conftest import Run
from tests.data.files import build, rows_of, write
from tests.data.ranked_format import SEVERAL
from tests.harness import tiny
from tests.harness.contracts import Contracts


def parts_of(folder: Path) -> list[list[dict[str, Any]]]:
    """The training and the held-out records."""
    return [rows_of(folder / f"{name}.jsonl") for name in ("train", "heldout")]


def lines_of(folder: Path) -> list[list[str]]:
    names = ("train", "heldout")
    return [(folder / f"{name}.jsonl").read_text().splitlines() for name in names]


def test_split_keeps_lines_and_prompts_whole(tmp_path: Path, run: Run) -> None:
    lines = [
        json.dumps({"x": n, "rejected": "no", "chosen": f"yes {n}", "prompt": f"Why  {n // 3}"})
        for n in range(60)
    ]
    lines += [json.dumps({"prompt": "WHY 0", "chosen": "a", "rejected": "b"})]
    lines += [json.dumps({"prompt": "drop", "chosen": "a", "rejected": "a"})]
    source = write(tmp_path / "pairs.jsonl", *lines)
    done = run("data split", source, "--output", tmp_path, "--heldout", "0.3")
    train, heldout = lines_of(tmp_path)
    assert sorted(train + heldout) == sorted(lines[:-1])
    assert 18 <= len(heldout) <= 21

    def prompts(side: list[str]) -> set[str]:
        return {json.loads(line)["prompt"].casefold().replace("  ", " ") for line in side}

    assert not prompts(train) & prompts(heldout)
    assert "1 identical" in done.stdout
    assert "longer reply (in characters) is right in 100.0%" in done.stdout or "b" in "".join(
        heldout
    )


def test_split_counts_replies_in_tokens_as_training_does(
    tmp_path: Path, run: Run, contracts: Contracts, tokenizer_folder: Path
) -> None:
    """A tokenizer with a token for each known word, and for each other character."""
    long, short = "house house", "xqxqxqxqxqxq"
    pairs = [
        {"prompt": f"q {n}", "chosen": long if n % 4 else short, "rejected": "zqzqzqzq"}
        for n in range(40)
    ]
    source = write(tmp_path / "pairs.jsonl", *pairs)
    arguments = ("data split", source, "--output", tmp_path)
    wins = "always taking the longer reply (in {}) is right in {:.1%} of heldout"
    assert wins.format("characters", 1) in run(*arguments).stdout
    shown = run(*arguments, "--tokenizer", tokenizer_folder).stdout
    table = build(contracts, [tmp_path / "heldout.jsonl"]).train.table()
    share = table.split("chosen is the longer")[1].split("%")[0].strip()
    assert wins.format("tokens", float(share) / 100) in shown
    assert float(share) < 50


def test_split_of_a_list_on_one_line_is_by_its_items(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reading = Mock(side_effect=files._list_items)
    monkeypatch.setattr(files, "_list_items", reading)
    pairs = [{"prompt": f"q {n}", "chosen": f"a {n}", "rejected": "b"} for n in range(6)]
    source = tmp_path / "pairs.json"
    source.write_text(json.dumps(pairs))
    split_file(source, tmp_path, Split(heldout=0.3))
    train, heldout = parts_of(tmp_path)
    assert sorted(train + heldout, key=str) == pairs
    assert reading.call_count == 1


def test_split_of_raw_texts_that_begin_alike_by_chance_is_of_many_prompts(tmp_path: Path) -> None:
    pairs = [{"chosen": f"I love it {n}.", "rejected": f"I hate it {n}."} for n in range(8)]
    said = split_file(write(tmp_path / "pairs.jsonl", *pairs), tmp_path, Split(heldout=0.25))
    assert "train: 6 records, 6 prompts" in said
    assert "heldout: 2 records, 2 prompts" in said


def test_split_keeps_ties(tmp_path: Path) -> None:
    """Some objectives learn from them; a held-out part may have nothing else."""
    rows = [tiny.ranked(f"q {n}", (0, "a"), (0 if n % 2 else 1, "b")) for n in range(8)]
    source = write(tmp_path / "pairs.jsonl", *rows)
    shown = split_file(source, tmp_path / "half", Split(heldout=0.5))
    assert sorted(itertools.chain(*parts_of(tmp_path / "half")), key=str) == rows
    assert "train: 4 records" in shown
    source = write(tmp_path / "ties.jsonl", *rows[1::2])
    shown = split_file(source, tmp_path / "ties", Split(heldout=0.5))
    assert shown.endswith("\nheldout has only ties, so the length of replies predicts nothing")


def test_split_writes_null_for_numbers_that_json_has_not(tmp_path: Path) -> None:
    table = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    names = {"prompt": [f"q {n}" for n in range(4)], "chosen": ["a"] * 4, "rejected": ["b"] * 4}
    columns = {**names, "score": [1.0, float("nan"), float("inf"), 2.0]}
    parquet.write_table(table.table(columns), tmp_path / "pairs.parquet")
    split_file(tmp_path / "pairs.parquet", tmp_path, Split(heldout=0.3))
    scores = {row["prompt"]: row["score"] for part in parts_of(tmp_path) for row in part}
    assert scores == {"q 0": 1.0, "q 1": None, "q 2": None, "q 3": 2.0}


def test_split_of_a_list_writes_null_for_too_large_a_number(tmp_path: Path) -> None:
    rows = [
        f'{{"prompt": "q {n}", "chosen": "a",\n"rejected": "b", "score": 1e999}}' for n in "abcd"
    ]
    (tmp_path / "pairs.json").write_text(f"[{','.join(rows)}]")
    split_file(tmp_path / "pairs.json", tmp_path, Split(heldout=0.3))
    assert {row["score"] for part in parts_of(tmp_path) for row in part} == {None}


def test_split_keeps_comparison_lines_together(tmp_path: Path) -> None:
    lines = []
    for n in range(40):
        prompt = f"User: question {n // 2}\nAssistant: "
        lines += [json.dumps({"text": f"{prompt}good {n}"}), json.dumps({"text": f"{prompt}bad"})]
    split_file(write(tmp_path / "lines.jsonl", *lines), tmp_path, Split())
    sides = lines_of(tmp_path)
    assert [len(side) for side in sides] == [64, 16]
    questions = []
    for side in sides:
        for good, bad in zip(side[::2], side[1::2], strict=True):
            assert lines.index(good) % 2 == 0
            assert json.loads(bad)["text"].endswith("bad")
        questions.append({json.loads(line)["text"].split("\n")[0] for line in side})
    assert not questions[0] & questions[1]


def test_split_writes_a_line_once_for_all_of_its_records(tmp_path: Path, run: Run) -> None:
    """Check that both parts have the records of the report, and that no line is in both."""

    def step(*ratings: int) -> dict[str, Any]:
        steps = [{"text": f"step {number}", "rating": each} for number, each in enumerate(ratings)]
        return {"completions": steps, "chosen_completion": 0}

    rows = [
        {"question": {"problem": f"Why {n}?"}, "label": {"steps": [step(1, -1), step(1, 0, -1)]}}
        for n in range(10)
    ]
    source = write(tmp_path / "prm.jsonl", *rows)
    reading = ReaderConfig(attributes=("right",))
    report = split_file(source, tmp_path, Split(reading=reading))
    train, heldout = parts_of(tmp_path)
    assert sorted(train + heldout, key=str) == rows
    for name, lines in (("train", 8), ("heldout", 2)):
        path = tmp_path / f"{name}.jsonl"
        assert len(rows_of(path)) == lines
        assert len(read_records(path, reading).records) == 4 * lines
        assert f"{name}: {4 * lines} records, {lines} prompts" in report


def test_split_keeps_a_line_whole_whose_records_have_several_prompts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prompts that a line connects stay in the same part, also over chains of lines."""
    monkeypatch.setitem(FORMATS, "chat_pairs", SEVERAL)
    rows = [
        {"pairs": [[f"q {n}", "a", "b"], [f"q {n + (n % 2 == 0)}", "c", "d"]]} for n in range(8)
    ]
    source = write(tmp_path / "trees.jsonl", *rows)
    report = split_file(source, tmp_path, Split(heldout=0.25))
    train, heldout = parts_of(tmp_path)
    assert (len(train), len(heldout)) == (6, 2)
    assert heldout[0] in rows[::2]
    assert heldout[1] == rows[rows.index(heldout[0]) + 1]
    assert "train: 12 records, 3 prompts" in report


def test_split_of_ratings_shows_what_length_scores(tmp_path: Path, run: Run) -> None:
    source = tmp_path / "ratings.json"
    ratings = [
        {"prompt": f"p{n}", "response": "x" * (n + 1), "up": n, "down": None if n % 7 == 0 else -n}
        for n in range(50)
    ]
    source.write_text(json.dumps(ratings, indent=2))
    arguments = ("data split", source, "--output", tmp_path, "--attributes")
    done = run(*arguments, "up, down ")
    assert "up: Pearson r 1.000" in done.stdout
    assert "down: Pearson r" in done.stdout
    assert "mean over attributes: 1.000" in done.stdout
    train, heldout = parts_of(tmp_path)
    assert sorted(train + heldout, key=lambda row: row["up"]) == ratings
    failed = run(*arguments, "up,,down", code=1)
    assert failed.stderr == (
        "ConfigError: --attributes: got ['up', '', 'down'], wanted names that are not empty\n"
    )
    with pytest.raises(ConfigError, match=r"^attributes: got \[''\]"):
        split_file(source, tmp_path, Split(reading=ReaderConfig(attributes=("",))))


def chats(openings: Counter[str]) -> list[dict[str, Any]]:
    """Pairs with different prompts, groups of which have the same first turn."""
    return [
        {
            "prompt": [
                {"role": "user", "content": opening},
                {"role": "assistant", "content": "hello"},
                {"role": "user", "content": f"question {n}"},
            ],
            "chosen": "a",
            "rejected": "b",
        }
        for opening, count in openings.items()
        for n in range(count)
    ]


def test_split_is_by_whole_prompts_or_by_first_turns(tmp_path: Path) -> None:
    """The report notes a held-out part of another size than requested."""
    source = write(tmp_path / "pairs.jsonl", *chats(Counter(Hello=10)))
    shown = split_file(source, tmp_path / "whole", Split(heldout=0.3))
    assert "heldout: 3 records, 3 prompts" in shown
    assert "note:" not in shown
    with pytest.raises(DataError, match=r"all 10 records have the same prompt.*--by prompt"):
        split_file(source, tmp_path / "first", Split(by="first_prompt"))
    assert not list(tmp_path.glob("first/*"))
    few = write(tmp_path / "few.jsonl", *chats(Counter(Hello=9, Hi=9)))
    with pytest.raises(DataError, match=r"cannot hold out 10% of its 18 .*2 prompts.* 9 records"):
        split_file(few, tmp_path / "first", Split(heldout=0.1, by="first_prompt"))
    source = write(tmp_path / "more.jsonl", *chats(Counter(Hello=300, Hi=80, Hey=12, Yo=8)))
    shown = split_file(source, tmp_path / "first", Split(heldout=0.1, by="first_prompt"))
    assert "heldout: 20 records, 2 prompts" in shown
    assert "note: 20 of 400 records (5.0%) are held out, and not 10.0%" in shown


def test_split_keeps_near_duplicates_together(tmp_path: Path, run: Run) -> None:
    """Also over chains of near duplicates; prompts that share only some words are not one."""
    poem = "please write a short poem about the old red house by the quiet sea in {}"
    prompts = [poem.format(ending) for ending in ("May", "June", "July?")]
    prompts += [f"please write a short poem about topic {n} of another kind" for n in range(9)]
    rows = ({"prompt": prompt, "chosen": "a", "rejected": "b"} for prompt in prompts)
    source = write(tmp_path / "pairs.jsonl", *rows)
    for seed in range(6):
        arguments = ("--heldout", "0.4", "--similar", "0.75", "--seed", str(seed))
        folder = tmp_path / str(seed)
        done = run("data split", source, "--output", folder, *arguments)
        sides = [sum("red house" in row["prompt"] for row in part) for part in parts_of(folder)]
        assert sorted(sides) == [0, 3]
        assert sum(map(int, re.findall(r"(\d+) prompts", done.stdout))) == 10


def test_split_has_malformed_lines_in_neither_part(tmp_path: Path, run: Run) -> None:
    text = "\n\nHuman: q{}\n\nAssistant: {}"
    lines = [
        json.dumps({"chosen": text.format(n, "yes"), "rejected": text.format(n, "no")})
        for n in range(20)
    ]
    ends_with_the_human = text.format(99, "yes") + "\n\nHuman: thanks"
    bad = json.dumps({"chosen": ends_with_the_human, "rejected": text.format(99, "no")})
    source = write(tmp_path / "hh.jsonl", *lines[:3], bad, *lines[3:], "{")
    arguments = ("data split", source, "--output", tmp_path)
    refused = run(*arguments, code=1)
    assert "hh.jsonl: 2 of its 22 records (9.09%) are malformed\n" in refused.stderr
    assert "--malformed=drop" in refused.stderr
    assert "--max-malformed=0.01" in refused.stderr
    assert not (tmp_path / "train.jsonl").exists()
    done = run(*arguments, "--malformed=drop", "--max-malformed=0.1")
    assert f"{source}: hh, 22 read, 2 malformed, 20 kept" in done.stdout
    assert f"  {source}:4: chosen: the last message is the reply" in done.stdout
    train, heldout = lines_of(tmp_path)
    assert sorted(train + heldout) == sorted(lines)


def test_split_replaces_neither_other_parts_nor_its_source(tmp_path: Path, run: Run) -> None:
    source = tiny.write_pairs(tmp_path / "train.jsonl", 30)
    before = source.read_bytes()
    failed = run("data split", source, "--output", tmp_path, code=1)
    assert failed.stderr.startswith(f"ConfigError: --output: {tmp_path} ")
    assert source.read_bytes() == before
    assert not (tmp_path / "heldout.jsonl").exists()
    for _ in range(2):
        assert "in place of" not in split_file(source, tmp_path / "out", Split())
    parts = [path.read_bytes() for path in sorted((tmp_path / "out").iterdir())]
    with pytest.raises(ConfigError, match=r"^output: .*/train.jsonl exists with .*folder"):
        split_file(source, tmp_path / "out", Split(seed=2))
    assert parts == [path.read_bytes() for path in sorted((tmp_path / "out").iterdir())]
    with pytest.raises(ConfigError, match=r"^output: .*train.jsonl "):
        split_file(source, source, Split())
