"""OpenRLHF's remote reward model: ``POST /get_reward``.

Its trainer (0.11: ``openrlhf/utils/agent.py``, its server ``openrlhf/cli/serve_rm.py``) sends
``query``, the whole texts of prompt and reply as the policy's tokenizer writes them, with
``prompts`` and ``labels``, which a reward model has no use for. A query is scored as it stands; one
that ends at the policy's end of turn is completed to what the model's chat template writes.
``scores`` are what it filters prompts by, ``extra_logs`` what it logs.
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
    """Texts to score; what else is sent has no part in a reward."""

    query: Rows[str] = Field(min_length=1, examples=[["What is red? A rose."]])
    prompts: list[Any] | None = None
    labels: list[Any] | None = None


class GetRewardResponse(Body):
    """One number for each query."""

    rewards: list[float]
    scores: list[float]
    extra_logs: dict[str, list[float]]


def read(body: GetRewardRequest) -> ScoreRequest:
    """The queries, as raw texts; raise ServingError for samples of another name, too."""
    refuse_other_samples(body, "query")
    return ScoreRequest(texts=[*body.query])


def answer(body: GetRewardRequest, scored: ScoredRows, served: Served) -> dict[str, Any]:
    """``extra_logs`` has each attribute, where the model has several, and what was truncated."""
    rewards = scored.rewards
    merged = served.one_reward(rewards)
    several = served.attributes if rewards.shape[1] > 1 else ()
    logs = {f"reward_{name}": rewards[:, column].tolist() for column, name in enumerate(several)}
    # In every answer: OpenRLHF logs the mean over those that have it.
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
