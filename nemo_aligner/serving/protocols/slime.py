"""slime's and miles' remote reward model: ``POST /remote_rm``.

With ``--rm-type remote_rm`` they post one sample at a time to ``--rm-url``, at any path (August
2026: ``slime/rollout/rm_hub/__init__.py``, and miles' file of that name): ``prompt``, ``response``
and ``label``. The whole answer is the reward, a number. ``prompt`` is what the policy was given: a
text, if slime applied the policy's chat template (or none), which is scored with ``response``
behind it as it stands; or messages, and ``response`` is the assistant's next. ``label`` is for
checkers of answers, and a reward model has no use for it.

slime sends a request with any other status than 200 again, ten times in all, and then ends.
"""

from __future__ import annotations

from typing import Any

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
    """One sample; ``label`` and what else is sent have no part in its reward."""

    prompt: str | Items[dict[str, Any]] = Field(examples=["What is red?"])
    response: str = Field(examples=[" A rose."])
    label: Any = None


class RemoteRmResponse(RootModel[float]):
    """The reward alone."""


def read(body: RemoteRmRequest) -> ScoreRequest:
    """Read one sample; raise ServingError where its prompt is none, or there is another."""
    refuse_other_samples(body, "prompt")
    if isinstance(body.prompt, str):
        return ScoreRequest(texts=[body.prompt + body.response])
    if not body.prompt:
        raise ServingError("prompt: got no message, wanted a text or the messages of a prompt")
    reply = {"role": "assistant", "content": body.response}
    return ScoreRequest(texts=[conversation_of([*body.prompt, reply], "prompt and response")])


def answer(body: RemoteRmRequest, scored: ScoredRows, served: Served) -> float:
    """A bare number."""
    (reward,) = served.one_reward(scored.rewards)
    return reward


def refuse(failure: RequestError, body: RemoteRmRequest | None) -> HttpAnswer:
    """``{"error"}``: its clients read the status alone."""
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
    )
]
