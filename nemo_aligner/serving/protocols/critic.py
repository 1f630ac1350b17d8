"""The KServe v2 tensors of a PPO critic's endpoints, which NeMo-Aligner's clients use.

``critic_infer`` takes the inputs of ``reward_model`` (see ``kserve.py``). ``critic_train`` and
``critic_save`` are not batched: their shapes are complete, without an implied batch dimension.

================  ===========  =========  =========================================================
model             input        dtype      shape and meaning
================  ===========  =========  =========================================================
``critic_train``  tokens       INT64      [N, S]
                  returns      FP32       [N, S - 1]: one per token except the last
                  prev_values  FP32       [N, S - 1]: the values before this training step
                  mask         FP32       [N, S - 1]: 1 where the critic learns, else 0
``critic_save``   dummy_var    INT64      [1], ignored
================  ===========  =========  =========================================================

``critic_infer`` answers ``values`` FP32 [B, S]: element t is the value of the sequence up to token
t. S is the width of the request's ``tokens``, or the length of its longest sample; positions after
a sequence's end are 0. ``exceeded`` INT32 [B, 1] is 1 for a truncated sample, as for
``reward_model``. A server that also has the reward model adds ``rewards`` FP32 [B, 1], merged over
the attributes by the contract's weights. ``critic_train`` answers ``loss_mean`` FP32 [1];
``critic_save`` answers ``status`` INT64 [1], which is 0.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from nemo_aligner.data.rollout import Rollout
from nemo_aligner.serving.protocols import TensorSpec, kserve
from nemo_aligner.utils.errors import DataError

INFER_NAME, TRAIN_NAME, SAVE_NAME = "critic_infer", "critic_train", "critic_save"
DEFAULT_URL = "http://127.0.0.1:5556"

INFER_INPUTS = kserve.INPUTS
INFER_OUTPUTS = (TensorSpec("values", np.float32, (-1,)), TensorSpec("exceeded", np.int32, (1,)))
REWARDS_OUTPUT = TensorSpec("rewards", np.float32, (1,))
TRAIN_INPUTS = (
    TensorSpec("tokens", np.int64, (-1, -1)),
    TensorSpec("returns", np.float32, (-1, -1)),
    TensorSpec("prev_values", np.float32, (-1, -1)),
    TensorSpec("mask", np.float32, (-1, -1)),
)
TRAIN_OUTPUTS = (TensorSpec("loss_mean", np.float32, (1,)),)
SAVE_INPUTS = (TensorSpec("dummy_var", np.int64, (1,), optional=True),)
SAVE_OUTPUTS = (TensorSpec("status", np.int64, (1,)),)


@dataclass(frozen=True)
class CriticValues:
    """A critic's answer: the values of N sequences, and their rewards if there is a reward model.

    Attributes:
        values: N arrays ``[tokens]`` float32.
        rewards: ``[N]`` float32; None if there is no reward model.
    """

    values: list[np.ndarray]
    rewards: np.ndarray | None = None


def join_rows(rows: Sequence[np.ndarray]) -> np.ndarray:
    """Stack N rows of different lengths into float32 ``[N, longest]``, padded with zeros."""
    joined = np.zeros((len(rows), max(map(len, rows))), dtype=np.float32)
    for line, row in zip(joined, rows, strict=True):
        line[: len(row)] = row
    return joined


def encode_values(
    inputs: Mapping[str, np.ndarray], joined: np.ndarray, exceeded: np.ndarray, has_rewards: bool
) -> dict[str, np.ndarray]:
    """Encode the answer to a request of ``critic_infer``.

    Args:
        inputs: tensors of the request; values are padded to the width of its ``tokens``, if any.
        joined: values ``[B, S]``; with ``has_rewards`` ``[B, 1 + S]``, the rewards first.
        exceeded: ``[B]``, true where the sample was truncated.
        has_rewards: whether ``joined`` begins with rewards.
    """
    rewards, values = joined[:, : int(has_rewards)], joined[:, int(has_rewards) :]
    if "tokens" in inputs:
        missing = inputs["tokens"].shape[1] - values.shape[1]
        values = np.pad(values, ((0, 0), (0, missing)))
    flags = np.asarray(exceeded, dtype=np.int32).reshape(-1, 1)
    answer = {"values": np.ascontiguousarray(values), "exceeded": flags}
    return {**answer, "rewards": np.ascontiguousarray(rewards)} if has_rewards else answer


def decode_values(outputs: Mapping[str, np.ndarray]) -> CriticValues:
    """Decode an answer of ``critic_infer``; its values are still padded to the longest sequence.

    Raises:
        KeyError: the answer has no values.
    """
    rewards = outputs.get("rewards")
    return CriticValues(
        [*np.asarray(outputs["values"], dtype=np.float32)],
        None if rewards is None else np.asarray(rewards, dtype=np.float32).reshape(-1),
    )


def encode_rollout(rollout: Rollout) -> dict[str, np.ndarray]:
    """Encode a rollout as the inputs of ``critic_train``."""
    return {
        "tokens": np.asarray(rollout.tokens, dtype=np.int64),
        "returns": np.asarray(rollout.returns, dtype=np.float32),
        "prev_values": np.asarray(rollout.prev_values, dtype=np.float32),
        "mask": np.asarray(rollout.mask, dtype=np.float32),
    }


def decode_rollout(inputs: Mapping[str, np.ndarray]) -> Rollout:
    """Decode the inputs of ``critic_train`` to a rollout; ``Rollout.check`` must check the shapes.

    Raises:
        DataError: a tensor is missing.
    """
    names = [spec.name for spec in TRAIN_INPUTS]
    missing = [name for name in names if name not in inputs]
    if missing:
        actual = ", ".join(sorted(inputs)) or "no inputs"
        raise DataError(f"critic_train: got {actual}, wanted {', '.join(names)}")
    return Rollout(*(inputs[name] for name in names))
