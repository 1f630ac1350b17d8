"""NeMo Gym's requests to a resources server; its ``POST /verify`` scores a rollout.

Shapes follow ``base_resources_server.py`` of nemo-gym 0.7. ``responses_create_params`` is the
prompt: ``instructions``, ``tools``, and ``input``, a string or items of OpenAI's Responses API.
``response.output`` is what the policy generated. The prompt and the output are scored as one
conversation, including function calls and their results. Reasoning items are dropped. A rollout
with a refusal, or with tools that are not functions, cannot be scored. ``principle`` is the
principle by which the reply is rewarded; a model that was trained without principles rejects it.

A rollout without a reward gets reward 0, a ``failure_kind`` of Gym's vocabulary, and a
``failure_reason``. If the servers do not answer, or the rollout could not be scored with any reply,
its 0 does not measure the policy, so ``mask_sample`` excludes it from training. Sometimes the reply
itself is at fault: it is too long, contains the template's special tokens, has arguments that are
not JSON, or is missing because reasoning used up all tokens. Such a rollout is also masked, unless
``gateway.reward_threshold`` is set: then it counts as a failed test, with reward 0.

NeMo RL reads ``mask_sample`` in ``instance_config``, which repeats it. A failure that may be
temporary also has ``_ng_failure_class``: Gym stores such a rollout separately, and runs it again on
resume. ``reply_cut`` is true if the policy stopped at its maximum number of tokens.

The HTTP status is 200 except for a body that is not a rollout, and for a failing model, e.g. one
with NaN rewards, which would fail for every other rollout as well.
"""

from __future__ import annotations

import math
import re
import sys
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from pydantic import ConfigDict, Field

from nemo_aligner.contract.messages import Conversation, Messages, Text, messages_of
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
    locate_errors,
    parse_body,
    read_prompt,
    refuse_with_detail,
)
from nemo_aligner.serving.protocols.responses_api import (
    append_turns,
    check_copies,
    count_shared_turns,
    merge_assistant_turns,
    turns_of,
)
from nemo_aligner.serving.protocols.rewards import list_parts
from nemo_aligner.utils.errors import ServingError

# Gym's failure_kinds.py has no kind for a rejected reply. This kind therefore has the server's name
# as its prefix.
_REFUSED = "reward_model:refused_text"
_NO_REPLY = "response.output: got no message of the assistant at its end, wanted the reply"
_FUNCTION_KEYS = ("name", "description", "parameters", "strict")
# A reply that every contract accepts. A rollout that is rejected even with this reply has a bad
# prompt.
_OTHER_REPLY: Messages = [{"role": "assistant", "content": "."}]
# Prefixes of the fields of an answer with the raw attributes, with the parts of a combined reward,
# and of Gym's fields of a failure (``rollout_collection.py``).
_ATTRIBUTE, _PART, _FAILURE = "attribute/", "part/", "_ng_failure_"
# Prefixes of the kinds of failures that Gym should try again. A rollout without
# ``_ng_failure_class`` is final for Gym.
_RETRIED = ("transport_", "provider_unavailable", "judge_failed")

_EXAMPLE_PART = {"type": "output_text", "text": "A rose."}
_EXAMPLE: dict[str, Any] = {
    "output": [{"type": "message", "role": "assistant", "content": [_EXAMPLE_PART]}]
}


class ResponseParams(Body):
    """The prompt that the policy got, as parameters of OpenAI's Responses API."""

    input: str | list[Any]
    instructions: str | None = None
    tools: list[Any] | None = None


class PolicyResponse(Body):
    """The policy's output, as items of OpenAI's Responses API."""

    output: list[Any]
    incomplete_details: Any = None

    @property
    def is_cut(self) -> bool:
        """True if the policy had to stop at its maximum number of tokens."""
        details = self.incomplete_details
        return isinstance(details, dict) and details.get("reason") == "max_output_tokens"


class VerifyRequest(Body):
    """One rollout: its prompt and output; the answer repeats all further fields."""

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
    principle: str | None = None


class VerifyResponse(Body):
    """The fields of the request, followed by the reward or the reason why there is none.

    ``reward_components`` add up to ``reward``: each attribute times its weight. The attributes
    themselves are further fields, ``attribute/NAME``, of which Gym computes statistics. A gateway
    that combines several rewards has components by part, and the parts in ``part/NAME``. If the
    model rejects the reply, all components are 0: they name what a client's own reward for such a
    reply consists of.
    """

    responses_create_params: ResponseParams
    response: PolicyResponse
    reward: float
    raw_reward: float | None = None
    reward_components: dict[str, float] = Field(default_factory=dict)
    truncated: bool = False
    reply_cut: bool = False
    contract_hash: str | None = None
    model_fingerprint: str | None = None
    mask_sample: bool = False
    instance_config: dict[str, Any] = Field(default_factory=dict)
    failure_kind: str | None = None
    failure_reason: str | None = None


def read(body: VerifyRequest) -> ScoreRequest:
    """Read a rollout; raise ServingError if its prompt has items that are not text."""
    # The reply must be in the response: a prompt may itself end with an assistant's turn.
    reply = turns_of(body.response.output, "response.output")
    if not reply or reply[-1]["role"] != "assistant":
        return ScoreRequest(texts=[], refused={0: _NO_REPLY})
    try:
        return ScoreRequest(texts=[_build_conversation(body, reply)])
    except ServingError as error:
        read_with_other_reply(body)  # raises ServingError if the prompt is also unreadable
        return ScoreRequest(texts=[], refused={0: str(error)})


def read_with_other_reply(body: VerifyRequest) -> ScoreRequest:
    """Build the conversation with the reply ``.`` in place of the policy's reply.

    Every scoring contract accepts this reply. If a rollout is rejected, the front scores it again
    with this reply: if it is rejected again, the prompt is at fault, else the policy's reply.

    Raises:
        ServingError: the prompt has items that are not text.
    """
    return ScoreRequest(texts=[_build_conversation(body, _OTHER_REPLY)])


def _build_conversation(body: VerifyRequest, reply: Messages) -> Text:
    prompt = body.responses_create_params
    messages: Messages = []
    if prompt.instructions:
        messages.append({"role": "system", "content": prompt.instructions})
    if isinstance(prompt.input, str):
        messages.append({"role": "user", "content": prompt.input})
    else:
        messages += turns_of(prompt.input, "responses_create_params.input")
    tools = [_convert_tool(tool, number) for number, tool in enumerate(prompt.tools or ())]
    turns = merge_assistant_turns([*messages, *reply])
    conversation = {"messages": turns, "tools": tools, "principle": body.principle}
    return conversation_of(conversation, "rollout")


def _convert_tool(tool: Any, number: int) -> dict[str, Any]:
    """Convert a function tool from the form of the Responses API to that of the chat API."""
    if not isinstance(tool, dict) or tool.get("type", "function") != "function":
        location = f"responses_create_params.tools.{number}"
        raise ServingError(f"{location}: got {as_json(tool)}, wanted a function")
    function = {key: tool[key] for key in _FUNCTION_KEYS if tool.get(key) is not None}
    return {"type": "function", "function": function}


def answer(body: VerifyRequest, scored: ScoredRows, served: Served) -> dict[str, Any]:
    """Answer the rollout with its reward; with a threshold the reward becomes 1 or 0."""
    threshold = served.reward_threshold
    if scored.errors:
        reason = scored.errors[0]
        if reason != _NO_REPLY:
            reason = f"the reward model rejects the policy's reply: {reason}"
        failure = _answer_failure(body, _REFUSED, reason, is_masked=threshold is None)
        names = () if threshold is not None else _component_names(scored, served)
        return {**failure, "reward_components": dict.fromkeys(names, 0.0)}
    (reward,) = served.one_reward(scored.rewards)
    # With a threshold the reward is not a sum, so it has no components.
    components = {} if threshold is not None else _read_components(scored, served)
    attributes = zip(served.attributes, scored.rewards[0].tolist(), strict=True)
    parts = list_parts(scored)[0].items() if scored.parts is not None else ()
    # Rewards are float32: one of 0.9 is below the float64 number 0.9.
    passed = threshold is not None and np.float32(reward) >= np.float32(threshold)
    return {
        **_echo_fields(body, is_masked=False),
        "reward": reward if threshold is None else float(passed),
        "raw_reward": reward,
        "reward_components": components,
        **{f"{_ATTRIBUTE}{name}": value for name, value in attributes},
        **{f"{_PART}{name}": value for name, value in parts if value is not None},
        "truncated": bool(scored.exceeded[0]),
        "contract_hash": scored.contract_hash,
        "model_fingerprint": scored.model_fingerprint,
        "failure_kind": None,
        "failure_reason": None,
    }


def _read_components(scored: ScoredRows, served: Served) -> dict[str, float]:
    """Return what adds up to the reward of the only row, by part or attribute; else {}."""
    if scored.parts is None:
        return served.components(scored.rewards)[0]
    if scored.components is None:
        return {}
    return dict(zip(scored.part_names, scored.components[0].tolist(), strict=True))


def _component_names(scored: ScoredRows, served: Served) -> Sequence[str]:
    """Return the names of what ``_read_components`` returns for a row that has a reward."""
    if scored.parts is None:
        return served.attributes
    return () if scored.components is None else scored.part_names


def refuse(failure: RequestError, body: VerifyRequest | None) -> HttpAnswer:
    """Answer a rollout with reward 0, or an HTTP error if Gym has no kind for this failure."""
    kind = failure.kind.gym_kind
    # Gym ends a whole run if one rollout gets any status other than 200.
    if body is None or kind is None:
        return refuse_with_detail(failure, body)
    return HttpAnswer(200, _answer_failure(body, kind, failure.message, is_masked=True))


def _echo_fields(body: VerifyRequest, is_masked: bool) -> dict[str, Any]:
    """Return the fields of a rollout, with those of the answer that do not depend on its reward."""
    fields = body.model_dump(exclude_unset=True)
    # A rollout that is scored again still has the attributes, parts and failure of its first
    # answer.
    stale = (_ATTRIBUTE, _PART, _FAILURE)
    config = fields.get("instance_config")
    return {
        **{name: value for name, value in fields.items() if not name.startswith(stale)},
        "reply_cut": body.response.is_cut,
        "mask_sample": is_masked,
        # NeMo RL reads the flag only here.
        "instance_config": {
            **(config if isinstance(config, dict) else {}),
            "mask_sample": is_masked,
        },
    }


def _answer_failure(body: VerifyRequest, kind: str, reason: str, is_masked: bool) -> dict[str, Any]:
    # Set all fields of an answer: a rollout that is scored again still has the fields of its first
    # answer, which must be overwritten.
    return {
        **_echo_fields(body, is_masked),
        "reward": 0.0,
        "raw_reward": None,
        "reward_components": {},
        "truncated": False,
        "contract_hash": None,
        "model_fingerprint": None,
        "failure_kind": kind,
        "failure_reason": reason,
        **({f"{_FAILURE}class": kind} if kind.startswith(_RETRIED) else {}),
    }


# ``POST /compare`` scores several replies to one conversation. Gym's ``GenRMStrategy``
# (``resources_servers/genrm_compare``, August 2026) sends this request to a generative judge, which
# compares pairs of replies. A reward model scores each reply by itself, so ``comparison_results``
# is empty, and ``rewards`` are the model's rewards (a judge gives 1 to 5). A gateway with a judge
# returns the judge's comparisons, and ``parts`` of each reward. ``conversation_history`` has the
# messages before the replies; ``response_objs`` are read like the response of ``/verify``. All
# replies are rewarded by the ``principle``, if there is one; a model that was trained without
# principles rejects it. A rejected reply gets ``refused_reward`` of the server's settings. If that
# is null, the whole group fails, because a made-up reward would train the policy.


class CompareRequest(Body):
    """A request of ``/compare``: the conversation so far, and the replies to score."""

    conversation_history: Items[dict[str, Any]] = Field(
        min_length=1, examples=[[{"role": "user", "content": "What is red?"}]]
    )
    response_objs: Rows[PolicyResponse] = Field(
        min_length=1,
        examples=[[_EXAMPLE]],
    )
    principle: str | None = None


class CompareResponse(Body):
    """A reward for each reply, in the request's order, and statistics of these rewards."""

    rewards: list[float]
    comparison_results: list[dict[str, Any]]
    metrics: dict[str, float]
    parts: list[dict[str, float | None]] | None = None


def read_compare(body: CompareRequest) -> ScoreRequest:
    """Append each reply to the conversation; reject replies that do not form a valid conversation.

    Raises:
        ServingError: an item is not text, or the conversation is at fault, whatever the reply.
    """
    history = turns_of(body.conversation_history, "conversation_history")
    with locate_errors("conversation_history"):
        prompt = read_prompt(merge_assistant_turns(history), principle=body.principle)
    check_copies(messages_of(prompt), count_replies(body))
    texts: list[Text] = []
    refused: dict[int, str] = {}
    for number, response in enumerate(body.response_objs):
        location = f"response_objs.{number}"
        reply = turns_of(response.output, f"{location}.output")
        try:
            texts.append(_append_reply(prompt, reply, location))
        except ServingError as error:
            refused[number] = str(error)
    return ScoreRequest(texts, refused=refused, num_prompt_turns=count_shared_turns(prompt))


def count_replies(body: CompareRequest) -> int:
    """Count the conversations that ``read_compare`` would build."""
    return len(body.response_objs)


def _append_reply(prompt: Messages | Conversation, reply: Messages, location: str) -> Text:
    if not reply or reply[-1]["role"] != "assistant":
        raise ServingError(
            f"{location}.output: got no message of the assistant at its end, wanted the reply"
        )
    return append_turns(prompt, reply, location)


def answer_compare(body: CompareRequest, scored: ScoredRows, served: Served) -> dict[str, Any]:
    """Build the answer: rewards, and metrics under the names that Gym's judge uses.

    Raises:
        ServingError: a reply is rejected, and there is no ``refused_reward``.
    """
    if scored.errors and served.refused_reward is None:
        raise ServingError(scored.errors[min(scored.errors)])
    rewards = served.fill_refused(np.array(served.one_reward(scored.rewards)), scored)
    comparisons = list(scored.comparisons)
    scores = [pair[name] for pair in comparisons for name in ("score_1", "score_2")] or rewards
    ties = [pair["score_1"] == pair["score_2"] for pair in comparisons]
    metrics = {
        "mean_individual_score": float(np.mean(scores)),
        "std_individual_score": float(np.std(scores)),
        "tiebreak_usage_rate": float(np.mean(ties)) if ties else 0.0,
        "truncated_rate": float(np.mean(scored.exceeded)),
    }
    parts = {} if scored.parts is None else {"parts": list_parts(scored)}
    return {"rewards": rewards, "comparison_results": comparisons, "metrics": metrics, **parts}


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
        takes_refused_reward=True,
        count_rows=count_replies,
    ),
]


# NeMo Gym's other requests to a resources server, as in its ``SimpleResourcesServer``.
#
# ``POST /seed_session`` comes before and ``POST /close_session`` after each rollout. This server
# keeps no state for a rollout, so both return the identifier that they got. ``POST
# /aggregate_metrics`` comes at the end of a run with all rollouts, without their text. Its answer
# has the mean, maximum, minimum, median and standard deviation of each number in them, overall and
# per task, under Gym's names; masked rollouts are only counted. ``GET /reverify_mode`` reports that
# a rollout may be scored again at any time. If Gym observes its rollouts, all paths begin with
# ``/ng-rollout/ROLLOUT``, which is removed.

_TASK = "_ng_task_index"
_ROLLOUT = "_ng_rollout_index"
_MOST_NAMES = 1000  # maximum number of numeric fields in a run's rollouts; usually there are dozens
_MOST_IN_PYTHON = 64  # up to this many numbers, Python computes faster than numpy
_LARGEST = sys.float_info.max
_GYM_PREFIX = "_ng_"  # names with this prefix are Gym's internal fields, not measurements
_SESSION = "resources_session_id"
# Prefix of the paths of observed rollouts: ROLLOUT_ID_PATTERN of nemo_gym/rollout_correlation.py.
ROLLOUT_PREFIX = re.compile(r"^/ng-rollout/[A-Za-z0-9][A-Za-z0-9._-]*(?=/)")


class SessionRequest(Body):
    """A request with the identifier of a session, if the environment server assigned one."""

    resources_session_id: str | None = None


class AggregateRequest(Body):
    """All rollouts of a run, without prompts and replies."""

    verify_responses: Items[dict[str, Any]]


def answer_session(content: bytes) -> HttpAnswer:
    """Answer a session request with the session's identifier, if it has one."""
    body = parse_body(SessionRequest, content)
    session = body.resources_session_id
    return HttpAnswer(200, {} if session is None else {_SESSION: session})


def answer_aggregate(content: bytes) -> HttpAnswer:
    """Compute the metrics of a run from its rollouts, under Gym's names.

    The answer has statistics of each number: per task in ``group_level_metrics``, over all rollouts
    in ``agent_metrics``, and the means again in ``key_metrics``. Masked rollouts are only counted.
    """
    rollouts = parse_body(AggregateRequest, content).verify_responses
    _check_indices(rollouts)
    # The reward 0 of a masked rollout is a placeholder, which would lower every mean.
    measured = [rollout for rollout in rollouts if not rollout.get("mask_sample")]
    overall, by_task = _Group(), defaultdict[Any, _Group](_Group)
    for rollout in measured:
        numbers = _read_numbers(rollout)
        overall.add(numbers)
        by_task[rollout.get(_TASK, 0)].add(numbers)
        if len(overall.columns) > _MOST_NAMES:
            raise ServingError(
                f"verify_responses: got numbers by more than {_MOST_NAMES} names, wanted fewer, "
                "because the answer has statistics of each name"
            )
    coverage = _count_masked(rollouts, measured, len(by_task))
    groups = [
        {_TASK: task, **group.statistics(), "num_rollouts": group.num_rollouts}
        for task, group in by_task.items()
    ]
    statistics = overall.statistics()
    indices = {rollout.get(_ROLLOUT, 0) for rollout in rollouts}
    repeats = {"num_repeats": len(indices)} if measured else {}
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
    """Answer ``stateless``: Gym may send any rollout again at any time, to be scored again."""
    return HttpAnswer(200, "stateless")


def _check_indices(rollouts: Sequence[Mapping[str, Any]]) -> None:
    """Raise ServingError if the index of a task or repeat is neither an integer nor a string."""
    for number, rollout in enumerate(rollouts):
        for key in (_TASK, _ROLLOUT):
            index = rollout.get(key)
            if not isinstance(index, int | str | None):
                location = f"verify_responses.{number}.{key}"
                raise ServingError(
                    f"{location}: got {as_json(index)}, wanted an integer or a string"
                )


class _Group:
    """Collects the numeric fields of some rollouts, to compute statistics of each field.

    There is one group for each task, and one for all rollouts of a run.
    """

    def __init__(self) -> None:
        self.num_rollouts = 0
        self.columns: dict[str, list[float]] = defaultdict(list)

    def add(self, numbers: Mapping[str, float]) -> None:
        """Add the numeric fields of one rollout: field name -> number."""
        self.num_rollouts += 1
        for name, number in numbers.items():
            self.columns[name].append(number)

    def statistics(self) -> dict[str, float]:
        """Map ``STATISTIC/FIELD``, e.g. ``mean/reward``, to a number; infinite ones are dropped."""
        return {
            f"{kind}/{name}": value
            for name, column in self.columns.items()
            for kind, value in _compute_statistics(column).items()
            if math.isfinite(value)
        }


def _read_numbers(rollout: Mapping[str, Any]) -> dict[str, float]:
    """Return a rollout's numbers and booleans as floats, without Gym's internal fields."""
    return {
        name: float(value)
        for name, value in rollout.items()
        # Compare instead of calling math.isfinite, which raises for an integer of more than 308
        # digits.
        if isinstance(value, (int, float))
        and -_LARGEST <= value <= _LARGEST
        and name[:4] != _GYM_PREFIX
        and name != "mask_sample"
    }


def _compute_statistics(column: list[float]) -> dict[str, float]:
    if len(column) > _MOST_IN_PYTHON:
        return _compute_statistics_in_numpy(column)
    # Python instead of numpy: a task has a few rollouts, for which numpy takes twenty times as
    # long.
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
def _compute_statistics_in_numpy(column: list[float]) -> dict[str, float]:
    values = np.array(column)
    return {
        "mean": float(values.mean()),
        "max": float(values.max()),
        "min": float(values.min()),
        "median": float(np.median(values)),
        "std": float(values.std(ddof=1)),
    }


def _count_masked(
    rollouts: Sequence[Mapping[str, Any]], measured: Sequence[Mapping[str, Any]], tasks: int
) -> dict[str, int]:
    """Count rollouts and tasks that are measured, and those that are masked (excluded).

    Returns:
        Counts under names that begin with ``coverage/``; empty if no rollout is masked.
    """
    if len(measured) == len(rollouts):
        return {}
    every_task = {rollout.get(_TASK, 0) for rollout in rollouts}
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
