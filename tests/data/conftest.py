"""A tiny tokenizer with ChatML's tokens, and contracts on it."""

from __future__ import annotations

from pathlib import Path

import pytest

from nemo_aligner.config.schema import (
    DataConfig,
    ModelConfig,
    Precision,
    RegressionConfig,
    RewardModelType,
)
from nemo_aligner.data.contract import ScoringContract, build_contract
from nemo_aligner.data.tokenizer import Tokenizer, load_tokenizer
from tests import tiny


@pytest.fixture(scope="session")
def tokenizer_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tokenizer")
    tiny.write_tokenizer(folder)
    return folder


@pytest.fixture(scope="session")
def tokenizer(tokenizer_folder: Path) -> Tokenizer:
    return load_tokenizer(tokenizer_folder)


class Contracts:
    """``contracts(seq_length=..., attributes=[...])`` -> the model's config and its contract."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer

    def config(self, attributes: list[str] | None = None, **data: object) -> ModelConfig:
        kind = RewardModelType.regression if attributes else RewardModelType.binary_ranking
        return ModelConfig(
            reward_model_type=kind,
            regression=RegressionConfig(attributes or []),
            data=DataConfig(**data),  # type: ignore[arg-type]
        )

    def __call__(self, attributes: list[str] | None = None, **data: object) -> ScoringContract:
        return build_contract(self.config(attributes, **data), self.tokenizer, Precision.fp32)


@pytest.fixture(scope="session")
def contracts(tokenizer: Tokenizer) -> Contracts:
    return Contracts(tokenizer)
