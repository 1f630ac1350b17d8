"""Reward models on Megatron: training, checkpoints and serving with the same scores everywhere.

The Python API is ``train``, ``RewardModel`` and their results. These names are imported at their
first use, because they import torch, and the client, the settings and ``--help`` must not.

The packages, from the command line down to what all use (imports only go down; docs/architecture.md
has more): ``cli`` (verbs), ``tools`` (doctor, quickstart, check, probe), ``api`` (``train`` and
``RewardModel``), ``evaluation``, ``integrations`` (TRL, NeMo RL, NeMo Gym), ``serving``,
``training``, ``checkpoint``, ``planning``, ``data``, ``models``, ``losses``, ``contract`` (from a
sample to token ids, and what a reward means), ``batch``, ``distributed``, ``metrics``, ``cpu``,
``config`` (settings), ``utils`` (errors, console, processes).
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from nemo_aligner.api.reward_model import RewardModel
    from nemo_aligner.api.training import train
    from nemo_aligner.evaluation.run import Evaluation
    from nemo_aligner.training.loggers import TrainingProgress

__version__ = "0.1.0"
__all__ = ["Evaluation", "RewardModel", "TrainingProgress", "__version__", "train"]

_MODULES = {
    "Evaluation": "evaluation.run",
    "RewardModel": "api.reward_model",
    "TrainingProgress": "training.loggers",
    "train": "api.training",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    conflict = importlib.import_module(f"{__name__}.config.describe").find_conflict()
    if conflict is not None:
        raise ImportError(conflict)
    return getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_MODULES})
