"""The one number that ranks texts, where a reward model has several attributes."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from nemo_aligner.errors import CheckpointError, ConfigError
from nemo_aligner.text.contract import ScoringContract


def reward_weights(contract: ScoringContract, attribute: str | None) -> tuple[float, ...]:
    """A weights that make one reward of a text's A; None is the contract's own.

    Raises:
        ConfigError: the model has no such attribute.
    """
    if attribute is None:
        return contract.attribute_weights
    if attribute not in contract.attributes:
        raise ConfigError(
            f"attribute: got {attribute!r:.80}, wanted one of {', '.join(contract.attributes)}"
        )
    return tuple(float(name == attribute) for name in contract.attributes)


def one_reward(rewards: np.ndarray, weights: Sequence[float]) -> np.ndarray:
    """``[N, A]`` float32 and A weights to ``[N]`` float32, summed in float64.

    A single attribute stays as it is, and a row of NaN stays NaN. Where every row is NaN, there may
    be any number of columns: a client that has seen no reward knows of none.
    """
    if len(weights) == 1:
        return rewards[:, 0]
    merged = np.full(len(rewards), np.nan, dtype=np.float32)
    known = ~np.isnan(rewards).all(axis=1)
    if known.any():
        merged[known] = rewards[known].astype(np.float64) @ np.asarray(weights, dtype=np.float64)
    return merged


def check_plain_reading(contract: ScoringContract, where: str, who: str) -> None:
    """Refuse a model that reads more than the last token, or has several outputs an attribute.

    Raises:
        CheckpointError: it names the file ``where`` and ``who`` takes one output for each.
    """
    if contract.reply_marker is not None:
        raise CheckpointError(
            f"{where}: its head reads the mean of the reply (model.head.reads), wanted one that "
            f"reads the last token: {who} has no place for the other"
        )
    readout = contract.output_readout
    if readout is not None:
        raise CheckpointError(
            f"{where}: its head has {readout.width} outputs for each attribute ({readout.kind}), "
            f"wanted one: {who} has no place for how they become a reward"
        )
