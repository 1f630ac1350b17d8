"""verl's custom reward function: rewards of replies from a running server (see verl_grpo.sh).

verl passes only the reply, so each row of the data needs the prompt's messages, and its tools if
there are any, in ``extra_info``. The environment variables ``REWARD_URL`` and ``REWARD_TOKEN`` have
the server's address and, if it requires one, its bearer token.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import numpy as np

from nemo_aligner.contract.contract import ScoringContract
from nemo_aligner.contract.messages import with_tools, without_struct_nulls
from nemo_aligner.contract.readout import one_reward, reward_weights
from nemo_aligner.serving.client import RewardClient
from nemo_aligner.utils.errors import DataError

_client = RewardClient(
    os.environ.get("REWARD_URL", "http://127.0.0.1:5555"),
    timeout_s=None,  # a step may have thousands of calls, most of which wait for a connection
    request_timeout_s=600,
    wait_s=60,
    retry_s=300,
    token=os.environ.get("REWARD_TOKEN"),
)
_contracts: list[ScoringContract] = []
_VERL_KEYS = ("reward", "score")  # verl's validation adds these itself, and fails if we do, too


async def compute_score(
    data_source: str,
    solution_str: str,
    ground_truth: Any,
    extra_info: Mapping[str, Any] | None = None,
    refused_reward: float | None = None,
    **others: Any,
) -> dict[str, float]:
    """Return the reward as ``score``, and each of several attributes, which verl logs.

    An attribute with a name that verl uses itself is returned as ``attribute_NAME``.

    Args:
        extra_info: with the messages ``prompt``, and optionally ``tools``.
        refused_reward: the reward of a reply that the model rejects; None raises an error. Set it
            with ``+reward.custom_reward_function.reward_kwargs.refused_reward=-5``.

    Raises:
        DataError: the reply or its prompt is rejected, or a part of a gateway failed on it.
    """
    if not extra_info or "prompt" not in extra_info:
        raise DataError("extra_info: 'prompt' is missing. Add the prompt's messages to the data")
    if not _contracts:
        _contracts.append(await _client.contract_async())
    attributes = _name_attributes(_contracts[0])
    prompt = without_struct_nulls(_as_lists(extra_info["prompt"]))
    tools = without_struct_nulls(_as_lists(extra_info.get("tools")), is_inside=True)
    sample = with_tools([*prompt, {"role": "assistant", "content": solution_str}], tools)
    scored = await _client.score_rows_async([sample])
    if scored.unscored:
        raise DataError(f"the reply has no reward, and is not at fault: {scored.errors[0]}")
    if scored.errors:
        if refused_reward is None:
            raise DataError(f"the reply is rejected: {scored.errors[0]}. Set refused_reward")
        return {"score": refused_reward, **dict.fromkeys(attributes, refused_reward)}
    reward = one_reward(scored.rewards, reward_weights(_contracts[0], None))
    if not attributes:
        return {"score": float(reward[0])}
    return {
        "score": float(reward[0]),
        **dict(zip(attributes, map(float, scored.rewards[0]), strict=True)),
    }


def _as_lists(value: Any) -> Any:
    """Return a value of a row with lists in place of the arrays that verl may get from Arrow."""
    if isinstance(value, Mapping):
        return {key: _as_lists(item) for key, item in value.items()}
    return [*map(_as_lists, value)] if isinstance(value, list | np.ndarray) else value


def _name_attributes(contract: ScoringContract) -> list[str]:
    """Name the attributes for verl; the list is empty if there is only one, which is the reward."""
    if len(contract.attributes) == 1:
        return []
    return [f"attribute_{name}" if name in _VERL_KEYS else name for name in contract.attributes]
