"""Train by the settings given, and evaluate what was saved on the same file; prints both's rewards.

As ``[[validation, evaluation], ...]``, a pair for every reply: first those chosen.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from nemo_aligner.config.common import Precision
from nemo_aligner.config.load import load_config
from nemo_aligner.config.training import TrainConfig
from nemo_aligner.evaluation.evaluate import evaluate_file
from nemo_aligner.evaluation.sources.base import of_scorer
from nemo_aligner.parallel.launch import launch
from nemo_aligner.parallel.layout import initialize_layout
from nemo_aligner.scoring.scorer import load_scorer
from nemo_aligner.training import learner
from nemo_aligner.training.run import train


def rewards_of_last_validation(config: TrainConfig) -> Tensor:
    """Of a training by ``config``, from where its metrics are computed."""
    rewards = torch.empty(0)
    describe = learner.describe_rewards

    def note(objective: Any, dataset: Any, given: Tensor) -> dict[str, float]:
        nonlocal rewards
        rewards = torch.cat(dataset.records.pairs().of(given[:, 0]))
        return describe(objective, dataset, given)

    learner.describe_rewards = note
    train(config)
    return rewards


def rewards_of_evaluation(archive: Path, path: str, precision: Precision) -> Tensor:
    with launch():
        scorer = load_scorer(archive, initialize_layout(), precision=precision)
        report = evaluate_file(of_scorer(scorer), path)
    return torch.from_numpy(report.rewards.T.reshape(-1).copy())


def main(settings: list[str]) -> None:
    config = load_config(TrainConfig, settings)
    validated = rewards_of_last_validation(config)
    archive = Path(config.exp_manager.explicit_log_dir, "checkpoints/megatron_gpt.nemo")
    (path,) = config.model.data.data_prefix.validation
    evaluated = rewards_of_evaluation(archive, path, config.trainer.precision)
    print(json.dumps(torch.stack([validated, evaluated], dim=1).tolist()))


if __name__ == "__main__":
    main(sys.argv[1:])
