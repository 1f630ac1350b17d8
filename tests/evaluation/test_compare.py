"""Comparison of two models on the same pairs, from the files that evaluations wrote."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from nemo_aligner.cli.evaluate import compare_parser, run_compare
from nemo_aligner.contract.messages import reply_of
from nemo_aligner.evaluation.compare import compare_files, render_compared
from nemo_aligner.evaluation.run_task import run_task
from nemo_aligner.evaluation.tasks import find_task
from nemo_aligner.metrics.ranking import mcnemar, wilson_interval
from nemo_aligner.utils.errors import ConfigError, DataError
from tests.evaluation.refusals import refusal
from tests.harness.scorers import source_of

QUESTION = {"role": "user", "content": "2+2?"}
# Of ten pairs the margins that two models give, and where the pairs are from.
FIRST = (1, 2, -1, 3, 0, -2, 1, 1, -4, 2)
SECOND = (1, 1, 2, -3, 1, -1, 1, 1, 4, 2)
SOURCES = ("math", "math", "math", "math", "math", "chat", "chat", "chat", "chat", "chat")


def write(path: Path, margins: tuple[float, ...], skip: int = 0) -> Path:
    rows = [
        {
            "record": f"pairs.jsonl:{number}",
            "rewards": {"chosen": margin + 0.5, "rejected": 0.5},
            "source": source,
            "texts": {
                side: [QUESTION, {"role": "assistant", "content": f"{side} {number}"}]
                for side in ("chosen", "rejected")
            },
        }
        for number, (margin, source) in enumerate(zip(margins, SOURCES, strict=True), start=1)
    ]
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows[skip:]))
    return path


@pytest.fixture
def files(tmp_path: Path) -> tuple[Path, Path]:
    return write(tmp_path / "a.jsonl", FIRST), write(tmp_path / "b.jsonl", SECOND)


def test_compared_rows_are_of_all_pairs_and_of_every_source(files: tuple[Path, Path]) -> None:
    """The flips have both margins and complete samples, the most confident first."""
    compared = compare_files(*files)
    sources = [(row.source, row.pairs) for row in compared.rows]
    assert sources == [("all", 10), ("chat", 5), ("math", 5)]
    total = compared.rows[0]
    assert (total.first.accuracy, total.second.accuracy) == (0.65, 0.8)  # a tie is one half
    assert (total.first.low, total.first.high) == wilson_interval(6.5, 10)
    assert total.difference == pytest.approx(0.15)
    assert total.low < 0.15 < total.high
    assert (total.lost, total.gained) == (1, 3)
    assert total.p_value == mcnemar(1, 3)
    flips = compared.flips
    assert [flip.record.split(":")[1] for flip in flips] == ["9", "4", "3", "5"]
    assert (flips[0].first.margin, flips[0].second.margin) == (-4, 4)
    (chosen,), _ = flips[0].first.sides
    assert chosen == [QUESTION, {"role": "assistant", "content": "chosen 9"}]


def test_compared_pairs_are_those_of_both_files(files: tuple[Path, Path], tmp_path: Path) -> None:
    fewer = write(tmp_path / "fewer.jsonl", SECOND, skip=4)
    compared = compare_files(files[0], fewer)
    assert compared.left_out == (4, 0)
    assert compared.rows[0].pairs == 6
    other = tmp_path / "other.jsonl"
    other.write_text(files[0].read_text().replace("pairs.jsonl", "others.jsonl"))
    other.write_text("".join(reversed(other.read_text().splitlines(keepends=True))))
    # The same pairs in another file, and in another order.
    compared = compare_files(fewer, other)
    assert (compared.rows[0].pairs, compared.left_out) == (6, (0, 4))
    assert {flip.record for flip in compared.flips} == {"pairs.jsonl:5", "pairs.jsonl:9"}
    # Several pairs of one record are distinguished.
    twice = tmp_path / "twice.jsonl"
    twice.write_text(files[0].read_text() * 2)
    assert compare_files(twice, twice).rows[0].pairs == 20
    # evaluate escapes only the line breaks of ASCII, not those of Unicode.
    ends = files[0].read_text().replace("chosen 1", "chosen\u2028\x851")
    twice.write_text(ends, encoding="utf-8")
    assert compare_files(twice, twice).rows[0].pairs == 10


def test_compared_files_of_one_name_and_other_pairs_have_nothing_in_common(
    files: tuple[Path, Path], tmp_path: Path
) -> None:
    """Pairs of the same file and line do not match if their replies differ."""
    other = tmp_path / "other.jsonl"
    changed = files[1].read_text().replace('"content": "rejected', '"content": "another')
    other.write_text(changed)
    error = refusal(DataError, compare_files, files[0], other)
    assert f"{files[0]} and {other}: " in error
    assert "pairs.jsonl:1 and pairs.jsonl:1" in error
    lines = files[1].read_text().splitlines()
    other.write_text("\n".join([*lines[:7], *changed.splitlines()[7:]]))
    compared = compare_files(files[0], other)
    assert (compared.rows[0].pairs, compared.left_out) == (7, (3, 3))


def test_compared_pairs_may_have_other_words_around_their_prompts(
    files: tuple[Path, Path], tmp_path: Path
) -> None:
    """``data.system_prompt_file``, ``prompt_file`` and ``input_template`` add such words."""
    system = {"role": "system", "content": "Be brief."}
    question = {"role": "user", "content": "Answer this: 2+2? Thanks."}
    rows = [json.loads(line) for line in files[1].read_text().splitlines()]
    rewordings = {
        "a system prompt": lambda text: [system, *text],
        "words around it": lambda text: [question, text[-1]],
        "a raw text": lambda text: f"Q: 2+2?\nA: {text[-1]['content']}",
    }
    for name, reword in rewordings.items():
        texts = [{side: reword(text) for side, text in row["texts"].items()} for row in rows]
        other = tmp_path / "reworded.jsonl"
        lines = [{**row, "texts": both} for row, both in zip(rows, texts, strict=True)]
        other.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
        assert compare_files(files[0], other).rows == compare_files(*files).rows, name
    # Another question makes another pair.
    other.write_text(files[1].read_text().replace("2+2?", "3+3?"))
    assert f"{files[0]} and {other}: " in refusal(DataError, compare_files, files[0], other)


def test_files_written_by_compare_replace_no_other_file_silently(
    files: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def compare(*options: str) -> int:
        return run_compare(compare_parser().parse([*map(str, files), *options]))

    table, flips = tmp_path / "table.json", tmp_path / "flips.jsonl"
    for options, error in {
        (f"--flips={files[0]}",): f"flips: {files[0]} is the first file to compare. Name another",
        (f"--output={files[1]}",): f"output: {files[1]} is the second file to compare",
        (f"--output={table}", f"--flips={table}"): f"flips: {table} is the file of output",
        (f"--flips={files[0] / 'flips.jsonl'}",): f"flips: {files[0] / 'flips.jsonl'}: {files[0]} ",
    }.items():
        assert refusal(ConfigError, compare, *options).startswith(error)
    flips.write_text("from before")
    assert compare(f"--output={table}", f"--flips={flips}", "--output=/dev/null") == 0
    written = f"output: /dev/null\nflips: {flips} (in place of another)\n"
    assert capsys.readouterr().out.endswith(written)


def test_compared_files_of_another_kind_are_refused(tmp_path: Path) -> None:
    other, wrong = tmp_path / "a.jsonl", {}
    for content, message in {
        "": "a.jsonl: the file is empty",
        "{": "a.jsonl:1: malformed JSON",
        '{"a": 1}\n{': "a.jsonl:1: rewards: got a row with the keys 'a'",
        '{"rewards": {"chosen": 1}}': "rewards: got the keys 'chosen', wanted 'rejected'",
        '{"rewards": {"chosen": null, "rejected": 1}}': "None, 'rejected': 1}, wanted only finite",
        '{"rewards": {"chosen": "x", "rejected": 1}}': "rewards.chosen: got 'x', wanted a number",
        '{"rewards": {"chosen": 0, "rejected": 1}, "texts": 3}': "texts: got a row with the keys",
        '{"rewards": {"chosen": 0, "rejected": 1}, "texts": {"chosen": [3], "rejected": "b"}}': (
            "texts: got [3]"
        ),
        '{"rewards": {"help": 1}, "texts": {"response": "a"}}': (
            "a.jsonl:1: got a rated reply, which has no verdict to compare. Write both"
        ),
        '{"right": 4.5, "rewards": {"right": [], "wrong": [1, 2]}, "texts": {"right": [], '
        '"wrong": ["a", "b"]}}': "a.jsonl: got items of a benchmark without right and",
        '{"right": null, "rewards": {"right": [1], "wrong": [0]}, "texts": {"right": ["a"], '
        '"wrong": ["b"]}}': "right: got None, wanted a number from 0 to 1",
        '{"right": 1, "rewards": {"right": [1], "wrong": [0]}, "texts": {"right": null, '
        '"wrong": ["b"]}}': "texts.right: got None",
        f'{{"rewards": {{"chosen": 1{"0" * 400}, "rejected": 1}}}}': "rewards.chosen: got 1000",
    }.items():
        other.write_text(content)
        error = refusal(DataError, compare_files, other, other)
        if message not in error:
            wrong[content] = error
    assert not wrong, wrong
    error = refusal(DataError, compare_files, tmp_path, tmp_path)
    assert "is a folder. Pass a file that `nemo-aligner evaluate` wrote as output_rewards" in error


def test_compared_verdicts_of_a_benchmark_are_as_it_counts_them(tmp_path: Path) -> None:
    sample = find_task("rewardbench2").sample
    items = tmp_path / "items.jsonl"
    items.write_text("".join(f"{json.dumps({**sample, 'id': str(n)})}\n" for n in range(3)))
    files = []
    for name, rewards in (("a", (3, 1, 2, 0)), ("b", (1, 1, 0, 1))):
        scores = np.array(rewards * 3, dtype=float)[:, None]
        report = run_task(
            find_task("rewardbench2"), items, source_of(lambda _, scores=scores: scores)
        )
        files.append(tmp_path / f"{name}.jsonl")
        report.predictions.write(files[-1])
    compared = compare_files(*files)
    (row,) = compared.rows
    assert (row.first.accuracy, row.second.accuracy) == (1, pytest.approx(1 / 3))
    assert (row.lost, row.gained) == (3, 0)
    flip = compared.flips[0]
    assert (flip.record, flip.first.margin, flip.second.margin) == (f"{items}:1", 1, 0)
    replies = [[reply_of(text) for text in side] for side in flip.first.sides]
    assert replies == [["4"], ["5", "3", "22"]]
    assert "rejected: (one of 3) 5" in render_compared(compared, ["a", "b"], 1)
