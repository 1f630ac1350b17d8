"""``POST /v1/rewards``: this package's own protocol, for anything that can post JSON.

A request has exactly one of:

- ``texts``: raw texts, scored unchanged;
- ``conversations``: lists of messages, or objects with ``messages``, ``tools``, ``documents`` and
  ``principle``, which are written in the model's chat template;
- ``tokens``: lists of token ids, scored unchanged.

For a model that was trained with principles, ``principle`` is a string for all conversations, or a
list with an entry for each: a string, null, or a list of K strings. A conversation with K
principles has K rows in the answer, one after the other.

The answer has ``rewards``, one row per sample with a number for each of ``attributes``. A row is
null if its sample has no reward; ``errors`` has the reason. ``scale`` is ``probability``,
``log_odds`` or ``score``. ``truncated`` is true for samples that were cut to the model's length.
``contract_hash`` and ``model_fingerprint`` identify the scoring contract and the weights.

A gateway that combines several rewards adds ``parts``: for each row an object with a number for
each part, null for one that failed or was not needed.

With ``outputs: true``, a model with several outputs per attribute adds ``spread``, the uncertainty
of each reward, and ``outputs``. With ``steps: true``, a model with a reward per turn or step adds
``steps``: for each row a list of all rewards, each with the number of its ``message`` (null in a
raw text) and the range of characters from ``start`` to ``end``.
"""

from __future__ import annotations

import math
from typing import Annotated, Any

import numpy as np
from pydantic import Field, WithJsonSchema

from nemo_aligner.contract.messages import Text, attach_principle
from nemo_aligner.contract.principles import list_principles
from nemo_aligner.serving.failures import RequestError
from nemo_aligner.serving.protocols import ScoredRows, ScoreRequest, StepRewards
from nemo_aligner.serving.protocols.base import (
    Body,
    HttpAnswer,
    Items,
    Route,
    Rows,
    Served,
    check_row_count,
    read_conversation,
)
from nemo_aligner.utils.errors import DataError, ServingError

# Fields of the answer that are only sent if the server shapes its rewards.
_SHAPED = ("raw_rewards", "deviation")
# Fields of the answer for models with several outputs per attribute, sent on request.
_OUTPUTS = ("spread", "outputs")


# A list of messages, or an object with messages, tools, documents and a principle. pydantic does
# not validate it, because ``read_text`` describes errors better.
RewardConversation = Annotated[
    Any,
    WithJsonSchema(
        {
            "anyOf": [
                {"type": "array", "items": {"type": "object"}},
                {
                    "type": "object",
                    "properties": {
                        **{
                            name: {"type": "array", "items": {"type": "object"}}
                            for name in ("messages", "tools", "documents")
                        },
                        "principle": {"type": "string"},
                    },
                    "required": ["messages"],
                },
            ]
        }
    ),
]


# ``list_principles`` checks it: pydantic would report a bad entry once for each type of the union.
RewardPrinciple = Annotated[
    Any,
    WithJsonSchema(
        {
            "anyOf": [
                {"type": "string"},
                {
                    "type": "array",
                    "items": {
                        "anyOf": [
                            {"type": "string"},
                            {"type": "array", "items": {"type": "string"}},
                            {"type": "null"},
                        ]
                    },
                },
                {"type": "null"},
            ]
        }
    ),
]


class RewardsRequest(Body, extra="forbid"):
    """A request with exactly one of ``texts``, ``conversations`` and ``tokens``."""

    texts: Rows[str] | None = Field(None, min_length=1, examples=[["What is red? A rose."]])
    conversations: Rows[RewardConversation] | None = Field(None, min_length=1)
    tokens: Rows[Items[int]] | None = Field(None, min_length=1)
    outputs: bool = Field(False, description="also return spread and outputs, if there are any")
    steps: bool = Field(False, description="also return the rewards of turns or steps")
    model: str | None = Field(None, description="name of the model, if the server has several")
    principle: RewardPrinciple = Field(
        None, description="principle of all conversations, or for each one, several, or null"
    )


class RowError(Body):
    """An entry of ``errors``: the number of a row that has no reward, and the reason."""

    row: int
    message: str


class StepReward(Body):
    """The rewards of one turn or step, and its position in the sample.

    Attributes:
        rewards: one number per attribute of the answer.
        message: index of the message that has the turn or step; null in a raw text.
        start: first character of the turn or step in the text of its message, or in the raw text.
        end: the character after its last one.

    For a sample of token ids, ``message``, ``start`` and ``end`` are null.
    """

    rewards: list[float]
    message: int | None = None
    start: int | None = None
    end: int | None = None


class RewardsResponse(Body):
    """Rewards of each row for each attribute, and optional fields with one entry per row."""

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
    parts: list[dict[str, float | None]] | None = None


def read(body: RewardsRequest) -> ScoreRequest:
    """Read a request; raise ServingError unless it has exactly one form of readable samples."""
    forms = [name for name in ("texts", "conversations", "tokens") if getattr(body, name)]
    if len(forms) != 1:
        actual = " and ".join(forms) or "no samples"
        raise ServingError(f"got {actual}, wanted one of texts, conversations and tokens")
    if body.principle is not None and body.conversations is None:
        raise ServingError(
            f"principle: got a principle with {forms[0]}, which are scored unchanged; wanted it "
            "only with conversations"
        )
    if body.conversations and all(map(_is_message, body.conversations)):
        raise ServingError(
            "conversations is a list of conversations, each a list of messages: got a list of "
            "messages. Put the messages of each conversation into a separate list"
        )
    if body.tokens:
        return ScoreRequest(token_lists=body.tokens)
    if body.texts:
        return ScoreRequest(texts=[*body.texts])
    return _read_conversations(body)


def _is_message(value: Any) -> bool:
    return isinstance(value, dict) and "role" in value and "messages" not in value


def count_rows(body: RewardsRequest) -> int:
    """Count the rows that ``read`` would build: K for a conversation with K principles."""
    if isinstance(body.principle, list):
        return sum(len(entry) if isinstance(entry, list) else 1 for entry in body.principle)
    return len(body.texts or body.conversations or body.tokens or ())


def _read_conversations(body: RewardsRequest) -> ScoreRequest:
    """Read each conversation once; the rows of its principles share its messages.

    An unreadable conversation becomes an error of its rows; the others are still scored.

    Raises:
        ServingError: ``principle`` does not fit the conversations.
        RequestError: the rows are too many.
    """
    check_row_count(count_rows(body))
    conversations = body.conversations or []
    try:
        principles = list_principles(body.principle, len(conversations))
    except DataError as error:
        raise ServingError(str(error)) from error
    texts: list[Text] = []
    refused: dict[int, str] = {}
    for number, conversation in enumerate(conversations):
        row = len(texts) + len(refused)
        try:
            text = read_conversation(conversation)
        except DataError as error:
            refused |= dict.fromkeys(range(row, row + len(principles[number])), str(error))
            continue
        try:
            texts += [attach_principle(text, principle) for principle in principles[number]]
        except DataError as error:
            raise ServingError(f"row {row}: {error}") from error
    return ScoreRequest(texts=texts, refused=refused)


def answer(body: RewardsRequest, scored: ScoredRows, served: Served) -> dict[str, Any]:
    """Build the answer: rewards, errors, and the optional fields that were requested."""
    names = (*_SHAPED, *_OUTPUTS) if body.outputs else _SHAPED
    optional = {name: getattr(scored, name) for name in names}
    if body.steps and scored.steps is None and not scored.errors:
        raise ServingError(
            "steps: got true, wanted false: the model has one reward per sample, or its server "
            "shapes it by a rule for whole replies (shaping.length_penalty, standardize=running)"
        )
    steps = {} if not body.steps or scored.steps is None else {"steps": _list_steps(scored.steps)}
    passed = {} if scored.passed is None else {"passed": _list_booleans(scored.passed)}
    parts = {} if scored.parts is None else {"parts": list_parts(scored)}
    return {
        "rewards": _list_rows(scored.rewards),
        "attributes": list(served.attributes),
        "scale": served.scale,
        "contract_hash": scored.contract_hash,
        "model_fingerprint": scored.model_fingerprint,
        "truncated": scored.exceeded.tolist(),
        "errors": [{"row": row, "message": message} for row, message in scored.errors.items()],
        **{name: _list_rows(values) for name, values in optional.items() if values is not None},
        **passed,
        **steps,
        **parts,
    }


def list_parts(scored: ScoredRows) -> list[dict[str, float | None]]:
    """List the parts of each row's reward by name; None for a part that is missing."""
    if scored.parts is None:
        return []
    return [
        {
            name: None if math.isnan(value) else value
            for name, value in zip(scored.part_names, values, strict=True)
        }
        for values in scored.parts.tolist()
    ]


def _list_steps(rows: np.ndarray) -> list[list[dict[str, Any]] | None]:
    """Convert each row's ``StepRewards`` to a list of ``StepReward`` objects for the JSON answer.

    A row without steps (None) stays None.
    """
    return [None if row is None else _list_steps_of_row(row) for row in rows]


def _list_steps_of_row(row: StepRewards) -> list[dict[str, Any]]:
    spans = [vars(span) for span in row.spans] or [{}] * len(row.rewards)
    return [
        {"rewards": rewards, **span}
        for rewards, span in zip(row.rewards.tolist(), spans, strict=True)
    ]


def _list_rows(values: np.ndarray) -> list[Any]:
    """Convert rows of numbers to JSON; a row with a NaN becomes null, as JSON has no NaN."""
    missing = np.isnan(values).reshape(len(values), -1).any(axis=1)
    return [
        None if is_missing else row
        for row, is_missing in zip(values.tolist(), missing, strict=True)
    ]


def _list_booleans(values: np.ndarray) -> list[bool | None]:
    """Convert the numbers 1, 0 and NaN to true, false and null for the JSON answer."""
    return [None if math.isnan(value) else bool(value) for value in values.tolist()]


def refuse(failure: RequestError, body: RewardsRequest | None) -> HttpAnswer:
    """Answer a failed request with ``{"error": {"kind", "message"}}``."""
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
        count_rows=count_rows,
    )
]
