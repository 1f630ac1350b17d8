"""OpenRLHF's remote reward model: ``POST /get_reward``.

OpenRLHF's trainer (0.11: ``openrlhf/utils/agent.py``; its own server: ``openrlhf/cli/serve_rm.py``)
sends ``query``, raw texts of prompt and reply in the policy's chat template. It also sends
``prompts`` and ``labels``, which are ignored. A query is scored unchanged, unless it ends with the
policy's end-of-turn token: then it is completed with the text that the model's chat template writes
after that token. The trainer filters prompts by ``scores`` of the answer.

It also logs the means of ``extra_logs``. They have a number for each query: ``cut_to_seq_length``
is 1 for a query that was cut to the model's length, ``foreign_template`` for one that is not in the
model's chat template, and ``refused`` for one that got ``refused_reward``; ``reward_NAME`` is an
attribute. The trainer's own metric ``truncated`` is about replies that it cut off itself.

A rejected query gets the reward ``refused_reward`` of the server's settings. If that is null, it is
an HTTP 400: the trainer sends it five times, and then ends with an error that does not name the
cause, because its batches need a reward for each sample.
"""

from __future__ import annotations

from typing import Any

import numpy as np
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
    """Build the answer: rewards, and ``extra_logs``."""
    rewards = scored.rewards
    merged = served.fill_refused(np.array(served.one_reward(rewards)), scored)
    several = served.attributes if rewards.shape[1] > 1 else ()
    # OpenRLHF merges the logs of many answers, so each answer needs the same fields with a number
    # for each query, even if all of them are 0.
    logs = {
        f"reward_{name}": served.fill_refused(rewards[:, column], scored)
        for column, name in enumerate(several)
    }
    marks = {"cut_to_seq_length": scored.exceeded, "foreign_template": scored.foreign_template}
    if served.refused_reward is not None:
        marks["refused"] = np.isin(np.arange(len(rewards)), [*scored.errors])
    for name, mask in marks.items():
        logs[name] = (np.zeros(len(rewards)) if mask is None else mask.astype(float)).tolist()
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
        takes_refused_reward=True,
    )
]
