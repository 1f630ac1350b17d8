"""Makes scoring contracts and model settings for a tiny tokenizer."""

from __future__ import annotations

from nemo_aligner.config.common import Precision, RewardModelType
from nemo_aligner.config.model import DataConfig, ModelConfig, RegressionConfig
from nemo_aligner.contract.contract import ScoringContract
from nemo_aligner.contract.from_settings import build_contract
from nemo_aligner.contract.tokenizer import Tokenizer


class Contracts:
    """Called with ``seq_length=...`` or ``attributes=[...]``, it returns a scoring contract."""

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
