"""NeMo Gym's ``POST /compare``: replies to one conversation, and a reward for each.

This is the request of its ``GenRMStrategy`` (``resources_servers/genrm_compare``, August 2026) to a
generative judge, which compares pairs of replies. A reward model needs no pairs: each reply is
scored alone, ``rewards`` are the model's own numbers (the judge's are from 1 to 5), and
``comparison_results`` is empty. ``conversation_history`` is the messages before the replies;
``response_objs`` are responses of OpenAI's Responses API, read as those of ``/verify``: calls of
functions are part of a reply, reasoning is not. A ``principle`` is an instruction to a judge, which
no reward model follows, so it is refused. A reply that cannot be scored refuses the group, as a
group with a made-up reward would train the policy on it.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from pydantic import Field

from nemo_aligner.contract.messages import Text
from nemo_aligner.serving.failures import RequestError
from nemo_aligner.serving.protocols import ScoredRows, ScoreRequest
from nemo_aligner.serving.protocols.base import (
    Body,
    HttpAnswer,
    Items,
    Route,
    Served,
    as_json,
    conversation_of,
)
from nemo_aligner.serving.protocols.gym import PolicyResponse, joined, turns_of
from nemo_aligner.utils.errors import ServingError


class CompareRequest(Body):
    """The messages before the replies, and the replies."""

    conversation_history: Items[dict[str, Any]] = Field(
        min_length=1, examples=[[{"role": "user", "content": "What is red?"}]]
    )
    response_objs: Items[PolicyResponse] = Field(
        min_length=1,
        examples=[
            [
                {
                    "output": [
                        {
                            "type": "message",
                            "role": "assistant",
                            "content": [{"type": "output_text", "text": "A rose."}],
                        }
                    ]
                }
            ]
        ],
    )
    principle: str | None = None


class CompareResponse(Body):
    """A reward for each reply, in the request's order; ``metrics`` are of these rewards."""

    rewards: list[float]
    comparison_results: list[dict[str, Any]]
    metrics: dict[str, float]


def read(body: CompareRequest) -> ScoreRequest:
    """Read each reply with the conversation before it; raise ServingError if one cannot be."""
    if body.principle:
        raise ServingError(
            f"principle: got {as_json(body.principle)}, wanted null: a reward model follows none"
        )
    asked = turns_of(body.conversation_history, "conversation_history")
    texts: list[Text] = []
    for number, reply in enumerate(body.response_objs):
        where = f"response_objs.{number}"
        said = turns_of(reply.output, f"{where}.output")
        if not said or said[-1]["role"] != "assistant":
            raise ServingError(f"{where}.output: got no message of the assistant at its end")
        texts.append(conversation_of(joined([*asked, *said]), where))
    return ScoreRequest(texts=texts)


def answer(body: CompareRequest, scored: ScoredRows, served: Served) -> dict[str, Any]:
    """The judge's names of metrics, of the rewards."""
    rewards = served.one_reward(scored.rewards)
    metrics = {
        "mean_individual_score": float(np.mean(rewards)),
        "std_individual_score": float(np.std(rewards)),
        "tiebreak_usage_rate": 0.0,
    }
    return {"rewards": rewards, "comparison_results": [], "metrics": metrics}


def refuse(failure: RequestError, body: CompareRequest | None) -> HttpAnswer:
    """As FastAPI has it, by which Gym's servers are made."""
    return HttpAnswer(failure.kind.status, {"detail": failure.message})


ROUTES = [
    Route(
        "/compare",
        "NeMo Gym: rewards of the replies to one conversation, in place of a generative judge",
        CompareRequest,
        CompareResponse,
        read,
        answer,
        refuse,
    )
]
