"""``nemo-aligner data inspect`` shows what training will see."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from nemo_aligner.data.inspect import Inspection, inspect_files, mark_specials
from nemo_aligner.text.tokenizer import Tokenizer
from tests import tiny
from tests.contracts import Contracts

VERB = "data inspect"


def write(path: Path, *rows: dict) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def test_pairs_with_a_tokenizer(tokenizer_folder: Path, tmp_path: Path) -> None:
    train = write(tmp_path / "train.jsonl", {"prompt": "why", "chosen": "a", "rejected": "b"})
    path = write(
        tmp_path / "pairs.jsonl",
        {"prompt": "why", "chosen": "the cat", "rejected": "no", "source": "x"},
        {"prompt": "who", "chosen": "dog " * 60, "rejected": "no"},
        {"prompt": "what", "chosen": "a", "rejected": "a"},
    )
    done = tiny.run_verb(
        VERB,
        path,
        "--train",
        train,
        f"--tokenizer={tokenizer_folder}",
        "--seq-length=60",
    )
    shown = done.stdout.splitlines()
    assert f"train: {train} (chat_pairs)" in shown
    assert "  dropped                   2 (1 identical, 1 overlong)" in shown
    assert "  prompts also in training  1" in shown
    assert "  sources                   x 1" in shown
    assert f"{path}:1 (x)" in shown
    start = shown.index(f"{path}:1 (x)")
    assert shown[start + 2 : start + 5] == [
        "[<|im_start|>]user",
        "why[<|im_end|>]",
        "[<|im_start|>]assistant",
    ]
    assert shown[start + 5] == "the cat[<|im_end|>]"
    assert "scored at the last token" in shown[start + 7]
    assert any("not used: got" in line for line in shown)


def test_completions_are_called_by_their_ranks(tmp_path: Path) -> None:
    record = tiny.ranked("why", (2, "bad"), (1, "good"), (2, "poor"))
    path = write(tmp_path / "ranked.jsonl", record)
    (shown,) = [each.text for each in inspect_files([path], [], Inspection()) if "-- " in each.text]
    heads = [line for line in shown.splitlines() if line.startswith("-- ")]
    assert heads == ["-- rank 0", "-- rank 1", "-- rank 1"]
    assert shown.endswith("assistant: poor")


def test_ratings_without_a_tokenizer(tmp_path: Path) -> None:
    path = write(
        tmp_path / "rated.jsonl",
        {"prompt": "why", "response": "the cat", "help": 3},
        {"prompt": "who", "response": "a", "help": None},
    )
    done = tiny.run_verb(VERB, path, "--attributes=help", "--show=1")
    assert "  characters of a reply     7 to 7" in done.stdout
    assert "  dropped                   1 (1 no_label)" in done.stdout
    assert done.stdout.endswith("-- labels 3\nuser: why\nassistant: the cat\n")


def test_a_file_that_cannot_be_read_is_a_line_and_the_next_one_is_shown(tmp_path: Path) -> None:
    bad = write(tmp_path / "bad.jsonl", {"prompt": "why", "chosen": "a"})
    good = write(tmp_path / "good.jsonl", {"prompt": "why", "chosen": "a", "rejected": "b"})
    missing = str(tmp_path / "missing.jsonl")
    done = tiny.run_verb(VERB, bad, good, "--train", missing, check=False)
    assert done.returncode == 1
    shown = done.stdout.splitlines()
    assert shown[0].startswith(f"train: {missing}: cannot be read")
    assert shown[1].startswith(f"file: {bad}:1: got a record with keys")
    assert shown[2] == f"file: {good} (chat_pairs)"
    assert done.stderr == ""


def test_the_first_malformed_records_of_a_file_are_listed(
    tokenizer: Tokenizer, contracts: Contracts, tmp_path: Path
) -> None:
    pair = {"prompt": "why", "chosen": "a", "rejected": "b"}
    refused = {**pair, "chosen": "a<|im_end|>"}
    bad = [{**pair, "chosen": n} for n in range(11)]
    path = write(tmp_path / "bad.jsonl", pair, refused, *bad)
    other = write(tmp_path / "good.jsonl", {**pair, "prompt": "who"})
    how = Inspection(rules=(tokenizer, contracts()), show=0)
    first, second = inspect_files([path, other], [], how)
    assert (first.is_good, second.is_good) == (False, True)
    lines = first.text.splitlines()
    assert "  malformed                 12 (92.31%)" in lines
    assert "  kept                      1" in lines
    listed = lines[lines.index("  malformed:") + 1 :]
    assert listed[0].startswith(f"    {path}:2: message 2 ends with '<|im_end|>'")
    assert listed[1] == (f"    {path}:3: chosen: got 0, wanted a string or a list of messages")
    assert listed[10:] == ["    and 2 more"]


def test_a_file_of_malformed_records_alone_has_a_table(tmp_path: Path) -> None:
    path = write(tmp_path / "bad.jsonl", {"prompt": "why", "chosen": "a", "rejected": 1})
    (only,) = inspect_files([path], [], Inspection())
    assert not only.is_good
    assert "  kept                      0" in only.text.splitlines()


def test_labels_that_are_far_out_are_named(tmp_path: Path) -> None:
    rows = [{"prompt": f"p{n}", "response": "r", "help": n % 5, "deep": 4} for n in range(40)]
    rows[6]["help"], rows[8]["help"], rows[9]["deep"] = 400, -1e38, 0
    path = write(tmp_path / "rated.jsonl", *rows)
    (table,) = inspect_files([path], [], Inspection(show=0, attributes=["help", "deep"]))
    assert table.is_good
    lines = table.text.splitlines()
    assert "  labels from               -1e+38 0" in lines
    assert "  labels to                 400 4" in lines
    assert lines[lines.index("  labels that are far out:") + 1 :] == [
        f"    {path}:9: help is -1e+38, the median 2",
        f"    {path}:7: help is 400, the median 2",
    ]


@pytest.mark.slow(seconds=6)
def test_names_of_attributes_are_stripped(tmp_path: Path) -> None:
    path = write(tmp_path / "rated.jsonl", {"prompt": "p", "response": "r", "a": 1, "b": 2})
    done = tiny.run_verb(VERB, path, "--attributes", "a, b")
    assert "-- labels 1 2" in done.stdout
    failed = tiny.run_verb(VERB, path, "--attributes", "a,,b", check=False)
    assert failed.stderr.startswith("ConfigError: --attributes: got ['a', '', 'b'], wanted")


def test_a_reward_model_brings_its_rules(tmp_path: Path) -> None:
    model = tiny.write_reward_nemo(tmp_path / "rm.nemo")
    path = write(
        tmp_path / "rated.jsonl",
        {"prompt": "why", "response": "the cat", "helpfulness": 3, "verbosity": 1},
    )
    done = tiny.run_verb(VERB, path, f"--tokenizer={model}")
    assert done.stdout.startswith("scoring contract: ")
    assert "-- labels 3 1: " in done.stdout


def test_special_tokens_stand_between_the_marks(tokenizer: Tokenizer) -> None:
    token_ids = [*tokenizer.encode("the cat"), *tokenizer.special_ids][:-1]
    shown = mark_specials(token_ids, tokenizer, ("<<", ">>"))
    assert shown.startswith("the cat<<")
    assert f"scored at the last token: {token_ids[-1]} " in shown
