"""Which held-out records a run keeps for its report, and with which texts and rewards."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from nemo_aligner.checkpoint.run_folder import FACTS_NAME
from nemo_aligner.config.common import Precision
from nemo_aligner.config.load import load_config
from nemo_aligner.config.model import DataPrefixConfig, HeadConfig, ScoredPosition
from nemo_aligner.config.training import TrainConfig
from nemo_aligner.contract.from_settings import build_contract
from nemo_aligner.data.files import Line
from nemo_aligner.data.readers import FileRules
from nemo_aligner.data.records import Record
from nemo_aligner.data.training_data import TrainingData, build_training_data, how_to_read
from nemo_aligner.evaluation.report.figures import heldout_sets
from nemo_aligner.evaluation.report.run_report import read_report
from nemo_aligner.training import run
from nemo_aligner.training.describe import list_heldout_files
from nemo_aligner.training.heldout import HeldoutRewards, delete_earlier_rewards
from nemo_aligner.training.run import train
from nemo_aligner.training.run_facts import RunFacts
from nemo_aligner.utils.errors import ConfigError
from tests.data import files
from tests.harness import tiny
from tests.harness.contracts import Contracts


def build(
    folder: Path, contracts: Contracts, heldout: Path, attributes: list[str] | None = None
) -> tuple[TrainingData, HeldoutRewards]:
    train = folder / "train.jsonl"
    if attributes:
        tiny.write_ratings(train, 8, tuple(attributes))
    else:
        tiny.write_pairs(train, 8)
    data = files.build(contracts, [train], [heldout], attributes=attributes)
    reading = how_to_read(contracts.config(attributes), data.objective)
    return data, HeldoutRewards(folder, reading, data.contract, most_records=6)


def config_of(folder: Path, train: object, heldout: object) -> TrainConfig:
    prefix = "model.data.data_prefix"
    files = [f"{prefix}.train={train}", f"{prefix}.validation={heldout}"]
    return load_config(TrainConfig, [f"exp_manager.explicit_log_dir={folder}", *files])


def read_rows(folder: Path) -> list[dict[str, Any]]:
    return files.rows_of(folder / "heldout" / "validation-held.jsonl")


def test_heldout_has_every_pair_of_ranked_replies(tmp_path: Path, contracts: Contracts) -> None:
    path = files.write(
        tmp_path / "held.jsonl",
        tiny.ranked("one?", (2, "bad"), (0, "good"), (1, "so so")),
        tiny.ranked("two?", (0, "a"), (1, "b")),
    )
    data, heldout = build(tmp_path, contracts, path)
    # The texts of a record come best first.
    heldout.keep(data.validation[0], torch.tensor([[0.9], [0.5], [0.1], [2.0], [3.0]]))
    rows = [
        (row["record"], row["rewards"]["chosen"], row["texts"]["rejected"][-1]["content"])
        for row in read_rows(tmp_path)
    ]
    assert [(record, pytest.approx(reward), text) for record, reward, text in rows] == [
        (f"{path}:1", 0.9, "so so"),
        (f"{path}:1", 0.9, "bad"),
        (f"{path}:1", 0.5, "bad"),
        (f"{path}:2", 2.0, "b"),
    ]


def test_heldout_records_are_the_same_few_of_many_and_no_others_are_parsed(
    tmp_path: Path, contracts: Contracts, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tiny.write_pairs(tmp_path / "held.jsonl", 40, seed=1)
    data, heldout = build(tmp_path, contracts, path)
    parsed: list[int] = []
    parse = FileRules.records

    def count(rules: FileRules, lines: Sequence[Line], *more: Any) -> Iterator[Record]:
        parsed.extend(line.number for line in lines)
        return parse(rules, lines, *more)

    monkeypatch.setattr(FileRules, "records", count)
    rewards = torch.arange(80.0)[:, None]
    heldout.keep(data.validation[0], rewards)
    first = read_rows(tmp_path)
    heldout.keep(data.validation[0], rewards + 1)
    delete_earlier_rewards(tmp_path, {"validation-held"})
    again = read_rows(tmp_path)
    assert len(first) == 6
    assert [row["record"] for row in first] == [f"{path}:{number}" for number in parsed]
    assert [row["record"] for row in first] == [row["record"] for row in again]
    for row, other in zip(first, again, strict=True):
        line = int(row["record"].rpartition(":")[2])
        assert row["rewards"] == {"chosen": 2.0 * line - 2, "rejected": 2.0 * line - 1}
        assert other["rewards"]["chosen"] == row["rewards"]["chosen"] + 1
        prompt_and_reply = files.rows_of(path)[line - 1]["chosen"]
        assert row["texts"]["chosen"][-1]["content"] == prompt_and_reply


def test_heldout_record_of_two_lines_has_the_texts_of_both(
    tmp_path: Path, contracts: Contracts
) -> None:
    lines = [{"text": f"User: {number}?\nAssistant: {number}"} for number in range(24)]
    data, heldout = build(tmp_path, contracts, files.write(tmp_path / "held.jsonl", *lines))
    heldout.keep(data.validation[0], torch.zeros(24, 1))
    rows = read_rows(tmp_path)
    assert len(rows) == 6
    for row in rows:
        first = int(row["record"].rpartition(":")[2]) - 1
        assert [row["texts"][side] for side in ("chosen", "rejected")] == [
            lines[first]["text"], lines[first + 1]["text"]
        ]  # fmt: skip


def test_heldout_ratings_have_their_labels(tmp_path: Path, contracts: Contracts) -> None:
    names = ["helpful", "brief"]
    path = tiny.write_ratings(tmp_path / "held.jsonl", 5, tuple(names), seed=1)
    data, heldout = build(tmp_path, contracts, path, names)
    heldout.keep(data.validation[0], torch.arange(10.0).view(5, 2))
    ratings = files.rows_of(path)
    for number, (row, rating) in enumerate(zip(read_rows(tmp_path), ratings, strict=True)):
        assert row["rewards"] == {"helpful": 2.0 * number, "brief": 2.0 * number + 1}
        assert row["labels"] == {name: rating[name] for name in names}
        assert row["texts"]["response"][-1]["content"] == rating["response"]


def test_heldout_records_of_one_line_have_their_own_texts(
    tmp_path: Path, contracts: Contracts, capsys: pytest.CaptureFixture[str]
) -> None:
    """A line of PRM800K is a record for its path, and one for each step beside it."""

    def line(question: str, other: str) -> dict[str, Any]:
        texts = [{"text": "good", "rating": 1}, {"text": other, "rating": -1}]
        steps = [{"completions": texts, "chosen_completion": 0}]
        return {"question": {"problem": question}, "label": {"steps": steps}}

    source = files.write(tmp_path / "held.jsonl", line("one?", "bad"), line("two?", "worse"))
    config = contracts.config(["right"], step_separator=" ")
    config.head = HeadConfig(reads=ScoredPosition.step_ends)
    config.data.data_prefix = DataPrefixConfig([str(source)], [str(source)])
    config.data.allow_prompt_overlap = True
    contract = build_contract(config, contracts.tokenizer, Precision.fp32)
    data = build_training_data(config, contract, contracts.tokenizer)
    heldout = HeldoutRewards(tmp_path, how_to_read(config, data.objective), contract)
    heldout.keep(data.validation[0], torch.arange(4.0)[:, None])
    steps = [
        (row["texts"]["response"][-1]["content"][0]["text"], row) for row in read_rows(tmp_path)
    ]
    assert [(text, row["rewards"]["right"], row["labels"]["right"]) for text, row in steps] == [
        ("bad", 0, 0), ("good", 1, 1), ("worse", 2, 0), ("good", 3, 1)
    ]  # fmt: skip
    # Also where only some records of a line are drawn.
    drawn = data.with_validation_limited(2, seed=1).validation[0]
    heldout.keep(replace(drawn, name="drawn"), torch.tensor([[8.0], [9.0]]))
    of_drawn = [
        (row["record"], row["texts"]["response"][-1]["content"][0]["text"])
        for row in files.rows_of(tmp_path / "heldout" / "drawn.jsonl")
    ]
    assert of_drawn == [(f"{source}:1", "good"), (f"{source}:2", "worse")]
    # Where one of them was dropped, nobody knows which texts the others of the line have.
    fewer = replace(data.validation[0].select([1, 2, 3]), name="fewer", line_positions=None)
    for _ in range(2):
        heldout.keep(fewer, torch.tensor([[5.0], [6.0], [7.0]]))
    output = " ".join(capsys.readouterr().out.split())
    assert output.count("the report will lack the rewards of 1 of 3 held-out records") == 1
    assert f"{source}:1: 2 records come from this line, but the run uses only 1 of" in output
    of_fewer = files.rows_of(tmp_path / "heldout" / "fewer.jsonl")
    assert [(row["record"], row["rewards"]["right"]) for row in of_fewer] == [
        (f"{source}:2", 6.0),
        (f"{source}:2", 7.0),
    ]


def test_tied_records_have_no_heldout_rewards_and_no_evaluation(
    tmp_path: Path, contracts: Contracts
) -> None:
    tied = files.write(tmp_path / "held.jsonl", tiny.ranked("one?", (0, "a"), (0, "b")))
    pairs = tiny.write_pairs(tmp_path / "train.jsonl", 8)
    settings = {"ties": "half"}
    data = files.build(contracts, [pairs], [tied], objective="bradley_terry", settings=settings)
    reading = how_to_read(contracts.config(), data.objective)
    heldout = HeldoutRewards(tmp_path, reading, data.contract)
    stale = tmp_path / "heldout" / "validation-held.jsonl"
    stale.parent.mkdir()
    stale.touch()
    heldout.keep(data.validation[0], torch.tensor([[1.0], [2.0]]))
    assert not stale.exists()
    prefix = DataPrefixConfig(["owner/pairs"], ["owner/tied"], ["owner/pairs:test"])
    data = replace(data, test=[data.train])
    assert list_heldout_files(data, prefix) == ["owner/pairs:test"]


def test_heldout_file_that_is_gone_is_said_and_stops_nothing(
    tmp_path: Path, contracts: Contracts, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tiny.write_pairs(tmp_path / "held.jsonl", 4, seed=1)
    data, heldout = build(tmp_path, contracts, path)
    path.unlink()
    for _ in range(2):
        heldout.keep(data.validation[0], torch.zeros(8, 1))
    assert capsys.readouterr().out.count("the report will have no held-out rewards") == 1
    assert not (tmp_path / "heldout").exists()


def test_files_for_the_report_that_cannot_be_written_are_told_once_and_stop_nothing(
    tmp_path: Path, contracts: Contracts, capsys: pytest.CaptureFixture[str]
) -> None:
    data, heldout = build(tmp_path, contracts, tiny.write_pairs(tmp_path / "held.jsonl", 4, seed=1))
    (tmp_path / "heldout").touch()
    (tmp_path / FACTS_NAME).mkdir()
    facts = RunFacts(config_of(tmp_path, "a", "b"), data, ranks=1)
    facts.begin(["a line"])
    for _ in range(2):
        heldout.keep(data.validation[0], torch.zeros(8, 1))
        facts.write()
    lines = capsys.readouterr().out.splitlines()
    assert [line.partition(" (")[0] for line in lines if "stopped" in line] == [
        "run_facts.json: writing stopped",
        "heldout: writing stopped",
    ]


def test_facts_say_what_was_trained_on(tmp_path: Path, contracts: Contracts) -> None:
    path = tiny.write_pairs(tmp_path / "held.jsonl", 4, seed=1)
    data, _ = build(tmp_path, contracts, path)
    RunFacts(config_of(tmp_path, "owner/pairs", path), data, ranks=2).begin(["a line"])
    facts = json.loads((tmp_path / FACTS_NAME).read_text())
    assert facts["described"] == ["a line"]
    assert facts["ranks"] == 2
    assert facts["validation_records"] == {"validation-held": 4}
    assert facts["contract_hash"] == data.contract.hash
    assert [file["path"] for file in facts["data"]] == ["owner/pairs", str(path)]
    assert ["kept", "4"] in facts["data"][1]["rows"]
    assert facts["versions"]["torch"].startswith(torch.__version__.split("+")[0])
    assert facts["peak_memory"]["host"] > 1e7


def test_heldout_rewards_at_the_end_of_a_run_are_the_models(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The best step is the first: what the run learns is wrong on the validation set."""
    train_file = tiny.write_pairs(tmp_path / "train.jsonl", 24)
    pairs = files.rows_of(train_file)
    swapped = [{**row, "chosen": row["rejected"], "rejected": row["chosen"]} for row in pairs[:6]]
    held = files.write(tmp_path / "held.jsonl", *swapped)
    settings = [
        *tiny.training(base, tmp_path / "run", train_file, held),
        "trainer.rm.val_check_interval=1",
        "exp_manager.checkpoint_callback_params.monitor=loss",
    ]

    def check(*more: str) -> None:
        train(load_config(TrainConfig, [*settings, *more]))
        states = [
            json.loads(path.read_text())
            for path in (tmp_path / "run/checkpoints").glob("step_*/run_state.json")
        ]
        losses = {state["step"]: state["metrics"]["validation-held/loss"] for state in states}
        assert losses[1] < losses[2]
        margins = [
            row["rewards"]["chosen"] - row["rewards"]["rejected"]
            for row in read_rows(tmp_path / "run")
        ]
        loss = float(-torch.nn.functional.logsigmoid(torch.tensor(margins)).mean())
        assert loss == pytest.approx(losses[1], abs=1e-6)
        report = read_report(tmp_path / "run")
        assert report.exported["weights"] == "step 1"
        assert heldout_sets([report])[0].metric("loss") == losses[1]

    check("trainer.rm.max_steps=2")
    # Also of a run that is only exported again, with a schedule that would need more steps. What an
    # earlier part of the run wrote on other sets is deleted.
    (path,) = (tmp_path / "run/heldout").iterdir()
    names = ("validation-gone", "test-held", "yours")
    copies = [path.with_name(f"{name}.jsonl") for name in names]
    for copy in copies:
        copy.write_text(path.read_text())
    with monkeypatch.context() as patch:
        patch.setattr(run, "build_loggers", Mock(side_effect=ConfigError("no logger")))
        with pytest.raises(ConfigError, match="no logger"):
            check("trainer.rm.max_steps=2")
    assert sorted(path.parent.iterdir()) == sorted([path, *copies])
    path.unlink()
    check("trainer.rm.max_steps=2", "model.optim.sched.constant_steps=10")
    assert sorted(path.parent.iterdir()) == [path, copies[-1]]
