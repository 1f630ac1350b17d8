"""Which number a trainer learns from, where a reward model has several attributes."""

from __future__ import annotations

import numpy as np

from nemo_aligner.errors import ConfigError
from nemo_aligner.text.contract import ScoringContract


def reward_weights(contract: ScoringContract, attribute: str | None) -> np.ndarray:
    """Weights ``[A]`` float64 that make one reward of a text's A.

    None is the contract's own ``attribute_weights``, by which evaluation and exports merge them.

    Raises:
        ConfigError: the model has no such attribute.
    """
    if attribute is None:
        return np.array(contract.attribute_weights, dtype=np.float64)
    if attribute not in contract.attributes:
        raise ConfigError(
            f"attribute: got {attribute!r:.80}, wanted one of {', '.join(contract.attributes)}"
        )
    return np.array([name == attribute for name in contract.attributes], dtype=np.float64)


def one_reward(rewards: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """``[N, A]`` float32 and weights ``[A]`` to ``[N]`` float32; a row of NaN stays NaN.

    Where every row is NaN, there may be any number of columns: a client that has seen no reward
    knows of none.
    """
    merged = np.full(len(rewards), np.nan, dtype=np.float32)
    known = ~np.isnan(rewards).all(axis=1)
    if known.any():
        merged[known] = rewards[known].astype(np.float64) @ weights
    return merged
