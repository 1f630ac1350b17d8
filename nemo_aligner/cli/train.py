"""Train a reward model: from a base checkpoint and preference data to ``megatron_gpt.nemo``."""

from __future__ import annotations

from collections.abc import Sequence

from nemo_aligner.config.load import load_config
from nemo_aligner.config.training import TrainConfig


def main(argv: Sequence[str]) -> int:
    """``[--config FILE] [section.key=value ...]``, see ``TrainConfig``."""
    config = load_config(TrainConfig, argv)
    from nemo_aligner.training.run import train

    train(config)
    return 0
