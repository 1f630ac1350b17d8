"""The text -> ids rule of a model, or of a tokenizer alone under given settings."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from nemo_aligner.checkpoint.nemo.reward_model import read_text_rules
from nemo_aligner.config.common import Precision, RewardModelType
from nemo_aligner.config.data import DataConfig, RegressionConfig
from nemo_aligner.config.model import ModelConfig
from nemo_aligner.text.contract import ScoringContract
from nemo_aligner.text.contract_settings import build_contract
from nemo_aligner.text.tokenizer import Tokenizer, load_tokenizer


def read_or_build_text_rules(
    path: Path, data: DataConfig, attributes: Sequence[str]
) -> tuple[Tokenizer, ScoringContract]:
    """The tokenizer at ``path``, and its own contract; where it has none, one by the settings.

    ``path`` is a .nemo file, the folder it unpacks to, or a folder with tokenizer.json.

    Raises:
        AlignerError: there is no tokenizer, or the settings do not fit it.
    """
    contract = None
    if (path / "tokenizer.json").is_file():
        tokenizer = load_tokenizer(path)
    else:
        tokenizer, contract = read_text_rules(path)
    if contract is not None:
        return tokenizer, contract
    config = ModelConfig(data=data)
    if attributes:
        config = ModelConfig(
            reward_model_type=RewardModelType.regression,
            regression=RegressionConfig(list(attributes)),
            data=data,
        )
    return tokenizer, build_contract(config, tokenizer, Precision.fp32)
