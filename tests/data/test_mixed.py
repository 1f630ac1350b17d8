"""Comparisons and ratings as one set of data, and labels that an objective has no place for."""

from __future__ import annotations

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
from tests.data.files import write

RATED = [
    {"prompt": "why", "response": "the cat", "help": 1, "brief": None},
    {"prompt": "how", "response": "a dog", "help": 4, "brief": 2},
]
PAIRS = [{"prompt": "who", "chosen": "a cat", "rejected": "no"}]


@pytest.fixture
def files(tmp_path: Path) -> dict[str, str]:
    rows = {"rated": RATED, "pairs": PAIRS}
    return {name: str(write(tmp_path / f"{name}.jsonl", *each)) for name, each in rows.items()}


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


def test_mixed_files_of_both_kinds_are_one_set(
    files: dict[str, str], contracts: Contracts, tokenizer: Tokenizer
) -> None:
    contract = contracts(["help", "brief"])
    for order, sizes in ((("rated", "pairs"), [1, 1, 2]), (("pairs", "rated"), [2, 1, 1])):
        paths = [files[name] for name in order]
        data = build(tokenizer, contract, paths, paths, "ranking_and_regression")
        records = data.train.records
        assert records.sizes.tolist() == sizes
        rated = records.labels.values[records.sizes == 1]
        assert rated[1].tolist() == [4.0, 2.0]
        assert bool(torch.isnan(records.labels.values[records.sizes == 2]).all())
        assert data.contract.label_means == (2.5, 2.0)
        for dataset in data.validation:
            assert dataset.records.labels.means == (2.5, 2.0)
        assert "label means" in data.train.reports[order.index("rated")].table()
        assert "label means" not in data.train.reports[order.index("pairs")].table()


def test_labels_that_an_objective_cannot_learn_from_are_refused(
    files: dict[str, str], contracts: Contracts, tokenizer: Tokenizer
) -> None:
    contract, bins = contracts(["help", "brief"]), "ordinal_bins"
    with pytest.raises(DataError, match="no record has a label of help"):
        build(tokenizer, contract, [files["pairs"]], [], "ranking_and_regression")
    message = r"rated.jsonl:2: help: got 4, wanted 0 to 3, as .* \(1 labels of train are not\)"
    with pytest.raises(DataError, match=message):
        build(tokenizer, contract, [files["rated"]], [], bins, values=[0, 1, 2, 3])
    with pytest.raises(ConfigError, match="all labels of brief are one in"):
        build(tokenizer, contract, [files["rated"]], [], bins)


def test_labels_in_bins_are_not_centred_and_the_contract_has_the_bins(
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
