"""Tied completions: dropped and counted, or kept where the objective learns from them."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from nemo_aligner.config.common import RecordKind
from nemo_aligner.config.data import DataConfig, DataPrefixConfig
from nemo_aligner.config.model import ModelConfig
from nemo_aligner.data.formats import FORMATS
from nemo_aligner.data.reading import Reading, read_records
from nemo_aligner.data.training_data import TrainingData, build_training_data
from nemo_aligner.errors import DataError
from nemo_aligner.objectives.measure import measure_set, measure_step
from nemo_aligner.text.tokenizer import Tokenizer
from tests.contracts import Contracts
from tests.data.files import write
from tests.data.ranked_format import FORMAT

TIED = {"question": "who", "ranked": [[0, "the cat"], [0, "a dog"]]}
THREE = {"question": "why", "ranked": [[1, "no"], [0, "yes cat"], [1, "a tree"]]}
PLAIN = {"question": "how", "ranked": [[1, "no"], [0, "a cat"]]}
EQUAL = {"question": "when", "ranked": [[2, "now"], [2, "now"]]}
LOG_2 = math.log(2)


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setitem(FORMATS, FORMAT.name, FORMAT)
    return str(write(tmp_path / "ranked.jsonl", TIED, THREE, PLAIN, EQUAL))


def read(
    path: str, contracts: Contracts, tokenizer: Tokenizer, objective: str | None, **settings: Any
) -> TrainingData:
    config = ModelConfig(
        objective=objective,
        objective_kwargs=settings,
        data=DataConfig(
            data_prefix=DataPrefixConfig(train=[path], validation=[path]), allow_prompt_overlap=True
        ),
    )
    return build_training_data(config, contracts(), tokenizer)


def rows_of(data: TrainingData) -> dict[str, str]:
    lines = data.train.table().splitlines()[1:]
    return {line[:28].strip(): line[28:].strip() for line in lines}


def test_ties_are_dropped_by_a_reader_unless_it_is_to_keep_them(path: str) -> None:
    file = read_records(path, Reading(RecordKind.comparison))
    assert file.counts == {"read": 4, "kept": 2, "tied": 1, "identical": 1}
    kept = read_records(path, Reading(RecordKind.comparison, ties=True))
    assert kept.counts == {"read": 4, "kept": 3, "identical": 1}
    assert [record.is_tied for record in kept.records] == [True, False, False]
    assert [record.has_ties for record in kept.records] == [True, True, False]


def test_ties_are_counted_as_dropped_where_nothing_is_learned_from_them(
    path: str, contracts: Contracts, tokenizer: Tokenizer
) -> None:
    for objective in (None, "plackett_luce"):
        data = read(path, contracts, tokenizer, objective)
        table = rows_of(data)
        assert len(data.train) == 2
        assert table["dropped"] == "2 (1 identical, 1 tied)"
        assert table["exact ties (dropped)"] == "2"
        assert "all tied (kept)" not in table
        assert table["some tied"] == "1"


def test_ties_are_kept_in_training_and_validation_where_they_are_learned_from(
    path: str, contracts: Contracts, tokenizer: Tokenizer
) -> None:
    for objective, settings, tie in (
        ("rao_kupper", {}, math.log(3)),
        ("davidson", {}, math.log(3)),
        ("bradley_terry", {"ties": "half"}, LOG_2),
    ):
        data = read(path, contracts, tokenizer, objective, **settings)
        table = rows_of(data)
        assert (table["kept"], table["all tied (kept)"], table["some tied"]) == ("3", "1", "1")
        assert table["exact ties (dropped)"] == "1"
        assert len(data.validation[0]) == 3
        records = data.train.records
        assert records.ranks.tolist() == [0, 0, 1, 0, 1, 1, 0]
        # With equal rewards everything is as likely as anything else.
        step = measure_step(data.objective, torch.zeros(7, 1), records)
        assert step["loss"] == pytest.approx(tie), objective
        assert step["accuracy"] == 0.5, objective


def test_ties_are_in_the_loss_and_not_in_accuracy_and_margin(
    path: str, contracts: Contracts, tokenizer: Tokenizer
) -> None:
    data = read(path, contracts, tokenizer, "davidson")
    train, sources = data.train, ["tied", "other", "other"]
    rewards = torch.tensor([[5.0], [-5.0], [0.0], [1.0], [-1.0], [0.0], [1.0]])
    found = measure_set(data.objective, rewards, train.records, train.reply_lengths, sources)
    assert (found["accuracy"], found["reward_margin"]) == (1.0, pytest.approx(4 / 3))
    assert found["by_source/other/accuracy"] == 1.0
    assert math.isnan(found["by_source/tied/accuracy"])
    assert found["by_source/tied/loss"] > LOG_2


def test_label_margin_cannot_scale_by_less_than_nothing(
    tmp_path: Path, path: str, contracts: Contracts, tokenizer: Tokenizer
) -> None:
    rows = [{**PLAIN, "label_margin": margin} for margin in (0, None, -1, -2)]
    path = str(write(tmp_path / "margins.jsonl", *rows))
    message = (
        r"margins.jsonl:3: label_margin: got -1, wanted 0 or more, as model.objective needs it "
        r"\(2 labels of train are not\)"
    )
    with pytest.raises(DataError, match=message):
        read(path, contracts, tokenizer, "bradley_terry", label_margin="scale")
    data = read(path, contracts, tokenizer, "bradley_terry", label_margin="subtract")
    step = measure_step(data.objective, torch.zeros(8, 1), data.train.records)
    wanted = [LOG_2, LOG_2, *(math.log1p(math.exp(-d)) for d in (1, 2))]
    assert step["loss"] == pytest.approx(sum(wanted) / 4)
