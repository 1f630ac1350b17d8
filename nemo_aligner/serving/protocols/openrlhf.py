"""OpenRLHF's remote reward model: ``POST /get_reward``.

OpenRLHF's trainer (0.11: ``openrlhf/utils/agent.py``; its own server: ``openrlhf/cli/serve_rm.py``)
sends ``query``, raw texts of prompt and reply in the policy's chat template. It also sends
``prompts`` and ``labels``, which are ignored. A query is scored unchanged, unless it ends with the
policy's end-of-turn token: then it is completed with the text that the model's chat template writes
after that token. The trainer filters prompts by ``scores`` of the answer, and logs its
``extra_logs``.
"""

from __future__ import annotations

from typing import Any

from pydantic import Field

from nemo_aligner.serving.protocols import ScoredRows, ScoreRequest
from nemo_aligner.serving.protocols.base import (
    Body,
    Route,
    Rows,
    Served,
    refuse_other_samples,
    refuse_with_detail,
)


class GetRewardRequest(Body):
    """Raw texts to score; further fields of the request do not affect the rewards."""

    query: Rows[str] = Field(min_length=1, examples=[["What is red? A rose."]])
    prompts: list[Any] | None = None
    labels: list[Any] | None = None


class GetRewardResponse(Body):
    """One reward for each query, twice: OpenRLHF reads both ``rewards`` and ``scores``."""

    rewards: list[float]
    scores: list[float]
    extra_logs: dict[str, list[float]]


def read(body: GetRewardRequest) -> ScoreRequest:
    """Read the queries as raw texts; raise ServingError if another field also has samples."""
    refuse_other_samples(body, "query")
    return ScoreRequest(texts=[*body.query])


def answer(body: GetRewardRequest, scored: ScoredRows, served: Served) -> dict[str, Any]:
    """Build the answer: rewards, and ``extra_logs`` with truncation and attributes."""
    rewards = scored.rewards
    merged = served.one_reward(rewards)
    several = served.attributes if rewards.shape[1] > 1 else ()
    logs = {f"reward_{name}": rewards[:, column].tolist() for column, name in enumerate(several)}
    # Send the field in every answer, even if all values are 0: OpenRLHF averages it only over
    # answers that have it.
    logs["truncated"] = scored.exceeded.astype(float).tolist()
    return {"rewards": merged, "scores": merged, "extra_logs": logs}


ROUTES = [
    Route(
        "/get_reward",
        "OpenRLHF's remote reward model",
        GetRewardRequest,
        GetRewardResponse,
        read,
        answer,
        refuse_with_detail,
        completes_turns=True,
    )
]
