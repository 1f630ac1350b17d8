"""``probe_training.py`` around a trainer whose loss does not see which reply was chosen."""

from __future__ import annotations

import sys

import torch.nn.functional as F
from torch import Tensor, tensor

from nemo_aligner.cli.common import run_verb
from nemo_aligner.cli.probe import main
from nemo_aligner.training import objective


def blind(rewards: Tensor) -> tuple[Tensor, Tensor]:
    margins = (rewards[:, 0] - rewards[:, 1]).abs()
    return F.softplus(-margins).sum(), tensor(margins.numel(), device=rewards.device)


if __name__ == "__main__":
    objective.bradley_terry = blind
    sys.exit(run_verb(main))
