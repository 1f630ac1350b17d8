"""What every protocol has in common: one reward of several, and texts in OpenAI's parts."""

from __future__ import annotations

import json

import numpy as np
import pytest

pytest.importorskip("pydantic")
from pydantic import ValidationError

from nemo_aligner.errors import ServingError
from nemo_aligner.serving.wire.protocols import ROUTES
from nemo_aligner.serving.wire.route import STATUSES, Served, text_of
from nemo_aligner.serving.wire.types import Failure, FailureKind

TWO = np.array([[0.1, 0.7], [2.0, -4.0]], dtype=np.float32)


def test_one_attribute_is_the_reward_as_it_stands() -> None:
    served = Served("reward_model", ("reward",), (0.5,))
    assert served.one_reward(TWO[:, :1]) == [float(np.float32(0.1)), 2.0]


def test_several_are_added_by_the_contracts_weights() -> None:
    served = Served("reward_model", ("a", "b"), (1.0, 0.5))
    assert served.one_reward(TWO) == [float(np.float32(np.float64(TWO[0, 0]) + TWO[0, 1] / 2)), 0.0]


def test_several_without_weights_are_refused() -> None:
    with pytest.raises(ServingError, match=r"the model has 2 attributes, .*wanted one reward"):
        Served("reward_model", ("a", "b"), None).one_reward(TWO)


def test_a_text_may_come_in_parts() -> None:
    parts = [{"type": "input_text", "text": "a "}, {"type": "text", "text": "b"}]
    assert text_of(parts, "here") == "a b"
    assert text_of("a", "here") == "a"


@pytest.mark.parametrize("content", [None, 5, [{"type": "image_url"}], ["a"], [{"text": None}]])
def test_what_is_no_text_is_refused(content) -> None:
    with pytest.raises(ServingError, match=r"^here: got .*, wanted a text"):
        text_of(content, "here")


def test_every_path_is_served_once() -> None:
    paths = [route.path for route in ROUTES]
    assert sorted(paths) == sorted({*paths})
    assert {*paths} == {"/v1/rewards", "/get_reward", "/classify", "/pooling", "/score", "/verify"}


@pytest.mark.parametrize(
    ("path", "field", "wrong"),
    [
        ("/v1/rewards", "texts", [5] * 1000),
        ("/v1/rewards", "conversations", [[{}] * 1000] * 5),
        ("/v1/rewards", "tokens", [["a"] * 1000] * 5),
        ("/get_reward", "query", [5] * 1000),
        ("/classify", "input", [[None] * 1000] * 5),
        ("/pooling", "messages", [5] * 1000),
        ("/score", "queries", [5] * 1000),
        ("/score", "documents", [5] * 1000),
    ],
)
def test_a_list_is_left_at_its_first_unfit_element(path, field, wrong) -> None:
    (route,) = (each for each in ROUTES if each.path == path)
    body = {"query": ["a"], "queries": "a", "documents": "a"} if path != "/v1/rewards" else {}
    with pytest.raises(ServingError) as caught:
        route.parse(json.dumps({**body, field: wrong}).encode())
    assert isinstance(caught.value.__cause__, ValidationError)
    assert caught.value.__cause__.error_count() <= 6  # one for each form that a list may have


@pytest.mark.parametrize("route", ROUTES, ids=lambda route: route.path)
@pytest.mark.parametrize("kind", FailureKind)
def test_a_failure_before_the_body_was_read_has_its_own_status(route, kind) -> None:
    answer = route.refuse(Failure("the reason", kind), None)
    assert answer.status == STATUSES[kind]
    assert "the reason" in str(answer.content)
