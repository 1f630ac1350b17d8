"""Comparisons and ratings as one set of data, and labels that an objective has no place for."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from nemo_aligner.config.common import RewardModelType
from nemo_aligner.config.data import DataConfig, DataPrefixConfig, RegressionConfig
from nemo_aligner.config.model import ModelConfig
from nemo_aligner.data.training_data import TrainingData, build_training_data
from nemo_aligner.errors import ConfigError, DataError
from nemo_aligner.readout import Readout
from nemo_aligner.text.contract import ScoringContract
from nemo_aligner.text.tokenizer import Tokenizer
from tests.contracts import Contracts

RATED = [
    {"prompt": "why", "response": "the cat", "help": 1, "brief": None},
    {"prompt": "how", "response": "a dog", "help": 4, "brief": 2},
]
PAIRS = [{"prompt": "who", "chosen": "a cat", "rejected": "no"}]


@pytest.fixture
def files(tmp_path: Path) -> dict[str, str]:
    found = {}
    for name, rows in (("rated", RATED), ("pairs", PAIRS)):
        path = tmp_path / f"{name}.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        found[name] = str(path)
    return found


def build(
    tokenizer: Tokenizer,
    contract: ScoringContract,
    train: list[str],
    validation: list[str],
    objective: str,
    **settings: Any,
) -> TrainingData:
    config = ModelConfig(
        reward_model_type=RewardModelType.regression,
        regression=RegressionConfig(["help", "brief"]),
        objective=objective,
        objective_kwargs=settings,
        data=DataConfig(
            data_prefix=DataPrefixConfig(train=train, validation=validation),
            allow_prompt_overlap=True,
        ),
    )
    return build_training_data(config, contract, tokenizer)


@pytest.mark.parametrize("order", [("rated", "pairs"), ("pairs", "rated")])
def test_files_of_both_kinds_are_one_set(
    order: tuple[str, str], files: dict[str, str], contracts: Contracts, tokenizer: Tokenizer
) -> None:
    contract = contracts(["help", "brief"])
    paths = [files[name] for name in order]
    data = build(tokenizer, contract, paths, paths, "ranking_and_regression")
    records = data.train.records
    assert records.sizes.tolist() == ([1, 1, 2] if order[0] == "rated" else [2, 1, 1])
    rated = records.labels.values[records.sizes == 1]
    assert rated[1].tolist() == [4.0, 2.0]
    assert bool(torch.isnan(records.labels.values[records.sizes == 2]).all())
    assert data.contract.label_means == (2.5, 2.0)
    for dataset in data.validation:
        assert dataset.records.labels.means == (2.5, 2.0)
    assert "label means" in data.train.reports[order.index("rated")].table()
    assert "label means" not in data.train.reports[order.index("pairs")].table()


def test_an_attribute_that_nobody_rates_is_an_error(
    files: dict[str, str], contracts: Contracts, tokenizer: Tokenizer
) -> None:
    contract = contracts(["help", "brief"])
    with pytest.raises(DataError, match="no record has a label of help"):
        build(tokenizer, contract, [files["pairs"]], [], "ranking_and_regression")


def test_a_label_beyond_the_bins_is_an_error_with_its_line(
    files: dict[str, str], contracts: Contracts, tokenizer: Tokenizer
) -> None:
    contract = contracts(["help", "brief"])
    message = r"rated.jsonl:2: help: got 4, wanted 0 to 3, as .* \(1 labels of train are not\)"
    with pytest.raises(DataError, match=message):
        build(tokenizer, contract, [files["rated"]], [], "ordinal_bins", values=[0, 1, 2, 3])
    with pytest.raises(ConfigError, match="all labels of brief are one in"):
        build(tokenizer, contract, [files["rated"]], [], "ordinal_bins")


def test_bins_are_in_the_contract_and_labels_are_not_centred(
    files: dict[str, str], contracts: Contracts, tokenizer: Tokenizer
) -> None:
    contract = contracts(["help", "brief"])
    data = build(tokenizer, contract, [files["rated"]], [], "ordinal_bins", values=[0, 2, 4])
    wanted = Readout("bins", ((0.0, 2.0, 4.0),) * 2)
    assert data.contract.output_readout == wanted
    assert data.contract.label_means == (0.0, 0.0)
    assert data.train.records.labels.means == (None, None)
    # A run that starts from this one has its values, and no others.
    again = build(tokenizer, data.contract, [files["rated"]], [], "ordinal_bins")
    assert again.contract.output_readout == wanted
    with pytest.raises(ConfigError, match=r"got one with bins .* model to start from has bins"):
        build(tokenizer, data.contract, [files["rated"]], [], "ordinal_bins", values=[0, 4])
