"""vLLM's /classify, /pooling and /score: its bodies, its answers, its errors."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

pytest.importorskip("pydantic")
from nemo_aligner.errors import ServingError
from nemo_aligner.serving.wire.route import ScoredRequest, Served
from nemo_aligner.serving.wire.types import Failure, FailureKind, ScoreReply, ScoreRequest
from nemo_aligner.serving.wire.vllm import ROUTES

CLASSIFY, POOLING, SCORE = ROUTES
SERVED = Served("reward_model", ("helpful", "long"), (1.0, 0.5))


def read(route: Any, **body: Any) -> ScoreRequest:
    return route.read(route.parse(json.dumps(body).encode()))


def answer(route: Any, **body: Any) -> Any:
    rewards = np.array([[1.5, 2.0], [-0.5, -3.0]], dtype=np.float32)
    scored = ScoredRequest(ScoreReply(rewards, np.zeros(2, bool), "cafe"), {})
    return route.answer(route.parse(json.dumps(body).encode()), scored, SERVED)


@pytest.mark.parametrize("route", [CLASSIFY, POOLING])
@pytest.mark.parametrize(
    ("given", "texts", "token_lists"),
    [
        ("a", ["a"], None),
        (["a", "b"], ["a", "b"], None),
        ([1, 2], None, [[1, 2]]),
        ([[1, 2], [3]], None, [[1, 2], [3]]),
    ],
)
def test_every_form_of_input_is_read(route, given, texts, token_lists) -> None:
    request = read(route, model="any", input=given, use_activation=False, user="me")
    assert (request.texts, request.token_lists) == (texts, token_lists)


def test_messages_are_one_conversation() -> None:
    messages = [
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "a"}], "name": None},
        {"role": "assistant", "content": "b"},
    ]
    (conversation,) = read(CLASSIFY, messages=messages).texts or ()
    assert conversation == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b"},
    ]


@pytest.mark.parametrize(
    ("names", "first", "second", "pairs"),
    [
        (("text_1", "text_2"), "a", "b", [("a", "b")]),
        (("queries", "documents"), "a", ["b", "c"], [("a", "b"), ("a", "c")]),
        (("queries", "items"), ["a"], ["b", "c"], [("a", "b"), ("a", "c")]),
        (("data_1", "data_2"), ["a", "b"], ["c", "d"], [("a", "c"), ("b", "d")]),
        (("text_1", "text_2"), {"content": [{"type": "text", "text": "a"}]}, "b", [("a", "b")]),
    ],
)
def test_a_pair_is_a_prompt_and_its_reply(names, first, second, pairs) -> None:
    request = read(SCORE, **dict(zip(names, (first, second), strict=True)))
    assert request.texts == [
        [{"role": "user", "content": prompt}, {"role": "assistant", "content": reply}]
        for prompt, reply in pairs
    ]


@pytest.mark.parametrize(
    ("route", "body", "message"),
    [
        (CLASSIFY, {}, "wanted one of input and messages"),
        (CLASSIFY, {"input": "a", "messages": []}, "wanted one of input and messages"),
        (CLASSIFY, {"input": []}, "input: got nothing"),
        (CLASSIFY, {"input": ["a", 1]}, "input.*: "),
        (CLASSIFY, {"messages": []}, "messages: got none"),
        (CLASSIFY, {"messages": [{"content": "a"}]}, "messages.0: got .*, wanted role and content"),
        (
            CLASSIFY,
            {"messages": [{"role": "assistant", "content": "", "tool_calls": [{}]}]},
            "messages.0: got .*, wanted role and content alone",
        ),
        (CLASSIFY, {"input": "a", "use_activation": True}, "got true, wanted .* no activation$"),
        (
            CLASSIFY,
            {"input": "a", "truncate_prompt_tokens": 5},
            "tokens: got 5, .* scoring contract$",
        ),
        (CLASSIFY, {"input": "a", "add_special_tokens": False}, "add_special_tokens: got false"),
        (POOLING, {"input": "a", "encoding_format": "base64"}, 'encoding_format: got "base64"'),
        (POOLING, {"input": "a", "task": "token_classify"}, 'task: got "token_classify"'),
        (SCORE, {"queries": "a"}, "got queries, wanted queries with documents, or"),
        (SCORE, {"text_1": ["a", "b"], "text_2": ["c"]}, "got 2 and 1, wanted 1 and 1"),
        (SCORE, {"text_1": [], "text_2": ["c"]}, "got 0 and 1, wanted"),
        (SCORE, {"text_1": "a", "text_2": [{"content": [{"type": "image_url"}]}]}, "text_2.0: got"),
        (SCORE, {"text_1": "a", "text_2": "b", "instruction": "c"}, 'instruction: got "c"'),
    ],
)
def test_what_cannot_be_scored_as_it_is_asked_for_is_refused(route, body, message) -> None:
    with pytest.raises(ServingError, match=message):
        read(route, **body)


@pytest.mark.parametrize(
    "field",
    [
        {"use_activation": None},
        {"activation": False},
        {"padding": "do_not_pad"},
        {"add_special_tokens": True},
        {"priority": 0},
        {"encoding_format": "float"},
        {"task": "classify"},
        {"unknown": 1},
    ],
)
def test_what_asks_for_no_other_score_is_taken(field) -> None:
    assert read(POOLING, input="a", **field).texts == ["a"]


def test_classify_has_the_rewards_as_probs() -> None:
    found = answer(CLASSIFY, input=["a", "b"], request_id="mine")
    assert (found["id"], found["object"], found["model"]) == (
        "classify-mine",
        "list",
        "reward_model",
    )
    assert found["data"] == [
        {"index": 0, "label": "long", "probs": [1.5, 2.0], "num_classes": 2},
        {"index": 1, "label": "helpful", "probs": [-0.5, -3.0], "num_classes": 2},
    ]
    assert found["usage"] == {}
    CLASSIFY.response.model_validate(found)


def test_pooling_and_score_have_their_own_rows() -> None:
    pooled = answer(POOLING, input=[[1, 2], [3]])
    assert pooled["data"][1] == {"index": 1, "object": "pooling", "data": [-0.5, -3.0]}
    assert pooled["usage"] == {"prompt_tokens": 3, "total_tokens": 3}
    scored = answer(SCORE, text_1="a", text_2=["b", "c"])
    assert scored["data"] == [
        {"index": 0, "object": "score", "score": 2.5},
        {"index": 1, "object": "score", "score": -2.0},
    ]
    for found, route in ((pooled, POOLING), (scored, SCORE)):
        route.response.model_validate(found)


def test_errors_are_vllms() -> None:
    refused = CLASSIFY.refuse(Failure("why", FailureKind.busy), None)
    assert refused.status == 503
    assert refused.content == {
        "error": {"message": "why", "type": "ServiceUnavailableError", "param": None, "code": 503}
    }


def test_activation_is_refused_by_each_of_its_names() -> None:
    for name in ("use_activation", "activation", "softmax", "normalize"):
        assert read(POOLING, input="a", **{name: False}).texts == ["a"]
        for route in (CLASSIFY, POOLING):
            with pytest.raises(ServingError, match=f"{name}: got true"):
                read(route, input="a", **{name: True})
