"""Training data for each kind of objective: ties, pairs and ratings together, margins, bins."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from nemo_aligner.config.common import RecordKind
from nemo_aligner.contract.readout import Readout
from nemo_aligner.data.formats import FORMATS
from nemo_aligner.data.readers import ReaderConfig, read_records
from nemo_aligner.data.training_data import TrainingData
from nemo_aligner.losses.base import measure_set, measure_step
from nemo_aligner.training.learner import describe_rewards, validation_metric_names
from nemo_aligner.utils.errors import ConfigError, DataError
from tests.data.files import build, write
from tests.data.ranked_format import FORMAT
from tests.harness.contracts import Contracts

TIED = {"question": "who", "ranked": [[0, "the cat"], [0, "a dog"]]}
THREE = {"question": "why", "ranked": [[1, "no"], [0, "yes cat"], [1, "a tree"]]}
PLAIN = {"question": "how", "ranked": [[1, "no"], [0, "a cat"]]}
EQUAL = {"question": "when", "ranked": [[2, "now"], [2, "now"]]}
LOG_2 = math.log(2)


@pytest.fixture
def ranked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setitem(FORMATS, FORMAT.name, FORMAT)
    return write(tmp_path / "ranked.jsonl", TIED, THREE, PLAIN, EQUAL)


def learned(
    contracts: Contracts, path: Path, objective: str | None, **settings: Any
) -> TrainingData:
    both = ([path], [path])
    how: dict[str, Any] = {"objective": objective, "settings": settings}
    return build(contracts, *both, **how, allow_prompt_overlap=True)


def rows_of(data: TrainingData) -> dict[str, str]:
    lines = data.train.table().splitlines()[1:]
    return {line[:28].strip(): line[28:].strip() for line in lines}


def test_ties_are_counted_as_dropped_where_nothing_is_learned_from_them(
    ranked: Path, contracts: Contracts
) -> None:
    kept = read_records(ranked, ReaderConfig(RecordKind.comparison, ties=True))
    assert kept.counts == {"read": 4, "kept": 3, "identical": 1}
    assert [record.is_tied for record in kept.records] == [True, False, False]
    assert [record.has_ties for record in kept.records] == [True, True, False]
    for objective in (None, "plackett_luce"):
        data = learned(contracts, ranked, objective)
        table = rows_of(data)
        assert len(data.train) == 2
        assert table["dropped"] == "2 (1 identical, 1 tied)"
        assert table["exact ties (dropped)"] == "2"
        assert "all tied (kept)" not in table
        assert table["some tied"] == "1"


def test_ties_are_kept_in_training_and_validation_where_they_are_learned_from(
    ranked: Path, contracts: Contracts
) -> None:
    for objective, settings, tie in (
        ("rao_kupper", {}, math.log(3)),
        ("davidson", {}, math.log(3)),
        ("bradley_terry", {"ties": "half"}, LOG_2),
    ):
        data = learned(contracts, ranked, objective, **settings)
        table = rows_of(data)
        assert (table["kept"], table["all tied (kept)"], table["some tied"]) == ("3", "1", "1")
        assert table["exact ties (dropped)"] == "1"
        assert len(data.validation[0]) == 3
        records = data.train.records
        assert records.ranks.tolist() == [0, 0, 1, 0, 1, 1, 0]
        # With equal rewards, all outcomes are equally likely.
        step = measure_step(data.objective, torch.zeros(7, 1), records)
        assert step["loss"] == pytest.approx(tie), objective
        assert step["accuracy"] == 0.5, objective


def test_ties_are_in_the_loss_and_not_in_accuracy_and_margin(
    ranked: Path, contracts: Contracts
) -> None:
    data = learned(contracts, ranked, "davidson")
    train, sources = data.train, ["tied", "other", "other"]
    rewards = torch.tensor([[5.0], [-5.0], [0.0], [1.0], [-1.0], [0.0], [1.0]])
    found = measure_set(data.objective, rewards, train.records, train.reply_lengths, sources)
    assert (found["accuracy"], found["reward_margin"]) == (1.0, pytest.approx(4 / 3))
    assert found["by_source/other/accuracy"] == 1.0
    assert math.isnan(found["by_source/tied/accuracy"])
    assert found["by_source/tied/loss"] > LOG_2


def test_validation_has_metrics_by_principle_with_and_without_a_token_cache(
    tmp_path: Path, contracts: Contracts
) -> None:
    """Of two files, the second without a principle; not if there are more than 50."""
    texts = ["Is it kind?", "Is it\nbrief?", "", "Is it kind?"]
    pairs = [{"prompt": "why", "chosen": f"{n} cat", "rejected": "no"} for n in range(60)]
    rows = [pair | {"principle": text} for pair, text in zip(pairs, texts, strict=False)]
    paths = [write(tmp_path / "a.jsonl", *rows), write(tmp_path / "b.jsonl", pairs[9])]
    data: dict[str, Any] = {"principle_template": "{principle}"}
    rewards = torch.tensor([[1.0], [0], [0], [1], [1], [0], [0], [1], [1], [0]])
    kind, brief = "by_principle/Is it kind?/accuracy", "by_principle/Is it brief?/accuracy"
    for place in ({}, {"index_dir": str(tmp_path / "index")}):
        built = build(contracts, paths, **data, **place)
        found = describe_rewards(built.objective, built.train, rewards)
        assert [found[name] for name in (kind, brief)] == [0.5, 0.0]
        assert found["by_principle/none/accuracy"] == 1.0
        names = validation_metric_names(built.objective, [built.train])
        assert {f"train/{kind}", f"train/{brief}"} <= {*names}
        drawn = built.train.select([0, 1])
        assert drawn.principles == ["Is it kind?", "Is it brief?"]
        many = [pair | {"principle": f"Rule {n}"} for n, pair in enumerate(pairs)]
        several = [paths[0], write(tmp_path / "many.jsonl", *many)]
        assert build(contracts, several, **data, **place).train.principles == ()
    assert build(contracts, paths[1:]).train.principles == ()


@pytest.mark.parametrize(
    ("objective", "settings"),
    [
        ("bradley_terry", {"center_rewards_coefficient": 0.5}),
        ("plackett_luce", {}),
        ("head_ensemble", {"heads": 2, "bootstrap": False, "center_rewards_coefficient": 0.5}),
    ],
)
def test_rewards_of_pairs_include_the_label_mean_of_the_model_that_is_continued(
    tmp_path: Path, contracts: Contracts, objective: str, settings: dict[str, Any]
) -> None:
    paths = [write(tmp_path / "pairs.jsonl", {"prompt": "why", "chosen": "a", "rejected": "no"})]
    start = contracts().with_label_means([2.0])
    how: dict[str, Any] = {"objective": objective, "settings": settings, "contract": start}
    data = build(contracts, paths, paths, **how, allow_prompt_overlap=True)
    assert data.contract.label_means == (2.0,)
    outputs = torch.tensor([[1.0], [-1.0]]).expand(2, data.objective.output_columns.count)
    found = describe_rewards(data.objective, data.validation[0], outputs)
    names = ("reward_chosen_mean", "reward_rejected_mean", "reward_mean/reward")
    assert [found[name] for name in names] == [3.0, 1.0, 2.0]
    # The term that keeps rewards around 0 is (3 + 1) ** 2.
    centring = 0.5 * 16 if "center_rewards_coefficient" in settings else 0.0
    assert found["loss"] == pytest.approx(math.log1p(math.exp(-2.0)) + centring)


def test_margin_cannot_scale_by_less_than_nothing(ranked: Path, contracts: Contracts) -> None:
    path = write(ranked, *({**PLAIN, "label_margin": margin} for margin in (0, None, -1, -2)))
    message = r"ranked.jsonl:3: label_margin: .* -1 .* 0 or more.*\(2 labels of train"
    with pytest.raises(DataError, match=message):
        learned(contracts, path, "bradley_terry", label_margin="scale")
    data = learned(contracts, path, "bradley_terry", label_margin="subtract")
    step = measure_step(data.objective, torch.zeros(8, 1), data.train.records)
    wanted = [LOG_2, LOG_2, *(math.log1p(math.exp(-d)) for d in (1, 2))]
    assert step["loss"] == pytest.approx(sum(wanted) / 4)


NAMES = ["help", "brief"]


@pytest.fixture
def rated(tmp_path: Path) -> Path:
    return write(
        tmp_path / "rated.jsonl",
        {"prompt": "why", "response": "the cat", "help": 1, "brief": None},
        {"prompt": "how", "response": "a dog", "help": 4, "brief": 2},
    )


@pytest.fixture
def pairs(tmp_path: Path) -> Path:
    return write(tmp_path / "pairs.jsonl", {"prompt": "who", "chosen": "a cat", "rejected": "no"})


def test_pairs_and_ratings_are_one_set(rated: Path, pairs: Path, contracts: Contracts) -> None:
    how: dict[str, Any] = {"objective": "ranking_and_regression", "attributes": NAMES}
    for paths, sizes in (([rated, pairs], [1, 1, 2]), ([pairs, rated], [2, 1, 1])):
        data = build(contracts, paths, paths, **how, allow_prompt_overlap=True)
        records = data.train.records
        counts = records.sample_bounds.diff()
        assert counts.tolist() == sizes
        assert records.labels.values[counts == 1][1].tolist() == [4.0, 2.0]
        assert bool(torch.isnan(records.labels.values[counts == 2]).all())
        assert data.contract.label_means == (2.5, 2.0)
        for dataset in data.validation:
            assert dataset.records.labels.means == {"help": 2.5, "brief": 2.0}
        assert "label means" in data.train.reports[paths.index(rated)].table()
        assert "label means" not in data.train.reports[paths.index(pairs)].table()
    with pytest.raises(DataError, match="no record has a label of help"):
        build(contracts, [pairs], **how)


def test_each_validation_file_has_a_name_of_its_own(tmp_path: Path, contracts: Contracts) -> None:
    """The number of the first file makes its name that of the third."""
    files = []
    for name in ("x/a.jsonl", "y/a.jsonl", "a_1.jsonl", "b.jsonl"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        files.append(write(tmp_path / name, {"chosen": f"a cat {name}", "rejected": "no"}))
    train = write(tmp_path / "train.jsonl", {"chosen": "yes cat", "rejected": "no"})
    data = build(contracts, [train], files, allow_prompt_overlap=True)
    names = [dataset.name.removeprefix("validation-") for dataset in data.validation]
    assert names == ["a_1_1", "a_2", "a_1_3", "b"]


def test_bins_are_in_the_contract_and_labels_are_not_centred(
    rated: Path, contracts: Contracts
) -> None:
    how: dict[str, Any] = {"objective": "ordinal_bins", "attributes": NAMES}
    data = build(contracts, [rated], **how, settings={"values": [0, 2, 4]})
    wanted = Readout("bins", ((0.0, 2.0, 4.0),) * 2)
    assert data.contract.output_readout == wanted
    assert data.contract.label_means == (0.0, 0.0)
    assert data.train.records.labels.means == {}
    # A run that starts from this model has the same bins.
    again = build(contracts, [rated], **how, contract=data.contract)
    assert again.contract.output_readout == wanted
    with pytest.raises(ConfigError, match=r"model.objective: .* bins"):
        build(contracts, [rated], **how, contract=data.contract, settings={"values": [0, 4]})
    message = r"rated.jsonl:2: help: .* 4 .* 0 to 3\. .*\(1 labels of train"
    with pytest.raises(DataError, match=message):
        build(contracts, [rated], **how, settings={"values": [0, 1, 2, 3]})
    with pytest.raises(ConfigError, match=r"values: got none, .* labels of brief"):
        build(contracts, [rated], **how)
