"""The remote reward model of the trainers slime and miles: ``POST /remote_rm``.

With ``--rm-type remote_rm``, both trainers post one sample at a time to ``--rm-url``, which may
have any path (August 2026: ``slime/rollout/rm_hub/__init__.py``, and miles' file of the same name).
A body has ``prompt``, ``response`` and ``label``; the whole answer is one number, the reward.

``prompt`` is what the policy was given. If slime applied the policy's chat template, or none, the
prompt is a string, and ``prompt + response`` is scored as a raw text. Otherwise the prompt is a
list of messages, and ``response`` is the assistant's next message. ``label`` (the right answer, for
rule-based rewards) is ignored.

If the status is not 200, slime repeats the request up to ten times, and then ends its run. So a
rejected sample gets the setting ``refused_reward`` as its reward, if it is not null.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from pydantic import Field, RootModel

from nemo_aligner.serving.failures import RequestError
from nemo_aligner.serving.protocols import ScoredRows, ScoreRequest
from nemo_aligner.serving.protocols.base import (
    Body,
    HttpAnswer,
    Items,
    Route,
    Served,
    conversation_of,
    refuse_other_samples,
)
from nemo_aligner.utils.errors import ServingError


class RemoteRmRequest(Body):
    """One sample; ``label`` and undeclared fields do not affect its reward."""

    prompt: str | Items[dict[str, Any]] = Field(examples=["What is red?"])
    response: str = Field(examples=[" A rose."])
    label: Any = None


class RemoteRmResponse(RootModel[float]):
    """The reward: a bare JSON number."""


def read(body: RemoteRmRequest) -> ScoreRequest:
    """Read one sample; raise ServingError if the prompt is empty, or another field has samples."""
    refuse_other_samples(body, "prompt")
    if isinstance(body.prompt, str):
        return ScoreRequest(texts=[body.prompt + body.response])
    if not body.prompt:
        raise ServingError("prompt: got no message, wanted a string or the messages of a prompt")
    reply = {"role": "assistant", "content": body.response}
    return ScoreRequest(texts=[conversation_of([*body.prompt, reply], "prompt and response")])


def answer(body: RemoteRmRequest, scored: ScoredRows, served: Served) -> float:
    """Return the reward, merged over the attributes, as a bare number."""
    (reward,) = served.fill_refused(np.array(served.one_reward(scored.rewards)), scored)
    return float(reward)


def refuse(failure: RequestError, body: RemoteRmRequest | None) -> HttpAnswer:
    """Answer a failed request with ``{"error": message}``; these trainers read only the status."""
    return HttpAnswer(failure.kind.status, {"error": failure.message})


ROUTES = [
    Route(
        "/remote_rm",
        "slime's and miles' remote reward model",
        RemoteRmRequest,
        RemoteRmResponse,
        read,
        answer,
        refuse,
        completes_turns=True,
        takes_refused_reward=True,
    )
]
