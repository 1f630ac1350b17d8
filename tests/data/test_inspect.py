"""``scripts/inspect_data.py`` shows what training will see."""

from __future__ import annotations

import json
from pathlib import Path

from nemo_aligner.data.inspect import mark_specials
from nemo_aligner.text.tokenizer import Tokenizer
from tests import tiny

SCRIPT = "scripts/inspect_data.py"


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
    done = tiny.run_script(
        SCRIPT,
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


def test_ratings_without_a_tokenizer(tmp_path: Path) -> None:
    path = write(
        tmp_path / "rated.jsonl",
        {"prompt": "why", "response": "the cat", "help": 3},
        {"prompt": "who", "response": "a", "help": None},
    )
    done = tiny.run_script(SCRIPT, path, "--attributes=help", "--show=1")
    assert "  characters of a reply     7 to 7" in done.stdout
    assert "  dropped                   1 (1 no_label)" in done.stdout
    assert done.stdout.endswith("-- labels 3\nuser: why\nassistant: the cat\n")


def test_errors_are_one_line(tmp_path: Path) -> None:
    path = write(tmp_path / "bad.jsonl", {"prompt": "why", "chosen": "a"})
    done = tiny.run_script(SCRIPT, path, check=False)
    assert done.returncode == 1
    assert done.stderr.startswith(f"inspect_data.py: {path}:1: got a record with keys")


def test_names_of_attributes_are_stripped(tmp_path: Path) -> None:
    path = write(tmp_path / "rated.jsonl", {"prompt": "p", "response": "r", "a": 1, "b": 2})
    done = tiny.run_script(SCRIPT, path, "--attributes", "a, b")
    assert "-- labels 1 2" in done.stdout
    failed = tiny.run_script(SCRIPT, path, "--attributes", "a,,b", check=False)
    assert failed.stderr.startswith("inspect_data.py: --attributes: got ['a', '', 'b'], wanted")


def test_a_reward_model_brings_its_rules(tmp_path: Path) -> None:
    model = tiny.write_reward_nemo(tmp_path / "rm.nemo")
    path = write(
        tmp_path / "rated.jsonl",
        {"prompt": "why", "response": "the cat", "helpfulness": 3, "verbosity": 1},
    )
    done = tiny.run_script(SCRIPT, path, f"--tokenizer={model}")
    assert done.stdout.startswith("scoring contract: ")
    assert "-- labels 3 1: " in done.stdout


def test_special_tokens_stand_between_the_marks(tokenizer: Tokenizer) -> None:
    token_ids = [*tokenizer.encode("the cat"), *tokenizer.special_ids][:-1]
    shown = mark_specials(token_ids, tokenizer, ("<<", ">>"))
    assert shown.startswith("the cat<<")
    assert f"scored at the last token: {token_ids[-1]} " in shown
