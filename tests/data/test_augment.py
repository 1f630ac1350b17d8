"""``augment_file``: pairs with replies of other prompts, the same for the same seed."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from tests.data.conftest import Run
from tests.data.files import read, rows_of, write

TURNS = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hi!"}]


def test_augmented_pairs_have_a_reply_of_their_prompt_and_one_of_another(
    tmp_path: Path, run: Run
) -> None:
    """Prompts that differ only in case are the same: neither gets a reply of the other."""
    prompts = [*(f"q{n}" for n in range(8)), "Q0"]
    rows = [{"prompt": p, "chosen": f"{p} good", "rejected": f"{p} bad"} for p in prompts]
    with_turns = {"prompt": [*TURNS, {"role": "user", "content": "long"}], "chosen": "long good"}
    rows.append({**with_turns, "rejected": "long bad"})
    source = write(tmp_path / "pairs.jsonl", *rows)
    outputs = [tmp_path / name for name in ("a.jsonl", "b.jsonl", "c.jsonl")]
    for output, seed in zip(outputs, (1, 1, 2), strict=True):
        done = run("data augment", source, "--output", output, "--share=2.5", f"--seed={seed}")
        assert "25 pairs with a reply of another prompt" in done.stdout
    assert outputs[0].read_bytes() == outputs[1].read_bytes() != outputs[2].read_bytes()
    found = rows_of(outputs[0])
    times: Counter[str] = Counter()
    sides = set()
    for pair in found:
        asked = pair["prompt"][-1]["content"]
        assert pair["prompt"][:-1] == (TURNS if asked == "long" else [])
        ((kept, kept_side), (other, side)) = (
            pair[key][0]["content"].split() for key in ("chosen", "rejected")
        )
        assert kept == asked
        assert other.lower() != asked.lower()
        times[asked] += 1
        sides.add((kept_side, side))
    assert set(times.values()) == {2, 3}
    assert len(sides) == 4
    read_again = read(tmp_path, *found)
    assert {record.source for record in read_again.records} == {"non-contextual"}


def test_malformed_records_are_left_out_by_option(tmp_path: Path, run: Run) -> None:
    rows = [{"prompt": n, "chosen": "a", "rejected": "b"} for n in ("one", "two", "three", 4)]
    source = write(tmp_path / "pairs.jsonl", *rows)
    arguments = ("data augment", source, "--output", tmp_path / "out.jsonl")
    refused = run(*arguments, code=1)
    assert "drop these records with --malformed=drop (but --max-malformed=0.01" in refused.stderr
    done = run(*arguments, "--malformed=drop", "--max-malformed=0.5")
    assert "3 records; 1 more are malformed" in done.stdout


def test_what_cannot_be_augmented_is_refused(tmp_path: Path, run: Run) -> None:
    source = write(tmp_path / "raw.jsonl", *({"chosen": f"a{n}", "rejected": "b"} for n in "12"))
    failed = run("data augment", source, "--output", tmp_path / "out.jsonl", code=1)
    assert "0 prompts of conversations without tools" in failed.stderr
    failed = run("data augment", source, "--output", source, code=1)
    assert f"--output: {source}" in failed.stderr
