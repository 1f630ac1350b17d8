"""NeMo Gym's requests, first ``POST /verify``: one rollout, and the same back with its reward.

The shapes are those of ``base_resources_server.py`` of nemo-gym 0.7: ``responses_create_params`` is
what the policy was asked (``instructions``, and ``input``: a text or items of OpenAI's Responses
API, and ``tools``), ``response.output`` what it said. Both together are scored as one conversation,
calls of functions and their results included. Reasoning is no part of it, and a rollout with a
refusal, or with tools that are not functions, cannot be scored.

A rollout without a reward gets reward 0, ``failure_kind`` (of Gym's vocabulary) and
``failure_reason``. It also has ``mask_sample``, as its 0 is no measurement of the policy: the
servers do not answer, or the rollout could not be scored with any reply. Where the reply is at
fault (too long, with the template's own tokens, with arguments that are no JSON, or missing, as
when the reasoning took all tokens), it is masked too, except with ``gateway.reward_threshold``:
such a rollout failed the test, so its 0 counts. An answer other than 200 is for a body that is no
rollout, and for a model that fails, as one whose rewards are NaN: it would fail for every other.
"""

from __future__ import annotations

import math
import re
import sys
from collections import defaultdict
from collections.abc import Mapping, Sequence
from itertools import groupby
from operator import itemgetter
from typing import Any

import numpy as np
from pydantic import ConfigDict, Field

from nemo_aligner.contract.messages import Message, Messages, Text
from nemo_aligner.serving.failures import RequestError
from nemo_aligner.serving.protocols import ScoredRows, ScoreRequest
from nemo_aligner.serving.protocols.base import (
    Body,
    HttpAnswer,
    Items,
    PlainRoute,
    Route,
    Rows,
    Served,
    as_json,
    conversation_of,
    parse_body,
    refuse_with_detail,
    text_of,
)
from nemo_aligner.utils.errors import ServingError

# A failure kind that is not in Gym's failure_kinds.py, so it begins with the server's name.
_REFUSED = "reward_model:refused_text"
_NO_REPLY = "response.output: got no message of the assistant at its end, wanted its reply"
_ROLES = {"developer": "system"}  # the Responses API's name for what chat templates call system
_OF_FUNCTION = ("name", "description", "parameters", "strict")
# A reply that no contract refuses: where a rollout is refused with it too, its prompt is at fault.
_OTHER_REPLY = "."


_SAID = {"type": "output_text", "text": "A rose."}
_EXAMPLE: dict[str, Any] = {
    "output": [{"type": "message", "role": "assistant", "content": [_SAID]}]
}


class ResponseParams(Body):
    """Prompt of the policy."""

    input: str | list[Any]
    instructions: str | None = None
    tools: list[Any] | None = None


class PolicyResponse(Body):
    """Output of the policy."""

    output: list[Any]


class VerifyRequest(Body):
    """One rollout; whatever else it has comes back as it is."""

    model_config = ConfigDict(
        json_schema_extra={
            "example": {
                "responses_create_params": {"input": "What is red?"},
                "response": _EXAMPLE,
            }
        }
    )

    responses_create_params: ResponseParams
    response: PolicyResponse


class VerifyResponse(Body):
    """The request's fields, and those from ``reward`` on."""

    responses_create_params: ResponseParams
    response: PolicyResponse
    reward: float
    raw_reward: float | None = None
    reward_components: dict[str, float] = Field(default_factory=dict)
    truncated: bool = False
    contract_hash: str | None = None
    model_fingerprint: str | None = None
    mask_sample: bool = False
    failure_kind: str | None = None
    failure_reason: str | None = None


def read(body: VerifyRequest) -> ScoreRequest:
    """Read a rollout; raise ServingError if it has items that are no text."""
    # Of the response alone: a prompt that ends with an assistant's turn would pass for the reply.
    said = turns_of(body.response.output, "response.output")
    if not said or said[-1]["role"] != "assistant":
        return ScoreRequest(texts=[], refused={0: _NO_REPLY})
    try:
        return ScoreRequest(texts=[_conversation(body, said)])
    except ServingError as error:
        read_with_other_reply(body)  # raises where it is the prompt that cannot be read
        return ScoreRequest(texts=[], refused={0: str(error)})


def read_with_other_reply(body: VerifyRequest) -> ScoreRequest:
    """The same prompt with a reply of one letter: where that is refused, the prompt is."""
    other = {"role": "assistant", "content": _OTHER_REPLY}
    return ScoreRequest(texts=[_conversation(body, [other])])


def _conversation(body: VerifyRequest, said: Messages) -> Text:
    asked = body.responses_create_params
    messages: Messages = []
    if asked.instructions:
        messages.append({"role": "system", "content": asked.instructions})
    if isinstance(asked.input, str):
        messages.append({"role": "user", "content": asked.input})
    else:
        messages += turns_of(asked.input, "responses_create_params.input")
    tools = [_tool(tool, number) for number, tool in enumerate(asked.tools or ())]
    return conversation_of({"messages": joined([*messages, *said]), "tools": tools}, "rollout")


def _tool(given: Any, number: int) -> dict[str, Any]:
    """A function of the Responses API, as the chat API has it."""
    if not isinstance(given, dict) or given.get("type", "function") != "function":
        place = f"responses_create_params.tools.{number}"
        raise ServingError(f"{place}: got {as_json(given)}, wanted a function")
    kept = {key: given[key] for key in _OF_FUNCTION if given.get(key) is not None}
    return {"type": "function", "function": kept}


def turns_of(items: list[Any], where: str) -> Messages:
    """Messages of the Responses API, calls of tools and their results, without reasoning."""
    turns: Messages = []
    for number, item in enumerate(items):
        place = f"{where}.{number}"
        kind = item.get("type") or "message" if isinstance(item, dict) else None
        # Reward models are trained on replies, which have no reasoning in them.
        if kind == "reasoning":
            continue
        read_item = _READ_BY_KIND.get(kind) if isinstance(kind, str) else None
        if read_item is not None:
            turns.append(read_item(item, place))
            continue
        if kind != "message" or not isinstance(item.get("role"), str):
            raise ServingError(
                f"{place}: got {as_json(item)}, wanted a message with role and content"
            )
        role = _ROLES.get(item["role"], item["role"])
        turns.append({"role": role, "content": text_of(item.get("content"), place)})
    return turns


def _call(item: dict[str, Any], place: str) -> Message:
    function = {"name": item.get("name"), "arguments": item.get("arguments")}
    calls = [{"id": item.get("call_id"), "type": "function", "function": function}]
    return {"role": "assistant", "content": None, "tool_calls": calls}


def _result(item: dict[str, Any], place: str) -> Message:
    text = text_of(item.get("output"), place)
    return {"role": "tool", "content": text, "tool_call_id": item.get("call_id")}


_READ_BY_KIND = {"function_call": _call, "function_call_output": _result}


def joined(turns: Messages) -> Messages:
    """With the assistant's messages and calls that follow each other as one."""
    messages: Messages = []
    for role, group in groupby(turns, key=itemgetter("role")):
        run = [*group]
        # The Responses API has text and calls as items of their own, chat templates as one turn.
        messages += [_as_one(run)] if role == "assistant" and len(run) > 1 else run
    return messages


def _as_one(run: Messages) -> Message:
    contents = [turn["content"] for turn in run if turn["content"] is not None]
    calls = [call for turn in run for call in turn.get("tool_calls", ())]
    message = {"role": "assistant", "content": "".join(contents) if contents else None}
    return {**message, "tool_calls": calls} if calls else message


def answer(body: VerifyRequest, scored: ScoredRows, served: Served) -> dict[str, Any]:
    """The rollout with its reward: 1 or 0 where there is a threshold, else as it is."""
    threshold = served.reward_threshold
    if scored.errors:
        reason = scored.errors[0]
        if reason != _NO_REPLY:
            reason = f"the model refuses what the policy said: {reason}"
        return {**_echo(body), **_unmeasured(_REFUSED, reason, is_masked=threshold is None)}
    (reward,) = served.one_reward(scored.rewards)
    components = dict(zip(served.attributes, scored.rewards[0].tolist(), strict=True))
    return {
        **_echo(body),
        "reward": reward if threshold is None else float(reward >= threshold),
        "raw_reward": reward,
        "reward_components": components,
        "truncated": bool(scored.exceeded[0]),
        "contract_hash": scored.contract_hash,
        "model_fingerprint": scored.model_fingerprint,
        "mask_sample": False,
        "failure_kind": None,
        "failure_reason": None,
    }


def refuse(failure: RequestError, body: VerifyRequest | None) -> HttpAnswer:
    """A rollout without a reward; an error where the body is none, or the failure has no kind."""
    kind = failure.kind.gym_kind
    # Any other status than 200 would end a run of Gym for one of its rollouts.
    if body is None or kind is None:
        return refuse_with_detail(failure, body)
    unmeasured = _unmeasured(kind, failure.message, is_masked=True)
    return HttpAnswer(200, {**_echo(body), **unmeasured})


def _echo(body: VerifyRequest) -> dict[str, Any]:
    return body.model_dump(exclude_unset=True)


def _unmeasured(kind: str, reason: str, is_masked: bool) -> dict[str, Any]:
    # Every field of an answer: a rollout that is scored again brings those of the last time along.
    return {
        "reward": 0.0,
        "raw_reward": None,
        "reward_components": {},
        "truncated": False,
        "contract_hash": None,
        "model_fingerprint": None,
        "mask_sample": is_masked,
        "failure_kind": kind,
        "failure_reason": reason,
    }


# ``POST /compare``: replies to one conversation, and a reward for each.
#
# Gym's ``GenRMStrategy`` (``resources_servers/genrm_compare``, August 2026) asks a generative
# judge, which compares pairs of replies. A reward model needs none: each reply is scored alone,
# ``rewards`` are the model's own numbers (the judge's are from 1 to 5), and ``comparison_results``
# is empty. ``conversation_history`` is the messages before the replies; ``response_objs`` are read
# as those of ``/verify``. A ``principle`` is an instruction to a judge, which no reward model
# follows, so it is refused. A reply that cannot be scored refuses the group: a made-up reward in
# its place would train the policy on it.


class CompareRequest(Body):
    """The messages before the replies, and the replies."""

    conversation_history: Items[dict[str, Any]] = Field(
        min_length=1, examples=[[{"role": "user", "content": "What is red?"}]]
    )
    response_objs: Rows[PolicyResponse] = Field(
        min_length=1,
        examples=[[_EXAMPLE]],
    )
    principle: str | None = None


class CompareResponse(Body):
    """A reward for each reply, in the request's order; ``metrics`` are of these rewards."""

    rewards: list[float]
    comparison_results: list[dict[str, Any]]
    metrics: dict[str, float]


def read_compare(body: CompareRequest) -> ScoreRequest:
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


def answer_compare(body: CompareRequest, scored: ScoredRows, served: Served) -> dict[str, Any]:
    """The judge's names of metrics, of the rewards."""
    rewards = served.one_reward(scored.rewards)
    metrics = {
        "mean_individual_score": float(np.mean(rewards)),
        "std_individual_score": float(np.std(rewards)),
        "tiebreak_usage_rate": 0.0,
        "truncated_rate": float(np.mean(scored.exceeded)),
    }
    return {"rewards": rewards, "comparison_results": [], "metrics": metrics}


ROUTES: list[Route[Any]] = [
    Route(
        "/verify",
        "NeMo Gym: a rollout's reward",
        VerifyRequest,
        VerifyResponse,
        read,
        answer,
        refuse,
        with_other_reply=read_with_other_reply,
    ),
    Route(
        "/compare",
        "NeMo Gym: rewards of the replies to one conversation, in place of a generative judge",
        CompareRequest,
        CompareResponse,
        read_compare,
        answer_compare,
        refuse_with_detail,
    ),
]


# The other requests of NeMo Gym to a resources server, as in its ``SimpleResourcesServer``.
#
# ``POST /seed_session`` and ``POST /close_session`` come before and after each rollout. No state is
# kept for one, so they return the identifier that they were given. ``POST /aggregate_metrics``
# comes at a run's end with all rollouts, without their texts. Its answer is the mean, maximum,
# minimum, median and standard deviation of each number in them, overall and for each task, under
# Gym's names; masked rollouts are only counted. ``GET /reverify_mode``: a rollout may be scored
# again at any time. If Gym observes its rollouts, all paths begin with ``/ng-rollout/ROLLOUT``,
# which is removed.

_TASK = "_ng_task_index"
_ROLLOUT = "_ng_rollout_index"
_MOST_NAMES = 1000  # of numbers; a run has dozens
_MOST_IN_PYTHON = 64
_LARGEST = sys.float_info.max
_OWN = "_ng_"  # what begins so is Gym's own, and no measurement
_SESSION = "resources_session_id"
# Before the paths of observed rollouts: ROLLOUT_ID_PATTERN of nemo_gym/rollout_correlation.py.
OF_ROLLOUT = re.compile(r"^/ng-rollout/[A-Za-z0-9][A-Za-z0-9._-]*(?=/)")


class SessionRequest(Body):
    """An identifier, where an environment server gives one."""

    resources_session_id: str | None = None


class AggregateRequest(Body):
    """All rollouts of a run, without what was asked and said."""

    verify_responses: Items[dict[str, Any]]


def answer_session(content: bytes) -> HttpAnswer:
    """The identifier, if there is one."""
    body = parse_body(SessionRequest, content)
    known = body.resources_session_id
    return HttpAnswer(200, {} if known is None else {_SESSION: known})


def answer_aggregate(content: bytes) -> HttpAnswer:
    """Metrics by Gym's names."""
    rollouts = parse_body(AggregateRequest, content).verify_responses
    _check_indices(rollouts)
    # A masked rollout has reward 0 as a placeholder, which would lower every mean.
    measured = [each for each in rollouts if not each.get("mask_sample")]
    overall, by_task = _Group(), defaultdict[Any, _Group](_Group)
    for rollout in measured:
        numbers = _numbers(rollout)
        overall.add(numbers)
        by_task[rollout.get(_TASK, 0)].add(numbers)
        if len(overall.columns) > _MOST_NAMES:
            raise ServingError(
                f"verify_responses: got numbers by more than {_MOST_NAMES} names, wanted fewer: "
                "statistics are of each name"
            )
    coverage = _coverage(rollouts, measured, len(by_task))
    groups = [
        {_TASK: task, **group.statistics(), "num_rollouts": group.num_rollouts}
        for task, group in by_task.items()
    ]
    statistics = overall.statistics()
    repeats = {"num_repeats": len({each.get(_ROLLOUT, 0) for each in rollouts})} if measured else {}
    means = {name: value for name, value in statistics.items() if name.startswith("mean/")}
    return HttpAnswer(
        200,
        {
            "group_level_metrics": groups,
            "agent_metrics": {**statistics, **coverage, **repeats},
            "key_metrics": {**means, **coverage},
        },
    )


def answer_reverify_mode(content: bytes) -> HttpAnswer:
    """Nothing is kept from one rollout to the next."""
    return HttpAnswer(200, "stateless")


def _check_indices(rollouts: Sequence[Mapping[str, Any]]) -> None:
    """Raise ServingError for an index of a task or repeat that nothing can be grouped by."""
    for number, rollout in enumerate(rollouts):
        for key in (_TASK, _ROLLOUT):
            index = rollout.get(key)
            if not isinstance(index, int | str | None):
                place = f"verify_responses.{number}.{key}"
                raise ServingError(f"{place}: got {as_json(index)}, wanted an integer or a text")


class _Group:
    """Numbers of the rollouts of one task, or of all, by their names."""

    def __init__(self) -> None:
        self.num_rollouts = 0
        self.columns: dict[str, list[float]] = defaultdict(list)

    def add(self, numbers: Mapping[str, float]) -> None:
        """Add one rollout's numbers."""
        self.num_rollouts += 1
        for name, number in numbers.items():
            self.columns[name].append(number)

    def statistics(self) -> dict[str, float]:
        """Compute statistics of each name, without those that no float holds."""
        return {
            f"{kind}/{name}": value
            for name, column in self.columns.items()
            for kind, value in _statistics(column).items()
            if math.isfinite(value)
        }


def _numbers(rollout: Mapping[str, Any]) -> dict[str, float]:
    """Numbers, and bools, of a rollout that a float can hold, without Gym's own."""
    return {
        name: float(value)
        for name, value in rollout.items()
        # Not math.isfinite, which fails on an integer of more than 308 digits.
        if isinstance(value, (int, float))
        and -_LARGEST <= value <= _LARGEST
        and name[:4] != _OWN
        and name != "mask_sample"
    }


def _statistics(column: list[float]) -> dict[str, float]:
    if len(column) > _MOST_IN_PYTHON:
        return _statistics_of_many(column)
    # A task has a few rollouts: numpy would take twenty times as long.
    count, ordered = len(column), sorted(column)
    low, high = ordered[(count - 1) // 2], ordered[count // 2]
    mean = sum(column) / count
    squares = [(value - mean) * (value - mean) for value in column]
    return {
        "mean": mean,
        "max": ordered[-1],
        "min": ordered[0],
        "median": low if count % 2 else (low + high) / 2,
        "std": math.sqrt(sum(squares) / (count - 1)) if count > 1 else 0.0,
    }


@np.errstate(over="ignore", invalid="ignore")
def _statistics_of_many(column: list[float]) -> dict[str, float]:
    values = np.array(column)
    return {
        "mean": float(values.mean()),
        "max": float(values.max()),
        "min": float(values.min()),
        "median": float(np.median(values)),
        "std": float(values.std(ddof=1)),
    }


def _coverage(
    rollouts: Sequence[Mapping[str, Any]], measured: Sequence[Mapping[str, Any]], tasks: int
) -> dict[str, int]:
    """Counts of masked rollouts; empty if there are none."""
    if len(measured) == len(rollouts):
        return {}
    every_task = {each.get(_TASK, 0) for each in rollouts}
    return {
        "coverage/measured_rollouts": len(measured),
        "coverage/masked_rollouts": len(rollouts) - len(measured),
        "coverage/measured_tasks": tasks,
        "coverage/fully_masked_tasks": len(every_task) - tasks,
    }


PLAIN_ROUTES = [
    PlainRoute("/seed_session", "NeMo Gym: a rollout begins", answer_session),
    PlainRoute("/close_session", "NeMo Gym: a rollout has ended", answer_session),
    PlainRoute(
        "/aggregate_metrics", "NeMo Gym: the metrics of a run", answer_aggregate, is_slow=True
    ),
    PlainRoute(
        "/reverify_mode", "NeMo Gym: rollouts may be scored again", answer_reverify_mode, "GET"
    ),
]
