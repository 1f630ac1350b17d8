"""OpenRLHF's /get_reward: a number for each query."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

pytest.importorskip("pydantic")
from nemo_aligner.errors import ServingError
from nemo_aligner.serving.wire.openrlhf import ROUTES
from nemo_aligner.serving.wire.route import ScoredRequest, Served
from nemo_aligner.serving.wire.types import Failure, FailureKind, ScoreReply

(ROUTE,) = ROUTES


def parsed(body: Any) -> Any:
    return ROUTE.parse(json.dumps(body).encode())


def answer(rewards: list[list[float]], served: Served) -> Any:
    reply = ScoreReply(np.array(rewards, dtype=np.float32), np.zeros(len(rewards), bool), "cafe")
    return ROUTE.answer(parsed({"query": ["a"]}), ScoredRequest(reply, {}), served)


def test_queries_are_raw_texts_and_the_rest_has_no_part_in_it() -> None:
    body = {"query": ["a b", "c"], "prompts": ["a", "c"], "labels": [None, "7"], "more": 1}
    assert ROUTE.read(parsed(body)).texts == ["a b", "c"]


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({}, "query: missing, wanted"),
        ({"query": []}, "query: .*at least 1"),
        ({"query": "a"}, "query: .*wanted a list"),
        ({"query": [None]}, "query.0: got null, wanted a text"),
    ],
)
def test_without_texts_it_is_refused(body, message) -> None:
    with pytest.raises(ServingError, match=message):
        parsed(body)


def test_the_answer_is_that_of_its_own_server() -> None:
    one = answer([[1.5], [-2.0]], Served("reward_model", ("reward",), (1.0,)))
    assert one == {"rewards": [1.5, -2.0], "scores": [1.5, -2.0], "extra_logs": {}}


def test_several_attributes_are_one_reward_and_logged_each() -> None:
    two = answer([[1.5, 2.0]], Served("reward_model", ("helpful", "long"), (1.0, 0.25)))
    assert two["rewards"] == two["scores"] == [2.0]
    assert two["extra_logs"] == {"reward_helpful": [1.5], "reward_long": [2.0]}


def test_an_error_is_fastapis() -> None:
    refused = ROUTE.refuse(Failure("row 1: empty", FailureKind.bad_request), None)
    assert (refused.status, refused.content) == (400, {"detail": "row 1: empty"})
