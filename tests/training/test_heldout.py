"""Which held-out records a run keeps for its report, and with which texts and rewards."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from nemo_aligner.checkpoint.run_folder import FACTS_NAME
from nemo_aligner.data.training_data import TrainingData, how_to_read
from nemo_aligner.training.resume import RunFacts
from nemo_aligner.training.trainer import HeldoutRewards
from tests import tiny
from tests.contracts import Contracts
from tests.data import files


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
    return data, HeldoutRewards(folder, reading, data.contract, most=6)


def kept(folder: Path) -> list[dict[str, Any]]:
    return files.rows_of(folder / "heldout" / "validation-held.jsonl")


def test_heldout_has_every_pair_of_ranked_replies(tmp_path: Path, contracts: Contracts) -> None:
    held = files.write(
        tmp_path / "held.jsonl",
        tiny.ranked("one?", (2, "bad"), (0, "good"), (1, "so so")),
        tiny.ranked("two?", (0, "a"), (1, "b")),
    )
    data, heldout = build(tmp_path, contracts, held)
    # The texts of a record come best first.
    heldout.keep(data.validation[0], torch.tensor([[0.9], [0.5], [0.1], [2.0], [3.0]]))
    found = [
        (row["record"], row["rewards"]["chosen"], row["texts"]["rejected"][-1]["content"])
        for row in kept(tmp_path)
    ]
    assert [(record, pytest.approx(reward), text) for record, reward, text in found] == [
        (f"{held}:1", 0.9, "so so"),
        (f"{held}:1", 0.9, "bad"),
        (f"{held}:1", 0.5, "bad"),
        (f"{held}:2", 2.0, "b"),
    ]


def test_heldout_records_are_the_same_few_of_many(tmp_path: Path, contracts: Contracts) -> None:
    held = tiny.write_pairs(tmp_path / "held.jsonl", 40, seed=1)
    data, heldout = build(tmp_path, contracts, held)
    rewards = torch.arange(80.0)[:, None]
    heldout.keep(data.validation[0], rewards)
    first = kept(tmp_path)
    heldout.keep(data.validation[0], rewards + 1)
    again = kept(tmp_path)
    assert len(first) == 6
    assert [row["record"] for row in first] == [row["record"] for row in again]
    for row, other in zip(first, again, strict=True):
        line = int(row["record"].rpartition(":")[2])
        assert row["rewards"] == {"chosen": 2.0 * line - 2, "rejected": 2.0 * line - 1}
        assert other["rewards"]["chosen"] == row["rewards"]["chosen"] + 1
        asked = files.rows_of(held)[line - 1]["chosen"]
        assert row["texts"]["chosen"][-1]["content"] == asked


def test_heldout_ratings_have_their_labels(tmp_path: Path, contracts: Contracts) -> None:
    names = ["helpful", "brief"]
    held = tiny.write_ratings(tmp_path / "held.jsonl", 5, tuple(names), seed=1)
    data, heldout = build(tmp_path, contracts, held, names)
    heldout.keep(data.validation[0], torch.arange(10.0).view(5, 2))
    asked = files.rows_of(held)
    for number, (row, wanted) in enumerate(zip(kept(tmp_path), asked, strict=True)):
        assert row["rewards"] == {"helpful": 2.0 * number, "brief": 2.0 * number + 1}
        assert row["labels"] == {name: wanted[name] for name in names}
        assert row["texts"]["response"][-1]["content"] == wanted["response"]


def test_heldout_file_that_is_gone_is_said_and_stops_nothing(
    tmp_path: Path, contracts: Contracts, capsys: pytest.CaptureFixture[str]
) -> None:
    held = tiny.write_pairs(tmp_path / "held.jsonl", 4, seed=1)
    data, heldout = build(tmp_path, contracts, held)
    held.unlink()
    for _ in range(2):
        heldout.keep(data.validation[0], torch.zeros(8, 1))
    assert capsys.readouterr().out.count("held-out rewards are not kept for a report") == 1
    assert not (tmp_path / "heldout").exists()


def test_facts_say_what_was_trained_on(tmp_path: Path, contracts: Contracts) -> None:
    held = tiny.write_pairs(tmp_path / "held.jsonl", 4, seed=1)
    data, _ = build(tmp_path, contracts, held)
    RunFacts(tmp_path, data, ranks=2).begin(["a line"])
    facts = json.loads((tmp_path / FACTS_NAME).read_text())
    assert facts["described"] == ["a line"]
    assert facts["ranks"] == 2
    assert facts["validation_records"] == {"validation-held": 4}
    assert facts["contract_hash"] == data.contract.hash
    assert [file["path"] for file in facts["data"]] == [str(tmp_path / "train.jsonl"), str(held)]
    assert ["kept", "4"] in facts["data"][1]["rows"]
    assert facts["versions"]["torch"].startswith(torch.__version__.split("+")[0])
    assert facts["peak_memory"]["host"] > 1e7
