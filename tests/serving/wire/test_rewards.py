"""/v1/rewards: texts, conversations or tokens in; rewards, and reasons for those that are not."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

pytest.importorskip("pydantic")
from nemo_aligner.errors import ServingError
from nemo_aligner.serving.wire.rewards import ROUTES
from nemo_aligner.serving.wire.route import ScoredRequest, Served
from nemo_aligner.serving.wire.types import Failure, FailureKind, ScoreReply

(ROUTE,) = ROUTES
SERVED = Served("reward_model", ("helpfulness", "verbosity"), (1.0, 0.5))
TURNS = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]


def parsed(body: Any) -> Any:
    return ROUTE.parse(json.dumps(body).encode())


@pytest.mark.parametrize(
    ("body", "texts", "token_lists"),
    [
        ({"texts": ["a", "b"]}, ["a", "b"], None),
        ({"conversations": [TURNS]}, [TURNS], None),
        ({"tokens": [[1, 2], [3]]}, None, [[1, 2], [3]]),
    ],
)
def test_each_form_is_what_it_says(body, texts, token_lists) -> None:
    request = ROUTE.read(parsed(body))
    assert (request.texts, request.token_lists) == (texts, token_lists)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({}, "got none of them, wanted one of texts, conversations and tokens"),
        ({"texts": ["a"], "tokens": [[1]]}, "got texts and tokens, wanted one of"),
        ({"texts": []}, "texts: got 0, wanted at least 1"),
        ({"texts": "a"}, 'texts: got "a", wanted a list'),
        ({"texts": [1]}, "texts.0: got 1, wanted a text"),
        ({"tokens": [[1.5]]}, "tokens.0.0: got 1.5, wanted an integer"),
        ({"tokens": [[True]]}, "tokens.0.0: got true, wanted an integer"),
        ({"conversations": [[{"role": "user"}]]}, "conversations.0.0.content: missing, wanted"),
        (
            {"conversations": [[{"role": "nobody", "content": ""}]]},
            "role: got \"nobody\", wanted 'system'",
        ),
        ({"text": ["a"]}, r"text: unknown key; did you mean texts\?$"),
        ({"seed": 1}, "seed: unknown key$"),
        ({"conversations": [[{**TURNS[0], "text": ""}]]}, r"0\.text: unknown key$"),
        ({"texts": "a" * 99}, "a{50}[.]{3}, wanted a list"),
        ([], r"body: got \[\], wanted an object"),
        ({"texts": [1, 2, 3, 4, 5]}, "texts.0: got 1, wanted a text$"),
        (dict.fromkeys("vwxyz", 1), "and 2 more"),
    ],
)
def test_another_body_is_refused_in_a_line(body, message) -> None:
    with pytest.raises(ServingError, match=message) as caught:
        ROUTE.read(parsed(body))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("body", [b"", b"{", b"\xff", b"[" * 100_000, b'{"texts": ["\\ud800"]}'])
def test_what_is_no_json_is_refused(body: bytes) -> None:
    with pytest.raises(ServingError, match="JSON"):
        ROUTE.parse(body)


def test_rows_have_their_rewards_or_their_errors() -> None:
    rewards = np.array([[0.1, -2.0], [np.nan, np.nan]], dtype=np.float32)
    reply = ScoreReply(rewards, np.array([True, False]), "cafe")
    scored = ScoredRequest(reply, {1: "the text is empty"})
    answer = ROUTE.answer(parsed({"texts": ["a", ""]}), scored, SERVED)
    assert answer == {
        "rewards": [[float(np.float32(0.1)), -2.0], None],
        "attributes": ["helpfulness", "verbosity"],
        "contract_hash": "cafe",
        "truncated": [True, False],
        "errors": [{"row": 1, "message": "the text is empty"}],
    }
    assert np.float32(json.loads(json.dumps(answer))["rewards"][0][0]) == rewards[0, 0]
    ROUTE.response.model_validate(answer)


def test_what_a_server_adds_that_shapes_its_rewards_is_shown_by_row() -> None:
    rewards = np.array([[0.5], [np.nan]], dtype=np.float32)
    reply = ScoreReply(
        rewards,
        np.zeros(2, bool),
        "cafe",
        raw_rewards=np.array([[2.0, 3.0], [np.nan, np.nan]]),
        deviation=np.array([[0.25], [np.nan]]),
        passed=np.array([1.0, np.nan]),
    )
    scored = ScoredRequest(reply, {1: "the text is empty"})
    answer = ROUTE.answer(parsed({"texts": ["a", ""]}), scored, SERVED)
    assert answer["raw_rewards"] == [[2.0, 3.0], None]
    assert answer["deviation"] == [[0.25], None]
    assert str(answer["passed"]) == "[True, None]"
    ROUTE.response.model_validate(answer)


@pytest.mark.parametrize(
    ("kind", "status"), [(FailureKind.bad_request, 400), (FailureKind.unreachable, 503)]
)
def test_a_failure_has_its_status_and_its_words(kind: FailureKind, status: int) -> None:
    answer = ROUTE.refuse(Failure("why", kind), None)
    assert answer.status == status
    assert answer.content == {"error": {"kind": kind.value, "message": "why"}}
