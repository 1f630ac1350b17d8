"""Settings of an evaluation."""

from __future__ import annotations

from dataclasses import dataclass, field

from nemo_aligner.config.common import Precision
from nemo_aligner.config.scoring import ScorerModelConfig


@dataclass
class EvaluateDataConfig:
    """``path``: one file of pairs or ratings; the rest comes from the model's scoring contract."""

    path: str | None = None
    format: str = "auto"
    loss_mask_val: float = -100.0


@dataclass
class EvaluateConfig:
    """The whole of ``examples/evaluate_reward_model.py``.

    ``output`` is a JSON file for metrics and counts, ``output_rewards`` a JSONL file with one line
    per record. ``precision: null`` is the one the scoring contract names. A model whose contract
    does not have the hash ``expect_contract`` is refused.
    """

    rm_model_file: str | None = None
    expect_contract: str | None = None
    precision: Precision | None = None
    model: ScorerModelConfig = field(default_factory=ScorerModelConfig)
    data: EvaluateDataConfig = field(default_factory=EvaluateDataConfig)
    output: str | None = None
    output_rewards: str | None = None
