"""Reward models on Megatron: training, checkpoints and serving with one meaning of a score.

In Python ``train``, ``RewardModel`` and what they return; they are imported when first used, as
they take torch along, and the client, the settings and the command line's help do not.
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

_HOME = {
    "Evaluation": "evaluation.run",
    "RewardModel": "api.reward_model",
    "TrainingProgress": "training.loggers",
    "train": "api.training",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    conflict = importlib.import_module(f"{__name__}.config.describe").find_conflict()
    if conflict is not None:
        raise ImportError(conflict)
    return getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOME})
