"""Evaluate a reward model on held-out pairs or ratings."""

from __future__ import annotations

from collections.abc import Sequence

from nemo_aligner.config.evaluation import EvaluateConfig
from nemo_aligner.config.load import load_config


def main(argv: Sequence[str]) -> int:
    """``[--config FILE] [section.key=value ...]``, see ``EvaluateConfig``."""
    config = load_config(EvaluateConfig, argv)
    from nemo_aligner.evaluation.run import evaluate

    evaluate(config)
    return 0
