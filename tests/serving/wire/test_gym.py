"""NeMo Gym's /verify: a rollout back with its reward, or with why it has none."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

pytest.importorskip("pydantic")
from nemo_aligner.errors import ServingError
from nemo_aligner.serving.wire.gym import ROUTES
from nemo_aligner.serving.wire.route import ScoredRequest, Served
from nemo_aligner.serving.wire.types import Failure, FailureKind, ScoreReply

(ROUTE,) = ROUTES
ONE = Served("reward_model", ("reward",), (1.0,))


def said(text: str) -> dict[str, Any]:
    return {
        "id": "m1",
        "type": "message",
        "role": "assistant",
        "content": [{"type": "output_text", "text": text, "annotations": []}],
    }


def rollout(asked: Any, *output: Any, **params: Any) -> dict[str, Any]:
    return {
        "responses_create_params": {"input": asked, "temperature": 0.5, **params},
        "response": {"id": "r1", "model": "policy", "output": list(output)},
        "verifier_metadata": {"task": 7},
    }


def parsed(body: Any) -> Any:
    return ROUTE.parse(json.dumps(body).encode())


def texts(body: Any) -> Any:
    (text,) = ROUTE.read(parsed(body)).texts or ()
    return [(turn["role"], turn["content"]) for turn in text]


def scored(*rewards: float, error: str | None = None) -> ScoredRequest:
    values = np.array([rewards], dtype=np.float32)
    return ScoredRequest(
        ScoreReply(values, np.zeros(1, bool), "cafe"), {0: error} if error is not None else {}
    )


def test_prompt_and_reply_are_one_conversation() -> None:
    assert texts(rollout("What is red?", said("A rose."))) == [
        ("user", "What is red?"),
        ("assistant", "A rose."),
    ]


def test_turns_instructions_and_parts_are_kept_and_reasoning_is_not() -> None:
    asked = [
        {"role": "developer", "content": "Be brief."},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "a"}]},
        said("b"),
        {"role": "user", "content": "c"},
    ]
    thought = {"type": "reasoning", "id": "t", "summary": []}
    body = rollout(asked, thought, said("d "), said("e"), instructions="You judge.")
    assert texts(body) == [
        ("system", "You judge."),
        ("system", "Be brief."),
        ("user", "a"),
        ("assistant", "b"),
        ("user", "c"),
        ("assistant", "d e"),
    ]


def test_a_reply_goes_on_where_the_prompt_ends() -> None:
    asked = [{"role": "user", "content": "a"}, said("Sure: ")]
    assert texts(rollout(asked, said("b"))) == [("user", "a"), ("assistant", "Sure: b")]


@pytest.mark.parametrize("output", [[], [{"type": "reasoning", "id": "t", "summary": []}]])
def test_a_prompts_own_turn_is_no_reply(output: list[Any]) -> None:
    body = rollout([{"role": "user", "content": "a"}, said("earlier")], *output)
    with pytest.raises(ServingError, match="no message of the assistant at its end") as refused:
        texts(body)
    failure = Failure(str(refused.value), FailureKind.bad_request)
    answer = ROUTE.refuse(failure, parsed(body))
    assert (answer.status, answer.content["reward"], answer.content["mask_sample"]) == (
        200,
        0,
        True,
    )
    assert answer.content["failure_kind"] == "reward_model:refused_text"


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (rollout("a"), "response.output: got no message of the assistant"),
        (rollout([], {"role": "user", "content": "b"}), "got no message of the assistant"),
        (rollout("a", {"type": "function_call", "name": "f"}), "response.output.0: got .*message"),
        (rollout([5], said("b")), "responses_create_params.input.0: got 5, wanted a message"),
        (
            rollout("a", {"type": "message", "role": "assistant", "content": [{"refusal": "no"}]}),
            "response.output.0: got .*, wanted a text",
        ),
    ],
)
def test_a_rollout_that_is_no_conversation_is_refused(body, message) -> None:
    with pytest.raises(ServingError, match=message):
        texts(body)


def test_the_request_comes_back_with_its_reward() -> None:
    body = rollout("a", said("b"))
    answer = ROUTE.answer(parsed(body), scored(1.5), ONE)
    assert {name: answer[name] for name in body} == body
    assert (answer["reward"], answer["raw_reward"]) == (1.5, 1.5)
    assert answer["reward_components"] == {"reward": 1.5}
    assert (answer["mask_sample"], answer["failure_kind"], answer["failure_reason"]) == (
        False,
        None,
        None,
    )
    ROUTE.response.model_validate(answer)


@pytest.mark.parametrize(("threshold", "reward"), [(1.5, 1.0), (1.6, 0.0), (None, 1.5)])
def test_from_a_threshold_on_the_reward_is_one(threshold, reward) -> None:
    served = Served("reward_model", ("reward",), (1.0,), threshold)
    answer = ROUTE.answer(parsed(rollout("a", said("b"))), scored(1.5), served)
    assert (answer["reward"], answer["raw_reward"]) == (reward, 1.5)


@pytest.mark.parametrize(("threshold", "masked"), [(None, True), (0.5, False)])
def test_a_refused_reply_is_no_measurement_unless_there_is_a_bar_to_miss(threshold, masked) -> None:
    served = Served("reward_model", ("reward",), (1.0,), threshold)
    answer = ROUTE.answer(parsed(rollout("a", said("b"))), scored(np.nan, error="too long"), served)
    assert (answer["reward"], answer["mask_sample"]) == (0.0, masked)
    assert answer["failure_kind"] == "reward_model:refused_text"
    assert answer["failure_reason"] == "the model refuses what the policy said: too long"


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        (FailureKind.busy, "transport_unreachable"),
        (FailureKind.unreachable, "transport_unreachable"),
        (FailureKind.internal, "verifier_error"),
    ],
)
def test_where_a_server_failed_the_sample_is_masked(kind, name) -> None:
    body = rollout("a", said("b"))
    answer = ROUTE.refuse(Failure("nobody answers", kind), parsed(body))
    assert answer.status == 200
    assert {key: answer.content[key] for key in body} == body
    assert (answer.content["reward"], answer.content["mask_sample"]) == (0.0, True)
    assert answer.content["failure_kind"] == name
    assert answer.content["failure_reason"] == "nobody answers"


def test_what_its_sender_can_mend_is_an_error() -> None:
    """Where there is no rollout to hand back; else a run would end for one of its prompts."""
    failure = Failure("no", FailureKind.bad_request)
    answer = ROUTE.refuse(failure, None)
    assert (answer.status, answer.content) == (400, {"detail": "no"})
    for kind in (FailureKind.bad_request, FailureKind.too_large):
        answer = ROUTE.refuse(Failure("no", kind), parsed(rollout("a", said("b"))))
        found = answer.content
        assert (answer.status, found["mask_sample"], found["reward"]) == (200, True, 0.0)
        assert (found["failure_kind"], found["failure_reason"]) == ("verifier_error", "no")


def test_other_reply_leaves_the_prompt_as_it_is() -> None:
    asked = [{"role": "user", "content": "a"}, said("Sure: ")]
    body = parsed(rollout(asked, said("b"), instructions="You judge."))
    (text,) = ROUTE.with_other_reply(body).texts or ()
    assert [turn["content"] for turn in text] == ["You judge.", "a", "Sure: ."]


def test_items_without_a_type_are_messages() -> None:
    asked = [{"type": None, "role": "user", "content": "a"}, {"role": "user", "content": "b"}]
    assert texts(rollout(asked, {**said("c"), "type": None})) == [
        ("user", "a"),
        ("user", "b"),
        ("assistant", "c"),
    ]
