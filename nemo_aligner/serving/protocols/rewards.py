"""``POST /v1/rewards``: this package's own protocol, for anything that can post JSON.

The body has one of ``texts`` (scored as they stand), ``conversations`` (lists of messages, or
objects with ``messages``, ``tools`` and ``documents``, which get the model's chat template) and
``tokens`` (token ids, scored as they stand). ``rewards`` has a row for each, with a number for each
of ``attributes``, or null where it cannot be scored, and ``errors`` says why. ``scale`` says what
the numbers are: ``probability``, ``log_odds`` or ``score``. ``truncated`` says which texts were cut
to the model's length. ``contract_hash`` and ``model_fingerprint`` say by what contract and weights
the rows were scored. With ``outputs: true`` a model with several outputs for
each attribute adds ``spread``, how uncertain each reward is, and its ``outputs``. With
``steps: true`` a model with a reward for each turn or step adds ``steps``: of each row all of them,
each with the ``message`` (null in a raw text) and the characters ``start`` to ``end`` of it.
"""

from __future__ import annotations

import math
from typing import Annotated, Any

import numpy as np
from pydantic import Field, WithJsonSchema

from nemo_aligner.serving.failures import RequestError
from nemo_aligner.serving.protocols import ScoredRows, ScoreRequest, StepRewards
from nemo_aligner.serving.protocols.base import (
    Body,
    HttpAnswer,
    Items,
    Route,
    Rows,
    Served,
    read_conversation,
)
from nemo_aligner.utils.errors import DataError, ServingError

# Only from servers that shape their rewards.
_SHAPED = ("raw_rewards", "deviation")
# Only from models with several outputs for each attribute.
_READ = ("spread", "outputs")


# A list of messages, or an object with messages, tools and documents: ``read_text`` says what is
# wrong with one.
RewardConversation = Annotated[
    Any,
    WithJsonSchema(
        {
            "anyOf": [
                {"type": "array", "items": {"type": "object"}},
                {
                    "type": "object",
                    "properties": {
                        name: {"type": "array", "items": {"type": "object"}}
                        for name in ("messages", "tools", "documents")
                    },
                    "required": ["messages"],
                },
            ]
        }
    ),
]


class RewardsRequest(Body, extra="forbid"):
    """Exactly one of the three."""

    texts: Rows[str] | None = Field(None, min_length=1, examples=[["What is red? A rose."]])
    conversations: Rows[RewardConversation] | None = Field(None, min_length=1)
    tokens: Rows[Items[int]] | None = Field(None, min_length=1)
    outputs: bool = Field(False, description="also answer spread and outputs, if there are any")
    steps: bool = Field(False, description="also answer the rewards of turns or steps")


class RowError(Body):
    """Reason why a row has no reward."""

    row: int
    message: str


class StepReward(Body):
    """Rewards of a turn or step, and the characters of a message that it is; null for tokens."""

    rewards: list[float]
    message: int | None = None
    start: int | None = None
    end: int | None = None


class RewardsResponse(Body):
    """A reward of each row for each attribute; what shapes rewards adds more of the same rows."""

    rewards: list[list[float] | None]
    attributes: list[str]
    scale: str | None
    contract_hash: str | None
    model_fingerprint: str | None
    truncated: list[bool]
    errors: list[RowError]
    raw_rewards: list[list[float] | None] | None = None
    deviation: list[list[float] | None] | None = None
    passed: list[bool | None] | None = None
    spread: list[list[float] | None] | None = None
    outputs: list[list[float] | None] | None = None
    steps: list[list[StepReward] | None] | None = None


def read(body: RewardsRequest) -> ScoreRequest:
    """Read a request; raise ServingError if it does not have exactly one form."""
    forms = [name for name in ("texts", "conversations", "tokens") if getattr(body, name)]
    if len(forms) != 1:
        got = " and ".join(forms) or "no samples"
        raise ServingError(f"got {got}, wanted one of texts, conversations and tokens")
    if body.tokens:
        return ScoreRequest(token_lists=body.tokens)
    if body.texts:
        return ScoreRequest(texts=[*body.texts])
    # What cannot be read is an error of its row: the others are sent on without it.
    texts, refused = [], {}
    for row, given in enumerate(body.conversations or ()):
        try:
            texts.append(read_conversation(given))
        except DataError as error:
            refused[row] = str(error)
    return ScoreRequest(texts=texts, refused=refused)


def answer(body: RewardsRequest, scored: ScoredRows, served: Served) -> dict[str, Any]:
    """See the top of this file."""
    more = (*_SHAPED, *_READ) if body.outputs else _SHAPED
    shaped = {name: getattr(scored, name) for name in more}
    if body.steps and scored.steps is None and not scored.errors:
        raise ServingError(
            "steps: got true, wanted false: the model has one reward for each text, or its server "
            "shapes it by a rule of whole replies (shaping.length_penalty, standardize=running)"
        )
    steps = {} if not body.steps or scored.steps is None else {"steps": _steps(scored.steps)}
    passed = {} if scored.passed is None else {"passed": _booleans(scored.passed)}
    return {
        "rewards": _rows(scored.rewards),
        "attributes": list(served.attributes),
        "scale": served.scale,
        "contract_hash": scored.contract_hash,
        "model_fingerprint": scored.model_fingerprint,
        "truncated": scored.exceeded.tolist(),
        "errors": [{"row": row, "message": why} for row, why in scored.errors.items()],
        **{name: _rows(values) for name, values in shaped.items() if values is not None},
        **passed,
        **steps,
    }


def _steps(rows: np.ndarray) -> list[list[dict[str, Any]] | None]:
    """Each row's turns or steps; null in place of a row that has no reward."""
    return [None if row is None else _steps_of(row) for row in rows]


def _steps_of(row: StepRewards) -> list[dict[str, Any]]:
    spans = [vars(span) for span in row.spans] or [{}] * len(row.rewards)
    return [
        {"rewards": rewards, **span}
        for rewards, span in zip(row.rewards.tolist(), spans, strict=True)
    ]


def _rows(values: np.ndarray) -> list[Any]:
    """Rows of numbers for JSON, which has no NaN: null in place of a row that has one."""
    missing = np.isnan(values).reshape(len(values), -1).any(axis=1)
    return [
        None if is_missing else row
        for row, is_missing in zip(values.tolist(), missing, strict=True)
    ]


def _booleans(values: np.ndarray) -> list[bool | None]:
    """Rows of 1, 0 or NaN for JSON."""
    return [None if math.isnan(each) else bool(each) for each in values.tolist()]


def refuse(failure: RequestError, body: RewardsRequest | None) -> HttpAnswer:
    """``{"error": {"kind", "message"}}``"""
    error = {"kind": failure.kind.label, "message": failure.message}
    return HttpAnswer(failure.kind.status, {"error": error})


ROUTES = [
    Route(
        "/v1/rewards",
        "Rewards of texts, conversations or token ids",
        RewardsRequest,
        RewardsResponse,
        read,
        answer,
        refuse,
        sets_rows_aside=True,
    )
]
