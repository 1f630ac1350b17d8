"""Wrong labels are found by models that did not train on their pairs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from examples.data.filter_labels import (
    Pair,
    describe_doubted,
    find_prompt,
    main,
    read_margin,
    reading_settings,
    weigh,
)
from tests.data.files import rows_of, write
from tests.harness import tiny

WRONG = (3, 17, 30)


def test_filter_finds_what_was_labelled_wrong(
    base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = rows_of(tiny.write_pairs(tmp_path / "clean.jsonl", 96))
    for number in WRONG:
        row = rows[number]
        row["chosen"], row["rejected"] = row["rejected"], row["chosen"]
    source = write(tmp_path / "pairs.jsonl", *rows)
    folder = tmp_path / "filtered"
    command = [
        *(f"--input={source}", f"--output={folder}", "--folds=2"),
        "--confidence=0.6",
        f"pretrained_checkpoint.restore_from_path={base}",
        *("model.optim.lr=3e-3", "model.optim.sched.warmup_steps=1", "model.global_batch_size=8"),
        *("trainer.rm.max_epochs=8", "model.data.seq_length=128", "model.micro_batch_tokens=1024"),
    ]
    main(command)
    output = capsys.readouterr().out
    assert "96 pairs, 96 judged" in output
    doubted = rows_of(folder / "doubted.jsonl")
    wrong = {f"{source}:{number + 1}" for number in WRONG}
    assert wrong <= {row["filter_record"] for row in doubted[: 2 * len(WRONG)]}
    worst = f"{doubted[0]['filter_record']}  {doubted[0]['filter_p_wrong']:.2f}"
    assert f"most likely mislabelled:\n  {worst}" in output
    kept_lines = (folder / "kept.jsonl").read_text().splitlines()
    gone = {int(row["filter_record"].rpartition(":")[2]) for row in doubted}
    lines = source.read_text().splitlines()
    assert kept_lines == [line for number, line in enumerate(lines, start=1) if number not in gone]
    assert sorted(path.name for path in folder.iterdir()) == [
        *("doubted.jsonl", "fold_1.json", "fold_2.json", "kept.jsonl")
    ]
    # With the same settings and data no model is trained again.
    main([*command, "--weigh"])
    output = capsys.readouterr().out
    assert "step" not in output
    weights = [json.loads(line)["label_margin"] for line in (folder / "kept.jsonl").open()]
    assert len(weights) == 96
    assert all(weights[number] < 0.4 for number in WRONG)
    assert weights.count(1.0) == 96 - len(rows_of(folder / "doubted.jsonl"))


def test_filter_refuses_what_it_cannot_judge_by(tmp_path: Path) -> None:
    source = tiny.write_pairs(tmp_path / "pairs.jsonl", 4)
    command = [f"--input={source}", f"--output={tmp_path / 'out'}"]
    command.append("pretrained_checkpoint.restore_from_path=base.nemo")
    for more, message in (
        ("--folds=9", "got 4 prompts, wanted at least 9, one for each fold"),
        (f"model.data.data_prefix.train={source}", "model.data.data_prefix.train: got it twice"),
    ):
        with pytest.raises(SystemExit, match=message):
            main([*command, more])
    scored = [{**row, "score_chosen": "?", "score_rejected": 1} for row in rows_of(source)]
    command[0] = f"--input={write(tmp_path / 'scored.jsonl', *scored)}"
    with pytest.raises(SystemExit, match=r"scored\.jsonl:1: score_chosen: got '\?', wanted"):
        main([*command, "--weigh"])
    rated = write(tmp_path / "rated.jsonl", {"prompt": "q", "response": "a", "helpfulness": 1})
    with pytest.raises(SystemExit, match=r"rated\.jsonl:1: wanted a JSON object with 'chosen'"):
        main([f"--input={rated}", *command[1:]])


def test_pairs_are_judged_as_they_are_read_for_training() -> None:
    settings = {
        "model.data.system_prompt_file": "system.txt",
        "model.data.malformed": "drop",
        "model.data.seq_length": 128,
        "model.optim.lr": 1e-5,
    }
    assert reading_settings(settings) == {
        "data.system_prompt_file": "system.txt",
        "data.malformed": "drop",
    }


def test_margins_of_pairs_are_weighted_and_not_replaced() -> None:
    """Those that training reads and accepts; no field of a pair is replaced by the filter's."""
    for fields, margin in (
        ({"score_chosen": 9, "score_rejected": 6}, 3.0),
        ({"metadata": {"score_chosen": 9, "score_rejected": 6}}, 3.0),
        ({"margin": 2, "score_chosen": 9, "score_rejected": 6}, 2.0),
        ({"label_margin": 0.5, "margin": 2}, 0.5),
        ({"label_margin": None, "margin": 2}, 1.0),
        ({"label_margin": -100}, 1.0),
        ({"score_chosen": 3, "score_rejected": 5}, 1.0),
        ({"margin": 0}, 1.0),
        ({}, 1.0),
    ):
        row = {"prompt": "p", "chosen": "a", "rejected": "b", "record": "own", "p_wrong": 2}
        row |= fields
        pair = Pair("x:1", json.dumps(row), "p", margin=-4.0, p_wrong=0.9)
        assert read_margin(pair, -100.0) == margin, fields
        for confidence, weight in ((0.8, 0.1), (0.95, 1.0)):
            written = json.loads(weigh(pair, margin, confidence))
            assert written == {**row, "label_margin": pytest.approx(weight * margin)}
        about = {"filter_record": "x:1", "filter_p_wrong": 0.9, "filter_margin": -4.0}
        assert describe_doubted(pair) == {**row, **about}
        again = Pair("y:2", json.dumps({**row, **about}), "p", margin=-1.0, p_wrong=0.7)
        assert describe_doubted(again)["filter_record"] == "y:2"


def test_prompt_of_a_pair_is_what_its_sides_begin_with() -> None:
    question = {"role": "user", "content": "Why?"}
    answers = [{"role": "assistant", "content": text} for text in ("So.", "No.")]
    turns = "\n\nHuman: Why?\n\nAssistant: "
    pairs = [
        {"prompt": "Why?", "chosen": "So.", "rejected": "No."},
        {"chosen": [question, answers[0]], "rejected": [question, answers[1]]},
        {"chosen": f"{turns}So.", "rejected": f"{turns}So not."},
    ]
    for pair in pairs:
        swapped = {**pair, "chosen": pair["rejected"], "rejected": pair["chosen"]}
        assert "why?" in find_prompt(pair)
        assert find_prompt(pair) == find_prompt(swapped)
        assert "so" not in find_prompt(pair).replace("assistant", "")
