"""NeMo Gym's /verify, which returns a rollout with its reward or a reason, and its /compare."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("pydantic")
from nemo_aligner.contract.messages import Conversation
from nemo_aligner.serving.failures import FailureKind, RequestError
from nemo_aligner.serving.protocols import responses_api
from nemo_aligner.serving.protocols.base import Served
from nemo_aligner.serving.protocols.gym import ROUTES, answer_aggregate
from nemo_aligner.utils.errors import ServingError
from tests.serving.protocols.bodies import not_refused, parsed, scored

GYM, COMPARE = ROUTES
THOUGHT = {"type": "reasoning", "id": "t", "summary": []}
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


def texts(body: Any) -> Any:
    (text,) = GYM.read(parsed(GYM, body)).texts or ()
    return [(turn["role"], turn["content"]) for turn in text]


def test_gym_rollout_is_one_conversation_without_reasoning() -> None:
    wanted = [("user", "What is red?"), ("assistant", "A rose.")]
    assert texts(rollout("What is red?", said("A rose."))) == wanted
    asked = [
        {"role": "developer", "content": "Be brief."},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "a"}]},
        said("b"),
        {"role": "user", "content": "c"},
    ]
    body = rollout(asked, THOUGHT, said("d "), said("e"), instructions="You judge.")
    assert texts(body) == [
        ("system", "You judge."),
        ("system", "Be brief."),
        ("user", "a"),
        ("assistant", "b"),
        ("user", "c"),
        ("assistant", "d e"),
    ]
    # A reply that continues the prompt's last turn.
    asked = [{"role": "user", "content": "a"}, said("Sure: ")]
    assert texts(rollout(asked, said("b"))) == [("user", "a"), ("assistant", "Sure: b")]


def test_gym_rollout_with_calls_of_functions_is_one_conversation_with_its_tools() -> None:
    call = {"type": "function_call", "call_id": "1", "name": "f", "arguments": '{"a": 1}'}
    result = {"type": "function_call_output", "call_id": "1", "output": "2"}
    tool = {"type": "function", "name": "f", "parameters": {}, "strict": None}
    output = [said("I ask."), call, {**call, "call_id": "2"}, result, said("b")]
    body = rollout("a", *output, tools=[tool])
    (text,) = GYM.read(parsed(GYM, body)).texts or ()
    function = {"name": "f", "arguments": {"a": 1}}
    calls = [{"id": n, "type": "function", "function": function} for n in ("1", "2")]
    assert text == Conversation(
        [
            {"role": "user", "content": "a"},
            {"role": "assistant", "content": "I ask.", "tool_calls": calls},
            {"role": "tool", "content": "2", "tool_call_id": "1"},
            {"role": "assistant", "content": "b"},
        ],
        [{"type": "function", "function": {"name": "f", "parameters": {}}}],
    )
    # A reply may be a function call.
    (text,) = GYM.read(parsed(GYM, rollout("a", call))).texts or ()
    assert text == [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": None, "tool_calls": calls[:1]},
    ]


def test_gym_rollout_without_a_reply_or_with_broken_calls_is_a_row_that_is_refused() -> None:
    """Rows are rejected for the reply; if the prompt is at fault, the whole request fails."""
    broken = {"type": "function_call", "name": "f", "arguments": "{"}
    result = {"type": "function_call_output", "call_id": "1", "output": "2"}
    asked = [{"role": "user", "content": "a"}, said("earlier")]
    no_reply = "response.output: got no message of the assistant"
    arguments = "rollout: messages[1].tool_calls[0].function.arguments: got '{'"
    cases: list[tuple[Any, str]] = [
        (rollout(asked), no_reply),
        (rollout(asked, THOUGHT), no_reply),
        (rollout([], {"role": "user", "content": "b"}), no_reply),
        (rollout("a", said("b"), result), no_reply),
        (rollout("a", broken), arguments),
    ]
    for body, wanted in cases:
        request = GYM.read(parsed(GYM, body))
        assert request.texts == []
        assert request.refused[0].startswith(wanted), body
    with pytest.raises(ServingError, match=r"arguments: got '\{'"):
        texts(rollout([{"role": "user", "content": "a"}, broken], said("b")))


def test_gym_rollout_that_is_no_conversation_is_refused() -> None:
    refusal = {"type": "message", "role": "assistant", "content": [{"refusal": "no"}]}
    search = {"type": "web_search_call", "status": "completed"}
    wrong = [
        (rollout("a", search), "response.output.0: got .*message"),
        (rollout("a", said("b"), tools=[{"type": "web_search"}]), "tools.0: got .*, wanted a func"),
        (rollout([5], said("b")), "responses_create_params.input.0: got 5, wanted a message"),
        (rollout("a", refusal), "response.output.0: got .*, wanted a string"),
    ]
    assert not not_refused(texts, wrong)


def test_gym_rollout_comes_back_with_its_reward() -> None:
    body = rollout("a", said("b"))
    answer = GYM.answer(parsed(GYM, body), scored([1.5]), ONE)
    assert {name: answer[name] for name in body} == body
    assert (answer["reward"], answer["raw_reward"]) == (1.5, 1.5)
    assert answer["reward_components"] == {"reward": 1.5}
    assert (answer["truncated"], answer["contract_hash"]) == (False, "cafe")
    assert answer["model_fingerprint"] == "f00d"
    failed = [answer[name] for name in ("mask_sample", "failure_kind", "failure_reason")]
    assert failed == [False, None, None]
    assert not is_masked_by_nemo_rl(answer)
    assert "_ng_failure_class" not in answer
    GYM.response.model_validate(answer)


def is_masked_by_nemo_rl(answer: dict[str, Any]) -> bool:
    """As ``_extract_mask_sample_flags`` of nemo_rl/experience/rollouts.py reads a full result."""
    return bool((answer.get("instance_config") or {}).get("mask_sample", False))


def test_rollout_is_masked_where_nemo_rl_looks_and_no_longer_when_it_is_scored_again() -> None:
    """Gym's judge.py writes both flags, and keeps what else ``instance_config`` has."""
    config = {"mask_sample": True, "image": "x"}
    for stale, kept in ((config, {"image": "x"}), (None, {}), ("text", {})):
        body = parsed(GYM, {**rollout("a", said("b")), "instance_config": stale})
        answer = GYM.answer(body, scored([1.5]), ONE)
        assert answer["instance_config"] == {**kept, "mask_sample": False}
        GYM.response.model_validate(answer)
        for answer in (
            GYM.answer(body, scored([np.nan], errors={0: "too long"}), ONE),
            GYM.refuse(RequestError("no", FailureKind.bad_request), body).content,
        ):
            assert answer["instance_config"] == {**kept, "mask_sample": True}
            assert is_masked_by_nemo_rl(answer)
            assert answer["mask_sample"] is True
    # Below a threshold a rejected reply counts.
    served = Served("reward_model", ("reward",), (1.0,), 0.5)
    answer = GYM.answer(parsed(GYM, rollout("a")), scored([np.nan], errors={0: "no"}), served)
    assert not is_masked_by_nemo_rl(answer)


def test_rollout_of_an_outage_is_run_again_on_resume() -> None:
    """Gym's rollout_collection.py puts rows with ``_ng_failure_class`` into its failures file."""
    body = parsed(GYM, rollout("a", said("b")))
    classes = {
        FailureKind.unscored: "judge_failed",
        FailureKind.busy: "transport_unreachable",
        FailureKind.unreachable: "transport_unreachable",
        FailureKind.bad_request: None,
        FailureKind.too_large: None,
    }
    for kind, name in classes.items():
        answer = GYM.refuse(RequestError("no", kind), body).content
        assert answer.get("_ng_failure_class") == name, kind
        assert name in (None, answer["failure_kind"])
    rejected = GYM.answer(body, scored([np.nan], errors={0: "too long"}), ONE)
    assert "_ng_failure_class" not in rejected
    # What Gym sends again has the fields of its failure, which would make it one for ever.
    failed = {"_ng_failure_class": "judge_failed", "_ng_failure_judge_error": "HTTP 401"}
    again = parsed(GYM, {**rollout("a", said("b")), **failed, "_ng_task_index": 3})
    answer = GYM.answer(again, scored([1.5]), ONE)
    assert not failed.keys() & answer.keys()
    assert answer["_ng_task_index"] == 3


def test_answer_says_that_the_policy_was_cut_off() -> None:
    """As Gym's responses_converter.py writes it for a reply at its largest number of tokens."""
    cut, filtered = {"reason": "max_output_tokens"}, {"reason": "content_filter"}
    for details, is_cut in ((cut, True), (filtered, False), (None, False), ("text", False)):
        body = rollout("a", said("b"))
        body["response"] |= {"status": "incomplete", "incomplete_details": details}
        request = parsed(GYM, body)
        for answer in (
            GYM.answer(request, scored([1.5]), ONE),
            GYM.refuse(RequestError("no", FailureKind.busy), request).content,
        ):
            assert answer["reply_cut"] is is_cut, details
            assert answer["response"] == body["response"]
    answer = GYM.answer(
        parsed(GYM, {**rollout("a", said("b")), "reply_cut": True}), scored([1]), ONE
    )
    assert answer["reply_cut"] is False


HELPSTEER = {"help": 3.1, "correct": 2.9, "coherent": 3.3, "complex": 1.7, "verbose": 1.9}


COMPONENT_CASES: list[tuple[dict[str, float], tuple[float, ...], float | None]] = [
    ({"reward": 1.5}, (1.0,), None),
    ({"reward": 1.5}, (1.0,), 1.0),
    ({"help": 2.5, "verbose": 0.7}, (1.0, 1.0), None),
    ({"help": 2.5, "verbose": 0.7}, (1.0, 0.0), None),
    (HELPSTEER, (0.65, 0.8, 0.45, 0.55, -0.4), None),
    ({"help": 1000.1, "verbose": 1000.0}, (1.0, -1.0), None),
]


def answer_with(
    attributes: dict[str, float], weights: tuple[float, ...], threshold: float | None
) -> Any:
    """The answer of ``/verify`` to a rollout whose reply has these attributes."""
    served = Served("reward_model", tuple(attributes), weights, threshold)
    rewards = np.array([[*attributes.values()]], dtype=np.float32)
    request = parsed(GYM, rollout("a", said("b")))
    return GYM.answer(request, replace(scored([0.0]), rewards=rewards), served)


@pytest.mark.parametrize(("attributes", "weights", "threshold"), COMPONENT_CASES)
def test_gym_components_add_up_to_the_reward(
    attributes: dict[str, float], weights: tuple[float, ...], threshold: float | None
) -> None:
    """NeMo RL ends a run where ``math.isclose(..., rel_tol=1e-5, abs_tol=1e-6)`` is false."""
    served = Served("reward_model", tuple(attributes), weights, threshold)
    rewards = np.array([[*attributes.values()]], dtype=np.float32)
    request = parsed(GYM, rollout("a", said("b")))
    answer = GYM.answer(request, replace(scored([0.0]), rewards=rewards), served)
    components = answer["reward_components"]
    assert [answer[f"attribute/{name}"] for name in attributes] == rewards[0].tolist()
    if threshold is not None:
        assert (answer["reward"], components) == (1.0, {})
        return
    assert math.isclose(sum(components.values()), answer["reward"], rel_tol=1e-9, abs_tol=1e-9)
    for (name, value), weight in zip(attributes.items(), weights, strict=True):
        assert math.isclose(components[name], weight * value, rel_tol=1e-5, abs_tol=1e-4)
    # The answer to a rollout that is scored again has no attribute of the first answer.
    again = parsed(GYM, {**rollout("a", said("b")), "attribute/gone": 1.0})
    assert "attribute/gone" not in GYM.answer(
        again, replace(scored([0.0]), rewards=rewards), served
    )


def test_gym_reward_is_one_from_a_threshold_on_and_nothing_for_a_refused_reply() -> None:
    request = parsed(GYM, rollout("a", said("b")))
    near = float(np.float32(0.9))  # below the float64 number 0.9
    for given, threshold, reward in (
        (1.5, 1.5, 1.0),
        (1.5, 1.6, 0.0),
        (1.5, None, 1.5),
        (near, 0.9, 1.0),
    ):
        served = Served("reward_model", ("reward",), (1.0,), threshold)
        answer = GYM.answer(request, scored([given]), served)
        assert (answer["reward"], answer["raw_reward"]) == (reward, given), threshold
    # A rejected reply does not measure the policy, unless there is a threshold to miss.
    for threshold, masked in ((None, True), (0.5, False)):
        served = Served("reward_model", ("reward",), (1.0,), threshold)
        answer = GYM.answer(request, scored([np.nan], errors={0: "too long"}), served)
        assert (answer["reward"], answer["mask_sample"]) == (0.0, masked), threshold
        assert answer["failure_kind"] == "reward_model:refused_text"
        assert answer["reward_components"] == ({"reward": 0.0} if masked else {})
        wanted = "the reward model rejects the policy's reply: too long"
        assert answer["failure_reason"] == wanted


def test_gym_sample_is_masked_where_a_server_failed_and_an_error_where_its_sender_did() -> None:
    body = rollout("a", said("b"))
    names = {
        FailureKind.unscored: "judge_failed",
        FailureKind.busy: "transport_unreachable",
        FailureKind.unreachable: "transport_unreachable",
    }
    for kind, name in names.items():
        answer = GYM.refuse(RequestError("nobody answers", kind), parsed(GYM, body))
        assert answer.status == 200
        assert {key: answer.content[key] for key in body} == body
        assert (answer.content["reward"], answer.content["mask_sample"]) == (0.0, True)
        failed = (answer.content["failure_kind"], answer.content["failure_reason"])
        assert failed == (name, "nobody answers")
    # A model with NaN rewards is an error, and gives no reward 0.
    failure = RequestError("row 0: the model's reward is not a finite number", FailureKind.internal)
    answer = GYM.refuse(failure, parsed(GYM, body))
    assert (answer.status, answer.content) == (500, {"detail": failure.message})


def test_what_its_sender_can_mend_is_an_error() -> None:
    """Only if there is no rollout to return; otherwise a run would end for one prompt."""
    failure = RequestError("no", FailureKind.bad_request)
    answer = GYM.refuse(failure, None)
    assert (answer.status, answer.content) == (400, {"detail": "no"})
    for kind in (FailureKind.bad_request, FailureKind.too_large):
        answer = GYM.refuse(RequestError("no", kind), parsed(GYM, rollout("a", said("b"))))
        found = answer.content
        assert (answer.status, found["mask_sample"], found["reward"]) == (200, True, 0.0)
        assert (found["failure_kind"], found["failure_reason"]) == ("verifier_error", "no")


def test_other_reply_leaves_the_prompt_as_it_is() -> None:
    asked = [{"role": "user", "content": "a"}, said("Sure: ")]
    body = parsed(GYM, rollout(asked, said("b"), instructions="You judge."))
    (text,) = GYM.with_other_reply(body).texts or ()
    assert [turn["content"] for turn in text] == ["You judge.", "a", "Sure: ."]


def test_items_without_a_type_are_messages() -> None:
    asked = [{"type": None, "role": "user", "content": "a"}, {"role": "user", "content": "b"}]
    assert texts(rollout(asked, {**said("c"), "type": None})) == [
        ("user", "a"),
        ("user", "b"),
        ("assistant", "c"),
    ]


def comparison(*replies: Any, **more: Any) -> dict[str, Any]:
    """What GenRMStrategy of Gym's comparison_strategies.py posts."""
    asked = [{"role": "developer", "content": "Be brief."}, {"role": "user", "content": "a"}]
    outputs = [{"id": "r", "output": [THOUGHT, reply]} for reply in replies]
    return {"conversation_history": asked, "response_objs": outputs, **more}


def test_compare_scores_each_reply_to_the_conversation_alone() -> None:
    body = comparison(said("b"), said("c"), principle=None)
    asked = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "a"}]
    assert COMPARE.read(parsed(COMPARE, body)).texts == [
        [*asked, {"role": "assistant", "content": reply}] for reply in ("b", "c")
    ]
    served = Served("reward_model", ("helpful", "long"), (1.0, 0.25))
    found = COMPARE.answer(parsed(COMPARE, body), scored([1.5, 2.0], [3.0, 4.0]), served)
    COMPARE.response.model_validate(found)
    assert found == {
        "rewards": [2.0, 4.0],
        "comparison_results": [],
        "metrics": {
            "mean_individual_score": 3.0,
            "std_individual_score": 1.0,
            "tiebreak_usage_rate": 0.0,
            "truncated_rate": 0.0,
        },
    }


def test_replies_share_the_messages_of_their_conversation(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    call = {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"}
    body = comparison(said("b"), call, said("c"))
    body["conversation_history"] += [said("I ask."), call]
    request = COMPARE.read(parsed(COMPARE, body))
    texts = request.texts or []
    assert len({id(turn) for text in texts for turn in text[: request.num_prompt_turns]}) == 2
    # Each reply continues the last turn, whose call is read only once.
    assert [turn["content"] for *_, turn in texts] == ["I ask.b", "I ask.", "I ask.c"]
    assert [len(turn["tool_calls"]) for *_, turn in texts] == [1, 2, 1]
    assert len({id(turn["tool_calls"][0]) for *_, turn in texts}) == 1
    # The lists of messages, and the last turn, are not shared: 3 turns, 6 characters, 1 call.
    monkeypatch.setattr(responses_api, "_MOST_COPIED", 3 * 10)
    COMPARE.read(parsed(COMPARE, body))
    monkeypatch.setattr(responses_api, "_MOST_COPIED", 3 * 10 - 1)
    with pytest.raises(RequestError, match=r"got 3 replies to a .*history of 3 turns") as caught:
        COMPARE.read(parsed(COMPARE, body))
    assert caught.value.kind is FailureKind.too_large
    body["conversation_history"] = [THOUGHT]
    assert COMPARE.read(parsed(COMPARE, body)).num_prompt_turns == 0


def test_principle_goes_with_every_reply() -> None:
    """Gym's genrm_compare sends it in /compare, and its agents in /verify."""
    body = comparison(said("b"), said("c"), principle="be kind")
    found = COMPARE.read(parsed(COMPARE, body)).texts or []
    assert [text.principle for text in found] == ["be kind"] * 2
    assert [text.messages[-1]["content"] for text in found] == ["b", "c"]
    body = {**rollout("a", said("b")), "principle": "be kind"}
    for read in (GYM.read, GYM.with_other_reply):
        (text,) = read(parsed(GYM, body)).texts or ()
        assert text.principle == "be kind"
    for principle in (None, ""):
        (text,) = GYM.read(parsed(GYM, {**body, "principle": principle})).texts or ()
        assert isinstance(text, list)
    wrong = [({**body, "principle": 1}, "principle: got 1, wanted a string")]
    assert not not_refused(lambda body: GYM.read(parsed(GYM, body)), wrong)


def test_compare_refuses_a_principle_that_is_no_text_and_a_reply_without_text() -> None:
    image = {"role": "assistant", "content": [{"type": "output_image"}]}
    no_history = {**comparison(said("b")), "conversation_history": []}
    wrong: list[tuple[Any, str]] = [
        (comparison(said("b"), principle=["a"]), "principle: got .*wanted a string"),
        (comparison(), "response_objs: got 0, wanted at least 1"),
        (no_history, "conversation_history: got 0, wanted at least 1"),
        (comparison(image), "response_objs.0.output.1: got .*wanted a string"),
    ]
    assert not not_refused(lambda body: COMPARE.read(parsed(COMPARE, body)), wrong)
    refused = COMPARE.refuse(RequestError("row 1: why", FailureKind.bad_request), None)
    assert (refused.status, refused.content) == (400, {"detail": "row 1: why"})


def test_compare_gives_a_reply_that_cannot_be_scored_the_reward_that_is_set_for_it() -> None:
    """A reply that is all reasoning, or has broken arguments, costs its group nothing."""
    broken = {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{"}
    no_reply = "response_objs.1.output: got no message of the assistant at its end, wanted the rep"
    arguments = "response_objs.1: messages[2].tool_calls[0].function.arguments: got '{'"
    for reply, reason in ((THOUGHT, no_reply), (broken, arguments)):
        body = parsed(COMPARE, comparison(said("b"), reply, said("c")))
        request = COMPARE.read(body)
        assert [text[-1]["content"] for text in request.texts or ()] == ["b", "c"]
        assert [*request.refused] == [1]
        assert request.refused[1].startswith(reason)
        rows = scored([1.5], [np.nan], [3.0], errors=dict(request.refused))
        served = replace(ONE, refused_reward=-5.0)
        found = COMPARE.answer(body, rows, served)
        COMPARE.response.model_validate(found)
        assert found["rewards"] == [1.5, -5.0, 3.0]
        assert found["metrics"]["mean_individual_score"] == pytest.approx(-0.5 / 3)
        with pytest.raises(ServingError) as caught:
            COMPARE.answer(body, rows, ONE)
        assert str(caught.value).startswith(reason)
    # The conversation is at fault, whatever the reply.
    body = comparison(said("b"), THOUGHT)
    body["conversation_history"].append(broken)
    wrong = [(body, r"conversation_history: messages\[2\].tool_calls\[0\].function.arguments: got")]
    assert not not_refused(lambda body: COMPARE.read(parsed(COMPARE, body)), wrong)


def aggregated(rollouts: list[dict[str, Any]]) -> dict[str, Any]:
    return answer_aggregate(json.dumps({"verify_responses": rollouts}).encode()).content


@pytest.mark.parametrize("count", [1, 2, 64, 65, 1000])
def test_statistics_of_a_task_are_numpys_however_many_rollouts_it_has(count: int) -> None:
    values = np.random.default_rng(count).normal(3.0, 2.0, count)
    found = aggregated([{"_ng_task_index": 7, "reward": value} for value in values])
    (group,) = found["group_level_metrics"]
    assert group == {
        "_ng_task_index": 7,
        "mean/reward": pytest.approx(values.mean(), rel=1e-12),
        "max/reward": values.max(),
        "min/reward": values.min(),
        "median/reward": pytest.approx(np.median(values), rel=1e-12),
        "std/reward": pytest.approx(values.std(ddof=1) if count > 1 else 0.0, rel=1e-12),
        "num_rollouts": count,
    }


def test_statistics_that_no_float_holds_are_left_out() -> None:
    huge, beyond = 1.7e308, 10**400
    for count in (2, 100):
        found = aggregated([{"a": huge, "b": beyond, "c": True, "_ng_d": 1}] * count)
        assert found["agent_metrics"] == {
            **{f"{kind}/a": huge for kind in ("max", "min")},
            **{f"{kind}/c": 1.0 for kind in ("mean", "max", "min", "median")},
            "std/c": 0.0,
            "num_repeats": 1,
        }


def test_numbers_by_endless_names_are_refused() -> None:
    thousand = [{f"name {row % 1000}": 1.0} for row in range(2000)]
    assert len(aggregated(thousand)["key_metrics"]) == 1000
    with pytest.raises(ServingError, match="verify_responses: got numbers by more than 1000 names"):
        aggregated([*thousand, {"another": 1.0}])
